"""Run two functions at the same time: in two threads on the CPU, in two streams on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from bild_lab.engine.batch_scheduler import current_batch

First = TypeVar("First")
Second = TypeVar("Second")
Together = Callable[[Callable[[], First], Callable[[], Second]], tuple[First, Second]]


@contextmanager
def two_lanes(device: torch.device) -> Iterator[Together]:
    """A function that runs two functions at once and returns both results when both are done.

    In a batch they run one after the other, each together with the rows of other texts.
    """
    if current_batch() is not None:
        yield lambda here, beside: (here(), beside())
        return
    if device.type == "cuda":
        yield partial(in_two_streams, torch.cuda.Stream(device))
        return
    threads = torch.get_num_threads()
    # The number is per thread; a new thread starts with the last one set. More than one thread per
    # lane would not help: idle PyTorch threads of one lane spin on the core that the other lane
    # needs.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(1) as worker:
            yield partial(in_two_threads, worker)
    finally:
        torch.set_num_threads(threads)


def in_two_threads(
    worker: ThreadPoolExecutor, here: Callable[[], First], beside: Callable[[], Second]
) -> tuple[First, Second]:
    """Run `beside` in the worker thread. Kernels release Python's GIL, so both run in parallel."""
    second_future = worker.submit(torch.inference_mode()(beside))  # inference mode is per thread
    try:
        first_result = here()
    finally:
        second_result = (
            second_future.result()
        )  # wait for it even after an error: it uses the same cache
    return first_result, second_result


def in_two_streams(
    aside: torch.cuda.Stream, here: Callable[[], First], beside: Callable[[], Second]
) -> tuple[First, Second]:
    """Run `beside` in its own stream.

    Both start after the current stream's queued work, which then waits for both.
    """
    current = torch.cuda.current_stream(aside.device)
    begun = current.record_event()
    first_result = here()  # launched first, as the text waits for it
    aside.wait_event(begun)
    with torch.cuda.stream(aside):
        second_result = beside()
    current.wait_stream(aside)
    return first_result, second_result
