"""What a screening found: the plane, its front, and the points of the front that were measured live."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np
from omegaconf import DictConfig

from bild_lab.errors import UserError
from bild_lab.lab.analysis.cost import Machine
from bild_lab.lab.cli import stages
from bild_lab.lab.measure.certificate import DEFECT, TIE
from bild_lab.lab.measure.cost_model import CostModel, fit
from bild_lab.lab.point import prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.timed import METHOD
from bild_lab.lab.screening.replay import SECONDS, Screened
from bild_lab.lab.screening.rows import (
    Row,
    Summary,
    identity,
    require_same_setting,
    with_front,
    write_rows,
    write_texts,
)
from bild_lab.lab.screening.screen import Screening, ScreenSpec


def to_confirm(rows: Sequence[Row], spec: ScreenSpec) -> list[int]:
    """The places of the points to measure: of all rows, or of those of each policy."""
    groups = dict.fromkeys(row.policy if spec.each_policy else "" for row in rows)
    found = []
    for policy in groups:
        places = [place for place, row in enumerate(rows) if not spec.each_policy or row.policy == policy]
        found += [places[at] for at in along_front(with_front([rows[at] for at in places]), spec)]
    return found


def along_front(rows: Sequence[Row], spec: ScreenSpec) -> list[int]:
    """Up to so many points of the front, evenly from its fastest to its best, with the fastest at no loss."""
    count, most = spec.confirmations, inf if spec.max_loss is None else spec.max_loss
    front = sorted(
        (place for place, row in enumerate(rows) if row.on_front and row.quality_difference >= -most),
        key=lambda at: -rows[at].predicted_speedup,
    )
    distinct = list({(rows[at].predicted_speedup, rows[at].quality): at for at in reversed(front)}.values())[::-1]
    if len(distinct) <= count:
        return distinct
    if not count:
        return []
    lossless = next((at for at in distinct if rows[at].quality_difference >= 0), distinct[-1])
    evenly = [distinct[int(at)] for at in np.linspace(0, len(distinct) - 1, count)]
    if lossless not in evenly:
        nearest = min(range(len(evenly)), key=lambda at: abs(distinct.index(evenly[at]) - distinct.index(lossless)))
        evenly[nearest] = lossless
    return evenly


@dataclass(frozen=True)
class Confirmed:
    """A row and the result of its point on the other split.

    predicted_speedup: for the texts of that split. baseline_drift: how much longer than predicted the target alone took
    beside this point, relative; below 0 the machine was faster than when the cost model was timed.
    """

    row: Row
    result: Result
    predicted_speedup: float
    baseline_drift: float


@dataclass
class Found:
    """A screened plane. confirmed: the points that were measured on the other split."""

    screening: Screening
    screened: list[Screened]
    rows: list[Row]
    model: CostModel | None
    summary: Summary
    chosen: list[int]
    confirmed: list[Confirmed] = field(default_factory=list)

    def confirm(self, split: str, measure: Callable[[DictConfig], Any]) -> None:
        """Measure the chosen points live, and write everything. measure: measures a point and stores its result.

        They are decoded over the record too, as other texts have other counts.
        """
        started, sweep = time.perf_counter(), Sweep(self.screening.folder)
        alone_s, *predicted_s = self._predicted_s(split, sweep)
        for place, seconds in zip(self.chosen, predicted_s, strict=True):
            cfg = self.screening.config(self.screened[place + 1].candidate, split)
            measure(cfg)
            result = sweep.newest(prepare(cfg).id)
            if result is not None:
                self.rows[place] = replace(self.rows[place], confirmed=result.point)
                self.confirmed.append(compared(self.rows[place], result, alone_s, seconds))
        stages = {**self.summary.seconds, "confirm": time.perf_counter() - started}
        told = [confirmation(one) for one in self.confirmed]
        self.summary = replace(self.summary, seconds=stages, confirmed=told)
        self.write()

    def _predicted_s(self, split: str, sweep: Sweep) -> list[float]:
        """The seconds that the cost model gives the target alone, then the chosen points, on this split."""
        if not self.chosen:
            return [0.0]
        with sweep.search_lock():
            other = replace(self.screening, split=split)
            decoded = other.decode([self.screened[place + 1].candidate for place in self.chosen])
        return [self.model.seconds(one.features) for one in decoded]

    def write(self) -> None:
        folder = self.screening.folder
        write_rows(folder, self.rows)
        self.summary.write(folder)


def compared(row: Row, result: Result, alone_s: float, seconds: float) -> Confirmed:
    """A measured point beside the seconds that were predicted for the target alone and for the point."""
    return Confirmed(row, result, alone_s / seconds, result.baseline_latency_s.total / alone_s - 1)


def confirmation(one: Confirmed) -> dict[str, Any]:
    """A confirmed point beside its predictions: selected_ of the texts that it was chosen on."""
    row, result = one.row, one.result
    return {
        "point": result.point,
        "policy": row.policy,
        "knobs": dict(row.knobs),
        "selected_speedup": row.predicted_speedup,
        "predicted_speedup": one.predicted_speedup,
        "speedup": result.speedup.value,
        "speedup_low": result.speedup.low,
        "speedup_high": result.speedup.high,
        "baseline_drift": one.baseline_drift,
        "selected_difference": row.quality_difference,
        "confirmed_difference": result.quality.difference,
    }


def screen(screening: Screening, spec: ScreenSpec, machine: Machine | None = None) -> Found:
    """Decode the whole plane over the record, predict its speeds, and write what was found.

    machine: for which speeds are predicted; None: this one, which is timed. Raises UserError if another process
    searches or screens under the same name, if it holds rows of other data, and for a declared machine with points to
    confirm.
    """
    if machine is not None and spec.confirmations:
        raise UserError(
            f"speeds are predicted for {machine.name}, where nothing can be measured from here; "
            "set screen.confirmations=0"
        )
    with Sweep(screening.folder).search_lock():
        require_same_setting(screening.folder, screening.point.setting)
        candidates, replay = screening.grid.candidates, screening.replay
        replay.machine = machine
        screened = screening.decode(candidates)
        clock = time.perf_counter()
        model, both, differing = None if machine is None else CostModel({SECONDS: 1.0}), 0, []
        if machine is None and spec.timed_s:
            stages.enter("timing a few points live")
            texts, both, differing = screening.timed(screened, spec.timed_s)
            model = fit(texts, "0")
        replay.seconds["cost model"] = time.perf_counter() - clock
        clock = time.perf_counter()
        stages.enter("scoring")
        rows = screening.rows(screened, model)
        replay.seconds["quality"] = time.perf_counter() - clock
        live = sum((one.counts for one in screened[1:]), Counter())
        forwards = replay.recorded_forwards()
        summary = Summary(
            points=len(candidates),
            live_target_calls=live["target_calls"],
            live_draft_calls=live["draft_calls"],
            recorded_target_calls=forwards["target"],
            recorded_draft_calls=forwards["draft"],
            vanilla_target_calls=screened[0].counts["target_calls"],
            record_bytes=replay.records.bytes,
            seconds=dict(replay.seconds),
            cost_model={} if model is None else dict(model.prices_s),
            cost_model_error=None if model is None else model.error,
            cost_model_worst=None if model is None else model.worst,
            replayed_live=both,
            replayed_differently=len(differing),
            replayed_ties=sum(one.verdict == TIE for one in differing),
            replayed_defects=sum(one.verdict == DEFECT for one in differing),
            replayed_apart=max((one.apart for one in differing), default=None),
            setting=screening.point.setting,
        )
        found = Found(screening, screened, rows, model, summary, to_confirm(rows, spec))
        found.write()
        samples = sample_texts(screened[1:], rows, spec.sample_texts, screening.point.decoders[METHOD].pieces)
        write_texts(screening.folder, {"sources": screening.sources(spec.sample_texts), **samples})
    return found


def sample_texts(
    screened: Sequence[Screened], rows: Sequence[Row], count: int, pieces: Callable[[Any], Mapping[int, str]]
) -> dict[str, Any]:
    """Texts of the first examples, each distinct one once: token ids, and 1 for those from the target.

    texts: of each example. points: which text of each example a point has, by the identity of its row.
    """
    texts: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    place: list[dict[Any, int]] = [{} for _ in range(count)]
    points = {}
    for one, row in zip(screened, rows, strict=True):
        chosen = points[identity(row.to_columns())] = []
        for index, text in enumerate(one.texts[:count]):
            key = (text.token_ids, text.drafted_flags)
            if key not in place[index]:
                place[index][key] = len(texts[index])
                flags = [int(not drafted) for drafted in text.drafted_flags]
                texts[index].append({"token_ids": list(text.token_ids), "target": flags})
            chosen.append(place[index][key])
    known = {token for several in texts for one in several for token in one["token_ids"]}
    return {"texts": texts, "points": points, "pieces": {str(k): v for k, v in pieces(sorted(known)).items()}}
