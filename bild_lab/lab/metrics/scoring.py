"""How a sweep's outputs are scored: by which metrics, and which part of a text counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bild_lab.lab.metrics.quality import Judged, judge

AGREEMENT = "agreement"


@dataclass(frozen=True)
class Scoring:
    """metrics: by their names in the configuration; the first leads. cut: a text that is scored ends before the first
    of these. run_code: whether pass_at_1 may run programs.
    """

    metrics: tuple[str, ...]
    cut: tuple[str, ...] = ()
    run_code: bool = False

    @property
    def lead(self) -> str:
        return self.metrics[0]

    def scored_text(self, metric: str, text: str) -> str:
        """The part of an output that the metric sees; all of it for agreement, which compares outputs themselves."""
        return text if metric == AGREEMENT else cut_text(text, self.cut)

    def judge(
        self,
        predictions: Sequence[str],
        baseline: Sequence[str] | None,
        references: Sequence[Sequence[str]],
        seed: int,
    ) -> Mapping[str, Judged]:
        """Every metric of the outputs, and the paired difference from the baseline's."""
        found = {}
        for metric in self.metrics:
            expected = [[text] for text in baseline or []] if metric == AGREEMENT else references
            ours, theirs = (
                None if texts is None else [self.scored_text(metric, text) for text in texts]
                for texts in (predictions, baseline)
            )
            found[metric] = judge(metric, ours, theirs, expected, seed=seed, run_code=self.run_code)
        return found


def cut_text(text: str, cut: Sequence[str]) -> str:
    """The text before the first of these marks."""
    return text[: min((place for mark in cut if (place := text.find(mark)) >= 0), default=len(text))]
