"""Heads trained for layers: at first the model's own, in a folder, and in the pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bild_lab
from bild_lab.engine.methods.early_exit.layer_heads import LayerHeads, LayerHeadsConfig
from bild_lab.engine.models.native import NativeModel
from bild_lab.errors import UserError
from bild_lab.lab.measure.prediction import pipeline_log
from tests.policies import FAMILIES
from tests.tiny import VOCABULARY, save, tiny_llama, tiny_t5

PROMPTS = ("w5 w9 w30 w12", "w7", "w39 w38 w3 w3 w20")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four layers: t5, llama, and another llama of the same shapes."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in (
        ("t5", tiny_t5(3, 4)),
        ("llama", tiny_llama(3, 4)),
        ("other", tiny_llama(4, 4)),
    ):
        save(model, folder / name)
    return folder


def target_of(models: Path, name: str) -> NativeModel:
    return bild_lab.load(str(models / name), policy="vanilla").target


def fresh(
    models: Path, name: str, layers: tuple[int, ...] = (2, 3), rank: int | None = None
) -> LayerHeads:
    target = target_of(models, name)
    base = {"path": name, "fingerprint": target.checkpoint.fingerprint}
    return LayerHeads.fresh(target.decoder, base, layers, rank)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [None, 3])
def test_untrained_heads_predict_as_the_models_own(
    models: Path, family: str, rank: int | None
) -> None:
    decoder = target_of(models, family).decoder
    heads = fresh(models, family, rank=rank)
    hidden = torch.randn(5, 32)
    for layer in (2, 3):
        assert torch.allclose(
            heads.logits(layer, hidden), decoder.scores(decoder.final(hidden)), atol=1e-5
        )


@pytest.mark.parametrize("rank", [None, 3])
def test_each_layer_learns_for_itself(models: Path, rank: int | None) -> None:
    heads = fresh(models, "llama", rank=rank)
    hidden = torch.randn(4, 2, 32)
    heads.logits(3, hidden).square().sum().backward()
    learned = {name for name, weight in heads.named_parameters() if weight.grad[1].abs().sum() > 0}
    # downs: once ups are not zero
    assert learned == ({"norms", "matrices"} if rank is None else {"norms", "ups"})
    assert all(weight.grad[0].abs().sum() == 0 for weight in heads.parameters())


def test_low_rank_heads_train_little() -> None:
    whole, low = (LayerHeads(LayerHeadsConfig([2, 4], 64, 1000, 1e-6, rank)) for rank in (None, 8))
    assert sum(each.numel() for each in whole.parameters()) == 2 * (1000 * 64 + 64)
    assert sum(each.numel() for each in low.parameters()) == 2 * (8 * (1000 + 64) + 64)


@pytest.mark.parametrize("rank", [None, 3])
def test_heads_come_back_as_they_were_saved(models: Path, tmp_path: Path, rank: int | None) -> None:
    heads = fresh(models, "t5", rank=rank)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight)
    heads.save(tmp_path / "heads")
    back = LayerHeads.load(tmp_path / "heads")
    assert back.config == heads.config == LayerHeadsConfig.read(tmp_path / "heads")
    hidden = torch.randn(3, 32)
    assert torch.equal(back.logits(2, hidden), heads.logits(2, hidden))
    assert not torch.allclose(back.logits(2, hidden), back.logits(3, hidden))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pipeline_takes_its_candidates_from_a_folder_of_heads(
    models: Path, family: str, tmp_path: Path
) -> None:
    """Untrained they are the shared head's; spoilt, there are fewer matches; the text is the
    target's own.
    """
    heads = fresh(models, family)
    heads.save(tmp_path / "fresh")
    with torch.no_grad():
        heads.matrices[heads.config.layers.index(3)].neg_()
    heads.save(tmp_path / "spoilt")
    found = {}
    for name in ("shared", "fresh", "spoilt"):
        knob = name if name == "shared" else str(tmp_path / name)
        decoder = bild_lab.load(
            str(models / family), policy="ppd", exit_layer=3, top_k=2, heads=knob
        )
        made = [decoder.generate(prompt, 20) for prompt in PROMPTS]
        found[name] = sum(sum(pipeline_log(each.trace).matches) for each in made)
        plain = bild_lab.load(str(models / family), policy="vanilla")
        assert [each.token_ids for each in made] == [
            plain.generate(prompt, 20).token_ids for prompt in PROMPTS
        ]
    assert found["shared"] == found["fresh"] > found["spoilt"]


def test_heads_run_in_the_targets_precision_and_learn_nothing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(models, "llama").save(tmp_path)
    seen, logits = set(), LayerHeads.logits

    def noted(self: LayerHeads, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        seen.add((self.matrices.dtype, self.matrices.requires_grad))
        return logits(self, layer, hidden)

    monkeypatch.setattr(LayerHeads, "logits", noted)
    knobs = {"exit_layer": 3, "heads": str(tmp_path)}
    bild_lab.load(str(models / "llama"), policy="ppd", dtype="bfloat16", **knobs).generate(
        PROMPTS[0], 4
    )
    assert seen == {(torch.bfloat16, False)}


def refused(models: Path, name: str, heads: Path, exit_layer: int = 3) -> str:
    with pytest.raises(UserError) as caught:
        bild_lab.load(str(models / name), policy="ppd", exit_layer=exit_layer, heads=str(heads))
    return str(caught.value)


def test_heads_of_another_model_or_layer_are_refused(models: Path, tmp_path: Path) -> None:
    fresh(models, "llama").save(tmp_path)
    assert "whose weights are not those of" in refused(models, "other", tmp_path)
    config = json.loads((tmp_path / "heads_config.json").read_text())
    for name, value in (("hidden_size", 64), ("vocabulary", VOCABULARY + 1)):
        (tmp_path / "heads_config.json").write_text(json.dumps({**config, name: value}))
        assert f"trained for llama, whose {name} is {value}, but the target's is" in refused(
            models, "llama", tmp_path
        )


def test_a_folder_without_heads_is_refused_with_the_command_that_makes_them(
    models: Path, tmp_path: Path
) -> None:
    message = refused(models, "llama", tmp_path)
    assert (
        "heads_config.json and heads.safetensors; make one with: python scripts/train_lm_heads.py"
        in message
    )
