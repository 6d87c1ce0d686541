"""Theory beside measurement: what speedup was to be expected, which costs explain the gap.

Speculative decoding is predicted by Theorem 3.8, predictive pipelined decoding by Theorem 4.1. Each
step from theory to measured time adds one cost. The parts of a point's time come from decoding with
clocks, as shares, and are applied to the timed seconds: the waits of a traced pass, and a machine
that was slower in it, do not count. A profile says how drafts were accepted, for others to read,
and `best_window` predicts from it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.ppd.theory import expected_compute, expected_latency
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.theory import walltime_improvement
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.timing import Timed, token_count, total_s
from bild_lab.lab.point.decoder import BASELINE, METHOD, Decoder
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.numbers import Pipeline, Prediction
from bild_lab.lab.schema.result import Result

PROFILE, PROFILE_SCHEMA = "speculation_profile.json", "1.0"
# whether shorter drafts are the beginnings of longer ones
EXTRAPOLATES, MEASURED = "chain_analytic", "measured_per_k"
FIXED_WINDOW_SHARE = 0.9  # a window is fixed if at least this share of drafts has one length


def predict(
    method: Sequence[Timed],
    baseline: Sequence[Timed],
    stages_s: Mapping[str, float],
    alpha: float | None,
    end_tokens: frozenset[int] = frozenset(),
) -> Prediction | None:
    """Predict the speedup in steps, from theory to measured time, on the examples that `stages_s`
    was traced on.

    method, baseline: the timings of these examples. stages_s: seconds by stage. alpha: the
    acceptance rate, of all examples. end_tokens: for `fixed_window`. None if nothing was drafted,
    or if the baseline is not the target alone.
    """
    pace = total_s(method) / sum(stages_s.values())
    stages_s = {stage: pace * seconds for stage, seconds in stages_s.items()}
    traces = [text.trace for text in method]
    calls, drafted = (
        sum(trace.target_calls for trace in traces),
        sum(trace.drafted for trace in traces),
    )
    step_s = target_step_s(baseline, stages_s)
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


def target_step_s(baseline: Sequence[Timed], stages_s: Mapping[str, float]) -> float | None:
    """Seconds of one token by the target alone; None if the baseline is something else.

    None too if the machine was so busy that the traced prefill took longer than whole timed texts.
    """
    calls = sum(text.trace.target_calls for text in baseline)
    if not calls or any(
        text.trace.drafted or pipeline_log(text.trace) is not None for text in baseline
    ):
        return None
    step_s = (total_s(baseline) - stages_s["prefill"]) / calls
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
    baseline = timed.get(BASELINE, ())[:traced_examples]
    if stages_s is None or (step_s := target_step_s(baseline, stages_s)) is None:
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
        prefill=total_s(baseline) / sum(stages_s.values()),
    )


def pipeline_units(logs: Sequence[PipelineLog]) -> Pipeline:
    """The units of texts that were decoded with the same knobs, without speedups."""
    tokens, matches = (
        sum(log.tokens for log in logs),
        [matched for log in logs for matched in log.matches],
    )
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


def speculation_profile(
    result: Result, examples: Sequence[MeasuredExample], decoder: Decoder
) -> dict[str, Any]:
    """How a point's drafts were accepted: the content of `speculation_profile.json`.

    The fields and their meaning are those of schema 1.0 of NVIDIA Model-Optimizer's pull request
    2247, as it stood open in September 2026
    (examples/specdec_bench/specdec_bench/speculation_profile.py): an acceptance length counts the
    tokens that a verification emitted, the target's own among them, marginal rate i is the share of
    verified drafts of which the first i + 1 tokens were accepted, conditional rate i the same among
    those of which the first i were: where a draft ended counts as a rejection. After an accepted
    token that ends the text the target's own is not emitted, so the mean length may be less than 1
    plus all marginal rates. Not known from there, and so ours: what a checkpoint's dictionary holds,
    the names of methods, the verification "tree", and all of `measurement_conditions`.
    """
    lengths = [acceptance_lengths(example) for example in examples]
    accepted = Counter(
        example_round.accepted
        for example in examples
        for example_round in example.rounds
        if example_round.next_token is not None
    )
    histogram, counts, setting = (
        Counter(chain.from_iterable(lengths)),
        result.counts,
        result.setting,
    )
    if not histogram or not counts.drafted:
        note = f"policy {result.policy} recorded no verified drafts"
        return {"schema_version": PROFILE_SCHEMA, "measured": False, "note": note}
    longest, steps = len(counts.judged_by_position), histogram.total()
    marginal = [
        sum(count for accepted_tokens, count in accepted.items() if accepted_tokens > i) / steps
        for i in range(longest)
    ]
    by_category: dict[str, list[int]] = defaultdict(list)
    for example, accept_lengths in zip(examples, lengths, strict=True):
        by_category[example.category or ""] += accept_lengths
    method, rule = decoder.method, (result.facts or {}).get("acceptance")
    lossless = method.lossless(Sampling(setting.temperature))
    verification = "block" if rule == "BlockVerification" else "longest_prefix"
    if isinstance(method, DraftThenVerify) and method.drafter.drafts_trees:
        verification = "tree"
    alike = (
        isinstance(getattr(method, "drafter", None), ModelDrafter)
        and lossless
        and verification == "longest_prefix"
    )
    target, *drafts = (
        {"id": "/".join(model.checkpoint.path.strip("/").split("/")[-2:])}
        for model in decoder.models
    )
    mean = sum(length * count for length, count in histogram.items()) / steps
    return {
        "schema_version": PROFILE_SCHEMA,
        "measured": True,
        "method": result.policy,
        "draft_checkpoint": drafts[0] if drafts else None,
        "target_model": target,
        "num_speculative_tokens": longest,
        "block_size": None,
        "max_supported_k": longest,
        "verification_method": verification,
        "conditional_accept_rates": [
            rate / previous_rate if previous_rate else 0.0
            for previous_rate, rate in pairwise([1.0, *marginal])
        ],
        "marginal_accept_rates": marginal,
        "mean_accept_length": mean,
        "mean_accept_length_per_request": fmean(
            fmean(accept_lengths) for accept_lengths in lengths if accept_lengths
        ),
        "accept_length_model": EXTRAPOLATES if alike else MEASURED,
        "accept_length_by_k": {str(longest): mean},
        "acceptance_length_histogram": {
            str(length): histogram[length] for length in sorted(histogram)
        },
        "per_category": {
            name: {"mean_accept_length": fmean(accept_lengths), "num_steps": len(accept_lengths)}
            for name, accept_lengths in by_category.items()
            if name and accept_lengths
        }
        or None,
        "measurement_conditions": {
            **{key: setting.get(key) for key in ("dataset", "split", "dtype", "hardware")},
            "num_samples": len(examples),
            "concurrency": setting.batch,
            "osl": setting["decoding"]["max_new_tokens"],
            **{key: setting["decoding"][key] for key in ("temperature", "top_k", "top_p")},
            **{
                "engine": result.engine,
                "knobs": dict(result.knobs),
                "acceptance_rule": rule,
                "lossless": lossless,
            },
            "certificate": None if result.certificate is None else asdict(result.certificate),
        },
        "validation": None,
    }


def acceptance_lengths(example: MeasuredExample) -> list[int]:
    """How many tokens each verification of a text emitted."""
    lengths = [
        example_round.accepted + 1
        for example_round in example.rounds
        if example_round.next_token is not None
    ]
    unverified = sum(
        example_round.accepted
        for example_round in example.rounds
        if example_round.next_token is None
    )
    # more than the text has where an accepted token ended it
    if lengths and sum(lengths) + unverified > len(example.token_ids):
        lengths[-1] -= 1
    return lengths


def read_profile(folder: Path) -> Mapping[str, Any] | None:
    """The profile in a point's folder; None without a measured one.

    Raises UserError if it cannot be read.
    """
    file = folder / PROFILE
    if not file.is_file():
        return None
    try:
        profile = json.loads(file.read_bytes())
        return profile if profile["measured"] and profile["marginal_accept_rates"] else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read: {error!r}; remove it, or measure with resume=false"
        ) from error


def best_window(profile: Mapping[str, Any], cost_ratio: float) -> tuple[int, float] | None:
    """The draft length that promises most, up to the measured one, and how many times as fast it is
    as that.

    Theorem 3.8's time of a round, with the measured marginal rates in place of powers of α. None
    where shorter drafts are not the beginnings of longer ones.
    """
    if profile["accept_length_model"] != EXTRAPOLATES:
        return None
    tokens = accumulate(profile["marginal_accept_rates"], initial=1.0)
    speeds = [
        expected_tokens / (length * cost_ratio + 1) for length, expected_tokens in enumerate(tokens)
    ]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return best, speeds[best] / speeds[-1]
