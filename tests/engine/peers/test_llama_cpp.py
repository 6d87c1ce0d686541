"""llama.cpp as a method: what it refuses, what it says of its file, and that it drafts as its Python does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import bild_lab
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.peers.methods import LlamaCpp
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.config import compose_config
from bild_lab.lab.point import prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.runner import run_point
from tests.engine.peers.fake import needs_peers
from tests.policies import LLAMA_CPP

PROMPTS = ("w5 w9 w30 w12", "w7", "w39 w38 w3 w3 w20 w21 w22 w23 w24")


def described_file(checkpoints: Path, path: Path, precision: str = "Q4_K_M", **others: str) -> str:
    """What the fake engine takes for a GGUF file of `llama`. others: tokens in place of its own, as t5="w9"."""
    vocabulary = Checkpoint(str(checkpoints / "llama")).vocabulary
    tokens = sorted(vocabulary, key=vocabulary.get)
    for place, text in others.items():
        tokens[int(place[1:])] = text
    path.write_text(json.dumps({"precision": precision, "tokens": tokens}))
    return str(path)


@pytest.fixture
def file(checkpoints: Path, tmp_path: Path) -> str:
    return described_file(checkpoints, tmp_path / "tiny.gguf")


def load(checkpoints: Path, policy: str = "llama_cpp", family: str = "llama", **options: Any) -> bild_lab.Decoder:
    return bild_lab.load(str(checkpoints / family), str(checkpoints / f"{family}-draft"), policy, **options)


@pytest.mark.usefixtures("fake_engines")
def test_what_llama_cpp_cannot_run_is_refused_before_weights_load(checkpoints: Path, tmp_path: Path, file: str) -> None:
    with pytest.raises(UserError, match=r"reads a GGUF file, got .*llama; set policy\.file=FILE\.gguf"):
        load(checkpoints)
    with pytest.raises(UserError, match=r"reads a GGUF file, got .*llama-draft; set policy\.draft_file=FILE"):
        load(checkpoints, "llama_cpp_speculative", file=file)
    with pytest.raises(UserError, match=r"reads a GGUF file, got .*missing\.gguf"):
        load(checkpoints, file=str(tmp_path / "missing.gguf"))
    with pytest.raises(UserError, match="runs decoder-only models here, got .*t5"):
        load(checkpoints, family="t5", file=file)
    other = described_file(checkpoints, tmp_path / "other.gguf", t7="w9")
    with pytest.raises(UserError, match=r"another vocabulary than .*llama, as token 7 is 'w9' in the file and 'w7' in"):
        load(checkpoints, file=other)
    with pytest.raises(UserError, match="another vocabulary"):
        load(checkpoints, "llama_cpp_speculative", file=file, draft_file=other)
    damaged = described_file(checkpoints, tmp_path / "damaged.gguf")
    with pytest.raises(UserError, match=r"cannot read .*damaged\.gguf: ValueError: no magic number; give another file"):
        load(checkpoints, file=damaged)
    with pytest.raises(UserError, match="the longest match must be a whole number >= 1, got 0"):
        load(checkpoints, "llama_cpp_prompt_lookup", file=file, longest_match=0)


@pytest.mark.usefixtures("fake_engines")
def test_it_is_no_lossless_method_at_the_precision_of_its_file(checkpoints: Path, tmp_path: Path, file: str) -> None:
    method = load(checkpoints, file=file).method
    assert (method.precision, method.lossless(Sampling())) == ("Q4_K_M", False)
    small = described_file(checkpoints, tmp_path / "small.gguf", "Q8_0")
    speculative = load(checkpoints, "llama_cpp_speculative", file=file, draft_file=small).method
    assert speculative.precision == "Q4_K_M with Q8_0"


@pytest.mark.usefixtures("fake_engines")
def test_a_longer_text_gets_a_process_with_room_for_it(checkpoints: Path, file: str) -> None:
    decoder = load(checkpoints, file=file)
    method = decoder.method
    assert method.decode(decoder.request([5, 9], 3), Trace())[:2] == [5, 9]
    assert len(method.emission_s) == 3 and sorted(method.emission_s) == method.emission_s
    first, method._positions = method._worker, 8
    assert method.decode(decoder.request([5, 9], 6), Trace())[:2] == [5, 9] and method._worker is first
    assert method.decode(decoder.request([5, 9], 7), Trace())[:2] == [5, 9] and method._worker is not first
    assert (method._positions, first.alive) == (16, False)
    method.close()


@pytest.mark.usefixtures("fake_engines")
def test_a_points_result_has_the_precision_of_the_file_whose_content_is_part_of_its_name(
    checkpoints: Path, data: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"pair.target={checkpoints / 'llama'}", "dataset=multi30k", f"dataset.path={data}", "policy=llama_cpp"]
    words += [f"policy.file={file}", "dataset.limit=2", "decoding.max_new_tokens=4", "measure.warmup=0"]
    point = prepare(compose_config(words))
    result = run_point(point, Sweep(tmp_path / "sweep"))
    assert (result.engine, result.precision, result.setting.dtype) == ("llama_cpp", "Q4_K_M", point.setting["dtype"])
    described_file(checkpoints, Path(file), "Q8_0")
    other = prepare(compose_config(words))
    assert other.id != point.id and other.setting == point.setting
    assert other.decoders["method"].method.precision == "Q8_0"


def gguf_file(checkpoints: Path, path: Path, member: str = "llama") -> str:
    """A tiny Llama as a GGUF file in float32."""
    gguf = pytest.importorskip("gguf")
    checkpoint = Checkpoint(str(checkpoints / member))
    config, module = checkpoint.config, checkpoint.weights(torch.float32)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_file_type(0)
    tokens = sorted(checkpoint.vocabulary, key=checkpoint.vocabulary.get)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([1] * len(tokens))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in module.state_dict().items():
        rows = weight.float()
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:  # llama.cpp turns neighbours, Transformers the halves of a head
                rows = rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), numpy.ascontiguousarray(rows.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.slow
@needs_peers
@pytest.mark.parametrize("policy", LLAMA_CPP)
def test_the_real_library_gives_the_tokens_of_vanilla_from_a_file_in_float32(
    policy: str, checkpoints: Path, tmp_path: Path
) -> None:
    knobs = {"file": gguf_file(checkpoints, tmp_path / "tiny.gguf")}
    if policy == "llama_cpp_speculative":
        knobs["draft_file"] = gguf_file(checkpoints, tmp_path / "draft.gguf", "llama-draft")
    vanilla, peer = load(checkpoints, "vanilla"), load(checkpoints, policy, **knobs)
    assert isinstance(peer.method, LlamaCpp) and peer.method.precision.startswith("F32")
    for prompt in PROMPTS:
        for limit in (1, 2, 7, 25):
            expected = vanilla.generate(prompt, max_new_tokens=limit).token_ids
            assert peer.generate(prompt, max_new_tokens=limit).token_ids == expected
    peer.method.close()
