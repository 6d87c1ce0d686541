"""Random models small enough to decode thousands of tokens a second, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 40
PAD, END, START = 0, 1, 2
WORDS = [f"w{index}" for index in range(3, VOCABULARY)]


def tiny_t5(seed: int, layers: int = 2, decoder_layers: int | None = None, sharpness: float = 6.0) -> PreTrainedModel:
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


def tiny_llama(seed: int, layers: int = 2, sharpness: float = 3.0) -> PreTrainedModel:
    """A Llama with grouped-query attention."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=START,
    )
    return untied(LlamaForCausalLM(config), sharpness)


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


def tiny_tokenizer(encoder_decoder: bool, words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    """Words w3 … w39, one id each; T5 prompts end with </s>, Llama prompts start with <s>."""
    special = {"<pad>": PAD, "</s>": END, "<s>": START}
    tokenizer = Tokenizer(WordLevel({**special, **{word: 3 + i for i, word in enumerate(words)}}, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    template = "$A </s>" if encoder_decoder else "<s> $A"
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("</s>", END), ("<s>", START)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="w3"
    )


def save(model: PreTrainedModel, folder: Path, words: list[str] = WORDS) -> Path:
    """A checkpoint in Hugging Face layout, its head tied as T5's configuration demands."""
    folder.mkdir(parents=True, exist_ok=True)
    if model.config.tie_word_embeddings:
        model.shared.weight.data.copy_(model.lm_head.weight)
        model.lm_head.weight = model.shared.weight
    model.save_pretrained(folder)
    tiny_tokenizer(model.config.is_encoder_decoder, words).save_pretrained(folder)
    return folder
