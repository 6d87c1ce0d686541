"""A function of one's own as a metric: its scale, its direction, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from bild_lab.errors import UserError, warn_once
from bild_lab.lab.metrics.quality import metric_sums, score, score_with_baseline
from bild_lab.lab.metrics.text_metrics import metric_named
from bild_lab.screening.guarantee import losses_of

OWN = """
def share(text, references):
    return 100 * len(set(text.split()) & set(references[0].split())) / len(set(references[0].split()))
def begins(text, references):
    return any(text[:1] == one[:1] for one in references)
def wrong(text, references):
    return -1
def nothing(text, references):
    pass
def unknown(text, references):
    return float("nan")
def raises(text, references):
    return len(references[0]) / 0
def f1(text, references):
    return float(text == references[0]) / 2 + 0.5
def percent(text, references):
    return f1(text, references)
def errors(text, references):
    return 0 if text == references[0] else 1
def scaled(text, references):
    return 0.5
percent.scale, errors.scale, scaled.scale = 100, 1, 10
errors.higher_is_better = False
WORD = "text"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_metric.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_metric", raising=False)
    warn_once.cache_clear()


@pytest.mark.usefixtures("own")
def test_a_plain_function_of_ones_own_is_a_metric() -> None:
    found = score_with_baseline("own_metric.share", ["a b", "c"], ["a", "c"], [["a b c d"], ["c"]])
    assert (found.score.metric, found.score.value, found.per_example) == (
        "share",
        75.0,
        (50.0, 100.0),
    )
    assert found.difference.value == 12.5
    assert score("own_metric.begins", ["a b", "c"], [["x", "a"], ["d"]]).value == 50.0
    for name, message in {
        "own_metric.wrong": "the metric wrong must give a number from 0 to 100, got -1 for 'a'; .*scale",
        "own_metric.unknown": "a number from 0 to 100, got nan for 'a'; correct the function$",
        "own_metric.nothing": "a number from 0 to 100, got None for 'a'; correct the function$",
        "own_metric.raises": (
            "the metric raises fails for 'a': ZeroDivisionError: .*; correct the function"
        ),
        "own_metric.scaled": "own_metric.scaled must have scale = 1 or scale = 100, got 10",
        "own_metric.none": (
            "own_metric.none cannot be used .*PYTHONPATH=DIR says where its module lies"
        ),
        "nowhere.function": "nowhere.function cannot be used",
        "own_metric.WORD": "own_metric.WORD cannot be used .it is a str.",
        "os.system": "os.system cannot be used .it belongs to Python itself.",
    }.items():
        with pytest.raises(UserError, match=message):
            score(name, ["a"], [["a"]])


@pytest.mark.usefixtures("own")
def test_a_function_gets_texts_without_white_space_around_them() -> None:
    assert score("own_metric.errors", [" a", "a\n", "\n a"], [["a"]] * 3).value == 100.0


@pytest.mark.usefixtures("own")
def test_a_function_says_its_scale_and_its_direction() -> None:
    found = score("own_metric.errors", ["a", "b", "c", "d"], [["a"], ["b"], ["c"], ["x"]])
    assert (found.metric, found.value) == ("100-errors", 75.0)
    assert score("own_metric.percent", ["a"], [["b"]]).value == 0.5


@pytest.mark.usefixtures("own")
def test_numbers_from_0_to_1_without_a_scale_are_cautioned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    score("own_metric.percent", ["a"], [["a"]])
    score("own_metric.errors", ["a"], [["b"]])
    score("own_metric.begins", ["a"], [["a"]])  # true and false are clear
    assert not caplog.text
    assert score("own_metric.f1", ["a"], [["a"]]).value == 1.0
    assert (
        "the metric f1 gives numbers from 0 to 1" in caplog.text and "f1.scale = 1" in caplog.text
    )


@pytest.mark.usefixtures("own")
def test_a_function_can_be_certified_as_each_text_has_its_loss() -> None:
    assert metric_named("own_metric.share").bounded and not metric_named("bleu").bounded
    pool = metric_sums("own_metric.errors", ["a", "b"], [["a"], ["a"]], False)
    assert losses_of("own_metric.errors", pool, [[0, 0], [1, 0]]).per_text == pytest.approx(
        np.array([[1.0, 0.0]])
    )
