"""Speculative decoding: draft models, and the rules that accept a draft."""
