"""Prompt lookup against a search from scratch in every round."""

from __future__ import annotations

import random

import pytest
import torch

from bild_lab.engine.methods.lookup.prompt_lookup import PromptLookup
from bild_lab.engine.request import Limits, Request, Source
from tests.stubs import SESSION, StubModel

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
    prompt: list[int], encoder: list[int] | None = None, room: int = 20, **options: int
) -> PromptLookup:
    drafter = PromptLookup(TARGET, **{"window": 4, "longest_match": 3, **options})
    ids = None if encoder is None else torch.tensor([encoder])
    drafter = drafter.start(
        Request(Source(tuple(prompt), ids), Limits(len(prompt), room, frozenset([END]))), SESSION
    )
    return drafter


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
