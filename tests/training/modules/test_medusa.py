"""Medusa and Hydra heads beside a frozen model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bild_lab.engine.heads import HydraHeads, MedusaHeads
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.native.model import NativeModel
from bild_lab.engine.request import Source
from bild_lab.errors import UserError
from bild_lab.training.modules.frozen import train_beside_frozen
from bild_lab.training.modules.medusa import HydraModule, HydraSpec, MedusaModule, MedusaSpec
from tests.engine.drafters.naive import hydra_behind
from tests.engine.heads.tiny import random_hydra
from tests.engine.models.test_states import ENCODED
from tests.tiny import PAD, START, VOCABULARY, tiny_llama, tiny_t5
from tests.training.modules.frozen_jobs import frozen_job
from tests.training.modules.test_eagle import TEXT


@pytest.fixture
def base(checkpoints: Path) -> Checkpoint:
    return Checkpoint(str(checkpoints / "llama"))


def random_heads(base: Checkpoint, shared: bool, rank: int) -> MedusaHeads:
    module = base.weights(torch.float32)
    kind = {"heads": 3, "layers": 1, "shared": shared, "markov_rank": rank}
    heads = MedusaHeads.fresh(base.config, module.lm_head.weight, {}, **kind)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in heads.parameters():
            weight += torch.randn(weight.shape, generator=generator)
    return heads.requires_grad_(False)


@pytest.mark.parametrize(("shared", "rank"), [(False, 0), (True, 0), (False, 4)])
def test_heads_predict_in_training_what_they_predict_in_decoding(base: Checkpoint, shared: bool, rank: int) -> None:
    heads = random_heads(base, shared, rank)
    text = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5))
    trained = MedusaModule(base.weights(torch.float32).eval(), heads)(text, torch.tensor([[4, 9], [6, 1]]))
    target = NativeModel(HuggingFaceModel(base, torch.device("cpu"), torch.float32))
    for sample, group, length in ((0, 0, 4), (0, 1, 9), (1, 0, 6)):
        context = text[sample, :length].tolist()
        final = target.start(Source(tuple(context)), 8).extend([context[-1]]).head_input
        before = text[sample, [min(length + head, 8) for head in range(3)]]
        bias = 0 if heads.markov is None else heads.markov(before)
        torch.testing.assert_close(trained[sample, group], heads(final)[:, 0] + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shared", "rank"), [(False, 0), (True, 4)])
def test_a_training_leaves_heads_that_learned(base: Checkpoint, shared: bool, rank: int, tmp_path: Path) -> None:
    spec = MedusaSpec(heads=2, layers=1, shared=shared, markov_rank=rank)
    changes = {"spec": spec, "max_steps": 60, "evaluate_every": 20, "log_every": 5, "learning_rate": 0.05}
    metrics = train_beside_frozen(frozen_job(tmp_path, Path(base.path), **changes))
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    assert metrics["loss"] < 0.5  # nats; as long as nothing is learned it is more than 4
    assert metrics["best"]["top_1_head_1"] > 0.3  # of 40 words
    heads = MedusaHeads.load(tmp_path / "heads")
    assert heads.config.base["fingerprint"] == base.fingerprint
    own = {"markov.before", "markov.after"} if rank else {"outputs"}
    assert set(load_file(tmp_path / "heads" / "heads.safetensors")) == {"blocks", "biases", *own}
    assert not rank or bool(heads.markov.after.any())
    card = (tmp_path / "heads" / "README.md").read_text()
    assert f"policy=medusa policy.heads={tmp_path}/heads" in card


def test_what_cannot_have_heads_is_refused(checkpoints: Path) -> None:
    with pytest.raises(UserError, match="module.heads must be a whole number >= 1, got 0"):
        MedusaSpec(heads=0, layers=1)
    with pytest.raises(UserError, match="Medusa needs a decoder-only model, got the encoder–decoder t5"):
        MedusaSpec(heads=3, layers=1).check(Checkpoint(str(checkpoints / "t5")).config)


@torch.no_grad()
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_hydra_heads_predict_in_training_what_they_predict_in_decoding(family: str) -> None:
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


def test_each_head_predicts_after_the_one_before_and_weighs_four_fifths_of_it() -> None:
    medusa, hydra = (spec(heads=3, layers=1).predictors for spec in (MedusaSpec, HydraSpec))
    assert medusa.weights == hydra.weights == pytest.approx((1.0, 0.8, 0.64))
    assert medusa.offsets == (1, 2, 3)  # the model's own head predicts the token at 0
    assert (hydra.offsets, hydra.ahead, hydra.skipped) == ((0, 1, 2), 2, 1)


@pytest.mark.slow
def test_a_training_leaves_hydra_heads_that_learned(tmp_path: Path, checkpoints: Path) -> None:
    base = Checkpoint(str(checkpoints / "llama"))
    changes = {"spec": HydraSpec(heads=2, layers=1), "max_steps": 60, "evaluate_every": 20, "log_every": 5}
    metrics = train_beside_frozen(frozen_job(tmp_path, Path(base.path), **changes, learning_rate=0.05))
    assert metrics["best"]["top_1_head_1"] > 0.3  # of 40 words
    assert HydraHeads.load(tmp_path / "heads").config.base["fingerprint"] == base.fingerprint
    assert f"policy=hydra policy.heads={tmp_path}/heads" in (tmp_path / "heads" / "README.md").read_text()
