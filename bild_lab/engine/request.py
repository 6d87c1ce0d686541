"""A prompt to continue, and when the continuation ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.sampling import Sampling
from bild_lab.engine.stop import StopStrings
from bild_lab.engine.trace import until_end

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


@dataclass(frozen=True)
class Source:
    """Token ids that a model starts from.

    prompt: what the decoder starts with (the decoder's start token for encoder–decoder models).
    encoder_ids: [1 s], the encoder's input; None for decoder-only models.
    processors: what the scores of every model pass through before a token is chosen; None: they
        stay as they are.
    one_vocabulary: whether an id is the same token in the encoder's input as in the text; False for
        an encoder with a vocabulary of its own.
    """

    prompt: tuple[int, ...]
    encoder_ids: Int[Tensor, "1 s"] | None = None
    device: torch.device = torch.device("cpu")
    processors: LogitsProcessorList | None = None
    one_vocabulary: bool = True

    @cached_property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The decoder's and the encoder's tokens, on the host: a GPU is asked once for them."""
        return self.prompt, () if self.encoder_ids is None else tuple(self.encoder_ids[0].tolist())

    @property
    def copyable(self) -> tuple[int, ...]:
        """The encoder's tokens that a text may repeat; none without an encoder, and none of another
        vocabulary.
        """
        return self.key[1] if self.one_vocabulary else ()

    @property
    def encoder_length(self) -> int:
        """How many tokens the encoder reads, 0 for decoder-only models."""
        return 0 if self.encoder_ids is None else self.encoder_ids.shape[1]

    @property
    def length(self) -> int:
        """How many tokens the model reads of the prompt: of an encoder–decoder those of its
        encoder.
        """
        return len(self.prompt) if self.encoder_ids is None else self.encoder_length

    def to(self, device: torch.device) -> Source:
        ids = None if self.encoder_ids is None else self.encoder_ids.to(device)
        return replace(self, encoder_ids=ids, device=device)


@dataclass(frozen=True)
class Limits:
    """Where decoding stops: an end token after the prompt, a stop string, or the length limit.

    Every method's output passes through `append`, so emitted tokens are counted in the same way.
    positions: how many tokens the models can read; None for any number. A text may fill them, and
    its last token is never read. stop: the token that completes one of these strings is the text's
    last.
    """

    prompt_length: int
    max_new_tokens: int
    end_tokens: frozenset[int] = frozenset()
    positions: int | None = None
    stop: StopStrings | None = None

    def room(self, tokens: Sequence[int]) -> int:
        """How many more tokens may be emitted."""
        return self.prompt_length + self.max_new_tokens - len(tokens)

    def positions_left(self, tokens: Sequence[int]) -> int:
        """How many positions the models have after the last token."""
        return sys.maxsize if self.positions is None else self.positions - len(tokens)

    def reached(self, tokens: Sequence[int]) -> bool:
        return self.room(tokens) <= 0 or self.ended(tokens)

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the text has ended by itself: with an end token or a stop string."""
        return len(tokens) > self.prompt_length and (
            tokens[-1] in self.end_tokens or self.stopped(tokens)
        )

    def stopped(self, tokens: Sequence[int]) -> bool:
        """Whether the last token completes a stop string."""
        if self.stop is None:
            return False
        new_tokens = tokens[self.prompt_length :]
        return len(new_tokens) > 0 and self.stop.completed(new_tokens)

    def tokens_until_stop(self, tokens: Sequence[int], committed: int) -> int | None:
        """How many tokens a round added, if the last one completes a stop string; None if it does
        not.
        """
        return len(tokens) - committed if self.stopped(tokens) else None

    def append(self, tokens: Sequence[int], new_tokens: Sequence[int]) -> list[int]:
        """The tokens followed by the new ones, cut after the first end token or stop string and at
        the length limit.
        """
        new_tokens = new_tokens[: self.room(tokens)]
        new_tokens = new_tokens[: until_end(new_tokens, self.end_tokens)]
        if self.stop is None:
            return [*tokens, *new_tokens]
        text = list(tokens)
        for token in new_tokens:
            text.append(token)
            if self.stopped(text):
                break
        return text


@dataclass(frozen=True)
class Request:
    """A source, its limits, and how tokens are chosen for it."""

    source: Source
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    generator: torch.Generator | None = None

    @property
    def max_length(self) -> int:
        """The most tokens that the text may have, the prompt's included."""
        return len(self.source.prompt) + self.limits.max_new_tokens

    def shorter(self, max_new_tokens: int) -> Request:
        """The request with at most so many new tokens."""
        count = min(max_new_tokens, self.limits.max_new_tokens)
        return replace(self, limits=replace(self.limits, max_new_tokens=count))

    def seeded(self, seed: int, index: int) -> Request:
        """The request with its own generator if it is sampled: each text draws for itself, and the
        same seed and place give the same tokens.

        index: the text's place among those decoded with this seed.
        """
        if self.sampling.greedy:
            return self
        generator = torch.Generator(self.source.device).manual_seed(
            (seed * 1_000_003 + index) % 2**63
        )
        return replace(self, generator=generator)
