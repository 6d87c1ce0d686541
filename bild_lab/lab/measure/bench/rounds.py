"""All arms of a shape in turn, round after round, and one row of numbers for each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bild_lab.engine.protocols import Method, Prepares
from bild_lab.engine.request import Request
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.bench.arms import Bench
from bild_lab.lab.measure.bench.costs import bare_products_s, decoder_matrices, median_s, share_of
from bild_lab.lab.measure.timing import no_garbage_collection

ASSISTED = ("hf_assisted_workaround", "hf_assisted")  # the better one first


def run(bench: Bench, rounds: int, synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    """One row per arm: median milliseconds per token with range, ratios to `generate`, and shares of two floors.

    The tokens of all requests count together. bandwidth_share: of the time in which the machine reads the weights,
    which no decoder beats without drafting; None without the CPU kernels, which read them. linear_share: of the time
    of PyTorch's own matrix products with one row. same_tokens: whether all texts are those of `generate`, as they must
    be in float32. Arms and floors run in turn. A ratio is the median of the rounds' ratios.
    """
    per_token: dict[str, list[float]] = {name: [] for name in bench.methods}
    texts: dict[str, list[list[int]]] = {}
    products: list[float] = []
    reads: list[float] = []
    matrices = [weight for _, weight in decoder_matrices(bench.native)]
    for method in bench.methods.values():  # warm-up, which also compiles
        decode_all(method, bench.requests, synchronize)
    with no_garbage_collection():
        for _ in range(rounds):
            products.append(bare_products_s(matrices, synchronize))
            if bench.kernels is not None:
                reads.append(median_s(bench.kernels.packed.read_weights, synchronize))
            for name, method in bench.methods.items():
                seconds, texts[name] = decode_all(method, bench.requests, synchronize)
                per_token[name].append(1000 * seconds / emitted(texts[name], bench.requests))
    assisted = next((per_token[arm] for arm in ASSISTED if arm in per_token), None)
    return [
        {
            "shape": bench.shape,
            "arm": name,
            "per": "emitted token",
            "ms_per_token": statistics.median(times),
            "ms_low": min(times),
            "ms_high": max(times),
            "ratio_to_generate": ratio(per_token["hf_generate"], times),
            # above 1 for some speculative arms: they read the weights less than once a token
            "bandwidth_share": share_of(reads, times) if reads else None,
            "linear_share": share_of(products, times),
            "precision": bench.precision(name),
            "same_tokens": texts[name] == texts["hf_generate"],
            # to the arm of Transformers that users would run with the same pair and window
            "ratio_to_assisted": None if assisted is None else ratio(assisted, times),
            "tokens_per_target_call": tokens_per_call(bench, name),
        }
        for name, times in per_token.items()
    ]


def decode_all(
    method: Method, requests: Sequence[Request], synchronize: Callable[[], None]
) -> tuple[float, list[list[int]]]:
    """The seconds in which a method decodes all requests, without its preparations, and their tokens."""
    seconds, texts = 0.0, []
    for request in requests:
        if isinstance(method, Prepares):
            method.prepare(request)
        synchronize()
        started = time.perf_counter()
        texts.append(method.decode(request, Trace()))
        synchronize()
        seconds += time.perf_counter() - started
    return seconds, texts


def emitted(texts: Sequence[list[int]], requests: Sequence[Request]) -> int:
    """How many tokens follow the prompts."""
    return sum(len(text) - one.limits.prompt_length for text, one in zip(texts, requests, strict=True))


def ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(other / one for other, one in zip(others, own, strict=True))


def tokens_per_call(bench: Bench, arm: str) -> float | None:
    """Emitted tokens per forward of the target; None for loops that are not ours."""
    traces = [Trace() for _ in bench.requests]
    texts = [bench.methods[arm].decode(one, trace) for one, trace in zip(bench.requests, traces, strict=True)]
    calls = sum(trace.target_calls for trace in traces)
    return emitted(texts, bench.requests) / calls if calls else None
