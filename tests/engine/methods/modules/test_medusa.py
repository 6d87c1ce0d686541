"""Medusa's heads: what they compute, their folder, and whom they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, silu

from bild_lab.engine.methods.medusa import MedusaHeads
from bild_lab.errors import UserError
from tests.engine.methods.modules.tiny import random_heads
from tests.policies import load
from tests.tiny import tiny_llama, tiny_t5

MODEL = tiny_llama(0)


@pytest.mark.parametrize("shared", [False, True])
def test_fresh_heads_say_what_the_models_own_head_says(shared: bool) -> None:
    heads = MedusaHeads.fresh(
        MODEL.config, MODEL.lm_head.weight, {}, heads=2, layers=3, shared=shared
    )
    hidden = torch.randn(4, 5, 32)
    own = MODEL.lm_head(hidden)
    torch.testing.assert_close(heads(hidden), torch.stack([own, own]))


@pytest.mark.parametrize("shared", [False, True])
def test_each_head_is_residual_blocks_and_a_matrix(shared: bool) -> None:
    heads = random_heads(MODEL.config, MODEL.lm_head.weight, shared=shared)
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    for index, logits in enumerate(heads(hidden)):
        x = hidden + silu(linear(hidden, heads.blocks[index, 0], heads.biases[index, 0]))
        end = MODEL.lm_head.weight if shared else heads.outputs[index]
        torch.testing.assert_close(logits, linear(x, end), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(heads(hidden[2]), heads(hidden)[:, 2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_heads_come_back_from_their_folder(shared: bool, tmp_path: Path) -> None:
    saved = random_heads(MODEL.config, MODEL.lm_head.weight, shared=shared)
    saved.save(tmp_path)
    again = MedusaHeads.load(tmp_path)
    if shared:
        again.attach(MODEL.lm_head.weight[None])
    assert again.config == saved.config
    assert set(again.state_dict()) == {"blocks", "biases"} | (set() if shared else {"outputs"})
    hidden = torch.randn(2, 32)
    assert torch.equal(again(hidden), saved(hidden))


def test_what_heads_cannot_be_made_of_is_refused(tmp_path: Path, checkpoints: Path) -> None:
    with pytest.raises(
        UserError, match="Medusa needs a decoder-only model, got the encoder–decoder t5"
    ):
        MedusaHeads.fresh(tiny_t5(0).config, MODEL.lm_head.weight, {}, 3)
    with pytest.raises(UserError, match="module.heads must be a whole number >= 1, got 0"):
        MedusaHeads.fresh(MODEL.config, MODEL.lm_head.weight, {}, 0)
    with pytest.raises(
        UserError,
        match="layers must be a whole number >= 1, got 0; heads without blocks that share",
    ):
        MedusaHeads.fresh(MODEL.config, MODEL.lm_head.weight, {}, 3, layers=0, shared=True)
    with pytest.raises(UserError, match="is no folder of Medusa heads: it needs heads_config.json"):
        MedusaHeads.load(tmp_path)
    with pytest.raises(
        UserError, match=r"needs a folder of Medusa heads; .*train_module.py module=medusa"
    ):
        load(checkpoints, "llama", "medusa", heads=None)
    random_heads(MODEL.config, torch.zeros(50, 32)).save(tmp_path)
    with pytest.raises(UserError, match="whose vocabulary is 50, but the target's is 40"):
        load(checkpoints, "llama", "medusa", heads=str(tmp_path))
    with pytest.raises(UserError, match="needs a decoder-only model, got the encoder–decoder t5"):
        load(checkpoints, "t5", "medusa", heads=str(tmp_path))
    MedusaHeads.fresh(MODEL.config, MODEL.lm_head.weight, {"fingerprint": "other weights"}, 3).save(
        tmp_path
    )
    with pytest.raises(
        UserError, match="trained for another model, whose weights are not those of .*llama"
    ):
        load(checkpoints, "llama", "medusa", heads=str(tmp_path))
    with pytest.raises(
        UserError,
        match=(
            "tree must be one of efficient_tree, full_tree, narrowing_tree, mc_sim_7b_63 or the file"
            " of .*, got 'chain'"
        ),
    ):
        load(checkpoints, "llama", "medusa", tree="chain")
    with pytest.raises(UserError, match="top_k must give a width for 1 to 3 depths"):
        load(checkpoints, "llama", "medusa", top_k=[])
