"""Numbers printed in the PPD paper: match rates of Vicuna-13B (Yang et al., 2023, Table 1)."""

from __future__ import annotations

from typing import NamedTuple

LAYERS = 40  # of Vicuna-13B
EXIT_LAYERS = (10, 20, 30, 35, 37)
DATASETS = ("SQuAD", "WMT", "CNN/DM")
TOP_KS = (1, 3, 5)


class PrintedRow(NamedTuple):
    """A row of Table 1. trained: each layer has a head of its own ("Y"), or all share the last one's ("N")."""

    dataset: str
    top_k: int
    trained: bool


# percent, at the layers of EXIT_LAYERS
_TABLE_1 = {
    PrintedRow("SQuAD", 1, False): (5.88, 38.90, 62.90, 79.77, 88.01),
    PrintedRow("SQuAD", 1, True): (15.45, 52.81, 72.34, 87.68, 91.67),
    PrintedRow("SQuAD", 3, False): (9.25, 54.04, 77.92, 92.64, 97.67),
    PrintedRow("SQuAD", 3, True): (23.48, 68.37, 87.49, 97.33, 98.91),
    PrintedRow("SQuAD", 5, False): (11.04, 60.15, 83.84, 95.85, 99.08),
    PrintedRow("SQuAD", 5, True): (27.90, 74.15, 92.29, 98.81, 99.62),
    PrintedRow("WMT", 1, False): (2.40, 21.63, 39.69, 68.64, 78.15),
    PrintedRow("WMT", 1, True): (11.06, 29.17, 48.20, 74.84, 82.69),
    PrintedRow("WMT", 3, False): (4.38, 31.69, 61.71, 85.03, 93.53),
    PrintedRow("WMT", 3, True): (14.83, 41.14, 68.50, 89.84, 95.48),
    PrintedRow("WMT", 5, False): (5.57, 37.13, 68.84, 89.54, 96.41),
    PrintedRow("WMT", 5, True): (16.82, 47.84, 75.46, 93.36, 97.67),
    PrintedRow("CNN/DM", 1, False): (7.23, 32.08, 53.07, 68.90, 78.82),
    PrintedRow("CNN/DM", 1, True): (19.02, 43.65, 61.45, 78.46, 84.42),
    PrintedRow("CNN/DM", 3, False): (12.84, 46.36, 68.14, 85.07, 93.81),
    PrintedRow("CNN/DM", 3, True): (27.57, 60.60, 78.55, 93.07, 96.62),
    PrintedRow("CNN/DM", 5, False): (15.21, 52.51, 74.22, 90.04, 96.88),
    PrintedRow("CNN/DM", 5, True): (31.33, 67.33, 84.83, 96.06, 98.40),
}


def match_rate(dataset: str, top_k: int, trained: bool, exit_layer: int) -> float:
    """p̂ of Table 1, in [0, 1]."""
    return _TABLE_1[PrintedRow(dataset, top_k, trained)][EXIT_LAYERS.index(exit_layer)] / 100
