"""A draft model that proposes only what both vocabularies have."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Tree
from bild_lab.engine.methods.lookup.prompt_lookup import PromptLookup
from bild_lab.engine.methods.speculative.combined_drafters import SpeculativeDrafter
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.draft_tree import ModelTreeDrafter
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import OutputSpec, Rows
from bild_lab.engine.trace import Trace
from bild_lab.engine.vocabularies.intersection import IntersectionSession
from bild_lab.engine.vocabularies.translated import TranslatedModel
from bild_lab.errors import UserError
from tests.engine.methods.drafters.chances import by_context, require_targets_distribution
from tests.stubs import NextLogits, StubModel

# target tokens 0 and 1 are the draft model's 2 and 0; it writes the target's 2 with two tokens and
# 3 with three
SHARED = {0: 2, 1: 0}
STANDING = {0: [2], 1: [0], 2: [1, 1], 3: [1, 3, 1]}
OWN_PROMPT = (3, 1, 2)


class Fake:
    """An overlap of made-up vocabularies."""

    shared, width = SHARED, 4
    draft = SimpleNamespace(path="small")

    most_draft_tokens = 3

    def draft_tokens(self, token: int) -> list[int]:
        return STANDING[token]

    def source(self, source: Source, most: int | None = None) -> Source:
        return Source(OWN_PROMPT)


class Small(StubModel):
    source_positions = session_positions = None


def mixed(seed: int, width: int = 4) -> NextLogits:
    """Every token of the text matters, so that a stale cache would too."""
    table = torch.randn(61, width, generator=torch.Generator().manual_seed(seed)).double()
    return lambda tokens: table[sum((at + 1) * (token + 1) for at, token in enumerate(tokens)) % 61]


def session(small: StubModel, positions: int | None = None) -> IntersectionSession:
    own = Source(OWN_PROMPT)
    return IntersectionSession(small.start(own, 99), Fake(), Source((0, 3)), own, positions)


def expected(next_logits: NextLogits, text: list[int]) -> Tensor:
    """The scores behind the prompt and this text, of shared tokens only."""
    own = [*OWN_PROMPT, *itertools.chain.from_iterable(STANDING[token] for token in text)]
    scores = torch.full((4,), float("-inf"), dtype=torch.float64)
    for ours, theirs in SHARED.items():
        scores[ours] = next_logits(own)[theirs]
    return scores


def test_scores_are_the_draft_models_own_whatever_is_committed_and_taken_back() -> None:
    next_logits, chance = mixed(0), random.Random(0)
    small = Small(next_logits)
    one = session(small)
    # the prompt's last token
    assert torch.equal(one.extend([3]).logits[0], expected(next_logits, []))
    text: list[int] = []
    for _ in range(200):
        new = [chance.randrange(4) for _ in range(chance.randint(1, 4))]
        assert one.length == 2 + len(text)
        wanted = chance.randint(1, len(new))
        logits = one.extend(new, OutputSpec(logits=wanted)).logits
        text += new
        for place, row in enumerate(logits, start=len(text) - wanted + 1):
            assert torch.equal(row, expected(next_logits, text[:place]))
        text = text[: chance.randint(max(0, len(text) - 6), len(text))] if len(text) < 20 else []
        one.rollback(2 + len(text))
    assert len(small.fed) > 600


def test_a_tree_may_hold_tokens_of_any_length_and_one_branch_is_kept() -> None:
    next_logits, chance = mixed(1), random.Random(1)
    for _ in range(40):
        one, text = session(Small(next_logits)), [chance.randrange(4) for _ in range(3)]
        one.extend([3, *text])
        tokens = [chance.randrange(4) for _ in range(5)]
        parents = [ROOT, *(chance.randint(ROOT, at - 1) for at in range(1, 5))]
        first = chance.randint(1, 4)  # rows of the tree that run before the others
        one.extend(Rows(tokens[:first], Tree(torch.tensor(parents[:first]))))
        logits = one.extend(Rows(tokens[first:], Tree(torch.tensor(parents)))).logits
        paths = [path_to(node, parents) for node in range(5)]
        for node, row in zip(range(first, 5), logits, strict=True):
            assert torch.equal(
                row, expected(next_logits, [*text, *(tokens[at] for at in paths[node])])
            )
        path = chance.choice([[], *paths])
        one.keep(path)
        text += [tokens[at] for at in path]
        assert one.length == 2 + len(text)
        last = one.extend([2]).logits[-1]
        assert torch.equal(last, expected(next_logits, [*text, 2]))
        one.rollback(1 + len(text))
        again = one.extend([text[-1], 1]).logits[-1]
        assert torch.equal(again, expected(next_logits, [*text, 1]))


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node == ROOT else [*path_to(parents[node], parents), node]


# of every shared token, the target's probability over the draft model's is 1/2, at least 1, or 0;
# the draft model also has tokens that are not shared, and so has the target
TARGET = ([1 / 2, 1 / 4, 1 / 4, 0], [1 / 2, 1 / 4, 0, 1 / 4], [1 / 2, 1 / 2, 0, 0])
# its token 2 is our 0
DRAFT = ([1 / 8, 1 / 2, 1 / 8, 1 / 4], [0, 1 / 4, 1 / 2, 1 / 4], [3 / 8, 1 / 8, 3 / 8, 1 / 8])
NEW_TOKENS = 3
# in whatever order the siblings of a tree are tried, each is accepted with probability 0, 1/2 or 1
HALVED_TARGET = (
    [1 / 2, 1 / 2, 0, 0],
    [1 / 2, 0, 1 / 2, 0],
    [0, 1 / 2, 0, 1 / 2],
    [0, 0, 1 / 2, 1 / 2],
)


def small_model() -> TranslatedModel:
    return TranslatedModel(Small(by_context(DRAFT)), Fake())


def short_hierarchy() -> SpeculativeDrafter:
    """Its middle model's positions end within a text, for the inner drafter's longer tokens first."""
    middle = small_model()
    middle.model.session_positions = 6
    return SpeculativeDrafter(middle, ModelDrafter(StubModel(by_context(TARGET)), 1), 2)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "fixed": lambda: ModelDrafter(small_model(), 2),
    "confidence": lambda: ModelDrafter(small_model(), 3, 0.55),
    "hierarchy": lambda: SpeculativeDrafter(small_model(), ModelDrafter(small_model(), 1), 2),
    "short hierarchy": short_hierarchy,
}


@pytest.mark.fast("fixed")
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_text_is_exactly_distributed_as_the_targets(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_distribution(DRAFTERS[name](), TARGET, NEW_TOKENS, monkeypatch)


@pytest.mark.slow
def test_sampled_text_of_trees_is_exactly_distributed_as_the_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = ModelTreeDrafter(small_model(), nodes=3, window=2, width=2, children=2)
    require_distribution(tree, HALVED_TARGET, 2, monkeypatch)


def require_distribution(
    drafter: Drafter,
    rows: tuple[list[float], ...],
    new_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every text has the probability that a target of these rows gives it."""
    method = DraftThenVerify(StubModel(by_context(rows)), drafter, SpeculativeSampling())
    traces = require_targets_distribution(method, by_context(rows), (0, 3), new_tokens, monkeypatch)
    assert any(trace.accepted for several in traces.values() for trace in several)
    assert any(token > 1 for text in traces for token in text[2:-1]), "tokens that are not shared"


def test_drafts_are_drawn_from_the_shared_tokens_alone() -> None:
    drafter = ModelDrafter(small_model(), 4, keeps_probs=True)
    request = Request(Source((0, 3)), Limits(2, 9), Sampling(1.0), torch.Generator().manual_seed(0))
    drafter = drafter.start(request, StubModel(by_context(TARGET)).start(request.source, 9))
    draft = drafter.propose([0, 3])
    assert set(draft.token_list) <= set(SHARED)
    assert draft.probs[:, 2:].sum() == 0
    assert torch.allclose(draft.probs.sum(-1), torch.ones(4, dtype=torch.float64))
    own = by_context(DRAFT)(list(OWN_PROMPT)).exp()
    torch.testing.assert_close(draft.probs[0, :2], own[[2, 0]] / own[[2, 0]].sum())


@pytest.mark.parametrize("processors", [None, LogitsProcessorList()], ids=["none", "processed"])
@pytest.mark.parametrize("shape", ["chain", "tree", "hierarchy", "hierarchy of copies"])
def test_nothing_is_drafted_where_the_draft_models_positions_end(
    shape: str, processors: LogitsProcessorList | None
) -> None:
    """Fault: with processors, and in a hierarchy, the text ended there in a refusal."""
    small = Small(mixed(2))
    small.session_positions = 14
    target = StubModel(mixed(3))
    translated = TranslatedModel(small, Fake())
    drafter: Drafter = ModelDrafter(translated, 3)
    if shape == "tree":
        drafter = ModelTreeDrafter(translated, nodes=3, window=3, width=1, children=1)
    elif shape == "hierarchy":
        inner_model = TranslatedModel(Small(mixed(5)), Fake())
        drafter = SpeculativeDrafter(translated, ModelDrafter(inner_model, 2), 3)
    elif shape == "hierarchy of copies":
        copies = PromptLookup(translated, 3, longest_match=2)
        drafter = SpeculativeDrafter(translated, copies, 3)
    source = Source((0, 3), processors=processors)
    trace, request = Trace(), Request(source, Limits(2, 30))
    text = DraftThenVerify(target, drafter, SpeculativeSampling()).decode(request, trace)
    assert len(text) == 32
    assert trace.rounds[0].drafted and not trace.rounds[-1].drafted
    lengths = [len(one.drafted) for one in trace.rounds]
    assert all(lengths[: lengths.index(0)]) and not any(lengths[lengths.index(0) :])


def test_rows_of_layers_and_hidden_states_are_refused() -> None:
    one = session(Small(mixed(0)))
    for output_spec in (
        OutputSpec(hidden=(1,)),
        OutputSpec(head_input=True),
        OutputSpec(layers=[0]),
    ):
        with pytest.raises(
            UserError, match="small has another vocabulary than the target and drafts by its scores"
        ):
            one.extend([3], output_spec)
    with pytest.raises(
        UserError, match="reads at most 4 tokens, and in its vocabulary the text has more"
    ):
        session(Small(mixed(0)), positions=4).extend([3, 3, 3])
