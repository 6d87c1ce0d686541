"""Theory beside measurement: what speedup was to be expected, which costs explain the gap.

Speculative decoding is predicted by Theorem 3.8, predictive pipelined decoding by Theorem 4.1. Each
step from theory to measured time adds one cost. The parts of a point's time come from decoding with
clocks, as shares, and are applied to the timed seconds: the waits of a traced pass, and a machine
that was slower in it, do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bild_lab.engine.methods.ppd.theory import expected_compute, expected_latency
from bild_lab.engine.methods.speculative.theory import walltime_improvement
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.timing import Timed, token_count, total_s
from bild_lab.lab.point.decoder import BASELINE, METHOD
from bild_lab.lab.schema.numbers import Pipeline, Prediction
from bild_lab.lab.schema.result import Result

FIXED_WINDOW_SHARE = 0.9  # a window is fixed if at least this share of drafts has one length


def predict(
    method: Sequence[Timed],
    baseline: Sequence[Timed],
    stages_s: Mapping[str, float],
    alpha: float | None,
    end_tokens: frozenset[int] = frozenset(),
    drafter_prompt_s: float = 0.0,
) -> Prediction | None:
    """Predict the speedup in steps, from theory to measured time, on the examples that `stages_s`
    was traced on.

    method, baseline: the timings of these examples. stages_s: seconds by stage. alpha: the
    acceptance rate, of all examples. end_tokens: for `fixed_window`. drafter_prompt_s: the part of
    the prefill in which the drafter read the prompts, which the baseline does not have. None if
    nothing was drafted, or if the baseline is not the target alone.
    """
    pace = total_s(method) / sum(stages_s.values())
    stages_s = _at_pace(stages_s, pace)
    traces = [text.trace for text in method]
    calls = sum(trace.target_calls for trace in traces)
    drafted = sum(trace.drafted for trace in traces)
    step_s = target_step_s(baseline, stages_s["prefill"] - pace * drafter_prompt_s)
    if not calls or not drafted or step_s is None:
        return None
    steps = sum(trace.draft_calls for trace in traces) or drafted  # a table drafts without forwards
    cost_ratio = stages_s["draft"] / steps / step_s
    window = fixed_window(method, end_tokens)
    drafting = steps / calls * cost_ratio  # what a round drafts for, in steps of the target
    # a token of the target has host code too
    verifying = (stages_s["verify"] + stages_s["host"]) / calls / step_s
    per_round = token_count(method) / calls
    return Prediction(
        window=window,
        cost_ratio=cost_ratio,
        theorem=None
        if window is None or alpha is None
        else walltime_improvement(alpha, window, cost_ratio),
        rounds=per_round / (drafting + 1),
        host=per_round / (drafting + verifying),
        prefill=total_s(baseline) / total_s(method),
    )


def _at_pace(stages_s: Mapping[str, float], pace: float) -> dict[str, float]:
    """The seconds by stage in timed repeats. pace: how long these took, in times of the traced pass."""
    return {stage: pace * seconds for stage, seconds in stages_s.items()}


def target_step_s(baseline: Sequence[Timed], prefill_s: float) -> float | None:
    """Seconds of one token by the target alone; None if the baseline is something else. prefill_s: of
    the target, over all texts.

    None too if the machine was so busy that the traced prefill took longer than whole timed texts.
    """
    calls = sum(text.trace.target_calls for text in baseline)
    if not calls or any(
        text.trace.drafted or pipeline_log(text.trace) is not None for text in baseline
    ):
        return None
    step_s = (total_s(baseline) - prefill_s) / calls
    return step_s if step_s > 0 else None


def fixed_window(timed: Sequence[Timed], end_tokens: frozenset[int] = frozenset()) -> int | None:
    """The length of all drafts; None if drafts differ in length.

    Drafts that the end of a text may cut short do not count: the last of each text, and those with
    an end token.
    """
    drafts = [decoding_round.drafted for text in timed for decoding_round in text.trace.rounds[:-1]]
    lengths = Counter(len(draft) for draft in drafts if not draft or draft[-1] not in end_tokens)
    if not lengths:
        return None
    length, count = lengths.most_common(1)[0]
    return length if length and count >= FIXED_WINDOW_SHARE * lengths.total() else None


@dataclass(frozen=True)
class PipelineLog:
    """What the pipeline did for one text, in layer-time units, from its rounds' statistics.

    matches: for every token except the last, whether its successor was among the candidates.
    latency, compute, concurrent: summed over the tokens (see `PredictivePipeline`).
    """

    layers: int
    exit_layer: int
    top_k: int
    matches: tuple[bool, ...]
    latency: int
    compute: int
    concurrent: int

    @property
    def tokens(self) -> int:
        return len(self.matches) + 1


def pipeline_log(trace: Trace) -> PipelineLog | None:
    """The log of a text, from its trace; None if another method decoded it."""
    if not trace.rounds or "matched" not in trace.rounds[0].stats:
        return None
    stats = [decoding_round.stats for decoding_round in trace.rounds]
    return PipelineLog(
        **trace.stats,
        matches=tuple(
            round_stats["matched"] for round_stats in stats if round_stats["matched"] is not None
        ),
        latency=sum(round_stats["latency_units"] for round_stats in stats),
        compute=sum(round_stats["compute_units"] for round_stats in stats),
        concurrent=sum(round_stats["concurrent_units"] for round_stats in stats),
    )


def pipeline_summary(
    timed: Mapping[str, Sequence[Timed]], stages_s: Mapping[str, float] | None, traced_examples: int
) -> Pipeline | None:
    """Units and speedups of the method against the baseline; None if the method is not a pipeline.

    stages_s: seconds by stage of the first `traced_examples` examples. The speedups are for these.
    They are None without stages_s, and if the baseline is not the target alone.
    """
    logs = [pipeline_log(text.trace) for text in timed[METHOD]]
    if None in logs:
        return None
    units = pipeline_units(logs)
    if stages_s is None:
        return units
    method, baseline = (timed.get(name, ())[:traced_examples] for name in (METHOD, BASELINE))
    stages_s = _at_pace(stages_s, total_s(method) / sum(stages_s.values()))
    if (step_s := target_step_s(baseline, stages_s["prefill"])) is None:
        return units
    traced = logs[:traced_examples]
    depth, alone_s = traced[0].layers, step_s * sum(log.tokens for log in traced)
    finishing_s = sum(log.concurrent for log in traced) * step_s / depth
    concurrent_s = stages_s["draft"] + stages_s["verify"]
    return replace(
        units,
        theorem=depth / pipeline_units(traced).predicted_latency_units,
        exit=alone_s / (stages_s["draft"] + finishing_s),
        concurrent=alone_s / concurrent_s,
        host=alone_s / (concurrent_s + stages_s["host"]),
        prefill=total_s(baseline) / total_s(method),
    )


def pipeline_units(logs: Sequence[PipelineLog]) -> Pipeline:
    """The units of texts that were decoded with the same knobs, without speedups."""
    tokens = sum(log.tokens for log in logs)
    matches = [matched for log in logs for matched in log.matches]
    # p̂, over the tokens that have a successor
    rate = sum(matches) / len(matches) if matches else None
    # no rate if all texts have one token; it has no effect
    shape = (logs[0].layers, logs[0].exit_layer, rate or 0.0)
    return Pipeline(
        layers=logs[0].layers,
        exit_layer=logs[0].exit_layer,
        match_rate=rate,
        latency_units=sum(log.latency for log in logs) / tokens,
        compute_units=sum(log.compute for log in logs) / tokens,
        predicted_latency_units=sum(expected_latency(log.tokens, *shape) for log in logs) / tokens,
        predicted_compute_units=sum(
            expected_compute(log.tokens, *shape, logs[0].top_k) for log in logs
        )
        / tokens,
    )


@dataclass(frozen=True)
class Reasons:
    """What a point's speedup is made of.

    shares: each stage's share of the method's time. drafter_cost: a drafter step, and verification:
    checking one draft with its host code, both in tokens of the target alone; None if the point
    drafts nothing or its baseline is not the target.
    """

    shares: Mapping[str, float]
    drafter_cost: float | None
    verification: float | None


def reasons(result: Result) -> Reasons | None:
    """Explain a point; None if its stages were not traced, or if it has no speedup to explain."""
    stages = result.stages_s
    if (
        result.is_baseline
        or result.speedup.value is None
        or not stages
        or sum(stages.values()) <= 0
    ):
        return None
    shares = {stage: seconds / sum(stages.values()) for stage, seconds in stages.items()}
    return Reasons(shares, *(_costs(result) or (None, None)))


def _costs(result: Result) -> tuple[float, float] | None:
    """A drafter step, and a verification with its host code, in tokens of the target alone; None if
    not known.

    They are read back from the steps of the prediction. With D the drafting of a round in tokens of
    the target, V the rest of it, and P tokens a round, `rounds` is P / (D + 1) and `host` P / (D +
    V). D / (D + V) is a share of time.
    """
    predicted, stages = result.prediction, result.stages_s
    round_s = stages["draft"] + stages["verify"] + stages["host"]
    if predicted is None or not round_s:
        return None
    drafting = stages["draft"] / round_s
    round_tokens = predicted.rounds / (predicted.host - predicted.rounds * drafting)  # D + V
    return predicted.cost_ratio, round_tokens * (1 - drafting)
