"""Two pieces of work at the same time: on the CPU in two threads, on a GPU in two streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")
Together = Callable[[Callable[[], First], Callable[[], Second]], tuple[First, Second]]


@contextmanager
def two_lanes(device: torch.device) -> Iterator[Together]:
    """A function that runs two pieces of work at once and returns both results when both are done."""
    if device.type == "cuda":
        yield partial(in_two_streams, torch.cuda.Stream(device))
        return
    threads = torch.get_num_threads()
    # The number is each thread's own, and the last one set is what a new thread begins with. More than one each
    # would not help: PyTorch's helpers of the one lane wait, spinning, on the core that the other one needs.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(1) as worker:
            yield partial(in_two_threads, worker)
    finally:
        torch.set_num_threads(threads)


def in_two_threads(
    worker: ThreadPoolExecutor, here: Callable[[], First], beside: Callable[[], Second]
) -> tuple[First, Second]:
    """`beside` in the worker; kernels release Python's lock, so that they run side by side."""
    other = worker.submit(torch.inference_mode()(beside))  # the mode is each thread's own
    try:
        first = here()
    finally:
        second = other.result()  # whatever happened here: it works on the same cache
    return first, second


def in_two_streams(
    aside: torch.cuda.Stream, here: Callable[[], First], beside: Callable[[], Second]
) -> tuple[First, Second]:
    """`beside` in a stream of its own; both begin after what the current one holds, which then waits for both."""
    current = torch.cuda.current_stream(aside.device)
    begun = current.record_event()
    first = here()  # launched first, as the text waits for it
    aside.wait_event(begun)
    with torch.cuda.stream(aside):
        second = beside()
    current.wait_stream(aside)
    return first, second
