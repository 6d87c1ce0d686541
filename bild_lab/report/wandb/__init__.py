"""Weights & Biases: runs, panels and reports."""
