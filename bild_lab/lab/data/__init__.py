"""Datasets: reading their rows and making examples of them."""

from bild_lab.lab.data.examples import DatasetSpec, Example, load_examples

__all__ = ["DatasetSpec", "Example", "load_examples"]
