"""Costs against PyTorch's own count of operations, counts by hand, and the forwards of whole
decodings.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BartConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from bild_lab.engine.draft import Tree
from bild_lab.engine.models.hf import model as hf
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import OutputSpec, Rows, Session, SessionOptions
from bild_lab.engine.trace import Forward, Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_policy
from bild_lab.lab.measure.cost import Cost, Matrices, dimensions, has_cost_model, total_cost
from bild_lab.lab.point.build import build_method
from tests.policies import in_memory
from tests.sessions import native_session
from tests.tiny import PAD, START, VOCABULARY, tiny_llama, tiny_t5

NEVER = frozenset([VOCABULARY])  # an end token that no model can emit
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
T5_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
}
ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "t5 v1.0": lambda: T5ForConditionalGeneration(T5Config(**T5_SIZES, feed_forward_proj="relu")),
    "t5 gated": lambda: tiny_t5(0, layers=2, decoder_layers=3),
    "llama": lambda: tiny_llama(0),
    "llama with wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=16)),
}
WINDOWED: dict[str, Callable[[], PreTrainedModel]] = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=None, sliding_window=9)),
    "qwen2, first layer sees all": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    ),
    "gemma3, last layer sees all": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=9, sliding_window_pattern=3)
    ),
}
ENGINES = ("hf", "native")
# a prompt or single rows, a chain, a tree, then one row that only drafts: (rows, parents, scored)
STEPS = [
    ([7], None, None),
    ([8], None, None),
    ([9, 10, 11, 12], None, None),
    ([5, 6, 7, 8, 9], [-1, 0, 0, 1, 1], None),
    ([4, 5], None, 1),
]


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return {**ARCHITECTURES, **WINDOWED}[name]().eval()


def source_of(module: PreTrainedModel) -> Source:
    words = torch.tensor([[5, 9, 12, 30, 14, 1]])
    return (
        Source((PAD,), words)
        if module.config.is_encoder_decoder
        else Source((START, *words[0].tolist()))
    )


def open_session(
    engine: str,
    module: PreTrainedModel,
    source: Source,
    room: int = 40,
    forwards: list[Forward] | None = None,
) -> Session:
    if engine == "hf":
        return hf.open_session(module, source, SessionOptions(forwards))
    family = T5Decoder if module.config.is_encoder_decoder else LlamaDecoder
    return native_session(family(module), source, room, forwards=forwards)


def attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: object, **__: object
) -> int:
    """Q·Kᵀ and A·V of all query heads, however few key heads they share."""
    _, heads, rows, width = query
    return 2 * heads * rows * key[-2] * (width + value[-1])


def counted(run: Callable[..., Any], *values: Any) -> tuple[int, Any]:
    """FLOPs as PyTorch counts them, and what the call returned; on the CPU it knows no fused
    attention unless told.
    """
    attention = torch.ops.aten.scaled_dot_product_attention
    # the overload, lest it be taken apart; its packet, under which it is counted
    mapping = {attention: attention_flops, attention.default: attention_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, torch.inference_mode():
        result = run(*values)
    return counter.get_total_flops(), result


def steps_of(engine: str, module: PreTrainedModel) -> tuple[list[int], list[list[Forward]]]:
    """PyTorch's count and the recorded forwards of every step; the first includes the encoder."""
    counts, forwards = [], []
    encoding, session = counted(open_session, engine, module, source_of(module))
    for rows, parents, scored in STEPS:
        tree = None if parents is None else Tree(torch.tensor(parents))
        counts.append(counted(session.extend, Rows(rows, tree), OutputSpec(logits=scored))[0])
        forwards.append(list(session.forwards))
        session.forwards.clear()
    return [encoding + counts[0], *counts[1:]], forwards


@pytest.mark.fast("t5 v1.0-hf", "llama-native", "llama with wide heads-native", "qwen2-native")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flops_are_those_that_pytorch_counts(name: str, engine: str) -> None:
    counts, forwards = steps_of(engine, make(name))
    assert [total_cost(each, 2).flops for each in forwards] == counts


@pytest.mark.fast("mistral-hf-3")
@pytest.mark.parametrize(
    ("name", "engine", "windowed_layers"),
    [
        ("mistral", "hf", 3),
        ("mistral", "native", 3),
        ("qwen2, first layer sees all", "hf", 2),
        ("qwen2, first layer sees all", "native", 2),
        ("gemma3, last layer sees all", "native", 2),
    ],
)
def test_a_sliding_window_leaves_out_the_keys_that_kernels_mask(
    name: str, engine: str, windowed_layers: int
) -> None:
    counts, forwards = steps_of(engine, make(name))
    for count, (forward,) in zip(counts, forwards, strict=True):
        masked = max(0, forward.cached + forward.rows - 9)
        assert (
            count - total_cost([forward], 2).flops
            == windowed_layers * 4 * forward.rows * masked * 32
        )
    assert masked == 10  # 19 keys in the end


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_weight_matrices_but_the_embedding_are_read(name: str) -> None:
    module = make(name)
    skipped = ("norm", "bias", "embed_tokens", "shared")
    matrices = sum(
        w.numel()
        for key, w in module.state_dict().items()
        if not any(part in key for part in skipped)
    )
    assert dimensions(module.config).weights == matrices


LLAMA = LlamaConfig(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
T5 = T5Config(
    vocab_size=10,
    d_model=4,
    d_kv=3,
    d_ff=5,
    num_heads=2,
    num_layers=1,
    num_decoder_layers=2,
    feed_forward_proj="gated-gelu",
)


def test_a_llama_forward_counted_by_hand() -> None:
    # query, key and value 4×8, out 4×4, gate and up 4×12, down 6×4; head 4×10
    weights = 32 + 16 + 48 + 24 + 40
    activations = 2 * ((4 + 8) + (4 + 4) + (4 + 12) + (6 + 4)) + (4 + 10)
    attention = 2 * (4 + 4) + 5 * (2 + 2)  # two rows in and out, five keys and values of one head
    embedding = 2 * 4
    assert total_cost([Forward(LLAMA, rows=2, cached=3, scored=1)], bytes_per_value=2) == Cost(
        flops=2 * (2 * 120 + 1 * 40) + 2 * (2 * 5 * 4) * 2,
        bytes_moved=2 * (weights + activations + attention + embedding),
    )


def test_a_t5_decoder_forward_counted_by_hand() -> None:
    # as in the encoder, and query and out of the cross-attention, 4×6 and 6×4; two layers; head
    # 4×10
    weights = 2 * (72 + 24 + 24 + 24 + 40 + 20) + 40
    activations = 2 * 2 * (22 + 10 + 10 + 10 + 14 + 9) + 2 * 14
    # six keys in the cache, three in the source
    attention = 2 * (2 * 12 + 6 * 12) + 2 * (2 * 12 + 3 * 12)
    embedding = 2 * 4
    assert total_cost(
        [Forward(T5, rows=2, cached=4, scored=2, source=3)], bytes_per_value=1
    ) == Cost(
        flops=2 * 2 * weights + 2 * (4 * 2 * 6 * 6 + 4 * 2 * 3 * 6),
        bytes_moved=weights + activations + attention + embedding,
    )


def test_the_head_is_neither_read_nor_run_where_no_row_is_scored() -> None:
    silent, scored = (total_cost([Forward(LLAMA, rows=2, scored=rows)], 1) for rows in (0, 1))
    assert (scored.flops - silent.flops, scored.bytes_moved - silent.bytes_moved) == (80, 40 + 14)


def test_layers_with_different_windows_count_as_a_whole_number_of_their_average() -> None:
    matrices = {"layers": Matrices(300, 30), "feed_forward": Matrices(120, 12)}
    sizes = replace(dimensions(LLAMA), **matrices, windows=((5, 1), (math.inf, 2)))
    flops, values = sizes.work(Forward(LLAMA, rows=1, cached=9, layers=1))
    # one layer sees 5 keys, two see all 10
    assert flops == 2 * 300 // 3 + 4 * 5 * 4 // 3 + 2 * (4 * 10 * 4) // 3
    read = (8 + 5 * 4) // 3 + 2 * (8 + 10 * 4) // 3  # queries in and outputs out, keys and values
    assert values == (300 + 30) // 3 + read + 4
    assert isinstance(flops, int) and isinstance(values, int)


def test_rows_behind_a_window_read_together_what_each_of_them_sees() -> None:
    sizes = replace(dimensions(LLAMA), windows=((5, 1),))
    flops, values = sizes.work(Forward(LLAMA, rows=3, cached=9))
    # each row sees 5 keys of 12, and those of the first and the last begin two apart
    assert flops == 2 * 3 * 120 + 4 * 3 * 5 * 4
    assert values == 120 + 3 * 46 + (3 * (4 + 4) + 7 * (2 + 2)) + 3 * 4


def test_the_forwards_of_several_models_add_up() -> None:
    small, large = tiny_llama(0, layers=1).config, tiny_llama(0, layers=3).config
    log = [Forward(small, 1), Forward(large, 4), Forward(small, 1, 1), Forward(large, 2, 4, 2)]
    assert total_cost(iter(log), 2) == sum((total_cost([each], 2) for each in log), Cost())


def test_an_unknown_architecture_is_refused_by_name() -> None:
    assert has_cost_model(LLAMA) and has_cost_model(T5)
    for config in (GPT2Config(), BartConfig()):
        assert not has_cost_model(config)
        with pytest.raises(
            UserError, match=f"known for t5, .*, qwen3, gemma3_text, got {config.model_type}"
        ):
            total_cost([Forward(LLAMA, 1), Forward(config, 1)], 2)


# policies that run some of the target's layers at a time
PARTIAL: list[tuple[str, dict[str, object]]] = [
    ("bild_early_exit", {"exit_layer": 1, "fallback": 0.3, "rollback": 0.5}),
    ("bild_early_exit", {"exit_layer": 2, "fallback": 0.3, "rollback": 0.5}),
    ("early_exit_speculative", {"exit_layer": 2}),
    ("layer_skip", {"skipped_layers": [0]}),
    ("layer_skip", {"skipped_layers": [], "skipped_attention": [0], "skipped_feed_forward": [1]}),
    ("calm", {"threshold": 0.1, "temperature": 0}),
    ("calm", {"measure": "softmax", "threshold": 0.0, "temperature": 20}),
]


@pytest.mark.fast("hf-calm-knobs5-t5 gated", "native-early_exit_speculative-knobs2-t5 gated")
@pytest.mark.parametrize(
    "name", ["t5 gated", "llama with wide heads", "qwen2", "gemma3", "llama", "qwen3"]
)
@pytest.mark.parametrize(("policy", "knobs"), PARTIAL)
@pytest.mark.parametrize("engine", ENGINES)
def test_flops_of_layers_run_apart_are_those_that_pytorch_counts(
    policy: str, knobs: dict[str, object], name: str, engine: str
) -> None:
    if engine == "hf" and (policy == "calm" or name == "gemma3"):
        pytest.skip(
            "Transformers computes queries where only keys and values are wanted, and keys beyond a"
            " window"
        )
    target = in_memory(make(name), engine)
    method = build_method(compose_policy(policy, knobs), {"target": lambda: target})
    source = source_of(target.transformers.module)
    trace = Trace()
    count, _ = counted(method.decode, Request(source, Limits(len(source.prompt), 12, NEVER)), trace)
    assert total_cost(trace.forwards, 2).flops == count
    assert any(each.filled_layers for each in trace.forwards) == (policy == "calm")


def test_a_forward_in_two_parts_costs_what_the_whole_does() -> None:
    parts = [
        Forward(T5, 2, 4, source=3, layers=1),
        Forward(T5, 2, 4, 2, source=3, layers=1, first_layer=1),
    ]
    assert total_cost(parts, 1) == total_cost([Forward(T5, 2, 4, 2, source=3)], 1)


@pytest.mark.parametrize("config", [T5, LLAMA])
def test_a_forward_without_attention_and_one_without_feed_forward_cost_what_one_layer_does(
    config: object,
) -> None:
    def part(**skipped: int) -> Cost:
        return total_cost([Forward(config, 2, 4, source=3, layers=1, first_layer=1, **skipped)], 1)

    apart = part(skipped_attention=1) + part(skipped_feed_forward=1)
    assert apart == part()
    of_all_layers = dimensions(config).feed_forward.work(2).flops
    layers = getattr(config, "num_decoder_layers", config.num_hidden_layers)
    assert part(skipped_attention=1).flops == of_all_layers / layers < part().flops


def test_a_head_of_fewer_tokens_costs_what_that_of_a_smaller_vocabulary_does() -> None:
    smaller = copy.copy(LLAMA)
    smaller.vocab_size = 5
    fewer = Forward(LLAMA, 2, 4, scored=2, vocabulary=5)
    assert total_cost([fewer], 1) == total_cost([Forward(smaller, 2, 4, scored=2)], 1)
