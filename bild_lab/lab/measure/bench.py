"""The benchmark: our loop against Transformers' own on typical model shapes, interleaved in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.initialization import no_init_weights

from bild_lab.engine.acceptance import ExactMatch, SpeculativeSampling
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import LowConfidence, ModelDrafter, NoDraft
from bild_lab.engine.hf_generation import HuggingFaceAssisted, HuggingFaceGenerate
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel, why_no_kernels
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import LAST
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.timing import no_garbage_collection

WINDOW = 5
ASSISTED = ("hf_assisted_workaround", "hf_assisted")  # the better one first
QUERY_LENGTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 1024, 2048)


def t5(dim: int, layers: int, heads: int, hidden: int) -> T5Config:
    return T5Config(
        d_model=dim,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        d_ff=hidden,
        decoder_start_token_id=0,
    )


def llama(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        vocab_size=32000,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


@dataclass(frozen=True)
class Shape:
    """A target of published dimensions, its drafter, and how many tokens a run decodes.

    drafter: the name of another shape. Weights are random: speed does not depend on their values.
    """

    config: Callable[[], PreTrainedConfig]
    drafter: str | None
    new_tokens: int


SHAPES = {
    "t5_small": Shape(lambda: t5(512, 6, 8, 2048), None, 48),
    "t5_large": Shape(lambda: t5(1024, 24, 16, 4096), "t5_small", 18),
    "llama_2": Shape(lambda: llama(2), None, 48),
    "llama_12": Shape(lambda: llama(12), "llama_2", 24),
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

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset()  # every run decodes to its length limit

    def weights(self, dtype: torch.dtype) -> PreTrainedModel:
        auto = AutoModelForSeq2SeqLM if self.encoder_decoder else AutoModelForCausalLM
        with no_init_weights():
            model = auto.from_config(self.shape, dtype=dtype)
        model.tie_weights()  # the skipped initialization would do this
        block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
        for name, weight in model.named_parameters():
            flat = weight.data.view(-1)
            if "norm" in name:
                flat.fill_(1.0)
                continue
            # with small weights and tied embeddings a model repeats the last token, so every draft is accepted
            scale = 1.0 if "embed" in name or "shared" in name else 0.002
            for start in range(0, flat.numel(), block.numel()):  # the same block everywhere: values do not matter
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()] * scale)
        return model.eval()


@dataclass(frozen=True)
class Bench:
    """The arms (methods to compare) of one shape, ready to run."""

    shape: str
    native: NativeModel
    request: Request
    methods: dict[str, Method]
    kernels: NativeModel | None = None  # None where they cannot run


def prepare(
    shape: str,
    native: NativeModel,
    hf: HuggingFaceModel,
    drafts: tuple[NativeModel, HuggingFaceModel] | None,
    request: Request,
) -> Bench:
    """The arms of a shape. Arms with a drafter are left out if it has none."""
    methods: dict[str, Method] = {
        "hf_generate": HuggingFaceGenerate(hf),
        "hf_loop": DraftThenVerify(hf, NoDraft(hf), ExactMatch()),
        "native": DraftThenVerify(native, NoDraft(native), ExactMatch()),
        "native_compiled": DraftThenVerify(compiled := native.as_compiled(), NoDraft(compiled), ExactMatch()),
    }
    kernels = native.by_kernels() if why_no_kernels(native.device, native.dtype) is None else None
    if kernels is not None:
        methods["kernels"] = DraftThenVerify(kernels, NoDraft(kernels), ExactMatch())
    if drafts is not None:
        native_draft, hf_draft = drafts
        methods["hf_assisted"] = HuggingFaceAssisted(hf, hf_draft, window=WINDOW)
        if hf.checkpoint.encoder_decoder:
            methods["hf_assisted_workaround"] = HuggingFaceAssisted(hf, hf_draft, decoder_mask=True, window=WINDOW)
        drafter = ModelDrafter(native_draft, WINDOW)
        methods["native_speculative"] = DraftThenVerify(native, drafter, SpeculativeSampling())
        if kernels is not None:
            drafter = ModelDrafter(native_draft.by_kernels(), WINDOW)
            methods["kernels_speculative"] = DraftThenVerify(kernels, drafter, SpeculativeSampling())
    return Bench(shape, native, request, methods, kernels)


def synthetic_benches(
    device: torch.device, dtype: torch.dtype, shapes: Collection[str] = tuple(SHAPES)
) -> Iterator[Bench]:
    """These synthetic shapes in turn. Large ones take gigabytes, so each pair is freed after its turn."""
    models: dict[str, tuple[NativeModel, HuggingFaceModel]] = {}
    drafters = {SHAPES[name].drafter for name in shapes if name in SHAPES}
    for name, shape in SHAPES.items():
        if name not in shapes and name not in drafters:
            continue
        checkpoint = SyntheticCheckpoint(name, shape=shape.config())
        hf = HuggingFaceModel(checkpoint, device, dtype)
        models[name] = (NativeModel(hf), hf)
        drafts = None if shape.drafter is None else models[shape.drafter]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 1000, (1, 24), generator=generator)
        source = Source((0,), ids) if checkpoint.encoder_decoder else Source(tuple(ids[0].tolist()))
        request = Request(source.to(device), Limits(len(source.prompt), shape.new_tokens))
        if name in shapes:
            yield prepare(name, *models[name], drafts, request)
        if shape.drafter is not None:
            models.clear()


def run(bench: Bench, repeats: int, synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    """One row per arm: median milliseconds per token with range, ratios to `generate`, and shares of two floors.

    bandwidth_share: of the time in which the machine reads the weights, which no decoder beats without drafting;
    None without the CPU kernels, which read them. linear_share: of the time of PyTorch's own matrix products with one
    row. Arms and floors run in turn. A ratio is the median of the repeats' ratios.
    """
    seconds: dict[str, list[float]] = {name: [] for name in bench.methods}
    tokens: dict[str, int] = {}
    products: list[float] = []
    reads: list[float] = []
    matrices = [weight for _, weight in decoder_matrices(bench.native)]
    for method in bench.methods.values():  # warm-up, which also compiles
        method.decode(bench.request, Trace())
    with no_garbage_collection():
        for _ in range(repeats):
            products.append(bare_products_s(matrices, synchronize))
            if bench.kernels is not None:
                reads.append(median_s(bench.kernels.packed.read_weights, synchronize))
            for name, method in bench.methods.items():
                synchronize()
                started = time.perf_counter()
                out = method.decode(bench.request, Trace())
                synchronize()
                seconds[name].append(time.perf_counter() - started)
                tokens[name] = len(out) - bench.request.limits.prompt_length
    rows = []
    for name, times in seconds.items():
        per_token = [1000 * one / tokens[name] for one in times]
        pairs = list(zip(seconds["hf_generate"], times, strict=True))
        assisted = next((seconds[arm] for arm in ASSISTED if arm in seconds), None)
        rows.append(
            {
                "shape": bench.shape,
                "arm": name,
                "ms_per_token": statistics.median(per_token),
                "ms_low": min(per_token),
                "ms_high": max(per_token),
                "ratio_to_generate": statistics.median(generate / one for generate, one in pairs),
                # above 1 for some speculative arms: they read the weights less than once a token
                "bandwidth_share": share_of(reads, per_token) if reads else None,
                "linear_share": share_of(products, per_token),
                "precision": str(bench.native.dtype).removeprefix("torch."),
                # to the arm of Transformers that users would run with the same pair and window
                "ratio_to_assisted": None
                if assisted is None
                else statistics.median(one / other for one, other in zip(assisted, times, strict=True)),
                "tokens_per_target_call": tokens_per_call(bench, name),
            }
        )
    return rows


def tokens_per_call(bench: Bench, arm: str) -> float | None:
    """Emitted tokens per forward of the target; None for the loops of Transformers."""
    trace = Trace()
    out = bench.methods[arm].decode(bench.request, trace)
    emitted = len(out) - bench.request.limits.prompt_length
    return emitted / trace.target_calls if trace.target_calls else None


def decoder_matrices(model: NativeModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight matrix that is used to decode one token."""
    decoder = model.decoder
    for index, layer in enumerate(decoder.layers):
        parts = [layer] if not model.checkpoint.encoder_decoder else [layer.own, layer.cross, layer.feed_forward]
        for part in parts:
            for name, weight in vars(part).items():
                # keys and values of cross-attention are computed once, from the encoder's output
                if isinstance(weight, Tensor) and weight.ndim == 2 and name != "key_value":
                    yield f"{index}.{name}", weight
    yield "head", decoder.head


def share_of(floors: list[float], per_token_ms: list[float]) -> float:
    """The median share of a floor, in seconds, in the time of a token, in milliseconds."""
    return statistics.median(1000 * floor / one for floor, one in zip(floors, per_token_ms, strict=True))


@torch.inference_mode()
def bare_products_s(matrices: list[Tensor], synchronize: Callable[[], None]) -> float:
    """Seconds in which PyTorch multiplies one row with every matrix."""
    rows = [torch.ones(1, matrix.shape[1], dtype=matrix.dtype, device=matrix.device) for matrix in matrices]

    def multiply() -> None:
        for row, matrix in zip(rows, matrices, strict=True):
            linear(row, matrix)

    return median_s(multiply, synchronize)


def median_s(work: Callable[[], None], synchronize: Callable[[], None]) -> float:
    """The median seconds of five runs."""
    times = []
    for _ in range(5):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@torch.inference_mode()
def drafting_costs(bench: Bench, synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    """Median milliseconds for each token that a shape drafts with confidence, eagerly and as one program."""
    arms = {"eager": bench.native, "compiled": bench.kernels}
    times: dict[str, list[float]] = {name: [] for name, model in arms.items() if model is not None}
    limits = Limits(bench.request.limits.prompt_length, 40)
    request = Request(bench.request.source, limits)
    for _ in range(12):
        for name in times:
            drafter = ModelDrafter(arms[name], WINDOW, LowConfidence(0.0))
            target = bench.native.start(request.source, 1)
            drafter.start(request, target)
            text = list(request.source.prompt)
            text += drafter.propose(text).token_list  # the prompt runs with the first draft
            synchronize()
            started = time.perf_counter()
            drafted = len(drafter.propose(text))
            synchronize()
            times[name].append(1000 * (time.perf_counter() - started) / drafted)
    return [
        {"shape": bench.shape, "arm": name, "ms_per_drafted_token": statistics.median(each[2:])}
        for name, each in times.items()
    ]


@torch.inference_mode()
def forward_costs(bench: Bench, synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    """Median milliseconds of our fastest forward by query length, and of a one-row forward by context length."""
    rows = []
    for kind, lengths in (("query", QUERY_LENGTHS), ("context", CONTEXTS)):
        for length in lengths:
            session = (bench.kernels or bench.native).start(bench.request.source, max(CONTEXTS) + max(QUERY_LENGTHS))
            filled = 64 if kind == "query" else length
            while session.length < filled:
                session.extend([5] * min(256, filled - session.length), LAST)
            base, fed = session.length, [5] * (length if kind == "query" else 1)
            times = []
            for _ in range(8):
                synchronize()
                started = time.perf_counter()
                session.extend(fed)
                synchronize()
                times.append(1000 * (time.perf_counter() - started))
                session.rollback(base)
            rows.append({"shape": bench.shape, "by": kind, "length": length, "ms": statistics.median(times[2:])})
    return rows
