"""Calibration data: a model's greedy answers to a dataset, for a drafter or a small module to learn (BiLD §3.5.1)."""
