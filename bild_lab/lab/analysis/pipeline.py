"""Predictive pipelined decoding: what was measured, what Theorem 4.1 predicts, and which costs take the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bild_lab.engine.ppd.theory import expected_compute, expected_latency
from bild_lab.engine.trace import Trace
from bild_lab.lab.analysis.prediction import total_s
from bild_lab.lab.measure.timing import Timed


@dataclass(frozen=True)
class PipelineLog:
    """What the pipeline did for one text, in layer-time units, from its rounds' statistics.

    matches: of every token but the text's last, whether its successor was among the candidates. latency, compute,
    concurrent: summed over the tokens (`PredictivePipeline`).
    """

    layers: int
    exit_layer: int
    top_k: int
    matches: tuple[bool, ...]
    latency: int
    compute: int
    concurrent: int


def pipeline_log(trace: Trace) -> PipelineLog | None:
    """None for a text of another method."""
    if not trace.rounds or "matched" not in trace.rounds[0].stats:
        return None
    stats = [each.stats for each in trace.rounds]
    return PipelineLog(
        **trace.stats,
        matches=tuple(each["matched"] for each in stats if each["matched"] is not None),
        latency=sum(each["latency_units"] for each in stats),
        compute=sum(each["compute_units"] for each in stats),
        concurrent=sum(each["concurrent_units"] for each in stats),
    )


@dataclass(frozen=True)
class PipelineUnits:
    """Layer-time units per token: as executed, and by Theorem 4.1 with the measured match rate.

    match_rate: over the tokens that another token follows; None if no text has two tokens. The theorem begins
    candidates after every token, the pipeline none after the last token that the length limit allows. So the
    measured compute may be smaller.
    """

    match_rate: float | None
    latency_units: float
    compute_units: float
    predicted_latency_units: float
    predicted_compute_units: float


@dataclass(frozen=True)
class PipelineSpeedups:
    """Speedups over the target alone. Each one adds a cost that the one before it leaves out.

    theorem: Theorem 4.1.
    exit: with the measured time up to the exit layer, with its head and the choice of candidates.
    concurrent: with the measured time of current token and candidates at once, which share memory and Python's lock.
    host: with the code around the forwards.
    prefill: with the encoder and the prompt.
    """

    theorem: float
    exit: float
    concurrent: float
    host: float
    prefill: float


def pipeline_account(
    timed: Mapping[str, Sequence[Timed]], stages_s: Mapping[str, float] | None, traced_examples: int
) -> dict[str, Any] | None:
    """Units and speedups of "method" against "baseline"; None if the method is not a pipeline.

    stages_s: of the first `traced_examples`, which the speedups are for. Speedups are None without it, and if the
    baseline is not the target alone.
    """
    logs = [pipeline_log(one.trace) for one in timed["method"]]
    if None in logs:
        return None
    speedups = dict.fromkeys(PipelineSpeedups.__dataclass_fields__)
    if stages_s is not None and "baseline" in timed:
        found = pipeline_speedups(timed["method"][:traced_examples], timed["baseline"][:traced_examples], stages_s)
        speedups = speedups if found is None else asdict(found)
    return asdict(pipeline_units(logs)) | speedups


def pipeline_units(logs: Sequence[PipelineLog]) -> PipelineUnits:
    """The units of texts that were decoded with the same knobs."""
    tokens = sum(length(log) for log in logs)
    rate = match_rate(logs)
    shape = (
        logs[0].layers,
        logs[0].exit_layer,
        rate or 0.0,
    )  # no rate: texts of one token, which need none
    return PipelineUnits(
        match_rate=rate,
        latency_units=sum(log.latency for log in logs) / tokens,
        compute_units=sum(log.compute for log in logs) / tokens,
        predicted_latency_units=sum(expected_latency(length(log), *shape) for log in logs) / tokens,
        predicted_compute_units=sum(expected_compute(length(log), *shape, logs[0].top_k) for log in logs) / tokens,
    )


def pipeline_speedups(
    method: Sequence[Timed], baseline: Sequence[Timed], stages_s: Mapping[str, float]
) -> PipelineSpeedups | None:
    """The speedups of the examples that `stages_s` was traced on; None if the baseline is not the target alone."""
    calls = sum(one.trace.target_calls for one in baseline)
    if not calls or any(one.trace.drafted or pipeline_log(one.trace) is not None for one in baseline):
        return None
    baseline_s = total_s(baseline)
    step_s = (baseline_s - stages_s["prefill"]) / calls  # one token by the target alone
    if step_s <= 0:  # the machine was so busy that the traced prefill took longer than whole timed texts
        return None
    logs = [pipeline_log(one.trace) for one in method]
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
    """p̂: the share of predictions that came true, over the tokens that another token follows."""
    matches = [matched for log in logs for matched in log.matches]
    return sum(matches) / len(matches) if matches else None


def length(log: PipelineLog) -> int:
    """How many tokens the text has."""
    return len(log.matches) + 1
