"""LoRA folders load merged; without peft they say what to install."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bild_lab.engine.models import lora
from bild_lab.errors import UserError
from bild_lab.lab.decoding.load import load
from tests.loopback_hub import contents, loopback_hub, printed_in_a_fresh_process
from tests.policies import shipped
from tests.tiny_architectures import build, word_tokenizer

PROMPT = [5, 9, 12, 30]


def saved_base(folder: Path, seed: int = 0) -> Path:
    build("llama", seed).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter large enough to change texts, beside its base."""
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("lora")
    base = type(build("llama")).from_pretrained(saved_base(folder / "base"))
    torch.manual_seed(1)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.5)
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_an_adapter_runs_merged_into_its_base(adapter: Path, engine: str) -> None:
    import peft

    base = adapter.parent / "base"
    decoder = load(adapter, policy=shipped("vanilla"), engine=engine)
    found = decoder.generate(PROMPT, 12).token_ids
    ids = torch.tensor([PROMPT])
    adapted = peft.PeftModel.from_pretrained(type(build("llama")).from_pretrained(base), adapter)
    out = adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert found == out[0, len(PROMPT) :].tolist()
    assert found != load(base, policy=shipped("vanilla")).generate(PROMPT, 12).token_ids


def test_base_and_adapter_both_name_the_weights(adapter: Path, tmp_path: Path) -> None:
    prints = [load(adapter, policy=shipped("vanilla")).target.checkpoint.fingerprint]
    settings = json.loads((adapter / "adapter_config.json").read_text())
    for index, change in enumerate(({"base_model_name_or_path": str(saved_base(tmp_path / "other", 3))}, {"r": 3})):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(settings | change))
        prints.append(load(folder, policy=shipped("vanilla")).target.checkpoint.fingerprint)
    assert len(set(prints)) == 3


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    for file in adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    with pytest.raises(UserError, match="does not fit its base .*; give the base it was trained on"):
        load(tmp_path, policy=shipped("vanilla")).load_weights()


def test_without_peft_an_adapter_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"is an adapter, which the package peft reads; install it \(pip install"):
        load(tmp_path, policy=shipped("vanilla"))


def test_an_adapter_without_a_base_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: object())
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2}))
    with pytest.raises(UserError, match="names no base_model_name_or_path in its adapter_config.json"):
        load(tmp_path, policy=shipped("vanilla"))


_GENERATE = """
from bild_lab.lab.decoding.load import load
from tests.policies import shipped
decoder = load("me/adapter", policy=shipped("vanilla"))
print(decoder.target.checkpoint.fingerprint, decoder.generate([5, 9, 12, 30], 12).token_ids)
"""


@pytest.mark.slow
def test_an_adapter_on_the_hub_is_fetched_with_its_base_and_serves_without_a_network(
    adapter: Path, tmp_path: Path
) -> None:
    settings = json.loads((adapter / "adapter_config.json").read_text())
    moved = json.dumps({**settings, "base_model_name_or_path": "me/base"}).encode()
    models = {
        "me/base": contents(adapter.parent / "base"),
        "me/adapter": {**contents(adapter), "adapter_config.json": moved},
    }
    wanted = load(adapter, policy=shipped("vanilla")).generate(PROMPT, 12).token_ids
    with loopback_hub({}, models) as endpoint:
        fetched = printed_in_a_fresh_process(_GENERATE, endpoint, tmp_path)[-1]
    assert fetched.endswith(str(wanted))
    assert printed_in_a_fresh_process(_GENERATE, "http://127.0.0.1:9", tmp_path)[-1] == fetched
