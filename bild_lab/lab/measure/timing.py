"""Paired, interleaved, warm timing of decoding methods."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from bild_lab.engine.protocols import Method, Prepares
from bild_lab.engine.request import Request
from bild_lab.engine.trace import Span, StageTrace, Trace
from bild_lab.lab.schema.timed import Timed


@dataclass(frozen=True)
class Stages:
    """The time of traced examples by stage.

    seconds: in prefill, draft, verify and host code, over all examples. spans: for each example, its stages in order.
    """

    seconds: dict[str, float]
    spans: tuple[list[Span], ...]


def warm_up(methods: Mapping[str, Method], requests: Sequence[Request], count: int, seed: int) -> None:
    """Decode the first examples with every method. Nothing is recorded."""
    for index, request in enumerate(requests[:count]):
        for method in methods.values():
            method.decode(seeded(request, seed, index), Trace())


def time_methods(
    methods: Mapping[str, Method],
    requests: Sequence[Request],
    repeats: int,
    seed: int,
    synchronize: Callable[[], None],
    advance: Callable[[], None] = lambda: None,
    compiled_steps: Callable[[], int] = lambda: 0,
) -> dict[str, list[Timed]]:
    """Decode every example with every method in turn, `repeats` times. The order alternates.

    Of more than two methods another begins every second time, as every method then has every place equally often.
    The time covers a whole example including encoder and prefill. The device is synchronized once before and once
    after. A method's preparation (`Prepares`) is not timed. Repeats use the same seed, so they do the same work. An
    example is decoded again if a step was compiled meanwhile. Raises RuntimeError, naming the example, if a method
    fails.
    """
    results: dict[str, list[Timed]] = {name: [] for name in methods}
    names = list(methods)
    with no_garbage_collection():
        for index, request in enumerate(requests):
            for repeat in range(repeats):
                for name in order(names, index, repeat, repeats):
                    before = -1
                    while before != compiled_steps():  # else the time would include compilation
                        before = compiled_steps()
                        tokens, seconds, trace = _time_once(
                            methods[name], seeded(request, seed, index), synchronize, index
                        )
                    if repeat == 0:
                        results[name].append(Timed(tokens[request.limits.prompt_length :], [], trace))
                    results[name][index].latency_s.append(seconds)
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
        if isinstance(method, Prepares):
            method.prepare(request)
        synchronize()
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


def _time_once(
    method: Method, request: Request, synchronize: Callable[[], None], index: int
) -> tuple[list[int], float, Trace]:
    trace = Trace()
    try:
        if isinstance(method, Prepares):
            method.prepare(request)
        synchronize()
        started = time.perf_counter()
        tokens = method.decode(request, trace)
    except Exception as error:
        raise RuntimeError(f"example {index}: {error}") from error
    synchronize()
    return tokens, time.perf_counter() - started, trace
