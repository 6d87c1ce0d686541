"""Examples as token ids, the batches made of them, and the order in which a training sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from bild_lab.engine.models.checkpoint.pieces import prompt_tokens
from bild_lab.errors import UserError
from bild_lab.lab.data.prompts import Example, cut_sources
from bild_lab.ranks import launched

IGNORED = -100  # a label without a loss
_CHUNK = 1000  # texts tokenized at once
_GROUP = 50  # at most so many batches are sorted by length together


@dataclass(frozen=True, kw_only=True)
class AnsweredExample(Example):
    """An example whose reference is a model's answer, with the tokens that the model emitted.

    They are learned as they are: the text tokenized anew may give others, as it has lost the space
    that it began with, and its end token.
    """

    answer_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SoftTargets:
    """A teacher's most likely tokens at each token of an answer. probs: their shares of these, in
    float16.
    """

    ids: Int[np.ndarray, "t k"]
    probs: Float[np.ndarray, "t k"]


@dataclass(frozen=True)
class TokenizedExample:
    """One example as token ids. answer: what is learned, its end token included. soft: a teacher's
    targets, if any. complete: the answer was not cut; one that was has no end token.
    """

    prompt: Int[np.ndarray, " s"]
    answer: Int[np.ndarray, " t"]
    soft: SoftTargets | None = None
    complete: bool = True

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


def tokenize(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    encoder_decoder: bool,
    max_source_tokens: int | None,
    max_target_tokens: int,
) -> list[TokenizedExample]:
    """Prompts as decoding tokenizes them (`Checkpoint.source`), and first references as answers, of
    an `AnsweredExample` the tokens that were emitted.

    max_source_tokens: of a longer prompt the end of the source is left out; None keeps whole
    prompts. A reference gets no special token but the end token, which counts. A longer answer is
    cut, and has no end token: a model would learn to end in its midst. Raises UserError for a
    decoder's prompt without tokens.
    """
    tokenized = []
    count = lambda prompt: len(prompt_tokens(tokenizer, [prompt])[0])  # noqa: E731
    examples = cut_sources(examples, max_source_tokens, count)
    for start in range(0, len(examples), _CHUNK):
        chunk = examples[start : start + _CHUNK]
        prompts = prompt_tokens(tokenizer, [example.prompt for example in chunk])
        references = tokenizer(
            [example.references[0] for example in chunk], add_special_tokens=False, verbose=False
        )
        for example, prompt, reference in zip(chunk, prompts, references["input_ids"], strict=True):
            if not prompt and not encoder_decoder:
                raise UserError(
                    f"the prompt of example {example.id} has no tokens; a decoder needs at"
                    " least one"
                )
            answer = (
                example.answer_token_ids
                if isinstance(example, AnsweredExample)
                else [*reference, tokenizer.eos_token_id]
            )
            tokenized.append(
                TokenizedExample(
                    np.array(prompt, np.int32),
                    np.array(answer[:max_target_tokens], np.int32),
                    complete=len(answer) <= max_target_tokens,
                )
            )
    return tokenized


def longest_example(
    examples: Sequence[TokenizedExample], encoder_decoder: bool
) -> TokenizedExample:
    """An example that takes as much memory as any in a batch of these, whose rows are padded.

    An encoder–decoder's prompts and answers are padded each to their longest, a decoder's together.
    """
    if not encoder_decoder:
        return max(examples, key=lambda example: example.length)
    answered = max(examples, key=lambda example: len(example.answer))
    prompt = max((example.prompt for example in examples), key=len)
    return replace(answered, prompt=prompt)


@dataclass(frozen=True)
class Collator:
    """Makes the tensors of a forward pass from examples, padded on the right.

    pad: the padding's token id. start: the first token of an encoder–decoder's decoder; None for a
    decoder, which reads prompt and answer as one sequence and learns the answer alone. Soft targets
    lie beside their labels.
    """

    pad: int
    start: int | None

    def __call__(self, examples: Sequence[TokenizedExample]) -> dict[str, Tensor]:
        if self.start is None:
            sequences = [np.concatenate([example.prompt, example.answer]) for example in examples]
            labels = [
                np.concatenate([np.full_like(example.prompt, IGNORED), example.answer])
                for example in examples
            ]
        else:
            sequences = [example.prompt for example in examples]
            labels = [example.answer for example in examples]
        input_ids, mask = padded_with_mask(sequences, self.pad)
        batch = {"input_ids": input_ids, "attention_mask": mask, "labels": padded(labels, IGNORED)}
        if self.start is not None:
            shifted = [np.concatenate([[self.start], example.answer[:-1]]) for example in examples]
            batch["decoder_input_ids"] = padded(shifted, self.pad)
        soft = [example.soft for example in examples]
        if None not in soft:
            prompt_lengths = [
                len(labelled) - len(example.answer)
                for labelled, example in zip(labels, examples, strict=True)
            ]
            wide = [((gap, 0), (0, 0)) for gap in prompt_lengths]
            batch["soft_ids"] = padded(
                [np.pad(targets.ids, gap) for targets, gap in zip(soft, wide, strict=True)], 0
            )
            probs = [np.pad(targets.probs, gap) for targets, gap in zip(soft, wide, strict=True)]
            batch["soft_probs"] = padded(probs, 0, kind=np.float32)
        return batch

    def prompts(self, examples: Sequence[TokenizedExample]) -> dict[str, Tensor]:
        """What `generate` continues; a decoder's prompts are padded on the left."""
        side = "left" if self.start is None else "right"
        input_ids, mask = padded_with_mask([example.prompt for example in examples], self.pad, side)
        return {"input_ids": input_ids, "attention_mask": mask}


def padded(
    rows: Sequence[np.ndarray], value: int, side: str = "right", kind: type = np.int64
) -> Shaped[Tensor, "batch longest *rest"]:
    tensors = [torch.from_numpy(row.astype(kind)) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def padded_with_mask(
    rows: Sequence[np.ndarray], value: int, side: str = "right"
) -> tuple[Int[Tensor, "batch longest"], Int[Tensor, "batch longest"]]:
    """Rows padded on one side, and the mask that is 0 at the padding."""
    return padded(rows, value, side), padded([np.ones_like(row) for row in rows], 0, side)


class BatchOrder(Sampler[int]):
    """The indices of a whole training's examples, batch after batch; lengths, sizes and seed alone
    decide them.

    Every epoch (a pass over the data) is shuffled and cut into batches of similar lengths, so that
    they need little padding; the batches come in random order. Examples that do not fill a batch
    are left out of that epoch. As the order is one sequence from the first step to the last, it has
    no state to restore: a resumed training skips the steps that are done.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, steps: int, seed: int) -> None:
        self._lengths, self._batch_size = np.asarray(lengths), batch_size
        self._steps, self._seed = steps, seed

    @property
    def epoch_size(self) -> int:
        return max(1, len(self._lengths) // self._batch_size) * self._batch_size

    def __len__(self) -> int:
        return self._steps * self._batch_size

    def __iter__(self) -> Iterator[int]:
        return islice(self._endless(), len(self))

    def _endless(self) -> Iterator[int]:
        epoch = 0
        while True:
            random = np.random.default_rng([self._seed, epoch])
            order = random.permutation(len(self._lengths))
            order = np.resize(order, self.epoch_size)
            # at most a quarter of the data, or every epoch would have the same batches
            size = self._batch_size * min(max(1, self.epoch_size // self._batch_size // 4), _GROUP)
            groups = [order[start : start + size] for start in range(0, len(order), size)]
            ordered = [group[np.argsort(-self._lengths[group], kind="stable")] for group in groups]
            batches = np.concatenate(ordered).reshape(-1, self._batch_size)
            yield from random.permutation(batches).reshape(-1).tolist()
            epoch += 1


def evaluation_batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """The indices of this process's share of examples to evaluate, in batches of similar length,
    longest first.

    Each process gets as many batches, as a model that is sharded needs all processes to run. The
    last may be empty.
    """
    ranks = launched()
    ordered = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    mine = ordered[ranks.rank :: ranks.count]
    longest_share = ceil(len(ordered) / ranks.count)
    return (mine[start : start + batch_size] for start in range(0, longest_share, batch_size))


def spread_evenly(count: int, among: int) -> list[int]:
    """`count` indices spread evenly over range(among), in order."""
    return [index * among // count for index in range(count)]


def spread_over_questions(count: int, questions: Sequence[str]) -> list[int]:
    """The indices of `count` answers to hold out, spread evenly over their questions, in order.

    questions: of each answer, more than `count`. All answers to a question are held out together,
    so they may be a few more. Raises UserError for a single question.
    """
    distinct_questions = list(dict.fromkeys(questions))
    if len(distinct_questions) == 1:
        raise UserError(
            f"all {len(questions)} answers are to one question, so none can be held out; make"
            " answers to more questions (dataset.limit)"
        )
    n_questions = ceil(count * len(distinct_questions) / len(questions))
    places = spread_evenly(min(n_questions, len(distinct_questions) - 1), len(distinct_questions))
    held_out = {distinct_questions[place] for place in places}
    return [index for index, question in enumerate(questions) if question in held_out]
