"""Weights that are read one at a time, so that no model is whole in memory beside its packed
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from bild_lab.engine.models.checkpoint.weight_files import fetched

Item = TypeVar("Item")


class OnDemand(Sequence[Item], Generic[Item]):
    """A sequence whose items are made each time they are asked for, and held by nobody here."""

    def __init__(self, count: int, make: Callable[[int], Item]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Item:
        return self._make(range(self._count)[index])


class Weights(Mapping[str, Tensor]):
    """A model's weights by the names of its module in Transformers, in one precision and on one
    device.

    Each is read when it is asked for, and again if nobody holds it any more. keys: what to read for
    each name; tied weights share one. packed: matrices that are not read as numbers, by key, as
    their file has them.
    """

    packed: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        keys: Mapping[str, str],
        read: Callable[[str], Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._keys, self._read, self.dtype, self._device = keys, read, dtype, device
        self._held: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        # what a weight is a part of
        self._joined: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._rows: dict[str, slice] = {}  # of that

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        if (joined := self._joined.get(key)) is not None:
            return joined[self._rows[key]]
        if (weight := self._held.get(key)) is None:
            weight = self._held[key] = self._read(key).to(self._device, self.dtype)
        return weight

    def joined(self, *names: str) -> Tensor:
        """Weights one after the other.

        While somebody holds them, each is a part of these, and not read again.
        """
        parts, end = [self[name] for name in names], 0
        if len(parts) == 1:
            return parts[0]
        whole = torch.cat(parts)
        for name, part in zip(names, parts, strict=True):
            key, start, end = self._keys[name], end, end + len(part)
            self._joined[key], self._rows[key] = whole, slice(start, end)
        return whole

    def matrix(self, *names: str) -> Tensor | tuple[Any, ...]:
        """The same of matrices; where some are `packed`, each by itself, and those as they are."""
        keys = {self._keys[name]: name for name in names}
        if self.packed.keys().isdisjoint(keys):
            return self.joined(*names)
        return tuple(
            self.packed[key] if key in self.packed else self[name] for key, name in keys.items()
        )

    def table(self, name: str) -> Tensor | Any:
        """A matrix of which rows are asked for; where it is `packed`, they are read then."""
        key = self._keys[name]
        return replace(self.packed[key], dtype=self.dtype) if key in self.packed else self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def module_weights(module: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Weights:
    """Of a module in memory."""
    parameters, names_by_address = module.state_dict(), {}
    keys = {
        name: names_by_address.setdefault(weight.data_ptr(), name)
        for name, weight in parameters.items()
    }
    return Weights(keys, parameters.__getitem__, dtype, device)


@dataclass(frozen=True)
class StoredWeights:
    """Weights in files, by the names of a module of Transformers.

    read: one of them, on the CPU, given its name and the precision that is asked for; it may be in
    the file's.
    """

    shapes: Mapping[str, Sequence[int]]
    read: Callable[[str, torch.dtype], Tensor]

    @staticmethod
    def from_pretrained(location: str, **options: Any) -> StoredWeights | None:
        """A checkpoint's safetensors files, from the hub if need be; None if it has none.

        Reads no weights.
        """
        if not (paths := fetched(location, **options)):
            return None
        files: dict[str, str] = {}
        shapes: dict[str, list[int]] = {}
        for path in paths:
            with safe_open(path, framework="pt") as opened:
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
                files |= dict.fromkeys(opened.keys(), path)

        def read(name: str, _: torch.dtype) -> Tensor:
            # the file is let go with the last tensor of it
            with safe_open(files[name], framework="pt") as file:
                return file.get_tensor(name)

        return StoredWeights(shapes, read)


def file_weights(
    files: StoredWeights, module: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> Weights | None:
    """What files store for this module, which may be on the meta device.

    On the CPU and in the precision of safetensors they are views of the file: what is not touched
    takes no memory. None if names or shapes in the files are not those of the module, as in
    checkpoints that Transformers renames.
    """
    shapes, parameters = files.shapes, module.state_dict()
    keys = {name: name for name in parameters if name in shapes}
    for name, source in module.all_tied_weights_keys.items():
        if name not in keys and source in shapes:
            keys[name] = source
    if set(keys) != set(parameters) or set(shapes) != set(keys.values()):
        return None
    if any(list(shapes[key]) != list(parameters[name].shape) for name, key in keys.items()):
        return None
    return Weights(keys, lambda name: files.read(name, dtype), dtype, device)
