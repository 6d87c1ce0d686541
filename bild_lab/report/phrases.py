"""Phrases about points that the headline, the figures and the page share, and why a point has its
speed: tokens in a round, the cost of drafting and of verifying, the stages' shares of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from bild_lab.lab.measure.prediction import Reasons, reasons
from bild_lab.lab.schema.formatting import (
    counted,
    duration,
    interval,
    number,
    number_range,
    percent,
    short_name,
    signed,
    times,
)
from bild_lab.lab.schema.numbers import MetricScale, NonInferiority, Quality
from bild_lab.lab.schema.result import Result, Setting
from bild_lab.lab.schema.statistics import ENOUGH_DIFFERENT, FEWEST_RUNS, best_at_loss
from bild_lab.lab.store.groups import (
    HASH_KEYS,
    Group,
    differing_keys,
    setting_title,
    setting_value,
)
from bild_lab.report.provenance import disturbance

# keys of the setting that every title or heading says
_IN_TITLES = ("target", "draft", "dataset", "split", "n_examples")
_IN_HEADINGS = (*_IN_TITLES, "metric", "dtype", "device")
# what to do where no repeat says how far the clock of a batch is off
TIME_BATCHES_TWICE = "set measure.repeats=2 or more, beside a baseline"
# of the time of `vanilla`: from there on the loop itself shapes the speedups
LARGE_LOOP_SHARE = 0.1


def setting_titles(groups: Sequence[Group]) -> list[str]:
    """The title of each setting, with what tells it from others of the same title: `t5-large drafted
    by t5-tiny, multi30k test, 100 examples, batch 4`.
    """
    titles = [setting_title(group.setting) for group in groups]
    numbers = [f"setting {number}" for number in range(1, len(groups) + 1)]
    # numbers where a hash tells them apart, such as the code's, or the end of a long value
    for further_words in (setting_words(groups, _IN_TITLES), numbers):
        if len(set(titles)) < len(titles):
            titles = [
                ", ".join(filter(None, named)) for named in zip(titles, further_words, strict=True)
            ]
    return titles


def setting_words(groups: Sequence[Group], elsewhere: Sequence[str] = _IN_HEADINGS) -> list[str]:
    """What tells each setting from the others: `batch 4, seed 1`. elsewhere: keys of the setting
    whose values stand elsewhere.
    """
    keys = [key for key in differing_keys(groups) if key not in (*HASH_KEYS, *elsewhere)]
    return [
        ", ".join(f"{key} {short_name(one_line(group.setting, key))}" for key in keys)
        for group in groups
    ]


def one_line(setting: Setting, key: str) -> str:
    """A value of the setting as text without line breaks."""
    return " ".join(str(setting_value(setting, key)).split())


def timed_points(group: Group) -> list[Result]:
    """The timed points of a setting without the baseline."""
    return [result for result in group.results if result.timed and not result.is_baseline]


def speedup_interval(result: Result) -> str:
    """A point's speedup with its interval: `1.98× [1.86, 2.11]`."""
    speedup = result.speedup
    return f"{times(speedup.value)} {interval(speedup.low, speedup.high)}".strip()


def difference_interval(quality: Quality) -> str:
    """The interval of a quality's difference from the baseline: `[−9.80, −3.90]`; empty without
    one.
    """
    low, high = quality.difference_low, quality.difference_high
    return interval(low, high, quality.scale.digits, signed)


def signed_difference(quality: Quality) -> str:
    """A quality's difference from the baseline's: `−6.88`; a dash without one."""
    return signed(quality.difference, quality.scale.digits)


def p_value_words(p_value: float) -> str:
    """`p = 0.011`, and `p < 0.001` for a smaller one."""
    return "p < 0.001" if p_value < 0.001 else f"p = {number(p_value, 3)}"


def non_inferiority_verdict(tested: NonInferiority, scale: MetricScale) -> str:
    """`no worse by 5: p = 0.011`, or `not shown to be no worse by 0.01 nats: p = 0.344`."""
    claim = f"no worse by {scale.amount(tested.margin)}"
    words = claim if tested.shown else f"not shown to be {claim}"
    return f"{words}: {p_value_words(tested.p_value)}"


def machine_facts(results: Sequence[Result]) -> str:
    """What explains how much drafts gain on a machine: `memory read at 13.2 GB/s, eight rows cost
    1.46 tokens`; of several values the lowest and the highest. Empty for older results.
    """
    bandwidths = [result.environment.read_gb_per_s for result in results]
    costs = [result.environment.eight_rows_cost for result in results]
    words = []
    if bandwidth := number_range(bandwidths, digits=1):
        words.append(f"memory read at {bandwidth} GB/s")
    if cost := number_range(costs):
        words.append(f"eight rows cost {cost} tokens")
    return ", ".join(words)


def speed_claim(group: Group, result: Result) -> str:
    """`bild (fallback 0.5) decodes 1.98× [1.86, 2.11] as fast`."""
    return f"{group.label(result)} decodes {speedup_interval(result)} as fast"


def quality_claim(group: Group, result: Result) -> str:
    """How the quality differs, with its interval, on how many examples, and how many texts are the
    target's.
    """
    n_examples, agreement = group.setting.n_examples, result.agreement_with_target
    claim = f"{quality_change(group, result)} on {counted(n_examples, 'example')}"
    if chance := _chance_words(result.quality):
        claim += f", {chance}"
    if (tested := result.quality.non_inferiority) is not None:
        claim += f", {non_inferiority_verdict(tested, result.quality.scale)}"
    if agreement is not None:
        claim += f"; {_agreement(agreement, result.answered_texts)}"
    return claim + cautions(result)


def _chance_words(quality: Quality) -> str:
    """`a loss beyond chance`, as the p-value says. Where the interval beside it seems to say the
    opposite, the p-value is named. Empty where there is no such loss and nothing to set right.
    """
    low, high = quality.difference_low, quality.difference_high
    if None in (low, high, quality.p_value):
        return ""
    leaves_out_0 = low > 0 or high < 0
    if quality.beyond_chance:
        words = "a loss beyond chance" if quality.difference < 0 else ""
    else:
        words = "which may be chance" if leaves_out_0 else ""
    if not words or leaves_out_0 == quality.beyond_chance:
        return words
    return f"{words} ({p_value_words(quality.p_value)})"


def quality_change(group: Group, result: Result) -> str:
    """The difference in quality and its interval: `BLEU +0.50, +0.05 to +1.00`, or `no change in
    BLEU`; without a baseline the quality itself.
    """
    quality = result.quality
    if quality.difference is None:
        return quality.words
    low, high = quality.difference_low, quality.difference_high
    if quality.difference == 0 and not low and not high:
        return f"no change in {group.metric}"
    change = f"{group.metric} {signed_difference(quality)}"
    if low is not None and high is not None:
        digits = quality.scale.digits
        change += f", {signed(low, digits)} to {signed(high, digits)}"
    return change


def _agreement(agreement: float, n_examples: int) -> str:
    """How many texts are the target's own; if few are not, that the interval of the difference
    rests on these few.
    """
    n_different = round((1 - agreement) * n_examples)
    if n_different < ENOUGH_DIFFERENT:
        texts = "1 text differs" if n_different == 1 else f"{n_different} texts differ"
        return f"only {texts} from the target’s, too few to trust this interval"
    digits = 0 if agreement < 0.995 else 1
    return f"{percent(agreement, digits)} of the texts are the target’s own"


def cautions(result: Result) -> str:
    """Warnings, after a colon: the point is not clearly faster than the baseline, or its timings
    or its quality cannot be relied on. Empty if there is none.
    """
    speedup, warnings = result.speedup, []
    if speedup.value is not None and speedup.value <= 1:
        warnings.append("not faster than the baseline")
    elif speedup.low is not None and speedup.low <= 1:
        warnings.append("not clearly faster, as the interval holds 1")
    if result.doubt and (result.wordless or result.baseline_empty == 1):
        warnings.append(f"{result.doubt}, so neither speed nor quality says much")
    elif result.doubt:
        warnings.append(f"{result.doubt}, so its quality says little")
    if result.draft_engine not in (None, result.engine):
        warnings.append(
            f"its drafter runs by {result.draft_engine} and its target by {result.engine}, so the"
            " drafter may be slower than it need be"
        )
    if result.baseline_drafted:
        warnings.append(
            f"the server that it is compared with drafted too, {result.baseline_drafted:,} tokens"
        )
    if (loop_share := result.baseline_loop_share or 0.0) >= LARGE_LOOP_SHARE:
        warnings.append(
            f"Python between forwards is {percent(loop_share)} of the baseline’s time, so a model this"
            " small flatters methods with fewer forwards"
        )
    if _clock_exceeds_interval(result):
        warnings.append(
            f"the clock’s error over its repeats, ±{percent(result.speedup.noise)}, is larger than the"
            " interval, which is over texts"
        )
    if reason := disturbance(result):
        warnings.append(f"{reason}, so time it again before relying on the speedup")
    return f": {'; '.join(warnings)}" if warnings else ""


def _clock_exceeds_interval(result: Result) -> bool:
    """Whether the speedup's error over the repeats, of three or more, is larger than its interval
    over the texts. In batches the interval has it.
    """
    speedup = result.speedup
    if result.in_batches or speedup.noise is None or (speedup.repeats or 0) < FEWEST_RUNS:
        return False
    return speedup.low is not None and speedup.noise > speedup.high / speedup.value - 1


def front_in_words(group: Group, bounds: bool = True) -> list[tuple[Result, str, str]]:
    """The Pareto front, fastest first: each point, its label, and its numbers in words.

    The numbers read `1.62× [1.56, 1.68], BLEU 82.40, −6.88 [−9.80, −3.90]`. bounds: with the
    intervals.
    """
    lines = []
    for result in group.front:
        quality = result.quality
        if not group.relative:
            speed = duration(result.latency_s.mean)
        elif bounds:
            speed = speedup_interval(result)
        else:
            speed = times(result.speedup.value)
        numbers = f"{speed}, {quality.words}"
        if quality.difference is not None:
            numbers += f", {signed_difference(quality)}"
            if bounds:
                numbers = f"{numbers} {difference_interval(quality)}".rstrip()
        if reason := disturbance(result):
            numbers += f"; {reason}"
        lines.append((result, group.label(result), numbers))
    return lines


def model_sizes(results: Sequence[Result]) -> str:
    """The parameters of each model: `target 737 M, draft 1.5 M`.

    Empty for results that did not record them.
    """
    recorded = (result.facts.get("parameters") for result in results)
    counts = next(filter(None, recorded), {})
    return ", ".join(
        f"{role} {number(count / 1e6, int(count < 1e8))} M" for role, count in counts.items()
    )


def reason_lines(group: Group) -> list[tuple[str, str]]:
    """Label and explanation of each policy's fastest point at no loss, or of its fastest.

    They read `bild (fallback 0.5), 1.98×` and `6.90 tokens a call (α 98 %); a drafter step costs
    13 % …`. Points that were not traced have none.
    """
    lines = []
    for policy in group.policies:
        results = group.of_policy(policy)
        best = best_at_loss(results, 0.0) or results[0]
        best_reasons = reasons(best)
        if best_reasons is not None:
            speed = ", ".join(filter(None, [times(best.speedup.value), disturbance(best)]))
            lines.append((f"{group.label(best)}, {speed}", _explanation(best, best_reasons)))
    return lines


def _explanation(result: Result, point_reasons: Reasons) -> str:
    """What the speedup is made of."""
    parts = _gains(result)
    drafter_cost, verification = point_reasons.drafter_cost, point_reasons.verification
    if drafter_cost is not None and verification is not None:
        step = percent(drafter_cost, 0 if drafter_cost >= 0.095 else 1)
        parts.append(
            f"a drafter step costs {step} of a target token (c), checking a draft"
            f" {number(verification)} tokens"
        )
    stages = [
        f"{stage} {percent(share)}"
        for stage, share in point_reasons.shares.items()
        if share >= 0.005
    ]
    return "; ".join([*parts, f"time: {', '.join(stages)}"]) + "."


def _gains(result: Result) -> list[str]:
    """What is gained in a round, before any cost."""
    counts, pipeline = result.counts, result.pipeline
    if pipeline is not None:
        right = f"{percent(pipeline.match_rate)} of the predictions right"
        if pipeline.theorem is None:
            return [right]
        return [f"{right}, for which Theorem 4.1 gives {times(pipeline.theorem)}"]
    if counts.drafted:
        if counts.tokens_per_target_call is None:
            return []
        accepted = percent(counts.acceptance_rate)
        return [f"{number(counts.tokens_per_target_call)} tokens a call (α {accepted})"]
    if counts.exit_layer_mean is None:
        return []
    return [f"a token leaves after {number(counts.exit_layer_mean, 1)} layers on average"]
