"""Weights are read from files as a module of Transformers has them, and are never in memory
twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import bild_lab
from bild_lab.engine.models.checkpoint import weights as checkpoint_weights
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.weights import OnDemand, Weights, file_weights
from bild_lab.engine.models.native.stack import Stack, Weight
from bild_lab.errors import UserError
from bild_lab.lab.point.read_model import load_model
from tests.sessions import needs_kernels
from tests.tiny import TINY, save

CPU = torch.device("cpu")
ONE_FILE = "model.safetensors"


def stored(folder: Path, dtype: torch.dtype = torch.float32) -> Weights | None:
    checkpoint = Checkpoint(str(folder))
    return file_weights(checkpoint.weight_files, checkpoint.weightless(), dtype, CPU)


@pytest.mark.fast("t5-one file", "gemma3-shards")
@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("family", ["t5", "llama", "gemma3"])
def test_files_have_what_transformers_loads(family: str, shard: str, tmp_path: Path) -> None:
    folder = tmp_path / family
    save(TINY[family](3), folder)
    Checkpoint(str(folder)).weights(torch.float32).save_pretrained(folder, max_shard_size=shard)
    if shard != "1GB":
        (folder / ONE_FILE).unlink(missing_ok=True)
    found, expected = (
        stored(folder, torch.bfloat16),
        Checkpoint(str(folder)).weights(torch.bfloat16).state_dict(),
    )
    assert set(found) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight.bfloat16()), name


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


def reshaped(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return weights | {"model.norm.weight": torch.ones(3)}


def cut(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in weights.items() if name != "model.norm.weight"}


@pytest.mark.parametrize("change", [renamed, reshaped, cut])
def test_files_that_are_not_the_modules_are_left_to_transformers(
    change: Callable, tmp_path: Path
) -> None:
    save(TINY["llama"](3), tmp_path)
    save_file(change(load_file(tmp_path / ONE_FILE)), tmp_path / ONE_FILE)
    assert stored(tmp_path) is None


def test_tied_weights_are_one_and_nothing_is_held(tmp_path: Path) -> None:
    save(TINY["t5"](3), tmp_path)
    weights = stored(tmp_path)
    embedding = weights["shared.weight"]
    assert weights["lm_head.weight"] is embedding
    gone = weakref.ref(embedding)
    del embedding
    assert gone() is None


def test_items_on_demand_are_those_of_a_list() -> None:
    made = OnDemand(4, lambda index: index * 10)
    assert list(made) == [0, 10, 20, 30] and made[-1] == 30 and len(made) == 4
    with pytest.raises(IndexError):
        made[4]


PEAK = """
import sys
from pathlib import Path
import psutil, torch
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel
if sys.argv[2] == "whole":
    Checkpoint.weight_files = None
NativeModel(HuggingFaceModel(Checkpoint(sys.argv[3]), torch.device("cpu"), torch.bfloat16), kernels=True).load()
before = psutil.Process().memory_info().rss
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
model = NativeModel(HuggingFaceModel(Checkpoint(sys.argv[1]), torch.device("cpu"), torch.bfloat16), kernels=True)
model.load()
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024 - before)
"""


@pytest.mark.slow
@needs_kernels
def test_loading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, vocab_size=400
    )
    module = LlamaForCausalLM(config).bfloat16()
    save(module, tmp_path / "large")
    save(TINY["llama"](3), tmp_path / "tiny")  # takes what the first loading of a process keeps
    size = sum(weight.nbytes for weight in module.state_dict().values())

    def peak(how: str) -> int:
        words = [sys.executable, "-c", PEAK, str(tmp_path / "large"), how, str(tmp_path / "tiny")]
        return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)

    parts, whole = peak("parts"), peak("whole")  # planted: the whole module beside its packed copy
    assert parts < whole - size / 2, (parts / size, whole / size)


def test_a_model_from_files_decodes_as_its_module_does(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts() -> list[list[int]]:
        load_model.cache_clear()
        decoders = [
            bild_lab.load(str(checkpoints / name), policy="vanilla") for name in ("t5", "llama")
        ]
        return [one.generate([5, 9, 12], max_new_tokens=12).token_ids for one in decoders]

    from_files = texts()
    monkeypatch.setattr(Checkpoint, "weight_files", None)
    assert texts() == from_files
    load_model.cache_clear()


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_two_values_of_one_weight_are_refused(engine: str, tmp_path: Path) -> None:
    """Transformers takes that of the last shard, whatever the index names."""
    save(TINY["llama"](3), tmp_path)
    weights = load_file(tmp_path / ONE_FILE)
    (tmp_path / ONE_FILE).unlink()
    shards = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    names = sorted(weights)
    of_shard = dict(zip(shards, (names[:5], names[5:]), strict=True))
    index = {name: shard for shard, stored_names in of_shard.items() for name in stored_names}
    (tmp_path / f"{ONE_FILE}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )

    def store(again: torch.Tensor) -> None:
        """Both shards, the second with the first one's first weight again."""
        for shard, stored_names in of_shard.items():
            held = {name: weights[name] for name in stored_names}
            if shard == shards[1]:
                held |= {names[0]: again}
            save_file(held, tmp_path / shard, metadata={"format": "pt"})

    def load() -> None:
        load_model.cache_clear()
        bild_lab.load(str(tmp_path), policy="vanilla", engine=engine).load_weights()

    store(weights[names[0]].clone())
    load()
    first = weights[names[0]].clone()
    weights[names[0]].flatten()[0] = torch.nan  # planted: equal to nothing
    store(weights[names[0]].clone())
    load()
    weights[names[0]] = first
    store(first.half())  # planted: a traceback, as PyTorch compares no two types
    with pytest.raises(UserError, match=f"both store {names[0]}, with different values"):
        load()
    store(first + 1)
    message = rf"{shards[0]} and {shards[1]} in {tmp_path} both store {names[0]}, with different"
    with pytest.raises(UserError, match=f"^{message} values; remove the one that the index"):
        load()
    load_model.cache_clear()


@pytest.mark.parametrize(
    "other", [lambda weight: weight.view(torch.int32), torch.flatten], ids=["type", "shape"]
)
def test_the_same_bytes_of_another_type_or_shape_are_another_value(
    other: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    places = [str(tmp_path / f"{number}.safetensors") for number in (1, 2, 3)]
    for place, value in zip(places, (weight, weight.clone(), other(weight)), strict=True):
        save_file({"norm": value}, place)
    checkpoint_weights._require_equal("norm", *places[:2])
    with pytest.raises(UserError, match="both store norm, with different values"):
        checkpoint_weights._require_equal("norm", *places[1:])


def test_embeddings_that_encoder_and_decoder_have_apart_are_read_apart(tmp_path: Path) -> None:
    """As Transformers does: it ties no weights that a file stores with different values."""
    save(TINY["t5"](3), tmp_path)
    weights = load_file(tmp_path / ONE_FILE)
    for part, factor in (("encoder", 2.0), ("decoder", 3.0)):
        weights[f"{part}.embed_tokens.weight"] = factor * weights["shared.weight"]
    save_file(weights, tmp_path / ONE_FILE)
    model = load_model(str(tmp_path), None, "cpu", torch.float32, "native")
    module = model.checkpoint.weights(torch.float32)
    assert torch.equal(model.decoder.embedding, module.decoder.embed_tokens.weight)
    assert torch.equal(model.decoder.encoder.embedding, module.encoder.embed_tokens.weight)
    assert not torch.equal(model.decoder.embedding, model.decoder.encoder.embedding)


def test_embeddings_that_a_file_stores_twice_are_one_in_memory(tmp_path: Path) -> None:
    save(TINY["t5"](3), tmp_path)
    weights = load_file(tmp_path / ONE_FILE)
    for part in ("encoder", "decoder"):
        weights[f"{part}.embed_tokens.weight"] = weights["shared.weight"].clone()
    save_file(weights, tmp_path / ONE_FILE)
    decoder = load_model(str(tmp_path), None, "cpu", torch.float32, "native").decoder
    assert decoder.embedding is decoder.encoder.embedding


def storages(stack: Stack) -> set[int]:
    """Where the weights of a decoder or an encoder lie."""
    found = [stack.embedding, stack.head, stack.final_norm]
    for layer in stack.layers:
        for part in vars(layer).values():
            found += [part.matrix, part.bias] if isinstance(part, Weight) else [part]
    return {one.untyped_storage().data_ptr() for one in found if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize("family", TINY)
def test_generate_beside_our_decoder_has_no_second_copy_of_the_weights(
    family: str, tmp_path: Path
) -> None:
    """In another precision than the file's: there nothing can be a view of the file."""
    save(TINY[family](3), tmp_path)
    model = load_model(str(tmp_path), None, "cpu", torch.bfloat16, "native")
    model.load()
    module = model.transformers.module
    held = storages(model.decoder) | (storages(model.decoder.encoder) if family == "t5" else set())
    pointers = {name: one.untyped_storage().data_ptr() for name, one in module.named_parameters()}
    # which decoders hold in other forms
    small = {"t5": "relative_attention_bias", "qwen3": "_norm", "gemma3": "norm"}
    assert [
        name
        for name, at in pointers.items()
        if at not in held and small.get(family, "none") not in name
    ] == []
    ids = torch.tensor([[3, 4, 5]])
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if family == "t5" else {})}
    own = model.checkpoint.weights(torch.bfloat16)
    torch.testing.assert_close(module(**inputs).logits, own(**inputs).logits, atol=0.1, rtol=0.02)


EXTRA = {
    "bias": "model.layers.1.self_attn.q_proj.bias",
    "adapter": "model.layers.0.mlp.up_proj.lora_A.weight",
    "norm": "model.layers.0.self_attn.q_norm.weight",
    "head": "lm_head.bias",
}
BESIDE = (
    "model.layers.2.self_attn.q_proj.weight",  # a layer that predicts further tokens
    "mtp.fc.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.self_attn.bias",
    "model.layers.0.self_attn.k_proj.k_scale",
)


@pytest.mark.parametrize("engine", ["auto", "hf"])
@pytest.mark.parametrize("kind", EXTRA)
def test_weights_that_layers_have_no_place_for_are_refused(
    kind: str, engine: str, tmp_path: Path
) -> None:
    """Planted: biases, norms and adapters that Transformers leaves out as config.json does not name
    them, without a word.
    """
    save(TINY["llama"](3), tmp_path)
    weights = load_file(tmp_path / ONE_FILE)
    save_file(weights | {EXTRA[kind]: torch.ones(32)}, tmp_path / ONE_FILE)
    decoder = bild_lab.load(str(tmp_path), policy="vanilla", engine=engine)
    with pytest.raises(UserError, match=f"no place for.*{EXTRA[kind]} first"):
        decoder.generate("w5", 2)


@pytest.mark.parametrize("extra", [*BESIDE, "zeros"])
def test_weights_beside_the_layers_and_biases_of_zero_change_nothing(
    extra: str, tmp_path: Path
) -> None:
    save(TINY["llama"](3), tmp_path)
    expected = bild_lab.load(str(tmp_path), policy="vanilla").generate("w5 w9", 8).token_ids
    weights = load_file(tmp_path / ONE_FILE)
    added = {extra: torch.ones(32)}
    if extra == "zeros":  # as quantizers store them
        added = {EXTRA["bias"]: torch.zeros(32)}
    save_file(weights | added, tmp_path / ONE_FILE)
    assert bild_lab.load(str(tmp_path), policy="vanilla").generate("w5 w9", 8).token_ids == expected


def test_biases_of_zero_in_pickles_change_nothing(tmp_path: Path) -> None:
    """Planted: of pickles every bias without a place was refused, whatever its value."""
    save(TINY["llama"](3), tmp_path)
    weights = load_file(tmp_path / ONE_FILE)
    (tmp_path / ONE_FILE).unlink()
    for value, refused in ((0.0, False), (1.0, True)):
        added = {EXTRA["bias"]: torch.full((32,), value)}
        torch.save(weights | added, tmp_path / "pytorch_model.bin")
        decoder = bild_lab.load(str(tmp_path), policy="vanilla", allow_pickles=True)
        with pytest.raises(UserError, match="no place for") if refused else nullcontext():
            assert decoder.generate("w5", 2).token_ids


@pytest.mark.parametrize(("value", "refused"), [(0.0, False), (1.0, True)])
def test_weights_without_a_place_are_found_in_files_of_the_model_without_its_head(
    value: float, refused: bool, tmp_path: Path
) -> None:
    """Transformers adds the prefix to their names. Planted: a bias there was left out without a word."""
    save(TINY["llama"](3), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(tmp_path / ONE_FILE)
    del weights["lm_head.weight"]
    weights[EXTRA["bias"]] = torch.full((32,), value)
    unprefixed = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(unprefixed, tmp_path / ONE_FILE)
    decoder = bild_lab.load(str(tmp_path), policy="vanilla")
    with pytest.raises(UserError, match="no place for") if refused else nullcontext():
        assert decoder.generate("w5", 2).token_ids
