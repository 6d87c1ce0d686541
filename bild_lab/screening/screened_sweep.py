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
from bild_lab.lab.schema.formatting import point_label
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep
from bild_lab.screening.guarantee import guarantee, sequence
from bild_lab.screening.replay import CostModel, ReplayedPoint, ReplayVerdict, TimedText, fit
from bild_lab.screening.rows import (
    Row,
    require_same_setting,
    with_front,
    write_rows,
    write_summary,
)
from bild_lab.screening.screen import Screening, ScreenSpec


@dataclass
class Found:
    """Screened points. chosen: the places of the rows to measure on the other split. summary: for
    `screen.json`.
    """

    screening: Screening
    screened: list[ReplayedPoint]
    rows: list[Row]
    model: CostModel | None
    summary: dict[str, Any]
    chosen: list[int]

    def confirm(self, split: str, measure: Callable[[DictConfig], Any]) -> None:
        """Measure the chosen points live, and write everything. measure: measures a point and
        stores its result.

        They are decoded over the record too, as other texts have other counts.
        """
        started, sweep = time.perf_counter(), Sweep(self.screening.folder)
        candidates = [self.screened[place + 1].candidate for place in self.chosen]
        decoded = []
        if candidates:
            with sweep.search_lock():
                decoded = replace(self.screening, split=split).decode(candidates)
        predicted_s = [self.model.seconds(one.features) for one in decoded]
        for place, candidate, seconds in zip(self.chosen, candidates, predicted_s[1:], strict=True):
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
        asked, split = spec.guarantee, spec.confirm
        speeds = np.array([row.predicted_speedup for row in self.rows])
        select = self.screening.losses(self.screened)
        order = sequence(asked, speeds, select)
        held_out = replace(self.screening, split=split)
        with Sweep(self.screening.folder).search_lock():
            decoded = held_out.decode([self.screened[at + 1].candidate for at in order])
        with self.screening.stage("guarantee", "certifying"):
            others, losses = (
                None if select.each is None else select.each[order],
                held_out.losses(decoded),
            )
            found = guarantee(asked, speeds[order], others, losses, self.screening.point.seed)
        certified = found.chosen is not None and found.p_values is not None
        if certified:
            words = f"mean loss at most {asked.loss:g} with probability {asked.probability:g}"
            for at in found.kept:
                self.rows[order[at]] = replace(self.rows[order[at]], certified=words)
        if found.chosen is not None and spec.confirmations:
            self.chosen = list(dict.fromkeys([*self.chosen, order[found.chosen]]))
        tested = [self.rows[at] for at in order]
        shown = 0 if found.chosen is None else found.chosen
        best = None if found.chosen is None else tested[shown]
        self.summary["guarantee"] = {
            "loss": asked.loss,
            "probability": asked.probability,
            "metric": self.screening.point.scoring.lead,
            "method": "bootstrap" if found.p_values is None else "betting",
            "split": split,
            "n": losses.count,
            "certified": certified,
            "policy": best and best.policy,
            "knobs": best and dict(best.knobs),
            "predicted_speedup": best and best.predicted_speedup,
            "enough": found.enough,
            "tested": [
                {
                    "policy": row.policy,
                    "knobs": dict(row.knobs),
                    "mean_loss": mean,
                    "p_value": found.p_values and found.p_values[place],
                    "kept": place in found.kept,
                }
                for place, (row, mean) in enumerate(zip(tested, found.mean, strict=True))
            ],
        }
        return in_words(self.summary["guarantee"], tested[shown], found.mean[shown])

    def write(self) -> None:
        write_rows(self.screening.folder, self.rows)
        write_summary(self.screening.folder, self.summary)


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


def in_words(found: Mapping[str, Any], row: Row, mean: float) -> str:
    """A guarantee in a line. row, mean: of the point that was chosen, or else that was tested
    first, and its loss.
    """
    point = point_label(row, list(row.knobs))
    bound = (
        f"mean loss of {found['metric']} at most {found['loss']:g} with probability"
        f" {found['probability']:g}"
    )
    texts = f"{found['n']:,} texts of {found['split']}"
    if found["certified"]:
        words = (
            f"certified on {texts}: {point}, predicted {row.predicted_speedup:.2f}x: {bound}"
            f" ({mean:.4f} there)"
        )
    elif found["method"] == "bootstrap":
        words = (
            f"no certificate, as {found['metric']} is no mean over texts; a bootstrap over the"
            f" choice on {texts}: "
        )
        words += (
            "nothing"
            if found["policy"] is None
            else f"{point}, predicted {row.predicted_speedup:.2f}x"
        )
    else:
        words = (
            f"nothing certified on {texts} ({bound}): the surest setting, {point}, lost {mean:.4f}"
            " there; "
        )
        more = "no number of texts would be enough, so add stricter knobs"
        words += (
            more if found["enough"] is None else f"about {found['enough']:,} texts would be enough"
        )
    return words


def to_confirm(rows: Sequence[Row], spec: ScreenSpec) -> list[int]:
    """The places of the points to measure: of all rows, or of those of each policy."""
    groups = dict.fromkeys(row.policy if spec.each_policy else "" for row in rows)
    found = []
    for policy in groups:
        places = [
            place for place, row in enumerate(rows) if not spec.each_policy or row.policy == policy
        ]
        found += [places[at] for at in along_front(with_front([rows[at] for at in places]), spec)]
    return found


def along_front(rows: Sequence[Row], spec: ScreenSpec) -> list[int]:
    """Up to so many points of the front, evenly from its fastest to its best, with the fastest at
    no loss.

    One point is the fastest within the loss that is allowed, or without one the fastest at no loss.
    """
    count, most = spec.confirmations, inf if spec.max_loss is None else spec.max_loss
    front = sorted(
        (
            place
            for place, row in enumerate(rows)
            if row.on_front and row.quality_difference >= -most
        ),
        key=lambda at: -rows[at].predicted_speedup,
    )
    distinct = list(
        {(rows[at].predicted_speedup, rows[at].quality): at for at in reversed(front)}.values()
    )[::-1]
    if len(distinct) <= count:
        return distinct
    evenly = [distinct[int(at)] for at in np.linspace(0, len(distinct) - 1, count)]
    lossless = next(
        (at for at in distinct if rows[at].quality_difference >= 0),
        distinct[-1] if distinct else None,
    )
    if evenly and lossless not in evenly and (count > 1 or spec.max_loss is None):
        nearest = min(
            range(count), key=lambda at: abs(distinct.index(evenly[at]) - distinct.index(lossless))
        )
        evenly[nearest] = lossless
    return evenly


def screen(screening: Screening, spec: ScreenSpec) -> Found:
    """Decode the points over the record, predict their speeds, and write what was found.

    Raises UserError if another process screens under the same name, if it holds rows of other data,
    and for a guarantee without speeds.
    """
    if spec.guarantee.loss is not None and not spec.timed_s:
        raise UserError(
            "a guarantee needs speeds, and screen.timed_s=0 predicts none; give seconds"
        )
    with Sweep(screening.folder).search_lock():
        require_same_setting(screening.folder, screening.point.setting)
        timed: list[TimedText] = []
        # verdicts on texts that were decoded live too, with another outcome; largest: of the
        # differences between rows in these texts, relative to the largest score
        differing: list[ReplayVerdict] = []
        screened, model = screening.decode(screening.grid.candidates), None
        if spec.timed_s:
            with screening.stage("cost model", "timing a few points live"):
                timed, differing = screening.timed(screened, spec.timed_s)
                model = fit(timed, "0")
        with screening.stage("quality", "scoring"):
            rows = screening.rows(screened, model)
        summary = summary_of(screening, screened, model)
        verdicts = [one.verdict for one in differing]
        summary |= {
            "replayed_live": len(timed) + len(differing),
            "replayed_differently": len(differing),
            "replayed_ties": verdicts.count(TIE),
            "replayed_defects": verdicts.count(DEFECT),
            "replayed_largest": max((one.largest for one in differing), default=None),
        }
        found = Found(screening, screened, rows, model, summary, to_confirm(rows, spec))
        found.write()
    return found


def summary_of(
    screening: Screening, screened: Sequence[ReplayedPoint], model: CostModel | None
) -> dict[str, Any]:
    """What the screening cost, and how well it predicted.

    live_: the calls that live runs of all points would have made. recorded_: the forwards that were
    run for the record of these examples, by this command and earlier ones. cost_model: seconds of
    each thing; its errors are relative ones of speedups of points that it was not fitted to.
    """
    counts = sum((one.counts for one in screened[1:]), Counter())
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
