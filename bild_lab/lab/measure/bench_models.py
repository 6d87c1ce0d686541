"""The models of the benchmark: typical dimensions with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.initialization import no_init_weights

from bild_lab.engine.models.checkpoint import Checkpoint


def t5(dim: int, layers: int, heads: int, hidden: int, **others: Any) -> T5Config:
    return T5Config(
        d_model=dim,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        d_ff=hidden,
        decoder_start_token_id=0,
        **others,
    )


def llama(layers: int, dim: int = 768, hidden: int = 2048, heads: int = 12, vocabulary: int = 32000) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


@dataclass(frozen=True)
class Shape:
    """A target of published dimensions, its drafter, and how many tokens a run decodes.

    Weights are random: speed does not depend on their values. rounds: how often a text is decoded. gpu: whether the
    shape is one for a GPU.
    """

    target: Callable[[], PreTrainedConfig]
    drafter: Callable[[], PreTrainedConfig] | None
    new_tokens: int
    rounds: int = 11
    gpu: bool = False


SHAPES = {
    "t5_small": Shape(lambda: t5(512, 6, 8, 2048), None, 48),
    "t5_large": Shape(lambda: t5(1024, 24, 16, 4096), lambda: t5(512, 6, 8, 2048), 18, rounds=5),
    "llama_2": Shape(lambda: llama(2), None, 48),
    "llama_12": Shape(lambda: llama(12), lambda: llama(2), 24, rounds=9),
    "llama_1b": Shape(lambda: llama(16, 2048, 8192, 32), lambda: llama(2, 512, 1536, 8), 64, rounds=5, gpu=True),
    "t5_3b": Shape(lambda: t5(1024, 24, 32, 16384, d_kv=128), lambda: t5(512, 6, 8, 2048), 64, rounds=5, gpu=True),
}


@dataclass(frozen=True)
class SyntheticCheckpoint(Checkpoint):
    """Random weights of a configuration, in memory, with the interface of a checkpoint."""

    shape: PreTrainedConfig = field(default_factory=T5Config)

    @cached_property
    def config(self) -> PreTrainedConfig:
        return self.shape

    @cached_property
    def generation(self) -> GenerationConfig:
        return GenerationConfig(pad_token_id=0, decoder_start_token_id=0)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return {f"t{index}": index for index in range(self.shape.vocab_size)}

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset()  # every run decodes to its length limit

    def weights(self, dtype: torch.dtype) -> PreTrainedModel:
        auto = AutoModelForSeq2SeqLM if self.encoder_decoder else AutoModelForCausalLM
        with no_init_weights():
            model = auto.from_config(self.shape, dtype=dtype)
        model.tie_weights()  # the skipped initialization would do this
        size = 1 << 20
        block = torch.randn(size, generator=torch.Generator().manual_seed(0)).repeat(2)
        for index, (name, weight) in enumerate(model.named_parameters()):
            flat = weight.data.view(-1)
            if "norm" in name:
                flat.fill_(1.0)
                continue
            # with small weights and tied embeddings a model repeats the last token, so every draft is accepted
            scale = 1.0 if "embed" in name or "shared" in name else 0.002
            # the same numbers everywhere, but no matrix equals another: some engines keep equal ones once
            numbers = block[index * 9973 % size :][:size] * scale
            for start in range(0, flat.numel(), size):
                part = flat[start : start + size]
                part.copy_(numbers[: part.numel()])
        return model.eval()


def save(module: PreTrainedModel, folder: Path) -> Checkpoint:
    """Write a module for engines that read files, with a tokenizer of made-up words, one for each token id."""
    module.save_pretrained(folder)
    words = {f"t{index}": index for index in range(module.config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t2"))
    names = {"pad_token": "t0", "bos_token": "t0", "eos_token": "t1", "unk_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return Checkpoint(str(folder))
