"""Dropout where an architecture has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bild_lab.errors import UserError
from bild_lab.training.finetuning.finetune import finetune
from bild_lab.training.finetuning.residual_dropout import add_residual_dropout
from tests.tiny import tiny_llama, tiny_t5
from tests.training.frozen.frozen_jobs import frozen_job
from tests.training.jobs import LLAMA, MICRO, Kill, job, losses

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


def test_a_share_of_what_each_sub_layer_adds_is_dropped_while_the_model_trains() -> None:
    model = tiny_llama(0)
    before = model(IDS).logits
    add_residual_dropout(model, 0.25)
    assert torch.equal(model(IDS).logits, before)  # decoding is as it was
    seen = {}
    wanted = ("embed_tokens", "o_proj", "down_proj")
    for name, module in model.named_modules():
        if name.endswith(wanted):
            module.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output}))
    model.train()
    model(IDS.repeat(40, 20))
    assert len(seen) == 1 + 2 * model.config.num_hidden_layers
    for output in seen.values():
        assert (output == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.manual_seed(0)
    first = model(IDS).logits
    torch.manual_seed(0)
    assert torch.equal(model(IDS).logits, first) and not torch.equal(model(IDS).logits, first)


def test_without_it_nothing_is_hooked() -> None:
    model = tiny_t5(0)
    add_residual_dropout(model, 0)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_architecture_with_other_sub_layers_is_told_of_its_own_dropout() -> None:
    with pytest.raises(UserError, match=r"o_proj and down_proj, such as Llama's; T5ForCond.*\.dropout_rate=0\.1"):
        add_residual_dropout(tiny_t5(0), 0.1)


def test_a_killed_training_resumes_with_the_same_drops(tmp_path: Path) -> None:
    plain, whole = (finetune(job(tmp_path / str(share), model=LLAMA, residual_dropout=share)) for share in (0.0, 0.3))
    assert "train.residual_dropout" not in plain["identity"]  # so that trainings from before are the same
    assert whole["identity"]["train.residual_dropout"] == 0.3 and losses(whole) != losses(plain)
    with pytest.raises(KeyboardInterrupt):
        finetune(job(tmp_path / "killed", model=LLAMA, residual_dropout=0.3, callbacks=(Kill(4),)))
    assert losses(finetune(job(tmp_path / "killed", model=LLAMA, residual_dropout=0.3))) == losses(whole)


def test_it_is_a_share_and_not_for_frozen_models(tmp_path: Path, checkpoints: Path) -> None:
    with pytest.raises(UserError, match=r"train\.residual_dropout must be a number in \[0, 1\), got 1"):
        type(MICRO)(**{**MICRO.__dict__, "residual_dropout": 1})
    with pytest.raises(UserError, match=r"train\.residual_dropout is for models that are trained"):
        frozen_job(tmp_path, checkpoints / "llama", residual_dropout=0.1)
