"""Quality of outputs, for their task or beside a baseline, with bootstrap intervals."""

from bild_lab.lab.metrics.quality import (
    Difference,
    Judged,
    Score,
    Scoring,
    cut_text,
    judge,
    judge_values,
    score,
    score_pool,
)
from bild_lab.lab.metrics.text_metrics import AGREEMENT, METRICS, metric_named

__all__ = [
    "AGREEMENT",
    "METRICS",
    "Difference",
    "Judged",
    "Score",
    "Scoring",
    "cut_text",
    "judge",
    "judge_values",
    "metric_named",
    "score",
    "score_pool",
]
