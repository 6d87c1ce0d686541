"""The settings of a GGUF file as a configuration of Transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedConfig

from bild_lab.engine.models.checkpoint.gguf_file import (
    GgufCheckpoint,
    configuration,
    special_tokens,
)

LLAMA = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 128,
    "attention.head_count": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def configured(
    architecture: str = "llama", layers: int = 2, tied: bool = False, **settings: Any
) -> PreTrainedConfig:
    """settings: of the architecture, dots as two underscores; None: without."""
    own = {key.replace("__", "."): value for key, value in settings.items()}
    given = {**LLAMA, "block_count": layers, **own}
    values = {f"{architecture}.{key}": value for key, value in given.items() if value is not None}
    tensors = {f"blk.{layer}.attn_norm.weight": SimpleNamespace() for layer in range(layers)}
    tensors["token_embd.weight"] = SimpleNamespace(shape=(40, 64))
    if not tied:
        tensors["output.weight"] = SimpleNamespace(shape=(40, 64))
    return configuration({"general.architecture": architecture, **values}, tensors)


def test_sizes_that_a_file_does_not_name_follow_from_the_others() -> None:
    config = configured()
    assert (config.hidden_size, config.intermediate_size) == (64, 128)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (2, 256)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 8, 8)
    assert config.rms_norm_eps == 1e-5 and not config.tie_word_embeddings
    assert configured(tied=True).tie_word_embeddings
    # the table decides
    assert configured(vocab_size=99).vocab_size == configured().vocab_size == 40
    assert configured(attention__head_count_kv=2).num_key_value_heads == 2


def test_the_width_of_a_head_is_that_of_its_keys_or_of_its_rotation() -> None:
    assert configured(rope__dimension_count=16).head_dim == 16
    whole = {"attention__key_length": 16, "attention__value_length": 16}
    assert configured(**whole, rope__dimension_count=16).head_dim == 16
    for key in ("attention__value_length", "rope__dimension_count"):
        with pytest.raises(ValueError, match="and a head is 16 wide"):
            configured(**whole | {key: 8})


def test_a_setting_that_is_not_known_counts_unless_it_is_zero() -> None:
    assert configured(attention__scale=0.0, expert_count=0).hidden_size == 64
    with pytest.raises(ValueError, match=r"its setting llama\.expert_count is 8"):
        configured(expert_count=8)
    with pytest.raises(ValueError, match=r"setting llama\.rope\.scaling\.attn_factor is 1\.5"):
        configured(rope__scaling__attn_factor=1.5)


def test_a_file_holds_as_many_layers_as_it_says() -> None:
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"block_count is {count}, and it holds 2 layers"):
            configured(**{"block_count": count})


@pytest.mark.parametrize(
    ("settings", "rotation"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope__freq_base": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {"rope_type": "default"}),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 1.0}, {"rope_type": "default"}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_the_rotation_is_scaled_as_the_file_says(
    settings: dict[str, Any], rotation: dict[str, Any]
) -> None:
    found = configured(**settings).rope_parameters
    assert {key: found[key] for key in rotation} == rotation
    assert ("factor" in found) == ("factor" in rotation)


def test_a_scaling_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="its rotary scaling is longrope"):
        configured(rope__scaling__type="longrope", rope__scaling__factor=4.0)


def test_windows_of_gemma_3_are_all_but_every_sixth_layer_unless_the_file_says() -> None:
    gemma = {"attention__sliding_window": 32, "attention__key_length": 16}
    config = configured("gemma3", 12, **gemma, rope__freq_base=1e6)
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    assert windowed == [True, True, True, True, True, False] * 2 and config.sliding_window == 32
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    assert config.query_pre_attn_scalar == 16
    own = configured(
        "gemma3",
        2,
        **gemma,
        attention__sliding_window_pattern=[False, True],
        rope__freq_base_swa=50.0,
    )
    assert own.layer_types == ["full_attention", "sliding_attention"]
    assert own.rope_parameters["sliding_attention"]["rope_theta"] == 50.0
    # the one of 27B, whose scale is that of its width and heads
    assert configured("gemma3", 62, **gemma).query_pre_attn_scalar == 64 // 8


def test_special_tokens_have_the_names_of_transformers() -> None:
    values = {f"tokenizer.ggml.{role}_token_id": place for place, role in enumerate(ROLES)}
    expected = {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}
    assert special_tokens(values) == expected
    assert special_tokens({}) == dict.fromkeys(expected)


ROLES = ("eos", "bos", "padding")


@pytest.mark.parametrize(
    ("named", "pieces", "ends"),
    [
        ({"eos": 7}, {}, [7]),
        ({"eos": 7, "eot": 3, "eom": 5}, {"<|eot_id|>": 3}, [7, 3, 5]),
        ({}, {"<|im_end|>": 2, "<end_of_turn>": 9, "<|fim_pad|>": 4}, [2, 9]),
        ({}, {}, None),
    ],
)
def test_tokens_that_end_a_text_are_those_named_and_those_known(
    named: dict[str, int], pieces: dict[str, int], ends: list[int] | None
) -> None:
    checkpoint = GgufCheckpoint("a.gguf")
    values = {f"tokenizer.ggml.{end}_token_id": token for end, token in named.items()}
    vars(checkpoint).update(_header=(values, {}), vocabulary=pieces)
    assert checkpoint.generation.eos_token_id == ends
