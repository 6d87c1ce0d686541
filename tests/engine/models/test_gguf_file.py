"""GGUF files written as llama.cpp's converter does give the model that they were made of."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, dequantize
from transformers import PreTrainedModel

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.gguf_file import (
    GgufCheckpoint,
    PackedTensor,
    recognized,
)
from bild_lab.errors import UserError
from bild_lab.lab.point.load import load
from tests.engine.models.gguf_files import MODELS, PIECES, PROMPT, tiny, write
from tests.policies import shipped

REAL = os.environ.get("BILD_LAB_REAL_MODELS", "")


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    with torch.inference_mode():
        return checkpoint.weights(torch.float32)(torch.tensor([PROMPT])).logits


def expected(module: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return module(torch.tensor([PROMPT])).logits


@pytest.mark.fast("llama")
@pytest.mark.parametrize("model_type", MODELS)
def test_a_file_gives_the_scores_of_the_model_it_was_made_of(
    model_type: str, tmp_path: Path
) -> None:
    module = tiny(model_type)
    checkpoint = recognized(Checkpoint(str(write(module, tmp_path / "model.gguf"))))
    checkpoint.check()
    torch.testing.assert_close(logits(checkpoint), expected(module), rtol=1e-4, atol=1e-4)
    loaded = checkpoint.weights(torch.bfloat16)
    assert loaded.generation_config.eos_token_id == [1, 4]
    state, found = module.state_dict(), loaded.state_dict()
    assert all(torch.allclose(found[name], state[name].bfloat16(), atol=1e-6) for name in state)
    # planted: what llama.cpp changed is left as it is
    if model_type in ("llama", "mistral", "gemma3_text"):
        checkpoint = GgufCheckpoint(checkpoint.path)
        vars(checkpoint)["packed"] = {
            name: replace(one, heads=0, added=0) for name, one in checkpoint.packed.items()
        }
        assert (logits(checkpoint) - expected(module)).abs().max() > 0.1


@pytest.mark.fast("1", "12")
@pytest.mark.parametrize(
    "kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_0, Type.Q4_K, Type.Q6_K]
)
def test_packed_weights_give_the_scores_of_what_they_stand_for(kind: Type, tmp_path: Path) -> None:
    module = tiny("llama")
    checkpoint = GgufCheckpoint(str(write(module, tmp_path / "model.gguf", kind)))
    torch.testing.assert_close(logits(checkpoint), expected(module), rtol=1e-4, atol=1e-4)
    queries = checkpoint.packed["model.layers.0.self_attn.q_proj.weight"]
    assert queries.type == kind and queries.blocks().dtype == np.uint8
    # what kernels may read as it is
    rows = torch.from_numpy(dequantize(queries.blocks(), kind).copy())
    assert torch.equal(rows, module.state_dict()["model.layers.0.self_attn.q_proj.weight"])


def test_blocks_of_eight_bits_are_a_scale_and_whole_numbers(tmp_path: Path) -> None:
    block = np.array([0.5], np.float16).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    (tmp_path / "tensor").write_bytes(b"before" + block * 3)
    tensor = PackedTensor(tmp_path / "tensor", Type.Q8_0, (3, 32), len("before"))
    row = [number / 2 for number in range(-16, 16)]
    assert tensor.numbers(torch.bfloat16).tolist() == [row] * 3
    raised = replace(tensor, added=1.0).numbers(torch.float32)
    assert raised.tolist() == [[number - 1 for number in row]] * 3
    assert replace(tensor, dtype=torch.bfloat16)[slice(1, 3)].dtype == torch.bfloat16
    for rows in (torch.tensor([2]), torch.tensor([1, 2]), slice(1, 3)):
        count = 2 if isinstance(rows, slice) else len(rows)
        assert tensor[rows].tolist() == [row] * count  # of one token, too


def test_what_gemmas_converter_adds_to_its_norms_is_taken_from_them_alone(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(str(write(tiny("gemma3_text"), tmp_path / "model.gguf")))
    for name, tensor in checkpoint.packed.items():
        assert tensor.added == name.endswith("norm.weight"), name
        assert tensor.heads == 0
    heads = GgufCheckpoint(str(write(tiny("llama"), tmp_path / "llama.gguf"))).packed
    attention = {name: heads[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkvo"}
    assert {name: tensor.heads for name, tensor in attention.items()} == {
        "q": 8, "k": 2, "v": 0, "o": 0,
    }  # fmt: skip


def test_long_lists_are_passed_over_and_short_ones_are_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_token_list([f"piece {number}" for number in range(1500)])
    writer.add_token_scores([0.5] * 1500)
    writer.add_array("gemma3.pattern", [True, False, True, True])
    writer.add_uint32("gemma3.after", 7)
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()
    values, tensors = GgufCheckpoint(str(tmp_path / "model.gguf"))._header
    assert values["gemma3.pattern"] == [True, False, True, True] and not tensors
    assert (values["gemma3.after"], values["tokenizer.ggml.tokens"]) == (7, 1500)


def test_every_engine_decodes_the_file_as_its_module(tmp_path: Path) -> None:
    module, texts = tiny("qwen3"), []
    path = write(module, tmp_path / "model.gguf", Type.Q8_0)
    module.generation_config.eos_token_id = [1, 4]
    ways = [(engine, "vanilla") for engine in ("auto", "native", "hf")]
    for engine, policy in (*ways, ("hf", "hf_generate"), ("auto", "speculative")):
        decoder = load(path, path, policy=shipped(policy), engine=engine)
        texts.append(decoder.generate(PROMPT, 16).token_ids)
    in_memory = load((module, decoder.target.checkpoint.tokenizer), policy=shipped("vanilla"))
    assert texts == [in_memory.generate(PROMPT, 16).token_ids] * 5
    assert len(set(texts[0])) > 4


def test_tokens_template_and_ends_come_from_the_file(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(str(write(tiny("mistral"), tmp_path / "model.gguf")))
    assert checkpoint.end_tokens == {1, 4}
    assert checkpoint.vocabulary == {piece: index for index, piece in enumerate(PIECES)}
    assert checkpoint.source("</s>c").prompt == (2, 1, 8)
    assert checkpoint.source([{"role": "user", "content": "<end_of_turn>"}]).prompt == (2, 4)
    (tmp_path / "other.gguf").write_bytes((tmp_path / "model.gguf").read_bytes())
    assert GgufCheckpoint(str(tmp_path / "other.gguf")).fingerprint == checkpoint.fingerprint
    assert len(checkpoint.fingerprint) == 16
    changed = write(tiny("mistral"), tmp_path / "other.gguf", Type.F16)
    assert GgufCheckpoint(str(changed)).fingerprint != checkpoint.fingerprint


@pytest.mark.fast(
    "changes0-its architecture is mamba, and llama, qwen2, qwen3, gemma3 are known; give the",
    "changes5-is no model that is known here",
    "changes7-rotary scaling is longrope",
    "changes8-its rope_freqs.weight is not Llama 3's",
    "changes9-it is one of 2 parts, which llama-gguf-split --merge joins",
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architecture": "mamba"},
            "its architecture is mamba, and llama, qwen2, qwen3, gemma3 are known; give the",
        ),
        (
            {"llama.attention.scale": 0.5},
            r"its setting llama.attention.scale is 0.5; give the model's folder",
        ),
        ({"llama.block_count": 3}, "block_count is 3, and it holds 2 layers"),
        (
            {"llama.feed_forward_length": 512},
            r"wanted blk.0.ffn_gate.weight of shape \[512, 256\], got \[256, 256\]",
        ),
        ({"llama.embedding_length": None}, "'embedding_length'"),
        ({"llama.attention.head_count": "8"}, "is no model that is known here"),
        ({"llama.rope.dimension_count": 32}, "dimension_count is 32, and a head is 64 wide"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "rotary scaling is longrope",
        ),
        ({"llama.rope.freq_base": 1000.0}, "its rope_freqs.weight is not Llama 3's"),
        ({"split.count": 2}, "it is one of 2 parts, which llama-gguf-split --merge joins"),
        ({"general.type": "adapter"}, "its type is adapter"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"},
            "rule of splitting words is smollm, which",
        ),
        ({"tokenizer.ggml.model": "bert"}, "the tokenizer of .* cannot be built: .*'bert'"),
    ],
)
def test_a_model_that_is_not_known_is_refused_in_a_line(
    changes: dict, message: str, tmp_path: Path
) -> None:
    path = write(tiny("llama"), tmp_path / "model.gguf", **changes)
    with pytest.raises(UserError, match=message) as refused:
        load(path, policy=shipped("vanilla"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("output_norm.weight"),
            r"wanted output_norm.weight of shape \[256\], got none",
        ),
        (
            lambda tensors: tensors.update(
                {"output_norm.weight": replace(tensors["output_norm.weight"], shape=(128,))}
            ),
            r"wanted output_norm.weight of shape \[256\], got \[128\]",
        ),
        (
            lambda tensors: tensors.update(other=None),
            "also holds other, which is not known of a llama",
        ),
        (
            lambda tensors: tensors.update(
                {
                    "output.weight": replace(
                        tensors["output.weight"], type=Type.Q8_K, shape=(40, 256)
                    )
                }
            ),
            (
                "has weights of type Q8_K, which the package gguf cannot unpack; give a file of"
                " another type"
            ),
        ),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(
    change: Callable, message: str, tmp_path: Path
) -> None:
    checkpoint = GgufCheckpoint(str(write(tiny("llama"), tmp_path / "model.gguf")))
    change(checkpoint._header[1])
    with pytest.raises(UserError, match=message):
        checkpoint.check()


def test_a_damaged_file_is_refused_in_a_line(tmp_path: Path) -> None:
    path = write(tiny("qwen3"), tmp_path / "model.gguf")
    whole, place = path.read_bytes(), random.Random(0)
    header = GgufCheckpoint(str(path))._header[1]["token_embd.weight"].start
    damaged = [
        whole[:length] for length in (0, 3, 24, *range(100, header, 601), header, len(whole) - 1)
    ]
    for content in [b"PK" + whole[2:], *damaged]:
        path.write_bytes(content)
        with pytest.raises(
            UserError,
            match=r"wanted a GGUF file, got .*, damaged or cut short: .+; download it again",
        ):
            GgufCheckpoint(str(path)).check()
    # one byte of the header is another: what can be read still is, the rest is refused
    for _ in range(40):
        content = bytearray(whole)
        content[place.randrange(header)] = place.randrange(256)
        path.write_bytes(content)
        with suppress(UserError):
            GgufCheckpoint(str(path)).check()


def test_files_where_none_can_be_are_refused(tmp_path: Path) -> None:
    path = write(tiny("qwen3"), tmp_path / "model.gguf")
    for given, message in (
        (
            tmp_path / "no.gguf",
            "no GGUF file .*no.gguf; give the path of one, or a folder with config.json",
        ),
        (tmp_path, "is a folder with a GGUF file; give the file: .*model.gguf"),
    ):
        with pytest.raises(UserError, match=message):
            load(given, policy=shipped("vanilla"))
    with pytest.raises(
        UserError,
        match="is a file; give a folder in Hugging Face layout, as only decoding reads GGUF",
    ):
        Checkpoint(str(path)).check()
    with pytest.raises(
        UserError, match="wanted a folder in Transformers' layout, got the GGUF file"
    ):
        _ = GgufCheckpoint(str(path)).files


def test_a_folder_with_the_name_of_a_file_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").mkdir()
    (tmp_path / "model.gguf" / "config.json").write_text("{}")
    checkpoint = Checkpoint(str(tmp_path / "model.gguf"))
    assert recognized(checkpoint) is checkpoint


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="BILD_LAB_REAL_MODELS names no folder of models")
@pytest.mark.parametrize("engine", ["auto", "hf"])
@pytest.mark.parametrize("name", ["qwen-0.5b", "gemma-270m"])
def test_a_real_file_decodes_as_the_folder_that_was_made_of_it(name: str, engine: str) -> None:
    text = "def fibonacci(n):\n    # the n-th number, naïvely\n"
    paths = Path(REAL) / f"{name}.gguf", Path(REAL) / name
    file, folder = (load(path, policy="vanilla", dtype="bfloat16", engine=engine) for path in paths)
    ours, theirs = file.target.checkpoint, folder.target.checkpoint
    assert (
        ours.end_tokens == theirs.end_tokens
        and ours.source(text).prompt == theirs.source(text).prompt
    )
    assert ours.tokenizer.chat_template == theirs.tokenizer.chat_template
    assert torch.equal(*(one.target.text_logits(one.target.source(text)) for one in (file, folder)))
    assert file.generate(text, 24).token_ids == folder.generate(text, 24).token_ids
