"""Whole planes of knobs decoded over a record of the models' scores, and the best of them measured
live.
"""
