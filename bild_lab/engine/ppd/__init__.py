"""Predictive pipelined decoding (Yang et al., 2023): theory, simulation, and the pipeline on a machine."""
