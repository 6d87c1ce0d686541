"""Measures a point: timings, scores, certificates, costs and predictions."""
