"""What a small module learns: each predictor predicts one token after every context of an answer
(BiTA §3.1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, Sampler

from bild_lab.engine.models.checkpoint.loaded_checkpoint import evaluation_mode
from bild_lab.ranks import launched
from bild_lab.training.batches import (
    IGNORED,
    BatchOrder,
    evaluation_batches,
    padded,
    spread_evenly,
)

TOP = 5  # choices of a predictor; the paper's draft trees take as many (BiTA §4.1.2)
ACCEPTED = "accepted"  # tokens of a chain of first choices that would be accepted
MATCH_RATE = "match_rate"  # share of first choices that are the labels, mean over predictors


@dataclass(frozen=True)
class Predictors:
    """The mask tokens or heads of a module.

    offsets: which token each one predicts; 0 is the token right after the context. weights: of
    their losses.
    per_answer: contexts of an answer in each epoch; None takes all. consecutive: they lie one after
    another, and each of them has all labels. In BiTA's words a context of the prompt and y_0 … y_k,
    the first k + 1 tokens of the answer, is split point k; k = -1 is the prompt alone, as in the
    first forward of decoding. skipped: how many contexts from the prompt alone on are left out.
    ahead: how many tokens after a context a module reads. metric: chooses the best weights,
    ACCEPTED or MATCH_RATE.
    """

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    weights: tuple[float, ...]
    per_answer: int | None = None
    consecutive: bool = False
    skipped: int = 0
    ahead: int = 0
    metric: str = ACCEPTED

    @classmethod
    def in_turn(
        cls, kind: str, first_offset: int, weights: Sequence[float], **values: Any
    ) -> Predictors:
        """Predictors of one token after another, from offset `first_offset` on: KIND_1, KIND_2, …"""
        names = tuple(f"{kind}_{number}" for number in range(1, len(weights) + 1))
        return cls(
            names, tuple(range(first_offset, first_offset + len(weights))), tuple(weights), **values
        )

    @property
    def shortest_answer(self) -> int:
        """Tokens that an answer needs so that every predictor has a label."""
        return max(self.offsets) + 1 + self.skipped

    def score(self, hits: Bool[Tensor, "n predictors"]) -> Float[Tensor, " n"]:
        """The metric of every context. hits: which predictors' first choices are right."""
        return leading_hits(hits) if self.metric == ACCEPTED else hits.float().mean(-1)


def leading_hits(hits: Bool[Tensor, "n predictors"]) -> Float[Tensor, " n"]:
    """How many predictors are right before the first wrong one: the tokens of a chain draft that
    would be accepted.
    """
    return hits.long().cumprod(-1).sum(-1).float()


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt and the model's answer as one row of tokens, of which the first `prompt_length` are
    the prompt.

    learned: of a conversation, which of its tokens are answers; None: all after the prompt.
    """

    tokens: Int[np.ndarray, " n"]
    prompt_length: int
    learned: Bool[np.ndarray, " n"] | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def cut(self, longest: int) -> AnsweredPrompt:
        learned = None if self.learned is None else self.learned[:longest]
        return AnsweredPrompt(self.tokens[:longest], min(self.prompt_length, longest), learned)


@dataclass(frozen=True)
class ChosenContexts:
    """An answered prompt with the contexts to learn from.

    tokens: those that are read. contexts: how many of them each context holds. labels: the token
    that each predictor should give after each context; IGNORED after the answer's end.
    """

    tokens: Int[np.ndarray, " n"]
    contexts: Int[np.ndarray, " contexts"]
    labels: Int[np.ndarray, "contexts predictors"]


def choose_contexts(
    row: AnsweredPrompt, predictors: Predictors, random: np.random.Generator | None = None
) -> ChosenContexts:
    """Contexts of an answered prompt: drawn at random or, without a generator, spread evenly over
    the answer.

    After the last context one label is left, or all if contexts are consecutive. In a conversation
    only answers have contexts and labels.
    """
    left = max(predictors.offsets) if predictors.consecutive else min(predictors.offsets)
    contexts = np.arange(row.prompt_length + predictors.skipped, row.length - left)
    if row.learned is not None:
        # a context of n tokens comes right before token n
        contexts = contexts[row.learned[contexts]]
    count = predictors.per_answer
    if count is not None and count < len(contexts):
        if random is not None and predictors.consecutive:
            start = random.integers(len(contexts) - count + 1)
            contexts = contexts[start : start + count]
        elif random is None:
            contexts = contexts[spread_evenly(count, len(contexts))]
        else:
            contexts = np.sort(random.choice(contexts, count, replace=False))
    label_places = contexts[:, None] + np.array(predictors.offsets)
    inside = np.minimum(label_places, row.length - 1)
    known = (
        label_places < row.length
        if row.learned is None
        else (label_places < row.length) & row.learned[inside]
    )
    labels = np.where(known, row.tokens[inside], IGNORED)
    return ChosenContexts(row.tokens[: contexts.max() + predictors.ahead], contexts, labels)


def longest_contexts(rows: Sequence[AnsweredPrompt], predictors: Predictors) -> ChosenContexts:
    """Contexts that take as much memory as those of any of these rows: the longest row, of which as
    much is learned as the longest answer has.
    """
    longest = max(rows, key=lambda row: row.length)
    answer = min(max(row.answer_length for row in rows), longest.length - 1)
    return choose_contexts(AnsweredPrompt(longest.tokens, longest.length - answer), predictors)


@dataclass(frozen=True)
class RandomContexts(Dataset[ChosenContexts]):
    """Answered prompts with random contexts, indexed by the epoch and the row's number, which alone
    decide them.
    """

    rows: Sequence[AnsweredPrompt]
    predictors: Predictors
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: tuple[int, int]) -> ChosenContexts:
        epoch, index = place
        return choose_contexts(
            self.rows[index], self.predictors, np.random.default_rng([self.seed, epoch, index])
        )


class EpochOrder(Sampler[tuple[int, int]]):
    """The order of a whole training: each row's number, after the number of the epoch."""

    def __init__(self, order: BatchOrder) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((place // self._order.epoch_size, index) for place, index in enumerate(self._order))


def collate(rows: Sequence[ChosenContexts], reads_labels: bool = False) -> dict[str, Tensor]:
    """Tensors input_ids [batch s], contexts [batch contexts] and labels [batch contexts
    predictors].

    Rows with fewer contexts than others are filled up with contexts of one token that have no
    labels. reads_labels: the module gets the labels too, as `target_tokens`.
    """
    batch = {
        "input_ids": padded([row.tokens for row in rows], 0),
        "contexts": padded([row.contexts for row in rows], 1),
        "labels": padded([row.labels for row in rows], IGNORED),
    }
    return {**batch, "target_tokens": batch["labels"]} if reads_labels else batch


@dataclass(frozen=True)
class OwnLoss:
    """The logits of a module that learns more than the labels, and its loss for each label.

    It may be of the first predictors alone: then the others are not trained. logits: None of a
    module that never holds all of them. It gives its choices instead, as `first_choices` does,
    except where gradients are recorded.
    """

    logits: Float[Tensor, "*rows predictors vocab"] | None
    losses: Float[Tensor, "*rows predictors"]
    choices: Int[Tensor, "*rows predictors top"] | None = None


def first_choices(logits: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows top"]:
    """The five most likely tokens, the most likely first."""
    return logits.topk(min(TOP, logits.shape[-1])).indices


Predicted = Float[Tensor, "*rows predictors vocab"] | OwnLoss


class PredictionLoss:
    """The loss in nats a label, weighted by predictor, called as the Trainer calls its
    `compute_loss_func`.

    It is cross-entropy with the labels, or the module's `OwnLoss`.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = tuple(weights)

    def __call__(
        self,
        predicted: Predicted,
        labels: Int[Tensor, "*rows predictors"],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Float[Tensor, ""]:
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return self.total(predicted, labels) / count

    def total(
        self, predicted: Predicted, labels: Int[Tensor, "*rows predictors"]
    ) -> Float[Tensor, ""]:
        """The weighted sum over all labels."""
        if isinstance(predicted, OwnLoss):
            trained = predicted.losses.shape[-1]
            losses = predicted.losses.float().masked_fill(labels[..., :trained] == IGNORED, 0.0)
            return (losses * losses.new_tensor(self._weights[:trained])).sum()
        flat = predicted.flatten(0, -2).float()
        losses = cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="none")
        return (losses.view(labels.shape) * losses.new_tensor(self._weights)).sum()


@dataclass(frozen=True)
class PredictionEvaluator:
    """Scores a module on held-out rows.

    Each process scores its share, and each gets the whole result.
    """

    rows: Sequence[AnsweredPrompt]
    predictors: Predictors
    batch_size: int

    def __call__(self, model: nn.Module, loss: PredictionLoss) -> dict[str, float]:
        """The metric's mean over contexts, `loss` in nats a label, and seconds.

        For each predictor also the share of labels that are its first choice, `top_1_NAME`, or
        among its first five, `top_5_NAME`.
        """
        started, predictors = time.perf_counter(), self.predictors
        with evaluation_mode([model]):
            sums = self._sums(model, loss)
        shares = launched().gather(sums.tolist())
        loss_sum, metric_sum, contexts, *counts = map(sum, zip(*shares, strict=True))
        size = len(predictors.names)
        labels, firsts, near = (counts[start : start + size] for start in range(0, 3 * size, size))
        scores = {"loss": loss_sum / sum(labels), predictors.metric: metric_sum / contexts}
        for index, name in enumerate(predictors.names):
            scores[f"top_1_{name}"] = firsts[index] / labels[index]
            scores[f"top_{TOP}_{name}"] = near[index] / labels[index]
        return {**scores, "seconds": time.perf_counter() - started}

    @torch.no_grad()
    def _sums(self, model: nn.Module, loss: PredictionLoss) -> Float[Tensor, " sums"]:
        """This process's sums: loss, metric, contexts; then each predictor's labels, first choices
        and first five.
        """
        device, predictors = next(model.parameters()).device, self.predictors
        sums = torch.zeros(3 + 3 * len(predictors.names), dtype=torch.double, device=device)
        for indices in evaluation_batches([row.length for row in self.rows], self.batch_size):
            batch = collate(
                [choose_contexts(self.rows[index], predictors) for index in indices or [0]]
            )
            labels = batch.pop("labels").to(device)
            if not indices:  # others still run the model, of which this process may hold a part
                labels.fill_(IGNORED)
            if getattr(model, "reads_labels", False):
                batch["target_tokens"] = labels
            predicted = model(**{name: tensor.to(device) for name, tensor in batch.items()})
            real = (labels != IGNORED).any(-1)  # [batch contexts], false for contexts that fill up
            logits = predicted.logits if isinstance(predicted, OwnLoss) else predicted
            choices = predicted.choices[real] if logits is None else first_choices(logits[real])
            true_tokens = labels[real][..., None]
            if choices.shape[:-1] != true_tokens.shape[:-1]:  # one predictor would pass for all
                raise ValueError(
                    f"the module gave choices of {choices.shape[-2]} predictors for the labels of"
                    f" {labels.shape[-1]}"
                )
            # [n, predictors] each
            hits, near = (choices[..., :1] == true_tokens).any(-1), (choices == true_tokens).any(-1)
            by_predictor = [(true_tokens != IGNORED).squeeze(-1), hits, near]
            totals = torch.stack(
                [loss.total(predicted, labels), predictors.score(hits).sum(), real.sum()]
            )
            sums += torch.cat([totals, *(matches.sum(0) for matches in by_predictor)])
        return sums
