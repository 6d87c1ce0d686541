"""Detects whether another process used the same device during timing."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import torch


class DeviceUse:
    """Marks a device as used by this process, from creation to `close`, and detects other users on the same machine.

    All users of a device hold one shared lock, and each adds a byte to the locked file when it starts. The system
    releases the lock if a process dies. Only processes of the same user with the same temporary folder see each
    other, as in one container. `OtherLoad` measures all other load on the CPU.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        path = folder / f"bild_lab-{os.getuid()}-{device_name(device)}.lock"
        with path.with_suffix(".gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)  # one process starts at a time
            self._stream = path.open("ab")
            self._was_alone = self._try_alone()
            fcntl.flock(self._stream, fcntl.LOCK_SH)
            self._stream.write(b".")
            self._stream.flush()
            self._arrivals = os.fstat(self._stream.fileno()).st_size

    def shared(self) -> bool:
        """Whether another process used the device at any time since this object was created."""
        return not self._was_alone or os.fstat(self._stream.fileno()).st_size != self._arrivals

    def close(self) -> None:
        """Release the device. Deleting the object also releases it."""
        self._stream.close()

    def _try_alone(self) -> bool:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.ftruncate(self._stream.fileno(), 0)  # no other process needs the count
        return True


def device_name(device: torch.device) -> str:
    """A name that is unique on this machine, whatever subset of devices the process sees."""
    if device.type != "cuda":
        return device.type
    return f"cuda-{torch.cuda.get_device_properties(device).uuid}"
