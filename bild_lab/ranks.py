"""The processes that `torchrun` or `accelerate launch` starts for a training; each has a rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")

# one process waits so long at most for another, which may have a model answer everything
LONGEST_WAIT = timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """The processes of a training.

    rank: this process's rank, from 0. count: how many processes there are.

    All processes must call every method except `is_main`, in the same order.
    """

    rank: int
    count: int

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints, logs and writes."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        process_group()
        return gather_object([value])

    def wait(self) -> None:
        """Wait until all processes have reached this call."""
        if self.count > 1:
            process_group().wait_for_everyone()


def launched() -> Ranks:
    """The processes that a launcher started, read from environment variables; without a launcher,
    only this process.
    """
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def process_group(cpu: bool = False) -> PartialState:
    """Accelerate's state of these processes; the first call joins them."""
    from accelerate import PartialState

    return PartialState(cpu=cpu, timeout=LONGEST_WAIT)
