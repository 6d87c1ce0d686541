"""Decoding several texts at once with any method, unchanged: each text and its counts are those of
batch 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.models.device import free_bytes
from bild_lab.engine.models.native.layers import SPARE_ROWS, cache_bytes
from bild_lab.engine.protocols import DecodesBatches, Method, Served, require_text
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError

ARRIVAL_SEED = 0
UNTIMED_BATCH = 16  # how many texts decode at once where no clock runs
MEMORY_SHARE = 0.9  # the share of the free memory that caches may take
GIB = 2**30


@dataclass(frozen=True)
class BatchedText:
    """One text of a batch. token_ids: as emitted. latency_s, share_s: as in `FinishedLoop`."""

    token_ids: list[int]
    trace: Trace
    latency_s: float
    share_s: float


def decode_batch(
    method: Method,
    requests: Sequence[Request],
    batch: Batch,
    on_end: Callable[[int], None] = lambda index: None,
    make_trace: Callable[[], Trace] = Trace,
) -> list[BatchedText]:
    """Decode all requests with a method, `batch.size` of them at a time.

    on_end: called with the index of each text. make_trace: gives the trace of each text that has a
    loop.

    A method keeps no state of a text. Random numbers come from the generator of its request, so a
    text does not depend on those beside it. Method and models must be those of
    `why_not_in_batches`.
    """
    if isinstance(method, DecodesBatches):
        return _run_batched(method, requests, batch.size, on_end)
    if isinstance(method, Served):
        return _run_concurrently(method, requests, batch.size, on_end, make_trace)

    def loop(request: Request) -> tuple[list[int], Trace]:
        trace = make_trace()
        tokens = method.decode(request, trace)
        require_text(method, request, tokens)
        return tokens[request.limits.prompt_length :], trace

    texts = batch.run([partial(loop, request) for request in requests], on_end)
    return [BatchedText(*text.result, text.latency_s, text.share_s) for text in texts]


def _run_batched(
    method: DecodesBatches, requests: Sequence[Request], size: int, on_end: Callable[[int], None]
) -> list[BatchedText]:
    """Decode `size` texts at a time, in order. The next ones begin when all of them have ended."""
    texts: list[BatchedText] = []
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        started = time.perf_counter()
        token_lists = method.decode_batch(batch)
        seconds = time.perf_counter() - started
        for request, tokens in zip(batch, token_lists, strict=True):
            require_text(method, request, tokens)
            on_end(len(texts))
            emitted = tokens[request.limits.prompt_length :]
            texts.append(BatchedText(emitted, Trace(), seconds, seconds / len(batch)))
    return texts


def _run_concurrently(
    method: Served,
    requests: Sequence[Request],
    size: int,
    on_end: Callable[[int], None],
    make_trace: Callable[[], Trace],
) -> list[BatchedText]:
    """Ask for all texts, with at most `size` of them on their way; answers are read at the end,
    outside the clock.

    With an arrival rate a text's seconds begin when it arrives, also if it waits for its place. What
    its trace pauses does not count. The seconds of all are shared out as in `shares_of`.
    """
    traces = [make_trace() for _ in requests]
    begun = time.perf_counter()
    arrivals = arrival_times(method.arrival_rate, len(requests))

    def ask(index: int) -> tuple[Any, float, float]:
        arrived = time.perf_counter()
        if arrivals is not None:
            arrived = begun + arrivals[index]
            time.sleep(max(0.0, arrived - time.perf_counter()))
        sent = time.perf_counter()
        answer = method.ask(requests[index], traces[index])
        on_end(index)
        ended = time.perf_counter() - traces[index].paused_s
        return answer, ended - arrived, ended - sent

    with ThreadPoolExecutor(size) as pool:
        answers = list(pool.map(ask, range(len(requests))))
    seconds = time.perf_counter() - begun
    read_texts, waits = [], []
    for request, trace, (answer, latency_s, asking_s) in zip(
        requests, traces, answers, strict=True
    ):
        tokens = method.read(request, trace, answer)
        require_text(method, request, tokens)
        emitted = tokens[request.limits.prompt_length :]
        read_texts.append((emitted, trace, latency_s))
        waits.append(0.0 if trace.failed else asking_s)
    shares = shares_of(seconds, waits)
    return [BatchedText(*text, share_s) for text, share_s in zip(read_texts, shares, strict=True)]


def shares_of(amount: float, weights: Sequence[float]) -> list[float]:
    """What several texts took together, such as seconds, shared out by a weight of each, such as
    how long its answer was waited for; in equal shares where all weights are 0.

    A text that never came has the weight 0, so those that came share the whole. Equal shares would
    be the same for short and for long texts, and an interval over texts would have no width.
    """
    total = sum(weights)
    if not total:
        return [amount / len(weights) for _ in weights]
    return [amount * weight / total for weight in weights]


def arrival_times(rate: float | None, count: int) -> Float[np.ndarray, " count"] | None:
    """Seconds at which requests arrive: at random, `rate` of them a second (a Poisson process). The
    same for every method; None without a rate.
    """
    if rate is None:
        return None
    return np.random.default_rng(ARRIVAL_SEED).exponential(1 / rate, count).cumsum()


def why_not_in_batches(method: Method, models: Sequence[LoadedModel]) -> str | None:
    """Why this method over these models decodes one text at a time, and what to do; None if it
    decodes batches.
    """
    remedy = "set runtime.batch=1"
    if isinstance(method, DecodesBatches | Served):
        return None
    if method.draft_shape is None:
        return f"it is a loop of its own, on {method.engine}; {remedy}"
    if learns_from_texts(method):
        return (
            "a text learns from those that have ended before it;"
            f" {remedy}, or keep=false where it has this knob"
        )
    if any(model.engine not in ("native", "kernels") for model in models):
        return (
            "Transformers' own modules run one text at a time here (engine hf);"
            f" {remedy}, or runtime.engine=auto for a model that runs natively"
        )
    if any(model.compiled for model in models):
        return f"compiled steps hold one text; {remedy}, or runtime.compile=auto"
    return None


def learns_from_texts(method: Method) -> bool:
    """Whether what a method drafts depends on the texts before."""
    return isinstance(method, DraftThenVerify) and method.drafter.learns_from_texts


def require_batches(name: str, method: Method, models: Sequence[LoadedModel]) -> None:
    """Raise UserError for a policy that decodes one text at a time."""
    if (reason := why_not_in_batches(method, models)) is not None:
        raise UserError(f"policy {name} decodes no batches: {reason}")


def require_room(models: Iterable[LoadedModel], requests: Sequence[Request], batch: int) -> None:
    """Raise UserError, with the batch that fits, if the caches of a batch, and what the kernels need
    beside them, would not fit into the free memory.
    """
    models = list(models)
    fits = max_batch_size(models, requests)
    if fits is None or batch <= fits:
        return
    remedy = f"at most {fits} fit: set runtime.batch={fits}" if fits else "not even one text fits"
    needed = batch * cache_bytes_per_text(models, requests) + buffer_bytes(models, requests)
    free = room_bytes(models) / GIB
    raise UserError(
        f"a batch of {batch} texts needs {needed / GIB:.2f} GiB for its caches, and {free:.2f} GiB are"
        f" free; {remedy}, or lower decoding.max_new_tokens"
    )


def auto_batch_size(
    method: Method,
    models: Sequence[LoadedModel],
    requests: Sequence[Request],
    max_batch: int = UNTIMED_BATCH,
) -> int:
    """How many texts to decode at once where no clock runs: 1 for what decodes no batches."""
    if why_not_in_batches(method, models) is not None:
        return 1
    fits = max_batch_size(models, requests)
    return max_batch if fits is None else max(1, min(max_batch, fits))


def max_batch_size(models: Iterable[LoadedModel], requests: Sequence[Request]) -> int | None:
    """The largest batch whose caches fit into the free memory; None if our own engines keep
    none.
    """
    models = list(models)
    text_bytes = cache_bytes_per_text(models, requests)
    if not text_bytes:
        return None
    room = MEMORY_SHARE * room_bytes(models) - buffer_bytes(models, requests)
    return max(0, int(room / text_bytes))


def room_bytes(models: Sequence[LoadedModel]) -> int:
    """The memory for the caches of a batch: what is free, and what earlier batches left."""
    pooled = sum(model.pooled_bytes for model in models if model.engine == "native")
    return free_bytes(models[0].device) + pooled


def buffer_bytes(models: Iterable[LoadedModel], requests: Sequence[Request]) -> int:
    """How many bytes the buffers of kernels may still take, whatever the batch."""
    decoders = [model.packed for model in models if model.engine == "kernels"]
    if not decoders:
        return 0
    slots = max(longest(requests)) + SPARE_ROWS
    return sum(decoder.buffer_bytes(slots) for decoder in decoders)


def cache_bytes_per_text(models: Iterable[LoadedModel], requests: Sequence[Request]) -> int:
    """How many bytes one slot of a batch takes: for the caches of its text, and of a text whose
    encoder has run before it got a slot.

    The longest text counts for each.
    """
    if not requests:
        return 0
    max_tokens, max_source = longest(requests)
    text_bytes = sum(
        cache_bytes(model.checkpoint.config, model.dtype, max_tokens, max_source)
        for model in models
        if model.engine in ("native", "kernels")
    )
    return 2 * text_bytes


def longest(requests: Sequence[Request]) -> tuple[int, int]:
    """The most tokens of a prompt and its answer, and of a source."""
    return (
        max(request.max_length for request in requests),
        max(request.source.encoder_length for request in requests),
    )
