"""Tests of the figures, the report and the tables."""
