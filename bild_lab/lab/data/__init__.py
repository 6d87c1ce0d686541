"""Datasets: where they come from and the examples made of them."""

from bild_lab.lab.data.examples import DatasetSpec, Example, load_examples

__all__ = ["DatasetSpec", "Example", "load_examples"]
