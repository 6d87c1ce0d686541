"""Trees that the Triton kernels grow as one program, by Triton's interpreter: they are those of one
forward after another, in the same rows of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import ROOT
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods.speculative.draft_tree import grow_tree
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native.layers import Decoder
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import GrownTree, OutputSpec, Rows, Scores, TreeSpec
from tests.engine.models.test_triton import build, tickets_left
from tests.tiny import tiny_llama
from tests.triton_interpreter import (
    interpreter,  # noqa: F401
    needs_triton,
    tilings,
    triton_model,
    triton_session,
)

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

FREE = TreeSpec(nodes=99, depth=4, width=3, children=3, end_tokens=frozenset())
TINY = replace(FREE, depth=3, width=2, children=2)


@dataclass
class Loop:
    """A tree that grows by one forward after another, and the logits of its rows, the root's
    first.
    """

    session: CachedSession
    vocabulary: DraftVocabulary | None = None
    levels: list[Tensor] = field(default_factory=list)

    def extend(self, rows: Rows, output_spec: OutputSpec) -> Scores:
        scores = self.session.extend(rows, replace(output_spec, vocabulary=self.vocabulary))
        self.levels.append(scores.logits)
        return scores

    def draft(self, tokens: list[int], tree_spec: TreeSpec) -> GrownTree:
        self.vocabulary = tree_spec.vocabulary
        warm = tree_spec.temperature != 1.0
        sampling = Sampling(tree_spec.temperature) if warm else Sampling()
        return grow_tree(self, tokens, tree_spec, sampling)

    @property
    def probs(self) -> Tensor:
        return torch.cat(self.levels).softmax(-1)

    def chances(self, tree: GrownTree) -> list[float]:
        """The chance of each node, at temperature 1."""
        chances: list[float] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            before, row = (1.0, 0) if parent == ROOT else (chances[parent], tree.rows[parent] + 1)
            chances.append(before * float(self.probs[row, token]))
        return chances


def between(numbers: list[float], share: float) -> float:
    """A number with about this share of the numbers below it, and none near it."""
    ordered = sorted(numbers)
    place = round(share * (len(ordered) - 1))
    return (ordered[place] + ordered[place + 1]) / 2


def deepest_path(tree: GrownTree) -> list[int]:
    """The rows of the last of the longest branches whose nodes have all run."""
    paths: list[list[int]] = []
    for parent, row in zip(tree.parents, tree.rows, strict=True):
        before = [] if parent == ROOT else paths[parent]
        paths.append(before if row is None else [*before, row])
    return max(reversed(paths), key=len)


def written_slots(session: CachedSession) -> int:
    """How many slots of the cache have a row's keys."""
    return int((session.layers.cache.keys.abs().sum((0, 1, 3)) > 0).sum())


def check_same_tree(
    decoder: Decoder, source: Source, tokens: list[int], *tree_specs: TreeSpec
) -> list[GrownTree]:
    """Grow trees one after another by a program and by a loop; a branch of each is kept.

    All rows of the cache must be the same to the last bit.
    """
    loop = Loop(triton_session(decoder, source, 96))
    session = triton_session(decoder, source, 96, like=loop.session)
    trees = []
    for tree_spec in tree_specs:
        expected, grown = loop.draft(tokens, tree_spec), session.draft(tokens, tree_spec)
        assert (grown.tokens, grown.parents) == (expected.tokens, expected.parents)
        assert grown.rows == expected.rows
        assert grown.forwards[1:] == expected.forwards[1:]
        assert session.forwards == loop.session.forwards
        assert tickets_left(session) == 0
        if len(grown.forwards) > 1:
            path = deepest_path(grown)
            loop.session.keep(path)
            session.keep(path)
        for name in ("keys", "values"):
            stores = (getattr(each.layers.cache, name) for each in (loop.session, session))
            assert torch.equal(*(store[:, :, : session.length] for store in stores))
        trees.append(grown)
    after = [each.extend([9]).logits for each in (loop.session, session)]
    assert torch.equal(*after)
    return trees


@pytest.mark.fast("llama")
@pytest.mark.parametrize("name", ["t5 v1.0", "mt5", "llama", "mistral", "qwen3 windows", "gemma3"])
@torch.inference_mode()
def test_a_program_grows_the_tree_that_the_loop_does(name: str) -> None:
    _, decoder, source = build(name, torch.float16 if name != "mt5" else torch.float32)
    if name == "llama":
        check_same_tree(decoder, source, [source.prompt[-1]], TINY)
        return
    tokens = [source.prompt[-1], *torch.randint(3, 90, (11,)).tolist()]  # more than a window
    check_same_tree(decoder, source, tokens, replace(TINY, depth=2), FREE)


def free_tree(decoder: Decoder, source: Source, tokens: list[int]) -> tuple[Loop, GrownTree]:
    """The tree that no rule ends."""
    loop = Loop(triton_session(decoder, source, 96))
    return loop, loop.draft(tokens, FREE)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 5, 14])
@torch.inference_mode()
def test_the_most_likely_nodes_are_those_of_the_loop(nodes: int) -> None:
    _, decoder, source = build("llama", torch.float16)
    (tree,) = check_same_tree(decoder, source, [source.prompt[-1]], replace(FREE, nodes=nodes))
    assert len(tree.tokens) == nodes and len(tree.forwards) == FREE.depth


@pytest.mark.slow
@torch.inference_mode()
def test_a_confident_row_has_one_child() -> None:
    _, decoder, source = build("llama", torch.float16)
    tokens = [source.prompt[-1]]
    loop, _ = free_tree(decoder, source, tokens)
    threshold = between(loop.probs.amax(-1).tolist(), 0.4)
    (tree,) = check_same_tree(decoder, source, tokens, replace(FREE, prune_confidence=threshold))
    counts = {tree.parents.count(node) for node in tree.parents}
    assert counts == {1, 3}


@pytest.mark.slow
@torch.inference_mode()
def test_a_tree_ends_where_no_leaf_is_likely() -> None:
    _, decoder, source = build("llama", torch.float16)
    tokens = [source.prompt[-1]]
    loop, free = free_tree(decoder, source, tokens)
    chances = loop.chances(free)
    seconds = [chance for chance, parent in zip(chances, free.parents, strict=True) if parent >= 0]
    # the third is reached by some of the second level's leaves
    for min_prob, forwards in (
        (1.1 * max(chances), 1),
        (1.1 * max(seconds), 2),
        (between(seconds, 0.8), None),
    ):
        rule = replace(FREE, min_prob=min_prob, depth=5)
        (tree,) = check_same_tree(decoder, source, tokens, rule)
        assert forwards is None or len(tree.forwards) == forwards


@pytest.mark.slow
@torch.inference_mode()
def test_an_end_token_has_no_children() -> None:
    _, decoder, source = build("llama", torch.float16)
    tokens = [source.prompt[-1]]
    _, free = free_tree(decoder, source, tokens)
    grew = [token for token, row in zip(free.tokens, free.rows, strict=True) if row is not None]
    for ends in (grew[:1], grew[1:4], free.tokens[:3]):
        rule = replace(FREE, end_tokens=frozenset(ends))
        (tree,) = check_same_tree(decoder, source, tokens, rule)
        parents = {tree.tokens[parent] for parent in tree.parents if parent != ROOT}
        assert parents.isdisjoint(ends) and not set(ends).isdisjoint(tree.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 1.7])
@torch.inference_mode()
def test_chances_are_those_at_the_temperature(temperature: float) -> None:
    _, decoder, source = build("llama", torch.float16)
    tokens = [source.prompt[-1]]
    loop, _ = free_tree(decoder, source, tokens)
    rule = replace(
        FREE,
        nodes=9,
        temperature=temperature,
        prune_confidence=between(loop.probs.amax(-1).tolist(), 0.5),
    )
    check_same_tree(decoder, source, tokens, rule)


@pytest.mark.slow
@pytest.mark.parametrize(
    "vocabulary",
    [range(5, 40, 3), range(1, 90), range(30, 32)],
    ids=["a head of its own", "the whole head", "fewer tokens than children"],
)
@torch.inference_mode()
def test_a_draft_vocabulary_gives_all_tokens(vocabulary: range) -> None:
    _, decoder, source = build("llama", torch.float16)
    rule = replace(FREE, vocabulary=DraftVocabulary(vocabulary))
    (tree,) = check_same_tree(decoder, source, [source.prompt[-1]], rule)
    assert set(tree.tokens) <= set(vocabulary)
    assert tree.parents.count(ROOT) == min(FREE.children, len(vocabulary))


@pytest.mark.slow
@torch.inference_mode()
def test_trees_of_other_sizes_are_those_of_the_loop() -> None:
    """One level, one row a level, more levels than are used, more rows than have leaves."""
    _, decoder, source = build("llama", torch.float16)
    check_same_tree(
        decoder,
        source,
        [source.prompt[-1]],
        replace(FREE, depth=1),
        replace(FREE, depth=2, width=1, children=1),
        replace(FREE, depth=9, width=1, children=2),
        replace(FREE, depth=3, width=7, children=2),
        replace(FREE, depth=3, width=2, children=9),
    )


@pytest.mark.slow
@torch.inference_mode()
def test_more_tiles_of_scores_than_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from bild_lab.engine.models.native.gpu import heads
    from bild_lab.engine.models.native.gpu.tilings import streaming

    monkeypatch.setattr(heads, "MAX_COMPARED_TILES", 2)
    _, decoder, source = build("llama", torch.float16)
    with tilings(streaming(16, 32, 1, 4, 2)):
        check_same_tree(decoder, source, [source.prompt[-1]], FREE)


@torch.inference_mode()
def test_of_equal_scores_the_first_tokens_are_children_and_grow() -> None:
    from bild_lab.engine.models.native.gpu.tilings import streaming

    module = tiny_llama(0).half()
    weight = module.lm_head.weight.data
    weight.copy_(weight[:4].repeat(len(weight) // 4, 1))  # in one tile, and in several
    source = Source((1, 14, 3))
    with tilings(streaming(16, 32, 1, 4, 2)):
        session = triton_model(module).start(source, 9)
        tree = session.draft(source.prompt[-1:], replace(FREE, depth=2, width=2, children=6))
    first = tree.tokens[0]
    assert tree.tokens[:6] == list(range(first, first + 24, 4)) and first < 4
    assert tree.rows == [0, 1, *[None] * 16]


@torch.inference_mode()
def test_kernels_of_a_tree_that_has_ended_do_nothing() -> None:
    _, decoder, source = build("llama", torch.float16)
    session = triton_session(decoder, source, 64)
    stream = session.layers.packed.plan.buffers.x
    session.draft([5], replace(FREE, depth=1))
    expected = stream.clone()
    session = triton_session(decoder, source, 64, like=session)
    tree = session.draft([5], replace(FREE, min_prob=1.0))
    assert (len(tree.tokens), tree.rows, len(tree.forwards)) == (3, [None] * 3, 1)
    assert torch.equal(stream, expected)
    assert written_slots(session) == len(source.prompt)


@pytest.mark.slow
@torch.inference_mode()
def test_a_program_of_more_levels_writes_no_row_more() -> None:
    _, decoder, source = build("llama", torch.float16)
    session = triton_session(decoder, source, 64)
    session.draft([5], replace(FREE, depth=9, width=1, children=1))  # by a program of ten
    assert written_slots(session) == len(source.prompt) + 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5 v1.0", "llama"])
@torch.inference_mode()
def test_texts_grow_side_by_side_what_each_grows_alone(name: str) -> None:
    _, decoder, source = build(name, torch.float16)
    sources = [Source(source.prompt[first:], source.encoder_ids) for first in (0, 2, 0)]
    if source.encoder_ids is not None:
        sources = [Source((0,), source.encoder_ids[:, first:]) for first in (0, 2, 1)]
    first = triton_session(decoder, source, 64)
    sessions = [triton_session(decoder, each, 64, like=first) for each in sources]
    fed = [[*each.prompt, *[7, 8][:index]] for index, each in enumerate(sources)]
    loops = [Loop(triton_session(decoder, each, 64, like=first)) for each in sources]
    rows = [tokens[len(each.prompt) - 1 :] for tokens, each in zip(fed, sources, strict=True)]
    free = [loop.draft(tokens, FREE) for loop, tokens in zip(loops, rows, strict=True)]
    tree_specs = [
        FREE,
        # it ends early, and another one goes on
        replace(FREE, depth=3, end_tokens=frozenset(free[1].tokens[:1])),
        replace(FREE, nodes=6, min_prob=1.1 * max(loops[2].chances(free[2])[3:])),
    ]
    expected = [
        triton_session(decoder, each, 64, like=first).draft(tokens, tree_spec)
        for each, tokens, tree_spec in zip(sources, rows, tree_specs, strict=True)
    ]
    texts = [
        session.layers.text_rows(0, len(tokens))
        for session, tokens in zip(sessions, fed, strict=True)
    ]
    assert first.layers.packed.draft(fed, texts, tree_specs) == expected
    assert len({len(tree.forwards) for tree in expected}) == 3


@pytest.mark.slow
@torch.inference_mode()
def test_texts_of_more_rows_than_a_forward_has_grow_in_parts() -> None:
    _, decoder, source = build("llama", torch.float16)
    wide = replace(FREE, depth=2, width=33, children=20)
    first = triton_session(decoder, source, 64)
    expected = first.draft([source.prompt[-1]], wide)
    sessions = [triton_session(decoder, source, 64, like=first) for _ in range(2)]
    texts = [session.layers.text_rows(0, len(source.prompt)) for session in sessions]
    trees = first.layers.packed.draft([list(source.prompt)] * 2, texts, [wide] * 2)
    assert trees == [expected] * 2


def test_trees_without_a_program() -> None:
    from bild_lab.engine.models.native.gpu.trees import has_program

    ends = frozenset(range(17))
    for tree_spec in (
        replace(FREE, width=65),
        replace(FREE, children=400),
        replace(FREE, depth=0),
        replace(FREE, depth=65, width=1),
        replace(FREE, depth=64, width=5),
        replace(FREE, end_tokens=ends),
    ):
        assert not has_program([5], tree_spec)
    assert not has_program([5] * 65, FREE)
    assert has_program([5] * 64, FREE)
    assert has_program([5], replace(FREE, depth=64))
    # of 256 rows and 1024 children
    assert has_program([5], replace(FREE, depth=5, width=64, children=16))


@torch.inference_mode()
def test_a_tree_without_a_program_leaves_the_others_theirs() -> None:
    """A text grows what it grows alone, whoever stands beside it: other sizes are another program."""
    _, decoder, source = build("llama", torch.float16)
    first = triton_session(decoder, source, 64)
    first.extend([5])  # makes the rotations
    fed = [list(source.prompt), [5] * 65, list(source.prompt), list(source.prompt[2:])]
    small = replace(TINY, depth=2)
    tree_specs = [small, small, replace(small, width=1), small]

    def grown(places: list[int]) -> list[GrownTree | None]:
        sessions = [triton_session(decoder, source, 64, like=first) for _ in places]
        texts = [
            session.layers.text_rows(0, len(fed[place]))
            for session, place in zip(sessions, places, strict=True)
        ]
        return first.layers.packed.draft(
            [fed[place] for place in places], texts, [tree_specs[place] for place in places]
        )

    together = grown([0, 1, 2, 3])
    assert together == [*grown([0]), *grown([1]), *grown([2]), *grown([3])]
    assert [tree is None for tree in together] == [False, True, False, False]


@torch.inference_mode()
def test_a_tree_that_has_ended_stays_so_whatever_an_earlier_one_left_there() -> None:
    _, decoder, source = build("llama", torch.float16)
    first = triton_session(decoder, source, 64)
    tree_specs = [replace(TINY, depth=1), replace(TINY, depth=4)]
    expected = [
        triton_session(decoder, source, 64, like=first).draft([source.prompt[-1]], tree_spec)
        for tree_spec in tree_specs
    ]
    packed, prompt = first.layers.packed, list(source.prompt)
    for _ in range(2):
        sessions = [triton_session(decoder, source, 64, like=first) for _ in tree_specs]
        texts = [session.layers.text_rows(0, len(prompt)) for session in sessions]
        assert packed.draft([prompt, prompt], texts, tree_specs) == expected
        for levels in packed._trees._grown_levels.values():
            levels._memory.zero_()  # leaves of every level, with children
