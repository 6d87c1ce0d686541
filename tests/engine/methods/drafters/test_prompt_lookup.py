"""Prompt lookup against a search from scratch in every round."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from bild_lab.engine.methods.lookup.prompt_lookup import PromptLookup
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.lab.point.load import load
from tests.policies import shipped
from tests.stubs import SESSION, StubModel
from tests.tiny_architectures import BART, VOCABULARY, word_tokenizer

TARGET = StubModel(lambda _: torch.zeros(10))
END = 9


def searched(encoder: list[int], tokens: list[int], window: int, longest: int) -> list[int]:
    """Look for every suffix at every earlier place, the longest suffix and the latest place
    first.
    """
    places = [(tokens, start) for start in range(len(tokens) - 1, -1, -1)]
    places += [(encoder, start) for start in range(len(encoder) - 1, -1, -1)]
    for length in range(min(longest, len(tokens)), 0, -1):
        for text, start in places:
            if start >= length and text[start - length : start] == tokens[-length:]:
                copied = [*text]
                while text is tokens and len(copied) < start + window:  # the copy feeds on itself
                    copied.append(copied[len(copied) - len(tokens) + start])
                proposal = copied[start : start + window]
                return proposal[: proposal.index(END) + 1] if END in proposal else proposal
    return []


def lookup(
    prompt: list[int],
    encoder: list[int] | None = None,
    room: int = 20,
    one_vocabulary: bool = True,
    **options: int,
) -> PromptLookup:
    drafter = PromptLookup(TARGET, **{"window": 4, "longest_match": 3, **options})
    ids = None if encoder is None else torch.tensor([encoder])
    source = Source(tuple(prompt), ids, one_vocabulary=one_vocabulary)
    limits = Limits(len(prompt), room, frozenset([END]))
    return drafter.start(Request(source, limits), SESSION)


@pytest.mark.parametrize("encoder_decoder", [False, True])
def test_the_index_proposes_what_a_search_from_scratch_finds(encoder_decoder: bool) -> None:
    chance = random.Random(0)
    found = 0
    for _ in range(120):
        letters = range(1, chance.choice([3, 5, 9]))
        encoder = (
            [*chance.choices(letters, k=chance.randint(1, 15)), END] if encoder_decoder else []
        )
        prompt = [0] if encoder_decoder else [0, *chance.choices(letters, k=chance.randint(1, 15))]
        tokens = prompt
        window, longest = chance.randint(1, 6), chance.randint(1, 4)
        drafter = lookup(tokens, encoder or None, room=1000, window=window, longest_match=longest)
        for _ in range(12):
            draft = drafter.propose(tokens)
            assert draft.token_list == searched(encoder, tokens, window, longest), (encoder, tokens)
            assert draft.probs is None and draft.calls == 0
            found += len(draft) > 0
            if chance.random() < 0.2:  # a drafter that asks this one had its text rejected
                tokens = [
                    *tokens[: chance.randint(len(prompt), len(tokens))],
                    chance.choice(letters),
                ]
            else:
                tokens = [*tokens, *chance.choices(letters, k=chance.randint(1, 4))]
    assert found > 500


def test_drafts_end_with_an_end_token_and_at_the_length_limit() -> None:
    assert lookup([1, 2, END, 3, 1]).propose([1, 2, END, 3, 1]).token_list == [2, END]
    assert lookup([1, 2, 3, 4, 1], room=2).propose([1, 2, 3, 4, 1]).token_list == [2, 3]


def test_nothing_is_copied_from_a_source_in_another_vocabulary() -> None:
    """Fault: ids of the encoder's vocabulary were drafted, some of which the decoder lacks."""
    assert lookup([0], [5, 6, 7]).propose([0, 5]).token_list == [6, 7]
    apart = lookup([0], [5, 6, 7], one_vocabulary=False)
    assert apart.propose([0, 5]).token_list == []
    assert apart.propose([0, 5, 8, 5]).token_list == [8, 5, 8, 5]


def two_vocabularies(source_rows: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A Marian whose encoder embeds so many tokens, in ids that the decoder knows otherwise."""
    values = {**BART, "vocab_size": source_rows, "decoder_vocab_size": VOCABULARY}
    apart = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    torch.manual_seed(0)
    module = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("marian", **values, **apart))
    return module.eval(), word_tokenizer()


COPYING = ("prompt_lookup", "suffix")


@pytest.mark.parametrize("policy", COPYING)
def test_a_model_with_two_vocabularies_decodes_its_own_text(policy: str) -> None:
    pair = two_vocabularies(2 * VOCABULARY)
    # behind each token of the text one that the decoder does not have
    prompt = [token for known in range(3, VOCABULARY) for token in (known, VOCABULARY + known)]
    own = load(pair, policy=shipped("vanilla")).generate(prompt, 12)
    found = load(pair, policy=shipped(policy)).generate(prompt, 12)
    assert found.token_ids == own.token_ids
    sampled = [
        load(pair, policy=shipped(policy)).generate(prompt, 12, temperature=1.0, seed=seed)
        for seed in range(3)
    ]
    assert all(max(text.token_ids) < VOCABULARY for text in sampled)
