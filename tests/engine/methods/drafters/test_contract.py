"""What every drafter owes the loop, also inside another drafter, where text is taken back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.methods.lookup.ngram import NGramDrafter
from bild_lab.engine.methods.lookup.prompt_lookup import PromptLookup
from bild_lab.engine.methods.lookup.suffix import SuffixDrafter
from bild_lab.engine.methods.speculative.combined_drafters import (
    HybridDrafter,
    SpeculativeDrafter,
)
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.draft_tree import ModelTreeDrafter
from bild_lab.engine.methods.speculative.synthetic import SyntheticDrafter
from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.engine.protocols import Drafter, Prepares
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Scores
from bild_lab.training.modules.ngrams import estimate
from tests.stubs import SESSION, StubModel

VOCABULARY = 6


def model(seed: int) -> StubModel:
    """Its next token depends on every token of the text, so that stale ones in a cache show."""
    table = torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()
    return StubModel(
        lambda tokens: table[sum((at + 1) * (token + 1) for at, token in enumerate(tokens)) % 50]
    )


def bigrams() -> object:
    sequence = torch.randint(
        VOCABULARY, (200,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    return estimate([sequence], 2, {str(token): token for token in range(VOCABULARY)}, "chance")


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": lambda: NoDraft(model(0)),
    "model": lambda: ModelDrafter(model(1), 4),
    "tree of a model": lambda: ModelTreeDrafter(model(1), nodes=6, window=3, width=2, children=2),
    "prompt_lookup": lambda: PromptLookup(model(0), 4, longest_match=3),
    "suffix": lambda: SuffixDrafter(model(0), 4, factor=2, min_prob=0.1),
    "ngram": lambda: NGramDrafter(model(0), bigrams(), 4),
    "synthetic": lambda: SyntheticDrafter(model(0), 0.5, 4),
    "hybrid of copies and a model": lambda: HybridDrafter(
        PromptLookup(model(0), 4, longest_match=2), ModelDrafter(model(1), 3), 2
    ),
    "hybrid of a model and copies": lambda: HybridDrafter(
        ModelDrafter(model(1), 3, 0.4), SuffixDrafter(model(0), 4, factor=2, min_prob=0.1), 3
    ),
    "hybrid of models": lambda: HybridDrafter(
        SpeculativeDrafter(model(1), PromptLookup(model(0), 2, longest_match=2), 2),
        ModelDrafter(model(2), 4),
        2,
    ),
    "hybrid of a tree and a model": lambda: HybridDrafter(
        ModelTreeDrafter(model(1), nodes=6, window=3, width=2, children=2, min_prob=0.2),
        ModelDrafter(model(2), 3),
        3,
    ),
    "hierarchy of a hybrid": lambda: SpeculativeDrafter(
        model(1),
        HybridDrafter(PromptLookup(model(0), 3, longest_match=2), ModelDrafter(model(2), 2), 2),
        4,
    ),
    "hierarchy of models": lambda: SpeculativeDrafter(model(1), ModelDrafter(model(2), 2), 4),
    "hierarchy of copies": lambda: SpeculativeDrafter(
        model(1), PromptLookup(model(0), 2, longest_match=2), 4
    ),
}


def started(drafter: Drafter, request: Request) -> Drafter:
    if isinstance(drafter, Prepares):
        drafter.prepare(request)
    drafter = drafter.start(request, SESSION)
    return drafter


def branch(draft: Draft, node: int) -> tuple[int, ...]:
    """From the root to this node."""
    return () if node == ROOT else (*branch(draft, draft.parent_list[node]), node)


@pytest.mark.fast("none", "ngram", "hybrid of copies and a model", "hybrid of models")
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_draft_does_not_depend_on_text_that_was_taken_back(name: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (1,), generator=generator))

    request = Request(Source((0, 1)), Limits(2, 60))
    drafter = started(DRAFTERS[name](), request)
    tokens = [0, 1]
    taken_back = 0
    for _ in range(60):
        draft = drafter.propose(tokens)
        fresh = started(DRAFTERS[name](), request)
        assert draft.token_list == fresh.propose(tokens).token_list
        accepted = branch(draft, below(len(draft) + 1) - 1)
        verdict = Verdict(accepted, next_token=below(VOCABULARY))
        drafter.observe(draft, Scores(torch.zeros(len(draft) + 1, VOCABULARY)), verdict)
        tokens = [*tokens, *(draft.token_list[node] for node in accepted), verdict.next_token]
        if len(tokens) > 25 or below(3) == 0:
            tokens = [*tokens[: 2 + below(len(tokens) - 2)], below(VOCABULARY)]
            taken_back += 1
    assert taken_back > 10
