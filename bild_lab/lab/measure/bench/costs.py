"""What single parts of decoding cost: the weights read, the bare matrix products, a forward, a drafted token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bild_lab.engine.drafters import LowConfidence, ModelDrafter
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel, why_no_kernels
from bild_lab.engine.request import Request
from bild_lab.engine.session import LAST
from bild_lab.lab.measure.bench.arms import WINDOW, Bench, synthetic_request
from bild_lab.lab.measure.bench.shapes import DRAFTERS, SyntheticCheckpoint

QUERY_LENGTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 1024, 2048)


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
def drafter_rows(
    name: str, device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]
) -> list[dict[str, Any]]:
    """A row for each way to run a drafter: step by step (eager), and a chain as one program (compiled).

    Milliseconds are those of a drafted token, with its confidence: medians of windows drafted in turn.
    """
    checkpoint = SyntheticCheckpoint(name, shape=DRAFTERS[name]())
    eager = NativeModel(HuggingFaceModel(checkpoint, device, dtype))
    compiled = eager.by_kernels() if why_no_kernels(device, dtype) is None else None
    arms = {"eager": eager} if compiled is None else {"eager": eager, "compiled": compiled}
    request = synthetic_request(checkpoint, 40, device)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    reads: list[float] = []
    for _ in range(42):
        if compiled is not None:
            reads.append(median_s(compiled.packed.read_weights, synchronize))
        for arm, model in arms.items():
            times[arm].append(_drafting_ms(model, eager, request, synchronize))
    return [
        {
            "shape": name,
            "arm": arm,
            "per": "drafted token",
            "ms_per_token": statistics.median(each),
            "ms_low": min(each),
            "ms_high": max(each),
            "ratio_to_generate": None,
            "bandwidth_share": share_of(reads[2:], each) if reads else None,
            "precision": str(dtype).removeprefix("torch."),
        }
        for arm, each in ((arm, several[2:]) for arm, several in times.items())  # the first two warm up
    ]


def _drafting_ms(model: NativeModel, target: NativeModel, request: Request, synchronize: Callable[[], None]) -> float:
    """Milliseconds for each token of the second window that a drafter drafts."""
    drafter = ModelDrafter(model, WINDOW, LowConfidence(0.0))
    drafter.start(request, target.start(request.source, 1))
    text = list(request.source.prompt)
    text += drafter.propose(text).token_list  # the prompt runs with the first draft
    synchronize()
    started = time.perf_counter()
    drafted = len(drafter.propose(text))
    synchronize()
    return 1000 * (time.perf_counter() - started) / drafted


@torch.inference_mode()
def forward_costs(bench: Bench, synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    """Median milliseconds of our fastest forward by query length, and of a one-row forward by context length."""
    rows = []
    model, room = bench.kernels or bench.native, max(CONTEXTS) + max(QUERY_LENGTHS)
    for kind, lengths in (("query", QUERY_LENGTHS), ("context", CONTEXTS)):
        for length in lengths:
            session = model.start(bench.requests[0].source, room)
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
