"""Counting n-grams for policy=ngram: `scripts/train_module.py module=ngram` (speculative decoding
§3.6).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bild_lab.engine.draft import common_prefix
from bild_lab.engine.methods.lookup.ngram import (
    NGramTable,
    TokenCounts,
    require_order,
    vocabulary_hash,
)
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.pieces import prompt_tokens
from bild_lab.errors import UserError
from bild_lab.lab.data.prompts import Example


@dataclass(frozen=True)
class NgramSpec:
    """What to count: the fields of `conf/module/ngram.yaml`."""

    order: int

    def __post_init__(self) -> None:
        require_order(self.order)


def estimate(
    sequences: Iterable[Sequence[int]], order: int, vocabulary: dict[str, int], corpus: str
) -> NGramTable:
    """Count the tokens of these sequences; the first token of each is context and is not counted.

    corpus: its name, which the table keeps. Raises UserError for an order other than 1 and 2, and
    if there is nothing to count.
    """
    require_order(order)
    context_tokens, tokens = array("q"), array("q")
    for sequence in sequences:
        context_tokens.extend(sequence[:-1])
        tokens.extend(sequence[1:])
    if not tokens:
        raise UserError(
            f"{corpus} has no tokens to estimate n-grams from; choose another dataset or split"
        )
    width = max(vocabulary.values()) + 1
    contexts = torch.frombuffer(context_tokens, dtype=torch.long)
    following = torch.frombuffer(tokens, dtype=torch.long)
    pairs, times = (contexts * width + following).unique(return_counts=True)
    ranked = times.argsort(descending=True, stable=True)
    # by context, then by count, then by id
    ranked = ranked[(pairs[ranked] // width).argsort(stable=True)]
    seen = torch.bincount(pairs // width)
    counts = torch.bincount(following)
    by_count = counts.argsort(descending=True, stable=True)[: int(counts.count_nonzero())]
    table = NGramTable(
        order=2,
        width=width,
        unigrams=TokenCounts(by_count, counts[by_count]),
        starts=torch.cat([seen.new_zeros(1), seen.cumsum(0)]),
        followers=TokenCounts(pairs[ranked] % width, times[ranked]),
        vocabulary_hash=vocabulary_hash(vocabulary),
        corpus=corpus,
    )
    return table if order == 2 else table.unigram()


def reference_tokens(checkpoint: Checkpoint, examples: Iterable[Example]) -> Iterator[list[int]]:
    """Every reference as the target would emit it, after the token that it would follow.

    For a decoder-only model that is the prompt's continuation, up to an end token.
    """
    tokenizer = checkpoint.tokenizer
    for example in examples:
        for reference in example.references:
            if checkpoint.encoder_decoder:
                yield [
                    checkpoint.decoder_start,
                    *tokenizer(text_target=reference, verbose=False)["input_ids"],
                ]
                continue
            gap = "" if not example.prompt or example.prompt[-1].isspace() else " "
            # together, as a piece may depend on the text before it
            texts = [example.prompt, example.prompt + gap + reference]
            prompt, text_ids = prompt_tokens(tokenizer, texts)
            if not example.prompt and text_ids[: len(prompt)] != prompt:
                text_ids = [*prompt, *text_ids]
            end = [] if tokenizer.eos_token_id in (None, text_ids[-1]) else [tokenizer.eos_token_id]
            yield [*text_ids[max(common_prefix(prompt, text_ids) - 1, 0) :], *end]
