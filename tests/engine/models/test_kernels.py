"""The CPU kernels: rows do not depend on those beside them, and a chain in one program is the
loop's.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.early_exit.views import EarlyExit, LayerSkip
from bild_lab.engine.methods.medusa import MedusaConfig, MedusaHeads
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native import NativeModel, why_no_kernels
from bild_lab.engine.models.native import layers as native_layers
from bild_lab.engine.models.native.cpu import PackedHeads, library, structures
from bild_lab.engine.models.native.layers import Decoder, NativeLayers
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import ChainSpec, OutputSpec, Prefix, Rows, Scores, for_draft
from bild_lab.engine.trace import Trace
from tests.engine.models.test_native import ARCHITECTURES, build
from tests.engine.models.test_native import (
    test_logits_are_those_of_transformers_in_float32 as compare_in_float32,
)
from tests.policies import in_memory
from tests.sessions import forwards_of, native_session, needs_kernels, rounds_of, tree_rows
from tests.tiny import PAD, START, TINY, VOCABULARY, source_of

pytestmark = needs_kernels
CPU = torch.device("cpu")


@pytest.mark.fast(
    "t5 v1.0-torch.float32",
    "mt5-torch.bfloat16",
    "llama with biases-torch.bfloat16",
    "llama with wide heads-torch.float32",
    "llama with wide layers-torch.float32",
    "llama with wide layers-torch.bfloat16",
    "qwen2 windows-torch.bfloat16",
    "gemma3 untied-torch.float32",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_row_is_the_same_to_the_last_bit_whatever_runs_beside_it(
    name: str, dtype: torch.dtype
) -> None:
    module, _, source = build(name)
    decoder = type(build(name)[1])(module.to(dtype))
    tokens = [
        *source.prompt,
        *torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(3)).tolist(),
    ]
    new = tokens[len(source.prompt) - 1 :]
    alone = native_session(decoder, source, 64, kernels=True)
    # more than there are blocks of four queries, so that each query runs alone
    torch.set_num_threads(4)
    try:
        expected = torch.cat([alone.extend([token]).logits for token in new])
    finally:
        torch.set_num_threads(1)
    for size in (2, 3, 5, 6, 7, 13, 41):
        together = native_session(decoder, source, 64, kernels=True)
        for store in (together.layers.cache.keys, together.layers.cache.values):
            store.fill_(torch.nan)  # slots that no row has written are not read
        rows = torch.cat(
            [
                together.extend(new[start : start + size]).logits
                for start in range(0, len(new), size)
            ]
        )
        assert torch.equal(rows, expected), size
        for one, other in zip(written(together), written(alone), strict=True):
            assert torch.equal(one, other)


def written(session: CachedSession) -> tuple[Tensor, Tensor]:
    """The keys and values of the text so far."""
    cache = session.layers.cache
    return cache.keys[:, :, : session.length], cache.values[:, :, : session.length]


@pytest.mark.parametrize("family", ["t5", "llama", "qwen3", "gemma3"])
def test_a_branch_of_a_tree_is_a_chain_to_the_last_bit(family: str) -> None:
    source = source_of(family, [5, 9, 12])
    decoder = in_memory(TINY[family](0).bfloat16(), "kernels").decoder
    chain, tree = (native_session(decoder, source, 64, kernels=True) for _ in range(2))
    expected = chain.extend([source.prompt[-1], 7, 8, 20]).logits
    rows = tree_rows([source.prompt[-1], 6, 7, 30, 8, 20], torch.tensor([-1, 0, 0, 1, 2, 4]))
    assert torch.equal(tree.extend(rows).logits[[0, 2, 4, 5]], expected)
    tree.keep([0, 2, 4, 5])
    assert torch.equal(tree.extend([21]).logits, chain.extend([21]).logits)


@pytest.mark.parametrize("name", ["t5 v1.1", "llama with wide heads", "gemma3"])
def test_bfloat16_is_as_close_to_float32_as_pytorch_is(name: str) -> None:
    module, _, source = build(name)
    kind, halves = type(build(name)[1]), module.bfloat16()
    tokens = [source.prompt[-1], *range(5, 30)]
    exact = native_session(kind(copy.deepcopy(halves).float()), source, 64).extend(tokens).logits
    by_torch, by_kernels = (
        native_session(kind(halves), source, 64, kernels=each) for each in (False, True)
    )
    near, own = (
        float((each.extend(tokens).logits - exact).abs().mean()) for each in (by_torch, by_kernels)
    )
    assert own < 1.2 * near < float(exact.std())


def odd(family: str, seed: int = 0) -> PreTrainedModel:
    """A model of which no width is a multiple of 2, but for the heads of Llama, which are rotated
    by pairs.
    """
    torch.manual_seed(seed)
    if family == "t5":
        sizes = {
            "d_model": 33,
            "d_kv": 7,
            "d_ff": 51,
            "num_heads": 3,
            "num_layers": 2,
            "vocab_size": 41,
        }
        config = T5Config(
            **sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=PAD, dropout_rate=0.0
        )
        return T5ForConditionalGeneration(config).eval()
    sizes = {
        "hidden_size": 33,
        "intermediate_size": 51,
        "head_dim": 6,
        "vocab_size": 41,
        "initializer_range": 0.25,
    }
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).eval()


@pytest.mark.fast(
    "t5-torch.float32-None",
    "t5-torch.bfloat16-4",
    "llama-torch.float32-8",
    "llama-torch.bfloat16-None",
)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_odd_widths_are_as_on_pytorch_whatever_lies_after_a_row(
    family: str, dtype: torch.dtype, bits: int | None
) -> None:
    source, module = source_of(family, [5, 9, 12]), odd(family)
    exact = native_session(in_memory(module, "native").decoder, source, 64).extend(
        [source.prompt[-1], *range(5, 19)]
    )
    broken = odd(family, 1).to(dtype)  # leaves memory full of NaN to the next pass of this thread
    for weight in broken.parameters():
        weight.data.fill_(torch.nan)
    scores = []
    for each in (broken, module.to(dtype)):
        model = in_memory(each, "kernels")
        model.bits = bits
        scores.append(model.start(source, 64).extend([source.prompt[-1], *range(5, 19)]).logits)
    assert scores[0].isnan().all()
    # widths that are no multiple of 32 keep their weights
    most = 1e-4 if dtype == torch.float32 else 0.1
    assert float((scores[1] - exact.logits).abs().max()) < most * float(exact.logits.std())


PREFIXED = ["t5 v1.1", "llama with wide heads", "qwen3 windows", "gemma3"]


def prefixed(decoder: Decoder, source: Source, kernels: bool) -> CachedSession:
    """A session with a prefix of five rows and two masks."""
    (layers, heads, dim), words = decoder.cache_shape, decoder.embedding
    random = torch.Generator().manual_seed(2)
    keys, values = (
        torch.randn(layers, heads, 5, dim, generator=random).to(words) for _ in range(2)
    )
    masks = torch.randn(2, words.shape[1], generator=random).to(words)
    return native_session(decoder, source, 30, Prefix(keys, values, masks), kernels=kernels)


def probed(decoder: Decoder, source: Source, kernels: bool) -> torch.Tensor:
    """Logits of a text, and of a tree with probes behind it."""
    session, words = prefixed(decoder, source, kernels), decoder.embedding.shape[0]
    text = session.extend([source.prompt[-1], 4, 5, 6]).logits
    parents = torch.tensor([-1, 0, 1, 0, 3, 4])
    tree = session.extend(tree_rows([7, words, words + 1, 8, words, words + 1], parents)).logits
    return torch.cat([text, tree])


@pytest.mark.parametrize("name", PREFIXED)
def test_probes_score_as_in_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decoder, source = build(name)
    expected = probed(decoder, source, kernels=False)
    torch.testing.assert_close(
        probed(decoder, source, kernels=True), expected, atol=1e-3, rtol=1e-3
    )
    turned = property(lambda self: self._prefix.masks.flip(0), lambda *_: None)
    monkeypatch.setattr(NativeLayers, "masks", turned, raising=False)
    # masks in the wrong order
    assert float((probed(decoder, source, kernels=True) - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("name", PREFIXED)
def test_text_beside_a_prefix_scores_the_same_to_the_last_bit(name: str) -> None:
    module, _, source = build(name)
    decoder = type(build(name)[1])(module.bfloat16())
    alone, words = native_session(decoder, source, 30, kernels=True), decoder.embedding.shape[0]
    for_draft = prefixed(decoder, source, kernels=True)
    tokens = [source.prompt[-1], 4, 5, 6]
    assert torch.equal(for_draft.extend(tokens).logits, alone.extend(tokens).logits)
    rows = tree_rows([7, 8, 9, words, words + 1], torch.tensor([-1, 0, 0, 1, 3]))
    expected = alone.extend(tree_rows([7, 8, 9], torch.tensor([-1, 0, 0]))).logits
    assert torch.equal(for_draft.extend(rows).logits[:3], expected)


@pytest.mark.parametrize("family", ["t5", "llama", "qwen3", "gemma3"])
def test_layers_in_two_ranges_are_all_of_them_to_the_last_bit(family: str) -> None:
    """As an early exit drafts: rounding the states between the ranges would change the logits."""
    source = source_of(family, [5, 9, 12])
    decoder = in_memory(TINY[family](0, layers=3).bfloat16(), "kernels").decoder
    whole, parts = (native_session(decoder, source, 64, kernels=True) for _ in range(2))
    tokens = [source.prompt[-1], 7, 8, 20]
    for session in (whole, parts):
        session.prefill()
    expected = whole.extend(tokens).logits
    for depth in (1, 2):
        (states,) = parts.extend(
            tokens, OutputSpec(logits=0, layers=range(depth), hidden=(depth,))
        ).hidden
        rest = parts.extend(Rows(tokens, states=states), OutputSpec(layers=range(depth, 3)))
        assert torch.equal(rest.logits, expected), depth
        parts.rollback(len(source.prompt) - 1)


def test_a_long_prompt_in_parts_gives_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, source = (
        in_memory(TINY["llama"](0).bfloat16(), "kernels").decoder,
        Source((START, *range(3, 20))),
    )
    tree = tree_rows([19, 5, 6, 7], torch.tensor([-1, 0, 1, 0]))
    required_outputs = [
        OutputSpec(),
        OutputSpec(head_input=True, hidden=(0, 1, 2), prompt=True),
        OutputSpec(logits=20, prompt=True),
    ]

    def scores() -> list[Scores]:
        return [
            native_session(decoder, source, 64, kernels=True).extend(tree, output_spec)
            for output_spec in required_outputs
        ]

    whole = scores()
    monkeypatch.setattr(native_layers, "LONG_PROMPT", 4)
    for one, parts in zip(whole, scores(), strict=True):
        assert torch.equal(one.logits, parts.logits)
        assert one.head_input is None or torch.equal(one.head_input, parts.head_input)
        assert all(map(torch.equal, one.hidden, parts.hidden)) and len(one.hidden) == len(
            parts.hidden
        )


CHAINS = [
    (sampling, stop) for sampling in (Sampling(), Sampling(0.8)) for stop in (None, 0.0, 0.35, 0.6)
]


def rounds_of_chains(
    family: str, model: NativeModel, sampling: Sampling, stop: float | None
) -> list[tuple[Draft, list[tuple[int, int]]]]:
    """What a model drafts in four rounds of each of five texts, and every forward so far."""
    source = source_of(family, [5, 9, 12])
    rounds = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        ends = frozenset([3 + 3 * seed, 4 + seed])
        request = Request(source, Limits(len(source.prompt), 40, ends), sampling, generator)
        drafter = ModelDrafter(model, 1 + seed % 7, stop, keeps_probs=True)
        session = in_memory(TINY[family](1), "kernels").start(source, 40)
        drafter = drafter.start(request, session)
        text = list(source.prompt)
        for step in range(4):  # then the target decides otherwise, or takes all
            draft = drafter.propose(text)
            rounds.append((draft, [(forward.rows, forward.cached) for forward in session.forwards]))
            text += [*draft.token_list[: seed % 3 + step], 3 + seed]
    return rounds


def assert_near(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None:
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.fast("llama-sampling1-0.0", "gemma3-sampling2-0.35", "t5-sampling7-0.6")
@pytest.mark.parametrize(("sampling", "stop"), CHAINS)
@pytest.mark.parametrize("family", ["t5", "llama", "gemma3"])
def test_a_chain_in_one_program_is_that_of_the_loop(
    family: str, sampling: Sampling, stop: float | None
) -> None:
    by_programs = in_memory(TINY[family](1), "kernels")
    by_steps = by_programs.without_fused_drafting()
    source, chain = source_of(family, [5, 9, 12]), ChainSpec(3, frozenset())
    assert by_programs.start(source, 9).draft([5], chain) is not None
    assert by_steps.start(source, 9).draft([5], chain) is None
    ended = 0
    for (draft, forwards), (expected, expected_forwards) in zip(
        rounds_of_chains(family, by_programs, sampling, stop),
        rounds_of_chains(family, by_steps, sampling, stop),
        strict=True,
    ):
        assert draft.token_list == expected.token_list
        assert (draft.calls, forwards) == (expected.calls, expected_forwards)
        assert draft.stats.get("fallback") == expected.stats.get("fallback")
        assert draft.stats.get("confidence", ()) == pytest.approx(
            expected.stats.get("confidence", ()), rel=1e-5
        )
        assert_near(draft.probs, expected.probs)
        assert_near(draft.unscaled_probs, expected.unscaled_probs)
        ended += draft.calls == len(draft)
    assert ended


VIEWS = {
    "first layer": lambda target: EarlyExit(target, 1),
    "without a layer": lambda target: LayerSkip(target, [1]),
    "without blocks": lambda target: LayerSkip(target, [], [0], [2]),
}


@pytest.mark.fast(
    "t5-first layer-sampling0-None",
    "t5-without a layer-sampling2-0.35",
    "t5-without blocks-sampling1-0.6",
    "llama-first layer-sampling0-None",
    "llama-without a layer-sampling2-0.35",
    "llama-without blocks-sampling1-0.6",
)
@pytest.mark.parametrize(("sampling", "stop"), CHAINS[::3])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_view_drafts_in_one_program_what_it_drafts_in_the_loop(
    family: str, view: str, sampling: Sampling, stop: float | None
) -> None:
    whole = in_memory(TINY[family](1, layers=3), "kernels")
    source = source_of(family, [5, 9, 12])
    rule = ExactMatch() if sampling.greedy else SpeculativeSampling()

    def decoded(target: NativeModel) -> tuple[list[int], Trace]:
        drafter = ModelDrafter(VIEWS[view](target), 4, stop, keeps_probs=not sampling.greedy)
        limits = Limits(len(source.prompt), 30, frozenset([7]))
        request = Request(source, limits, sampling, torch.Generator().manual_seed(3))
        return DraftThenVerify(target, drafter, rule).decode(request, trace := Trace()), trace

    (text, trace), (expected, wanted) = decoded(whole), decoded(whole.without_fused_drafting())
    assert text == expected and trace.drafted == wanted.drafted > 0
    assert rounds_of(trace) == rounds_of(wanted)
    assert forwards_of(trace) == forwards_of(wanted)


def test_the_target_goes_on_from_rows_that_a_view_ran_in_several_chains() -> None:
    target, source = in_memory(TINY["llama"](1, layers=3), "kernels"), Source((START, 5, 9, 12))
    session = target.start(source, 40)
    view = EarlyExit(target, 2).start(source, 40, for_draft(session))
    text = [12, *view.draft([12], ChainSpec(2, frozenset())).tokens]
    text += view.draft(text[-1:], ChainSpec(3, frozenset())).tokens
    scores = session.extend(text).logits
    assert [(one.rows, one.first_layer) for one in session.forwards[-2:]] == [(1, 0), (6, 2)]
    assert torch.equal(scores, target.start(source, 40).extend(text).logits)


def test_hidden_states_and_layers_are_those_of_pytorch() -> None:
    for family in ("t5", "llama"):
        decoder = in_memory(TINY[family](2, layers=3), "kernels").decoder
        source = source_of(family, [5, 9, 12])
        ours, theirs = (native_session(decoder, source, 64, kernels=each) for each in (True, False))
        for output_spec in (
            OutputSpec(hidden=(0, 1, 2, 3), head_input=True),
            OutputSpec(layers=(0, 2), hidden=(1, 3)),
            OutputSpec(logits=1),
        ):
            one, other = (
                session.extend([source.prompt[-1], 7, 8], output_spec) for session in (ours, theirs)
            )
            torch.testing.assert_close(one.logits, other.logits, atol=1e-4, rtol=1e-4)
            assert len(one.hidden) == len(other.hidden) == len(output_spec.hidden)
            for a, b in zip(one.hidden, other.hidden, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
            for session in (ours, theirs):
                session.rollback(len(source.prompt) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["-mno-amx-bf16"],
        ["-mno-amx-bf16", "-mno-avx512bf16"],
        ["-mno-amx-bf16", "-DQUICK_PAIRS"],
        ["-mno-amx-bf16", "-mno-avx512f"],
    ],
    ids=" ".join,
)
def test_other_processors_give_rows_that_do_not_depend_on_each_other(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, *flags))
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))
    library.library.cache_clear()
    try:
        for name in ("t5 v1.1", "qwen3 windows", "llama with wide heads", "llama with wide layers"):
            for dtype in (torch.float32, torch.bfloat16):
                test_a_row_is_the_same_to_the_last_bit_whatever_runs_beside_it(name, dtype)
            compare_in_float32(name, True)
    finally:
        library.library.cache_clear()


def test_the_compiler_lays_the_structures_out_as_ctypes_does(tmp_path: Path) -> None:
    kinds = structures.declared(structures.HEADER.read_text())
    fields = [(kind, field) for kind in kinds for field, _ in kind._fields_]
    offsets = [f"offsetof({kind.__name__}, {field})" for kind, field in fields]
    sizes = [f"sizeof({kind.__name__}::{field})" for kind, field in fields]
    values = ", ".join([*offsets, *sizes, *(f"sizeof({kind.__name__})" for kind in kinds)])
    source, made = tmp_path / "layout.cpp", tmp_path / "layout.so"
    include = f'#include <cstddef>\n#include "{structures.HEADER}"\n'
    source.write_text(f'{include}extern "C" const long layout[] = {{{values}}};')
    subprocess.run(
        [library._compiler(), "-w", "-shared", "-fPIC", str(source), "-o", str(made)], check=True
    )
    ours = [
        [getattr(getattr(kind, field), part) for kind, field in fields]
        for part in ("offset", "size")
    ]
    expected = [*ours[0], *ours[1], *map(ctypes.sizeof, kinds)]
    assert (
        list((ctypes.c_long * len(expected)).in_dll(ctypes.CDLL(str(made)), "layout")) == expected
    )


def compiler_that(fails: str, folder: Path) -> Path:
    path = folder / "g++"
    path.write_text(f"#!/bin/sh\n{fails}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, r"there is no C\+\+ compiler; install g\+\+, or let CXX name a program, got CXX=no"),
        ('[ "$1" = -dumpversion ] && echo 9 && exit', r"they need g\+\+ 12 or newer"),
        (
            'case "$1" in -dump*) echo 13;; --v*) echo new;; *) echo broken >&2; exit 1;; esac',
            "failed: broken",
        ),
    ],
    ids=["none", "old", "broken"],
)
def test_without_a_compiler_pytorch_runs_and_it_is_said_once(
    script: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = "no-such-compiler" if script is None else str(compiler_that(script, tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path / "cache"))
    for cached in (library.library, library._why_no_library):
        cached.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            reasons = {why_no_kernels(CPU, torch.float32) for _ in range(3)}
        assert len(reasons) == 1
        with pytest.raises(library.KernelError, match=message):
            library.library()
        assert sum("PyTorch runs the decoders" in record.message for record in caplog.records) == 1
    finally:
        for cached in (library.library, library._why_no_library):
            cached.cache_clear()


def test_the_refusal_of_a_cache_that_cannot_be_written_says_how_to_name_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(library.KernelError, match=r"cannot be written.*BILD_LAB_CACHE=DIR names"):
        library._compiled()


def test_the_kernels_are_compiled_on_a_disk_without_locks(
    no_locks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: PyTorch ran the decoders, as the cache could not be locked."""
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "_compile", lambda compiler, runtime, path: path.touch())
    assert library._compiled() in list((tmp_path / "kernels").iterdir())


@pytest.mark.fast(
    "0-32-False-3-torch.float32",
    "2-44-False-3-torch.bfloat16",
    "1-32-True-3-torch.bfloat16",
    "2-32-True-40-torch.bfloat16",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layers", "dim", "shared", "most"),
    [(0, 32, False, 3), (1, 32, False, 3), (2, 44, False, 3), (1, 32, True, 3), (2, 32, True, 40)],
)
def test_the_most_likely_tokens_of_heads_are_those_of_pytorch(
    layers: int, dim: int, shared: bool, most: int, dtype: torch.dtype
) -> None:
    """Of 40 tokens, which leave a panel not full, for one, two and all heads, most likely first."""
    draw = torch.Generator().manual_seed(layers)
    target = in_memory(TINY["llama"](0).to(dtype), "kernels")
    heads = MedusaHeads(MedusaConfig(most, layers, dim, VOCABULARY, shared=shared))
    if shared:
        heads.attach(target.vocabulary_weights()[1].float()[None])
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_((0.3 * torch.randn(weight.shape, generator=draw)).to(dtype))
    heads.requires_grad_(False)
    outputs = target.packed if shared else heads.outputs.to(dtype)
    packed = PackedHeads(heads.blocks.to(dtype), heads.biases.to(dtype), outputs)
    for depth in (1, 2, most):
        hidden = torch.randn(dim, generator=draw).to(dtype)
        expected = heads(hidden.float())[:depth]  # [depth, vocab]
        tokens = packed.most_likely(hidden, depth, 5)
        if dtype == torch.float32:
            assert torch.equal(tokens, heads.most_likely(hidden, depth, 5))
        found = expected.gather(-1, tokens)
        torch.testing.assert_close(
            found, expected.topk(5).values, atol=0.1 if dtype == torch.bfloat16 else 1e-5, rtol=0
        )
        assert all(len(set(row)) == 5 for row in tokens.tolist())
