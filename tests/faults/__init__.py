"""Sweeps that are killed, starved, interrupted and run at once, for real: what was finished
stays.
"""
