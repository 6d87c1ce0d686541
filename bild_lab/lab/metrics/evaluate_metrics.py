"""BLEU and ROUGE as `evaluate.Metric`s, with nothing downloaded.

`evaluate.load("sacrebleu")` fetches a script from the hub. Importing this module takes seconds,
since it imports `evaluate`; `bild_lab.lab.metrics.score` computes the same without it.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from bild_lab.lab.metrics.quality import Score, score


def _info(description: str, home: str) -> evaluate.MetricInfo:
    return evaluate.MetricInfo(
        description=description,
        citation="",
        inputs_description="predictions: texts; references: a list of texts for each prediction",
        features=datasets.Features(
            {
                "predictions": datasets.Value("string"),
                "references": datasets.Sequence(datasets.Value("string")),
            }
        ),
        reference_urls=[home],
    )


def _results(quality: Score, headline: str) -> dict[str, Any]:
    return {
        headline: quality.value,
        **quality.extra,
        "low": quality.low,
        "high": quality.high,
        "signature": quality.signature,
    }


class _InMemory(evaluate.Metric):
    """Keeps predictions in memory unless told otherwise, and so writes nothing under the home folder."""

    def __init__(self, keep_in_memory: bool = True, **options: Any) -> None:
        super().__init__(keep_in_memory=keep_in_memory, **options)

    def _build_data_dir(self) -> str:
        # the base class makes the folder in any case, which a read-only home refuses
        return self._data_dir_root if self.keep_in_memory else super()._build_data_dir()


class Bleu(_InMemory):
    """Corpus BLEU by sacrebleu: keys bleu, low, high (95 % bootstrap) and signature."""

    def _info(self) -> evaluate.MetricInfo:
        return _info("Corpus BLEU, 0 to 100, as sacrebleu computes it.", "https://github.com/mjpost/sacrebleu")

    def _compute(self, predictions: list[str], references: list[list[str]], seed: int = 0) -> dict[str, Any]:
        return _results(score("bleu", predictions, references, seed=seed), "bleu")


class Rouge(_InMemory):
    """Mean ROUGE f-measures with stemming: keys rougeL, rouge1, rouge2, rougeLsum; low and high of rougeL."""

    def _info(self) -> evaluate.MetricInfo:
        return _info(
            "ROUGE f-measures, 0 to 100, as rouge_score computes them.",
            "https://github.com/google-research/google-research/tree/master/rouge",
        )

    def _compute(self, predictions: list[str], references: list[list[str]], seed: int = 0) -> dict[str, Any]:
        return _results(score("rouge", predictions, references, seed=seed), "rougeL")
