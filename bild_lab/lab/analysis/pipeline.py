"""Predictive pipelined decoding: measured and predicted (Theorem 4.1) gains, and the costs that explain the gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bild_lab.engine.ppd.theory import expected_compute, expected_latency
from bild_lab.engine.trace import Trace
from bild_lab.lab.analysis.prediction import total_s
from bild_lab.lab.schema.numbers import Pipeline
from bild_lab.lab.schema.timed import BASELINE, METHOD, Timed


@dataclass(frozen=True)
class PipelineLog:
    """What the pipeline did for one text, in layer-time units, from its rounds' statistics.

    matches: for every token except the last, whether its successor was among the candidates. latency, compute,
    concurrent: summed over the tokens (see `PredictivePipeline`).
    """

    layers: int
    exit_layer: int
    top_k: int
    matches: tuple[bool, ...]
    latency: int
    compute: int
    concurrent: int


def pipeline_log(trace: Trace) -> PipelineLog | None:
    """The log of a text, from its trace; None if another method decoded it."""
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


def pipeline_summary(
    timed: Mapping[str, Sequence[Timed]], stages_s: Mapping[str, float] | None, traced_examples: int
) -> Pipeline | None:
    """Units and speedups of the method against the baseline; None if the method is not a pipeline.

    stages_s: seconds by stage of the first `traced_examples` examples. The speedups are for these. They are None
    without stages_s, and if the baseline is not the target alone.
    """
    logs = [pipeline_log(one.trace) for one in timed[METHOD]]
    if None in logs:
        return None
    units = pipeline_units(logs)
    if stages_s is None or BASELINE not in timed:
        return units
    speedups = pipeline_speedups(timed[METHOD][:traced_examples], timed[BASELINE][:traced_examples], stages_s)
    return replace(units, **speedups)


def pipeline_units(logs: Sequence[PipelineLog]) -> Pipeline:
    """The units of texts that were decoded with the same knobs, without speedups."""
    tokens = sum(length(log) for log in logs)
    rate = match_rate(logs)
    shape = (logs[0].layers, logs[0].exit_layer, rate or 0.0)  # no rate if all texts have one token; it has no effect
    return Pipeline(
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
) -> dict[str, float]:
    """The speedups of a Pipeline, by field, on the examples that `stages_s` was traced on.

    Empty if the baseline is not the target alone.
    """
    calls = sum(one.trace.target_calls for one in baseline)
    if not calls or any(one.trace.drafted or pipeline_log(one.trace) is not None for one in baseline):
        return {}
    baseline_s = total_s(baseline)
    step_s = (baseline_s - stages_s["prefill"]) / calls  # one token by the target alone
    if step_s <= 0:  # the machine was so busy that the traced prefill took longer than whole timed texts
        return {}
    logs = [pipeline_log(one.trace) for one in method]
    units = pipeline_units(logs)
    depth, tokens = logs[0].layers, sum(length(log) for log in logs)
    alone_s = step_s * tokens
    exit_s = stages_s["draft"]
    finishing_s = sum(log.concurrent for log in logs) * step_s / depth
    concurrent_s = exit_s + stages_s["verify"]
    return {
        "theorem": depth / units.predicted_latency_units,
        "exit": alone_s / (exit_s + finishing_s),
        "concurrent": alone_s / concurrent_s,
        "host": alone_s / (concurrent_s + stages_s["host"]),
        "prefill": baseline_s / sum(stages_s.values()),
    }


def match_rate(logs: Sequence[PipelineLog]) -> float | None:
    """p̂: the share of correct predictions, over the tokens that have a successor."""
    matches = [matched for log in logs for matched in log.matches]
    return sum(matches) / len(matches) if matches else None


def length(log: PipelineLog) -> int:
    """The number of tokens of the text."""
    return len(log.matches) + 1
