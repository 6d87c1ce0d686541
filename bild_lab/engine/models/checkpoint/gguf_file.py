"""GGUF, the file of llama.cpp, as a checkpoint: configuration, tokenizer, end tokens and weights
from one file.

Sources: ggml's docs/gguf.md; of llama.cpp convert_hf_to_gguf.py for what is changed on the way into
a file (`LlamaModel.permute` and `generate_extra_tensors`, `Gemma3Model.modify_tensors`),
src/llama-model.cpp for what settings mean, src/llama-vocab.cpp for tokens that end a text.
Transformers' own `gguf_file` takes minutes for a vocabulary of 150,000 pieces, reads all weights as
float32, and knows neither head widths of Qwen 3 nor scaled rotations.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    LlamaFileType,
    dequantize,
    get_tensor_name_map,
)
from gguf.quants import quant_shape_to_byte_shape
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.gguf_tokenizer import tokenizer_of
from bild_lab.engine.models.checkpoint.hub import no_progress_bars
from bild_lab.engine.models.checkpoint.weights import StoredWeights, file_weights
from bild_lab.errors import UserError
from bild_lab.files import file_digest

SUFFIX = ".gguf"
STEP = 1 << 19  # numbers that are unpacked at once: few enough for the processor's cache
SHORT = 1000  # longer lists, which are of the vocabulary, are passed over
AGAIN = "download it again, or convert the model anew"
OTHERWISE = "give the model's folder in Transformers' layout instead"

# Transformers' model type for each architecture of llama.cpp, whose name for Mistral's is llama
MODEL_TYPES = {
    "llama": ("llama", MODEL_ARCH.LLAMA),
    "qwen2": ("qwen2", MODEL_ARCH.QWEN2),
    "qwen3": ("qwen3", MODEL_ARCH.QWEN3),
    "gemma3": ("gemma3_text", MODEL_ARCH.GEMMA3),
}
NEEDED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# settings that are read besides; one that is neither here nor zero changes the model in a way that
# is not known here
READ = (
    "attention.head_count_kv attention.key_length attention.value_length attention.sliding_window"
    " attention.sliding_window_pattern rope.dimension_count rope.freq_base rope.freq_base_swa"
    " rope.scaling.type rope.scaling.factor rope.scaling.original_context_length"
    " rope.scaling.finetuned vocab_size tensor_data_layout"
).split()
# what Llama 3.1 and later divide the frequencies of their rotations by
FREQUENCIES = "rope_freqs.weight"
LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# the types whose blocks the kernels read
KERNEL_TYPES = (
    *(getattr(GGMLQuantizationType, name) for name in "Q8_0 Q5_0 Q4_0 Q4_K Q6_K".split()),
)
PLAIN = [getattr(GGMLQuantizationType, name) for name in ("F32", "F16", "BF16")]
ENDS = "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <end_of_turn>".split()


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of a file.

    type: how its numbers are packed.
    shape: in PyTorch's order.
    start: its first byte.
    heads: its rows are those of so many heads, in each of which a row of the first half alternates
        with one of the second, as llama.cpp rotates them; 0: they are as in Transformers.
    added: to every number, on the way into the file.
    dtype: in which rows of a table are read.
    """

    device: ClassVar[torch.device] = torch.device("cpu")

    file: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    heads: int = 0
    added: float = 0.0
    dtype: torch.dtype = torch.float32

    def blocks(self) -> UInt8[np.ndarray, "*rows bytes"]:
        """The packed bytes, read from the file, their rows in Transformers' order.

        No block spans two rows.
        """
        shape = quant_shape_to_byte_shape(self.shape, self.type)
        stored = np.fromfile(self.file, np.uint8, prod(shape), offset=self.start)
        if self.heads:
            stored = stored.reshape(self.heads, self.shape[0] // self.heads // 2, 2, -1).swapaxes(
                1, 2
            )
        return stored.reshape(shape)

    @torch.inference_mode(False)  # inference mode would hold for this thread alone
    def numbers(self, dtype: torch.dtype) -> Float[Tensor, "*shape"]:
        """What they stand for: computed in float32, a part of the rows at a time, then rounded."""
        blocks, width = self.blocks(), self.shape[-1]
        rows, step = blocks.reshape(-1, blocks.shape[-1]), max(1, STEP // width)
        numbers = torch.empty(len(rows), width, dtype=dtype)

        def unpack(start: int) -> None:
            chunk = dequantize(rows[start : start + step], self.type) - np.float32(self.added)
            numbers[start : start + step] = torch.from_numpy(chunk)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(unpack, range(0, len(rows), step)))  # a list raises what a part raised
        return numbers.view(self.shape)

    def __getitem__(self, rows: Int[Tensor, " n"] | slice) -> Float[Tensor, "n dim"]:
        """The numbers of these rows of a table, which alone are read."""
        shape = quant_shape_to_byte_shape(self.shape, self.type)
        stored = np.memmap(self.file, np.uint8, "r", self.start, shape)
        if isinstance(rows, Tensor):  # NumPy would take a tensor of one number for that number
            rows = rows.numpy()
        return torch.from_numpy(dequantize(stored[rows], self.type)).to(self.dtype)


class HeaderReader(GGUFReader):
    """Reads a file's settings and where its tensors lie; of a long list, such as the vocabulary,
    only its length.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list, list[int], list[GGUFValueType]]:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if count > SHORT:
                at = orig_offs + 12
                if kind == GGUFValueType.STRING:
                    for _ in range(count):
                        at += 8 + struct.unpack_from("<Q", self.data, at)[0]
                else:
                    at += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(kind)]).itemsize
                return at - orig_offs, [np.array([count])], [0], [GGUFValueType.UINT64]
        return super()._get_field_parts(orig_offs, raw_type)


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """A GGUF file.

    Its weights are dequantized to the precision that is asked for; the kernels may keep its blocks.
    """

    in_folder: ClassVar[bool] = False
    on_hub: ClassVar[bool] = False

    @cached_property
    def _header(self) -> tuple[dict[str, Any], dict[str, PackedTensor]]:
        """The file's settings and tensors.

        Raises UserError for one that is missing, damaged or cut short.
        """
        file = Path(self.location)
        if not file.is_file():
            raise UserError(
                f"no GGUF file {self.path}; give the path of one, or a folder with config.json"
            )
        try:
            reader = HeaderReader(file)
            values = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error) as error:
            raise UserError(
                f"wanted a GGUF file, got {self.path}, damaged or cut short: {error}; {AGAIN}"
            ) from error
        return values, {
            tensor.name: PackedTensor(
                file, tensor.tensor_type, tuple(tensor.shape.tolist()[::-1]), tensor.data_offset
            )
            for tensor in reader.tensors
        }

    @cached_property
    def config(self) -> PreTrainedConfig:
        header = self._header
        try:
            return configuration(*header)
        except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
            text = " ".join(str(error).split())
            raise UserError(
                f"{self.path} is no model that is known here: {text}; {OTHERWISE}"
            ) from error

    @property
    def precision(self) -> str:
        """How most of the weights are packed, by llama.cpp's name, such as q4_k_m."""
        names = {file_type.value: file_type.name for file_type in LlamaFileType}
        name = names.get(self._header[0].get("general.file_type"), "unknown")
        return name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        _ = self._header  # refuses a damaged file
        try:
            return tokenizer_of(self.location)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise UserError(
                f"the tokenizer of {self.path} cannot be built: {error}; {OTHERWISE}"
            ) from error

    @cached_property
    def generation(self) -> GenerationConfig:
        """End tokens as llama.cpp finds them: those that the file names, and pieces known to end
        texts and turns. Not those of filling in code, such as `<|fim_pad|>`, which no folder has.
        """
        values = self._header[0]
        named = (values.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
        ends = [token for token in (*named, *map(self.vocabulary.get, ENDS)) if token is not None]
        return GenerationConfig(
            **special_tokens(values) | {"eos_token_id": list(dict.fromkeys(ends)) or None}
        )

    def check(self) -> None:
        """Raise UserError also for tensors that are not those of the settings."""
        super().check()
        _ = self.packed

    @cached_property
    def packed(self) -> dict[str, PackedTensor]:
        """The tensors by their names in Transformers; one that is tied to another is not among
        them.

        Raises UserError unless each weight of the model is there, in its shape, and nothing else.
        """
        module, model_type, packed_tensors = self.weightless(), self.config.model_type, {}
        (architecture,) = (arch for name, arch in MODEL_TYPES.values() if name == model_type)
        names, left = get_tensor_name_map(architecture, self.depth), dict(self._header[1])
        left.pop(FREQUENCIES, None)
        for name, weight in module.state_dict().items():
            module_path, _, kind = name.rpartition(".")
            stored = f"{names.get_name(module_path)}.{kind}"
            if stored not in left and name in module.all_tied_weights_keys:
                continue
            tensor = left.pop(stored, None)
            if tensor is None or tensor.shape != tuple(weight.shape):
                got = "none" if tensor is None else list(tensor.shape)
                raise UserError(
                    f"{self.path}: wanted {stored} of shape {list(weight.shape)}, got {got};"
                    f" {AGAIN}"
                )
            added = float(model_type == "gemma3_text" and module_path.endswith("norm"))
            packed_tensors[name] = replace(
                tensor, heads=_reordered_heads(self.config, module_path), added=added
            )
        if left:
            raise UserError(
                f"{self.path} also holds {min(left)}, which is not known of a {model_type};"
                f" {OTHERWISE}"
            )
        for kind in {tensor.type for tensor in packed_tensors.values()}:
            self._require_unpacked(kind)
        return packed_tensors

    def _require_unpacked(self, kind: GGMLQuantizationType) -> None:
        """Raise UserError for a type of weights that cannot be unpacked."""
        try:
            dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path} has weights of type {kind.name}, which the package gguf cannot unpack;"
                " give a file of another type"
            ) from error

    @cached_property
    def kernel_blocks(self) -> dict[str, PackedTensor]:
        """The matrices whose blocks the kernels read as they are.

        Raises UserError if they cannot read all.
        """
        matrices = {name: tensor for name, tensor in self.packed.items() if len(tensor.shape) == 2}
        for name, tensor in matrices.items():
            beside = matrices.get(name.replace("gate_proj", "up_proj"), tensor)
            if tensor.type not in (*KERNEL_TYPES, *PLAIN) or beside.type != tensor.type:
                got = " beside ".join(
                    dict.fromkeys(neighbour.type.name for neighbour in (tensor, beside))
                )
                known = ", ".join(kind.name for kind in KERNEL_TYPES)
                raise UserError(
                    f"weights=gguf wants blocks of {known}, in a gate those of what it gates, got"
                    f" {got} for {name} in {self.path}; set 8, 4 or null, or give a file of another"
                    " type"
                )
        return {name: tensor for name, tensor in matrices.items() if tensor.type in KERNEL_TYPES}

    @property
    def weight_files(self) -> StoredWeights:
        shapes = {name: tensor.shape for name, tensor in self.packed.items()}
        return StoredWeights(shapes, lambda name, dtype: self.packed[name].numbers(dtype))

    def weights(self, dtype: torch.dtype, **placement: Any) -> PreTrainedModel:
        outline = self.weightless()
        weights = file_weights(self.weight_files, outline, dtype, torch.device("cpu"))
        inputs = {
            "config": copy.deepcopy(self.config),
            "state_dict": {name: weights[name] for name in self.packed},
        }
        with no_progress_bars():
            module = type(outline).from_pretrained(None, **inputs, dtype=dtype, **placement)
        module.generation_config = copy.deepcopy(self.generation)
        return module

    @property
    def files(self) -> Path:
        raise UserError(
            f"wanted a folder in Transformers' layout, got the GGUF file {self.path}; give one"
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the file."""
        return file_digest(Path(self.location))[:16]


def configuration(
    values: Mapping[str, Any], tensors: Mapping[str, PackedTensor]
) -> PreTrainedConfig:
    """The configuration of a file's model. Raises ValueError for one that is not known."""
    architecture = values.get("general.architecture")
    if architecture not in MODEL_TYPES:
        raise ValueError(
            f"its architecture is {architecture}, and {', '.join(MODEL_TYPES)} are known"
        )
    if (kind := values.get("general.type", "model")) != "model":
        raise ValueError(f"its type is {kind}")
    if (parts := values.get("split.count", 0)) > 1:
        raise ValueError(f"it is one of {parts} parts, which llama-gguf-split --merge joins")
    settings = _architecture_settings(values, architecture)
    layers = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
    if settings["block_count"] != layers:
        raise ValueError(
            f"its {architecture}.block_count is {settings['block_count']}, and it holds {layers}"
            " layers"
        )
    fields = {field: settings[key] for key, field in NEEDED.items()}
    heads = settings["attention.head_count"]
    config = AutoConfig.for_model(
        MODEL_TYPES[architecture][0],
        **fields,
        **special_tokens(values),
        vocab_size=tensors["token_embd.weight"].shape[0],
        num_key_value_heads=settings.get("attention.head_count_kv", heads),
        head_dim=_head_width(settings, architecture),
        rope_parameters=_rotation(settings),
        tie_word_embeddings="output.weight" not in tensors,
    )
    if architecture == "gemma3":
        _set_gemma3(config, settings)
    if FREQUENCIES in tensors:
        _set_llama3_rotation(config, tensors[FREQUENCIES].numbers(torch.float32))
    return config


def _architecture_settings(values: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """An architecture's own settings in a file, without the architecture's name before each. Raises
    ValueError for one that is not known.
    """
    prefix = f"{architecture}."
    settings = {
        key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)
    }
    for key, value in settings.items():
        if key not in (*NEEDED, *READ) and value:
            raise ValueError(f"its setting {prefix}{key} is {value}")
    return settings


def _head_width(settings: Mapping[str, Any], architecture: str) -> int:
    """The width of a head. Raises ValueError where its values or its rotation have another."""
    width = (
        settings.get("attention.key_length")
        or settings.get("rope.dimension_count")
        or settings["embedding_length"] // settings["attention.head_count"]
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.get(key, width) != width:
            raise ValueError(
                f"its {architecture}.{key} is {settings[key]}, and a head is {width} wide"
            )
    return width


def _reordered_heads(config: PreTrainedConfig, module_path: str) -> int:
    """The heads whose rows a Llama's file has in another order; 0 for other matrices."""
    if config.model_type != "llama":
        return 0
    if module_path.endswith("q_proj"):
        return config.num_attention_heads
    return config.num_key_value_heads if module_path.endswith("k_proj") else 0


def recognized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as what its path names: a GGUF file, or a model as it is."""
    is_file = checkpoint.path.endswith(SUFFIX) and not checkpoint.in_folder
    return GgufCheckpoint(checkpoint.path) if is_file else checkpoint


def special_tokens(values: Mapping[str, Any]) -> dict[str, int | None]:
    """The special tokens that a file's settings name, by the names of Transformers'
    configurations.
    """
    names = {"eos": "eos", "bos": "bos", "pad": "padding"}
    return {
        f"{role}_token_id": values.get(f"tokenizer.ggml.{gguf_role}_token_id")
        for role, gguf_role in names.items()
    }


def _rotation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary positions of an architecture's own settings.

    Raises ValueError for a scaling that is not known.
    """
    rotation = {"rope_type": "default", "rope_theta": settings.get("rope.freq_base", 10000.0)}
    kind = settings.get("rope.scaling.type", "linear")
    factor = settings.get("rope.scaling.factor") or 1.0
    if kind == "none" or factor == 1.0:
        return rotation
    if kind not in ("linear", "yarn"):
        raise ValueError(f"its rotary scaling is {kind}")
    if kind == "yarn":
        trained = settings.get("rope.scaling.original_context_length", settings["context_length"])
        rotation["original_max_position_embeddings"] = trained
    return rotation | {"rope_type": kind, "factor": factor}


def _set_llama3_rotation(config: PreTrainedConfig, divisors: Float[Tensor, " half"]) -> None:
    """Set the scaling that divides frequencies by these.

    Raises ValueError if it is not Llama 3's.
    """
    theta, half = config.rope_parameters["rope_theta"], config.head_dim // 2
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": divisors.max().item(),
        **LLAMA_3,
    }
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    expected = theta ** (-torch.arange(half) / half) / frequencies
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"its {FREQUENCIES} is not Llama 3's")


def _set_gemma3(config: PreTrainedConfig, settings: Mapping[str, Any]) -> None:
    """Set what Gemma 3 has besides: windows, a rotation for layers that have one, and the scale of
    attention.
    """
    config.sliding_window = settings["attention.sliding_window"]
    pattern = settings.get("attention.sliding_window_pattern", 6)  # every sixth layer sees all
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern != 0 for layer in range(config.num_hidden_layers)]
    config.layer_types = [
        "sliding_attention" if windowed else "full_attention" for windowed in pattern
    ]
    near = {"rope_type": "default", "rope_theta": settings.get("rope.freq_base_swa", 10000.0)}
    config.rope_parameters = {"full_attention": _rotation(settings), "sliding_attention": near}
    of_27b = config.num_hidden_layers == 62
    config.query_pre_attn_scalar = (
        config.hidden_size // config.num_attention_heads if of_27b else config.head_dim
    )
