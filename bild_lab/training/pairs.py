"""Examples as token ids: encoded pairs, batches of them, and the order in which a training sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from bild_lab.errors import UserError
from bild_lab.lab.data.examples import Example

IGNORED = -100  # a label without a loss
_CHUNK = 1000  # texts tokenized at once
_GROUP = 50  # batches at most within which examples are sorted by length


@dataclass(frozen=True)
class Pair:
    """One example as the model gets it. answer: what is learned, its end token included."""

    prompt: Int[np.ndarray, " s"]
    answer: Int[np.ndarray, " t"]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class TokenLimits:
    """How many tokens are kept of a prompt (None: all) and of an answer, its end token included."""

    source: int | None
    target: int


def encode(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, encoder_decoder: bool, limits: TokenLimits
) -> list[Pair]:
    """Prompts as decoding tokenizes them (`Checkpoint.source`), and first references as answers.

    An answer gets no special tokens but the end token. Raises UserError for a decoder's prompt without tokens.
    """
    pairs = []
    for start in range(0, len(examples), _CHUNK):
        chunk = examples[start : start + _CHUNK]
        prompts = _prompt_ids(tokenizer, [example.prompt for example in chunk], limits.source)
        answers = tokenizer([example.references[0] for example in chunk], add_special_tokens=False, verbose=False)
        for example, prompt, answer in zip(chunk, prompts, answers["input_ids"], strict=True):
            if not prompt and not encoder_decoder:
                raise UserError(f"the prompt of example {example.id} has no tokens; a decoder needs at least one")
            ended = [*answer[: limits.target - 1], tokenizer.eos_token_id]
            pairs.append(Pair(np.array(prompt, np.int32), np.array(ended, np.int32)))
    return pairs


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompts: list[str], longest: int | None) -> list[list[int]]:
    cut = {} if longest is None else {"truncation": True, "max_length": longest}
    return tokenizer(prompts, verbose=False, **cut)["input_ids"]


@dataclass(frozen=True)
class Batches:
    """Pads pairs to the tensors of a forward pass, on the right.

    pad: the id that fills up. start: what an encoder–decoder's decoder starts with; None for a decoder,
    which reads prompt and answer as one sequence and learns the answer alone.
    """

    pad: int
    start: int | None

    def __call__(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        if self.start is None:
            sequences = [np.concatenate([pair.prompt, pair.answer]) for pair in pairs]
            labels = [np.concatenate([np.full_like(pair.prompt, IGNORED), pair.answer]) for pair in pairs]
        else:
            sequences = [pair.prompt for pair in pairs]
            labels = [pair.answer for pair in pairs]
        batch = {
            "input_ids": padded(sequences, self.pad),
            "attention_mask": padded([np.ones_like(sequence) for sequence in sequences], 0),
            "labels": padded(labels, IGNORED),
        }
        if self.start is not None:
            begun = [np.concatenate([[self.start], pair.answer[:-1]]) for pair in pairs]
            batch["decoder_input_ids"] = padded(begun, self.pad)
        return batch

    def prompts(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """What `generate` continues; a decoder's prompts are padded on the left."""
        side = "left" if self.start is None else "right"
        return {
            "input_ids": padded([pair.prompt for pair in pairs], self.pad, side),
            "attention_mask": padded([np.ones_like(pair.prompt) for pair in pairs], 0, side),
        }


def padded(rows: Sequence[np.ndarray], value: int, side: str = "right") -> Int[Tensor, "batch longest"]:
    tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


class BatchOrder(Sampler[int]):
    """The examples of a whole training, batch after batch; a function of lengths, sizes and seed alone.

    Every pass over the data is shuffled anew and cut into batches of similar lengths, which pad little,
    in random order. What does not fill a batch is left out of that pass. Being one sequence from the
    first step to the last, it needs no state to resume: the steps that were done are skipped.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, steps: int, seed: int) -> None:
        self._lengths, self._batch_size = np.asarray(lengths), batch_size
        self._steps, self._seed = steps, seed

    @property
    def pass_size(self) -> int:
        """Examples of one pass over the data."""
        return max(1, len(self._lengths) // self._batch_size) * self._batch_size

    def __len__(self) -> int:
        return self._steps * self._batch_size

    def __iter__(self) -> Iterator[int]:
        return islice(self._forever(), len(self))

    def _forever(self) -> Iterator[int]:
        turn = 0
        while True:
            random = np.random.default_rng([self._seed, turn])
            order = random.permutation(len(self._lengths))
            order = np.resize(order, self.pass_size)
            # a quarter of the data at most, else every pass would have the same batches
            size = self._batch_size * min(max(1, self.pass_size // self._batch_size // 4), _GROUP)
            groups = [order[start : start + size] for start in range(0, len(order), size)]
            ordered = [group[np.argsort(-self._lengths[group], kind="stable")] for group in groups]
            batches = np.concatenate(ordered).reshape(-1, self._batch_size)
            yield from random.permutation(batches).reshape(-1).tolist()
            turn += 1


def require_references(examples: Sequence[Example]) -> None:
    """Raise UserError for an example that has no answer to learn."""
    for example in examples:
        if not example.references:
            raise UserError(
                f"example {example.id} has no reference to learn from; set dataset.reference_column to the answers"
            )


def require_room(pairs: Sequence[Pair], config: PreTrainedConfig) -> None:
    """Raise UserError if a decoder would have to read more tokens than it has positions for."""
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = max(pair.length for pair in pairs)
    if not config.is_encoder_decoder and room is not None and longest > room:
        raise UserError(
            f"the longest example has {longest} tokens, but the model has positions for {room}; "
            "set dataset.max_source_tokens or train.max_target_tokens"
        )
