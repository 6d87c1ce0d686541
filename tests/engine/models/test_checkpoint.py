"""Checkpoints in folders and in memory: what they cannot give is told in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.lab.load import load
from tests.policies import shipped
from tests.tiny_architectures import END, START, build, relative_of, word_tokenizer

TEMPLATE = "{{ bos_token }}{% for one in messages %}{{ one['role'] }} {{ one['content'] }} {% endfor %}w8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}, r"are quantized \(awq\) .*gptqmodel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 8}, r"are quantized \(gptq\) .* requires optimum"),
    ],
)
def test_quantized_weights_without_their_package_are_refused_in_a_sentence(
    settings: dict[str, object], message: str, folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(UserError, match=r"cannot run natively, as its weights are quantized"):
        load(tmp_path, policy=shipped("vanilla"), engine="native")
    decoder = load(tmp_path, policy=shipped("vanilla"))
    assert decoder.target.engine == "hf"
    with pytest.raises(UserError, match=message):
        decoder.load_weights()


def test_a_folder_and_a_model_in_memory_decode_alike(folder: Path) -> None:
    module = build("llama")
    pair = ((module, word_tokenizer()), (relative_of(module), word_tokenizer()))
    texts = [
        load(folder, policy=shipped("vanilla"), engine="native").generate("w5 w9 w12", 12).token_ids,
        load(str(folder), policy=shipped("vanilla"), engine="hf").generate("w5 w9 w12", 12).token_ids,
        load(*pair, policy=shipped("speculative")).generate("w5 w9 w12", 12).token_ids,
    ]
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(UserError, match="a model in memory runs on hf, on one device, got other settings"):
        load(*pair, policy=shipped("speculative"), engine="native")
    with pytest.raises(
        UserError, match="the loaded model is in float32, and bfloat16 was asked for; set dtype='float32'"
    ):
        load(*pair, policy=shipped("speculative"), dtype="bfloat16").load_weights()


def test_a_model_in_memory_is_known_by_its_weights() -> None:
    prints = [
        load((build("llama", seed), word_tokenizer()), policy=shipped("vanilla")).target.checkpoint.fingerprint
        for seed in (0, 0, 1)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_a_prompt_may_be_text_token_ids_or_messages(folder: Path) -> None:
    checkpoint = Checkpoint(str(folder))
    assert checkpoint.source("w5 w9").prompt == checkpoint.source([5, 9]).prompt == (5, 9)
    assert checkpoint.source(torch.tensor([5, 9, 12]).tolist(), 2).prompt == (5, 9)
    with pytest.raises(UserError, match="must be from 0 to 39, got 40; tokenize it anew"):
        checkpoint.source([5, 40])
    with pytest.raises(UserError, match="has no tokens"):
        checkpoint.source([])
    messages = [{"role": "w3", "content": "w9"}]
    with pytest.raises(UserError, match="has no chat template; give the prompt as text"):
        checkpoint.source(messages)
    checkpoint.tokenizer.chat_template = TEMPLATE
    assert checkpoint.source(messages).prompt == (START, 3, 9, 8)
    assert checkpoint.end_tokens == {END}
