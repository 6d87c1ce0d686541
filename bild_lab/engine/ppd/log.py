"""What the pipeline did for one text, in layer-time units."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PipelineLog:
    """Counted as layers are run, for comparison with Theorem 4.1 of PPD.

    matches: of every token but the text's last, whether its successor was among the candidates. latency:
    layers run one after another by the current token. compute: those, and the layers of every candidate.
    concurrent: the part of the latency during which candidates could run beside.
    """

    layers: int
    exit_layer: int
    top_k: int
    matches: list[bool] = field(default_factory=list)
    latency: int = 0
    compute: int = 0
    concurrent: int = 0

    def alone(self, layers: int) -> None:
        """The current token went through so many layers, up to its exit."""
        self.latency += layers
        self.compute += layers

    def together(self, layers: int, candidates: int) -> None:
        """It went through the rest, and beside it each candidate through as many."""
        self.latency += layers
        self.concurrent += layers
        self.compute += layers * (1 + candidates)
