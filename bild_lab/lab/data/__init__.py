"""Datasets: reading rows and turning them into examples."""

from bild_lab.lab.data.examples import DatasetSpec, Example, load_examples

__all__ = ["DatasetSpec", "Example", "load_examples"]
