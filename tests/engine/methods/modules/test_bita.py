"""The adapter's numbers, its folder, and whom it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from bild_lab.engine.methods.bita import PROMPTS, BitaAdapter
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from tests.engine.methods.modules.tiny import random_adapter
from tests.policies import load
from tests.tiny import tiny_llama, tiny_t5

LLAMA_2_7B = LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    intermediate_size=11008,
)
CONFIG = tiny_llama(0).config  # 2 layers, 2 heads of keys and values, 8 wide; 32 wide


def fresh(prompt: str, prompt_tokens: int = 5, mask_tokens: int = 3, seed: int = 0) -> BitaAdapter:
    return BitaAdapter.fresh(CONFIG, {"path": "here"}, prompt, prompt_tokens, mask_tokens, seed)


def test_the_trained_numbers_are_those_of_the_papers_formula() -> None:
    adapter = BitaAdapter.fresh(LLAMA_2_7B, {}, "deep", 16, 3, seed=0)
    count = sum(parameter.numel() for parameter in adapter.parameters())
    assert count == 16 * 2 * 32 * 4096 + 3 * 4096 == 4_206_592  # 4.21 M


@pytest.mark.parametrize(
    ("prompt", "count"), [("deep", 5 * 2 * 2 * 2 * 8 + 96), ("shallow", 5 * 32 + 96), ("none", 96)]
)
def test_keys_and_values_are_as_wide_as_the_models_own(prompt: str, count: int) -> None:
    adapter = fresh(prompt)
    assert sum(parameter.numel() for parameter in adapter.parameters()) == count


def test_initial_values_are_normal_and_hang_on_the_seed_alone() -> None:
    values = torch.cat(
        [parameter.flatten() for parameter in fresh("deep", 400).parameters()]
    ).detach()
    assert abs(float(values.mean())) < 1e-3
    assert float(values.std()) == pytest.approx(0.02, rel=0.05)
    same, other = fresh("deep"), fresh("deep", seed=1)
    assert torch.equal(fresh("deep").prompt_keys, same.prompt_keys)
    assert not torch.equal(same.prompt_keys, other.prompt_keys)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_adapter_comes_back_from_its_folder(prompt: str, tmp_path: Path) -> None:
    saved = random_adapter(CONFIG, prompt)
    saved.save(tmp_path / "adapter")
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter.safetensors",
        "adapter_config.json",
    ]
    again = BitaAdapter.load(tmp_path / "adapter")
    assert again.config == saved.config
    assert {name: value.tolist() for name, value in again.state_dict().items()} == {
        name: value.tolist() for name, value in saved.state_dict().items()
    }


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(
        UserError, match="a BiTA adapter needs a decoder-only model, got the encoder–decoder t5"
    ):
        BitaAdapter.fresh(tiny_t5(0).config, {}, "deep", 4, 3, 0)


def test_folders_that_hold_no_adapter_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    fresh("deep").save(folder)
    weights, config = (folder / name for name in ("adapter.safetensors", "adapter_config.json"))
    for place in (tmp_path / "nowhere", weights):
        with pytest.raises(
            UserError,
            match="is no BiTA adapter: it needs adapter_config.json and adapter.safetensors",
        ):
            BitaAdapter.load(place)
    whole, values = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cannot read .*adapter.safetensors"):
        BitaAdapter.load(folder)
    weights.write_bytes(whole)
    config.write_text(json.dumps({**values, "mask_tokens": 4}))
    with pytest.raises(UserError, match=r"must hold masks \[4, 32\], .*got masks \[3, 32\]"):
        BitaAdapter.load(folder)
    config.write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UserError, match="must hold base, head_dim, hidden_size"):
        BitaAdapter.load(folder)
    config.write_text("{")
    with pytest.raises(UserError, match="adapter_config.json describes no BiTA adapter"):
        BitaAdapter.load(folder)


def test_a_policy_asks_for_an_adapter_of_its_own_target(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"needs a BiTA adapter; make one with: python scripts/train_bita.py"
    ):
        load(checkpoints, "llama", "bita", adapter=None)
    random_adapter(tiny_llama(0, layers=3).config).save(tmp_path)
    with pytest.raises(
        UserError, match="for a tiny model, whose layers is 3, but the target's is 2"
    ):
        load(checkpoints, "llama", "bita", adapter=str(tmp_path))
    with pytest.raises(UserError, match="needs a decoder-only model, got the encoder–decoder t5"):
        load(checkpoints, "t5", "bita", adapter=str(tmp_path))


def test_an_adapter_of_other_weights_is_refused_though_the_shape_is_the_same(
    checkpoints: Path, tmp_path: Path
) -> None:
    own = Checkpoint(str(checkpoints / "llama"))
    for fingerprint in (own.fingerprint, "other weights"):
        base = {"path": "elsewhere", "fingerprint": fingerprint}
        BitaAdapter.fresh(own.config, base, "deep", 4, 3, 0).save(tmp_path / fingerprint)
    load(checkpoints, "llama", "bita", adapter=str(tmp_path / own.fingerprint))
    with pytest.raises(
        UserError,
        match="trained for elsewhere, whose weights are not those of .*llama; choose that",
    ):
        load(checkpoints, "llama", "bita", adapter=str(tmp_path / "other weights"))
