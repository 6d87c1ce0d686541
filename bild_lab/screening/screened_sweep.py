"""What a screening found: all points with their front, and the points of the front that were
measured live.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from omegaconf import DictConfig

from bild_lab.errors import UserError
from bild_lab.lab.measure.certificate import DEFECT, TIE
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.schema.formatting import counted, point_label
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import telling_knobs
from bild_lab.lab.store.records import Sweep
from bild_lab.screening.cost_model import CostModel, TimedText, fit_cost_model
from bild_lab.screening.guarantee import Guarantee, guarantee, order_of_testing
from bild_lab.screening.replay import ReplayedPoint, ReplayVerdict
from bild_lab.screening.rows import (
    Row,
    contents_of_summary,
    require_comparable_rows,
    with_front,
    write_rows,
    write_summary,
)
from bild_lab.screening.screen import Screening
from bild_lab.screening.screen_spec import ScreenSpec


@dataclass
class ScreeningResult:
    """Screened points. to_measure: the places of the rows to measure on the other split. summary:
    for `screen.json`.
    """

    screening: Screening
    screened: list[ReplayedPoint]
    rows: list[Row]
    model: CostModel | None
    summary: dict[str, Any]
    to_measure: list[int]

    def confirm(self, split: str, measure: Callable[[DictConfig], Any]) -> None:
        """Measure the points of `to_measure` live, and write everything. measure: measures a point and
        stores its result.

        They are decoded over the record too, as other texts have other counts.
        """
        started, sweep = time.perf_counter(), Sweep(self.screening.folder)
        candidates = [self.screened[place + 1].candidate for place in self.to_measure]
        decoded = []
        if candidates:
            with sweep.search_lock():
                decoded = replace(self.screening, split=split).decode(candidates)
        predicted_s = [self.model.seconds(point.features) for point in decoded]
        for place, candidate, seconds in zip(
            self.to_measure, candidates, predicted_s[1:], strict=True
        ):
            cfg = self.screening.config(candidate, split)
            measure(cfg)
            result = sweep.newest(prepare(cfg).id)
            if result is not None:
                self.rows[place] = replace(self.rows[place], confirmed=result.point)
                self.summary["confirmed"].append(
                    confirmation(self.rows[place], result, predicted_s[0], seconds)
                )
        self.summary["seconds"]["confirm"] = time.perf_counter() - started
        self.write()

    def guarantee(self, spec: ScreenSpec) -> str:
        """Certify points of the front, mark them, and have the fastest of them measured too.

        Returns it in words.
        """
        goal, split = spec.guarantee, spec.confirm
        speeds = np.array([row.predicted_speedup for row in self.rows])
        select_losses = self.screening.losses(self.screened)
        order = order_of_testing(goal, speeds, select_losses)
        held_out = self.screening.held_out(split)
        with Sweep(self.screening.folder).search_lock():
            decoded = held_out.decode([self.screened[place + 1].candidate for place in order])
        with self.screening.stage("guarantee", "certifying"):
            per_text = select_losses.per_text
            earlier_losses = None if per_text is None else per_text[order]
            losses = held_out.losses(decoded)
            seed = self.screening.point.seed
            tests = guarantee(goal, speeds[order], earlier_losses, losses, seed)
        certified = tests.fastest is not None and tests.p_values is not None
        if certified:
            words = f"mean loss at most {goal.loss:g} with probability {goal.probability:g}"
            for place in tests.certified:
                self.rows[order[place]] = replace(self.rows[order[place]], certified=words)
        if tests.fastest is not None and spec.confirmations:
            self.to_measure = list(dict.fromkeys([*self.to_measure, order[tests.fastest]]))
        tested_rows = [self.rows[place] for place in order]
        self.summary["guarantee"] = {
            "loss": goal.loss,
            "probability": goal.probability,
            "metric": self.screening.point.scoring.lead,
            "method": "bootstrap" if tests.p_values is None else "betting",
            "split": split,
            "n": losses.count,
            "left_out": self.summary["shared_texts"],
            "certified": certified,
            **summary_of_tests(tests, tested_rows),
        }
        shown = 0 if tests.fastest is None else tests.fastest
        label = row_label(tested_rows[shown], self.rows)
        return in_words(self.summary["guarantee"], tested_rows[shown], label, tests.mean[shown])

    def write(self) -> None:
        write_rows(self.screening.folder, self.rows)
        write_summary(self.screening.folder, self.summary)


def summary_of_tests(tests: Guarantee, rows: Sequence[Row]) -> dict[str, Any]:
    """Entries of `guarantee` in `screen.json`: the fastest point that passed, and every test. rows:
    of the points in the order of their tests.
    """
    best = None if tests.fastest is None else rows[tests.fastest]
    return {
        "policy": best and best.policy,
        "knobs": best and dict(best.knobs),
        "predicted_speedup": best and best.predicted_speedup,
        "enough": tests.required_n,
        "tested": [
            {
                "policy": row.policy,
                "knobs": dict(row.knobs),
                "mean_loss": mean,
                "p_value": tests.p_values and tests.p_values[place],
                "kept": place in tests.certified,
            }
            for place, (row, mean) in enumerate(zip(rows, tests.mean, strict=True))
        ],
    }


def confirmation(row: Row, result: Result, alone_s: float, seconds: float) -> dict[str, Any]:
    """A row and the result of its point on the other split.

    alone_s, seconds: predicted for the target alone and for the point, on the texts that were
    measured. selected_: of the texts that the point was chosen on. baseline_drift: how much longer
    than predicted the target alone took beside this point, relative; below 0 the machine was faster
    than when the cost model was timed.
    """
    return {
        "point": result.point,
        "policy": row.policy,
        "knobs": dict(row.knobs),
        "selected_speedup": row.predicted_speedup,
        "predicted_speedup": alone_s / seconds,
        "speedup": result.speedup.value,
        "speedup_low": result.speedup.low,
        "speedup_high": result.speedup.high,
        "baseline_drift": result.baseline_latency_s.total / alone_s - 1,
        "metric": result.quality.metric,
        "selected_difference": row.quality_difference,
        "confirmed_difference": result.quality.difference,
    }


def row_label(row: Any, rows: Sequence[Any]) -> str:
    """A screened point as a report names it, by the knobs that tell it from the others of its
    policy: `bild (fallback 0.5, rollback 2)`. row, rows: with a policy and its knobs.
    """
    return point_label(row, telling_knobs(rows)(row), rows)


def in_words(guarantee: Mapping[str, Any], row: Row, point: str, mean: float) -> str:
    """A guarantee in a line. guarantee: as in `screen.json`. row, point, mean: of the point that
    was chosen, or else that was tested first, with its label and its loss.
    """
    metric, texts = guarantee["metric"], f"{guarantee['n']:,} texts of {guarantee['split']}"
    if guarantee["left_out"]:
        texts += f" (without {counted(guarantee['left_out'], 'text')} of {row.split})"
    bound = (
        f"mean loss of {metric} at most {guarantee['loss']:g} with probability"
        f" {guarantee['probability']:g}"
    )
    predicted = f"{point}, predicted {row.predicted_speedup:.2f}x"
    if guarantee["certified"]:
        return f"certified on {texts}: {predicted}: {bound} ({mean:.4f} there)"
    if guarantee["method"] == "bootstrap":
        choice = "nothing" if guarantee["policy"] is None else predicted
        return (
            f"no certificate, as {metric} is no mean over texts; a bootstrap over the choice on"
            f" {texts}: {choice}"
        )
    remedy = "no number of texts would be enough, so add stricter knobs"
    if guarantee["enough"] is not None:
        remedy = f"about {guarantee['enough']:,} texts would be enough"
    return (
        f"nothing certified on {texts} ({bound}): the surest point, {point}, lost {mean:.4f}"
        f" there; {remedy}"
    )


def to_confirm(rows: Sequence[Row], spec: ScreenSpec) -> list[int]:
    """The places of the points to measure: of all rows, or of those of each policy."""
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.policy if spec.each_policy else "", []).append(place)
    confirmed = []
    for places in groups.values():
        group_rows = with_front([rows[place] for place in places])
        confirmed += [places[index] for index in along_front(group_rows, spec)]
    return confirmed


def along_front(rows: Sequence[Row], spec: ScreenSpec) -> list[int]:
    """Up to so many points of the front, evenly from its fastest to its best, with the fastest at
    no loss.

    One point is the fastest within the loss that is allowed, or without one the fastest at no loss.
    """
    count = spec.confirmations
    front = distinct_front(rows, inf if spec.max_loss is None else spec.max_loss)
    if len(front) <= count:
        return front
    sampled = [front[int(index)] for index in np.linspace(0, len(front) - 1, count)]
    without_loss = [place for place in front if rows[place].quality_difference >= 0]
    lossless = without_loss[0] if without_loss else front[-1]
    if sampled and lossless not in sampled and (count > 1 or spec.max_loss is None):
        distances = [abs(front.index(place) - front.index(lossless)) for place in sampled]
        sampled[distances.index(min(distances))] = lossless
    return sampled


def distinct_front(rows: Sequence[Row], max_loss: float) -> list[int]:
    """The places of the front's rows within this loss, the fastest first, the first of equal
    rows.
    """
    front = [
        place
        for place, row in enumerate(rows)
        if row.on_front and row.quality_difference >= -max_loss
    ]
    first_places: dict[tuple[float | None, float], int] = {}
    for place in sorted(front, key=lambda place: -rows[place].predicted_speedup):
        key = (rows[place].predicted_speedup, rows[place].quality)
        first_places.setdefault(key, place)
    return list(first_places.values())


def screen(screening: Screening, spec: ScreenSpec) -> ScreeningResult:
    """Decode the points over the record, predict their speeds, and write what was found.

    Raises UserError if another process screens under the same name, if it holds rows of another
    setting, for a guarantee without speeds, for points chosen by speed in batches, for policies that
    no record decodes, and if `select` has every text of `confirm`.
    """
    if spec.guarantee.loss is not None and not spec.timed_s:
        raise UserError(
            "a guarantee needs speeds, and screen.timed_s=0 predicts none; give seconds"
        )
    if spec.uses_confirm and screening.point.batch > 1:
        raise UserError(
            "points are chosen by the predicted speed of one text at a time, got"
            f" runtime.batch={screening.point.batch}; set runtime.batch=1, and measure batches with"
            " run.py"
        )
    screening.require_screenable()
    shared_texts = screening.shared_texts(spec.confirm) if spec.uses_confirm else 0
    with Sweep(screening.folder).search_lock():
        contents = screening.point.facts.get("contents", {})
        require_comparable_rows(screening.folder, screening.point.setting, contents)
        screened, model = screening.decode(screening.grid.candidates), None
        timed: list[TimedText] = []
        differing: list[ReplayVerdict] = []  # on texts whose live decoding had another outcome
        if spec.timed_s:
            with screening.stage("cost model", "timing a few points live"):
                timed, differing = screening.timed(screened, spec.timed_s)
                if timed:
                    model = fit_cost_model(timed, "0")
        with screening.stage("quality", "scoring"):
            rows = screening.rows(screened, model)
        summary = summary_of(screening, screened, model) | differences_of(timed, differing)
        summary["shared_texts"] = shared_texts
        summary["contents"] = {**contents_of_summary(screening.folder), **contents}
        result = ScreeningResult(screening, screened, rows, model, summary, to_confirm(rows, spec))
        result.write()
    return result


def differences_of(
    timed: Sequence[TimedText], differing: Sequence[ReplayVerdict]
) -> dict[str, Any]:
    """How the replayed texts compare with live ones: entries of `screen.json`.

    replayed_largest: of the differences between rows in texts that differ, relative to the largest
    score; None without such texts.
    """
    verdicts = [verdict.verdict for verdict in differing]
    return {
        "replayed_live": len(timed) + len(differing),
        "replayed_differently": len(differing),
        "replayed_ties": verdicts.count(TIE),
        "replayed_defects": verdicts.count(DEFECT),
        "replayed_largest": max((verdict.largest for verdict in differing), default=None),
    }


def summary_of(
    screening: Screening, screened: Sequence[ReplayedPoint], model: CostModel | None
) -> dict[str, Any]:
    """What the screening cost, and how well it predicted.

    live_: the calls that live runs of all points would have made. recorded_: the forwards that were
    run for the record of these examples, by this command and earlier ones. cost_model: seconds of
    each thing; its errors are relative ones of speedups of points that it was not fitted to.
    """
    counts = sum((point.counts for point in screened[1:]), Counter())
    forwards = screening.recorded_forwards()
    return {
        "points": len(screened) - 1,
        "live_target_calls": counts["target_calls"],
        "live_draft_calls": counts["draft_calls"],
        "recorded_target_calls": forwards["target"],
        "recorded_draft_calls": forwards["draft"],
        "vanilla_target_calls": screened[0].counts["target_calls"],
        "record_bytes": screening.records.bytes,
        "seconds": dict(screening.seconds),
        "cost_model": {} if model is None else dict(model.prices_s),
        "cost_model_error": None if model is None else model.error,
        "cost_model_worst": None if model is None else model.worst,
        "setting": screening.point.setting,
        "guarantee": None,
        "confirmed": [],
    }
