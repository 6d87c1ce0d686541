"""What drafters do with the rounds of another drafter, with drafts that were dropped, and with
candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.candidate_trees import CandidateNode, ProbedTree
from bild_lab.engine.methods.candidates import CandidateDrafter, named_trees
from bild_lab.engine.methods.lookup.prompt_lookup import PromptLookup
from bild_lab.engine.methods.lookup.suffix import SuffixDrafter
from bild_lab.engine.methods.lookup.suffix_automaton import EMPTY, SuffixAutomaton
from bild_lab.engine.methods.lookup.token_recycling import TokenRecycling
from bild_lab.engine.methods.speculative.combined_drafters import (
    HybridDrafter,
    SpeculativeDrafter,
)
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Scores, for_draft
from bild_lab.errors import UserError
from tests.stubs import SESSION, StubModel

TARGET = StubModel(lambda _: torch.zeros(9))
DROPPED, KEPT = [0], [0, 3, 5, 3]


def model(seed: int) -> StubModel:
    """The next token depends on the whole text; the last one ends it, rarely."""
    table = torch.randn(40, 9, generator=torch.Generator().manual_seed(seed)).double()
    table[:, 8] -= 1
    return StubModel(
        lambda tokens: table[sum((at + 1) * (token + 1) for at, token in enumerate(tokens)) % 40]
    )


def request_of(*prompt: int, room: int = 30) -> Request:
    return Request(Source(prompt), Limits(len(prompt), room, frozenset([8])))


MADE: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(model(1), 4),
    "hierarchy": lambda: SpeculativeDrafter(model(1), ModelDrafter(model(2), 2), 4),
    "hybrid": lambda: HybridDrafter(NoDraft(TARGET), ModelDrafter(model(1), 4), 1),
    "hybrid of two": lambda: HybridDrafter(
        ModelDrafter(model(1), 4), HybridDrafter(*[ModelDrafter(model(1), 4)] * 2, 9), 9
    ),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_where_its_draft_was_dropped_it_drafts_as_anew(made: Callable[[], Drafter]) -> None:
    drafter, anew = (made().start(request_of(0), SESSION) for _ in range(2))
    assert drafter.propose(DROPPED).depth >= 3
    drafter.rollback(len(DROPPED))
    assert drafter.propose(KEPT).token_list == anew.propose(KEPT).token_list != []


def test_a_drafters_model_is_given_the_targets_session_for_what_it_can_read_there() -> None:
    given: list[tuple] = []

    class Noting(StubModel):
        def start(self, *start: object) -> object:
            given.append(start)
            return super().start(*start)

    draft, request = Noting(lambda _: torch.ones(9)), request_of(0)
    for drafter in (ModelDrafter(draft, 2), SpeculativeDrafter(draft, NoDraft(draft), 2)):
        drafter = drafter.start(request, SESSION)
    assert given == [(request.source, 30, for_draft(SESSION))] * 2


def test_a_hybrid_passes_on_what_another_drafter_did() -> None:
    observed: list[object] = []

    class Noting(PromptLookup):
        def observe_other(self, *round: object) -> None:
            observed.append(round)

        def rollback(self, length: int) -> None:
            observed.append(length)

        def prepare(self, request: Request) -> None:
            observed.append(request)

    hybrid = HybridDrafter(Noting(TARGET, 2, 2), Noting(TARGET, 2, 2), 1)
    other = ([0, 3], Draft(torch.tensor([5])), Scores(None), Verdict((0,), 7))
    hybrid.observe_other(*other)
    hybrid.rollback(3)
    assert all(
        one is each for round in observed[:2] for one, each in zip(round, other, strict=True)
    )
    hybrid.prepare(request := request_of(0))
    assert observed[2:] == [3, 3, request, request]


def scores(*rows: int) -> Scores:
    return Scores(torch.nn.functional.one_hot(torch.tensor(rows), 9).float())


def test_token_recycling_learns_from_the_rows_that_another_drafted() -> None:
    drafter = TokenRecycling(TARGET, 1, 1)
    drafter = drafter.start(request_of(0), SESSION)
    drafter.observe_other([0, 3], Draft(torch.tensor([5])), scores(5, 6), Verdict((0,), 6))
    assert [drafter.propose([0, token]).token_list for token in (3, 5, 4)] == [[5], [6], []]
    drafter = drafter.start(request_of(0), SESSION)
    # each text begins anew, unless it is to keep
    assert drafter.propose([0, 3]).token_list == []


def test_an_answer_is_kept_whoever_drafted_it() -> None:
    drafter = SuffixDrafter(TARGET, 8, 4, 0.0, keep=True)
    first, second = request_of(1, 2), request_of(4)
    drafter.prepare(first)
    drafter = drafter.start(first, SESSION)
    drafter.observe_other(
        [1, 2, 3], Draft(torch.tensor([4, 5, 6])), Scores(None), Verdict((0, 1), 7)
    )
    drafter.prepare(second)
    drafter = drafter.start(second, SESSION)
    assert drafter.propose([4, 5]).token_list == [7]


def test_a_match_at_the_end_of_the_source_is_followed_by_nothing() -> None:
    drafter = SuffixDrafter(TARGET, 8, 4, 0.0)
    drafter = drafter.start(Request(Source((0,), torch.tensor([[5, 6]])), Limits(1, 30)), SESSION)
    assert drafter.propose([0, 5, 6]).token_list == []
    assert drafter.propose([0, 5]).token_list == [6]


def test_a_corpus_is_read_without_special_tokens(tmp_path: Path) -> None:
    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [*([8] if add_special_tokens else []), *map(int, text.split())]}

    (tmp_path / "one.txt").write_text("3 4")
    (tmp_path / "two.txt").write_text("5 6")
    checkpoint = SimpleNamespace(tokenizer=tokenizer, require_row=lambda token, what: None)
    target = SimpleNamespace(device=torch.device("cpu"), checkpoint=checkpoint)
    drafter = SuffixDrafter(target, 8, 4, 0.0, corpus=str(tmp_path))
    drafter = drafter.start(request_of(0), SESSION)
    assert drafter._automaton.follow[EMPTY].keys() == {0, 3, 4, 5, 6, -1, -2}
    assert [drafter.propose([0, token]).token_list for token in (3, 4)] == [[4], []]


def test_nothing_is_matched_across_boundaries() -> None:
    automaton = SuffixAutomaton()
    for _ in range(3):
        automaton.extend([1])
        automaton.end_text()
        # no suffix that ends in a boundary occurs elsewhere
        assert automaton.links[automaton.whole] == EMPTY
    automaton.cut(3)
    automaton.end_text()
    assert automaton.links[automaton.whole] == EMPTY


class Known(CandidateDrafter):
    """Candidates 10, 11, 12 and 20, 21, 22."""

    def __init__(self) -> None:
        target = SimpleNamespace(
            checkpoint=SimpleNamespace(columns=50),
            device=torch.device("cpu"),
        )
        super().__init__(
            target, SimpleNamespace(markov=None, draft_vocabulary=None), "full_tree", 1, 2, 1
        )

    def begun(self, request: Request) -> Known:
        text = self.start(request, SESSION)
        text.candidates = torch.tensor([[10, 11, 12], [20, 21, 22]])
        return text


TREES = [
    ProbedTree((), (1,)),
    ProbedTree((CandidateNode(0, 0, -1),), (1, 1)),
    ProbedTree(
        (CandidateNode(0, 0, -1), CandidateNode(0, 1, -1), CandidateNode(1, 1, 1)), (0, 1, 1, 1)
    ),
]


def test_candidates_are_drafted_as_deep_as_there_is_room() -> None:
    drafter = Known()
    wide = drafter.drafting(TREES, 3)
    assert wide is not drafter
    drafts = [wide.begun(request_of(0, room=room)).propose([0]) for room in (30, 2, 1)]
    assert [each.token_list for each in drafts] == [[10, 11, 21], [10, 11, 21], [10]]
    assert [drawn(each.probes) for each in drafts] == [[50, 50, 50], [50, 50, 50], None]
    first = wide.start(request_of(0), SESSION).propose([0])
    assert (first.token_list, drawn(first.probes)) == ([], [50])  # no candidates yet
    limited = Request(Source((0,)), Limits(1, 30, positions=2))
    assert wide.begun(limited).propose([0]).token_list == [10]
    # two candidates at each depth, as many as the trees use
    narrow = Known().drafting(TREES).begun(request_of(0))
    narrow.candidates = torch.tensor([[10, 11], [20, 21]])
    assert narrow.propose([0]).token_list == [10, 11, 21]


def drawn(held: Tensor | None) -> list[int] | None:
    return None if held is None else held.tolist()


def test_trees_by_name_have_probes_where_there_are_any() -> None:
    plain, probed = (
        named_trees("full_tree", [2, 1], 3, 0, 50),
        named_trees("full_tree", [2, 1], 3, 3, 50),
    )
    assert [len(tree.nodes) for tree in plain] == [len(tree.nodes) for tree in probed] == [0, 2, 4]
    assert {count for tree in plain for count in tree.probes} == {0}
    assert max(count for tree in probed for count in tree.probes) == 2
    for probes, kinds in (
        (0, "full_tree, narrowing_tree, mc_sim_7b_63"),
        (3, "full_tree, narrowing_tree, mc_sim_7b_63, straightforward"),
    ):
        with pytest.raises(
            UserError,
            match=f"tree must be one of efficient_tree, {kinds} or the file of .*, got 'no'",
        ):
            named_trees("no", 2, 3, probes, 50)
