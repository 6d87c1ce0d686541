"""Medusa heads beside a frozen model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bild_lab.engine.methods.medusa import MedusaHeads
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native.model import NativeModel
from bild_lab.engine.request import Source
from bild_lab.errors import UserError
from bild_lab.training.modules.frozen import train_beside_frozen
from bild_lab.training.modules.medusa import MedusaModule, MedusaSpec
from bild_lab.training.modules.predictors import AnsweredPrompt, choose_contexts
from tests import tiny_architectures
from tests.tiny import VOCABULARY
from tests.training.modules.frozen_jobs import frozen_job


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
def test_heads_predict_in_training_what_they_predict_in_decoding(
    base: Checkpoint, shared: bool, rank: int
) -> None:
    heads = random_heads(base, shared, rank)
    text = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5))
    trained = MedusaModule(base.weights(torch.float32).eval(), heads)(
        text, torch.tensor([[4, 9], [6, 1]])
    )
    target = NativeModel(HuggingFaceModel(base, torch.device("cpu"), torch.float32))
    for sample, group, length in ((0, 0, 4), (0, 1, 9), (1, 0, 6)):
        context = text[sample, :length].tolist()
        final = target.start(Source(tuple(context)), 8).extend([context[-1]]).head_input
        before = text[sample, [min(length + head, 8) for head in range(3)]]
        bias = 0 if heads.markov is None else heads.markov(before)
        torch.testing.assert_close(
            trained[sample, group], heads(final)[:, 0] + bias, rtol=1e-4, atol=1e-4
        )


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["minicpm3", "granite", "phi", "llama4_text", "modernbert-decoder", "qwen2_5_vl"]
)
def test_heads_read_what_the_models_own_head_reads_and_score_as_it_does(name: str) -> None:
    """Planted: of a MiniCPM 3, whose head reads a part of the states, they read these whole; of a
    Granite, which scores by a part of its head's products, or a Phi, whose head has a bias, they
    take the products for scores; the layer before a ModernBERT's head, a Llama 4 of a base without
    a name and a configuration for images too are passed by.
    """
    module = tiny_architectures.with_marked_head(name)
    text = torch.randint(3, 30, (1, 9), generator=torch.Generator().manual_seed(5))
    heads = MedusaSpec(heads=1, layers=1, shared=True).build(module, {}, 0)
    scores = heads(text, torch.tensor([[4, 9]]))[0, :, 0]
    torch.testing.assert_close(scores, module(text).logits[0, [3, 8]])  # a fresh head is a copy


@pytest.mark.fast("False-0-None")
@pytest.mark.parametrize(("shared", "rank", "contexts"), [(False, 0, None), (True, 4, 3)])
def test_a_training_leaves_heads_that_learned(
    base: Checkpoint, shared: bool, rank: int, contexts: int | None, tmp_path: Path
) -> None:
    spec = MedusaSpec(heads=2, layers=1, shared=shared, markov_rank=rank, contexts=contexts)
    changes = {
        "spec": spec,
        "max_steps": 60,
        "evaluate_every": 20,
        "log_every": 5,
        "learning_rate": 0.05,
    }
    metrics = train_beside_frozen(frozen_job(tmp_path, Path(base.path), **changes))
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    assert metrics["loss"] < 0.5  # nats; as long as nothing is learned it is more than 4
    assert metrics["best"]["top_1_head_1"] > 0.3  # of 40 words
    heads = MedusaHeads.load(tmp_path / "heads")
    assert heads.config.base["fingerprint"] == base.fingerprint
    own = {"markov.before", "markov.after"} if rank else {"outputs"}
    assert set(load_file(tmp_path / "heads" / "heads.safetensors")) == {"blocks", "biases", *own}
    assert not rank or bool(heads.markov.after.any())


def test_what_cannot_have_heads_is_refused(checkpoints: Path) -> None:
    with pytest.raises(UserError, match="module.heads must be a whole number >= 1, got 0"):
        MedusaSpec(heads=0, layers=1)
    with pytest.raises(
        UserError, match="module.contexts must be a whole number >= 1, got 0; null takes all"
    ):
        MedusaSpec(heads=3, layers=1, contexts=0)
    with pytest.raises(
        UserError, match="Medusa needs a decoder-only model, got the encoder–decoder t5"
    ):
        MedusaSpec(heads=3, layers=1).check(Checkpoint(str(checkpoints / "t5")).config)


def test_each_head_predicts_after_the_one_before_and_weighs_four_fifths_of_it() -> None:
    medusa = MedusaSpec(heads=3, layers=1).predictors
    assert medusa.weights == pytest.approx((1.0, 0.8, 0.64))
    assert medusa.offsets == (1, 2, 3)  # the model's own head predicts the token at 0
    row = AnsweredPrompt(np.arange(40, dtype=np.int32), 5)
    some = choose_contexts(
        row, MedusaSpec(heads=3, layers=1, contexts=7).predictors, np.random.default_rng(0)
    )
    assert len(some.contexts) == 7 < len(choose_contexts(row, medusa).contexts)
