"""Screen a plane of points over a record, predict their speed, and measure the best ones live."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from statistics import median

import numpy as np
from omegaconf import DictConfig

from bild_lab.engine.batch_room import QUIET_BATCH
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.cli import progress
from bild_lab.lab.config import PairSpec, RuntimeSpec, typed
from bild_lab.lab.data.rows import canonical_split
from bild_lab.lab.measure.cost_model import CostModel, TimedText
from bild_lab.lab.measure.timing import time_methods
from bild_lab.lab.metrics import AGREEMENT, score_pool
from bild_lab.lab.point import Point, decoder_of, prepare, sweep_folder
from bild_lab.lab.schema.timed import METHOD
from bild_lab.lab.screening.candidates import Candidate, Grid, vanilla
from bild_lab.lab.screening.replay import FOLDER, Records, Replay, Screened, versions
from bild_lab.lab.screening.replay_check import Judged, judge
from bild_lab.lab.screening.rows import Row, with_front

VANILLA = "vanilla"
MOST_TIMED = 10  # points of a policy that are decoded live for the cost model
REPEATS = 3  # of each of these texts; the median counts, as for any point
GIB = 2**30


def finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


@dataclass(frozen=True)
class ScreenSpec:
    """What to screen and confirm on: `conf/screen.yaml`.

    select, confirm: splits. confirmations: how many points of the front are measured live. max_loss: the quality that a
    confirmed point may have lost on `select`, in the metric's points; None: any. each_policy: confirm so many points of
    every policy's own front. timed_s: seconds of live decoding for the cost model; 0: nothing is timed, and no speed is
    predicted. sample_texts: examples whose texts the report can show. space: lists of values.
    """

    select: str
    confirm: str
    confirmations: int
    max_loss: float | None
    each_policy: bool
    timed_s: float
    sample_texts: int
    space: list[str]

    def __post_init__(self) -> None:
        require_whole("screen.confirmations", self.confirmations, 0)
        require_whole("screen.sample_texts", self.sample_texts, 0)
        if not finite(self.timed_s) or self.timed_s < 0:
            raise UserError(f"screen.timed_s must be seconds >= 0, got {self.timed_s!r}")
        if not self.timed_s and self.confirmations:
            raise UserError(
                "points are confirmed by their predicted speed, and screen.timed_s=0 predicts none; "
                "set screen.confirmations=0, or give seconds"
            )
        if self.max_loss is not None and not (finite(self.max_loss) and self.max_loss >= 0):
            raise UserError(f"screen.max_loss must be points of quality >= 0 or null, got {self.max_loss!r}")
        if canonical_split(str(self.select)) == canonical_split(str(self.confirm)):
            raise UserError(
                f"screen.select and screen.confirm must be two splits, got {self.select!r} twice: points would be "
                "reported on the texts they were chosen on; change one of them"
            )


@dataclass(frozen=True)
class RecordSpec:
    """memory_gb: rows that wait in memory before they go to disk, from where a memory map reads them.

    batch: examples that are recorded at once, where the models decode batches.
    """

    memory_gb: float
    batch: int = QUIET_BATCH

    def __post_init__(self) -> None:
        require_whole("record.batch", self.batch, 1)
        if not finite(self.memory_gb) or self.memory_gb < 0:
            raise UserError(f"record.memory_gb must be gibibytes >= 0, got {self.memory_gb!r}")


@dataclass
class Screening:
    """A plane of points over the record of one split.

    config_name: of the command, such as screen. split: the split that points are chosen on.
    """

    grid: Grid
    split: str
    record: RecordSpec
    config_name: str

    @cached_property
    def cfg(self) -> DictConfig:
        return self.config(self.grid.candidates[0], self.split)

    def config(self, candidate: Candidate, split: str) -> DictConfig:
        return self.grid.config(candidate, split, self.config_name)

    @cached_property
    def point(self) -> Point:
        point = prepare(self.cfg)
        if point.measure.baseline != VANILLA:
            raise UserError(
                f"a screening predicts speedups over the target alone, got measure.baseline={point.measure.baseline}; "
                "set measure.baseline=vanilla"
            )
        return point

    @cached_property
    def folder(self) -> Path:
        return sweep_folder(self.cfg)

    @cached_property
    def replay(self) -> Replay:
        records = Records(self.folder / FOLDER, self.record.memory_gb * GIB, versions())
        return Replay(self.point, records, self.folder / "history", self.record.batch)

    def require_other_examples(self, split: str) -> None:
        """Raise UserError if this split has the examples that points are chosen on."""
        held_out = prepare(self.config(self.grid.candidates[0], split))
        if {one.prompt for one in self.point.examples} == {one.prompt for one in held_out.examples}:
            raise UserError(
                f"{self.split} and {split} are the same examples; give dataset.path a folder with a file for each split"
            )

    def sources(self, count: int) -> list[str]:
        """The first examples' sources."""
        return [one.source for one in self.point.examples[:count]]

    def decode(self, candidates: Sequence[Candidate]) -> list[Screened]:
        """The target alone, then these points, decoded over the record."""
        examples = len(self.point.examples)
        with progress() as bar:
            task = bar.add_task(f"recording and replaying {len(candidates)} points", total=examples)
            return self.replay.run([vanilla(), *candidates], self.cfg, lambda: bar.advance(task))

    def timed(self, screened: Sequence[Screened], timed_s: float) -> tuple[list[TimedText], int, list[Judged]]:
        """Texts of a few points decoded live, with vanilla's first, for so many seconds.

        Also how many texts were decoded both ways, and a verdict on each replayed text that differs from the live one.
        """
        chosen = [screened[0], *spread(screened[1:])]
        pair, runtime = typed(PairSpec, self.cfg.pair, "pair"), typed(RuntimeSpec, self.cfg.runtime, "runtime")
        over = [partial(decoder_of, one.candidate.policy, pair, self.point.decoding, runtime) for one in chosen]
        decoders = [decoder() for decoder in over]
        methods = {str(place): decoder.method for place, decoder in enumerate(decoders)}
        requests, point = self.replay.requests, self.point
        for method in methods.values():
            method.decode(requests[0], Trace())  # warms up
        started, texts, both, differing = time.perf_counter(), [], 0, []
        for index, request in enumerate(requests):
            found = time_methods(methods, [request], REPEATS, point.seed, decoders[0].synchronize)
            for place, one in enumerate(chosen):
                (live,) = found[str(place)]
                replayed = one.texts[index]
                both += 1
                if tuple(live.token_ids) == replayed.token_ids:
                    texts.append(TimedText(str(place), replayed.features, median(live.latency_s)))
                else:
                    differing.append(judge(over[place], self.replay.records, request, replayed.token_ids))
            if time.perf_counter() - started > timed_s:
                break
        self.replay.records.save()
        return texts, both, differing

    def rows(self, screened: Sequence[Screened], model: CostModel | None) -> list[Row]:
        """The points' rows. screened: the target alone first. model: None predicts no speeds."""
        pool, references, picks = self._pool(screened)
        scoring, seed = self.point.scoring, self.point.seed
        judged = (scoring.lead, pool, references, picks, picks[0])
        scores = score_pool(*judged, seed=seed, run_code=scoring.run_code)
        seconds = [None if model is None else model.seconds(one.features) for one in screened]
        rows = []
        for one, own_s, (score, difference) in zip(screened[1:], seconds[1:], scores[1:], strict=True):
            counts = one.counts
            rows.append(
                Row(
                    policy=one.candidate.name,
                    knobs=one.candidate.knobs,
                    split=self.split,
                    n_examples=len(one.texts),
                    quality=score.value,
                    quality_low=score.low,
                    quality_high=score.high,
                    quality_difference=difference.value,
                    predicted_speedup=None if own_s is None else seconds[0] / own_s,
                    tokens_per_target_call=counts["tokens"] / max(1, counts["target_calls"]),
                    acceptance_rate=counts["accepted"] / counts["judged"] if counts["judged"] else None,
                    quality_metric=score.metric,
                    quality_difference_low=difference.low,
                    quality_difference_high=difference.high,
                    **{name: counts[name] for name in COUNTS},
                )
            )
        return with_front(rows)

    def _pool(self, screened: Sequence[Screened]) -> tuple[list[str], list[tuple[str, ...]], list[list[int]]]:
        """Every distinct text of every example, its references, and which of them each point has."""
        decoder, examples = self.point.decoders[METHOD], self.point.examples
        place: dict[tuple[int, tuple[int, ...]], int] = {}
        pool: list[str] = []
        references: list[tuple[str, ...]] = []
        scoring = self.point.scoring
        own = [decoder.text(list(text.token_ids)) for text in screened[0].texts]
        picks = []
        for one in screened:
            chosen = []
            for index, text in enumerate(one.texts):
                key = (index, text.token_ids)
                if key not in place:
                    place[key] = len(pool)
                    pool.append(scoring.scored_text(scoring.lead, decoder.text(list(text.token_ids))))
                    agreement = scoring.lead == AGREEMENT
                    references.append((own[index],) if agreement else examples[index].references)
                chosen.append(place[key])
            picks.append(chosen)
        return pool, references, picks


COUNTS = ("target_calls", "draft_calls", "tokens", "drafted", "accepted", "fallbacks", "rollbacks")


def spread(screened: Sequence[Screened]) -> list[Screened]:
    """For each policy a few points that differ most in their calls, the fewest and the most among them."""
    chosen = []
    for name in dict.fromkeys(one.candidate.name for one in screened):
        own = [one for one in screened if one.candidate.name == name]
        calls = np.array([[one.counts["target_calls"], one.counts["draft_calls"]] for one in own], dtype=float)
        calls /= np.maximum(calls.max(axis=0), 1)
        places = [int(calls.sum(axis=1).argmin())]
        while len(places) < min(MOST_TIMED, len(own)):
            distance = np.min([np.linalg.norm(calls - calls[place], axis=1) for place in places], axis=0)
            if distance.max() == 0:
                break
            places.append(int(distance.argmax()))
        chosen += [own[place] for place in places]
    return chosen
