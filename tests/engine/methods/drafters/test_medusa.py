"""Medusa's drafts are what its heads say of the last token that stands, and the text is the
target's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bild_lab.engine.batch_decoding import decode_batch
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods import medusa
from bild_lab.engine.methods.medusa import MedusaDrafter, MedusaHeads, heads_for_engine
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import OutputSpec
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.cost import total_cost
from bild_lab.lab.point.load import load
from tests import tiny_architectures
from tests.engine.loops import NEVER, autoregressive, finished
from tests.engine.methods.modules.tiny import random_adapter, random_heads
from tests.policies import in_memory
from tests.sessions import needs_kernels
from tests.stubs import uncached
from tests.tiny import START, VOCABULARY, tiny_llama

WIDTHS, LENGTH = [8, 4, 2], 12
PART = DraftVocabulary(range(0, VOCABULARY, 2))


@pytest.mark.fast("native-full_tree-False-all", "hf-efficient_tree-True-all")
@pytest.mark.parametrize("part", [None, PART], ids=["all", "part"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tree", ["full_tree", "efficient_tree"])
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_proposals_are_those_of_the_heads_without_a_cache(
    engine: str, tree: str, shared: bool, part: DraftVocabulary | None
) -> None:
    module = tiny_llama(4).double()
    heads = (
        random_heads(module.config, module.lm_head.weight, shared=shared)
        .double()
        .requires_grad_(False)
    )
    source, target = Source((START, 5, 9, 12)), in_memory(module, engine)
    trace, request = Trace(), Request(source, Limits(len(source.prompt), 22, NEVER))
    heads.draft_vocabulary = part
    drafter = MedusaDrafter(target, heads, tree, WIDTHS)
    actual = DraftThenVerify(target, drafter, ExactMatch()).decode(request, trace)
    assert actual == autoregressive(
        uncached(module, source), source.prompt, finished(source, 22, NEVER)
    )
    tokens = list(source.prompt)
    assert trace.rounds[0].drafted == ()
    for before, each in zip(trace.rounds, trace.rounds[1:], strict=False):
        tokens += [*path_of(actual, tokens, before.accepted), before.next_token]
        with torch.inference_mode():
            hidden = module.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
            scores = heads(hidden) if part is None else part.masked(heads(hidden))
            levels = [
                row.topk(width).indices.tolist() for row, width in zip(scores, WIDTHS, strict=True)
            ]
        depth = min(3, len(source.prompt) + 22 - len(tokens))
        times, expected = 1, []
        for level in levels[:depth]:
            expected += level * times
            times *= len(level) if tree == "full_tree" else 1
        assert list(each.drafted) == expected
    assert trace.accepted > 3


@pytest.mark.parametrize("shared", [False, True])
def test_no_id_without_a_token_is_drafted(shared: bool) -> None:
    module = tiny_llama(4)
    heads = random_heads(module.config, module.lm_head.weight, shared=shared).requires_grad_(False)
    request = Request(Source((START, 5, 9)), Limits(3, 22, NEVER))
    half = tuple(range(20))
    for without in ((), half):
        target, trace = in_memory(module, "native"), Trace()
        vars(target.checkpoint)["ids_without_token"] = without
        drafter = MedusaDrafter(target, heads, "efficient_tree", WIDTHS)
        DraftThenVerify(target, drafter, ExactMatch()).decode(request, trace)
        drafted = {token for one in trace.rounds for token in one.drafted}
        assert drafted and drafted.isdisjoint(half) == bool(without)


@torch.no_grad()
@pytest.mark.parametrize("part", [None, PART], ids=["all", "part"])
def test_heads_with_the_targets_matrix_score_as_the_target_does(
    part: DraftVocabulary | None,
) -> None:
    module = tiny_architectures.with_marked_head("phi")  # whose head has a bias
    heads = MedusaHeads.fresh(module.config, module.lm_head.weight, {}, heads=1, shared=True)
    heads.draft_vocabulary, target = part, in_memory(module, "hf")
    source, output_spec = Source((START, 5, 9)), OutputSpec(head_input=True)
    scores = target.start(source, 12).extend([9], output_spec)
    expected = scores.logits if part is None else scores.logits[:, part.tokens]
    drafting_scores = heads_for_engine(target, heads)(scores.head_input)[0]
    torch.testing.assert_close(drafting_scores, expected)


def test_a_checkpoint_that_reads_images_too_drafts_by_heads(tmp_path: Path) -> None:
    """Planted: the sizes of its text model are in a part of its configuration."""
    module, tokenizer = tiny_architectures.build("qwen2_5_vl"), tiny_architectures.word_tokenizer()
    sizes = module.config.text_config
    random_heads(sizes, module.lm_head.weight).save(tmp_path / "heads")
    random_adapter(sizes).save(tmp_path / "adapter")
    policies = {
        "vanilla": {},
        "ppd": {},
        "medusa": {"heads": str(tmp_path / "heads"), "top_k": [3, 2]},
        "bita": {"adapter": str(tmp_path / "adapter"), "top_k": [1, 2, 2]},
    }
    texts = [
        load((module, tokenizer), policy=name, **knobs).generate("w5 w9 w12", LENGTH).token_ids
        for name, knobs in policies.items()
    ]
    assert texts[1:] == texts[:1] * 3


def path_of(text: list[int], tokens: list[int], accepted: int) -> list[int]:
    """The drafted tokens that stood in a round."""
    return text[len(tokens) : len(tokens) + accepted]


def test_fewer_heads_than_were_trained_may_draft() -> None:
    module = tiny_llama(4)
    heads = random_heads(module.config, module.lm_head.weight).requires_grad_(False)
    source, target = Source((START, 5)), in_memory(module, "native")
    trace, request = Trace(), Request(source, Limits(2, 6, NEVER))
    DraftThenVerify(target, MedusaDrafter(target, heads, "full_tree", [4]), ExactMatch()).decode(
        request, trace
    )
    assert [len(each.drafted) for each in trace.rounds[1:3]] == [4, 4]


def test_a_draft_vocabulary_bounds_the_candidates_of_every_tree() -> None:
    """Fault: ten candidates are asked of a head of two tokens, as a tree that is fitted would."""
    heads = random_heads(tiny_llama(4).config, tiny_llama(4).lm_head.weight)
    heads.draft_vocabulary, target = DraftVocabulary([3, 4]), in_memory(tiny_llama(4), "native")
    assert MedusaDrafter(target, heads, "full_tree", 2).vocabulary_size == 2
    with pytest.raises(UserError, match=r"top_k.* 2"):
        MedusaDrafter(target, heads, "full_tree", 3)


@pytest.mark.parametrize("shared", [False, True])
def test_every_round_counts_one_product_with_each_heads_matrix(shared: bool) -> None:
    """A shared one is read once, for a row of each head."""
    module = tiny_llama(4)
    heads = random_heads(module.config, module.lm_head.weight, shared=shared).requires_grad_(False)
    target, trace = in_memory(module, "native"), Trace()
    DraftThenVerify(target, MedusaDrafter(target, heads, "full_tree", 2), ExactMatch()).decode(
        Request(Source((START, 5)), Limits(2, 6, NEVER)), trace
    )
    products = [total_cost([each], 4).flops for each in trace.forwards if each.layers == 0]
    one = 2 * 32 * VOCABULARY
    assert products == ([3 * one] if shared else [one] * 3) * len(trace.rounds)


@pytest.mark.fast("False-part", "True-all")
@needs_kernels
@pytest.mark.parametrize("part", [None, PART], ids=["all", "part"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_kernels_draft_what_pytorch_drafts_and_pack_heads_once_for_all_texts(
    shared: bool, part: DraftVocabulary | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, packed = tiny_llama(4), []
    made = medusa.PackedHeads
    monkeypatch.setattr(medusa, "PackedHeads", lambda *each: packed.append(each) or made(*each))
    drafted = {}
    for engine in ("native", "kernels"):
        heads = random_heads(module.config, module.lm_head.weight, shared=shared).requires_grad_(
            False
        )
        target = in_memory(module, engine)
        heads.draft_vocabulary = part
        method = DraftThenVerify(
            target, MedusaDrafter(target, heads, "full_tree", WIDTHS), ExactMatch()
        )
        requests = [
            Request(Source((START, first)), Limits(2, 12, NEVER)) for first in (5, 9, 12, 7)
        ]
        texts = [text for _ in range(2) for text in decode_batch(method, requests, Batch(2))]
        drafted[engine] = [[each.drafted for each in text.trace.rounds] for text in texts]
    assert drafted["kernels"] == drafted["native"] and any(map(any, drafted["native"]))
    assert len(packed) == 1
