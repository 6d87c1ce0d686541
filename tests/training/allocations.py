"""Counts the bytes of tensors where no GPU counts them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make inside the block, by device.

    Each storage counts once, from the operation that made it until it is freed. Views take nothing.
    Tensors on the device `meta` count as if they were real.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[torch.device] = Counter()
        self.peak: Counter[torch.device] = Counter()
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = operation(*args, **kwargs)
        read = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in read and storage._cdata not in self._counted:
                self._count(storage, tensor.device)
        return result

    def _count(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._counted.add(key)
        self.live[device] += size
        self.peak[device] = max(self.peak[device], self.live[device])
        weakref.finalize(storage, self._forget, key, size, device)

    def _forget(self, key: int, size: int, device: torch.device) -> None:
        self._counted.discard(key)
        self.live[device] -= size


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def peak_bytes(run: Callable[[], None], devices: Sequence[torch.device]) -> dict[torch.device, int]:
    """What `bild_lab.training.memory.peak_bytes` finds on a GPU."""
    with Allocations() as allocations:
        run()
    return {place: allocations.peak[place] for place in devices}
