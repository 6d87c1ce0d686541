"""What a sweep found, in a few sentences that say no more than its intervals do; why; and what
reviewers will ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from bild_lab.lab.measure.prediction import Reasons, reasons
from bild_lab.lab.schema.formatting import (
    counted,
    duration,
    interval,
    number,
    percent,
    point_label,
    short_name,
    signed,
    times,
)
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import (
    ENOUGH_DIFFERENT,
    ENOUGH_EXAMPLES,
    TOLERANCE,
    best_at_loss,
    interval_of_best,
    mean_with_interval,
)
from bild_lab.lab.store.groups import (
    Group,
    by_setting,
    differing_in,
    differing_keys,
    telling_knobs,
)
from bild_lab.report.page.grid import ScreenedPoint
from bild_lab.report.provenance import disturbance, unreliable

_HASHES = ("code", "data", "weights")  # keys of the setting whose values mean nothing to a reader
CONTROL = "truncation"
# the key of the setting that says whether passes ran as CUDA graphs, compiled, or kernel by kernel
REGIME = "compile"
APART = (
    "Points with CUDA graphs and points without, which differ in compile, are not compared with"
    " each other: their baselines differ in speed, too. To compare them, measure all with one value"
    " of runtime.compile, such as false."
)
_PEERS = ("hf_", "ctranslate2", "openvino", "llama_cpp")  # how policies of other engines begin


def headline(results: Sequence[Result]) -> str:
    """Return what the sweep found, with intervals.

    Of several settings it is about the leading one.
    """
    return " ".join(sentences(results))


def sentences(results: Sequence[Result]) -> list[str]:
    """The headline, a sentence each: what is certain comes first."""
    groups = by_setting(results)
    leader = leading(groups)
    if leader is None:
        return ["No point finished, so there is nothing to report."]
    keys = differing_keys(groups)
    if len(groups) == 1 or not keys:
        return [*_counts_first(leader), *_verdict(leader)]
    telling = {key: leader.setting.get(key) for key in keys if key not in _HASHES}
    named = [f"{key} {short_name(value)}" for key, value in telling.items() if value is not None][
        :3
    ]
    which = "Best of" if leader.has_enough_examples and REGIME not in keys else "One of"
    words = ", ".join(named) or f"which differ in {', '.join(keys)}"
    first, *others = _verdict(leader)
    regimes = [APART] if REGIME in keys else []
    found = [
        *_over_seeds(results),
        f"{which} {len(groups)} settings ({words}): {first}",
        *others,
        *regimes,
    ]
    return [*_counts_first(leader), *found]


def _over_seeds(results: Sequence[Result]) -> list[str]:
    """A sentence on the fastest points that were sampled with several seeds: means, with intervals
    over the seeds.
    """
    lines = []
    pooled = [list(one.values()) for one in differing_in("seed", results) if len(one) > 1]
    for several in pooled:
        first, speeds = several[0], [one.speedup.value for one in several if not one.impossible]
        losses = [one.quality.difference for one in several]
        if (
            not first.setting.temperature
            or None in [*speeds, *losses]
            or len(speeds) < len(several)
        ):
            continue
        (speed, *ends), (loss, *around) = mean_with_interval(speeds), mean_with_interval(losses)
        label = point_label(first, telling_knobs(first, [each[0] for each in pooled]))
        seeds = ", ".join(str(one.setting.seed) for one in several)
        change = f"{first.quality.metric} {signed(loss)} {interval(*around, write=signed)}"
        lines.append((speed, f"{label} {times(speed)} {interval(*ends)}, {change} (seeds {seeds})"))
    fastest = [line for _, line in sorted(lines, reverse=True)[:3]]
    return [f"Mean and 95 % interval over sampling seeds: {'; '.join(fastest)}."] if fastest else []


def leading(groups: Sequence[Group]) -> Group | None:
    """Return the setting with the greatest speedup at no loss, among those with enough examples if
    there are any.
    """

    def key(group: Group) -> tuple[bool, float]:
        best = group.best(0.0)
        return group.has_enough_examples, 0.0 if best is None else best.speedup.value

    return max(groups, key=key, default=None)


def _verdict(group: Group) -> list[str]:
    """What was found of the points that were timed, then of replayed texts."""
    timed = _speed_verdict(group) if any(result.timed for result in group.results) else []
    return [*timed, *(_replayed(group, result) for result in group.results if not result.timed)]


def _candidates(group: Group) -> list[Result]:
    """The timed points beside the baseline."""
    return [result for result in group.results if result.timed and not result.is_baseline]


def _replayed(group: Group, result: Result) -> str:
    """How many of the replayed texts are the target's own, and their quality."""
    certificate, words = result.certificate, f"{group.label(result)} replays texts"
    if certificate is not None:
        ties, defects = (
            counted(certificate.ties, "numerical tie"),
            counted(certificate.defects, "defect"),
        )
        equal = f"{certificate.equal} of {group.setting.n_examples} are the target’s own"
        words = f"{words}: {equal}, {ties}, {defects}"
    quality = result.quality
    if quality.difference is None:
        return f"{words}; {group.metric} {number(quality.value)}."
    return f"{words}; {_change(group, result)}."


def _speed_verdict(group: Group) -> list[str]:
    candidates = _candidates(group)
    if not group.relative or not candidates or group.baseline_quality is None:
        return [_without_comparison(group)]
    possible = [result for result in candidates if not result.impossible]
    if not possible:
        first = candidates[0]
        return [
            f"{group.label(first)} emits {number(first.counts.tokens_per_target_call)} tokens per"
            f" call of the target. Its measured speedup of {_speedup(first)} is more than that"
            " allows, so there is no speedup to report: time it again with resume=false on an idle"
            " machine, or with runtime.threads=1."
        ]
    if not group.has_enough_examples:
        return [_too_few(group, possible)]
    claims = _claims(group, possible)
    if len(candidates) > 1 and group.best(1.0) is not None:
        claims.append(_selection(group, len(candidates)))
    return claims


def _counts_first(group: Group) -> list[str]:
    """Where the timing of every point is disturbed: why, and what does not depend on it; else
    nothing.
    """
    candidates = _candidates(group)
    loaded = [one for one in candidates if one.environment.busy or one.environment.shared_device]
    if not candidates or len(loaded) < len(candidates):
        return []
    fewest = [_fewest_calls(candidates, loss) for loss in (0.0, 1.0)]
    counted = list(dict.fromkeys(_counted(group, one) for one in fewest if one is not None))
    why = _load(candidates)
    if not counted:
        return [f"{why}: do not rely on the speedups, time them again on an idle machine."]
    first, *others = counted
    return [
        f"{why}, so counts come first, which no load changes: {first}",
        *others,
        "Do not rely on these speedups:",
    ]


def _load(results: Sequence[Result]) -> str:
    """What disturbed the timing of all these points."""
    busy = [
        result.environment.busy_elsewhere_percent for result in results if result.environment.busy
    ]
    if len(busy) == len(results):
        used = " to ".join(dict.fromkeys(number(end, 0) for end in (min(busy), max(busy))))
        timed = "the point was" if len(busy) == 1 else "all points were"
        return f"Other programs used {used} % of the machine while {timed} timed"
    return f"{'The point was' if len(results) == 1 else 'All points were'} timed beside other work"


def _fewest_calls(results: Sequence[Result], loss: float) -> Result | None:
    """The point with the most tokens per call of the target, of those that lose at most so much
    quality.
    """
    kept = [
        one
        for one in results
        if one.counts.tokens_per_target_call is not None
        and (one.quality.difference or 0.0) >= -loss - TOLERANCE
    ]
    return max(kept, key=lambda one: one.counts.tokens_per_target_call, default=None)


def _counted(group: Group, result: Result) -> str:
    """The counts of a point, its quality, and the speedup that they predict."""
    counts, prediction = result.counts, result.prediction
    details = []
    if counts.target_calls is not None:
        details.append(f"{counts.target_calls:,} forwards for {result.tokens:,} tokens")
    if counts.acceptance_rate is not None:
        details.append(f"{percent(counts.acceptance_rate)} of its drafted tokens accepted")
    words = (
        f"{group.label(result)} emits {number(counts.tokens_per_target_call)} tokens per call of"
        " the target"
    )
    words += (
        f" ({', '.join(details)}), {_change(group, result)}."
        if details
        else f", {_change(group, result)}."
    )
    if prediction is not None:
        cost = f"a drafter step at {percent(prediction.cost_ratio)} of a token of the target"
        words += (
            f" With {cost} these counts predict {times(prediction.rounds)}, before the cost of"
            " checking drafts."
        )
    return words


def _claims(group: Group, candidates: list[Result]) -> list[str]:
    """What is certain comes first: the fastest point whose texts are all the target's own, then
    those that may lose.

    A point is named once, and only if it is faster than those before it.
    """
    same = best_at_loss(
        [result for result in candidates if result.agreement_with_target == 1.0], 0.0
    )
    free, cheap = group.best(0.0), group.best(1.0)
    baseline = f"{group.setting.baseline} ({number(group.baseline_quality)})"
    if cheap is None:
        return [f"No point came within one point of the {group.metric} of {baseline}."]
    claims = []
    if same is not None:
        claims.append(
            f"{_fast(group, same)} as {group.setting.baseline}, every text the target’s"
            f" own{_caution(same)}."
        )
    if free is None:
        claims.append(f"No point kept the {group.metric} of {baseline}.")
    elif free is not same:
        than = "" if claims else f" as {group.setting.baseline}"
        claims.append(
            f"No loss of {group.metric} measured: {_fast(group, free)}{than};"
            f" {_compared(group, free)}."
        )
    if cheap is free:
        claims.append("Allowing one point of loss finds nothing faster.")
    else:
        claims.append(
            f"Up to one point of loss measured: {_fast(group, cheap)}; {_compared(group, cheap)}."
        )
    return claims


def _fast(group: Group, best: Result) -> str:
    """`bild (fallback 0.5) decodes 1.98× [1.86, 2.11] as fast`."""
    return f"{group.label(best)} decodes {_speedup(best)} as fast"


def _speedup(result: Result) -> str:
    speedup = result.speedup
    return f"{times(speedup.value)} {interval(speedup.low, speedup.high)}".strip()


def _compared(group: Group, best: Result) -> str:
    """How the quality differs, with its interval, on how many examples, and how many texts are the
    target's.
    """
    quality, same = best.quality, best.agreement_with_target
    text = f"{_change(group, best)} on {group.setting.n_examples} examples"
    if quality.difference_high is not None and quality.difference_high < 0:
        text += ", a loss beyond chance"
    if same is not None:
        text += f"; {_different(same, group.setting.n_examples)}"
    return text + _caution(best)


def _change(group: Group, result: Result) -> str:
    """The difference in quality and its interval:

    `BLEU +0.50, +0.05 to +1.00`, or `no change in BLEU`.
    """
    quality = result.quality
    low, high = quality.difference_low, quality.difference_high
    if quality.difference == 0 and not low and not high:
        return f"no change in {group.metric}"
    bounds = f", {signed(low)} to {signed(high)}" if low is not None and high is not None else ""
    return f"{group.metric} {signed(quality.difference)}{bounds}"


def _different(same: float, count: int) -> str:
    """How many texts are the target's own; if few are not, that the interval of the difference
    rests on these few.
    """
    different = round((1 - same) * count)
    if different < ENOUGH_DIFFERENT:
        texts = "1 text differs" if different == 1 else f"{different} texts differ"
        return f"only {texts} from the target’s, too few to trust this interval"
    return f"{percent(same, 0 if same < 0.995 else 1)} of the texts are the target’s own"


def _caution(best: Result) -> str:
    """A warning if the point is not clearly faster than the baseline, or if its timings cannot be
    relied on.
    """
    speedup, warnings = best.speedup, []
    if speedup.value is not None and speedup.value <= 1:
        warnings.append("not faster than the baseline")
    elif speedup.low is not None and speedup.low <= 1:
        warnings.append("not clearly faster, as the interval holds 1")
    if best.doubt:
        what = (
            "neither speed nor quality says much"
            if best.baseline_empty == 1
            else "its quality says little"
        )
        warnings.append(f"{best.doubt}, so {what}")
    if why := disturbance(best):
        warnings.append(f"{why}, so time it again before relying on the speedup")
    return "".join(
        f": {warning}" if place == 0 else f"; {warning}" for place, warning in enumerate(warnings)
    )


def _selection(group: Group, count: int) -> str:
    """How the named points were chosen, where to choose them instead, and the last one's intervals
    for that choice.
    """
    split, best = group.setting.split, group.best(1.0)
    chosen = f"Best of {count} points on these examples ({split})"
    speed, quality, changed = best.speedup, best.quality, ""
    if quality.difference_low is not None:
        ends = interval_of_best(
            quality.difference, quality.difference_low, quality.difference_high, count
        )
        changed = f", {group.metric} {interval(*ends, write=signed)}"
    ends = interval_of_best(
        *map(log, (speed.value, speed.low or speed.value, speed.high or speed.value)), count
    )
    label = group.label(best)
    corrected = (
        f"Corrected for that choice (Bonferroni), {label} has {interval(*map(exp, ends))}{changed}"
    )
    if split.startswith(("valid", "dev")):
        return f"{chosen}: measure the choice on test data. {corrected}."
    return (
        f"{chosen}, which flatters them: choose on validation data, as scripts/screen.py does."
        f" {corrected}."
    )


def _too_few(group: Group, candidates: list[Result]) -> str:
    """The fastest point's numbers, without a verdict."""
    count, first = group.setting.n_examples, candidates[0]
    examples = "1 example is" if count == 1 else f"{count} examples are"
    more = f", and {len(candidates) - 1} more in the table" if len(candidates) > 1 else ""
    return (
        f"{examples} too few to say which point is faster or better, as intervals are too narrow"
        f" below {ENOUGH_EXAMPLES}. Measured: {group.label(first)} {_speedup(first)},"
        f" {_change(group, first)}{_caution(first)}{more}."
    )


def _without_comparison(group: Group) -> str:
    timed = [result for result in group.results if result.timed]
    few = not group.has_enough_examples or len(timed) == 1
    fastest = min(timed, key=lambda result: result.latency_s.median)
    label = group.label(fastest)
    quality = f"{group.metric} {number(fastest.quality.value)}"
    reason = "Only the baseline was measured" if group.relative else "No baseline was measured"
    fact = f"{label}, {duration(fastest.latency_s.median)} an example (median), {quality}"
    return (
        f"{reason}, so there is no speedup to report. {'Measured' if few else 'Fastest'}: {fact}."
    )


def front_in_words(group: Group, bounds: bool = True) -> list[tuple[Result, str, str]]:
    """The Pareto front, fastest first: each point, its label, and its numbers in words.

    `1.62× [1.56, 1.68], BLEU 82.40, −6.88 [−9.80, −3.90]`. bounds: with the intervals.
    """
    lines = []
    for result in group.front():
        quality = result.quality
        speed = times(result.speedup.value) if group.relative else duration(result.latency_s.mean)
        if group.relative and bounds:
            speed = _speedup(result)
        numbers = f"{speed}, {group.metric} {number(quality.value)}"
        if quality.difference is not None:
            numbers += f", {signed(quality.difference)}"
        if quality.difference is not None and bounds:
            numbers += f" {interval(quality.difference_low, quality.difference_high, write=signed)}".rstrip()
        if why := disturbance(result):
            numbers += f"; {why}"
        lines.append((result, group.label(result), numbers))
    return lines


def reason_lines(group: Group) -> list[tuple[str, str]]:
    """Label and explanation of each policy's fastest point at no loss, or of its fastest; none for
    what is not traced.

    `bild (fallback 0.5), 1.98×` and `6.90 tokens a call (α 98 %); a drafter step costs 13 % …`.
    """
    lines = []
    for policy in group.policies:
        results = group.of_policy(policy)
        chosen = best_at_loss(results, 0.0) or results[0]
        if (why := reasons(chosen)) is not None:
            speed = ", ".join(filter(None, [times(chosen.speedup.value), disturbance(chosen)]))
            label = f"{group.label(chosen)}, {speed}"
            lines.append((label, explanation(chosen, why)))
    return lines


def explanation(result: Result, why: Reasons) -> str:
    """What the speedup is made of."""
    costs = []
    if why.drafter_cost is not None and why.verification is not None:
        step = percent(why.drafter_cost, 0 if why.drafter_cost >= 0.095 else 1)
        check = number(why.verification)
        costs = [
            f"a drafter step costs {step} of a target token (c), checking a draft {check} tokens"
        ]
    stages = [f"{stage} {percent(share)}" for stage, share in why.shares.items() if share >= 0.005]
    return "; ".join([*_gained(result), *costs, f"time: {', '.join(stages)}"]) + "."


def _gained(result: Result) -> list[str]:
    """What is gained in a round, before any cost."""
    counts, pipeline = result.counts, result.pipeline
    if pipeline is not None:
        rate = percent(pipeline.match_rate)
        theorem = (
            ""
            if pipeline.theorem is None
            else f", for which Theorem 4.1 gives {times(pipeline.theorem)}"
        )
        return [f"{rate} of the predictions right{theorem}"]
    if counts.exit_layer_mean is not None and not counts.drafted:
        return [f"a token leaves after {number(counts.exit_layer_mean, 1)} layers on average"]
    if not counts.drafted or counts.tokens_per_target_call is None:
        return []
    return [
        f"{number(counts.tokens_per_target_call)} tokens a call (α"
        f" {percent(counts.acceptance_rate)})"
    ]


def answers(group: Group, screened: Sequence[ScreenedPoint]) -> list[tuple[str, str]]:
    """Questions, each with its answer. screened: all points that were screened in the sweep's
    folder.
    """
    setting, first = group.setting, group.results[0]
    cores = (
        f", {setting.threads} threads of {first.environment.cores} cores"
        if setting.device == "cpu"
        else ""
    )
    decoding = ", ".join(
        f"{key} {value}" for key, value in setting["decoding"].items() if value is not None
    )
    runs = (
        f"each text {setting.repeats} times, in turn with {setting.baseline}, after"
        f" {setting.warmup} to warm up"
    )
    if any(not result.timed for result in group.results):
        runs += " (replayed texts are not timed)"
    baselines = [one for one in group.results if one.is_baseline or one.policy.startswith(_PEERS)]
    found = {
        "On which hardware?": (
            f"{setting.hardware or setting.device}{cores}; {setting.dtype}, batch {setting.batch}"
        ),
        "How large are the models?": sizes(group.results),
        "How is text decoded?": f"{decoding}; seed {setting.seed}, the same for all points",
        "How often was it run?": f"{runs}; intervals are over the {setting.n_examples} texts",
        "With which settings ran the baselines?": "; ".join(map(_baseline, baselines)),
        "How were thresholds chosen, and on what?": _chosen(group, screened),
        "Is a lossy rule ahead, and is that the drafter’s merit?": _controlled(group),
        "What is not to be relied on?": " ".join(unreliable(group.results)),
    }
    return [(question, answer) for question, answer in found.items() if answer]


def sizes(results: Sequence[Result]) -> str:
    """The parameters of each model:

    `target 737 M, draft 1.5 M`; empty for results that did not record them.
    """
    counts = next(filter(None, ((one.facts or {}).get("parameters") for one in results)), {})
    return ", ".join(
        f"{role} {number(count / 1e6, int(count < 1e8))} M" for role, count in counts.items()
    )


def _baseline(result: Result) -> str:
    versions = (result.facts or {}).get("versions") or {
        "transformers": result.environment.transformers
    }
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{point_label(result, list(result.knobs))}: engine {result.engine}, {result.precision},"
        f" {named}"
    )


def _chosen(group: Group, screened: Sequence[ScreenedPoint]) -> str:
    """Where the points' knobs were chosen: by a screening of other texts, or with these texts in
    sight.
    """
    split, candidates = group.setting.split, _candidates(group)
    live = [one for one in screened if one.live is not None and one.live.setting == group.setting]
    if live:
        where = ", ".join(
            sorted({f"{one.row['split']} ({one.row['n_examples']} texts)" for one in live})
        )
        chosen = (
            f"{len(live)} of {len(screened)} points that were screened on {where}, measured once on"
            f" {split}"
        )
        others = len(candidates) - len({one.live.point for one in live})
        return chosen + (f"; {others} more chosen without it" if others else "")
    if not group.varying_knobs():
        return "no knob has several values here, so none was chosen on these texts"
    flattered = (
        f"the best of {len(candidates)} points was chosen on the texts that it is reported on"
        f" ({split})"
    )
    return f"{flattered}, which flatters it; scripts/screen.py chooses on others"


def _controlled(group: Group) -> str:
    """Whether a point scores above the target beyond chance, and what the control of lossy rules
    scores beside it.
    """
    ahead = [
        one
        for one in _candidates(group)
        if one.policy != CONTROL and (one.quality.difference_low or 0) > 0
    ]
    if not ahead:
        return f"no point has more {group.metric} than {group.setting.baseline} beyond chance"
    best = max(ahead, key=lambda one: one.quality.difference)
    said = f"{_scored(group, best)} and {times(best.speedup.value)}; its control"
    if not group.setting.temperature:
        return f"{said}, {CONTROL}, writes the target’s own text under greedy decoding"
    beside = [_scored(group, one) for one in group.results if one.policy == CONTROL]
    found = ", ".join(beside) or f"not measured, add policy={CONTROL} with its bar"
    return f"{said}, the target alone over the tokens that such a rule accepts: {found}"


def _scored(group: Group, result: Result) -> str:
    quality = result.quality
    bounds = interval(quality.difference_low, quality.difference_high, write=signed)
    return f"{group.label(result)} {group.metric} {signed(quality.difference)} {bounds}".strip()
