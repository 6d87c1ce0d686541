"""Searching knobs on validation data."""
