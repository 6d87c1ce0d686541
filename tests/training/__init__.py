"""Tests of bild_lab.training."""
