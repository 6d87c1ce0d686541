"""Searching knobs on validation."""
