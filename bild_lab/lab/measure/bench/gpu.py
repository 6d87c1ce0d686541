"""What a GPU does with large random models: how fast each arm is, what rows cost, and where the host waits for it."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bild_lab.engine.acceptance import ExactMatch, Rollback, SpeculativeSampling
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import LowConfidence, ModelDrafter, NoDraft
from bild_lab.engine.models.hf import HuggingFaceModel, weightless
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.session import LAST
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.bench.arms import WINDOW, Bench, Models, prepare, synthetic_request
from bild_lab.lab.measure.bench.shapes import Shape, SyntheticCheckpoint, llama, t5

SHAPES = {  # each with its drafter
    "llama_1b": (
        Shape(lambda: llama(16, 2048, 8192, 32), "llama_1b_drafter", 64),
        Shape(lambda: llama(2, 512, 1536, 8), None, 64),
    ),
    "t5_3b": (
        Shape(lambda: t5(1024, 24, 32, 16384, d_kv=128), "t5_small", 64),
        Shape(lambda: t5(512, 6, 8, 2048), None, 64),
    ),
}
TRIAL = {  # to see on a CPU that all of it works; their speed says nothing
    "tiny_llama": (
        Shape(lambda: llama(2, 64, 128, 4, 1000), "tiny_llama_drafter", 8),
        Shape(lambda: llama(1, 64, 128, 4, 1000), None, 8),
    ),
    "tiny_t5": (
        Shape(lambda: t5(64, 2, 4, 128, d_kv=16, vocab_size=1000), "tiny_t5_drafter", 8),
        Shape(lambda: t5(64, 1, 4, 128, d_kv=16, vocab_size=1000), None, 8),
    ),
}
Pair = tuple[Shape, Shape]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COPIES = 2.4  # of the weights: one for each engine, and room for activations, graphs and caches
SYNCHRONIZES = "synchroniz"  # in PyTorch's warning of a wait
KERNELS = 12  # the longest ones are shown


def needed_bytes(name: str, pair: Pair, dtype: torch.dtype) -> int:
    """About how much memory of the device the bench of this shape and its drafter takes."""
    numbers = sum(
        sum(weight.numel() for weight in weightless(SyntheticCheckpoint(name, shape=shape.config())).parameters())
        for shape in pair
    )
    return int(COPIES * numbers * dtype.itemsize)


def gpu_bench(name: str, pair: Pair, device: torch.device, dtype: torch.dtype) -> Bench:
    """The arms of one shape and its drafter, with random weights."""
    large, small = pair
    target, draft = _models(name, large, device, dtype), _models(str(large.drafter), small, device, dtype)
    request = synthetic_request(target[0].checkpoint, large.new_tokens, device)
    return prepare(name, target, draft, (request,))


def _models(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Models:
    hf = HuggingFaceModel(SyntheticCheckpoint(name, shape=shape.config()), device, dtype)
    return NativeModel(hf), hf


@torch.inference_mode()
def row_costs(bench: Bench, synchronize: Callable[[], None], rows: tuple[int, ...] = ROWS) -> list[dict[str, Any]]:
    """Median milliseconds of a forward of so many rows behind a short text, eager and compiled."""
    found = []
    for arm, model in (("native", bench.native), ("native_compiled", bench.native.as_compiled())):
        session = model.start(bench.requests[0].source, 2 * max(rows))
        session.extend([5] * 8, LAST)
        base = session.length
        for count in rows:
            times = []
            for _ in range(7):
                synchronize()
                started = time.perf_counter()
                session.extend([5] * count)
                synchronize()
                times.append(1000 * (time.perf_counter() - started))
                session.rollback(base)
            found.append({"shape": bench.shape, "arm": arm, "rows": count, "ms": statistics.median(times[2:])})
    return found


def wait_rows(bench: Bench, draft: NativeModel) -> list[dict[str, Any]]:
    """How often a round of some policies waits for the device, and the lines that wait most, as PyTorch warns."""
    rows = []
    for arm, target, drafter in (
        ("eager", bench.native, draft),
        ("compiled", bench.native.as_compiled(), draft.as_compiled()),
    ):
        for policy, method in {
            "vanilla": DraftThenVerify(target, NoDraft(target), ExactMatch()),
            "speculative": DraftThenVerify(target, ModelDrafter(drafter, WINDOW), SpeculativeSampling()),
            "bild": DraftThenVerify(target, ModelDrafter(drafter, WINDOW, LowConfidence(0.4)), Rollback(2.0)),
        }.items():
            method.decode(bench.requests[0], Trace())  # compiles, and moves weights
            trace = Trace()
            with told_waits() as lines:
                method.decode(bench.requests[0], trace)
            most = ", ".join(f"{line} ({count})" for line, count in Counter(lines).most_common(3))
            rows.append(
                {
                    "shape": bench.shape,
                    "policy": policy,
                    "arm": arm,
                    "rounds": len(trace.rounds),
                    "waits_per_round": len(lines) / len(trace.rounds),
                    "lines": most,
                }
            )
    return rows


@contextmanager
def told_waits() -> Iterator[list[str]]:
    """The lines at which the host waits for the GPU, as PyTorch warns of them."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines += [f"{Path(one.filename).name}:{one.lineno}" for one in told if SYNCHRONIZES in str(one.message)]


def kernel_rows(bench: Bench, synchronize: Callable[[], None]) -> tuple[list[dict[str, Any]], float | None]:
    """The operations that take most time on the device in one text of `native`, and how busy they kept it, from 0 to 1.

    On a CPU the times are the CPU's, and nothing is said of how busy it was.
    """
    cuda = bench.native.device.type == "cuda"
    method = bench.methods["native"]
    method.decode(bench.requests[0], Trace())
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    synchronize()
    with profile(activities=activities) as profiled:
        started = time.perf_counter()
        method.decode(bench.requests[0], Trace())
        synchronize()
        wall_ms = 1000 * (time.perf_counter() - started)

    def ms(event: Any) -> float:
        return (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1000

    events = sorted(profiled.key_averages(), key=ms, reverse=True)
    rows = [
        {"shape": bench.shape, "operation": event.key[:80], "calls": event.count, "ms": ms(event)}
        for event in events[:KERNELS]
    ]
    return rows, sum(map(ms, events)) / wall_ms if cuda else None
