"""The processes that `torchrun` starts: one model between them, one of them speaks and writes."""

from __future__ import annotations

import io
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import psutil

from bild_lab.errors import UserError
from bild_lab.lab.cli import console, output

T = TypeVar("T")

PATIENCE = timedelta(hours=2)  # for the slowest process to read its shard of the weights
GRACE_S = 30  # for the first process to say what went wrong, and to report what is finished
SIGNALLED = 128  # exit statuses above it tell of a signal, which everybody got


@dataclass(frozen=True)
class Peers:
    """The processes that run the same code on shards of one model; by default this one alone.

    rank: of this process, from 0. Every method but `first` is called by all of them, in the same order.
    """

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that prints, logs and writes."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """What every process gives, by rank."""
        if self.count == 1:
            return [value]
        distributed = _joined()
        values: list[T] = [value] * self.count
        distributed.all_gather_object(values, value)
        return values

    def told(self, value: T) -> T:
        """What the first process gives."""
        return self.gathered(value)[0]

    def wait(self) -> None:
        """Wait until all are here."""
        if self.count > 1:
            _joined().barrier()

    def together(self, action: Callable[[], T]) -> T:
        """What the action returns here; where it fails in one process it fails in all of them."""
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        told = self.gathered(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if failed := [f"process {rank}: {what}" for rank, what in enumerate(told) if what is not None]:
            raise RuntimeError(failed[0])
        return result

    def require_alike(self, what: str, value: object) -> None:
        """Raise RuntimeError unless every process has the same."""
        if len({repr(one) for one in self.gathered(value)}) > 1:
            raise RuntimeError(
                f"the {self.count} processes do not have the same {what}; their devices must be of one kind"
            )


ALONE = Peers()


class PeersLoad:
    """How busy this machine was with the other processes of a run since this object was made."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._before = peers, self._seconds()

    def percent(self) -> float:
        """Of all cores' time."""
        wall, own = (now - before for now, before in zip(self._seconds(), self._before, strict=True))
        share = 100 * own / max(wall * (os.cpu_count() or 1), 1e-9)
        here = platform.node()
        return sum(share for host, share in self._peers.gathered((here, share)) if host == here) - share

    @staticmethod
    def _seconds() -> tuple[float, float]:
        own = psutil.Process().cpu_times()
        return time.monotonic(), own.user + own.system


def launched() -> Peers:
    """The processes that `torchrun` started, as it tells each of them; without it this one alone."""
    return Peers(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def local_rank() -> int:
    """Which of this machine's processes, and of its GPUs, is this one's."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def first_speaks() -> Iterator[None]:
    """Run an application in each process that `torchrun` started, with one voice.

    The others are heard only where they fail alone: `torchrun` ends all processes with the first that fails, so they
    wait for it a while.
    """
    peers, said = launched(), io.StringIO()
    if not peers.first:
        console.file, output.quiet = said, True
    try:
        yield
    except SystemExit as ended:
        if ended.code and not peers.first and ended.code <= SIGNALLED:
            time.sleep(GRACE_S)
            sys.stderr.write(f"process {peers.rank}:\n{said.getvalue()}")
        if not ended.code and peers.count > 1:
            _leave()
        raise


def require_basic_launcher(launcher: str) -> None:
    """Raise UserError for a Hydra launcher, whose own processes `torchrun` knows nothing of."""
    if launched().count > 1 and not launcher.endswith(".BasicLauncher"):
        raise UserError(f"processes of torchrun run every point themselves, got the launcher {launcher}; leave it out")


def _joined():
    """`torch.distributed` with this process in the group that `torchrun` meant; joins at the first call."""
    import torch  # `--help` does not wait for it
    import torch.distributed

    if not torch.distributed.is_initialized():
        gpu = torch.device("cuda", local_rank()) if torch.cuda.is_available() else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        backend = "gloo" if gpu is None else "nccl"
        torch.distributed.init_process_group(backend, timeout=PATIENCE, device_id=gpu)
    return torch.distributed


def _leave() -> None:
    if "torch" in sys.modules and (distributed := sys.modules["torch"].distributed).is_initialized():
        distributed.destroy_process_group()
