"""A screening: points decoded over a record, a few of them timed, and the quality and predicted
speed of all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from bild_lab.engine.batch_decoding import QUIET_BATCH, auto_batch_size
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.protocols import External, Replays
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError, require_finite, require_whole
from bild_lab.lab.config.console import progress_bar, status_line
from bild_lab.lab.data.rows import canonical_split
from bild_lab.lab.measure.runner import time_methods
from bild_lab.lab.measure.score import requests_of
from bild_lab.lab.measure.summary import log_probability, require_no_nan
from bild_lab.lab.metrics.quality import NO_REFERENCE, metric_sums, score_pool
from bild_lab.lab.metrics.text_metrics import AGREEMENT, LOG_PROBABILITY, metric_named
from bild_lab.lab.point.decoder import METHOD, Decoder, with_history
from bild_lab.lab.point.prepare import Point, prepare, sweep_folder
from bild_lab.screening.candidates import Candidate, CandidateGrid, vanilla
from bild_lab.screening.guarantee import GuaranteeSpec, Losses, losses_of
from bild_lab.screening.recorded_model import text_name
from bild_lab.screening.replay import (
    FOLDER,
    CostModel,
    Records,
    ReplayedPoint,
    ReplayedText,
    ReplayVerdict,
    TimedText,
    decoded,
    judge,
)
from bild_lab.screening.rows import Row, with_front

VANILLA = "vanilla"
FEWEST_TIMED, MOST_TIMED = 2, 10  # points of a policy that are decoded live for the cost model
WARM = 32  # tokens that each of them decodes before
REPEATS = 3  # of each of these texts; the median counts, as for any point
# of each model's rows that stay in memory once they are on disk, or wait for it
MEMORY_BYTES = 2 * 2**30
# about as many contexts of a token do all points ask for, and each more
ROWS_A_TOKEN, ROWS_A_POINT = 3, 0.15


@dataclass(frozen=True)
class ScreenSpec:
    """What to screen and confirm on: `conf/screen.yaml`.

    select, confirm: splits. confirmations: how many points of the front are measured live.
    max_loss: the quality that a confirmed point may have lost on `select`, in the metric's points;
    None: any. each_policy: confirm so many points of every policy's own front. timed_s: seconds of
    live decoding for the cost model; 0: nothing is timed, and no speed is predicted. batch:
    examples that are recorded at once, where the models decode batches. space: lists of values.
    guarantee: what to certify on `confirm`.
    """

    select: str
    confirm: str
    confirmations: int
    max_loss: float | None
    each_policy: bool
    timed_s: float
    batch: int
    space: list[str]
    guarantee: GuaranteeSpec = field(default_factory=GuaranteeSpec)

    def __post_init__(self) -> None:
        require_whole("screen.confirmations", self.confirmations, 0)
        require_whole("screen.batch", self.batch, 1)
        require_finite("screen.timed_s", self.timed_s, 0)
        if self.max_loss is not None:
            require_finite("screen.max_loss", self.max_loss, 0)
        if not self.timed_s and self.confirmations:
            raise UserError(
                "points are confirmed by their predicted speed, and screen.timed_s=0 predicts none;"
                " set screen.confirmations=0, or give seconds"
            )
        if canonical_split(str(self.select)) == canonical_split(str(self.confirm)):
            raise UserError(
                f"screen.select and screen.confirm must be two splits, got {self.select!r} twice:"
                " points would be reported on the texts they were chosen on; change one of them"
            )


@dataclass
class Screening:
    """Points decoded over a record of their models.

    split: that points are chosen on. config_name: of the command. batch: examples that are recorded
    at once, where the models decode batches and so many fit. Raises UserError for sampled decoding,
    another baseline than the target, and policies that open no sessions.
    """

    grid: CandidateGrid
    split: str
    config_name: str
    batch: int = QUIET_BATCH
    seconds: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def stage(self, name: str, shown: str = "") -> Iterator[None]:
        """Counts the seconds that are spent inside. shown: what the command says meanwhile."""
        if shown:
            status_line.enter(shown)
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    @cached_property
    def cfg(self) -> DictConfig:
        return self.config(self.grid.candidates[0], self.split)

    def config(self, candidate: Candidate, split: str) -> DictConfig:
        return self.grid.config(candidate, split, self.config_name)

    @cached_property
    def point(self) -> Point:
        """Any of the points: all share models and examples."""
        point = prepare(self.cfg)
        if point.measure.baseline != VANILLA:
            raise UserError(
                "a screening predicts speedups over the target alone, got"
                f" measure.baseline={point.measure.baseline}; set measure.baseline=vanilla"
            )
        if not point.sampling.greedy:
            raise UserError(
                "a record replays greedy decoding, got"
                f" decoding.temperature={point.decoding.temperature}; set decoding=greedy, or"
                " measure sampled points with run.py"
            )
        return point

    @cached_property
    def folder(self) -> Path:
        return sweep_folder(self.cfg)

    @cached_property
    def records(self) -> Records:
        return Records(self.folder / FOLDER, MEMORY_BYTES)

    @cached_property
    def requests(self) -> list[Request]:
        """Of the examples, with the history of conversations. Loads the weights."""
        point, decoder = self.point, self.point.decoders[METHOD]
        torch.set_num_threads(point.setting["threads"])
        for each in point.decoders.values():
            each.load_weights(status_line.enter)
        limit, folder = point.decoding.max_new_tokens, self.folder / "history"
        examples = with_history(point.examples, point.vanilla, point.setting, limit, folder)
        requests = requests_of(point, examples)
        require_no_nan(decoder.running, requests[0])
        return requests

    def require_other_examples(self, split: str) -> None:
        """Raise UserError if this split has the examples that points are chosen on."""
        held_out = prepare(self.config(self.grid.candidates[0], split))
        if {one.prompt for one in self.point.examples} == {one.prompt for one in held_out.examples}:
            raise UserError(
                f"{self.split} and {split} are the same examples; give dataset.path a folder with a"
                " file for each split"
            )

    def recorded_forwards(self) -> dict[str, int]:
        """How many forwards the record of these examples took: of the target, and of what drafts.

        Forwards of a part of the target's layers draft.
        """
        target = self.point.decoders[METHOD].target
        calls = {"target": 0, "draft": 0}
        for model in self.records.models.values():
            forwards = model.forwards([one.source for one in self.requests])
            calls["target" if model.model is target else "draft"] += forwards.get("whole", 0)
            calls["draft"] += forwards.get("part", 0)
        return calls

    def decoder(self, policy: DictConfig, wrap: Callable[[LoadedModel], LoadedModel]) -> Decoder:
        """A policy's decoder over wrapped models, such as recorded ones."""
        decoder = self.point.specs.decoder(policy, wrap=wrap)
        if isinstance(decoder.method, External | Replays) or decoder.method.draft_shape is None:
            raise UserError(
                f"policy {policy.name} has texts or a loop of its own, and asks no record; "
                "leave it out here and measure it with run.py under the same name"
            )
        return decoder

    def decode(self, candidates: Sequence[Candidate]) -> list[ReplayedPoint]:
        """The target alone, then these points, decoded over the record.

        Several examples decode at once where the models can. Rows are saved after each example.
        """
        candidates = [vanilla(), *candidates]
        with self.stage("load"):
            decoders = [self.decoder(one.policy, self.records) for one in candidates]
            requests = self.requests
            for decoder in {type(one.method): one for one in decoders}.values():
                decoder.load_weights(status_line.enter)
        texts: list[list[ReplayedText]] = [[] for _ in requests]
        # examples of one prompt share its record, so they run one after the other
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(text_name(request.source), []).append(index)
        with self.stage("replay"), progress_bar() as bar:
            task = bar.add_task(
                f"recording and replaying {len(candidates)} points", total=len(requests)
            )

            def loop(indices: Sequence[int]) -> None:
                for index in indices:
                    texts[index] = [
                        decoded(one.name, decoder, requests[index])
                        for one, decoder in zip(candidates, decoders, strict=True)
                    ]
                    self.records.save()
                    bar.advance(task)

            rows = self.point.decoding.max_new_tokens * (
                ROWS_A_TOKEN + ROWS_A_POINT * len(candidates)
            )
            target = self.point.decoders[METHOD].target.checkpoint
            # of scores in float32
            row_bytes = 4 * target.config.get_text_config(decoder=True).vocab_size
            waiting = max(1, int(MEMORY_BYTES / (rows * row_bytes)))
            most = min(self.batch, waiting)
            size = min(auto_batch_size(one.method, one.models, requests, most) for one in decoders)
            Batch(size).run([partial(loop, indices) for indices in alike.values()])
        return [
            ReplayedPoint(one, list(own))
            for one, own in zip(candidates, zip(*texts, strict=True), strict=True)
        ]

    def timed(
        self, screened: Sequence[ReplayedPoint], timed_s: float
    ) -> tuple[list[TimedText], list[ReplayVerdict]]:
        """Texts of a few points decoded live, with vanilla's first, for so many seconds.

        Fewer points where one text takes long: it is decoded by all of them before the seconds are
        looked at. A replayed text that differs from the live one is not among them; it has a
        verdict instead.
        """
        first, names = self.requests[0], {one.candidate.name for one in screened[1:]}
        short = replace(
            first,
            limits=replace(first.limits, max_new_tokens=min(WARM, first.limits.max_new_tokens)),
        )
        alone = self.decoder(screened[0].candidate.policy, lambda model: model).method
        for request in (short, first):
            started = time.perf_counter()
            alone.decode(request, Trace())
        text_s = time.perf_counter() - started
        most = int(timed_s / (REPEATS * text_s * max(1, len(names))))
        chosen = [screened[0], *spread(screened[1:], min(MOST_TIMED, max(FEWEST_TIMED, most)))]
        over = [partial(self.decoder, one.candidate.policy) for one in chosen]
        decoders = [decoder(lambda model: model) for decoder in over]
        methods = {str(place): decoder.method for place, decoder in enumerate(decoders)}
        for method in methods.values():
            method.decode(short, Trace())  # warms up
        started, texts, differing = time.perf_counter(), [], []
        for index, request in enumerate(self.requests):
            found = time_methods(
                methods, [request], REPEATS, self.point.seed, decoders[0].synchronize
            )
            for place, one in enumerate(chosen):
                (live,) = found[str(place)]
                replayed = one.texts[index]
                if tuple(live.token_ids) == replayed.token_ids:
                    texts.append(TimedText(str(place), replayed.features, median(live.latency_s)))
                else:
                    differing.append(judge(over[place], self.records, request, replayed.token_ids))
            if time.perf_counter() - started > timed_s:
                break
        self.records.save()
        return texts, differing

    def rows(self, screened: Sequence[ReplayedPoint], model: CostModel | None) -> list[Row]:
        """The points' rows. screened: the target alone first. model: None predicts no speeds."""
        pool, references, picks = self._pool(screened)
        scoring, seed = self.point.scoring, self.point.seed
        judged = (scoring.lead, pool, references, picks, picks[0])
        scores = score_pool(*judged, seed, scoring.run_code, scoring.writing)
        seconds = [None if model is None else model.seconds(one.features) for one in screened]
        rows = []
        for one, own_s, (score, difference) in zip(
            screened[1:], seconds[1:], scores[1:], strict=True
        ):
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
                    acceptance_rate=(
                        counts["accepted"] / counts["judged"] if counts["judged"] else None
                    ),
                    quality_metric=score.metric,
                    quality_difference_low=difference.low,
                    quality_difference_high=difference.high,
                    **{name: counts[name] for name in COUNTS},
                )
            )
        return with_front(rows)

    def losses(self, screened: Sequence[ReplayedPoint]) -> Losses:
        """What the points lose by the leading metric. screened: the target alone first."""
        (pool, references, picks), scoring = self._pool(screened), self.point.scoring
        measure = metric_sums(scoring.lead, pool, references, scoring.run_code, scoring.writing)
        return losses_of(scoring.lead, measure, picks)

    def _pool(
        self, screened: Sequence[ReplayedPoint]
    ) -> tuple[list[Any], list[Sequence[str]], list[list[int]]]:
        """Every distinct text of every example, its references, and which of them each point has.

        Of a metric of tokens, in place of the texts what it takes.
        """
        decoder, scoring = self.point.decoders[METHOD], self.point.scoring
        lead, counted = scoring.lead, metric_named(scoring.lead).of_tokens
        texts = [
            [(index, text.token_ids) for index, text in enumerate(one.texts)] for one in screened
        ]
        # by example, so that each record is read once
        found = sorted({key for keys in texts for key in keys})
        place = {key: at for at, key in enumerate(found)}
        references = [one.references or NO_REFERENCE for one in self.point.examples]
        if lead == AGREEMENT:
            references = [(decoder.text(list(text.token_ids)),) for text in screened[0].texts]
        if counted is None:
            pool = [decoder.text(list(tokens)) for _, tokens in found]
        else:
            nats = [
                self._log_probability(*key) if lead == LOG_PROBABILITY else None for key in found
            ]
            pool = [
                counted(len(tokens), known) for (_, tokens), known in zip(found, nats, strict=True)
            ]
            self.records.save()
        return (
            pool,
            [references[index] for index, _ in found],
            [[place[key] for key in keys] for keys in texts],
        )

    def _log_probability(self, index: int, tokens: Sequence[int]) -> float:
        """What the target gives to a text of an example, in nats, from its record as far as that
        goes.
        """
        source, target = (
            self.requests[index].source,
            self.records(self.point.decoders[METHOD].target),
        )
        rows = target.start(replace(source, processors=None), len(tokens)).extend(
            [source.prompt[-1], *tokens[:-1]]
        )
        return log_probability(rows.logits, tokens)


COUNTS = ("target_calls", "draft_calls", "tokens", "drafted", "accepted", "fallbacks", "rollbacks")


def spread(screened: Sequence[ReplayedPoint], most: int = MOST_TIMED) -> list[ReplayedPoint]:
    """For each policy a few points that differ most in their calls, the fewest and the most among
    them.
    """
    chosen = []
    for name in dict.fromkeys(one.candidate.name for one in screened):
        own = [one for one in screened if one.candidate.name == name]
        calls = np.array(
            [[one.counts["target_calls"], one.counts["draft_calls"]] for one in own], dtype=float
        )
        calls /= np.maximum(calls.max(axis=0), 1)
        places = [int(calls.sum(axis=1).argmin())]
        while len(places) < min(most, len(own)):
            distance = np.min(
                [np.linalg.norm(calls - calls[place], axis=1) for place in places], axis=0
            )
            if distance.max() == 0:
                break
            places.append(int(distance.argmax()))
        chosen += [own[place] for place in places]
    return chosen
