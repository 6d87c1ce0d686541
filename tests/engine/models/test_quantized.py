"""Weights of 8 and 4 bits: the kernels compute as with the rounded weights, and lossless stays
so.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import bild_lab
from bild_lab.engine.models.native.cpu.panels import BLOCK, quantized
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.errors import UserError
from bild_lab.screening.replay import Records
from tests.sessions import native_session, needs_kernels
from tests.tiny import PAD, VOCABULARY, save, source_of, untied

pytestmark = needs_kernels
BITS = pytest.mark.parametrize("bits", [8, 4])


def llama() -> PreTrainedModel:
    """Its widths are multiples of 32, its vocabulary is no multiple of a panel."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return untied(
        LlamaForCausalLM(
            LlamaConfig(**sizes, vocab_size=VOCABULARY, num_hidden_layers=2, attention_bias=True)
        ),
        3.0,
    )


def t5() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_heads": 4,
        "num_layers": 2,
        "vocab_size": VOCABULARY,
        "decoder_start_token_id": PAD,
    }
    return untied(
        T5ForConditionalGeneration(T5Config(**sizes, feed_forward_proj="gated-gelu")), 3.0
    )


CASES = {
    "llama": (llama, LlamaDecoder, source_of("llama", [5, 9, 12])),
    "t5": (t5, T5Decoder, source_of("t5", [5, 9, 12])),
}


def rounded(module: PreTrainedModel, bits: int) -> PreTrainedModel:
    """A copy with every matrix of the layers and the head as the blocks' scales and numbers say."""
    module = copy.deepcopy(module)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and "relative" not in name:
            matrix = layer.weight.data
            scale, numbers = quantized(matrix.view(matrix.shape[0], -1, BLOCK), bits)
            layer.weight.data = (scale.float() * numbers).view(matrix.shape)
    return module


@BITS
@pytest.mark.parametrize("family", CASES)
def test_scores_are_to_the_last_bit_those_of_the_rounded_weights(family: str, bits: int) -> None:
    make, decoder, source = CASES[family]
    module = make()
    tokens = [source.prompt[-1], *range(20, 31)]
    ours = (
        native_session(decoder(module), source, 64, kernels=True, bits=bits).extend(tokens).logits
    )
    expected = (
        native_session(decoder(rounded(module, bits)), source, 64, kernels=True)
        .extend(tokens)
        .logits
    )
    whole = native_session(decoder(module), source, 64, kernels=True).extend(tokens).logits
    assert torch.equal(ours, expected)
    assert not torch.allclose(ours, whole, atol=1e-3)  # rounding changes something


@pytest.mark.fast("llama-torch.float32-8", "t5-torch.float32-4", "t5-torch.bfloat16-4")
@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CASES)
def test_a_row_is_the_same_to_the_last_bit_whatever_runs_beside_it(
    family: str, dtype: torch.dtype, bits: int
) -> None:
    make, decoder, source = CASES[family]
    decoder = decoder(make().to(dtype))
    new = [source.prompt[-1], *range(10, 35)]
    alone = native_session(decoder, source, 64, kernels=True, bits=bits)
    expected = torch.cat([alone.extend([token]).logits for token in new])
    for size in (2, 5, 6, 13, 26):
        together = native_session(decoder, source, 64, kernels=True, bits=bits)
        rows = torch.cat(
            [
                together.extend(new[start : start + size]).logits
                for start in range(0, len(new), size)
            ]
        )
        assert torch.equal(rows, expected), size


@BITS
def test_numbers_are_the_nearest_and_a_block_of_zeros_stays_zero(bits: int) -> None:
    values = torch.cat(
        [torch.zeros(1, BLOCK), torch.randn(50, BLOCK, generator=torch.Generator().manual_seed(1))]
    )
    scale, numbers = quantized(values, bits)
    assert numbers.equal(numbers.round()) and numbers.abs().max() == (127 if bits == 8 else 8)
    error = (scale.float() * numbers - values).abs()
    # half a step; the largest value of the other sign may lie a step beyond 7, and the scale itself
    # is rounded
    assert (error <= scale.float().abs() * (0.57 if bits == 8 else 1.01)).all() and not error[
        0
    ].any()


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_target_drafts_for_itself_in_4_bits_and_every_text_stays_its_own(
    family: str, tmp_path: Path
) -> None:
    target = save(CASES[family][0](), tmp_path / "target")
    alone = bild_lab.load(target, policy="vanilla", dtype="bfloat16")
    drafted = bild_lab.load(
        target, "target", policy="speculative", dtype="bfloat16", draft_weights=4
    )
    draft = drafted.models[1]
    assert (draft.bits, drafted.target.bits, draft.checkpoint.path) == (
        4,
        None,
        drafted.target.checkpoint.path,
    )
    sizes = [
        sum(matrix.nbytes for matrix in model.packed.panels) for model in (draft, drafted.target)
    ]
    assert sizes[0] < 0.4 * sizes[1]  # 4.5 bits instead of 16
    for prompt in ("w5 w9 w12", "w30 w31"):
        one, other = (each.generate(prompt, max_new_tokens=24) for each in (alone, drafted))
        assert one.token_ids == other.token_ids


def test_rounded_weights_have_a_record_of_their_own(tmp_path: Path) -> None:
    target = save(llama(), tmp_path / "target")
    records = Records(tmp_path / "record", 0.0, {})
    models = [bild_lab.load(target, policy="vanilla", weights=bits).target for bits in (None, 8, 4)]
    assert len({records(model).store.folder for model in models}) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": 3}, "runtime.weights must be one of 8, 4, gguf, null, got 3"),
        ({"weights": 4, "engine": "hf"}, "decoders run weights=4, .*, as it runs on hf; set"),
        (
            {"weights": "gguf"},
            "weights=gguf keeps the blocks of a GGUF file, got .*; give one, or set 8, 4 or null",
        ),
        ({"weights": 4, "policy": "hf_generate"}, "hf_generate runs the original weights"),
        # PyTorch's kernels know no float64: a traceback
        ({"weights": 8, "dtype": "float64"}, "float16, got runtime.dtype=float64; set another"),
        (
            {"weights": 4, "dtype": "float64", "engine": "native"},
            "weights=4 run in float32, bfloat",
        ),
    ],
)
def test_where_weights_cannot_be_quantized_it_says_so(
    options: dict, words: str, tmp_path: Path
) -> None:
    target = save(llama(), tmp_path / "target")
    with pytest.raises(UserError, match=words):
        bild_lab.load(target, **{"policy": "vanilla", **options})
