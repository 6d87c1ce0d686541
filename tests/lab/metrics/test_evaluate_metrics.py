"""The same metrics behind the interface of `evaluate`, with the hub out of reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.lab.metrics import score
from tests.lab.metrics.test_bleu import corpus

PREDICTIONS, REFERENCES = corpus(30, seed=0)


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # read at the first import of evaluate, which no other test does
    monkeypatch.setenv("HF_EVALUATE_OFFLINE", "1")
    from bild_lab.lab.metrics import evaluate_metrics

    return evaluate_metrics


def test_bleu_is_the_score_of_the_package(metrics) -> None:
    quality = score("bleu", PREDICTIONS, REFERENCES, seed=4)
    assert metrics.Bleu().compute(predictions=PREDICTIONS, references=REFERENCES, seed=4) == {
        "bleu": quality.value, "low": quality.low, "high": quality.high, "signature": quality.signature,
    }  # fmt: skip


def test_rouge_is_the_score_of_the_package_and_names_l_and_lsum_apart(metrics) -> None:
    quality = score("rouge", PREDICTIONS, REFERENCES)
    results = metrics.Rouge().compute(predictions=PREDICTIONS, references=REFERENCES)
    assert results["rougeL"] == quality.value
    assert {name: results[name] for name in ("rouge1", "rouge2", "rougeLsum")} == quality.extra


def test_batches_add_up_and_nothing_is_written(metrics, tmp_path: Path) -> None:
    metric = metrics.Bleu(cache_dir=str(tmp_path))
    for start in (0, 10, 20):
        metric.add_batch(predictions=PREDICTIONS[start : start + 10], references=REFERENCES[start : start + 10])
    assert metric.compute()["bleu"] == score("bleu", PREDICTIONS, REFERENCES).value
    assert not list(tmp_path.iterdir())
