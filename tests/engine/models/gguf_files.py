"""GGUF files of tiny models, written as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFWriter, TokenType, dequantize, get_tensor_name_map, quantize
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bild_lab.engine.models.checkpoint.gguf_file import (
    LLAMA_3,
    MODEL_TYPES,
)
from tests.tiny import DECODER_SIZES, with_norms

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
SIZES = DECODER_SIZES | WIDE | {"initializer_range": 0.1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, **LLAMA_3}
WINDOWED = {
    **{
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 4,
        "tie_word_embeddings": True,
    },
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    },
}
MODELS = {  # llama.cpp's architecture, Transformers' configuration
    "llama": ("llama", {"head_dim": 64, "rope_parameters": SCALED}),
    "mistral": ("llama", {"head_dim": 64, "sliding_window": None}),
    "qwen2": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "gemma3_text": ("gemma3", WINDOWED),
}
PROMPT = [5, 9, 12, 30, 7, 9, 12, 33, 21, 4]
PIECES = [
    "<pad>",
    "</s>",
    "<s>",
    "<unk>",
    "<end_of_turn>",
    "▁",
    *"abcdefghijklmnopqrstuvwxyz",
    *"ABCDEFG",
    "ab",
]
TOKENIZER_SETTINGS = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
}


def tiny(model_type: str) -> PreTrainedModel:
    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **SIZES | MODELS[model_type][1])
    )
    for name, weight in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return with_norms(module).eval()


def alternating(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows as llama.cpp has them: in each head, one of the first half before one of the
    second.
    """
    half = len(weight) // heads // 2
    order = [
        2 * half * head + row + half * second
        for head in range(heads)
        for row in range(half)
        for second in (0, 1)
    ]
    return weight[order]


def random_blocks(rows: int, width: int, kind: Type) -> np.ndarray:
    """Blocks of a type that the package cannot make of numbers, with scales that keep them
    small.
    """
    per_block, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(rows).integers(
        0, 256, (rows, width // per_block, size), dtype=np.uint8
    )
    places, scale = {Type.Q4_K: ((0, 2), 2e-4), Type.Q6_K: ((208,), 3e-5)}[kind]
    for place in places:
        blocks[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write(
    module: PreTrainedModel,
    path: Path,
    kind: Type | Callable[[str], Type] = Type.F32,
    **changes: Any,
) -> Path:
    """The file of a module, whose weights become what the file stands for. changes: of its
    settings; None: without.

    kind: of the matrices, or of each by its name.
    """
    kind_of = kind if callable(kind) else lambda _: kind
    architecture = MODELS[module.config.model_type][0]
    # 1. the settings
    writer = GGUFWriter(path, changes.pop("architecture", architecture))
    write_settings(writer, settings_of(module) | TOKENIZER_SETTINGS | changes)
    writer.add_token_list(PIECES)
    writer.add_token_scores([-float(index) for index in range(40)])
    writer.add_token_types([TokenType.CONTROL] * 5 + [TokenType.NORMAL] * 35)
    # 2. the weights
    names = get_tensor_name_map(MODEL_TYPES[architecture][1], 2)
    for name, weight in module.named_parameters():
        module_path, _, suffix = name.rpartition(".")
        stored_name = f"{names.get_name(module_path)}.{suffix}"
        if weight.ndim == 2:
            blocks = blocks_of(weight, kind_of(name))
            weight.data = torch.from_numpy(dequantize(blocks, kind_of(name)).copy())
            if architecture == "llama" and module_path.endswith(("q_proj", "k_proj")):
                blocks = alternating(blocks, 8 if module_path.endswith("q_proj") else 2)
            writer.add_tensor(stored_name, blocks, raw_dtype=kind_of(name))
        else:
            numbers = weight.detach().numpy()
            if architecture == "gemma3" and module_path.endswith("norm"):
                numbers = numbers + 1
            writer.add_tensor(stored_name, numbers)
    rotation = module.config.rope_parameters
    if rotation.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rotation))
    # 3. the file
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def settings_of(module: PreTrainedModel) -> dict[str, Any]:
    """The architecture's own settings in a module's file."""
    config, model_type = module.config, module.config.model_type
    architecture, rotation = MODELS[model_type][0], dict(config.rope_parameters)
    settings: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": 256,
        "block_count": 2,
        "feed_forward_length": 256,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if head_dim := MODELS[model_type][1].get("head_dim"):
        settings |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if model_type == "gemma3_text":
        near, rotation = rotation["sliding_attention"], rotation["full_attention"]
        settings |= {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2}
        settings["rope.freq_base_swa"] = near["rope_theta"]
    settings["rope.freq_base"] = rotation["rope_theta"]
    if rotation["rope_type"] in ("yarn", "linear"):
        settings |= {
            "rope.scaling.type": rotation["rope_type"],
            "rope.scaling.factor": rotation["factor"],
        }
    if rotation["rope_type"] == "yarn":
        settings["rope.scaling.original_context_length"] = 64
    return {f"{architecture}.{key}": value for key, value in settings.items()}


def write_settings(writer: GGUFWriter, settings: Mapping[str, Any]) -> None:
    """Write these settings, each by its type; those that are None are left out."""
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in settings.items():
        if value is not None:
            add[type(value)](key, value)


def blocks_of(matrix: torch.Tensor, kind: Type) -> np.ndarray:
    """A matrix as the file stores it; of a type that the package cannot make, other numbers."""
    if kind in (Type.Q4_K, Type.Q6_K):
        return random_blocks(*matrix.shape, kind)
    return quantize(matrix.detach().numpy(), kind)


def llama3_divisors(rotation: dict[str, float]) -> np.ndarray:
    """As in `generate_extra_tensors` of llama.cpp's converter."""
    divisors = []
    for index in range(32):
        turns = 8192 / (2 * np.pi * rotation["rope_theta"] ** (index / 32))
        smooth = min(max((turns - 1) / (4 - 1), 0), 1)
        divisors.append(1 / ((1 - smooth) / rotation["factor"] + smooth))
    return np.array(divisors, np.float32)
