"""Paired, interleaved, warm timing of decoding methods, one text after another or several at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from bild_lab.engine.batch import Batch
from bild_lab.engine.batched import BatchedText, decode_batch
from bild_lab.engine.protocols import Method, Prepares
from bild_lab.engine.request import Request
from bild_lab.engine.trace import Span, StageTrace, Trace
from bild_lab.lab.schema.timed import Timed

BLOCK = 8  # batches of texts that are decoded by one method before the other: a batch drains at the end of each


@dataclass(frozen=True)
class Stages:
    """The time of traced examples by stage.

    seconds: in prefill, draft, verify and host code, over all examples. spans: for each example, its stages in order.
    """

    seconds: dict[str, float]
    spans: tuple[list[Span], ...]


def warm_up(methods: Mapping[str, Method], requests: Sequence[Request], count: int, seed: int, batch: int = 1) -> None:
    """Decode the first examples with every method, in batches the first that fit. Nothing is recorded."""
    count = min(len(requests), batch if batch > 1 and count else count)
    for block in blocks(count, batch):
        for method in methods.values():
            _decode(method, [seeded(requests[index], seed, index) for index in block], batch, lambda: None)


def time_methods(
    methods: Mapping[str, Method],
    requests: Sequence[Request],
    repeats: int,
    seed: int,
    synchronize: Callable[[], None],
    advance: Callable[[], None] = lambda: None,
    compiled_steps: Callable[[], int] = lambda: 0,
    batch: int = 1,
) -> dict[str, list[Timed]]:
    """Decode every example with every method in turn, `repeats` times. The order alternates.

    Of more than two methods another begins every second time, as every method then has every place equally often.
    The time covers a whole example including encoder and prefill. The device is synchronized once before and once
    after. A method's preparation (`Prepares`) is not timed. Repeats use the same seed, so they do the same work. An
    example is decoded again if a step was compiled meanwhile. Raises RuntimeError, naming the example, if a method
    fails.

    batch: how many texts are decoded at a time. In batches methods take turns with blocks of examples, whose seconds
    are shared out among the texts: see `Timed`.
    """
    results: dict[str, list[Timed]] = {name: [] for name in methods}
    names = list(methods)
    with no_garbage_collection():
        for turn, block in enumerate(blocks(len(requests), BLOCK * batch if batch > 1 else 1)):
            for repeat in range(repeats):
                for name in order(names, turn, repeat, repeats):
                    before = -1
                    while before != compiled_steps():  # else the time would include compilation
                        before = compiled_steps()
                        own = [seeded(requests[index], seed, index) for index in block]
                        texts = _decode(methods[name], own, batch, synchronize, block[0])
                    if repeat == 0:
                        results[name] += [Timed(one.token_ids, [], one.trace) for one in texts]
                    for index, one in zip(block, texts, strict=True):
                        results[name][index].latency_s.append(one.share_s)
                        if batch > 1:
                            results[name][index].waited_s.append(one.latency_s)
            for _ in block:
                advance()
    return results


def order(names: Sequence[str], index: int, repeat: int, repeats: int) -> list[str]:
    """In which order methods decode an example, or block of them: two by turns, more from another one each time."""
    if len(names) <= 2:
        return list(names) if (index + repeat) % 2 == 0 else list(reversed(names))
    turn = index * repeats + repeat
    start = turn // 2 % len(names)
    turned = [*names[start:], *names[:start]]
    return turned if turn % 2 == 0 else turned[::-1]


def trace_stages(method: Method, requests: Sequence[Request], seed: int, synchronize: Callable[[], None]) -> Stages:
    """Decode the examples once more with a clock in each stage. Host code is the time between the stages."""
    seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "host": 0.0}
    spans = []
    for index, request in enumerate(requests):
        _prepare(method, [request], synchronize)
        trace = StageTrace(synchronize=synchronize)
        method.decode(seeded(request, seed, index), trace)
        synchronize()
        whole = time.perf_counter() - trace.started
        for stage, part in trace.stages_s.items():
            seconds[stage] += part
        seconds["host"] += whole - sum(trace.stages_s.values())
        spans.append(trace.spans)
    return Stages(seconds, tuple(spans))


def seeded(request: Request, seed: int, index: int) -> Request:
    """The request with its own generator, so that the same seed and example give the same tokens."""
    if request.sampling.greedy:
        return request
    device = request.source.device
    return replace(request, generator=torch.Generator(device).manual_seed(seed * 1_000_003 + index))


def blocks(count: int, size: int) -> Iterator[range]:
    """Ranges of about so many examples. A short rest belongs to the one before it."""
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] < size // 2:
        starts.pop()
    yield from (range(start, stop) for start, stop in pairwise([*starts, count]))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector from running inside a timed example."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _decode(
    method: Method, requests: Sequence[Request], batch: int, synchronize: Callable[[], None], first: int = 0
) -> list[BatchedText]:
    """Decode one text, or several in batches. first: the place of the first among all examples."""
    if batch > 1:
        _prepare(method, requests, synchronize)
        return decode_batch(method, requests, Batch(batch, synchronize))
    (request,), trace = requests, Trace()
    try:
        _prepare(method, requests, synchronize)
        started = time.perf_counter()
        tokens = method.decode(request, trace)
    except Exception as error:
        raise RuntimeError(f"example {first}: {error}") from error
    synchronize()
    seconds = time.perf_counter() - started
    return [BatchedText(tokens[request.limits.prompt_length :], trace, seconds, seconds)]


def _prepare(method: Method, requests: Sequence[Request], synchronize: Callable[[], None]) -> None:
    for request in requests if isinstance(method, Prepares) else []:
        method.prepare(request)
    synchronize()
