"""Where a text ends, and which drafts fit into it."""

from __future__ import annotations

import sys

import torch

from bild_lab.engine.draft import Draft
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling

LIMITS = Limits(prompt_length=2, max_new_tokens=4, end_tokens=frozenset([1, 3]))


def test_room_is_what_may_still_be_emitted() -> None:
    assert [LIMITS.room([7] * length) for length in (2, 3, 6, 7)] == [4, 3, 0, -1]


def test_a_text_ends_at_its_length_or_after_an_end_token_of_its_own() -> None:
    texts = (
        [7, 7],
        [7, 1],
        [7, 7, 1],
        [7, 7, 3],
        [7, 7, 1, 7],
        [7, 1, 7],
        [7] * 5,
        [7] * 6,
        [7] * 7,
    )
    assert [LIMITS.reached(text) for text in texts] == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
        True,
        True,
    ]


def test_new_tokens_are_cut_after_the_first_end_token_and_at_the_length() -> None:
    assert LIMITS.append([7, 7], [5, 6]) == [7, 7, 5, 6]
    assert LIMITS.append([7, 1], [5, 3, 6, 1]) == [7, 1, 5, 3]
    assert LIMITS.append((7, 7, 7), (4, 5, 6, 8)) == [7, 7, 7, 4, 5, 6]
    assert LIMITS.append([7, 7, 7], [4, 5, 6, 1]) == [7, 7, 7, 4, 5, 6]
    assert LIMITS.append([7] * 6, [4]) == [7] * 6


def test_a_draft_keeps_to_the_positions_that_the_models_have() -> None:
    draft, bounded = Draft(torch.tensor([4, 5, 6])), Limits(2, 9, positions=5)
    assert (
        draft.up_to_depth(LIMITS.positions_left([7, 7])) is draft
        and LIMITS.positions_left([7]) == sys.maxsize
    )
    assert [bounded.positions_left([7] * length) for length in (2, 5)] == [3, 0]
    assert draft.up_to_depth(bounded.positions_left([7, 7])) is draft
    assert draft.up_to_depth(bounded.positions_left([7, 7, 7])).token_list == [4, 5]
    assert draft.up_to_depth(bounded.positions_left([7] * 5)).token_list == []


def test_a_source_moves_with_its_encoders_tokens() -> None:
    meta = torch.device("meta")
    moved = Source((0,), torch.tensor([[5, 6]])).to(meta)
    assert (moved.device, moved.encoder_ids.device, moved.prompt) == (meta, meta, (0,))
    alone = Source((4, 5)).to(meta)
    assert (alone.device, alone.encoder_ids) == (meta, None)
    assert Request(alone, LIMITS).sampling == Sampling()


def test_a_model_reads_the_prompt_or_what_its_encoder_does() -> None:
    encoded, alone = Source((0,), torch.tensor([[5, 6, 7]])), Source((4, 5))
    assert [(source.length, source.encoder_length) for source in (encoded, alone)] == [
        (3, 3),
        (2, 0),
    ]
    assert [Request(source, LIMITS).max_length for source in (encoded, alone)] == [5, 6]
