"""What a sweep found, in a few sentences that say no more than its intervals do, and why each policy is so fast."""

from __future__ import annotations

from collections.abc import Sequence

from bild_lab.lab.analysis.prediction import Reasons, reasons
from bild_lab.lab.analysis.statistics import ENOUGH_DIFFERENT, ENOUGH_EXAMPLES, best_at_loss
from bild_lab.lab.formatting import (
    duration,
    interval,
    number,
    percent,
    point_label,
    short_name,
    signed,
    times,
)
from bild_lab.lab.results.groups import Group, by_setting, differing_keys
from bild_lab.lab.schema.result import Result
from bild_lab.report.provenance import disturbance

_HASHES = ("code", "data", "weights")  # keys of the setting whose values mean nothing to a reader


def headline(results: Sequence[Result]) -> str:
    """Return what the sweep found, with intervals. Of several settings it is about the leading one."""
    return " ".join(sentences(results))


def sentences(results: Sequence[Result]) -> list[str]:
    """The headline, a sentence each: what is certain comes first."""
    groups = by_setting(results)
    leader = leading(groups)
    if leader is None:
        return ["No point finished, so there is nothing to report."]
    keys = differing_keys(groups)
    if len(groups) == 1 or not keys:
        return _verdict(leader)
    telling = {key: leader.setting.get(key) for key in keys if key not in _HASHES}
    named = [f"{key} {short_name(value)}" for key, value in telling.items() if value is not None][:3]
    which = "Best of" if leader.enough else "One of"
    words = ", ".join(named) or f"which differ in {', '.join(keys)}"
    first, *others = _verdict(leader)
    return [f"{which} {len(groups)} settings ({words}): {first}", *others]


def leading(groups: Sequence[Group]) -> Group | None:
    """Return the setting with the greatest speedup at no loss, among those with enough examples if there are any."""
    return max(groups, key=lambda group: (group.enough, _speed_at_no_loss(group)), default=None)


def _verdict(group: Group) -> list[str]:
    candidates = [result for result in group.results if not result.is_baseline]
    if not group.relative or not candidates or group.baseline_quality is None:
        return [_without_comparison(group)]
    possible = [result for result in candidates if not result.impossible]
    if not possible:
        return [_impossible(group, candidates[0])]
    if not group.enough:
        return [_too_few(group, possible)]
    claims = _claims(group, possible)
    if len(candidates) > 1 and group.best(1.0) is not None:
        claims.append(_selection(group, len(candidates)))
    return claims


def _claims(group: Group, candidates: list[Result]) -> list[str]:
    """What is certain comes first: the fastest point whose texts are all the target's own, then those that may lose.

    A point is named once, and only if it is faster than those before it.
    """
    same = best_at_loss([result for result in candidates if result.agreement_with_target == 1.0], 0.0)
    free, cheap = group.best(0.0), group.best(1.0)
    baseline = f"{group.setting.baseline} ({number(group.baseline_quality)})"
    if cheap is None:
        return [f"No point came within one point of the {group.metric} of {baseline}."]
    claims = []
    if same is not None:
        claims.append(f"{_fast(group, same)} as {group.setting.baseline}, every text the target’s own{_caution(same)}.")
    if free is None:
        claims.append(f"No point kept the {group.metric} of {baseline}.")
    elif free is not same:
        than = "" if claims else f" as {group.setting.baseline}"
        claims.append(f"No loss of {group.metric} measured: {_fast(group, free)}{than}; {_compared(group, free)}.")
    if cheap is free:
        claims.append("Allowing one point of loss finds nothing faster.")
    else:
        claims.append(f"Up to one point of loss measured: {_fast(group, cheap)}; {_compared(group, cheap)}.")
    return claims


def _fast(group: Group, best: Result) -> str:
    """`bild (fallback 0.5) decodes 1.98× [1.86, 2.11] as fast`."""
    bounds = interval(best.speedup.low, best.speedup.high)
    return f"{point_label(best, group.knobs(best))} decodes {times(best.speedup.value)} {bounds}".strip() + " as fast"


def _compared(group: Group, best: Result) -> str:
    """How the quality differs, with its interval, on how many examples, and how many texts are the target's."""
    quality, same = best.quality, best.agreement_with_target
    text = f"{_change(group, best)} on {group.setting.n_examples} examples"
    if quality.difference_high is not None and quality.difference_high < 0:
        text += ", a loss beyond chance"
    if same is not None:
        text += f"; {_different(same, group.setting.n_examples)}"
    return text + _caution(best)


def _change(group: Group, result: Result) -> str:
    """The difference in quality and its interval: `BLEU +0.50, +0.05 to +1.00`, or `no change in BLEU`."""
    quality = result.quality
    low, high = quality.difference_low, quality.difference_high
    if quality.difference == 0 and not low and not high:
        return f"no change in {group.metric}"
    bounds = f", {signed(low)} to {signed(high)}" if low is not None and high is not None else ""
    return f"{group.metric} {signed(quality.difference)}{bounds}"


def _different(same: float, count: int) -> str:
    """How many texts are the target's own; if few are not, that the interval of the difference rests on these few."""
    different = round((1 - same) * count)
    if different < ENOUGH_DIFFERENT:
        texts = "1 text differs" if different == 1 else f"{different} texts differ"
        return f"only {texts} from the target’s, too few to trust this interval"
    return f"{percent(same, 0 if same < 0.995 else 1)} of the texts are the target’s own"


def _caution(best: Result) -> str:
    """A warning if the point is not clearly faster than the baseline, or if its timings cannot be relied on."""
    speedup, warnings = best.speedup, []
    if speedup.value is not None and speedup.value <= 1:
        warnings.append("not faster than the baseline")
    elif speedup.low is not None and speedup.low <= 1:
        warnings.append("not clearly faster, as the interval holds 1")
    if best.doubt:
        what = "neither speed nor quality says much" if best.baseline_empty == 1 else "its quality says little"
        warnings.append(f"{best.doubt}, so {what}")
    if why := disturbance(best):
        warnings.append(f"{why}, so time it again before relying on the speedup")
    return "".join(f": {warning}" if place == 0 else f"; {warning}" for place, warning in enumerate(warnings))


def _selection(group: Group, count: int) -> str:
    """How the named points were chosen, and where to choose them instead."""
    split = group.setting.split
    chosen = f"Best of {count} points on these examples ({split})"
    if split.startswith(("valid", "dev")):
        return f"{chosen}: measure the choice on test data."
    return f"{chosen}, which flatters them: choose on validation data, as scripts/screen.py does."


def _too_few(group: Group, candidates: list[Result]) -> str:
    """The fastest point's numbers, without a verdict."""
    count, first = group.setting.n_examples, candidates[0]
    examples = "1 example is" if count == 1 else f"{count} examples are"
    speedup = f"{times(first.speedup.value)} {interval(first.speedup.low, first.speedup.high)}".strip()
    more = f", and {len(candidates) - 1} more in the table" if len(candidates) > 1 else ""
    return (
        f"{examples} too few to say which point is faster or better, as intervals are too narrow below "
        f"{ENOUGH_EXAMPLES}. Measured: {point_label(first, group.knobs(first))} {speedup}, "
        f"{_change(group, first)}{_caution(first)}{more}."
    )


def _impossible(group: Group, first: Result) -> str:
    """The counts of a point whose timing cannot be right, and what to do."""
    speedup = f"{times(first.speedup.value)} {interval(first.speedup.low, first.speedup.high)}".strip()
    return (
        f"{point_label(first, group.knobs(first))} emits {number(first.counts.tokens_per_target_call)} tokens per call "
        f"of the target. Its measured speedup of {speedup} is more than that allows, so there is no speedup to report: "
        "time it again with resume=false on an idle machine, or with runtime.threads=1."
    )


def _without_comparison(group: Group) -> str:
    few = not group.enough or len(group.results) == 1
    fastest = min(group.results, key=lambda result: result.latency_s.median)
    label = point_label(fastest, group.knobs(fastest))
    quality = f"{group.metric} {number(fastest.quality.value)}"
    reason = "Only the baseline was measured" if group.relative else "No baseline was measured"
    fact = f"{label}, {duration(fastest.latency_s.median)} an example (median), {quality}"
    return f"{reason}, so there is no speedup to report. {'Measured' if few else 'Fastest'}: {fact}."


def _speed_at_no_loss(group: Group) -> float:
    best = group.best(0.0)
    return best.speedup.value if best is not None else 0.0


def reason_lines(group: Group) -> list[tuple[str, str]]:
    """Label and explanation of each policy's fastest point at no loss, or of its fastest; none for what is not traced.

    `bild (fallback 0.5), 1.98×` and `6.90 tokens a call (α 98 %); a drafter step costs 13 % …`.
    """
    lines = []
    for policy in group.policies:
        results = group.of_policy(policy)
        chosen = best_at_loss(results, 0.0) or results[0]
        if (why := reasons(chosen)) is not None:
            label = f"{point_label(chosen, group.knobs(chosen))}, {times(chosen.speedup.value)}"
            lines.append((label, explanation(chosen, why)))
    return lines


def explanation(result: Result, why: Reasons) -> str:
    """What the speedup is made of."""
    return f"{'; '.join([*_gained(result), *_spent(why)])}."


def _gained(result: Result) -> list[str]:
    """What is gained in a round, before any cost."""
    counts, pipeline = result.counts, result.pipeline
    if pipeline is not None:
        rate = percent(pipeline.match_rate)
        theorem = "" if pipeline.theorem is None else f", for which Theorem 4.1 gives {times(pipeline.theorem)}"
        return [f"{rate} of the predictions right{theorem}"]
    if counts.exit_layer_mean is not None and not counts.drafted:
        return [f"a token leaves after {number(counts.exit_layer_mean, 1)} layers on average"]
    if not counts.drafted or counts.tokens_per_target_call is None:
        return []
    return [f"{number(counts.tokens_per_target_call)} tokens a call (α {percent(counts.acceptance_rate)})"]


def _spent(why: Reasons) -> list[str]:
    costs = []
    if why.drafter_cost is not None and why.verification is not None:
        step, check = _share(why.drafter_cost), number(why.verification)
        costs = [f"a drafter step costs {step} of a target token (c), checking a draft {check} tokens"]
    stages = [f"{stage} {percent(share)}" for stage, share in why.shares.items() if share >= 0.005]
    return [*costs, f"time: {', '.join(stages)}"]


def _share(value: float | None) -> str:
    """A cost in percent, with a decimal if it is small."""
    return percent(value, 0 if value is None or value >= 0.095 else 1)
