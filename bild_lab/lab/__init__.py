"""Measuring: configuration, data, metrics, timing, points, sweeps and results."""
