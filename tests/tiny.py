"""Random models small enough to decode thousands of tokens a second, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from bild_lab.engine.request import Source

VOCABULARY = 40
PAD, END, START = 0, 1, 2
WORDS = [f"w{index}" for index in range(3, VOCABULARY)]


def source_of(family: str, words: Sequence[int]) -> Source:
    """A prompt of these words, as a tokenizer of the family ends or begins it."""
    if family == "t5":
        return Source((PAD,), torch.tensor([[*words, END]]))
    return Source((START, *words))


def tiny_t5(
    seed: int, layers: int = 2, decoder_layers: int | None = None, sharpness: float = 6.0
) -> PreTrainedModel:
    """A T5 v1.1 with an untied head: a tied random T5 repeats one token for ever."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        num_layers=layers,
        num_decoder_layers=decoder_layers or layers,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=END,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "layer_norm" not in name:
            torch.nn.init.normal_(weight, std=0.5 if "relative" in name else 0.25)
    return untied(model, sharpness)


DECODER_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": START,
}


def tiny_llama(seed: int, layers: int = 2, sharpness: float = 3.0) -> PreTrainedModel:
    """A Llama with grouped-query attention."""
    torch.manual_seed(seed)
    return untied(
        LlamaForCausalLM(LlamaConfig(**DECODER_SIZES, num_hidden_layers=layers)), sharpness
    )


def tiny_qwen3(
    seed: int, layers: int = 2, sharpness: float = 3.0, head_dim: int = 12
) -> PreTrainedModel:
    """A Qwen3 whose every second layer sees a short window only."""
    torch.manual_seed(seed)
    kinds = [("full_attention", "sliding_attention")[index % 2] for index in range(layers)]
    windows = {"use_sliding_window": True, "sliding_window": 4, "layer_types": kinds}
    model = Qwen3ForCausalLM(
        Qwen3Config(**DECODER_SIZES, **windows, num_hidden_layers=layers, head_dim=head_dim)
    )
    return untied(with_norms(model), sharpness)


def tiny_gemma3(
    seed: int, layers: int = 2, sharpness: float = 3.0, head_dim: int = 12
) -> PreTrainedModel:
    """A Gemma 3 whose every second layer, the first one too, sees a short window only and rotates
    faster.
    """
    torch.manual_seed(seed)
    kinds = [("sliding_attention", "full_attention")[index % 2] for index in range(layers)]
    rotations = {"sliding_attention": 10.0, "full_attention": 1000.0}
    config = Gemma3TextConfig(
        **DECODER_SIZES,
        num_hidden_layers=layers,
        head_dim=head_dim,
        query_pre_attn_scalar=30,
        sliding_window=4,
        layer_types=kinds,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in rotations.items()
        },
    )
    return untied(with_norms(Gemma3ForCausalLM(config)), sharpness)


def with_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Norms with weights of their own, so that none can be left out unnoticed."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data += 0.3 * torch.randn_like(weight)
    return model


def scale_layer(model: PreTrainedModel, index: int, factor: float) -> None:
    """Make all that a decoder layer adds to the state so many times as large."""
    for name, weight in model.named_parameters():
        if not name.startswith((f"decoder.block.{index}.", f"model.layers.{index}.")):
            continue
        if model.config.model_type == "gemma3_text":  # whose norms undo any scale before them
            if name.endswith(
                ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
            ):
                weight.data = factor * (1 + weight.data) - 1
        elif name.endswith((".o.weight", "o_proj.weight", "wo.weight", "down_proj.weight")):
            weight.data *= factor


def untied(model: PreTrainedModel, sharpness: float) -> PreTrainedModel:
    """Give the model a head of its own whose logits spread enough for confidences of every size."""
    head = torch.nn.Linear(model.config.hidden_size, VOCABULARY, bias=False)
    torch.nn.init.normal_(head.weight, std=sharpness / model.config.hidden_size**0.5)
    if model.config.is_encoder_decoder:
        head.weight.data *= model.config.hidden_size**0.5  # T5 scales its decoder's output down
    model.lm_head = head
    return model.eval()


def relative_of(model: PreTrainedModel, seed: int, noise: float) -> PreTrainedModel:
    """A copy with noise on its weights: a drafter that often, but not always, agrees."""
    generator = torch.Generator().manual_seed(seed)
    copy = type(model)(model.config)
    copy.lm_head = torch.nn.Linear(model.config.hidden_size, VOCABULARY, bias=False)
    copy.load_state_dict(model.state_dict())
    for weight in copy.parameters():
        weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return copy.eval()


TINY = {"t5": tiny_t5, "llama": tiny_llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3}


def tiny_tokenizer(
    encoder_decoder: bool, words: list[str] = WORDS, unknown: str = "w3"
) -> PreTrainedTokenizerFast:
    """Words w3 … w39, one id each; T5 prompts end with </s>, Llama prompts start with <s>.

    unknown: the piece for unknown text. Like every special piece it is found within words: with w3,
    w39 is two tokens.
    """
    special = {"<pad>": PAD, "</s>": END, "<s>": START}
    tokenizer = Tokenizer(
        WordLevel({**special, **{word: 3 + i for i, word in enumerate(words)}}, unk_token=unknown)
    )
    tokenizer.pre_tokenizer = Whitespace()
    template = "$A </s>" if encoder_decoder else "<s> $A"
    tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("</s>", END), ("<s>", START)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token=unknown,
    )


def save(
    model: PreTrainedModel, folder: Path, words: list[str] = WORDS, unknown: str = "w3"
) -> Path:
    """A checkpoint in Hugging Face layout, its head tied where the configuration demands it, as
    T5's does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model.config.tie_word_embeddings:
        model.shared.weight.data.copy_(model.lm_head.weight)
        model.lm_head.weight = model.shared.weight
    model.save_pretrained(folder)
    tiny_tokenizer(model.config.is_encoder_decoder, words, unknown).save_pretrained(folder)
    return folder


def padded(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """The model with rows beyond its tokenizer, whose scores often win: each is that of a token
    before, thrice.
    """
    model.config.tie_word_embeddings = False
    embedding, head = model.get_input_embeddings(), model.lm_head.weight.detach()
    spare = torch.arange(rows - VOCABULARY)
    wider = torch.nn.Embedding(rows, model.config.hidden_size)
    wider.weight.data = torch.cat([embedding.weight.detach(), embedding.weight.detach()[spare]])
    model.set_input_embeddings(wider)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, rows, bias=False)
    model.lm_head.weight.data = torch.cat([head, 3 * head[spare + 5]])
    model.config.vocab_size = rows
    return model
