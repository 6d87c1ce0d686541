"""What reviewers ask about a setting, with the answers that its points give."""

from __future__ import annotations

from collections.abc import Sequence

from bild_lab.lab.schema.formatting import counted, point_label, times
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import are_enough, corrected_for_choice
from bild_lab.lab.store.groups import Group, points_of_choice
from bild_lab.report.phrases import (
    difference_interval,
    machine_facts,
    model_sizes,
    signed_difference,
    timed_points,
)
from bild_lab.report.provenance import unreliable
from bild_lab.report.screened_points import ScreenedPoint

CONTROL = "truncation"  # the policy that lossy rules are compared with
# how policies of other engines begin
_PEERS = ("hf_", "ctranslate2", "openvino", "llama_cpp", "server")


def review_answers(group: Group, screened: Sequence[ScreenedPoint]) -> list[tuple[str, str]]:
    """Questions, each with its answer; questions without an answer are left out.

    screened: all points that were screened in the sweep's folder.
    """
    setting = group.setting
    decoding = ", ".join(
        f"{key} {value}" for key, value in setting["decoding"].items() if value is not None
    )
    answer_by_question = {
        "On which hardware?": _hardware(group),
        "How large are the models?": model_sizes(group.results),
        "How is text decoded?": f"{decoding}; seed {setting.seed}, the same for all points",
        "How often was it run?": _runs(group),
        "With which settings ran the baselines?": _baselines(group),
        "How were thresholds chosen, and on what?": _thresholds(group, screened),
        "Is a lossy rule ahead, and is that the drafter’s merit?": _lossy_rules(group),
        "What is not to be relied on?": " ".join(unreliable(group.results)),
    }
    return [(question, answer) for question, answer in answer_by_question.items() if answer]


def _hardware(group: Group) -> str:
    setting = group.setting
    machine = setting.hardware or setting.device
    if setting.device == "cpu":
        cores = group.results[0].environment.cores
        machine += f", {setting.threads} threads of {cores} cores"
    facts = [machine, machine_facts(group.results), f"{setting.dtype}, batch {setting.batch}"]
    return "; ".join(filter(None, facts))


def _runs(group: Group) -> str:
    setting = group.setting
    beside = f", in turn with {setting.baseline}" if setting.baseline else ""
    # several numbers of repeats where `measure.precision` decided
    repeats = [result.speedup.repeats or setting.repeats for result in group.results]
    texts = [result.counted_texts for result in group.results]
    runs = f"each text {_from_to(repeats, 'time')}{beside}, after {setting.warmup} to warm up"
    if any(not result.timed for result in group.results):
        runs += " (replayed texts are not timed)"
    return f"{runs}; intervals are over {_from_to(texts, 'text')}"


def _from_to(counts: Sequence[int], what: str) -> str:
    """The smallest and the largest count: `3 times`, or `6 to 17 times`."""
    lowest, highest = min(counts), max(counts)
    return counted(highest, what) if lowest == highest else f"{lowest} to {counted(highest, what)}"


def _baselines(group: Group) -> str:
    """The engine, precision and versions of the baseline and of the policies of other engines."""
    return "; ".join(
        _engine(result)
        for result in group.results
        if result.is_baseline or result.policy.startswith(_PEERS)
    )


def _engine(result: Result) -> str:
    versions = result.facts.get("versions")
    versions = versions or {"transformers": result.environment.transformers}
    version_texts = ", ".join(f"{name} {version}" for name, version in versions.items())
    label = point_label(result, list(result.knobs))
    return f"{label}: engine {result.engine}, {result.precision}, {version_texts}"


def _thresholds(group: Group, screened: Sequence[ScreenedPoint]) -> str:
    """Where the points' knobs were chosen: by a screening of other texts, or with these texts in
    sight.
    """
    split, n_candidates = group.setting.split, len(points_of_choice(group.results))
    confirmed = [
        point
        for point in screened
        if point.live is not None and point.live.setting == group.setting
    ]
    if confirmed:
        screened_splits = {
            f"{point.row['split']} ({counted(point.row['n_examples'], 'text')})"
            for point in confirmed
        }
        answer = (
            f"{len(confirmed)} of {len(screened)} points that were screened on"
            f" {', '.join(sorted(screened_splits))}, measured once on {split}"
        )
        n_unscreened = n_candidates - len({point.live.point for point in confirmed})
        return f"{answer}; {n_unscreened} more chosen without it" if n_unscreened else answer
    if not group.varying_knobs():
        return "no knob has several values here, so none was chosen on these texts"
    return (
        f"the best of {n_candidates} points was chosen on the texts that it is reported on"
        f" ({split}), which flatters it; scripts/screen.py chooses on others"
    )


def _lossy_rules(group: Group) -> str:
    """Whether a point scores above the target beyond chance, and what the control of lossy rules
    scores beside it; empty without a baseline.
    """
    if group.setting.baseline is None:
        return ""
    rules = [
        result
        for result in timed_points(group)
        if result.policy != CONTROL and result.quality.difference_low is not None
    ]
    n_rules = len(points_of_choice(rules))
    ahead = [
        corrected
        for corrected in (corrected_for_choice(result, n_rules) for result in rules)
        if are_enough(corrected.counted_texts)
        and corrected.quality.beyond_chance
        and corrected.quality.difference_low > 0
    ]
    if not ahead:
        return f"no point has more {group.metric} than {group.setting.baseline} beyond chance"
    best = max(ahead, key=lambda result: result.quality.difference)
    best_score = f"{_score(group, best)} and {times(best.speedup.value)}; its control"
    if n_rules > 1:
        best_score = f"of {n_rules} points (Bonferroni), {best_score}"
    if not group.setting.temperature:
        return f"{best_score}, {CONTROL}, writes the target’s own text under greedy decoding"
    control_scores = [_score(group, result) for result in group.results if result.policy == CONTROL]
    controls = ", ".join(control_scores) or f"not measured, add policy={CONTROL} with its bar"
    return f"{best_score}, the target alone over the tokens that such a rule accepts: {controls}"


def _score(group: Group, result: Result) -> str:
    """A point's difference in quality: `bild (fallback 0.5) BLEU +2.00 [+0.90, +2.50]`."""
    quality = result.quality
    difference = f"{group.metric} {signed_difference(quality)}"
    return f"{group.label(result)} {difference} {difference_interval(quality)}".strip()
