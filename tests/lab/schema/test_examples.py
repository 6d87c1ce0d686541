"""What is stored of every example: the same lines as ever, whatever a method records of its
rounds.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from bild_lab.engine.trace import Round, Trace
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.measure.certificate import TIE, Certificate
from bild_lab.lab.measure.score import measured_examples, measured_round, with_trace
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.schema.examples import MeasuredExample, MeasuredRound, read_examples
from bild_lab.lab.store.records import Sweep
from tests.report.sample import sample_example, sample_result

STATS = {"fallback": True, "confidence": (0.91234567, 0.4), "distance": (0.12, math.inf)}
ROUND = Round((3, 4), 1, 9, 2, stats=STATS)


def test_a_round_keeps_what_was_recorded_to_four_digits() -> None:
    assert measured_round(ROUND).statistics == {
        "confidence": [0.9123, 0.4],
        "distance": [0.12, math.inf],
    }
    assert measured_round(
        replace(ROUND, stats={"confidence": (), "distance": (), "exit_layer": 3})
    ).statistics == {"exit_layer": 3}
    whole = {"latency_units": 123456, "lane": "second"}
    assert measured_round(replace(ROUND, stats={**whole, "matched": None})).statistics == whole


def test_a_round_is_read_as_it_is_stored() -> None:
    stored = measured_round(ROUND).to_json()
    assert stored["fallback"] is True and stored["confidence"] == [0.9123, 0.4]
    again = MeasuredRound.from_json(json.loads(json.dumps(stored)))
    assert again == replace(measured_round(ROUND), drafted=[3, 4])


def test_examples_are_stored_with_the_baselines_and_their_certificates() -> None:
    examples = [
        Example("a", "ein", "", ("one",), category="math"),
        Example("b", "zwei", "", ("two",), turn=2),
    ]
    timed = {
        "method": [
            Timed([3, 9], [0.1, 0.2], Trace([ROUND])),
            Timed([4], [0.3, 0.4], Trace([ROUND])),
        ],
        "baseline": [Timed([3, 9], [0.5], Trace()), Timed([5], [0.6], Trace())],
    }
    texts = {"method": ["one", "too"], "baseline": ["one", "two"]}
    certificates = [Certificate("equal"), Certificate(TIE, 0, 4, 5)]
    first, second = measured_examples(examples, timed, texts, certificates)
    assert (first.category, first.turn, second.category, second.turn) == ("math", 1, None, 2)
    assert (second.prediction, second.baseline_prediction, second.baseline_token_ids) == (
        "too",
        "two",
        [5],
    )
    assert (second.latency_s, second.baseline_latency_s) == ([0.3, 0.4], [0.6])
    assert (second.certificate["verdict"], second.certificate["position"]) == (TIE, 0)
    assert "turn" not in first.to_json() and second.to_json()["turn"] == 2
    (alone,) = measured_examples(examples[:1], {"method": timed["method"][:1]}, {"method": ["one"]})
    assert alone.baseline_latency_s is None and "baseline_latency_s" not in alone.to_json()
    scored = measured_examples(examples, timed, texts, scores=[{"rouge": 50.0}, {}])
    assert [one.scores for one in scored] == [{"rouge": 50.0}, None]
    assert first.scores is None and first.log_probability is first.baseline_log_probability is None
    likely = {"method": [-1.0, -2.0], "baseline": [-3.0, -4.0]}
    told = measured_examples(examples, timed, texts, log_probabilities=likely)
    assert [(one.log_probability, one.baseline_log_probability) for one in told] == [
        (-1.0, -3.0),
        (-2.0, -4.0),
    ]


def test_a_traced_example_has_the_text_of_every_token_emitted_or_drafted() -> None:
    example = sample_example(token_ids=[3, 9], rounds=[measured_round(ROUND).to_json()])
    spans = [("prefill", 0.0000004, 0.1234567)]
    traced = with_trace(
        example, "ein", spans, lambda tokens: {token: f"<{token}>" for token in tokens}
    )
    assert traced.pieces == {"3": "<3>", "4": "<4>", "9": "<9>"}
    assert traced.spans == (("prefill", 0.0, 0.123457),)
    assert (
        MeasuredExample.from_json(json.loads(json.dumps(traced.to_json()))).pieces == traced.pieces
    )


def test_a_result_that_lies_in_no_folder_has_no_examples() -> None:
    assert read_examples(None) == []


def test_a_text_that_an_engine_failed_to_give_failed_whosever_it_is() -> None:
    told = ({"error": None}, {"error": "timed out"})
    assert not sample_example(reports=told[:1], baseline_reports=told[:1]).failed
    assert sample_example(reports=told).failed and sample_example(baseline_reports=told).failed


def test_signs_that_end_a_line_elsewhere_stay_in_a_text(tmp_path: Path) -> None:
    example = sample_example(prediction="one\u2028two\x85three\n")
    folder = Sweep(tmp_path).write_point("p", "", sample_result("bild", {}, 1.5), [example])
    (again,) = read_examples(folder)
    assert again.prediction == example.prediction
