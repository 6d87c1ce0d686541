"""Drafts fitted to a machine: the tree or window with the most expected tokens per second there."""
