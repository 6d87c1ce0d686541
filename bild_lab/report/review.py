"""What reviewers of this field ask of a measurement, answered from the points themselves."""

from __future__ import annotations

from collections.abc import Sequence

from bild_lab.lab.formatting import number, point_label, signed, signed_interval, times
from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.result import Result
from bild_lab.report.page.grid import Screened
from bild_lab.report.provenance import unreliable

CONTROL = "truncation"
_PEERS = ("hf_", "ctranslate2", "openvino", "llama_cpp")  # how policies of other engines begin


def answers(group: Group, screened: Sequence[Screened]) -> list[tuple[str, str]]:
    """Questions, each with its answer. screened: all points that were screened in the sweep's folder."""
    setting, first = group.setting, group.results[0]
    cores = f", {setting.threads} threads of {first.environment.cores} cores" if setting.device == "cpu" else ""
    decoding = ", ".join(f"{key} {value}" for key, value in setting["decoding"].items() if value is not None)
    runs = f"each text {setting.repeats} times, in turn with {setting.baseline}, after {setting.warmup} to warm up"
    baselines = [one for one in group.results if one.is_baseline or one.policy.startswith(_PEERS)]
    found = {
        "On which hardware?": f"{setting.hardware or setting.device}{cores}; {setting.dtype}, batch {setting.batch}",
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
    """The parameters of each model: `target 737 M, draft 1.5 M`; empty for results that did not record them."""
    counts = next(filter(None, ((one.facts or {}).get("parameters") for one in results)), {})
    return ", ".join(f"{role} {number(count / 1e6, int(count < 1e8))} M" for role, count in counts.items())


def _baseline(result: Result) -> str:
    versions = (result.facts or {}).get("versions") or {"transformers": result.environment.transformers}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{point_label(result, list(result.knobs))}: engine {result.engine}, {result.precision}, {named}"


def _chosen(group: Group, screened: Sequence[Screened]) -> str:
    """Where the points' knobs were chosen: by a screening of other texts, or with these texts in sight."""
    split, candidates = group.setting.split, [one for one in group.results if not one.is_baseline]
    live = [one for one in screened if one.live is not None and one.live.setting == group.setting]
    if live:
        where = ", ".join(sorted({f"{one.row['split']} ({one.row['n_examples']} texts)" for one in live}))
        chosen = f"{len(live)} of {len(screened)} points that were screened on {where}, measured once on {split}"
        others = len(candidates) - len({one.live.point for one in live})
        return chosen + (f"; {others} more chosen without it" if others else "")
    if not group.varying_knobs():
        return "no knob has several values here, so none was chosen on these texts"
    flattered = f"the best of {len(candidates)} points was chosen on the texts that it is reported on ({split})"
    return f"{flattered}, which flatters it; scripts/screen.py chooses on others"


def _controlled(group: Group) -> str:
    """Whether a point scores above the target beyond chance, and what the control of lossy rules scores beside it."""
    ahead = [one for one in group.results if one.policy != CONTROL and (one.quality.difference_low or 0) > 0]
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
    bounds = signed_interval(quality.difference_low, quality.difference_high)
    return f"{point_label(result, group.knobs(result))} {group.metric} {signed(quality.difference)} {bounds}".strip()
