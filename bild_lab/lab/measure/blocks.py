"""Which examples are timed together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

# batches of texts that are decoded by one method before the other: a batch drains at the end of
# each
BLOCK = 8


def timed_blocks(count: int, batch: int) -> Iterator[range]:
    """The examples that are decoded by one method before the other: one by one, or in batches."""
    return blocks(count, BLOCK * batch if batch > 1 else 1)


def block_numbers(count: int, batch: int) -> list[int] | None:
    """The block of each example, as `Timed` has it; None outside of batches."""
    if batch == 1:
        return None
    return [number for number, block in enumerate(timed_blocks(count, batch)) for _ in block]


def blocks(count: int, size: int) -> Iterator[range]:
    """Ranges of about so many examples. A short remainder belongs to the range before it."""
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] < size // 2:
        starts.pop()
    yield from (range(start, stop) for start, stop in pairwise([*starts, count]))
