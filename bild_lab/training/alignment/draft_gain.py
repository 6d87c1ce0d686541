"""What a target gains from a drafter, by a small sweep: speculative decoding and BiLD's thresholds (BiLD §3.5.1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.analysis.pareto import pareto_front
from bild_lab.lab.config import compose_policy
from bild_lab.lab.data.examples import DatasetSpec
from bild_lab.lab.point import prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.runner import run_point
from bild_lab.lab.schema.result import Result
from bild_lab.training.alignment.choice import choose
from bild_lab.training.calibration.data import Calibration

if TYPE_CHECKING:
    from bild_lab.training.wandb_log import TrainingLogger

KNOBS = {"speculative": ("window",), "bild": ("fallback", "rollback")}  # named in a point's line


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The points measured with the drafter before and after: the fields of `comparison` in `conf/align.yaml`.

    split: the examples that are measured. select: the split on which BiLD's thresholds are chosen over a record; None
    measures every point, and chooses on the measured examples. select_limit: its first so many texts; None: all.
    window: of speculative decoding, whose acceptance rate is compared. fallback, rollback: BiLD's thresholds; every
    pair of them is a point. Raises UserError for values that give no points.
    """

    split: str
    select: str | None
    select_limit: int | None
    path: str | None
    limit: int | None
    window: int
    fallback: list[float]
    rollback: list[float]

    def __post_init__(self) -> None:
        require_whole("comparison.window", self.window, 1)
        if self.select_limit is not None:
            require_whole("comparison.select_limit", self.select_limit, 1)
        for key in ("fallback", "rollback"):
            values = getattr(self, key)
            if not isinstance(values, list | tuple) or not values:
                raise UserError(f"comparison.{key} must be a list of thresholds such as [0.5,0.7], got {values!r}")

    def dataset(self, calibration: Calibration) -> DatasetSpec:
        """The calibration data's dataset, with the split to measure on."""
        spec = calibration.dataset
        return replace(spec, split=self.split, limit=self.limit, path=self.path or spec.path)


def point_configs(
    comparison: Comparison,
    calibration: Calibration,
    draft: Checkpoint,
    aligned: bool,
    surroundings: Mapping[str, Any],
) -> list[DictConfig]:
    """The points with this drafter, speculative decoding first, as `prepare` takes them.

    aligned: whether this is the draft model after the alignment. surroundings: the configuration's name, runtime and
    measure.
    """
    target = calibration.target
    speculative, bild = (OmegaConf.to_container(compose_policy(name)) for name in ("speculative", "bild"))
    thresholds = itertools.product(comparison.fallback, comparison.rollback)
    policies = [
        {**speculative, "window": comparison.window},
        *({**bild, "fallback": fallback, "rollback": rollback} for fallback, rollback in thresholds),
    ]
    pair = {"name": "alignment", "target": target.path, "target_revision": target.revision}
    limit = calibration.manifest["decoding"]["max_new_tokens"]
    shared = {
        **surroundings,
        "resume": True,
        "pair": {**pair, "draft": draft.path, "draft_revision": draft.revision, "aligned": aligned},
        "dataset": asdict(comparison.dataset(calibration)),
        "logger": {},  # the alignment logs them itself
        "decoding": {"max_new_tokens": limit, "temperature": 0.0, "top_k": None, "top_p": None},
    }
    return [OmegaConf.create({**shared, "policy": policy}) for policy in policies]


def measured_points(
    configs: Sequence[DictConfig], sweep: Sweep, logger: TrainingLogger | None, report: Callable[[str], None]
) -> list[Result]:
    """Every point's result, measured unless it is finished. report: called with a line for each."""
    results = []
    for config in configs:
        point = prepare(config)
        result = sweep.newest(point.id)
        if result is None:
            result = run_point(point, sweep)
        if logger is not None:
            logger.log_point(result, OmegaConf.to_container(config, resolve=True))
        results.append(result)
        knobs = " ".join(f"{knob}={point.knobs[knob]}" for knob in KNOBS[point.policy])
        quality, speedup = result.quality, result.speedup.value
        report(f"{config.pair.draft}, {point.policy} {knobs}: {quality.metric} {quality.value:.2f}, {speedup:.2f}x")
    return results


def best_points(
    configs: Sequence[DictConfig], comparison: Comparison, draft: Checkpoint, report: Callable[[str], None]
) -> list[DictConfig | None] | None:
    """BiLD's points to measure, at no loss and within one point; None if all of them are to be measured."""
    if comparison.select is None:
        return None
    bild = configs[1:]
    places = choose(bild, comparison.select, comparison.select_limit, comparison.split, draft.fingerprint, report)
    return [None if place is None else bild[place] for place in places]


def gains(speculative: Result, bild: Sequence[Result], best: Sequence[Result | None]) -> dict[str, Any]:
    """The numbers to compare. best: BiLD's points at no loss and within one point; None where there is none."""
    free, cheap = best
    return {
        "target_quality": speculative.quality.baseline,
        "acceptance_rate": speculative.counts.acceptance_rate,
        "tokens_per_target_call": speculative.counts.tokens_per_target_call,
        "speculative_speedup": speculative.speedup.value,
        "bild_speedup_at_no_loss": None if free is None else free.speedup.value,
        "bild_difference_at_no_loss": None if free is None else free.quality.difference,
        "bild_speedup_at_one_point": None if cheap is None else cheap.speedup.value,
        "bild_difference_at_one_point": None if cheap is None else cheap.quality.difference,
        "pareto": pareto(bild),
    }


def pareto(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The undominated points: thresholds, latency relative to the baseline's, quality."""
    rows = [
        {**result.knobs, "latency": 1 / result.speedup.value, "quality": result.quality.value} for result in results
    ]
    return [rows[index] for index in pareto_front([(row["latency"], row["quality"]) for row in rows])]
