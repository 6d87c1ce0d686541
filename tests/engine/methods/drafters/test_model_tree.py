"""Trees grown with a draft model: the most likely tokens, in every engine, whatever was cached
before.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bild_lab.engine.draft import ROOT, Verdict, empty_draft
from bild_lab.engine.methods.early_exit.views import EarlyExit
from bild_lab.engine.methods.speculative.draft_tree import ModelTreeDrafter, grow_tree
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import GrownTree, Model, Scores, Session, TreeSpec
from bild_lab.errors import UserError
from tests.policies import in_memory
from tests.sessions import needs_kernels
from tests.stubs import SESSION, NextLogits, StubModel, StubSession
from tests.tiny import START, TINY, source_of

VOCABULARY = 6
GREEDY, WARM = Sampling(), Sampling(0.7)
ENDS = frozenset([2])
PLAIN = TreeSpec(nodes=7, depth=3, width=3, children=2, end_tokens=ENDS)
TREE_BUILDERS = {
    "plain": PLAIN,
    "one level": replace(PLAIN, depth=1),
    "more nodes than grow": replace(PLAIN, nodes=60),
    "sure leaves": replace(PLAIN, prune_confidence=0.35),
    "a chain": replace(PLAIN, nodes=3, width=1, children=1),
    "few of many leaves": replace(PLAIN, nodes=60, width=2, children=3, end_tokens=frozenset()),
    "likely leaves": replace(PLAIN, min_prob=0.1, depth=6, nodes=20),
    "more children than tokens": replace(PLAIN, children=VOCABULARY + 1),
}


def table(seed: int) -> NextLogits:
    """Logits that depend on every token of the text."""
    rows = 2 * torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()
    return lambda tokens: rows[sum((at + 1) * (token + 1) for at, token in enumerate(tokens)) % 50]


def by_definition(
    next_logits: NextLogits, text: list[int], tree_spec: TreeSpec, sampling: Sampling
) -> dict:
    """The branches of the tree and their chances, without a cache and without a session."""
    every: dict[tuple[int, ...], float] = {}
    leaves: list[tuple[int, ...]] = [()]
    for _ in range(tree_spec.depth):
        new: dict[tuple[int, ...], float] = {}
        for leaf in leaves:
            logits = next_logits([*text, *leaf])
            own = logits.softmax(-1)
            probs = own if sampling.greedy else (logits / sampling.temperature).softmax(-1)
            count = (
                1
                if tree_spec.prune_confidence is not None
                and own.max() >= tree_spec.prune_confidence
                else tree_spec.children
            )
            for token in probs.argsort(descending=True)[:count].tolist():
                new[(*leaf, token)] = every.get(leaf, 1.0) * float(probs[token])
        every |= new
        alive = [
            leaf
            for leaf in new
            if leaf[-1] not in tree_spec.end_tokens and new[leaf] >= tree_spec.min_prob
        ]
        leaves = sorted(alive, key=lambda leaf: -new[leaf])[: tree_spec.width]
        if not leaves:
            break
    kept = sorted(every, key=lambda leaf: -every[leaf])[: tree_spec.nodes]
    return {leaf: every[leaf] for leaf in kept}


def branches(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert parent < node
        found.append((*(() if parent == ROOT else found[parent]), token))
    return found


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", TREE_BUILDERS)
def test_the_tree_holds_the_most_likely_branches(name: str, sampling: Sampling) -> None:
    tree_spec = replace(TREE_BUILDERS[name], temperature=sampling.temperature or 1.0)
    for seed in range(8):
        model = StubModel(table(seed))
        tree = grow_tree(model.start(Source((0, 1)), 40), [1, 3], tree_spec, sampling)
        expected = by_definition(table(seed), [0, 1, 3], tree_spec, sampling)
        assert set(branches(tree.tokens, tree.parents)) == set(expected)
        assert len(tree.forwards) <= tree_spec.depth and sum(tree.forwards) == len(model.fed)


@pytest.mark.parametrize("window", [2, 4])
def test_the_cache_keeps_the_accepted_branch(window: int) -> None:
    """So the drafter runs no token of the text twice, and drafts as one without a cache."""

    def started(model: StubModel) -> ModelTreeDrafter:
        drafter = ModelTreeDrafter(model, nodes=9, window=window, width=2, children=2)
        return drafter.start(Request(Source((0, 1)), Limits(2, 40)), SESSION)

    model = StubModel(table(3))
    drafter = started(model)
    text = [0, 1]
    for _ in range(5):
        draft = drafter.propose(text)
        leaf = max(
            range(len(draft)),
            key=lambda node: len(branches(draft.token_list, draft.parent_list)[node]),
        )
        path = [leaf]
        while (above := draft.parent_list[path[0]]) != ROOT:
            path.insert(0, above)
        verdict = Verdict(tuple(path), next_token=5)
        drafter.observe(draft, Scores(torch.zeros(len(draft) + 1, VOCABULARY)), verdict)
        text += [*(draft.token_list[node] for node in path), 5]
        model.fed.clear()
        draft = drafter.propose(text)
        assert draft.token_list == started(StubModel(table(3))).propose(text).token_list
        # the deepest token has not run, nor the target's own; then a level less than the window
        assert len(model.fed) - 2 <= 2 * (window - 1)
        drafter.observe(draft, Scores(torch.zeros(1, VOCABULARY)), Verdict((), 5))


def rounds_of_trees(family: str, model: Model, sampling: Sampling) -> list[tuple[object, ...]]:
    """What a model drafts in four rounds of each of eight texts, of which a branch is accepted: tokens,
    parents, calls, and every forward so far.
    """
    source = source_of(family, [5, 9, 12])
    rounds: list[tuple[object, ...]] = []
    for seed in range(8):
        ends = frozenset([3 + 3 * seed, 4 + seed])
        request = Request(source, Limits(len(source.prompt), 40, ends), sampling)
        drafter = ModelTreeDrafter(
            model,
            nodes=4 + seed,
            window=1 + seed % 5,
            width=1 + seed % 4,
            children=1 + seed % 3,
            min_prob=0.01 * seed,
            stop=None if seed % 2 else 0.3,
        )
        session = in_memory(TINY[family](1), "kernels").start(source, 40)
        drafter = drafter.start(request, session)
        text = list(source.prompt)
        for _ in range(4):
            draft = drafter.propose(text)
            ran = [(forward.rows, forward.cached, forward.scored) for forward in session.forwards]
            rounds.append((draft.token_list, draft.parent_list, draft.calls, ran))
            last_branch = [len(draft) - 1]
            while (parent := draft.parent_list[last_branch[0]]) != ROOT:
                last_branch.insert(0, parent)
            verdict = Verdict(tuple(last_branch[: 1 + seed % 4]), 3 + seed)
            drafter.observe(draft, Scores(None), verdict)
            text += verdict.tokens(draft)
    return rounds


@pytest.mark.fast("qwen3-sampled")
@needs_kernels
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["t5", "llama", "qwen3", "gemma3"])
def test_a_tree_in_one_program_is_that_of_the_loop(
    family: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_memory(TINY[family](1), "kernels")
    session_class = type(model.start(source_of(family, [5, 9, 12]), 40))
    program, programs = session_class.draft, []

    def counted(session: Session, *request: object) -> GrownTree | None:
        programs.append(request)
        return program(session, *request)

    monkeypatch.setattr(session_class, "draft", counted)
    by_programs = rounds_of_trees(family, model, sampling)
    assert len(programs) == len(by_programs)
    monkeypatch.setattr(session_class, "draft", lambda *_: None)
    assert by_programs == rounds_of_trees(family, model, sampling)


def test_a_program_is_given_the_requests_limits_and_how_it_chooses_tokens() -> None:
    given: list[tuple[list[int], TreeSpec]] = []

    class Session(StubSession):
        def draft(self, rows: list[int], tree_spec: TreeSpec) -> GrownTree:
            given.append((list(rows), tree_spec))
            return GrownTree([3, 4], [ROOT, 0], [None, None], [1])

    model = StubModel(table(0))
    model.start = lambda source, *_: Session(model, list(source.prompt[:-1]))
    drafter = ModelTreeDrafter(model, nodes=9, window=4, width=2, children=3, min_prob=1)
    samplings = (GREEDY, Sampling(top_k=2), WARM, Sampling(0.7, top_k=2))
    for sampling in samplings:
        drafter = drafter.start(Request(Source((0, 1)), Limits(2, 4, ENDS), sampling), SESSION)
        # before any tree there is no row
        drafter.observe(empty_draft(model.device), Scores(None), Verdict((), 5))
        draft = drafter.propose([0, 1, 3])
        assert (draft.token_list, list(draft.known_parents), draft.parents.tolist()) == (
            [3, 4],
            [ROOT, 0],
            [ROOT, 0],
        )
    tree_spec = TreeSpec(9, 3, 2, 3, ENDS, None, 1)
    assert given == [
        ([1, 3], replace(tree_spec, temperature=temperature, plain=plain))
        for temperature, plain in ((1.0, True), (1.0, True), (0.7, True), (0.7, False))
    ]


def test_tokens_without_a_chance_are_not_drafted_and_a_leaf_at_the_threshold_is_confident() -> None:
    even = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    tree_spec = TreeSpec(nodes=20, depth=1, width=9, children=3, end_tokens=frozenset())
    tree = grow_tree(StubModel(lambda _: even).start(Source((0,)), 20), [0], tree_spec, WARM)
    assert sorted(tree.tokens) == [0, 1]
    for sure, count in ((0.5, 1), (0.5000001, 2)):
        tree = grow_tree(
            StubModel(lambda _: even).start(Source((0,)), 20),
            [0],
            replace(tree_spec, prune_confidence=sure),
            WARM,
        )
        assert len(tree.tokens) == count


def test_a_leaf_with_just_min_prob_grows_on() -> None:
    even = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    for least, levels in ((0.25, 3), (0.2500001, 2)):
        tree_spec = TreeSpec(
            nodes=20, depth=9, width=9, children=2, end_tokens=frozenset(), min_prob=least
        )
        tree = grow_tree(StubModel(lambda _: even).start(Source((0,)), 20), [0], tree_spec, WARM)
        assert len(tree.forwards) == levels


def test_a_draft_model_starts_beside_the_target_and_forgets_what_the_text_lost() -> None:
    target = in_memory(TINY["llama"](0), "native")
    session = target.start(Source((START, 5, 9)), 20)
    request = Request(Source((START, 5, 9)), Limits(3, 20))
    view = ModelTreeDrafter(EarlyExit(target, 1), nodes=3, window=2, width=2, children=2)
    view = view.start(request, session)  # a view without a target would be refused
    with pytest.raises(UserError, match="draft chains alone"):
        view.propose([START, 5, 9])
    drafter = ModelTreeDrafter(target, nodes=3, window=2, width=2, children=2)
    drafter = drafter.start(request, session)
    before = len(session.forwards)
    calls = drafter.propose([START, 5, 9]).calls
    assert len(session.forwards) == before + calls
    drafter.rollback(1)
    assert drafter._session.length == 1


def test_a_leaf_is_confident_by_the_fallback_threshold() -> None:
    drafters = [
        ModelTreeDrafter(StubModel(table(0)), 9, 4, 2, 2, 0.1, stop) for stop in (None, 0.4)
    ]
    assert [one._tree_spec for one in drafters] == [
        TreeSpec(9, 4, 2, 2, frozenset(), None, 0.1),
        TreeSpec(9, 4, 2, 2, frozenset(), 0.4, 0.1),
    ]
