"""Answers cut into contexts and what follows them: the places to learn from, drawn anew in every pass (BiTA §3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from bild_lab.training.pairs import IGNORED, BatchOrder, padded


@dataclass(frozen=True)
class Sample:
    """A prompt and the model's own answer to it, as one row of tokens, of which the first `prompt` are the prompt's."""

    tokens: Int[np.ndarray, " n"]
    prompt: int

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt


@dataclass(frozen=True)
class Draw:
    """A sample with the contexts to learn behind.

    contexts: how many tokens of the sample each context holds. labels: what each column is to predict behind
    it; IGNORED behind the answer's end.
    """

    tokens: Int[np.ndarray, " n"]
    contexts: Int[np.ndarray, " groups"]
    labels: Int[np.ndarray, "groups columns"]


@dataclass(frozen=True)
class Splitter:
    """Chooses contexts in a sample.

    offsets: the token each column predicts, counted from the end of the context, whose next token is number 0.
    splits: contexts of a sample and pass; None: all there are. In the paper's words a context of the prompt and
    y_0 … y_k, the first k + 1 tokens of the answer, is split point k; k = -1 is the prompt alone, which the first
    forward of decoding continues. The last context has one label left.
    """

    offsets: tuple[int, ...]
    splits: int | None
    seed: int

    @property
    def shortest(self) -> int:
        """Tokens of an answer in which every column has something to predict."""
        return max(self.offsets) + 1

    def drawn(self, sample: Sample, turn: int, index: int) -> Draw:
        """Contexts at random: a function of the seed, the pass over the data and the sample's number alone."""
        places = self._places(sample)
        if self.splits is not None and self.splits < len(places):
            random = np.random.default_rng([self.seed, turn, index])
            places = np.sort(random.choice(places, self.splits, replace=False))
        return self._labelled(sample, places)

    def spread(self, sample: Sample) -> Draw:
        """Contexts evenly spread over the answer, the same every time: for evaluation."""
        places = self._places(sample)
        if self.splits is not None and self.splits < len(places):
            places = places[np.arange(self.splits) * len(places) // self.splits]
        return self._labelled(sample, places)

    def _places(self, sample: Sample) -> Int[np.ndarray, " groups"]:
        return np.arange(sample.prompt, sample.length - min(self.offsets))

    def _labelled(self, sample: Sample, contexts: Int[np.ndarray, " groups"]) -> Draw:
        wanted = contexts[:, None] + np.array(self.offsets)
        labels = np.where(wanted < sample.length, sample.tokens[np.minimum(wanted, sample.length - 1)], IGNORED)
        return Draw(sample.tokens, contexts, labels)


class Draws(Dataset[Draw]):
    """Samples to train on; one is asked for by the pass over the data and its number."""

    def __init__(self, samples: Sequence[Sample], splitter: Splitter) -> None:
        self._samples, self._splitter = samples, splitter

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: tuple[int, int]) -> Draw:
        turn, index = place
        return self._splitter.drawn(self._samples[index], turn, index)


class PassOrder(Sampler[tuple[int, int]]):
    """The order of a whole training, each sample's number with that of the pass over the data."""

    def __init__(self, order: BatchOrder) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((place // self._order.pass_size, index) for place, index in enumerate(self._order))


def collate(draws: Sequence[Draw]) -> dict[str, Tensor]:
    """Draws as tensors: input_ids [batch s], contexts [batch groups], labels [batch groups columns].

    Tokens behind the longest context are left out, as nothing reads them. Samples with fewer contexts than others
    get contexts of one token without labels.
    """
    longest = max(int(draw.contexts.max()) for draw in draws)
    return {
        "input_ids": padded([draw.tokens[:longest] for draw in draws], 0),
        "contexts": padded([draw.contexts for draw in draws], 1),
        "labels": padded([draw.labels for draw in draws], IGNORED),
    }
