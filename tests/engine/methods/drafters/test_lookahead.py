"""Lookahead decoding against its iterations written out by position, each row by a call of its
own.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Draft
from bild_lab.engine.methods.lookup.lookahead import LookaheadDrafter
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from tests.stubs import SESSION, StubModel

VOCABULARY = 12
TABLE = torch.randn(200, VOCABULARY, generator=torch.Generator().manual_seed(4)).double()


def after(tokens: list[int]) -> Tensor:
    """The next token hangs on every token before it, most of all on the last ones, so that texts
    come back.
    """
    return (
        TABLE[(7 * tokens[-1] + 3 * tokens[max(0, len(tokens) - 2)]) % 200]
        + 0.3 * TABLE[sum(tokens) % 200]
    )


def best(tokens: list[int]) -> int:
    return int(after(tokens).argmax())


class Written:
    """The window by position: what level `i` guesses for each position ahead, from a call for each
    row.
    """

    def __init__(self, prompt: list[int], window: int, ngram: int) -> None:
        self.ngram = ngram
        self.start = len(prompt) - 1  # the position of the last committed token
        first = random.Random(0).choices(prompt, k=window + ngram - 2)
        self.levels = [{self.start + place: token for place, token in enumerate(first)}]
        self.ngrams: list[tuple[int, ...]] = []

    def round(self, text: list[int]) -> None:
        start, levels = self.start, self.levels
        levels[0][start] = text[-1]
        newest: dict[int, int] = {}
        columns = range(start, start + len(levels[0]))
        for column in columns:
            trunk = [levels[0][place] for place in range(start + 1, column + 1)]
            above = [level[column + depth] for depth, level in enumerate(levels) if depth]
            newest[column + len(levels)] = best([*text, *trunk, *above])
        if len(levels) == self.ngram - 1:
            for column in columns:
                guessed = [level[column + depth] for depth, level in enumerate([*levels, newest])]
                self.ngrams.append(tuple(guessed))
            self.levels = [*levels[1:], newest]
        else:
            self.levels = [*levels, newest]
            for depth, level in enumerate(self.levels):
                del level[start + depth]
        self.start += 1

    def behind(self, token: int, guesses: int) -> list[tuple[int, ...]]:
        """The newest n-grams behind a token, each once."""
        found: list[tuple[int, ...]] = []
        for ngram in reversed(self.ngrams):
            if ngram[0] == token and ngram[1:] not in found:
                found.append(ngram[1:])
        return found[:guesses]


def leaves(draft: Draft) -> set[tuple[int, ...]]:
    branches: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_list, draft.parent_list, strict=True):
        branches.append((*(() if parent == ROOT else branches[parent]), token))
    return {branch for branch in branches if not any(other[:-1] == branch for other in branches)}


@pytest.mark.parametrize(
    ("window", "ngram", "guesses"), [(1, 2, 1), (4, 2, 3), (1, 4, 2), (3, 3, 2), (5, 4, 9)]
)
def test_drafts_are_the_ngrams_of_jacobi_iterations_written_out(
    window: int, ngram: int, guesses: int
) -> None:
    target, prompt = StubModel(after), [1, 2, 3]
    drafter = LookaheadDrafter(target, window, ngram, guesses)
    written, drafted = Written(prompt, window, ngram), 0

    class Watched(type(drafter)):
        def propose(self, tokens: list[int]) -> Draft:
            nonlocal drafted
            draft = super().propose(tokens)
            expected = written.behind(tokens[-1], guesses)
            assert leaves(draft) == set(expected)
            if draft.token_list:  # the newest n-gram goes first
                assert tuple(draft.token_list[: ngram - 1]) == expected[0]
            drafted += len(draft)
            # in the window's own positions the text moves on by one, whatever was accepted
            written.round(tokens)
            return draft

    drafter.__class__ = Watched
    # far more room than the rounds take, as the window stops at the length limit
    request = Request(Source(tuple(prompt)), Limits(len(prompt), 60))
    text = DraftThenVerify(target, drafter, SpeculativeSampling())
    stream = text.stream(request, Trace())
    for _ in range(25):
        next(stream)
    assert drafted > 0


def decode(target: StubModel, drafter: object, limits: Limits, trace: Trace) -> list[int]:
    return DraftThenVerify(target, drafter, SpeculativeSampling()).decode(
        Request(Source((1, 2, 3)), limits), trace
    )


def test_no_row_runs_after_the_last_position_of_the_models() -> None:
    rows: list[int] = []

    def noting(tokens: list[int]) -> Tensor:
        rows.append(len(tokens))
        return after(tokens)

    target = StubModel(noting)
    for positions in (20, 21, 40):
        rows.clear()
        decode(
            target, LookaheadDrafter(target, 5, 4, 5), Limits(3, 17, positions=positions), Trace()
        )
        assert max(rows) <= positions


def test_the_window_takes_all_positions_that_are_left() -> None:
    drafter = LookaheadDrafter(StubModel(after), 5, 4, 5)
    drafter = drafter.start(Request(Source((1, 2, 3)), Limits(3, 17, positions=6)), SESSION)
    assert len(drafter.propose([1, 2, 3]).probes) == 3


def test_the_window_does_not_run_for_the_last_token() -> None:
    target = StubModel(after)
    drafter = LookaheadDrafter(target, 5, 4, 5)
    decode(target, drafter, Limits(3, 1), Trace())
    assert len(target.fed) == 1
    drafter = drafter.start(Request(Source((1, 2, 3)), Limits(3, 2)), SESSION)
    first, last = drafter.propose([1, 2, 3]), drafter.propose([1, 2, 3, 4])
    # the first level, behind the last token
    assert (len(first.probes), last.probes) == (4 + 2, None)
    assert first.parents is first.known_parents is None  # nothing is known yet


def test_a_window_begins_with_words_of_the_source() -> None:
    drafter = LookaheadDrafter(StubModel(after), 6, 3, 4)
    for encoder in (None, torch.tensor([[7, 8, 9]])):
        drafter = drafter.start(Request(Source((1, 2), encoder), Limits(2, 20)), SESSION)
        known = [1, 2] if encoder is None else [1, 2, 7, 8, 9]
        assert drafter._levels == [random.Random(0).choices(known, k=7)]
    apart = Source((1, 2), encoder, one_vocabulary=False)
    drafter = drafter.start(Request(apart, Limits(2, 20)), SESSION)
    assert drafter._levels == [random.Random(0).choices([1, 2], k=7)]


def test_an_ngram_ends_with_an_end_token_and_the_others_go_on() -> None:
    drafter = LookaheadDrafter(StubModel(after), 3, 4, 4)
    drafter = drafter.start(Request(Source((1, 2)), Limits(2, 20, frozenset([5]))), SESSION)
    drafter._pool = {2: dict.fromkeys([(3, 4, 6), (3, 5, 7)])}  # the newest last
    draft = drafter.propose([1, 2])
    assert draft.token_list == [3, 5, 4, 6]
    assert draft.parents.tolist() == draft.known_parents == [ROOT, 0, 0, 2]


@pytest.mark.parametrize(("window", "rows"), [(7, 56), (15, 120)])
def test_a_pass_has_as_many_rows_as_the_released_code(window: int, rows: int) -> None:
    """(W + G)(N - 1) with the last token among them, of lade/decoding.py, once all levels and
    n-grams are there.
    """
    drafter = LookaheadDrafter(StubModel(after), window, 5, window)
    drafter = drafter.start(Request(Source((1, 2)), Limits(2, 50)), SESSION)
    drafter._levels = [[3] * window] * 4
    drafter._pool = {2: dict.fromkeys((one, 3, 4, 5) for one in range(window))}
    draft = drafter.propose([1, 2])
    assert (len(draft.token_list), 1 + len(draft.token_list) + len(draft.probes)) == (
        4 * window,
        rows,
    )
