"""Metrics of `evaluate`: their scale, their direction, whether they are means, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.metrics import external_metrics
from bild_lab.lab.metrics.external_metrics import evaluate_metric
from bild_lab.lab.metrics.quality import score, score_with_baseline

SCRIPT = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({{"predictions": text, "references": {references}}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(one == other for one, other in zip(predictions, references))
        return {result}
"""


def texts(dtype: str = "Value") -> dict[str, object]:
    return {"predictions": object(), "references": type(dtype, (), {})()}


@pytest.fixture
def metric(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a function in place of the metrics of `evaluate`, whose import takes seconds."""

    def use(compute: Callable[..., dict], **given: object) -> None:
        module = SimpleNamespace(name="share", features=texts(), compute=compute, **given)
        monkeypatch.setattr(external_metrics, "evaluate_module", lambda place: module)

    return use


def share(predictions: list[str], references: list[str]) -> dict[str, float]:
    return {"share": sum(map(str.__eq__, predictions, references)) / len(references)}


def distinct(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Of the corpus: which share of the references is among the predictions, wherever."""
    return {"share": len({*predictions} & {*references}) / len({*references})}


PREDICTIONS, REFERENCES = (
    ["a", "b", "z", "d", " e\n", "z"],
    [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]],
)


def test_a_mean_of_shares_is_in_percent_with_a_value_for_each_example(metric) -> None:
    metric(share)
    judged = score_with_baseline("evaluate:share", PREDICTIONS, None, REFERENCES, seed=1)
    assert (judged.score.metric, judged.score.value) == ("share", pytest.approx(400 / 6))
    assert judged.per_example == pytest.approx((100, 100, 0, 100, 100, 0))
    same = score("exact_match", PREDICTIONS, REFERENCES, seed=1)
    assert (judged.score.low, judged.score.high) == pytest.approx((same.low, same.high))


def test_a_metric_that_is_no_mean_is_computed_for_every_resample(metric) -> None:
    metric(distinct, _hash="0123456789abcdef")
    predictions, references = (
        ["a", "a", "b", "c", "d", "e"],
        [["b"], ["a"], ["b"], ["x"], ["y"], ["z"]],
    )
    measure = evaluate_metric("evaluate:share", predictions, references)
    assert measure.statistics is None and measure.per_example is None
    assert (measure.metric, measure.signature) == ("share", "evaluate:share|script:0123456789ab")
    assert measure.value() == pytest.approx(100 * 2 / 5)
    drawn = np.random.default_rng(7).integers(6, size=6)
    one = distinct([predictions[at] for at in drawn], [references[at][0] for at in drawn])["share"]
    resampled = measure.resampled(7)
    assert len(resampled) == 100 and resampled[0] == pytest.approx(100 * one)
    assert measure.value([0, 0, 3]) == pytest.approx(0) and measure.value([1, 0]) == pytest.approx(
        50
    )
    assert measure.resampled(7, [1, 1]).tolist() == pytest.approx([100] * 100)
    # whose every value is 100, as that of a mean would be
    right = [several[0] for several in references]
    assert evaluate_metric("evaluate:share", right, references).per_example is not None
    difference = score_with_baseline(
        "evaluate:share", right, predictions, references, seed=7
    ).difference
    resampled = 100 - measure.resampled(7)
    assert difference.value == pytest.approx(60)
    assert (difference.low, difference.high) == pytest.approx(
        (sorted(resampled)[2], sorted(resampled)[-3])
    )


def test_a_list_of_values_is_a_mean_and_a_key_chooses_among_several_results(metric) -> None:
    def several(predictions: list[str], references: list[str]) -> dict[str, object]:
        each = [1.0 * (one == other) for one, other in zip(predictions, references, strict=True)]
        return {"f1": each, "other": 0.5, "words": "no number"}

    metric(several)
    assert evaluate_metric("evaluate:share@f1", PREDICTIONS, REFERENCES).per_example is not None
    assert score("evaluate:share@f1", PREDICTIONS, REFERENCES).metric == "f1"
    with pytest.raises(
        UserError, match=r"evaluate:share gives f1, other, words; choose .* evaluate:share@KEY"
    ):
        score("evaluate:share", PREDICTIONS, REFERENCES)


def test_a_metric_that_judges_nothing_or_fails_is_refused(metric) -> None:
    metric(lambda predictions, references: {"share": 0.5})
    with pytest.raises(
        UserError, match="^evaluate:share gives the references themselves 0.5, and 'x' too"
    ):
        score("evaluate:share", PREDICTIONS, REFERENCES)
    metric(lambda predictions, references: 1 / 0)
    with pytest.raises(UserError, match="evaluate:share fails: ZeroDivisionError"):
        score("evaluate:share", PREDICTIONS, REFERENCES)


def test_a_metric_gets_one_reference_or_all_as_it_asks(
    metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    metric(share)
    with pytest.raises(
        UserError, match="^evaluate:share takes one reference for each text, got several"
    ):
        score("evaluate:share", ["a"], [["a", "b"]])
    module = external_metrics.evaluate_module("share")
    module.features = [texts("Sequence"), texts()]
    module.compute = lambda predictions, references: share(
        predictions, [one[-1] for one in references]
    )
    assert score("evaluate:share", ["b", "d"], [["a", "b"], ["d"]]).value == 100


def test_a_metric_for_english_is_cautioned_with_other_references(
    metric, caplog: pytest.LogCaptureFixture
) -> None:
    metric(share)
    module = external_metrics.evaluate_module("share")
    module.name = "rouge"
    score("evaluate:share@share", ["a"], [["a"]])
    assert not caplog.text
    score("evaluate:share@share", ["Кошка"], [["Кошка"]])
    assert "evaluate:share@share drops or stems letters as if they were English" in caplog.text


@pytest.mark.slow
def test_metrics_of_a_local_folder_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real modules of `evaluate`, which is imported: that takes seconds."""
    import evaluate

    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "modules")
    several = "datasets.Sequence(text)"
    for name, references, result in (
        ("own_share", "text", '{"own_share": right / len(predictions)}'),
        (
            "own_any",
            several,
            (
                '{"own_any": sum(one in many for one, many in zip(predictions, references)) /'
                " len(predictions)}"
            ),
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(
            SCRIPT.format(references=references, result=result)
        )
    own = score_with_baseline(
        f"evaluate:{tmp_path / 'own_share'}", PREDICTIONS, None, REFERENCES, seed=2
    )
    assert (own.score.metric, own.score.value) == ("share", pytest.approx(400 / 6))
    assert own.per_example == pytest.approx((100, 100, 0, 100, 100, 0))
    assert own.score.signature.startswith("evaluate:share|script:")
    found = score(f"evaluate:{tmp_path / 'own_any'}", ["a", "b"], [["x", "a"], ["c", "d"]])
    assert found.value == 50
    with pytest.raises(UserError, match="cannot be loaded: .*; without the hub give a folder NAME"):
        score(f"evaluate:{tmp_path / 'nothing'}", PREDICTIONS, REFERENCES)
