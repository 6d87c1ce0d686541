"""Measuring latency, and recording the hardware and software that it was measured on."""
