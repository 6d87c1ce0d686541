"""Measured beside predicted: what the pipeline did, what Theorem 4.1 gives for it, and where the rest goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bild_lab.engine.ppd.log import PipelineLog
from bild_lab.engine.ppd.theory import expected_compute, expected_latency
from bild_lab.lab.analysis.prediction import total_s
from bild_lab.lab.measure.timing import Timed


@dataclass(frozen=True)
class PipelineUnits:
    """Layer-time units per token, as executed and by Theorem 4.1 with the measured match rate.

    layers: of the target. exit_layer: after how many of them the next token is begun.
    match_rate: of the tokens behind which the text goes on; None where no text has two tokens. The theorem has
    candidates for every token, the executor none for one that fills the length limit, so that its compute may be
    the smaller one.
    """

    layers: int
    exit_layer: int
    match_rate: float | None
    latency_units: float
    compute_units: float
    predicted_latency_units: float
    predicted_compute_units: float


@dataclass(frozen=True)
class PipelineSpeedups:
    """Times as fast as the target alone, from theory to the clock; each step adds one thing that theory leaves out.

    theorem: Theorem 4.1. exit: with the real time up to the exit, the head and the choice of candidates included.
    concurrent: with the real time of current token and candidates beside each other, which contend for memory and
    for Python's lock. host: with the code around. prefill: with the encoder.
    """

    theorem: float
    exit: float
    concurrent: float
    host: float
    prefill: float


def pipeline_account(
    timed: Mapping[str, Sequence[Timed]], stages_s: Mapping[str, float] | None, traced_examples: int
) -> dict[str, Any] | None:
    """Both, of "method" against "baseline"; None where the method is no pipeline.

    stages_s: of the first `traced_examples`, on which the speedups are told; they are left out without it, or
    where the baseline is not the target alone.
    """
    logs = [one.trace.pipeline for one in timed["method"]]
    if None in logs:
        return None
    speedups = dict.fromkeys(PipelineSpeedups.__dataclass_fields__)
    if stages_s is not None and "baseline" in timed:
        told = pipeline_speedups(timed["method"][:traced_examples], timed["baseline"][:traced_examples], stages_s)
        speedups = speedups if told is None else asdict(told)
    return asdict(pipeline_units(logs)) | speedups


def pipeline_units(logs: Sequence[PipelineLog]) -> PipelineUnits:
    """Of texts that were decoded alike."""
    tokens = sum(length(log) for log in logs)
    rate = match_rate(logs)
    shape = (logs[0].layers, logs[0].exit_layer, rate or 0.0)  # a text of one token does not depend on the rate
    return PipelineUnits(
        layers=logs[0].layers,
        exit_layer=logs[0].exit_layer,
        match_rate=rate,
        latency_units=sum(log.latency for log in logs) / tokens,
        compute_units=sum(log.compute for log in logs) / tokens,
        predicted_latency_units=sum(expected_latency(length(log), *shape) for log in logs) / tokens,
        predicted_compute_units=sum(expected_compute(length(log), *shape, logs[0].top_k) for log in logs) / tokens,
    )


def pipeline_speedups(
    method: Sequence[Timed], baseline: Sequence[Timed], stages_s: Mapping[str, float]
) -> PipelineSpeedups | None:
    """The examples that `stages_s` was traced on. None where the baseline is not the target alone."""
    calls = sum(one.trace.target_calls for one in baseline)
    if not calls or any(one.trace.drafted or one.trace.pipeline is not None for one in baseline):
        return None
    baseline_s = total_s(baseline)
    step_s = (baseline_s - stages_s["prefill"]) / calls  # one token by the target alone
    if step_s <= 0:  # the machine was so busy that the traced prefill outlasted whole timed texts
        return None
    logs = [one.trace.pipeline for one in method]
    units = pipeline_units(logs)
    depth, tokens = logs[0].layers, sum(length(log) for log in logs)
    alone_s = step_s * tokens
    exit_s = stages_s["draft"]
    finishing_s = sum(log.concurrent for log in logs) * step_s / depth
    concurrent_s = exit_s + stages_s["verify"]
    return PipelineSpeedups(
        theorem=depth / units.predicted_latency_units,
        exit=alone_s / (exit_s + finishing_s),
        concurrent=alone_s / concurrent_s,
        host=alone_s / (concurrent_s + stages_s["host"]),
        prefill=baseline_s / sum(stages_s.values()),
    )


def match_rate(logs: Sequence[PipelineLog]) -> float | None:
    """p̂: the share of predictions that came true, of tokens behind which the text went on."""
    matches = [matched for log in logs for matched in log.matches]
    return sum(matches) / len(matches) if matches else None


def length(log: PipelineLog) -> int:
    """How many tokens the text has."""
    return len(log.matches) + 1
