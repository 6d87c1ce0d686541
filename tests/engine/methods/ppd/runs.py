"""What a text costs whose runs are known: a run is a sequence of tokens of which all but the first
were predicted.
"""

from __future__ import annotations

from collections.abc import Sequence


def latency_of_runs(runs: Sequence[int], layers: int, exit_layer: int) -> int:
    """Layer-time units: d̄ℓ + (d − d̄)N for N runs (Appendix D; Eq. 1 at d̄ = d/2)."""
    return exit_layer * sum(runs) + (layers - exit_layer) * len(runs)


def compute_of_runs(runs: Sequence[int], layers: int, exit_layer: int, top_k: int) -> int:
    """Layers that all processes run: (d̄ + k(d − d̄))ℓ + (d − d̄)N (Eq. 5; Eq. 3 at d̄ = d/2)."""
    return latency_of_runs(runs, layers, exit_layer) + top_k * (layers - exit_layer) * sum(runs)
