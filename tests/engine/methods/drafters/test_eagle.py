"""EAGLE drafts what its layer says of the target's own states, and the text is the target's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Tree
from bild_lab.engine.methods.eagle.drafter import EagleDrafter, EagleSession
from bild_lab.engine.methods.eagle.module import EAGLE, EAGLE3
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.models.hf.own_scores import scores_of_outputs
from bild_lab.engine.models.native.layers import SPARE_ROWS
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import OutputSpec, Rows, TreeSpec
from bild_lab.engine.trace import Trace
from tests import tiny_architectures
from tests.engine.loops import NEVER, autoregressive, finished
from tests.engine.methods.drafters.naive import drafted, eagle_behind, grown, texts_before
from tests.engine.methods.modules.tiny import random_eagle
from tests.engine.models.test_states import ENCODED
from tests.policies import in_memory
from tests.stubs import uncached
from tests.tiny import PAD, START, VOCABULARY, tiny_llama, tiny_t5

LENGTH = 12

CASES = [
    (variant, family, engine, tree)
    for tree in ("chain", "dynamic", "eagle_tree")
    for engine in ("native", "hf")
    for variant, family in ((EAGLE3, "t5"), (EAGLE, "llama"), (EAGLE3, "llama"), (EAGLE, "t5"))
]


@pytest.mark.fast("eagle3-t5-native-chain", "eagle-llama-native-dynamic")
@pytest.mark.parametrize(("variant", "family", "engine", "tree"), CASES)
def test_proposals_are_those_of_the_papers_layer_without_a_cache(
    variant: str, family: str, engine: str, tree: str
) -> None:
    module = (tiny_t5(4, layers=3) if family == "t5" else tiny_llama(4, layers=3)).double()
    eagle = (
        random_eagle(variant, module.config, known=20 if variant == EAGLE3 else None)
        .double()
        .requires_grad_(False)
    )
    source = Source((PAD,), ENCODED) if family == "t5" else Source((START, 5, 9, 12))
    trace, request = Trace(), Request(source, Limits(len(source.prompt), LENGTH, NEVER))
    drafter = EagleDrafter(in_memory(module, engine), eagle, tree, 4, nodes=6, width=2, children=3)
    actual = DraftThenVerify(in_memory(module, engine), drafter, ExactMatch()).decode(
        request, trace
    )
    expected = autoregressive(
        uncached(module, source), source.prompt, finished(source, LENGTH, NEVER)
    )
    assert actual == expected
    assert trace.rounds[0].drafted == ()
    for text, each in texts_before(trace.rounds, actual, len(source.prompt)):
        depth, behind = (
            min(4, len(source.prompt) + LENGTH - len(text)),
            eagle_behind(eagle, module, text),
        )
        if tree == "dynamic":
            assert list(each.drafted) == grown(behind, TreeSpec(6, depth, 2, 3, NEVER))
        else:
            assert list(each.drafted) == drafted(behind, tree, 2, 4, depth)
    # of random layers, by chance
    assert trace.accepted > 0 or tree == "chain" or (variant, family) == (EAGLE, "t5")


@pytest.mark.parametrize("room", range(1, 6))
def test_the_cache_grows_where_rows_have_no_room(room: int) -> None:
    module = tiny_llama(4)
    eagle = random_eagle(EAGLE, module.config).requires_grad_(False)
    eagle.attach(module.model.embed_tokens.weight.detach(), module.lm_head.weight.detach())
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for spare in (100, room - SPARE_ROWS):
        session = EagleSession(eagle, spare, [])
        session.receive(states)
        session.extend([5, 9, 12])
        found.append(session.extend(Rows([7, 8], Tree(torch.tensor([-1, -1])))).logits)
    torch.testing.assert_close(*found)


def test_no_id_without_a_token_is_drafted() -> None:
    module = tiny_llama(4, layers=3)
    eagle = random_eagle(EAGLE, module.config).requires_grad_(False)
    request = Request(Source((START, 5, 9)), Limits(3, LENGTH, NEVER))
    half = tuple(range(20))
    for without in ((), half):
        target, trace = in_memory(module, "native"), Trace()
        vars(target.checkpoint)["ids_without_token"] = without
        drafter = EagleDrafter(target, eagle, "dynamic", 4)
        DraftThenVerify(target, drafter, ExactMatch()).decode(request, trace)
        drafted = {token for one in trace.rounds for token in one.drafted}
        assert drafted and drafted.isdisjoint(half) == bool(without)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["granite", "cohere", "gemma2", "minicpm3", "opt", "phi", "llama4_text", "t5gemma", "marian"],
)
def test_eagle_1_makes_of_the_heads_products_what_the_target_makes(name: str) -> None:
    """A part of them in a Granite and a Cohere, no more than a cap in a Gemma 2 and a T5Gemma, with a
    bias in a Phi and a Marian, and they themselves where the head reads a part of the states.
    """
    module = tiny_architectures.with_marked_head(name)
    text = module.config.get_text_config(decoder=True)
    target, eagle = in_memory(module, "hf"), random_eagle(EAGLE, text)
    encoded = ENCODED if module.config.is_encoder_decoder else None
    session = target.start(Source((START, 5, 9), encoded), LENGTH)
    scores = session.extend([9], OutputSpec(head_input=True))
    drafting_scores = eagle.attach_to(target).logits(scores.head_input)
    torch.testing.assert_close(drafting_scores, scores.logits)


def test_what_a_model_has_before_its_head_takes_nothing_from_the_heads_products() -> None:
    """Planted: rows of another width than that of the model's states, which a layer there refuses."""
    module = tiny_architectures.build("modernbert-decoder").bfloat16()
    head_rows = torch.randn(2, VOCABULARY)
    assert torch.equal(scores_of_outputs(module, head_rows), head_rows)


def test_only_states_that_the_variant_reads_are_asked_of_the_target() -> None:
    module = tiny_llama(4, layers=3)
    for variant, expected in (
        (EAGLE, OutputSpec(head_input=True, prompt=True)),
        (EAGLE3, OutputSpec(prompt=True)),
    ):
        eagle = random_eagle(variant, module.config)
        drafter = EagleDrafter(in_memory(module, "native"), eagle, "chain", 4)
        assert drafter.required_outputs == replace(expected, hidden=eagle.config.target_layers)


def test_forwards_of_the_layer_are_counted() -> None:
    module = tiny_llama(4)
    eagle = random_eagle(EAGLE, module.config).requires_grad_(False)
    target, trace = in_memory(module, "native"), Trace()
    drafter = EagleDrafter(target, eagle, "full_tree", 3, [2, 2])
    request = Request(Source((START, 5, 9)), Limits(3, 4, NEVER))
    DraftThenVerify(target, drafter, ExactMatch()).decode(request, trace)
    ours = [one for one in trace.forwards if one.config is eagle.config.layer]
    assert [(one.rows, one.cached, one.scored) for one in ours[:2]] == [(3, 0, 1), (2, 3, 2)]
    assert sum(each.draft_calls for each in trace.rounds) == len(ours)
