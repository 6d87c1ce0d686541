"""Trackers of experiments: Weights & Biases and TensorBoard."""
