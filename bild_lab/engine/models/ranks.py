"""The processes that `torchrun` or `accelerate launch` starts; each has a rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")

PATIENCE = timedelta(hours=2)  # for the slowest process to read its shard of the weights


@dataclass(frozen=True)
class Ranks:
    """The processes that run the same code on shards of one model. By default there is one.

    rank: of this process, from 0. count: how many there are. All processes must call every method except `first`,
    in the same order.
    """

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that prints, logs and writes."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        process_group()
        return gather_object([value])

    def broadcast(self, value: T) -> T:
        """The first process's value."""
        return self.gather(value)[0]

    def wait(self) -> None:
        """Wait until all processes have reached this call."""
        if self.count > 1:
            process_group().wait_for_everyone()

    def run(self, action: Callable[[], T]) -> T:
        """Run the action in every process and return this process's result. If it fails in one, it fails in all."""
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if failed := [f"process {rank}: {message}" for rank, message in enumerate(errors) if message is not None]:
            raise RuntimeError(failed[0])
        return result

    def require_equal(self, what: str, value: object) -> None:
        """Raise RuntimeError unless every process has the same value."""
        if len({repr(one) for one in self.gather(value)}) > 1:
            raise RuntimeError(
                f"the {self.count} processes do not have the same {what}; their devices must be of one kind"
            )


ONE_PROCESS = Ranks()


def launched() -> Ranks:
    """The processes that a launcher started, read from environment variables; without a launcher, only this process."""
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def local_rank() -> int:
    """The rank among this machine's processes, which is also the number of this process's GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def process_group(cpu: bool = False, patience: timedelta = PATIENCE) -> PartialState:
    """Accelerate's state of these processes; the first call joins them, and decides how long one waits for another."""
    from accelerate import PartialState

    return PartialState(cpu=cpu, timeout=patience)
