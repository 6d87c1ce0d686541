"""What a sweep found, in a few sentences that say no more than its intervals do."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

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
    ENOUGH_EXAMPLES,
    TOLERANCE,
    are_enough,
    best_at_loss,
    can_be_judged,
    corrected_for_choice,
    mean_speedup_with_interval,
    mean_with_interval,
)
from bild_lab.lab.store.groups import (
    HASH_KEYS,
    Group,
    by_setting,
    by_setting_without_seed,
    differing_keys,
    points_of_choice,
    setting_value,
    telling_knobs,
)
from bild_lab.report.phrases import (
    TIME_BATCHES_TWICE,
    cautions,
    difference_interval,
    quality_change,
    quality_claim,
    speed_claim,
    speedup_interval,
    timed_points,
)
from bild_lab.report.provenance import load_elsewhere, verdicts
from bild_lab.report.screened_points import screened_on

# the key of the setting that says whether passes ran as CUDA graphs, compiled, or kernel by kernel
REGIME = "compile"
APART = (
    "Points with CUDA graphs and points without, which differ in compile, are not compared with"
    " each other: their baselines differ in speed, too. To compare them, measure all with one value"
    " of runtime.compile, such as false."
)
_NAMED_KEYS = 3  # keys of the setting that the headline names at most
_NAMED_SEED_MEANS = 3  # points that were sampled with several seeds, named at most
_NAMED_POINTS = 3  # points that are not judged, named at most


def headline(results: Sequence[Result]) -> str:
    """Return what the sweep found, with intervals.

    Of several settings it is about the one that `best_group` returns.
    """
    return " ".join(headline_sentences(results))


def headline_sentences(results: Sequence[Result]) -> list[str]:
    """The headline, a sentence each: what is certain comes first."""
    groups = by_setting(results)
    group = best_group(groups)
    if group is None:
        return ["No point was measured."]
    keys, n_points = differing_keys(groups), len(points_of_choice(results))
    if len(groups) == 1 or not keys:
        return [*_counts_on_busy_machine(group), *_findings(group, n_points)]
    n_settings = len(by_setting_without_seed(groups))
    first_finding, *further_findings = _findings(group, n_points, n_settings)
    return [
        *_counts_on_busy_machine(group),
        *_means_over_seeds(results),
        f"{_one_of_settings(group, groups, keys)}: {first_finding}",
        *further_findings,
        *([APART] if REGIME in keys else []),
    ]


def best_group(groups: Sequence[Group]) -> Group | None:
    """Return the setting with the greatest speedup at no loss; None without a setting. Settings
    with points that can be judged come first, then those whose points are not all in doubt.

    Seeds are no choice: of settings that differ in the seed alone the mean counts, and the first is
    returned.
    """

    def key(groups_of_seeds: Sequence[Group]) -> tuple[bool, bool, float]:
        best_points = [
            best_at_loss(group.judged or group.results, 0.0) for group in groups_of_seeds
        ]
        speedups = [0.0 if best is None else best.speedup.value for best in best_points]
        sound = not all(result.doubt for group in groups_of_seeds for result in group.results)
        return all(group.judged for group in groups_of_seeds), sound, mean(speedups)

    settings = by_setting_without_seed(groups)
    return max(settings, key=key)[0] if settings else None


def _one_of_settings(group: Group, groups: Sequence[Group], keys: Sequence[str]) -> str:
    """The setting among the others: `Best of 2 settings (draft t5-tiny)`, or `One of 3 seeds
    (seed 0)`.

    keys: in which the settings differ.
    """
    n_settings = len(by_setting_without_seed(groups))
    if n_settings == 1:
        return f"One of {len(groups)} seeds (seed {group.setting.seed})"
    values = {key: setting_value(group.setting, key) for key in keys if key not in HASH_KEYS}
    named = [f"{key} {short_name(value)}" for key, value in values.items() if value is not None]
    words = ", ".join(named[:_NAMED_KEYS]) or f"which differ in {', '.join(keys)}"
    comparable = all(other_group.judged for other_group in groups) and REGIME not in keys
    return f"{'Best' if comparable else 'One'} of {n_settings} settings ({words})"


def _means_over_seeds(results: Sequence[Result]) -> list[str]:
    """A sentence on the fastest points that were sampled with several seeds: means, with intervals
    over the seeds.
    """
    points = points_of_choice(results)
    points_by_seed = [point for point in points if len(point) > 1]
    representatives = [seed_results[0] for seed_results in points_by_seed]
    knobs_of = telling_knobs(representatives)
    means, has_interval = [], False
    for seed_results in points_by_seed:
        if not all(map(_has_seed_means, seed_results)):
            continue
        speedups = [result.speedup.value for result in seed_results]
        speedup, speedup_low, speedup_high = mean_speedup_with_interval(speedups, len(points))
        label = point_label(seed_results[0], knobs_of(seed_results[0]), representatives)
        seeds = ", ".join(str(result.setting.seed) for result in seed_results)
        speed = f"{times(speedup)} {interval(speedup_low, speedup_high)}".strip()
        change = _mean_change(seed_results, len(points))
        means.append((speedup, f"{label} {speed}, {change} (seeds {seeds})"))
        has_interval = has_interval or speedup_low is not None
    fastest = [words for _, words in sorted(means, reverse=True)[:_NAMED_SEED_MEANS]]
    if not fastest:
        return []
    if not has_interval:
        return [f"Mean over sampling seeds: {'; '.join(fastest)}."]
    choice = f" (Bonferroni, of {len(points)} points)" if len(points) > 1 else ""
    return [f"Mean and 95 % interval over sampling seeds{choice}: {'; '.join(fastest)}."]


def _has_seed_means(result: Result) -> bool:
    """Whether a point was sampled and compared, and may be the best, so that its seeds have a mean."""
    is_compared = None not in (result.speedup.value, result.quality.difference)
    return bool(result.setting.temperature) and is_compared and result.may_be_best


def _mean_change(seed_results: Sequence[Result], n_points: int) -> str:
    """The mean difference in quality of a point over its seeds, with its interval for the best of so
    many points.
    """
    differences = [result.quality.difference for result in seed_results]
    difference, low, high = mean_with_interval(differences, n_points)
    metric, digits = seed_results[0].quality.metric, seed_results[0].quality.scale.digits
    change = f"{metric} {signed(difference, digits)} {interval(low, high, digits, signed)}"
    return change.strip()


def _findings(group: Group, n_points: int, n_settings: int = 1) -> list[str]:
    """What was found of the points that were timed, then of replayed texts.

    n_points, n_settings: among which the best was chosen.
    """
    some_timed = any(result.timed for result in group.results)
    timed = _timed_findings(group, n_points, n_settings) if some_timed else []
    replayed = [_replayed(group, result) for result in group.results if not result.timed]
    return [*timed, *replayed]


def _replayed(group: Group, result: Result) -> str:
    """How many of the replayed texts are the target's own, and their quality."""
    certificate, words = result.certificate, f"{group.label(result)} replays texts"
    if certificate is not None:
        verdict_words = verdicts(certificate.equal, certificate.ties, certificate.defects)
        words = f"{words}: {certificate.equal} of {group.setting.n_examples} {verdict_words}"
    if result.quality.difference is None:
        return f"{words}; {result.quality.words}."
    return f"{words}; {quality_change(group, result)}."


def _timed_findings(group: Group, n_points: int, n_settings: int) -> list[str]:
    points = timed_points(group)
    if not group.relative or not points or group.baseline_quality is None:
        return [_without_comparison(group)]
    possible = [result for result in points if result.may_be_best] or [
        result for result in points if not result.impossible
    ]
    if not possible:
        return [_impossible_speedup(group, points[0])]
    judged = [result for result in possible if can_be_judged(result)]
    if not judged:
        return [_without_verdict(group, possible)]
    claims = _claims(group, judged)
    best = best_at_loss(judged, group.scale.small_loss)
    if n_points > 1 and best is not None:
        claims.append(_choice_in_words(group, best, n_points, n_settings))
    return claims + _not_judged(group, [result for result in possible if not can_be_judged(result)])


def _impossible_speedup(group: Group, result: Result) -> str:
    tokens_per_call = number(result.counts.tokens_per_target_call)
    return (
        f"{group.label(result)} emits {tokens_per_call} tokens per call of the target. Its measured"
        f" speedup of {speedup_interval(result)} is more than that allows, so there is no speedup to"
        " report: time it again with resume=false on an idle machine, or with runtime.threads=1. If it"
        " stays so, the policy remembers earlier repeats: begin each text anew (`begin`)."
    )


def _counts_on_busy_machine(group: Group) -> list[str]:
    """Where the timing of every point is disturbed: why, and what does not depend on it; else
    nothing.
    """
    points = timed_points(group)
    if not points or not all(
        result.environment.busy or result.environment.shared_device for result in points
    ):
        return []
    fewest_calls = [_fewest_calls(points, loss) for loss in (0.0, group.scale.small_loss)]
    # both losses may have the same point
    counts = list(
        dict.fromkeys(_counts(group, result) for result in fewest_calls if result is not None)
    )
    load = _load(points)
    timings = "times" if all(result.speedup.value is None for result in points) else "speedups"
    if not counts:
        return [f"{load}: do not rely on the {timings}, time them again on an idle machine."]
    first_counts, *further_counts = counts
    return [
        f"{load}, so counts come first, which no load changes: {first_counts}",
        *further_counts,
        f"Do not rely on these {timings}:",
    ]


def _load(results: Sequence[Result]) -> str:
    """What disturbed the timing of all these points."""
    if all(result.environment.busy for result in results):
        points = "the point was" if len(results) == 1 else "all points were"
        used = load_elsewhere(results)
        return f"Other programs used {used} % of the machine while {points} timed"
    return f"{'The point was' if len(results) == 1 else 'All points were'} timed beside other work"


def _fewest_calls(results: Sequence[Result], loss: float) -> Result | None:
    """The point with the most tokens per call of the target, of those that lose at most so much
    quality.
    """
    allowed = [
        result
        for result in results
        if result.counts.tokens_per_target_call is not None
        and not result.wordless
        and (result.quality.difference or 0.0) >= -loss - TOLERANCE
    ]
    return max(allowed, key=lambda result: result.counts.tokens_per_target_call, default=None)


def _counts(group: Group, result: Result) -> str:
    """The counts of a point, its quality, and the speedup that they predict."""
    counts, prediction = result.counts, result.prediction
    details = []
    if counts.target_calls is not None:
        details.append(f"{counts.target_calls:,} forwards for {result.tokens:,} tokens")
    if counts.acceptance_rate is not None:
        details.append(f"{percent(counts.acceptance_rate)} of its drafted tokens accepted")
    tokens_per_call = number(counts.tokens_per_target_call)
    words = f"{group.label(result)} emits {tokens_per_call} tokens per call of the target"
    if details:
        words += f" ({', '.join(details)})"
    words += f", {quality_change(group, result)}."
    if prediction is not None:
        cost = f"a drafter step at {percent(prediction.cost_ratio)} of a token of the target"
        words += (
            f" With {cost} these counts predict {times(prediction.rounds)}, before the cost of"
            " checking drafts."
        )
    return words


def _claims(group: Group, results: list[Result]) -> list[str]:
    """What is certain comes first: the fastest point whose texts are all the target's own, then
    those that may lose.

    A point is named once, and only if it is faster than those before it.
    """
    baseline_name, metric = group.setting.baseline, group.metric
    baseline = f"{baseline_name} ({number(group.baseline_quality, group.scale.digits)})"
    equal_texts = [result for result in results if result.agreement_with_target == 1.0]
    equal = best_at_loss(equal_texts, 0.0)
    small_loss = group.scale.loss_words
    without_loss, with_small_loss = (
        best_at_loss(results, loss) for loss in (0.0, group.scale.small_loss)
    )
    if with_small_loss is None:
        return [f"No point came within {small_loss} of the {metric} of {baseline}."]
    claims = []
    if equal is not None:
        claims.append(
            f"{speed_claim(group, equal)} as {baseline_name}, every text the target’s"
            f" own{cautions(equal)}."
        )
    if without_loss is None:
        claims.append(f"No point kept the {metric} of {baseline}.")
    elif without_loss is not equal:
        speed = speed_claim(group, without_loss)
        if not claims:
            speed += f" as {baseline_name}"
        claims.append(
            f"No loss of {metric} measured: {speed}; {quality_claim(group, without_loss)}."
        )
    if with_small_loss is without_loss:
        claims.append(f"Allowing {small_loss} of loss finds nothing faster.")
    else:
        claims.append(
            f"Up to {small_loss} of loss measured: {speed_claim(group, with_small_loss)};"
            f" {quality_claim(group, with_small_loss)}."
        )
    return claims


def _choice_in_words(group: Group, best: Result, n_points: int, n_settings: int) -> str:
    """How the named points were chosen, where to choose them instead, and the intervals of the last
    one, `best`, for that choice, which was among the points of all settings.
    """
    split, corrected = group.setting.split, corrected_for_choice(best, n_points)
    intervals = f"{group.label(best)} has {interval(corrected.speedup.low, corrected.speedup.high)}"
    if corrected.quality.difference_low is not None:
        intervals += f", {group.metric} {difference_interval(corrected.quality)}"
    where = "on these examples" if n_settings == 1 else f"of {n_settings} settings"
    choice = f"Best of {n_points} points {where} ({split})"
    if split.startswith(("valid", "dev")):
        choice += ": measure the choice on test data."
    elif (screened_split := screened_on(best)) is not None:
        choice += (
            f", which flatters it, though it was screened on {screened_split}:"
            " screen.confirmations=1 measures only the point that is chosen there."
        )
    else:
        choice += ", which flatters them: choose on validation data, as scripts/screen.py does."
    return f"{choice} Corrected for that choice (Bonferroni), {intervals}."


def _not_judged(group: Group, results: Sequence[Result]) -> list[str]:
    """Sentences on the points that were left out of the others' verdict: servers failed to give some
    of their texts, or an earlier version did not say how far the clock of a batch was off. Nothing
    without one.
    """
    too_few = [
        f"{group.label(result)} with {counted(result.counted_texts, 'example')}"
        for result in results
        if not are_enough(result.counted_texts)
    ]
    unclear_clock = [group.label(result) for result in results if are_enough(result.counted_texts)]
    reasons = {
        f"intervals are too narrow below {ENOUGH_EXAMPLES} examples": too_few,
        f"nothing says how far the clock of their batches is off ({TIME_BATCHES_TWICE})": unclear_clock,
    }
    return [
        f"Not judged, as {reason}: {_first_of(labels)}."
        for reason, labels in reasons.items()
        if labels
    ]


def _first_of(labels: Sequence[str]) -> str:
    """The first labels, and how many there are beyond them."""
    more = f" and {len(labels) - _NAMED_POINTS} more" if len(labels) > _NAMED_POINTS else ""
    return f"{', '.join(labels[:_NAMED_POINTS])}{more}"


def _without_verdict(group: Group, results: list[Result]) -> str:
    """Why no point is called faster, and the fastest point's numbers."""
    fastest = results[0]
    n_examples = fastest.counted_texts
    examples = "1 example is" if n_examples == 1 else f"{n_examples} examples are"
    n_texts = fastest.answered_texts
    shared = f": {n_texts} texts, but those of one source or conversation count once"
    reason = (
        "Texts of a batch share their clock, and nothing says how far it is off:"
        f" {TIME_BATCHES_TWICE}."
        if are_enough(n_examples)
        else f"{examples} too few to say which point is faster or better, as intervals are too"
        f" narrow below {ENOUGH_EXAMPLES}{shared if n_texts > n_examples else ''}."
    )
    more = f", and {len(results) - 1} more in the table" if len(results) > 1 else ""
    return (
        f"{reason} Measured: {group.label(fastest)} {speedup_interval(fastest)},"
        f" {quality_change(group, fastest)}{cautions(fastest)}{more}."
    )


def _without_comparison(group: Group) -> str:
    timed = group.judged or [result for result in group.results if result.timed]
    fastest = min(timed, key=lambda result: result.latency_s.median)
    quality = fastest.quality.words
    fact = f"{group.label(fastest)}, {duration(fastest.latency_s.median)} an example (median)"
    reason = "Only the baseline was measured" if group.relative else "No baseline was measured"
    rank = "Fastest" if len(group.judged) > 1 else "Measured"
    return f"{reason}, so there is no speedup to report. {rank}: {fact}, {quality}."
