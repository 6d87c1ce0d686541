"""Train a judge: search for labels example by example, then fit a linear classifier (AutoJudge, Garipov et al., 2025).

Every finished example is kept.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from safetensors.torch import load_file, save
from scipy.stats import mannwhitneyu
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from bild_lab.engine.heads.judge import JudgeConfig, JudgeHead
from bild_lab.engine.sampling import Sampling
from bild_lab.errors import UserError, require_flag, require_number
from bild_lab.files import holding, write_atomically
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import Example
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.hashing import data_hash
from bild_lab.lab.measure.environment import environment
from bild_lab.lab.metrics.quality import cut_text, score
from bild_lab.lab.metrics.text_metrics import AGREEMENT
from bild_lab.training.batches import spread_evenly
from bild_lab.training.dataset_words import dataset_words
from bild_lab.training.folder import METRICS, TrainingFolder, keep_plan, write_json, writing
from bild_lab.training.modules.judge_search import Unchanged, search

EXAMPLES = 500  # searched without dataset.limit; each takes a few continuations by the target
STRENGTHS = tuple(10.0 ** (power / 2) for power in range(-10, 3))  # C: the inverse of the penalty's weight
ITERATIONS = 200


@dataclass(frozen=True)
class JudgeSpec:
    """How mismatches are labelled, and the classifier chosen: the fields of `conf/module/judge.yaml`.

    tolerance: a swap matters if the text's score falls by more than so many points of dataset.metric. held_out: the
    share of the examples that choose regularization and threshold. recall: of their important mismatches. run_code: let
    dataset.metric=pass_at_1 run the programs that models write.
    """

    tolerance: float
    held_out: float
    recall: float
    run_code: bool = False

    def __post_init__(self) -> None:
        require_number("module.tolerance", self.tolerance, 0, 100)
        require_number("module.held_out", self.held_out, 0, 0.9, above=True)
        require_number("module.recall", self.recall, 0, 1)
        require_flag("module.run_code", self.run_code)


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
    with writing(job.labels, "the labels"):
        keep_plan(job.labels, "labels", job.plan)
    folder.begin(job.identity)
    started = time.perf_counter()
    with holding(folder.lock):
        labels = [_labelled(job, index, advance) for index in range(len(job.examples))]
        searched_s = time.perf_counter() - started
        head, metrics = _fitted(job, labels, searched_s)

    def write(place: Path) -> None:
        head.save(place)
        write_json(place / METRICS, metrics)

    folder.publish(write)
    folder.write_metrics(metrics)
    return metrics


def _labelled(job: JudgeJob, index: int, advance: Callable[[], None]) -> Labels:
    """The labels of one example, from its file or by search."""
    file = job.labels / f"{index:06d}.safetensors"
    if not file.is_file():
        with writing(file, "the labels", "make room, then run the same command again: finished examples are kept"):
            write_atomically(file, save(_search(job, job.examples[index])))
    advance()
    held = load_file(file)
    return Labels(held["hidden"], held["important"])


def _search(job: JudgeJob, example: Example) -> dict[str, Tensor]:
    """The example's mismatches as tensors, each in the order of the answer."""
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

    found = search(target, draft, request, judged).mismatches
    hidden = [one.hidden for one in found]
    return {
        "hidden": torch.stack(hidden) if hidden else torch.zeros(0, 1),
        "important": torch.tensor([one.important for one in found], dtype=torch.bool),
        **{
            name: torch.tensor([getattr(one, name) for one in found], dtype=torch.int64)
            for name in ("place", "target_token", "draft_token")
        },
    }


def _fitted(job: JudgeJob, labels: Sequence[Labels], searched_s: float) -> tuple[JudgeHead, dict[str, Any]]:
    """The judge, and its metrics.json."""
    count = max(1, round(job.spec.held_out * len(labels)))
    aside = set(spread_evenly(min(count, len(labels) - 1), len(labels))) if len(labels) > 1 else set()
    parts = [[one for index, one in enumerate(labels) if (index in aside) == held] for held in (False, True)]
    train, held_out = map(_joined, parts)
    target, draft = (model.checkpoint for model in job.decoder.models)
    origins = [{"path": one.path, "revision": one.revision, "fingerprint": one.fingerprint} for one in (target, draft)]
    started = time.perf_counter()
    head, figures = fit(train, held_out, job.spec.recall, *origins)
    every = _joined(labels)
    metrics = {
        "start": target.path,
        "noun": "judge",
        "architecture": target.config.model_type,
        "parameters": head.weight.numel() + 1,
        "data": f"{len(every):,} mismatches of {draft.path} in {len(labels):,} answers to {job.dataset.name} "
        f"({job.dataset.split})",
        "examples": len(labels),
        "mismatches": len(every),
        "important": int(every.important.sum()),
        "held_out_mismatches": len(held_out),
        **figures,
        "metric": "roc_auc",
        "best": {"step": figures["steps"], "roc_auc": figures["roc_auc"]},
        "history": [],
        "search_s": searched_s,
        "training_s": time.perf_counter() - started,
        "identity": job.identity,
        "environment": environment(job.decoder.target.device),
    }
    return head, metrics


def _joined(several: Sequence[Labels]) -> Labels:
    filled = [one for one in several if len(one)]
    if not filled:
        return Labels(torch.zeros(0, 1), torch.zeros(0, dtype=torch.bool))
    return Labels(torch.cat([one.hidden for one in filled]), torch.cat([one.important for one in filled]))


@dataclass(frozen=True)
class Labels:
    """Mismatches with their labels. hidden: [n, dim]. important: [n]."""

    hidden: Float[Tensor, "n dim"]
    important: Bool[Tensor, " n"]

    def __len__(self) -> int:
        return self.important.shape[0]


def fit(
    train: Labels, held_out: Labels, recall: float, base: dict, drafter: dict
) -> tuple[JudgeHead, dict[str, float]]:
    """The classifier with the largest area under the ROC curve on the held-out mismatches, and its figures on them.

    recall: the threshold is the largest one at which so many of the held-out important mismatches are rejected. In the
    figures it is the share of these that are, `kept_share` that of the unimportant mismatches below the threshold,
    `strength` is C, `loss` in nats and `steps` the optimizer's. Raises UserError if either part lacks important or
    unimportant mismatches.
    """
    for name, part in (("to learn from", train), ("held out", held_out)):
        important = int(part.important.sum())
        if not 0 < important < len(part):
            raise UserError(
                f"of the {len(part)} mismatches {name}, {important} change the outcome, and a judge needs both kinds; "
                "search more examples (dataset.limit), or set another module.tolerance"
            )
    mean, scale = train.hidden.double().mean(0), train.hidden.double().std(0).clamp(min=1e-6)
    best: tuple[float, float, Tensor, Tensor, int] | None = None
    for strength in STRENGTHS:
        weight, bias, steps = regression((train.hidden.double() - mean) / scale, train.important, strength)
        area = roc_auc(((held_out.hidden.double() - mean) / scale) @ weight + bias, held_out.important)
        if best is None or area > best[0]:
            best = (area, strength, weight, bias, steps)
    area, strength, weight, bias, steps = best
    weight, bias = weight / scale, bias - (weight * mean / scale).sum()
    scores = held_out.hidden.double() @ weight + bias
    chances = scores.sigmoid()
    threshold = threshold_at(chances, held_out.important, recall)
    head = JudgeHead(JudgeConfig(weight.shape[0], threshold, base=base, drafter=drafter))
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    below = chances < threshold
    return head, {
        "threshold": threshold,
        "strength": strength,
        "roc_auc": area,
        "kept_share": float(below[~held_out.important].double().mean()),
        "recall": float((~below)[held_out.important].double().mean()),
        "loss": float(cross_entropy(scores, held_out.important.double())),
        "steps": steps,
    }


def regression(
    states: Float[Tensor, "n dim"], important: Bool[Tensor, " n"], strength: float
) -> tuple[Float[Tensor, " dim"], Float[Tensor, ""], int]:
    """Weight and bias that minimize C Σ loss + |w|² / 2, the bias without a penalty; and the optimizer's steps."""
    labels = important.double()
    parameters = torch.zeros(states.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=ITERATIONS, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        weight, bias = parameters[:-1], parameters[-1]
        loss = cross_entropy(states @ weight + bias, labels, reduction="mean")
        loss = loss + weight.square().sum() / (2 * strength * len(labels))
        loss.backward()
        return loss

    optimizer.step(closure)
    found = parameters.detach()
    return found[:-1], found[-1], optimizer.state[parameters]["n_iter"]


def roc_auc(scores: Float[Tensor, " n"], important: Bool[Tensor, " n"]) -> float:
    """The chance that an important mismatch scores above an unimportant one; a tie counts half."""
    positive, negative = scores[important].numpy(), scores[~important].numpy()
    return float(mannwhitneyu(positive, negative).statistic / (len(positive) * len(negative)))


def threshold_at(chances: Float[Tensor, " n"], important: Bool[Tensor, " n"], recall: float) -> float:
    """The largest threshold at which at least this share of the important mismatches is not below it."""
    ordered = np.sort(chances[important].numpy())
    return float(ordered[floor(round((1 - recall) * len(ordered), 9))]) if recall > 0 else 1.0
