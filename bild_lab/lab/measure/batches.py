"""Timing of methods that decode several texts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from bild_lab.engine.batch import Batch
from bild_lab.engine.batched import BatchedText, decode_batch
from bild_lab.engine.protocols import Method, Prepares
from bild_lab.engine.request import Request
from bild_lab.lab.measure.timing import no_garbage_collection, order, seeded
from bild_lab.lab.schema.timed import Timed

BLOCK = 8  # batches of texts that are decoded by one method before the other: a batch drains at the end of each


def warm_up_batches(methods: Mapping[str, Method], requests: Sequence[Request], batch: int, seed: int) -> None:
    """Decode one batch of examples with every method. Nothing is recorded."""
    for method in methods.values():
        own = [seeded(request, seed, index) for index, request in enumerate(requests[:batch])]
        _time_block(method, own, batch, lambda: None)


def time_batches(
    methods: Mapping[str, Method],
    requests: Sequence[Request],
    batch: int,
    repeats: int,
    seed: int,
    synchronize: Callable[[], None],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[Timed]]:
    """Decode all examples with every method, `batch` texts at a time, `repeats` times.

    Methods take turns with blocks of examples. The seconds of a block are shared out among its texts: a text's
    `latency_s` is its share, so that the shares add up to the time of all texts; its `waited_s` is the time from its
    place in the batch to its end. Repeats use the same seed. Raises RuntimeError if a method fails.
    """
    found: dict[str, list[Timed]] = {name: [] for name in methods}
    names = list(methods)
    with no_garbage_collection():
        for turn, block in enumerate(blocks(len(requests), BLOCK * batch)):
            for repeat in range(repeats):
                for name in order(names, turn, repeat, repeats):
                    own = [seeded(requests[index], seed, index) for index in block]
                    texts = _time_block(methods[name], own, batch, synchronize)
                    if repeat == 0:
                        found[name] += [Timed(one.token_ids, [], one.trace) for one in texts]
                    for index, one in zip(block, texts, strict=True):
                        found[name][index].latency_s.append(one.share_s)
                        found[name][index].waited_s.append(one.latency_s)
            for _ in block:
                advance()
    return found


def _time_block(
    method: Method, requests: Sequence[Request], batch: int, synchronize: Callable[[], None]
) -> list[BatchedText]:
    for request in requests if isinstance(method, Prepares) else []:
        method.prepare(request)
    synchronize()
    return decode_batch(method, requests, Batch(batch, synchronize))


def blocks(count: int, size: int) -> Iterator[range]:
    """Ranges of about so many examples. A short rest belongs to the one before it."""
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] < size // 2:
        starts.pop()
    yield from (range(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True))
