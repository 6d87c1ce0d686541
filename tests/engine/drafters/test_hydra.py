"""Hydra drafts what its heads say of the target's last state and the tokens before; the text is the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import HydraDrafter
from bild_lab.engine.heads import HydraHeads
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Growth
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.drafters.naive import drafted, grown, hydra_behind, texts_before
from tests.engine.heads.tiny import random_hydra
from tests.engine.models.test_states import ENCODED
from tests.engine.test_decode import NEVER, autoregressive, finished
from tests.policies import in_memory, load
from tests.stubs import uncached
from tests.thinned import thinned
from tests.tiny import PAD, START, tiny_llama, tiny_t5

LENGTH = 16


CASES = [
    (family, engine, tree)
    for tree in ("full_tree", "dynamic", "chain")
    for family, engine in (("llama", "native"), ("t5", "hf"), ("t5", "native"), ("llama", "hf"))
]


@torch.inference_mode()
@pytest.mark.parametrize(("family", "engine", "tree"), thinned(CASES, 7))
def test_proposals_are_those_of_the_papers_heads(family: str, engine: str, tree: str) -> None:
    module = (tiny_t5(4, layers=3) if family == "t5" else tiny_llama(4, layers=3)).double()
    heads = random_hydra(module.config, layers=2).double().requires_grad_(False)
    source = Source((PAD,), ENCODED) if family == "t5" else Source((START, 5, 9, 12))
    trace, request = Trace(), Request(source, Limits(len(source.prompt), LENGTH, NEVER))
    drafter = HydraDrafter(in_memory(module, engine), heads, tree, 6, top_k=[3, 2, 2], nodes=9, width=3)
    actual = DraftThenVerify(in_memory(module, engine), drafter, ExactMatch()).decode(request, trace)
    assert actual == autoregressive(uncached(module, source), source.prompt, finished(source, LENGTH, NEVER))
    assert trace.rounds[0].drafted == ()
    for text, each in texts_before(trace.rounds, actual, len(source.prompt)):
        depth, behind = min(3, len(source.prompt) + LENGTH - len(text)), hydra_behind(heads, module, text)
        assert each.depth <= depth and each.draft_calls <= depth
        if tree == "dynamic":
            assert list(each.drafted) == grown(behind, Growth(9, depth, 3, 3, NEVER))
        else:
            assert list(each.drafted) == drafted(behind, tree, [3, 2, 2], 3, depth)


def test_heads_come_back_from_their_folder_and_misfits_are_refused(tmp_path: Path, checkpoints: Path) -> None:
    config = tiny_llama(0).config
    saved = random_hydra(config, layers=2)
    saved.save(tmp_path / "hydra")
    again = HydraHeads.load(tmp_path / "hydra")
    assert again.config == saved.config
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), saved.parameters(), strict=True))
    with pytest.raises(UserError, match=r"needs a folder of Hydra heads; .*train_module.py module=hydra"):
        load(checkpoints, "llama", "hydra", heads=None)
    with pytest.raises(
        UserError, match="is no folder of Hydra heads: it needs heads.safetensors and hydra_config.json"
    ):
        load(checkpoints, "llama", "hydra", heads=str(tmp_path))
    with pytest.raises(UserError, match="module.layers must be a whole number >= 1, got 0; Hydra's first block"):
        random_hydra(config, layers=0)
    HydraHeads.fresh(config, torch.zeros(40, 32), {"fingerprint": "other weights"}, 2).save(tmp_path / "other")
    with pytest.raises(UserError, match="trained for another model, whose weights are not those of .*llama"):
        load(checkpoints, "llama", "hydra", heads=str(tmp_path / "other"))
