"""Whether a device was this process's alone while it was timed."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import torch


class DeviceUse:
    """This process's use of a device, from its making to `close`, known to other such processes of the machine.

    The processes share a lock, which the system takes from one that dies, and leave a byte each in the
    locked file when they come. Seen are processes of the same user and the same temporary folder, that is
    of the same container; other load on the CPU is told by `OtherLoad`.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        path = folder / f"bild_lab-{os.getuid()}-{device_name(device)}.lock"
        with path.with_suffix(".gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)  # one comes at a time
            self._stream = path.open("ab")
            self._was_alone = self._try_alone()
            fcntl.flock(self._stream, fcntl.LOCK_SH)
            self._stream.write(b".")
            self._stream.flush()
            self._arrivals = os.fstat(self._stream.fileno()).st_size

    def shared(self) -> bool:
        """Whether another process used the device at any time since this object was made."""
        return not self._was_alone or os.fstat(self._stream.fileno()).st_size != self._arrivals

    def close(self) -> None:
        """End the use; an object that is dropped ends it as well."""
        self._stream.close()

    def _try_alone(self) -> bool:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.ftruncate(self._stream.fileno(), 0)  # nobody is there to whom the count matters
        return True


def device_name(device: torch.device) -> str:
    """A name that is the device's own on this machine, whatever subset of devices the process sees."""
    if device.type != "cuda":
        return device.type
    return f"cuda-{torch.cuda.get_device_properties(device).uuid}"
