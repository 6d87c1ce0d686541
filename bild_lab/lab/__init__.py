"""Measuring: configuration, data, metrics, timing, points, sweeps and their results."""
