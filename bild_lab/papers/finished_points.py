"""Finished points of outputs as the papers' figures need them: where they belong, and which is best."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError
from bild_lab.lab.analysis.pareto import best_at_loss, is_baseline
from bild_lab.lab.formatting import short_name
from bild_lab.lab.results.records import Sweep

ABLATIONS = ("bild", "bild_no_rollback", "bild_no_fallback")
PROMPTS = {"none": "masks only", "shallow": "shallow prompt", "deep": "deep prompt"}
MATCH_RATES, MATCH_METRICS = "match_rates.csv", "metrics.json"  # of scripts/match_rates.py


@dataclass(frozen=True)
class Point:
    """A finished point. folder: where its files lie."""

    result: dict[str, Any]
    folder: Path = field(default=Path(), compare=False)

    @property
    def policy(self) -> str:
        return self.result["policy"]

    @property
    def pair(self) -> str:
        return self.told("facts", "pair")

    @property
    def knobs(self) -> dict[str, Any]:
        return self.result["knobs"]

    @property
    def dataset(self) -> str:
        return self.result["setting"]["dataset"]

    @property
    def temperature(self) -> float:
        return self.result["setting"]["decoding"]["temperature"]

    @property
    def speedup(self) -> float | None:
        return self.result["speedup"]["value"]

    @property
    def quality(self) -> float | None:
        return self.result["quality"]["value"]

    @property
    def is_baseline(self) -> bool:
        return is_baseline(self.result)

    def told(self, *keys: str) -> Any:
        """What the result holds there. Raises UserError for one that was stored before results held it."""
        value: Any = self.result
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise UserError(
                    f"{self.folder} does not hold {'.'.join(keys)}, as an older version measured it; "
                    f"remove {self.folder.parent.parent} and measure again"
                )
            value = value[key]
        return value


@dataclass(frozen=True)
class MatchRate:
    """A row of `scripts/match_rates.py`. position: such as "1-16", or "all"."""

    dataset: str
    layer: int
    top_k: int
    trained: bool
    position: str
    rate: float


Row = Callable[[Point], str | None]  # the row or curve that a point belongs to; None where it belongs to none


def read_points(folders: Iterable[Path]) -> list[Point]:
    """Every finished point of these sweeps."""
    found = []
    for folder in folders:
        sweep = Sweep(folder)
        for result in sweep.results():
            found.append(Point(result, sweep.points / result["folder"]))
    return found


def read_match_rates(folders: Iterable[Path]) -> list[MatchRate]:
    """Every match rate of these folders. Raises UserError for files of another form."""
    found = []
    for folder in folders:
        if not (folder / MATCH_RATES).is_file():
            continue
        try:
            dataset = json.loads((folder / MATCH_METRICS).read_text())["settings"]["dataset.name"]
            with (folder / MATCH_RATES).open(newline="") as stream:
                found += [_match_rate(dataset, row) for row in csv.DictReader(stream)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder} holds no match rates of scripts/match_rates.py: {error!r}; make them anew"
            ) from error
    return found


def curves(points: Sequence[Point], row: Row) -> dict[tuple[str, str], list[Point]]:
    """The points of each curve, by data set and row, in order of appearance; the baseline's own are on none."""
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        name = None if point.is_baseline else row(point)
        if name is not None:
            found.setdefault((point.dataset, name), []).append(point)
    return found


def fastest(points: Sequence[Point], loss: float) -> Point | None:
    """The fastest point that loses at most so much quality; None where every one loses more."""
    best = best_at_loss([point.result for point in points], loss)
    return next((point for point in points if point.result is best), None)


def baseline_quality(points: Iterable[Point]) -> float | None:
    """The quality of the baseline that the points were compared with."""
    told = (point.result["quality"]["baseline"] for point in points)
    return next((value for value in told if value is not None), None)


def policy(point: Point) -> str:
    return point.policy


def pair(point: Point) -> str:
    return point.pair


def alignment(point: Point) -> str | None:
    """BiLD's two curves: with the fine-tuned drafter, or with the aligned one."""
    if point.policy != "bild":
        return None
    return "aligned" if point.told("facts", "aligned") else "unaligned"


def ablation(point: Point) -> str | None:
    """BiLD with both policies or without one of them, of the aligned drafter."""
    return point.policy if point.policy in ABLATIONS and point.told("facts", "aligned") else None


def unaligned_or_speculative(point: Point) -> str | None:
    if point.policy == "speculative":
        return "speculative"
    return "bild" if alignment(point) == "unaligned" else None


def lossy_rule(point: Point) -> str | None:
    """BiLD (unaligned), the rule of a cascade, lenience or typical acceptance."""
    if point.policy == "speculative_cascade":
        return f"cascade {point.knobs['rule']}"
    if point.policy == "speculative":
        return "lenience"
    if point.policy == "typical_acceptance":
        return "typical acceptance"
    return "bild" if alignment(point) == "unaligned" else None


def rollback_threshold(point: Point) -> str | None:
    return f"rollback {point.knobs['rollback']:g}" if alignment(point) == "aligned" else None


def drafter(point: Point) -> str | None:
    """The draft model's name, or the order of n-grams."""
    if point.policy == "ngram":
        return {1: "unigrams", 2: "bigrams"}.get(point.knobs["order"])
    draft = point.result["setting"].get("draft")
    return short_name(draft) if point.policy == "speculative" and draft else None


def lenience(point: Point) -> str | None:
    return f"lenience {point.knobs['lenience']:g}" if point.policy == "speculative" else None


def prompt_design(point: Point) -> str | None:
    """BiTA's kinds of prompt, as the adapter was trained."""
    return PROMPTS[_adapter(point, "prompt")] if point.policy == "bita" else None


def tree(point: Point) -> str | None:
    """BiTA's ways of decoding; a straightforward chain has one candidate a mask."""
    if point.policy != "bita":
        return None
    kind = point.knobs["decoding"]
    return kind if kind == "straightforward" else f"{kind}, k = {point.knobs['top_k']}"


def prompt_tokens(point: Point) -> str | None:
    return f"{_adapter(point, 'prompt_tokens')} prompt tokens" if point.policy == "bita" else None


def mask_tokens(point: Point) -> str | None:
    return f"{_adapter(point, 'mask_tokens')} mask tokens" if point.policy == "bita" else None


def pipeline(point: Point) -> str | None:
    """PPD's heads and candidates, and the exit where it is not after half of the layers."""
    if point.policy != "ppd":
        return None
    heads = "shared head" if point.knobs["heads"] == "shared" else "trained heads"
    layers, exit_layer = point.told("pipeline", "layers"), point.told("pipeline", "exit_layer")
    half = point.knobs["exit_layer"] is None or 2 * exit_layer == layers
    return f"{heads}, k = {point.knobs['top_k']}" + ("" if half else f", layer {exit_layer}")


def _adapter(point: Point, key: str) -> Any:
    """Of the adapter as it was run: all that was trained, unless a knob of this name takes less."""
    fewer = point.knobs.get(key)
    return point.told("facts", "trained", "adapter", key) if fewer is None else fewer


def _match_rate(dataset: str, row: dict[str, str]) -> MatchRate:
    trained = row["heads"] != "shared"
    return MatchRate(dataset, int(row["layer"]), int(row["top_k"]), trained, row["position"], float(row["rate"]))
