"""Pairs of random models, decoding by the loop, and decoding without it: one token a step, with no
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from transformers import PreTrainedModel

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.protocols import Acceptance, Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Model
from bild_lab.engine.trace import Trace
from tests.stubs import ModuleModel, NextLogits, uncached
from tests.tiny import PAD, START, VOCABULARY, relative_of, tiny_llama, tiny_t5

FAMILIES = ("t5", "llama")
NEVER = frozenset([VOCABULARY])  # an end token that no model can emit


@cache
def random_modules(
    family: str, seed: int, noise: float
) -> tuple[PreTrainedModel, PreTrainedModel, Source]:
    """A target, a drafter that agrees with it now and then, and a prompt; float64, where nothing
    ties.
    """
    make = tiny_t5 if family == "t5" else tiny_llama
    target = make(seed).double()
    draft = relative_of(target, seed + 1, noise).double()
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, VOCABULARY, (1, 7), generator=generator)
    source = Source((PAD,), words) if family == "t5" else Source((START, *words[0].tolist()))
    return target, draft, source


def random_pair(
    family: str, seed: int, noise: float = 0.2
) -> tuple[ModuleModel, ModuleModel, Source]:
    """The modules of this family and seed as models, and their prompt."""
    target, draft, source = random_modules(family, seed, noise)
    return ModuleModel(target), ModuleModel(draft), source


@cache
def oracles(family: str, seed: int) -> tuple[NextLogits, NextLogits]:
    """The logits of the same target and drafter without a KV cache."""
    target, draft, source = random_modules(family, seed, 0.2)
    return uncached(target, source), uncached(draft, source)


def decode(
    target: Model,
    drafter: Drafter,
    accept: Acceptance,
    source: Source,
    max_new_tokens: int = 24,
    end: frozenset[int] = NEVER,
    **options: bool,
) -> tuple[list[int], Trace]:
    trace = Trace()
    request = Request(source, Limits(len(source.prompt), max_new_tokens, end))
    return DraftThenVerify(target, drafter, accept, **options).decode(request, trace), trace


def autoregressive(
    large: NextLogits, prompt: tuple[int, ...], done: Callable[[list[int]], bool]
) -> list[int]:
    """Greedy decoding, one token a step, no cache."""
    y = list(prompt)
    while not done(y):
        y.append(int(large(y).argmax()))
    return y


def finished(
    source: Source, max_new_tokens: int, end: frozenset[int]
) -> Callable[[list[int]], bool]:
    start = len(source.prompt)
    return lambda y: len(y) - start >= max_new_tokens or (len(y) > start and y[-1] in end)


def longer_than(length: int) -> Callable[[list[int]], bool]:
    return lambda y: len(y) >= length


class TreeDrafter(Drafter):
    """Drafts the target's own greedy tokens along one branch, with wrong siblings before them."""

    drafts_trees = True

    def __init__(self, truth: list[int]) -> None:
        self._truth = truth

    def propose(self, tokens: list[int]) -> Draft:
        ahead = self._truth[len(tokens) : len(tokens) + 2]
        wrong = [3 if token != 3 else 4 for token in ahead]
        nodes, parents = [], []
        parent = -1
        for right, other in zip(ahead, wrong, strict=True):
            nodes += [other, right]
            parents += [parent, parent]
            parent = len(nodes) - 1
        return Draft(torch.tensor(nodes, dtype=torch.long), torch.tensor(parents, dtype=torch.long))


def copying(offset: int) -> NextLogits:
    """Always says the next number, or the one `offset` further."""
    return lambda tokens: (
        9.0 * torch.nn.functional.one_hot(torch.tensor((tokens[-1] + offset) % 10), 10).double()
    )
