"""Which blocks of a target its own draft should skip: Bayesian optimization of seconds per token (Zhang et al., 2023).

Candidates are decoded over a record of what the target scored, and their seconds come from a cost model that is fitted
to a few of them decoded live; or each is decoded and timed live.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bild_lab.engine.protocols import Method
from bild_lab.errors import UserError, require_flag, require_whole
from bild_lab.files import write_atomically
from bild_lab.lab.config import PairSpec, RuntimeSpec, compose_policy, typed
from bild_lab.lab.decoding.build import build_method
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.measure.cost_model import CostModel, TimedText, fit
from bild_lab.lab.measure.timing import time_methods
from bild_lab.lab.point import Point, decoder_of, prepare, sweep_folder
from bild_lab.lab.schema.timed import METHOD
from bild_lab.lab.screening.replay import FOLDER, Records, Replay, Text, decoded, versions
from bild_lab.lab.tuning.search import STARTUP_TRIALS, STUDY, sqlite_storage

POLICY, VANILLA = "layer_skip", "vanilla"
TIMED_SETS = 6  # of blocks, decoded live for the cost model
REPEATS = 3  # of a text that is timed; the median counts
MEMORY_BYTES = 2 * 2**30


@dataclass(frozen=True)
class SearchSpec:
    """How to search: `conf/search_layers.yaml`."""

    trials: int
    live: bool

    def __post_init__(self) -> None:
        require_whole("search.trials", self.trials, 1)
        require_flag("search.live", self.live)


@dataclass(frozen=True)
class Skips:
    """The layers that run without attention, and those that run without feed-forward."""

    attention: tuple[int, ...]
    feed_forward: tuple[int, ...]

    def knobs(self) -> dict[str, list[int]]:
        """Of `policy=layer_skip`. Layers without both are skipped whole."""
        both = set(self.attention) & set(self.feed_forward)
        return {
            "skipped_layers": sorted(both),
            "skipped_attention": [at for at in self.attention if at not in both],
            "skipped_feed_forward": [at for at in self.feed_forward if at not in both],
        }


@dataclass(frozen=True)
class Found:
    """The best blocks to skip.

    seconds_per_token, speedup: predicted, or measured if the search is live. acceptance_rate: accepted tokens of those
    that were judged. trials: how many sets were tried, by all commands. cost_model_error: median relative error of
    predicted speedups, of sets left out of the fit; None for a live search.
    """

    skips: Skips
    seconds_per_token: float
    speedup: float
    acceptance_rate: float
    trials: int
    cost_model_error: float | None

    def write(self, path: Path) -> None:
        content = {**asdict(self), "knobs": self.skips.knobs()}
        write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


class LayerSearch:
    """A search on the examples of a point with `policy=layer_skip`, whose window and stop rule stay as they are.

    Raises UserError for another policy, and for sampled decoding.
    """

    def __init__(self, cfg: DictConfig, spec: SearchSpec) -> None:
        if cfg.policy.name != POLICY:
            raise UserError(f"the search chooses the blocks of policy={POLICY}, got policy={cfg.policy.name}")
        self.cfg, self.spec = cfg, spec
        self.point: Point = prepare(cfg)
        self.folder = sweep_folder(cfg)
        records = Records(self.folder / FOLDER, MEMORY_BYTES, versions())
        self._replay = Replay(self.point, records, self.folder / "history")
        self._counts: Counter[str] = Counter()

    @property
    def depth(self) -> int:
        return self.point.decoders[METHOD].target.depth

    def run(self, advance: Callable[[int], None] = lambda done: None) -> Found:
        """Search until there are enough trials, those of earlier commands included. advance: called after each."""
        import optuna  # an optional dependency; its import takes a second

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self.folder.mkdir(parents=True, exist_ok=True)
        depth, states = self.depth, optuna.trial.TrialState
        study = optuna.create_study(
            storage=sqlite_storage(self.folder / STUDY),
            study_name=content_hash({"point": self.point.id, "live": self.spec.live}),
            load_if_exists=True,
        )
        study.sampler = optuna.samplers.TPESampler(
            seed=self.point.seed + len(study.trials), n_startup_trials=STARTUP_TRIALS
        )
        for trial in study.get_trials(states=(states.RUNNING,)):  # of a killed process
            study.tell(trial.number, state=states.FAIL)
        if not study.trials:
            for skips in even_skips(depth):
                study.enqueue_trial(params_of(skips, depth))
        while (done := len(study.get_trials(deepcopy=False, states=(states.COMPLETE,)))) < self.spec.trials:
            trial = study.ask()
            for name in names(depth):
                trial.suggest_int(name, 0, 1)
            study.tell(trial, self.seconds_per_token(skips_of(trial.params, depth)))
            advance(done + 1)
        best = skips_of(study.best_trial.params, depth)
        seconds = self.seconds_per_token(best)
        counts = self._counts
        return Found(
            skips=best,
            seconds_per_token=seconds,
            speedup=self._vanilla_seconds / seconds,
            acceptance_rate=counts["accepted"] / max(1, counts["judged"]),
            trials=done,
            cost_model_error=None if self.spec.live else self._model.error,
        )

    def seconds_per_token(self, skips: Skips) -> float:
        """Of all texts. Twice the target's own for a draft that is the whole target, or nothing of it."""
        if not 0 < len(skips.attention) + len(skips.feed_forward) < 2 * self.depth:
            return 2 * self._vanilla_seconds
        texts = self._texts(skips)
        self._counts = sum((one.counts for one in texts), Counter())
        if self.spec.live:
            return sum(self._timed({POLICY: self._method(skips)})[POLICY]) / self._counts["tokens"]
        return sum(self._model.seconds(one.features) for one in texts) / self._counts["tokens"]

    def _texts(self, skips: Skips | None) -> list[Text]:
        """What a set of blocks decodes over the record; None: the target alone."""
        name = VANILLA if skips is None else POLICY
        pair, runtime = typed(PairSpec, self.cfg.pair, "pair"), typed(RuntimeSpec, self.cfg.runtime, "runtime")
        policy = compose_policy(VANILLA) if skips is None else self._policy(skips)
        decoder = decoder_of(policy, pair, self.point.decoding, runtime, self._replay.records)
        texts = [decoded(name, decoder, request) for request in self._replay.requests]
        self._replay.records.save()
        return texts

    def _policy(self, skips: Skips) -> DictConfig:
        policy = self.cfg.policy.copy()
        policy.update(skips.knobs())
        return policy

    def _method(self, skips: Skips) -> Method:
        return build_method(self._policy(skips), {"target": lambda: self._live.target})

    @property
    def _live(self) -> Decoder:
        return self.point.decoders[METHOD]

    def _timed(self, methods: dict[str, Method]) -> dict[str, list[float]]:
        """Seconds of every text by these methods, in turn."""
        requests = self._replay.requests
        found = time_methods(methods, requests, REPEATS, self.point.seed, self._live.synchronize)
        return {name: [sorted(one.latency_s)[REPEATS // 2] for one in timed] for name, timed in found.items()}

    @cached_property
    def _model(self) -> CostModel:
        """Fitted to the target alone and a few sets of blocks, decoded live."""
        sets = [*even_skips(self.depth), *random_skips(self.depth, TIMED_SETS, self.point.seed)]
        vanilla = build_method(compose_policy(VANILLA), {"target": lambda: self._live.target})
        methods = {VANILLA: vanilla, **{str(place): self._method(skips) for place, skips in enumerate(sets)}}
        texts = {VANILLA: self._texts(None), **{str(place): self._texts(skips) for place, skips in enumerate(sets)}}
        return fit(
            [
                TimedText(name, text.features, seconds)
                for name, latencies in self._timed(methods).items()
                for text, seconds in zip(texts[name], latencies, strict=True)
            ],
            VANILLA,
        )

    @cached_property
    def _vanilla_seconds(self) -> float:
        """The target's own seconds per token."""
        texts = self._texts(None)
        tokens = sum(one.counts["tokens"] for one in texts)
        if self.spec.live:
            vanilla = build_method(compose_policy(VANILLA), {"target": lambda: self._live.target})
            return sum(self._timed({VANILLA: vanilla})[VANILLA]) / tokens
        return sum(self._model.seconds(one.features) for one in texts) / tokens


def names(depth: int) -> list[str]:
    """Of a study's parameters: 1 skips the block."""
    return [f"{block} {layer}" for block in ("attention", "feed-forward") for layer in range(depth)]


def params_of(skips: Skips, depth: int) -> dict[str, int]:
    skipped = [*(f"attention {at}" for at in skips.attention), *(f"feed-forward {at}" for at in skips.feed_forward)]
    return {name: int(name in skipped) for name in names(depth)}


def skips_of(params: dict[str, Any], depth: int) -> Skips:
    chosen = [tuple(at for at in range(depth) if params[f"{block} {at}"]) for block in ("attention", "feed-forward")]
    return Skips(*chosen)


def even_skips(depth: int) -> Sequence[Skips]:
    """Every second layer, its attention alone, its feed-forward alone: where a search begins."""
    half = tuple(range(1, max(2, depth - 1), 2)) if depth > 1 else (0,)
    apart = Skips(half, ()), Skips((), half)
    return (Skips(half, half), *apart) if depth > 1 else apart


def random_skips(depth: int, count: int, seed: int) -> Sequence[Skips]:
    """Sets of different sizes."""
    chance = random.Random(seed)
    sets = []
    for place in range(count):
        share = (place + 1) / (count + 1)
        chosen = [tuple(at for at in range(depth) if chance.random() < share) for _ in range(2)]
        sets.append(Skips(chosen[0] or (0,), chosen[1][: depth - 1]))
    return sets
