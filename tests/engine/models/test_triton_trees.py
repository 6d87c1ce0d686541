"""Trees that the Triton kernels grow as one program, by Triton's interpreter: they are those of one
forward after another, in the same rows of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
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
    levels: list[Tensor] = field(default_factory=list)

    def extend(self, rows: Rows, output_spec: OutputSpec) -> Scores:
        scores = self.session.extend(rows, output_spec)
        self.levels.append(scores.logits)
        return scores

    def grow(self, tokens: list[int], tree_spec: TreeSpec) -> GrownTree:
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
    """The rows of the longest branch whose nodes have all run."""
    paths: list[list[int]] = []
    for parent, row in zip(tree.parents, tree.rows, strict=True):
        before = [] if parent == ROOT else paths[parent]
        paths.append(before if row is None else [*before, row])
    return max(paths, key=len)


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
        expected, grown = loop.grow(tokens, tree_spec), session.grow(tokens, tree_spec)
        assert (grown.tokens, grown.parents) == (expected.tokens, expected.parents)
        assert grown.rows == expected.rows
        assert grown.forwards[1:] == expected.forwards[1:]
        assert session.forwards == loop.session.forwards
        assert tickets_left(session) == 0
        path = deepest_path(grown)
        for each in (loop.session, session):
            each.keep(path)
        for stores in zip(*(each.layers.cache.stores for each in (loop.session, session))):
            kept = (store[:, :, : session.length] for store in stores)
            assert torch.equal(*kept)
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
