"""Quality of outputs, for their task or beside a baseline, with bootstrap intervals."""

from bild_lab.lab.metrics.quality import (
    METRICS,
    Difference,
    Judged,
    Score,
    compare,
    judge,
    judge_values,
    require_metric,
    score,
    score_pool,
)
from bild_lab.lab.metrics.scoring import Scoring, cut_text

__all__ = [
    "METRICS",
    "Difference",
    "Judged",
    "Score",
    "Scoring",
    "compare",
    "cut_text",
    "judge",
    "judge_values",
    "require_metric",
    "score",
    "score_pool",
]
