"""A Markov head: each candidate is told the token that it follows, and texts stay the target's
own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods.bita import BitaAdapter, BitaTarget, MaskTokenDrafter, load_bita
from bild_lab.engine.methods.candidate_trees import TREE_BUILDERS, CandidateNode
from bild_lab.engine.methods.markov import MarkovHead, PackedMarkov, markov_for_engine
from bild_lab.engine.methods.medusa import MedusaDrafter, MedusaHeads, heads_for_engine
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.loops import NEVER, autoregressive, finished
from tests.engine.methods.modules.oracle import uncached_masks
from tests.engine.methods.modules.tiny import misled, random_adapter, random_heads
from tests.policies import in_memory
from tests.sessions import needs_kernels
from tests.stubs import uncached
from tests.tiny import START, VOCABULARY, tiny_llama

WIDTHS, LENGTH, RANK = [6, 4, 2], 22, 5
PART = DraftVocabulary(range(0, VOCABULARY, 2))  # some committed tokens are none of these
ENGINES = ["native", "hf", pytest.param("kernels", marks=needs_kernels)]


def plainly(scores: Tensor, markov: MarkovHead, last: int, nodes: list[CandidateNode]) -> list[int]:
    """The tokens of a tree, one node after the other and one product after the other."""
    tokens: list[int] = []
    for node in nodes:
        parent = last if node.parent == ROOT else tokens[node.parent]
        bias = (markov.after * markov.before[parent]).sum(-1) * markov.scale
        tokens.append(int((scores[node.depth] + bias).sort(descending=True).indices[node.rank]))
    return tokens


@torch.inference_mode()
def agreement(
    policy: str, engine: str, tree: str, part: DraftVocabulary | None = None
) -> tuple[int, int]:
    """Rounds that drafted what the plain reference does, and all.

    The text is the target's own; some is accepted.
    """
    module = tiny_llama(4)
    module = module if engine == "kernels" else module.double()
    target, source = in_memory(module, engine), Source((START, 5, 9, 12))
    if policy == "medusa":
        heads = random_heads(module.config, module.lm_head.weight, markov_rank=RANK).to(
            module.dtype
        )
        heads.draft_vocabulary = part
        heads.markov.scale = 0.5
        drafter, markov = (
            MedusaDrafter(target, heads.requires_grad_(False), tree, WIDTHS),
            heads.markov,
        )
    else:
        adapter = (
            random_adapter(module.config, markov_rank=RANK).to(module.dtype).requires_grad_(False)
        )
        masks, markov = uncached_masks(module, adapter), adapter.markov
        markov.scale = 0.5
        adapter.draft_vocabulary = part
        drafter = MaskTokenDrafter(target, adapter, tree, WIDTHS)
    model = target if policy == "medusa" else BitaTarget(target, adapter)
    trace, request = Trace(), Request(source, Limits(len(source.prompt), LENGTH, NEVER))
    text = DraftThenVerify(model, drafter, ExactMatch()).decode(request, trace)
    assert text == autoregressive(
        uncached(module, source), source.prompt, finished(source, LENGTH, NEVER)
    )
    tokens, same = list(source.prompt), 0
    for before, each in zip(trace.rounds, trace.rounds[1:], strict=False):
        tokens += [*text[len(tokens) : len(tokens) + before.accepted], before.next_token]
        if policy == "medusa":
            hidden = module.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
            scores = heads(hidden)
        else:
            scores = masks(tokens[:-1])
        scores = scores if part is None else part.masked(scores)
        depth = min(3, len(source.prompt) + LENGTH - len(tokens))
        same += list(each.drafted) == plainly(
            scores, markov, tokens[-1], TREE_BUILDERS[tree](WIDTHS[:depth])
        )
    assert trace.accepted
    return same, len(trace.rounds) - 1


@pytest.mark.fast(
    "medusa-full_tree-None-native",
    "medusa-full_tree-part2-hf",
    "medusa-full_tree-part2-kernels",
    "bita-efficient_tree-None-kernels",
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("tree", "part"), [("full_tree", None), ("efficient_tree", None), ("full_tree", PART)]
)
@pytest.mark.parametrize("policy", ["medusa", "bita"])
def test_each_candidate_is_likely_after_its_parent(
    policy: str, tree: str, part: DraftVocabulary | None, engine: str
) -> None:
    same, rounds = agreement(policy, engine, tree, part)
    assert same == rounds > 5


@pytest.mark.parametrize("policy", ["medusa", "bita"])
def test_a_head_that_gets_the_wrong_token_drafts_others_and_changes_no_text(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    misled(monkeypatch)
    same, rounds = agreement(policy, "native", "full_tree")
    assert same < rounds


@needs_kernels
def test_heads_in_a_precision_that_the_kernels_do_not_read_run_by_pytorch() -> None:
    module = tiny_llama(4)
    target = in_memory(module, "kernels")
    heads = random_heads(module.config, module.lm_head.weight, markov_rank=RANK)
    assert isinstance(markov_for_engine(target, heads.markov), PackedMarkov)
    half = heads.half()
    assert markov_for_engine(target, half.markov) is half.markov
    assert isinstance(heads_for_engine(target, half), MedusaHeads)


def test_a_fresh_head_changes_nothing_and_has_a_rank() -> None:
    assert not MarkovHead(VOCABULARY, RANK)(torch.arange(4)).any()
    module = tiny_llama(4)
    with pytest.raises(UserError, match="module.markov_rank must be a whole number >= 0, got -1"):
        MedusaHeads.fresh(module.config, module.lm_head.weight, {}, 3, markov_rank=-1)


@pytest.mark.parametrize("rank", [0, RANK])
def test_an_adapters_head_comes_back_from_its_folder(rank: int, tmp_path: Path) -> None:
    module = tiny_llama(4)
    adapter = random_adapter(module.config, markov_rank=rank)
    adapter.save(tmp_path)
    assert BitaAdapter.load(tmp_path).config == adapter.config
    markov = load_bita(in_memory(module, "native"), str(tmp_path)).markov
    assert (markov is None) == (not rank)
    if markov is not None:
        assert torch.equal(markov.after, adapter.markov.after) and torch.equal(
            markov.before, adapter.markov.before
        )
