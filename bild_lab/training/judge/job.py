"""Train a judge: search for labels example by example, then fit the classifier. Every finished example is kept."""

from __future__ import annotations

import base64
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bild_lab.engine.sampling import Sampling
from bild_lab.errors import require_flag, require_number
from bild_lab.files import holding, write_atomically
from bild_lab.lab.data.examples import DatasetSpec, Example
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.hashing import data_hash
from bild_lab.lab.measure.environment import environment
from bild_lab.lab.metrics import AGREEMENT, cut_text, score
from bild_lab.training.batches import spread_evenly
from bild_lab.training.dataset_words import dataset_words
from bild_lab.training.folder import METRICS, TrainingFolder
from bild_lab.training.judge.classifier import Labels, fit
from bild_lab.training.judge.search import Unchanged, search
from bild_lab.training.output_files import require_same_settings, write_json, writing

PLAN = "plan.json"
_MOVED = frozenset({"dataset.path"})


@dataclass(frozen=True)
class JudgeSpec:
    """How mismatches are labelled, and the classifier chosen: the fields of `judge` in `conf/train_judge.yaml`.

    tolerance: a swap matters if the text's score falls by more than so many points of dataset.metric. held_out: the
    share of the examples that choose regularization and threshold. recall: of their important mismatches. run_code: let
    dataset.metric=pass_at_1 run the programs that models write.
    """

    tolerance: float
    held_out: float
    recall: float
    run_code: bool = False

    def __post_init__(self) -> None:
        require_number("judge.tolerance", self.tolerance, 0, 100)
        require_number("judge.held_out", self.held_out, 0, 0.9, above=True)
        require_number("judge.recall", self.recall, 0, 1)
        require_flag("judge.run_code", self.run_code)


@dataclass(frozen=True)
class JudgeJob:
    """A pair and the examples to search. decoder: any policy's over the pair, with the target first and the drafter."""

    decoder: Decoder
    pair_words: Sequence[str]
    spec: JudgeSpec
    dataset: DatasetSpec
    examples: tuple[Example, ...]
    max_new_tokens: int
    folder: Path

    @property
    def labels(self) -> Path:
        return self.folder / "labels"

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Everything that decides the labels."""
        target, draft = (model.checkpoint for model in self.decoder.models)
        return {
            "target": target.fingerprint,
            "draft": draft.fingerprint,
            "precision": str(self.decoder.target.dtype).removeprefix("torch."),
            "data": data_hash(self.examples),
            "metric": self.dataset.metric,
            "cut": self.dataset.cut,
            "max_new_tokens": self.max_new_tokens,
            "max_source_tokens": self.dataset.max_source_tokens,
            "tolerance": self.spec.tolerance,
        }

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.plan, "held_out": self.spec.held_out, "recall": self.spec.recall}

    def command(self, place: Path) -> str:
        """A command that decodes with the judge."""
        words = ["policy=judge", f"policy.adapter={place}", *self.pair_words, *dataset_words(self.dataset)]
        return f"python run.py {shlex.join(words)}"


def train_judge(job: JudgeJob, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Label all examples and leave the judge in `job.folder/judge`; returns its metrics.json.

    Labels of finished examples are kept, so an interrupted search goes on where it was; a finished training of the same
    settings is returned at once. advance: called after each example. Raises UserError for a folder with another
    training, and for labels of one kind only.
    """
    folder = TrainingFolder(job.folder, "judge")
    folder.require_same(job.identity)
    if (finished := folder.finished()) is not None:
        return finished
    if (job.labels / PLAN).is_file():
        held = json.loads((job.labels / PLAN).read_text())
        require_same_settings(job.labels, "labels", held, job.plan, _MOVED)
    folder.begin(job.identity)
    with writing(job.labels, "the labels"):
        write_json(job.labels / PLAN, job.plan)
    started = time.perf_counter()
    with holding(folder.lock):
        labels = [_labelled(job, index, advance) for index in range(len(job.examples))]
        searched_s = time.perf_counter() - started
        metrics, write = _fitted(job, labels, searched_s)
    folder.publish(write)
    folder.write_metrics(metrics)
    return metrics


def _labelled(job: JudgeJob, index: int, advance: Callable[[], None]) -> Labels:
    """The labels of one example, from its file or by search."""
    file = job.labels / f"{index:06d}.json"
    if not file.is_file():
        with writing(file, "the labels", "make room, then run the same command again: finished examples are kept"):
            write_atomically(file, json.dumps(_search(job, job.examples[index]), ensure_ascii=False).encode())
    advance()
    held = json.loads(file.read_text())
    states = np.frombuffer(base64.b64decode(held["hidden"]), np.float32).copy()
    important = torch.tensor([one["important"] for one in held["mismatches"]], dtype=torch.bool)
    width = states.size // max(1, len(important))  # of an answer without a mismatch nothing is known
    return Labels(torch.from_numpy(states).view(len(important), width), important)


def _search(job: JudgeJob, example: Example) -> dict[str, Any]:
    decoder, dataset, (target, draft) = job.decoder, job.dataset, job.decoder.models
    longest, agreement = dataset.max_source_tokens, dataset.metric == AGREEMENT
    request = decoder.request(example.prompt, job.max_new_tokens, Sampling(), max_source_tokens=longest)

    def judged(own: tuple[int, ...]) -> Unchanged:
        references = (decoder.text(list(own)),) if agreement else example.references

        def points(tokens: Sequence[int]) -> float:
            text = decoder.text(list(tokens))
            scored = text if agreement else cut_text(text, dataset.cut or ())
            return score(dataset.metric, [scored], [references], run_code=job.spec.run_code).value

        least = points(own) - job.spec.tolerance
        return lambda tokens: points(tokens) >= least

    found = search(target, draft, request, judged)
    states = [one.hidden.numpy() for one in found.mismatches]
    return {
        "id": example.id,
        "own": list(found.own),
        "kept": list(found.kept),
        "mismatches": [
            {
                "place": one.place,
                "target_token": one.target_token,
                "draft_token": one.draft_token,
                "important": one.important,
            }
            for one in found.mismatches
        ],
        "hidden": base64.b64encode(np.concatenate(states).tobytes() if states else b"").decode(),
    }


def _fitted(
    job: JudgeJob, labels: Sequence[Labels], searched_s: float
) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """metrics.json, and what writes the judge's folder."""
    count = max(1, round(job.spec.held_out * len(labels)))
    aside = set(spread_evenly(min(count, len(labels) - 1), len(labels))) if len(labels) > 1 else set()
    parts = [[one for index, one in enumerate(labels) if (index in aside) == held] for held in (False, True)]
    train, held_out = map(_joined, parts)
    target, draft = (model.checkpoint for model in job.decoder.models)
    origins = [{"path": one.path, "revision": one.revision, "fingerprint": one.fingerprint} for one in (target, draft)]
    started = time.perf_counter()
    fitted = fit(train, held_out, job.spec.recall, *origins)
    every = _joined(labels)
    metrics = {
        "start": target.path,
        "noun": "judge",
        "architecture": target.config.model_type,
        "parameters": fitted.head.weight.numel() + 1,
        "data": f"{len(every):,} mismatches of {draft.path} in {len(labels):,} answers to {job.dataset.name} "
        f"({job.dataset.split})",
        "examples": len(labels),
        "mismatches": len(every),
        "important": int(every.important.sum()),
        "held_out_mismatches": len(held_out),
        "threshold": fitted.head.config.threshold,
        "strength": fitted.strength,
        "kept_share": fitted.kept_share,
        "recall": fitted.recall,
        "steps": fitted.steps,
        "loss": fitted.loss,
        "metric": "roc_auc",
        "best": {"step": fitted.steps, "roc_auc": fitted.roc_auc},
        "history": [],
        "search_s": searched_s,
        "training_s": time.perf_counter() - started,
        "identity": job.identity,
        "environment": environment(job.decoder.target.device),
    }

    def write(place: Path) -> None:
        fitted.head.save(place)
        write_json(place / METRICS, metrics)

    return metrics, write


def _joined(several: Sequence[Labels]) -> Labels:
    filled = [one for one in several if len(one)]
    if not filled:
        return Labels(torch.zeros(0, 1), torch.zeros(0, dtype=torch.bool))
    return Labels(torch.cat([one.hidden for one in filled]), torch.cat([one.important for one in filled]))
