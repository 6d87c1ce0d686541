"""The summary of a pipeline: units as executed beside the theorem's, and steps from theory to the
clock.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from bild_lab.engine.trace import Round, Trace
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.prediction import (
    PipelineLog,
    pipeline_log,
    pipeline_summary,
    pipeline_units,
)
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.store.records import Sweep
from bild_lab.lab.store.table import to_row

SHAPE = {"layers": 8, "exit_layer": 6, "top_k": 3}
AHEAD = SHAPE["layers"] - SHAPE["exit_layer"]


def trace_of(matches: list[bool]) -> Trace:
    """A text whose tokens but the last have these matches."""
    rounds = []
    for begun, matched in zip([False, *matches], [*matches, None], strict=True):
        own = SHAPE["layers"] - AHEAD * begun
        units = {
            "latency_units": own,
            "compute_units": own + AHEAD * SHAPE["top_k"],
            "concurrent_units": AHEAD,
        }
        rounds.append(Round(next_token=5, stats={**units, "matched": matched}))
    return Trace(rounds=rounds, stats=dict(SHAPE))


def log_of(matches: list[bool]) -> PipelineLog:
    return pipeline_log(trace_of(matches))


def timed(matches: list[bool] | None, tokens: int, latency_s: float) -> Timed:
    trace = Trace(rounds=[Round(next_token=5)] * tokens) if matches is None else trace_of(matches)
    return Timed([5] * tokens, [latency_s], trace)


def test_units_as_executed_are_the_theorems_at_the_measured_match_rate() -> None:
    logs = [log_of([True, True, False]), log_of([False]), log_of([])]
    units = pipeline_units(logs)
    assert units.match_rate == 0.5
    assert (
        units.latency_units == units.predicted_latency_units == pytest.approx((8 * 7 - 2 * 2) / 7)
    )
    assert (
        units.compute_units
        == units.predicted_compute_units
        == pytest.approx((8 * 7 - 2 * 2 + 3 * 2 * 7) / 7)
    )


def test_each_step_from_theory_to_the_clock_adds_one_thing() -> None:
    """The target alone:

    4 tokens of 8 layers in 0.4 s after a prefill of 0.1 s, so 0.1 s a token.
    """
    # 32 − 3 · 2 = 26 units, of which 8 beside candidates
    method = [timed(([True, True, True]), 4, 0.55)]
    baseline = [timed(None, 4, 0.5)]
    stages = {"prefill": 0.1, "draft": 0.25, "verify": 0.15, "host": 0.05}
    both = {"method": method, "baseline": baseline}
    found = pipeline_summary(both, stages, 10)
    assert found.theorem == pytest.approx(32 / 26)
    assert found.exit == pytest.approx(0.4 / (0.25 + 8 * 0.1 / 8))
    assert found.concurrent == pytest.approx(0.4 / 0.4)
    assert found.host == pytest.approx(0.4 / 0.45)
    assert found.prefill == pytest.approx(0.5 / 0.55)
    # a traced pass on a busy machine
    slower = {stage: 2 * seconds for stage, seconds in stages.items()}
    assert pipeline_summary(both, slower, 10) == found


def test_the_theorems_speedup_is_that_of_the_texts_that_the_steps_after_it_are_of() -> None:
    method = [timed([True, True, True], 4, 0.55), timed([False, False, False], 4, 0.7)]
    baseline = [timed(None, 4, 0.5), timed(None, 4, 0.5)]
    stages = {"prefill": 0.1, "draft": 0.25, "verify": 0.15, "host": 0.05}
    found = pipeline_summary({"method": method, "baseline": baseline}, stages, 1)
    assert found.match_rate == 0.5  # of all texts
    assert found.theorem == pytest.approx(32 / 26)
    assert found.exit == pytest.approx(0.4 / (0.25 + 8 * 0.1 / 8))
    assert found.prefill == pytest.approx(0.5 / 0.55)


def test_other_methods_have_no_such_summary() -> None:
    assert pipeline_summary({"method": [timed(None, 2, 0.5)]}, None, 0) is None


def test_a_point_stores_the_summary_and_the_table_shows_it(
    checkpoints: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "policy=ppd",
        "name=pipeline",
        f"pair.target={checkpoints / 'llama'}",
        "dataset=multi30k",
    ]
    words += [f"dataset.path={data}", "dataset.limit=2", "decoding.max_new_tokens=6"]
    cfg = compose_config([*words, "measure.repeats=1", "measure.warmup=0"])
    result = run_point(prepare(cfg), Sweep(tmp_path / "outputs" / "pipeline"))
    assert result.agreement_with_target == 1.0
    row = to_row(result)
    assert row["pipeline_latency_units"] == pytest.approx(row["pipeline_predicted_latency_units"])
    assert 0 <= row["pipeline_match_rate"] <= 1
    assert (result.pipeline.layers, result.pipeline.exit_layer) == (2, 1)
    shown = {each.name for each in fields(result.pipeline)} - {"layers", "exit_layer"}
    assert shown == {key[9:] for key in row if key.startswith("pipeline_")}
    assert row["tokens_per_target_call"] == 1.0
