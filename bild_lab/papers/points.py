"""The points of the papers' figures: how they are read from outputs, and which row or curve each belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bild_lab.lab.formatting import short_name
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import Result

RowOf = Callable[[Result], str | None]  # the row or curve that a point belongs to; None if it belongs to none

PROMPTS = {"none": "masks only", "shallow": "shallow prompt", "deep": "deep prompt"}
LOSSY_RULES = {  # by policy
    "speculative": "lenience",
    "typical_acceptance": "typical acceptance",
    "static_ensemble": "static ensemble",
    "relaxed": "relaxed acceptance",
    "fly": "FLy",
    "judge": "judge",
    "step_cascade": "step cascade",
}


def read_points(folders: Iterable[Path]) -> list[Result]:
    """Every finished point of these sweeps."""
    return [result for folder in folders for result in Sweep(folder).results()]


def curves(points: Sequence[Result], row: RowOf) -> dict[tuple[str, str], list[Result]]:
    """The points of each curve, by data set and row, in order of appearance.

    Those of the baseline are left out, and those whose quality is undefined.
    """
    found: dict[tuple[str, str], list[Result]] = {}
    for point in points:
        name = None if point.is_baseline or point.quality.value is None else row(point)
        if name is not None:
            found.setdefault((dataset(point), name), []).append(point)
    return found


def baseline_quality(points: Iterable[Result]) -> float | None:
    """The quality of the baseline that the points were compared with."""
    known = (point.quality.baseline for point in points)
    return next((value for value in known if value is not None), None)


def dataset(point: Result) -> str:
    return point.setting.dataset


def policy(point: Result) -> str:
    return point.policy


def pair(point: Result) -> str:
    return point.facts["pair"]


def alignment(point: Result) -> str | None:
    """BiLD's two curves: with the fine-tuned drafter, or with the aligned one."""
    if point.policy != "bild":
        return None
    return "aligned" if point.facts["aligned"] else "unaligned"


def ablation(point: Result) -> str | None:
    """BiLD with both policies or without one of them, with the aligned drafter."""
    known = point.policy in ("bild", "bild_no_rollback", "bild_no_fallback") and point.facts["aligned"]
    return point.policy if known else None


def unaligned_or_speculative(point: Result) -> str | None:
    if point.policy == "speculative":
        return "speculative"
    return "bild" if alignment(point) == "unaligned" else None


def lossy_rule(point: Result) -> str | None:
    """BiLD (unaligned), the rule of a cascade, or another lossy rule by its name."""
    if point.policy == "speculative_cascade":
        return f"cascade {point.knobs['rule']}"
    if point.policy in LOSSY_RULES:
        return LOSSY_RULES[point.policy]
    return "bild" if alignment(point) == "unaligned" else None


def rollback_threshold(point: Result) -> str | None:
    return f"rollback {point.knobs['rollback']:g}" if alignment(point) == "aligned" else None


def drafter(point: Result) -> str | None:
    """The draft model's name, or the order of n-grams."""
    if point.policy == "ngram":
        return {1: "unigrams", 2: "bigrams"}.get(point.knobs["order"])
    draft = point.setting.draft
    return short_name(draft) if point.policy == "speculative" and draft else None


def lenience(point: Result) -> str | None:
    return f"lenience {point.knobs['lenience']:g}" if point.policy == "speculative" else None


def prompt_design(point: Result) -> str | None:
    """BiTA's kinds of prompt, as the adapter was trained."""
    return PROMPTS[_adapter(point, "prompt")] if point.policy == "bita" else None


def tree(point: Result) -> str | None:
    """BiTA's ways of decoding; a straightforward chain has one candidate per mask."""
    if point.policy != "bita":
        return None
    kind = point.knobs["tree"]
    return kind if kind == "straightforward" else f"{kind}, k = {point.knobs['top_k']}"


def prompt_tokens(point: Result) -> str | None:
    return f"{_adapter(point, 'prompt_tokens')} prompt tokens" if point.policy == "bita" else None


def mask_tokens(point: Result) -> str | None:
    return f"{_adapter(point, 'mask_tokens')} mask tokens" if point.policy == "bita" else None


def pipeline(point: Result) -> str | None:
    """PPD's heads and number of candidates, and the exit layer unless it is half of the layers."""
    if point.policy != "ppd":
        return None
    heads = "shared head" if point.knobs["heads"] == "shared" else "trained heads"
    exit_layer = point.pipeline.exit_layer
    half = point.knobs["exit_layer"] is None or 2 * exit_layer == point.pipeline.layers
    return f"{heads}, k = {point.knobs['top_k']}" + ("" if half else f", layer {exit_layer}")


def _adapter(point: Result, key: str) -> Any:
    """A setting of the adapter as it was run: the trained value, unless a knob of this name gives a smaller one."""
    fewer = point.knobs.get(key)
    return point.facts["trained"]["adapter"][key] if fewer is None else fewer
