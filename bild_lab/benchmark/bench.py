"""The benchmark: our loop against Transformers' own and other engines, on one model and text after
text in turn.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from operator import eq
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.initialization import no_init_weights

from bild_lab.benchmark.peer_methods import CTranslate2, OpenVINO, OpenVINOSpeculative, Peer
from bild_lab.benchmark.peer_process import why_no_peers
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.hf_generation import (
    HuggingFaceAssisted,
    HuggingFaceGenerate,
    generate,
)
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.device import dtype_name
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel, why_no_kernels
from bild_lab.engine.protocols import Method, Streams
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.likelihood import log_probabilities
from bild_lab.lab.measure.machine import median_s, read_gb_per_s
from bild_lab.lab.measure.score import precision_of
from bild_lab.lab.measure.timing import (
    Timed,
    TimingOptions,
    prepare_method,
    time_methods,
    token_count,
    warm_up,
)

log = logging.getLogger(__name__)

WINDOW = 5
PROMPTS = (100, 500, 1000, 2000, 4000)  # tokens
HIGHEST_MADE_UP = 1000  # the highest token id of made-up texts
SPANS = ((0, 100), (900, 1000))  # where new tokens of one long text are timed
ASSISTED = ("hf_assisted_workaround", "hf_assisted")  # the better one first
Models = tuple[NativeModel, HuggingFaceModel]


@dataclass(frozen=True)
class Bench:
    """The methods of one shape, ready to run, and the texts that each decodes."""

    shape: str
    native: NativeModel
    requests: tuple[Request, ...]
    methods: dict[str, Method]
    kernels: NativeModel | None = None  # None where they cannot run
    # the quality of the texts' new tokens
    judge: Callable[[Sequence[Sequence[int]]], float] | None = None

    def precision(self, name: str) -> str:
        """The precision of the weights that the method decodes with."""
        method = self.methods[name]
        target = getattr(method, "target", self.native)
        return precision_of(method, target, dtype_name(self.native.dtype))


@contextmanager
def bench_of(
    shape: str,
    models: Models,
    drafts: Models | None,
    requests: tuple[Request, ...],
    peers: Mapping[str, Callable[[], Peer]] = MappingProxyType({}),
    files: Mapping[str, NativeModel] = MappingProxyType({}),
    judge: Callable[[Sequence[Sequence[int]]], float] | None = None,
) -> Iterator[Bench]:
    """The methods of a shape; those with a drafter only if it has one. The processes of peers end
    with the block.

    peers: each made when its turn comes; one that cannot be is left out. files: the kernels with
    other weights.
    """
    native, hf = models
    engines = {"native": native, "native_compiled": native.with_backend(compiled=True)}
    kernels, quantized = None, {}
    if why_no_kernels(native.device, native.dtype, native.checkpoint.config) is None:
        kernels = engines["kernels"] = native.with_backend(kernels=True)
        quantized = {
            f"kernels_int{bits}": native.with_backend(kernels=True, bits=bits) for bits in (8, 4)
        }
    if native.device.type == "cuda":
        engines["native_graphs"] = native.with_backend(graphs=True)
    methods: dict[str, Method] = {
        "hf_generate": HuggingFaceGenerate(hf),
        "hf_loop": target_alone(hf),
    }
    for name, model in (engines | quantized | files).items():
        methods[name] = target_alone(model)
    if drafts is not None:
        methods |= assisted_methods(hf, drafts[1])
        methods |= speculative_methods(engines, drafts[0])
    with ExitStack() as ending:
        for name, make in peers.items():
            try:
                peer = make()
                ending.callback(peer.close)
                peer.prepare(requests[0])
            except UserError as error:
                log.warning("%s is left out: %s", name, error)
                continue
            peer.pause()
            methods[name] = peer
        yield Bench(shape, native, requests, methods, kernels, judge)


def assisted_methods(hf: HuggingFaceModel, hf_draft: HuggingFaceModel) -> dict[str, Method]:
    """Assisted decoding by Transformers; nothing for a drafter with another vocabulary."""
    methods: dict[str, Method] = {}
    try:
        methods["hf_assisted"] = HuggingFaceAssisted(hf, hf_draft, window=WINDOW)
        if hf.checkpoint.encoder_decoder:
            methods["hf_assisted_workaround"] = HuggingFaceAssisted(
                hf, hf_draft, decoder_mask=True, window=WINDOW
            )
    except UserError as error:
        log.warning("hf_assisted is left out: %s", error)
    return methods


def speculative_methods(
    engines: Mapping[str, NativeModel], native_draft: NativeModel
) -> dict[str, Method]:
    """Our speculative decoding on each engine that drafts. A GPU's window is one CUDA graph."""
    drafters = {
        "native": lambda: native_draft,
        "kernels": partial(native_draft.with_backend, kernels=True),
    }
    if native_draft.device.type == "cuda":
        drafters |= {
            "native_compiled": partial(native_draft.with_backend, compiled=True),
            "native_graphs": partial(native_draft.with_backend, graphs=True),
        }
    return {
        f"{name}_speculative": DraftThenVerify(
            engines[name], ModelDrafter(drafter(), WINDOW), SpeculativeSampling()
        )
        for name, drafter in drafters.items()
        if name in engines
    }


def why_without_peers(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why other engines do not take part here, or None if they can."""
    if device.type != "cpu" or dtype not in OpenVINO.precisions:
        return "CTranslate2 and OpenVINO take part on a CPU only, in float32 and bfloat16"
    return why_no_peers()


def peer_methods(
    target: Checkpoint, draft: Checkpoint | None, dtype: torch.dtype, cache: Path | None = None
) -> dict[str, Callable[[], Peer]]:
    """The other engines for files on disk, each in the nearest precision that it has and with
    quantized weights.

    cache: where they keep converted checkpoints; None: with those of all other commands.
    """
    device = torch.device("cpu")
    model = HuggingFaceModel(target, device, dtype)
    exact = HuggingFaceModel(target, device, torch.float32)
    methods: dict[str, Callable[[], Peer]] = {
        "ctranslate2": partial(CTranslate2, exact, cache=cache),
        "ctranslate2_int8": partial(CTranslate2, exact, 8, cache),
        "openvino": partial(OpenVINO, model, cache=cache),
        "openvino_int8": partial(OpenVINO, model, 8, cache),
        "openvino_int4": partial(OpenVINO, model, 4, cache),
    }
    if draft is not None and not target.encoder_decoder:
        small = HuggingFaceModel(draft, device, dtype)
        methods["openvino_speculative"] = partial(OpenVINOSpeculative, model, small, WINDOW, cache)
    return methods


@contextmanager
def synthetic_bench(
    name: str, device: torch.device, dtype: torch.dtype, peers: bool = False
) -> Iterator[Bench]:
    """A shape with random weights. peers: with other engines, which read files; these are removed
    with the block.
    """
    shape = SHAPES[name]
    target = synthetic_models(name, shape.target, device, dtype)
    drafts = (
        None
        if shape.drafter is None
        else synthetic_models(f"{name}_drafter", shape.drafter, device, dtype)
    )
    request = synthetic_request(target[1].checkpoint, shape.new_tokens, device)
    with TemporaryDirectory() as folder:
        makers = {}
        if peers:
            saved = save(target[1].module, Path(folder, "target"))
            small = None if drafts is None else save(drafts[1].module, Path(folder, "draft"))
            makers = peer_methods(saved, small, dtype, Path(folder))
        with bench_of(name, target, drafts, (request,), makers) as bench:
            yield bench


def synthetic_models(
    name: str, values: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> Models:
    hf = HuggingFaceModel(
        SyntheticCheckpoint(name, shape=AutoConfig.for_model(**values)), device, dtype
    )
    return NativeModel(hf), hf


def synthetic_request(
    checkpoint: Checkpoint, new_tokens: int, device: torch.device, length: int = 24
) -> Request:
    """A text of so many made-up tokens, and where its continuation ends."""
    ids = torch.randint(3, HIGHEST_MADE_UP, (1, length), generator=torch.Generator().manual_seed(0))
    source = Source((0,), ids) if checkpoint.encoder_decoder else Source(tuple(ids[0].tolist()))
    return Request(source.to(device), Limits(len(source.prompt), new_tokens))


def run(bench: Bench, rounds: int, synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    """One row per method: median milliseconds per token with range, ratios to Transformers' loops,
    and what it did.

    The tokens of all requests count together. A ratio is the median of the rounds' ratios;
    ratio_to_assisted is that to what users of Transformers would run with the same pair and window.
    bandwidth_share: of the time in which the machine reads the weights of the target, which no
    decoder beats without drafting; None where no kernels run. same_tokens:
    whether all texts are those of `generate`, as they must be in float32; agreement: the share of
    those that are. log_probability: of a token, by the target, in nats. quality: by the metric of
    the data.
    """
    read_ms = weights_read_ms(bench, synchronize)
    options = TimingOptions(synchronize=synchronize)
    # warms up: every step of these texts is compiled
    time_methods(bench.methods, bench.requests, 1, options)
    timed = time_methods(bench.methods, bench.requests, rounds, options)
    per_token = {name: ms_per_token(texts) for name, texts in timed.items()}
    tokens = {name: [text.token_ids for text in texts] for name, texts in timed.items()}
    assisted = next((per_token[name] for name in ASSISTED if name in per_token), None)
    nats = log_probabilities(bench.kernels or bench.native, bench.requests, timed)
    rows = []
    for name, times in per_token.items():
        target_calls = sum(text.trace.target_calls for text in timed[name])
        emitted = sum(map(len, tokens[name]))
        equal = list(map(eq, tokens[name], tokens["hf_generate"]))
        rows.append(
            {
                "shape": bench.shape,
                "method": name,
                "precision": bench.precision(name),
                "ms_per_token": statistics.median(times),
                "ms_low": min(times),
                "ms_high": max(times),
                "ratio_to_generate": ratio(per_token["hf_generate"], times),
                "ratio_to_assisted": None if assisted is None else ratio(assisted, times),
                # above 1 for some speculative methods: they read the weights less than once a token
                "bandwidth_share": None if read_ms is None else read_ms / statistics.median(times),
                "tokens_per_target_call": emitted / target_calls if target_calls else None,
                "same_tokens": all(equal),
                "agreement": sum(equal) / len(equal),
                "log_probability": sum(nats[name]) / emitted,
                "quality": None if bench.judge is None else bench.judge(tokens[name]),
            }
        )
    return rows


def weights_read_ms(bench: Bench, synchronize: Callable[[], None]) -> float | None:
    """Milliseconds in which the machine reads the weights of the target: on a GPU by their bytes."""
    if bench.kernels is None:
        return None
    packed, device = bench.kernels.packed, bench.native.device
    if device.type == "cpu":
        return 1000 * median_s(packed.read_weights, synchronize)
    return packed.weight_bytes / read_gb_per_s(device, synchronize) / 1e6


def ms_per_token(texts: Sequence[Timed]) -> list[float]:
    """Milliseconds of a token over all texts, in each round."""
    rounds = zip(*(text.latency_s for text in texts), strict=True)
    return [1000 * sum(round_s) / token_count(texts) for round_s in rounds]


def ratio(reference: Sequence[float], times: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    pairs = zip(reference, times, strict=True)
    return statistics.median(reference_ms / own_ms for reference_ms, own_ms in pairs)


def long_texts(bench: Bench, rounds: int, synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    """Median milliseconds of a prompt with its first new token, by prompt length, and of a new
    token, by its position.

    Methods: `generate`, our fastest engine without drafts, and peers, prompt after prompt in turn.
    Tokens are made up, and end tokens do not end a text.
    """
    fastest = "native" if bench.kernels is None else "kernels"
    methods = {
        name: method
        for name, method in bench.methods.items()
        if name in ("hf_generate", fastest) or isinstance(method, Peer)
    }
    model, options = bench.native, TimingOptions(synchronize=synchronize)
    rows: list[dict[str, Any]] = []

    def add(name: str, by: str, start: int, stop: int, seconds: Sequence[float]) -> None:
        rows.append(
            {
                "shape": bench.shape,
                "method": name,
                "precision": bench.precision(name),
                "by": by,
                "from": start,
                "to": stop,
                "ms": 1000 * statistics.median(seconds),
            }
        )

    for length in PROMPTS:
        request = synthetic_request(model.checkpoint, 1, model.device, length)
        warm_up(methods, [request], 1, options)
        for name, (text,) in time_methods(methods, [request], rounds, options).items():
            add(name, "prompt", 0, length, text.latency_s)
    long_request = synthetic_request(model.checkpoint, SPANS[-1][1], model.device)
    for name, method in methods.items():
        times = emission_s(method, long_request, model)
        steps = [later - earlier for earlier, later in pairwise(times)]
        for start, stop in SPANS:
            add(name, "new token", start, stop, steps[start : stop - 1])
    return rows


def emission_s(method: Method, request: Request, model: NativeModel) -> list[float]:
    """After how many seconds each new token of a text is there. model: whose `generate` it may
    be.
    """
    prepare_method(method, [request], lambda: None)
    if isinstance(method, Peer):
        method.decode(request, Trace())
        return method.emission_s
    started, times = time.perf_counter(), []
    if isinstance(method, Streams):
        for _ in method.stream(request, Trace()):  # one by one, as nothing is drafted
            times.append(time.perf_counter() - started)
        return times
    note = SimpleNamespace(
        put=lambda _: times.append(time.perf_counter() - started), end=lambda: None
    )
    generate(model.transformers, [request], streamer=note)
    return times[1:]  # the prompt comes first


@dataclass(frozen=True)
class Shape:
    """An entry of `bench.yaml`. target, drafter: values of a configuration in Transformers."""

    target: Mapping[str, Any]
    new_tokens: int
    drafter: Mapping[str, Any] | None = None
    rounds: int = 11
    gpu: bool = False


_STORED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SHAPES = {name: Shape(**values) for name, values in _STORED.items() if not name.startswith(".")}


def random_model(values: Mapping[str, Any]) -> PreTrainedModel:
    """A model with random weights. values: of a configuration in Transformers."""
    config = AutoConfig.for_model(**values)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return auto.from_config(config)


@dataclass(frozen=True)
class SyntheticCheckpoint(Checkpoint):
    """Random weights of a configuration, in memory, with the interface of a checkpoint."""

    shape: PreTrainedConfig = field(default_factory=T5Config)
    weight_files: ClassVar[None] = None

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
        with no_init_weights():
            model = self.auto_class.from_config(self.shape, dtype=dtype)
        model.tie_weights()  # the skipped initialization would do this
        size = 1 << 20
        block = torch.randn(size, generator=torch.Generator().manual_seed(0)).repeat(2)
        for index, (name, weight) in enumerate(model.named_parameters()):
            flat = weight.data.view(-1)
            if "norm" in name:
                flat.fill_(1.0)
                continue
            # with small weights and tied embeddings a model repeats the last token, so every draft
            # is accepted
            scale = 1.0 if "embed" in name or "shared" in name else 0.002
            # the same numbers everywhere, but no matrix equals another: some engines keep equal
            # ones once
            numbers = block[index * 9973 % size :][:size] * scale
            for start in range(0, flat.numel(), size):
                block_weights = flat[start : start + size]
                block_weights.copy_(numbers[: block_weights.numel()])
        return model.eval()


def save(module: PreTrainedModel, folder: Path) -> Checkpoint:
    """Write a module for engines that read files, with a tokenizer of made-up words, one for each
    token id.
    """
    module.save_pretrained(folder)
    words = {f"t{index}": index for index in range(module.config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t2"))
    names = {"pad_token": "t0", "bos_token": "t0", "eos_token": "t1", "unk_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return Checkpoint(str(folder))
