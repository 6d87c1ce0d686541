"""Acceptance by depth and rank, of candidates whose chances are known."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import torch

from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.candidates import CandidateDrafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Scores
from bild_lab.lab.shapes.acceptance import MISSED, UNKNOWN, WatchedRound, acceptance_of, ranks_of, silent, watch
from tests.stubs import StubModel

CHANCES = np.array([[0.5, 0.3, 0.0], [0.6, 0.1, 0.2]])
WIDEST = 3


class KnownDrafter(CandidateDrafter):
    """For a target that counts up modulo 50: the right token has each rank with the chance of CHANCES."""

    def __init__(self) -> None:
        target = SimpleNamespace(
            checkpoint=SimpleNamespace(config=SimpleNamespace(vocab_size=50)), device=torch.device("cpu")
        )
        super().__init__(target, len(CHANCES), 0, None)
        self._chance = random.Random(0)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        levels = []
        for depth, law in enumerate(CHANCES):
            wrong = [(verdict.next_token + 20 + rank) % 50 for rank in range(WIDEST)]
            ranks = [*range(WIDEST), None]
            rank = self._chance.choices(ranks, [*law, 1 - law.sum()])[0]
            if rank is not None:
                wrong[rank] = (verdict.next_token + 1 + depth) % 50
            levels.append(wrong)
        self.candidates = torch.tensor(levels)


def counting() -> StubModel:
    return StubModel(lambda tokens: torch.nn.functional.one_hot(torch.tensor((tokens[-1] + 1) % 50), 50).float())


def test_the_chances_of_a_drafter_are_found_by_depth_and_rank() -> None:
    drafter = KnownDrafter()
    method = DraftThenVerify(counting(), drafter, ExactMatch())
    request = Request(Source((0,)), Limits(1, 50))
    tables = []
    for _ in range(30):
        tokens, rounds, _ = watch(method, drafter.drafting(silent(2, 0), WIDEST), request, lambda: None)
        assert len(rounds) == 50  # nothing is drafted, so every token is a round
        tables.append(ranks_of(tokens, rounds, 2, ended=False))
    assert tables[0][-1].tolist()[1] == UNKNOWN  # the limit cut the text there
    np.testing.assert_allclose(acceptance_of(np.concatenate(tables), WIDEST), CHANCES, atol=0.05)


def test_a_depth_counts_only_behind_tokens_that_were_among_the_candidates() -> None:
    ranks = np.array([[0, 1], [MISSED, 0], [1, MISSED], [0, 0], [0, UNKNOWN]])
    assert acceptance_of(ranks, 2).tolist() == [[3 / 5, 1 / 5], [1 / 3, 1 / 3]]


def test_behind_an_end_token_every_candidate_is_a_miss() -> None:
    rounds = [WatchedRound(2, [[7, 8], [8, 7]], 0.0), WatchedRound(3, [[8, 9], [9, 8]], 0.0)]
    tokens = [1, 5, 7, 8]
    assert ranks_of(tokens, rounds, 2, ended=True).tolist() == [[0, 0], [0, MISSED]]
    assert ranks_of(tokens, rounds, 2, ended=False).tolist() == [[0, 0], [0, UNKNOWN]]
