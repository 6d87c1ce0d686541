"""Quality of outputs: BLEU, ROUGE and agreement with a baseline, with bootstrap intervals."""

from bild_lab.lab.metrics.quality import METRICS, Difference, Score, compare, score, score_pool

__all__ = ["METRICS", "Difference", "Score", "compare", "score", "score_pool"]
