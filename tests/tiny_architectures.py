"""Architectures of Transformers at a few thousand random weights, for `tests/models_tried.py` and
the tests.

Each entry is what a configuration needs besides the common sizes. A name is a model type, and a
variant after a slash.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from bild_lab.engine.models.checkpoint.loaded_checkpoint import LoadedCheckpoint

VOCABULARY = 40
PAD, END, START = 0, 1, 2
SPREAD = 0.25  # of the random weights: attention then matters to the scores
TOKENS = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": START}
# tables of data
# fmt: off
DECODER = {
    **TOKENS, "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "initializer_range": SPREAD, "tie_word_embeddings": False,
}
WINDOW = {"sliding_window": 8}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT = {  # multi-head latent attention
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": None,
}
LATENT_EXPERTS = {**LATENT, **ROUTED, "first_k_dense_replace": 1}
INDEXED = {**LATENT_EXPERTS, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8}

PLAIN = (  # the common sizes are enough
    "llama qwen2 qwen3 gemma phi phi3 gpt_neox biogpt stablelm persimmon nemotron starcoder2 olmo olmo2 granite "
    "cohere glm glm4 smollm3 ministral3 mimo_v2_flash ernie4_5 hunyuan_v1_dense seed_oss apertus arcee helium "
    "nanochat bitnet diffllama doge hyperclovax jais2 mellum kolibri1 iquestcoder"
).split()
CAUSAL: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    **dict.fromkeys("olmo3 granite_swa cohere2 exaone4 ministral cwm".split(), MIXED),
    "llama/dynamic": {"rope_parameters": {**ROTARY, "rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 24},
    "llama/yarn": {"rope_parameters": {**ROTARY, "rope_type": "yarn", "factor": 2.0,
        "original_max_position_embeddings": 24}},
    "llama/linear": {"rope_parameters": {**ROTARY, "rope_type": "linear", "factor": 2.0}},
    "llama/tied": {"tie_word_embeddings": True},
    "llama/gelu": {"hidden_act": "gelu"},
    "mistral": {"sliding_window": None},
    "mistral/window": WINDOW,
    "qwen2/mixed": {**WINDOW, "use_sliding_window": True,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "mixtral": {**LOCAL_EXPERTS, "sliding_window": None},
    "mixtral/window": {**LOCAL_EXPERTS, **WINDOW},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 8},
    "gemma3n_text": {**MIXED, "num_kv_shared_layers": 2, "laurel_rank": 4, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4},
    "gemma4_text": {**MIXED, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        "global_head_dim": 8, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0},
    "vaultgemma": {**WINDOW, "query_pre_attn_scalar": 8},
    "phi3/window": WINDOW,
    "phi3/longrope": {"original_max_position_embeddings": 24, "rope_parameters": {**ROTARY, "rope_type": "longrope",
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 24}},
    "phimoe": {**LOCAL_EXPERTS, **WINDOW},
    "gpt2": {**GPT, "n_inner": 48},
    "gpt_bigcode": {**GPT, "n_inner": 48},
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4, "n_ctx": 128},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "openai-gpt": GPT,
    "ctrl": {**GPT, "dff": 48},
    "xlnet": {"d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48, "max_position_embeddings": None},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 4, "n_head": 4},
    "falcon/rotary": {"alibi": False, "head_dim": None},
    "falcon/alibi": {"alibi": True, "head_dim": None},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 128},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4},
    "bert": {"is_decoder": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoeshared": {**LOCAL_EXPERTS, "shared_intermediate_size": 16},
    "glm4_moe": ROUTED,
    "glm4_moe_lite": LATENT_EXPERTS,
    "glm_moe_dsa": INDEXED,
    "deepseek_v2": LATENT_EXPERTS,
    "deepseek_v3": LATENT_EXPERTS,
    "deepseek_v32": INDEXED,
    "minicpm3": LATENT,
    "youtu": LATENT,
    "gpt_oss": {**LOCAL_EXPERTS, **MIXED, "rope_parameters": ROTARY},
    "exaone_moe": {**EXPERTS, **MIXED, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "llama4_text": {"num_local_experts": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 48,
        "moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
    "minimax_m2": LOCAL_EXPERTS,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "dots1": {**ROUTED, **WINDOW, "n_shared_experts": 1},
    "jetmoe": {**LOCAL_EXPERTS, "kv_channels": 8},
    "solar_open": ROUTED,
    "afmoe": {**EXPERTS, **MIXED},
    "laguna": EXPERTS,
    "hy_v3": {"num_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_mamba": {"state_size": 4, "time_step_rank": 4},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8,
        "block_types": ["recurrent", "recurrent", "attention"], "conv1d_width": 4},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "use_mamba_kernels": False},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "n_mamba_heads": 2, "attention_head_dim": 16, "use_mamba_kernels": False},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 4, "mamba_ngroups": 1,
        "n_mamba_heads": 8, "mamba_headdim": 8, "num_mem_blocks": 1, "use_mem_rope": True, "chunk_size": 8,
        "attention_head_dim": 16,
        # with more, its own forwards differ by 2e-3 between one row and several
        "initializer_range": 0.1},
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 48},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**MAMBA2, **LOCAL_EXPERTS, "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 16},
    "nemotron_h": {"hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 4,
        "n_groups": 2, "chunk_size": 8, "attention_head_dim": 8},
    "olmo_hybrid": {**LINEAR, "linear_num_value_heads": 2},
    "minimax": {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8},
    "xlstm": {"num_heads": 4, "num_blocks": 4, "qk_dim_factor": 0.5, "v_dim_factor": 1.0},
}

BART = {
    **TOKENS, "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_position_embeddings": 128, "init_std": SPREAD, "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD, "dropout_rate": 0.0,
}
SWITCH = {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}

ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), T5),
    **dict.fromkeys("bart mbart plbart pegasus pegasus_x marian m2m_100 blenderbot blenderbot-small".split(), BART),
    "longt5": {**T5, "local_radius": 4, "global_block_size": 4},
    "longt5/tglobal": {**T5, "local_radius": 4, "global_block_size": 4, "encoder_attention_type": "transient-global"},
    "switch_transformers": {**SWITCH, "expert_capacity": 64},
    "switch_transformers/capacity": {**SWITCH, "expert_capacity": 2},
    "bigbird_pegasus": {**BART, "attention_type": "original_full"},
    "nllb-moe": {**BART, "num_experts": 4, "expert_capacity": 64},
    "led": {**BART, "attention_window": 8, "max_encoder_position_embeddings": 128,
        "max_decoder_position_embeddings": 128},
    "fsmt": {**BART, "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["a", "b"]},
    "prophetnet": {**TOKENS, "vocab_size": VOCABULARY, "hidden_size": 32, "encoder_ffn_dim": 48,
        "num_encoder_layers": 2, "num_encoder_attention_heads": 4, "decoder_ffn_dim": 48, "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4, "init_std": SPREAD, "decoder_start_token_id": START},
}

VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
}
IMAGE_TOKENS = {"image_token_id": 36, "video_token_id": 37, "vision_start_token_id": 38, "vision_end_token_id": 39}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**DECODER, **CAUSAL["gemma3_text"], "model_type": "gemma3_text"},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4,
        "image_token_index": 36},
    "mistral3": {"text_config": {**DECODER, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}, "image_token_index": 36},
    "qwen2_5_vl": {"text_config": {**DECODER, "rope_parameters": {**ROTARY, "mrope_section": [1, 1, 2]}},
        "vision_config": {**VISION, "out_hidden_size": 32}, **IMAGE_TOKENS},
    "qwen3_5": {"text_config": {**DECODER, **LINEAR},
        "vision_config": {**VISION, "out_hidden_size": 32, "num_position_embeddings": 16}, **IMAGE_TOKENS},
}
GEMMA = {**DECODER, **WINDOW, "num_hidden_layers": 2, "query_pre_attn_scalar": 8}
BESIDE_TABLE: dict[str, dict[str, Any]] = {  # for single tests, not in the table of those tried
    "modernbert-decoder": {**DECODER, "cls_token_id": START, "sep_token_id": START},
    "t5gemma": {**TOKENS, "encoder": GEMMA, "decoder": GEMMA, "tie_word_embeddings": False},
}
# fmt: on
ALL = {**CAUSAL, **ENCODER_DECODERS, **WITH_IMAGES}


def configuration(name: str) -> PreTrainedConfig:
    """The small configuration of an architecture.

    Raises ValueError if this Transformers does not have it.
    """
    values = {**(DECODER if name in CAUSAL else {}), **{**ALL, **BESIDE_TABLE}[name]}
    return AutoConfig.for_model(
        name.partition("/")[0],
        **{key: value for key, value in values.items() if value is not None or key in WINDOW},
    )


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """The architecture with random weights."""
    config = configuration(name)
    outline = LoadedCheckpoint(name)
    vars(outline)["config"] = config
    torch.manual_seed(seed)
    return outline.auto_class.from_config(config).eval()


def with_marked_head(name: str) -> PreTrainedModel:
    """The architecture, what it has around its head so large that it shows: a part of the states that
    the head reads, a part of its products that is scored, a cap on these, or a bias.
    """
    module = build(name)
    marked = {"logits_scaling": 8.0, "final_logit_softcapping": 1.0, "dim_model_base": 4}
    for config in (module.config, module.config.get_text_config(decoder=True)):
        vars(config).update({key: marked[key] for key in marked.keys() & vars(config).keys()})
    biases = (module.get_output_embeddings().bias, getattr(module, "final_logits_bias", None))
    for bias in biases:
        if bias is not None:
            torch.nn.init.normal_(bias)
    return module


def relative_of(module: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """A copy with noise on its weights: a drafter that often, but not always, agrees."""
    copy = type(module)(module.config)
    copy.load_state_dict(module.state_dict())
    generator = torch.Generator().manual_seed(1)
    for weight in copy.parameters():
        weight.data += (
            noise * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
        )
    return copy.eval()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w3, w4, …, one token each; nothing is added to a prompt."""
    words = {"<pad>": PAD, "</s>": END, "<s>": START} | {
        f"w{token}": token for token in range(3, VOCABULARY)
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="w3",
    )
