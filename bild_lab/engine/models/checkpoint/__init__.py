"""A checkpoint on disk or on the hub: its files, tokens and weights."""
