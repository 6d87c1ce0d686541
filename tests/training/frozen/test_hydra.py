"""Hydra heads: training reads what decoding reads, and they learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bild_lab.engine.adapters import HydraHeads
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.training.frozen.hydra import HydraModule, HydraSpec
from bild_lab.training.frozen.train import train_module
from scripts import train_medusa
from tests.engine.adapters.tiny import random_hydra
from tests.engine.drafters.naive import hydra_behind
from tests.engine.models.test_states import ENCODED
from tests.tiny import PAD, START, tiny_llama, tiny_t5
from tests.training.frozen.frozen_jobs import frozen_job
from tests.training.frozen.test_eagle import TEXT, Command


@torch.no_grad()
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_heads_predict_in_training_what_they_predict_in_decoding(family: str) -> None:
    module = (tiny_t5(4, layers=3) if family == "t5" else tiny_llama(4, layers=3)).double().eval()
    heads = random_hydra(module.config).double()
    prompt = [*ENCODED[0].tolist(), PAD] if family == "t5" else [START, 5, 9]
    cut = len(prompt) - 1 if family == "t5" else 0  # of tokens that the decoder does not see
    rows, first = torch.tensor([[*prompt, *TEXT]]), len(prompt) + 1
    found = HydraModule(module, heads)(rows, torch.tensor([[first, first + 3]]))
    for group, length in enumerate((first - cut, first + 3 - cut)):
        tokens = rows[0].tolist()[cut:]
        for head in range(3):
            expected = hydra_behind(heads, module, tokens[:length])(tokens[length : length + head])
            torch.testing.assert_close(found[0, group, head], expected, rtol=1e-5, atol=1e-5)


def test_each_head_predicts_behind_the_one_before() -> None:
    spec = HydraSpec(heads=3, layers=1)
    assert (spec.offsets, spec.ahead, spec.skipped) == ((0, 1, 2), 2, 1)
    assert spec.weights == pytest.approx((1.0, 0.8, 0.64))


@pytest.mark.slow
def test_a_training_leaves_heads_that_learned(tmp_path: Path, checkpoints: Path) -> None:
    base = Checkpoint(str(checkpoints / "llama"))
    changes = {"spec": HydraSpec(heads=2, layers=1), "max_steps": 60, "evaluate_every": 20, "log_every": 5}
    metrics = train_module(frozen_job(tmp_path, Path(base.path), **changes, learning_rate=0.05))
    assert metrics["best"]["top_1_head_1"] > 0.3  # of 40 words
    assert HydraHeads.load(tmp_path / "heads").config.base["fingerprint"] == base.fingerprint
    assert f"policy=hydra policy.heads={tmp_path}/heads" in (tmp_path / "heads" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_the_command_trains_on_the_models_own_answers(
    family: str, command: Command, checkpoints: Path, data: Path
) -> None:
    quick = ["train.max_steps=2", "train.batch_size=4", "train.accumulate=1", "train.evaluate_every=2"]
    quick += ["train.log_every=1", "train.device=cpu", "train.precision=float32", "held_out=2"]
    line = ["name=hydra", f"model.path={checkpoints / family}", "dataset=multi30k", f"dataset.path={data}"]
    line += ["dataset.split=test", "answers.max_new_tokens=8", "medusa.heads=2", "variant=hydra", *quick]
    code, printed = command(train_medusa, *line)
    assert code == 0, printed
    assert (
        "outputs/hydra/heads: 2 steps, loss" in printed and "policy=hydra policy.heads=outputs/hydra/heads" in printed
    )
    code, printed = command(train_medusa, *line, "variant=medusa2")
    assert code == 2 and "variant must be one of medusa, hydra, got 'medusa2'" in printed
