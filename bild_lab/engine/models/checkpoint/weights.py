"""Weights that are read one at a time, so that no model is whole in memory beside its packed
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from bild_lab.engine.models.checkpoint.weight_files import fetched
from bild_lab.errors import UserError

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
        self._keys = keys
        self._read = read
        self.dtype = dtype
        self._device = device
        self._loaded: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        # for each key the matrix that the weight is a part of, and its rows there
        self._joined: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._rows: dict[str, slice] = {}

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        joined = self._joined.get(key)
        if joined is not None:
            return joined[self._rows[key]]
        weight = self._loaded.get(key)
        if weight is None:
            weight = self._read(key).to(self._device, self.dtype)
            self._loaded[key] = weight
        return weight

    def joined(self, *names: str) -> Tensor:
        """Weights one after the other in one tensor.

        While somebody holds it, each weight is a view of its rows, and not read again.
        """
        weights = [self[name] for name in names]
        if len(weights) == 1:
            return weights[0]
        joined = torch.cat(weights)
        start = 0
        for name, weight in zip(names, weights, strict=True):
            key = self._keys[name]
            stop = start + len(weight)
            self._joined[key] = joined
            self._rows[key] = slice(start, stop)
            start = stop
        return joined

    def matrix(self, *names: str) -> Tensor | tuple[Any, ...]:
        """Matrices one after the other in one tensor; where some are `packed`, a tuple of all, and
        the packed ones as they are.
        """
        names_by_key = {self._keys[name]: name for name in names}
        if self.packed.keys().isdisjoint(names_by_key):
            return self.joined(*names)
        return tuple(
            self.packed[key] if key in self.packed else self[name]
            for key, name in names_by_key.items()
        )

    def table(self, name: str) -> Tensor | Any:
        """A matrix of which rows are asked for; where it is `packed`, they are read then, on a CPU."""
        key = self._keys[name]
        if key in self.packed and self._device.type == "cpu":
            return replace(self.packed[key], dtype=self.dtype)
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def module_weights(module: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Weights:
    """The weights of a module in memory. Names of one tensor share a key."""
    parameters = module.state_dict()
    names_by_address: dict[int, str] = {}
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

        Reads no weights but those that two files store. Raises UserError where these differ:
        Transformers takes the last, whatever the index says.
        """
        if not (paths := fetched(location, **options)):
            return None
        files: dict[str, str] = {}
        shapes: dict[str, list[int]] = {}
        for path in paths:
            with safe_open(path, framework="pt") as opened:
                for name in files.keys() & opened.keys():
                    _require_equal(name, files[name], path)
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
                files |= dict.fromkeys(opened.keys(), path)

        def read(name: str, _: torch.dtype) -> Tensor:
            # the file is let go with the last tensor of it
            with safe_open(files[name], framework="pt") as file:
                return file.get_tensor(name)

        return StoredWeights(shapes, read)


def _require_equal(name: str, *paths: str) -> None:
    """Raise UserError unless two files store the same tensor under a name."""
    tensors = []
    for path in paths:
        with safe_open(path, framework="pt") as file:
            tensors.append(file.get_tensor(name))
    kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
    # in bytes, as some types cannot be compared, and NaN equals nothing
    stored_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    if kinds[0] != kinds[1] or not torch.equal(*stored_bytes):
        first, second = (Path(path).name for path in paths)
        raise UserError(
            f"{first} and {second} in {Path(paths[0]).parent} both store {name}, with different"
            " values; remove the one that the index of the shards does not name"
        )


def file_weights(
    files: StoredWeights, module: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> Weights | None:
    """What files store for this module, which may be on the meta device.

    On the CPU and in the precision of safetensors they are views of the file: what is not touched
    takes no memory. None if names or shapes in the files are not those of the module, as in
    checkpoints that Transformers renames.
    """
    shapes = files.shapes
    parameters = module.state_dict()
    # 1. what to read for each name of the module
    keys = {name: name for name in parameters if name in shapes}
    for name, source in module.all_tied_weights_keys.items():
        if name not in keys and source in shapes:
            keys[name] = source
    # 2. whether the files hold this module, and nothing else
    if set(keys) != set(parameters) or set(shapes) != set(keys.values()):
        return None
    for name, key in keys.items():
        if list(shapes[key]) != list(parameters[name].shape):
            return None
    return Weights(keys, lambda name: files.read(name, dtype), dtype, device)
