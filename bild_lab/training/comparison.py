"""What a target gains from a drafter: agreement, speculative decoding, and BiLD's thresholds (BiLD §3.5.1).

BiLD's thresholds are chosen on other examples than they are measured on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError, require_whole
from bild_lab.files import write_atomically
from bild_lab.lab.analysis.statistics import pareto_front
from bild_lab.lab.config import compose_policy, knob_values
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.point import prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.runner import run_point
from bild_lab.lab.schema.result import Result
from bild_lab.lab.screening.candidates import Candidate
from bild_lab.lab.screening.replay import fit
from bild_lab.lab.screening.rows import Row
from bild_lab.lab.screening.screen import Screening
from bild_lab.training.answers import Calibration, greedy_answers
from bild_lab.training.batches import Collator, TokenizedExample
from bild_lab.training.soft_targets import soft_targets

KNOBS = {"speculative": ("window",), "bild": ("fallback", "rollback")}  # named in a point's line
LOSSES = (0.0, 1.0)  # points of quality below the target's that are allowed
_TIMED_S = 30.0  # of live decoding, from which the cost model learns
_CHOSEN = "chosen.json"
_BATCH_SIZE = 16  # texts; the models are small

TargetAnswers = Sequence[tuple[str, list[int]]]  # prompts, each with the target's tokens
Report = Callable[[str], None]  # prints a line


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

    def points(
        self, calibration: Calibration, draft: Checkpoint, aligned: bool, surroundings: Mapping[str, Any]
    ) -> list[DictConfig]:
        """The points with this drafter, speculative decoding first, as `prepare` takes them.

        aligned: whether this is the draft model after the alignment. surroundings: the configuration's name, runtime
        and measure.
        """
        target = calibration.target
        speculative, bild = (OmegaConf.to_container(compose_policy(name)) for name in ("speculative", "bild"))
        thresholds = itertools.product(self.fallback, self.rollback)
        policies = [
            {**speculative, "window": self.window},
            *({**bild, "fallback": fallback, "rollback": rollback} for fallback, rollback in thresholds),
        ]
        pair = {"name": "alignment", "target": target.path, "target_revision": target.revision}
        limit = calibration.manifest["decoding"]["max_new_tokens"]
        shared = {
            **surroundings,
            "resume": True,
            "pair": {**pair, "draft": draft.path, "draft_revision": draft.revision, "aligned": aligned},
            "dataset": asdict(self.dataset(calibration)),
            "logger": {},  # the alignment logs them itself
            "decoding": {"max_new_tokens": limit, "temperature": 0.0, "top_k": None, "top_p": None},
        }
        return [OmegaConf.create({**shared, "policy": policy}) for policy in policies]

    def screening(self, configs: Sequence[DictConfig]) -> Screening:
        """Of these points on `select`. Raises UserError if its examples are those that are measured."""
        screening = Screening(self.grid(configs), self.select, "align")
        screening.require_other_examples(self.split)
        return screening

    def grid(self, configs: Sequence[DictConfig]) -> _Configured:
        """These points as a screening takes them."""
        candidates = tuple(
            Candidate((), policy.name, knob_values(OmegaConf.to_container(policy)), policy)
            for policy in (config.policy for config in configs)
        )
        return _Configured(configs[0], candidates, self.select, self.select_limit)

    def choose(self, configs: Sequence[DictConfig], fingerprint: str, report: Report) -> list[int | None]:
        """The places of the fastest points that lose at most so much on `select`, one for each of LOSSES.

        fingerprint: of the drafter's weights. Points are decoded over a record of the models' scores, and their speed
        is predicted (docs/screening.md). What was chosen is kept in `chosen.json`.
        """
        screening = self.screening(configs)
        plain = [OmegaConf.to_container(config, resolve=True) for config in configs]
        key = content_hash({"configs": plain, "select": self.select, "limit": self.select_limit, "draft": fingerprint})
        file = screening.folder / _CHOSEN
        with Sweep(screening.folder).search_lock():
            known = json.loads(file.read_text()) if file.is_file() else {}
            if key not in known:
                report(f"choosing from {len(configs)} points on {self.select}")
                screened = screening.decode(screening.grid.candidates)
                texts, _ = screening.timed(screened, _TIMED_S)
                rows = screening.rows(screened, fit(texts, "0"))
                known[key] = [fastest(rows, loss) for loss in LOSSES]
                write_atomically(file, (json.dumps(known, indent=2) + "\n").encode())
        return known[key]


@dataclass(frozen=True)
class _Configured:
    """Points as a screening takes them: configurations that differ in their policy alone.

    limit: of the texts of the split `select`; other splits keep that of their configuration.
    """

    shared: DictConfig
    candidates: tuple[Candidate, ...]
    select: str
    limit: int | None

    def config(self, candidate: Candidate, split: str, _name: str) -> DictConfig:
        config = self.shared.copy()
        config.policy = candidate.policy
        config.dataset.split = split
        if split == self.select:
            config.dataset.limit = self.limit
        return config


def fastest(rows: Sequence[Row], loss: float) -> int | None:
    """The place of the fastest row that loses at most so many points of quality."""
    kept = [place for place, row in enumerate(rows) if row.quality_difference >= -loss]
    return max(kept, key=lambda place: (rows[place].predicted_speedup, rows[place].quality), default=None)


def measured_points(configs: Sequence[DictConfig], sweep: Sweep, logger: Any, report: Report) -> list[Result]:
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


def gains(speculative: Result, bild: Sequence[Result], best: Sequence[Result | None]) -> dict[str, Any]:
    """The numbers to compare. best: BiLD's points at no loss and within one point; None where there is none."""
    found = {
        "target_quality": speculative.quality.baseline,
        "acceptance_rate": speculative.counts.acceptance_rate,
        "tokens_per_target_call": speculative.counts.tokens_per_target_call,
        "speculative_speedup": speculative.speedup.value,
    }
    for name, result in zip(("no_loss", "one_point"), best, strict=True):
        found[f"bild_speedup_at_{name}"] = None if result is None else result.speedup.value
        found[f"bild_difference_at_{name}"] = None if result is None else result.quality.difference
    return {**found, "pareto": pareto(bild)}


def pareto(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The undominated points: thresholds, latency relative to the baseline's, quality."""
    rows = [
        {**result.knobs, "latency": 1 / result.speedup.value, "quality": result.quality.value} for result in results
    ]
    return [rows[index] for index in pareto_front([(row["latency"], row["quality"]) for row in rows])]


def agreement(
    model: LoadedModel, answers: TargetAnswers, max_source_tokens: int | None, max_new_tokens: int
) -> tuple[dict[str, float], list[str]]:
    """The shares of the target's tokens and texts that the model chooses too, and the model's own greedy texts."""
    checkpoint = model.checkpoint
    sources = [checkpoint.source(prompt, max_source_tokens) for prompt, _ in answers]
    own = greedy_answers(model, sources, max_new_tokens, _BATCH_SIZE)
    same = sum(tokens == theirs for tokens, (_, theirs) in zip(own, answers, strict=True))
    shares = {
        "token_agreement": token_agreement(model, answers, max_source_tokens),
        "text_agreement": same / len(answers),
    }
    return shares, [checkpoint.tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in own]


def token_agreement(model: LoadedModel, answers: TargetAnswers, max_source_tokens: int | None) -> float:
    """The share of the target's tokens that the model predicts from the target's text before each of them."""
    examples = []
    for prompt, answer in answers:
        source = model.checkpoint.source(prompt, max_source_tokens)
        ids = source.prompt if source.encoder_ids is None else source.encoder_ids[0]
        examples.append(TokenizedExample(np.array(ids), np.array(answer)))
    collate = Collator(0, model.checkpoint.decoder_start if model.checkpoint.encoder_decoder else None)
    chosen = soft_targets(model.transformers, examples, collate, 1, _BATCH_SIZE)
    same = [one.ids[:, 0] == example.answer for one, example in zip(chosen, examples, strict=True)]
    return float(np.concatenate(same).mean())
