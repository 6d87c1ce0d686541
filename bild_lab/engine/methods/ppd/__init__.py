"""Predictive pipelined decoding (Yang et al., 2023): its theory, and the pipeline on a real
machine.
"""
