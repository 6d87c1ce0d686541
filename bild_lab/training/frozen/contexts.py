"""The contexts in an answer that a small module learns to predict from, chosen again in every epoch (BiTA §3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from bild_lab.training.batches import IGNORED, BatchOrder, padded, spread_evenly


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt and the model's answer as one row of tokens, of which the first `prompt_length` are the prompt."""

    tokens: Int[np.ndarray, " n"]
    prompt_length: int

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class ChosenContexts:
    """An answered prompt with the contexts to learn from.

    tokens: those that are read. contexts: how many of them each context holds. labels: the token that each predictor
    should give after each context; IGNORED after the answer's end.
    """

    tokens: Int[np.ndarray, " n"]
    contexts: Int[np.ndarray, " contexts"]
    labels: Int[np.ndarray, "contexts predictors"]


@dataclass(frozen=True)
class ContextChooser:
    """Chooses contexts in an answered prompt.

    offsets: which token each predictor predicts; 0 is the token right after the context. per_answer: contexts of an
    answer in each epoch; None takes all. In the paper's words a context of the prompt and y_0 … y_k, the first k + 1
    tokens of the answer, is split point k; k = -1 is the prompt alone, as in the first forward of decoding. After the
    last context one label is left. skipped: how many contexts after the prompt alone are left out, it included. ahead:
    how many tokens behind a context a module reads.
    """

    offsets: tuple[int, ...]
    per_answer: int | None
    seed: int
    skipped: int = 0
    ahead: int = 0

    @property
    def shortest_answer(self) -> int:
        """Tokens that an answer needs so that every predictor has a label."""
        return max(self.offsets) + 1 + self.skipped

    def at_random(self, row: AnsweredPrompt, epoch: int, index: int) -> ChosenContexts:
        """Random contexts; the seed, the epoch and the row's number alone decide them."""
        contexts = self._all(row)
        if self.per_answer is not None and self.per_answer < len(contexts):
            random = np.random.default_rng([self.seed, epoch, index])
            contexts = np.sort(random.choice(contexts, self.per_answer, replace=False))
        return self._labelled(row, contexts)

    def evenly(self, row: AnsweredPrompt) -> ChosenContexts:
        """Contexts spread evenly over the answer, the same every time: for evaluation."""
        contexts = self._all(row)
        if self.per_answer is not None and self.per_answer < len(contexts):
            contexts = contexts[spread_evenly(self.per_answer, len(contexts))]
        return self._labelled(row, contexts)

    def _all(self, row: AnsweredPrompt) -> Int[np.ndarray, " contexts"]:
        return np.arange(row.prompt_length + self.skipped, row.length - min(self.offsets))

    def _labelled(self, row: AnsweredPrompt, contexts: Int[np.ndarray, " contexts"]) -> ChosenContexts:
        wanted = contexts[:, None] + np.array(self.offsets)
        labels = np.where(wanted < row.length, row.tokens[np.minimum(wanted, row.length - 1)], IGNORED)
        return ChosenContexts(row.tokens[: contexts.max() + self.ahead], contexts, labels)


class RandomContexts(Dataset[ChosenContexts]):
    """Answered prompts with random contexts, indexed by the epoch and the row's number."""

    def __init__(self, rows: Sequence[AnsweredPrompt], chooser: ContextChooser) -> None:
        self._rows, self._chooser = rows, chooser

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: tuple[int, int]) -> ChosenContexts:
        epoch, index = place
        return self._chooser.at_random(self._rows[index], epoch, index)


class EpochOrder(Sampler[tuple[int, int]]):
    """The order of a whole training: each row's number, after the number of the epoch."""

    def __init__(self, order: BatchOrder) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((place // self._order.epoch_size, index) for place, index in enumerate(self._order))


def collate(rows: Sequence[ChosenContexts]) -> dict[str, Tensor]:
    """Tensors input_ids [batch s], contexts [batch contexts] and labels [batch contexts predictors].

    Rows with fewer contexts than others are filled up with contexts of one token that have no labels.
    """
    return {
        "input_ids": padded([row.tokens for row in rows], 0),
        "contexts": padded([row.contexts for row in rows], 1),
        "labels": padded([row.labels for row in rows], IGNORED),
    }
