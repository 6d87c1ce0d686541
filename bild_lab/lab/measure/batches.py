"""Timing of methods that decode several texts at once, and whether a batch fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import psutil
import torch

from bild_lab.engine.batch import Batch
from bild_lab.engine.batched import BatchedText, decode_batch, why_not_in_batches
from bild_lab.engine.models.native.layers import cache_bytes
from bild_lab.engine.protocols import Method, Prepares
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError
from bild_lab.lab.formatting import number
from bild_lab.lab.measure.timing import Timed, no_garbage_collection, seeded

BLOCK = 8  # batches of texts that are decoded by one method before the other: a batch drains at the end of each
QUIET_BATCH = 16  # texts at once where no clock runs
SPARE = 0.9  # of the free memory that caches may take


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
                for name in names if (turn + repeat) % 2 == 0 else reversed(names):
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


def require_batches(name: str, method: Method, models: Sequence[LoadedModel]) -> None:
    """Raise UserError for a policy that decodes one text at a time."""
    if (reason := why_not_in_batches(method, models)) is not None:
        raise UserError(
            f"policy {name} decodes no batches: {reason}; set runtime.batch=1, or runtime.engine=auto for a model that "
            "runs natively"
        )


def require_room(models: Iterable[LoadedModel], requests: Sequence[Request], batch: int) -> None:
    """Raise UserError, with the batch that fits, if the caches of a batch would not fit into the free memory.

    A batch holds as many texts again whose encoders have run ahead. The longest text counts for each.
    """
    native = [model for model in models if model.engine in ("native", "kernels")]
    longest = max(requests, key=lambda one: len(one.source.prompt) + one.limits.max_new_tokens)
    room = len(longest.source.prompt) + longest.limits.max_new_tokens
    source = max(0 if one.source.encoder_ids is None else one.source.encoder_ids.shape[1] for one in requests)
    each = 2 * sum(cache_bytes(model.checkpoint.config, model.dtype, room, source) for model in native)
    if not each:
        return
    free = free_bytes(native[0].device)
    fits = int(SPARE * free / each)
    if batch > fits:
        remedy = f"at most {fits} fit: set runtime.batch={fits}" if fits else "not even one text fits"
        raise UserError(
            f"a batch of {batch} texts of up to {room} tokens needs {number(batch * each / 2**30, 2)} GiB for its "
            f"caches, and {number(free / 2**30, 2)} GiB are free; {remedy}, or lower decoding.max_new_tokens"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
