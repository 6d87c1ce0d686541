"""A screening: points decoded over a record, a few of them timed, and the quality and predicted
speed of all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from bild_lab.engine.batch_decoding import UNTIMED_BATCH, auto_batch_size, learns_from_texts
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.models.device import free_bytes
from bild_lab.engine.protocols import External, Replays
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import resolved_policy
from bild_lab.lab.config.console import progress_bar, status_line
from bild_lab.lab.measure.likelihood import log_probability, require_no_nan
from bild_lab.lab.measure.timing import TimingOptions, time_methods
from bild_lab.lab.metrics.quality import NO_REFERENCE, metric_sums, score_pool
from bild_lab.lab.metrics.text_metrics import AGREEMENT, LOG_PROBABILITY, metric_named
from bild_lab.lab.point.decoder import METHOD, Decoder
from bild_lab.lab.point.history import prepare_texts
from bild_lab.lab.point.identity import code_of, contents_of, sweep_folder
from bild_lab.lab.point.prepare import Point, prepare
from bild_lab.lab.schema.questions import questions_of, source_ids
from bild_lab.lab.schema.statistics import conversations_of
from bild_lab.screening.candidates import Candidate, CandidateGrid, vanilla
from bild_lab.screening.cost_model import CostModel, TimedText
from bild_lab.screening.guarantee import Losses, losses_of
from bild_lab.screening.recorded_model import text_name
from bild_lab.screening.recorded_text import PART, WHOLE
from bild_lab.screening.replay import (
    FOLDER,
    Records,
    ReplayedPoint,
    ReplayedText,
    ReplayVerdict,
    judge_replay,
    replay_text,
)
from bild_lab.screening.rows import Row, with_front
from bild_lab.screening.screen_spec import SCORES, TEXTS
from bild_lab.screening.text_log import LoggedExample, TextLog

VANILLA = "vanilla"
FEWEST_TIMED, MOST_TIMED = 2, 10  # points of a policy that are decoded live for the cost model
WARM_TOKENS = 32  # new tokens that each of these points decodes before it is timed
REPEATS = 3  # decodings of each timed text; the median counts, as for any point
# how much of each model's rows is in memory: so much, or this share of the free memory
MEMORY_BYTES, MEMORY_SHARE = 2 * 2**30, 0.2
# of each model's rows on disk where texts are kept: replays are judged by them
JUDGED_BYTES = 2**29
# contexts of a token that all points ask for together, and that each adds, where thresholds are
# neighbours
ROWS_A_TOKEN, ROWS_A_POINT = 3, 0.15


@dataclass
class Screening:
    """Points decoded over a record of their models.

    split: that points are chosen on. batch: examples that are recorded at once, where the models
    decode batches and so many fit. keep: as in `ScreenSpec`. left_out: prompts that are not
    decoded. logged_forwards: that the logged texts took, where texts are kept.
    Raises UserError for sampled decoding, another baseline than the target, and policies that open
    no sessions.
    """

    grid: CandidateGrid
    split: str
    batch: int = UNTIMED_BATCH
    keep: str = SCORES
    left_out: frozenset[str] = frozenset()
    seconds: Counter[str] = field(default_factory=Counter)
    logged_forwards: Counter[str] = field(default_factory=Counter)

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
        return self.grid.config(candidate, split)

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
        examples = [example for example in point.examples if example.prompt not in self.left_out]
        if self.left_out:  # what is certified, for texts that are drawn one by one
            questions = questions_of(source_ids(examples))
            first_of = dict(zip(reversed(questions), reversed(examples), strict=True))
            examples = [first_of[question] for question in dict.fromkeys(questions)]
        return replace(point, examples=tuple(examples))

    @cached_property
    def folder(self) -> Path:
        return sweep_folder(self.cfg)

    @cached_property
    def records(self) -> Records:
        disk_bytes = JUDGED_BYTES if self.keep == TEXTS else inf
        memory_bytes = max(MEMORY_BYTES, MEMORY_SHARE * free_bytes(torch.device("cpu")))
        return Records(self.folder / FOLDER, memory_bytes, disk_bytes=disk_bytes)

    @cached_property
    def requests(self) -> list[Request]:
        """The requests of the examples, with the history of conversations. Loads the weights."""
        point = self.point
        torch.set_num_threads(point.setting["threads"])
        for decoder in point.decoders.values():
            decoder.load_weights(status_line.enter)
        _, requests = prepare_texts(point, self.folder)
        require_no_nan(point.decoders[METHOD].running, requests[0])
        return requests

    def held_out(self, split: str) -> Screening:
        """The screening of another split, without the texts that points are chosen on, and with one
        text of each source.
        """
        return replace(self, split=split, left_out=self._prompts)

    def shared_texts(self, split: str) -> int:
        """How many texts of another split are among those that points are chosen on. Of a
        conversation the first turn counts.

        Raises UserError if all of them are.
        """
        other_point = replace(self, split=split).point
        texts = [example for example in other_point.examples if example.continues is None]
        shared = sum(example.prompt in self._prompts for example in texts)
        if shared == len(texts):
            raise UserError(
                f"every text of {split} is one of {self.split} too; give dataset.path a folder with"
                " a file for each split, or set screen.confirm to a split with other texts"
            )
        return shared

    @cached_property
    def _prompts(self) -> frozenset[str]:
        return frozenset(example.prompt for example in self.point.examples)

    def recorded_forwards(self) -> dict[str, int]:
        """How many forwards the record of these examples took: of the target, and of what drafts.

        Forwards of a part of the target's layers draft.
        """
        if self.keep == TEXTS:
            return {name: self.logged_forwards[name] for name in ("target", "draft")}
        return self._forwards_for(self.requests)

    def _forwards_for(self, requests: Sequence[Request]) -> dict[str, int]:
        """How many forwards the record of these requests took."""
        target = self.point.decoders[METHOD].target
        calls = {"target": 0, "draft": 0}
        for model in self.records.models.values():
            forwards = model.forwards([request.source for request in requests])
            calls["target" if model.model is target else "draft"] += forwards.get(WHOLE, 0)
            calls["draft"] += forwards.get(PART, 0)
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

    def require_screenable(self) -> None:
        """Raise UserError for a point that a record does not decode, before weights load and
        anything is written.
        """
        for candidate in self.grid.candidates:
            self.decoder(candidate.policy, live)

    def decode(self, candidates: Sequence[Candidate]) -> list[ReplayedPoint]:
        """The target alone, then these points, decoded over the record.

        Several examples decode at once where the models can. Rows are saved after each example; where
        texts are kept, those of logged examples are not decoded again, unless a drafter learns from
        them.
        """
        candidates = [vanilla(), *candidates]
        with self.stage("load"):
            requests = self.requests  # loads the weights; records take a share of what is free then
            decoders = [self.decoder(candidate.policy, self.records) for candidate in candidates]
            # the method's modules are loaded once for all decoders of its kind
            for decoder in {type(decoder.method): decoder for decoder in decoders}.values():
                decoder.load_weights(status_line.enter)
        sources = [text_name(request.source) for request in requests]
        text_log = self.text_log(candidates) if self.keep == TEXTS else None
        texts: list[list[ReplayedText]] = [[] for _ in requests]
        if text_log is not None:
            for index, logged in self._logged(text_log, decoders, sources).items():
                texts[index] = logged.texts
        unknown = [index for index in range(len(requests)) if not texts[index]]
        with self.stage("replay"), progress_bar() as bar:
            task = bar.add_task(
                f"recording and replaying {len(candidates)} points", total=len(unknown)
            )

            def replay_examples(indices: Sequence[int]) -> None:
                for index in indices:
                    texts[index] = [
                        replay_text(candidate.name, decoder, requests[index])
                        for candidate, decoder in zip(candidates, decoders, strict=True)
                    ]
                    self.records.save()
                    if text_log is not None:
                        # the forwards of a prompt count once
                        is_first = index == indices[0]
                        forwards = self._forwards_for([requests[index]]) if is_first else {}
                        text_log.append(
                            LoggedExample(index, sources[index], texts[index], forwards)
                        )
                        self.logged_forwards.update(forwards)
                    bar.advance(task)

            batch = Batch(self._batch_size(decoders))
            batch.run(
                [partial(replay_examples, indices) for indices in by_prompt(sources, unknown)]
            )
        return [
            ReplayedPoint(candidate, list(point_texts))
            for candidate, point_texts in zip(candidates, zip(*texts, strict=True), strict=True)
        ]

    def _logged(
        self, text_log: TextLog, decoders: Sequence[Decoder], sources: Sequence[str]
    ) -> dict[int, LoggedExample]:
        """The examples that need no decoding, by their places; their forwards are counted."""
        # what learns from earlier texts has to decode them
        if any(learns_from_texts(decoder.method) for decoder in decoders):
            text_log.file.unlink(missing_ok=True)
        logged_examples = text_log.read(sources)
        for logged in logged_examples.values():
            self.logged_forwards.update(logged.forwards)
        return logged_examples

    def text_log(self, candidates: Sequence[Candidate]) -> TextLog:
        """The log of what these points write, by everything that a text depends on."""
        specs = self.point.specs
        policies = {
            str(place): resolved_policy(candidate.policy)
            for place, candidate in enumerate(candidates)
        }
        key = {
            "points": [
                {"policy": candidate.name, "knobs": dict(candidate.knobs)}
                for candidate in candidates
            ],
            "policies": contents_of(policies),
            "code": [code_of(policy, specs) for policy in policies.values()],
            "models": [self.records.key_of(model.model) for model in self.records.models.values()],
            "decoding": self.point.setting["decoding"],
            "stop": self.point.setting.get("stop"),
            "processors": self.point.setting["processors"],
        }
        return TextLog(self.folder, key)

    def _batch_size(self, decoders: Sequence[Decoder]) -> int:
        """How many examples decode at once: as many as the models can, and as have room for their
        rows, so that few are made of their states more than once.
        """
        contexts = ROWS_A_TOKEN + ROWS_A_POINT * len(decoders)
        rows = self.point.decoding.max_new_tokens * contexts
        target = self.point.decoders[METHOD].target.checkpoint
        # scores are in float32
        row_bytes = 4 * target.config.get_text_config(decoder=True).vocab_size
        in_memory = max(1, int(self.records.memory_bytes / (rows * row_bytes)))
        limit = min(self.batch, in_memory)
        return min(
            auto_batch_size(decoder.method, decoder.models, self.requests, limit)
            for decoder in decoders
        )

    def timed(
        self, screened: Sequence[ReplayedPoint], timed_s: float
    ) -> tuple[list[TimedText], list[ReplayVerdict]]:
        """Texts of a few points decoded live, with vanilla's first, for so many seconds.

        Fewer points where one text takes long: it is decoded by all of them before the seconds are
        looked at. A replayed text that differs from the live one is not among them; it has a
        verdict instead. Only texts whose scores are on disk can be judged, so no others are timed.
        """
        points = self._points_to_time(screened, timed_s)
        decoders_over = [partial(self.decoder, point.candidate.policy) for point in points]
        decoders = [decoder_over(live) for decoder_over in decoders_over]
        methods = {str(place): decoder.method for place, decoder in enumerate(decoders)}
        for method in methods.values():
            method.decode(self.requests[0].shorter(WARM_TOKENS), Trace())  # warms up
        options = TimingOptions(self.point.seed, decoders[0].synchronize)
        started = time.perf_counter()
        texts: list[TimedText] = []
        differing: list[ReplayVerdict] = []
        for index, request in enumerate(self.requests):
            if self.records.has_dropped(request.source):
                continue
            timed = time_methods(methods, [request], REPEATS, options)
            for place, point in enumerate(points):
                (live_text,) = timed[str(place)]
                replayed = point.texts[index]
                if tuple(live_text.token_ids) == replayed.token_ids:
                    seconds = median(live_text.latency_s)
                    texts.append(TimedText(str(place), replayed.features, seconds))
                else:
                    differing.append(
                        judge_replay(
                            decoders_over[place], self.records, request, replayed.token_ids
                        )
                    )
            self.records.save()
            if time.perf_counter() - started > timed_s:
                break
        return texts, differing

    def _points_to_time(
        self, screened: Sequence[ReplayedPoint], timed_s: float
    ) -> list[ReplayedPoint]:
        """The target alone, and of each policy as many points as can decode a text in these seconds."""
        request = self.requests[0]
        text_s = self._seconds_alone(screened[0], [request.shorter(WARM_TOKENS), request])
        policies = {point.candidate.name for point in screened[1:]}
        affordable = int(timed_s / (REPEATS * text_s * max(1, len(policies))))
        per_policy = min(MOST_TIMED, max(FEWEST_TIMED, affordable))
        return [screened[0], *farthest_points(screened[1:], per_policy)]

    def _seconds_alone(self, point: ReplayedPoint, requests: Sequence[Request]) -> float:
        """The seconds of the last of these texts, which the point's method decodes live."""
        method = self.decoder(point.candidate.policy, live).method
        for request in requests:
            started = time.perf_counter()
            method.decode(request, Trace())
        return time.perf_counter() - started

    def rows(self, screened: Sequence[ReplayedPoint], model: CostModel | None) -> list[Row]:
        """The points' rows. screened: the target alone first. model: None predicts no speeds."""
        pool, references, picks = self._pool(screened)
        scoring = self.point.scoring
        scores = score_pool(
            scoring.lead,
            pool,
            references,
            systems=picks,
            baseline=picks[0],
            seed=self.point.seed,
            run_code=scoring.run_code,
            writing=scoring.writing,
            margin=scoring.margin,
            conversations=conversations_of(source_ids(self.point.examples)),
        )
        baseline_s = None if model is None else model.seconds(screened[0].features)
        rows = []
        for point, (score, difference) in zip(screened[1:], scores[1:], strict=True):
            counts, speedup = point.counts, None
            if model is not None:
                speedup = baseline_s / model.seconds(point.features)
            rows.append(
                Row(
                    policy=point.candidate.name,
                    knobs=point.candidate.knobs,
                    split=self.split,
                    n_examples=len(point.texts),
                    data=self.point.setting["data"],
                    code=code_of(resolved_policy(point.candidate.policy), self.point.specs),
                    quality=score.value,
                    quality_low=score.low,
                    quality_high=score.high,
                    quality_difference=difference.value,
                    predicted_speedup=speedup,
                    tokens_per_target_call=counts["tokens"] / max(1, counts["target_calls"]),
                    acceptance_rate=(
                        counts["accepted"] / counts["judged"] if counts["judged"] else None
                    ),
                    quality_metric=score.metric,
                    quality_difference_low=difference.low,
                    quality_difference_high=difference.high,
                    **(score.non_inferiority.to_columns() if score.non_inferiority else {}),
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

        For a metric of tokens the pool holds what it takes in place of the texts.
        """
        decoder, scoring = self.point.decoders[METHOD], self.point.scoring
        keys_by_point = [
            [(index, text.token_ids) for index, text in enumerate(point.texts)]
            for point in screened
        ]
        # sorted by example, so that each record is read once
        distinct_keys = sorted({key for keys in keys_by_point for key in keys})
        place_of = {key: place for place, key in enumerate(distinct_keys)}
        references = [example.references or NO_REFERENCE for example in self.point.examples]
        if scoring.lead == AGREEMENT:
            references = [(decoder.scored_text(text.token_ids),) for text in screened[0].texts]
        token_statistic = metric_named(scoring.lead).of_tokens
        if token_statistic is None:
            pool = [decoder.scored_text(tokens) for _, tokens in distinct_keys]
        else:
            pool = []
            for index, keys in groupby(distinct_keys, key=itemgetter(0)):
                for _, tokens in keys:
                    nats = None
                    if scoring.lead == LOG_PROBABILITY:
                        nats = self._log_probability(index, tokens)
                    pool.append(token_statistic(len(tokens), nats))
                self.records.save()
        return (
            pool,
            [references[index] for index, _ in distinct_keys],
            [[place_of[key] for key in keys] for keys in keys_by_point],
        )

    def _log_probability(self, index: int, tokens: Sequence[int]) -> float:
        """What the target gives to a text of an example, in nats, from its record as far as that
        goes.
        """
        source = self.requests[index].source
        target = self.records(self.point.decoders[METHOD].target)
        session = target.start(replace(source, processors=None), len(tokens))
        scores = session.extend([source.prompt[-1], *tokens[:-1]])
        return log_probability(scores.logits, tokens)


COUNTS = ("target_calls", "draft_calls", "tokens", "drafted", "accepted", "fallbacks", "rollbacks")


def live(model: LoadedModel) -> LoadedModel:
    """The model itself, without a record."""
    return model


def by_prompt(sources: Sequence[str], indices: Iterable[int]) -> list[list[int]]:
    """These places, those of one prompt together: they share its record, so they run one after the
    other. sources: the names of the prompts of all places.
    """
    places: dict[str, list[int]] = {}
    for index in indices:
        places.setdefault(sources[index], []).append(index)
    return list(places.values())


def farthest_points(screened: Sequence[ReplayedPoint], per_policy: int) -> list[ReplayedPoint]:
    """A few points of each policy that differ most in their calls (farthest-point sampling), among
    them those with the fewest and the most.
    """
    sampled = []
    for name in dict.fromkeys(point.candidate.name for point in screened):
        points = [point for point in screened if point.candidate.name == name]
        calls = np.array(
            [[point.counts["target_calls"], point.counts["draft_calls"]] for point in points],
            dtype=float,
        )
        calls /= np.maximum(calls.max(axis=0), 1)
        places = [int(calls.sum(axis=1).argmin())]
        while len(places) < min(per_policy, len(points)):
            distances = [np.linalg.norm(calls - calls[place], axis=1) for place in places]
            nearest = np.min(distances, axis=0)
            if nearest.max() == 0:
                break
            places.append(int(nearest.argmax()))
        sampled += [points[place] for place in places]
    return sampled
