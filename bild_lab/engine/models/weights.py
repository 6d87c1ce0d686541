"""Weights that are read one at a time, so that no model is whole in memory beside its packed copy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

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
    """A model's weights by the names of its module in Transformers, in one precision and on one device.

    Each is read when it is asked for, and again if nobody holds it any more. keys: what to read for each name; tied
    weights share one.
    """

    def __init__(
        self, keys: Mapping[str, str], read: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._keys, self._read, self.dtype, self._device = keys, read, dtype, device
        self._held: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._joined: WeakValueDictionary[str, Tensor] = WeakValueDictionary()  # what a weight is a part of
        self._rows: dict[str, slice] = {}  # of that

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        if (whole := self._joined.get(key)) is not None:
            return whole[self._rows[key]]
        if (weight := self._held.get(key)) is None:
            weight = self._held[key] = self._read(key).to(self._device, self.dtype)
        return weight

    def joined(self, *names: str) -> Tensor:
        """Weights one after the other. While somebody holds them, each is a part of these, and not read again."""
        parts, end = [self[name] for name in names], 0
        if len(parts) == 1:
            return parts[0]
        whole = torch.cat(parts)
        for name, part in zip(names, parts, strict=True):
            key, start, end = self._keys[name], end, end + len(part)
            self._joined[key], self._rows[key] = whole, slice(start, end)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def module_weights(module: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Weights:
    """Of a module in memory."""
    state, first = module.state_dict(), {}
    keys = {name: first.setdefault(weight.data_ptr(), name) for name, weight in state.items()}
    return Weights(keys, state.__getitem__, dtype, device)


def file_weights(folder: Path, module: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Weights | None:
    """What a folder stores for this module, which may be on the meta device.

    On the CPU and in the precision of the file they are views of the file: what is not touched takes no memory. None if
    names or shapes in the files are not those of the module, as in checkpoints that Transformers renames.
    """
    files, wanted = stored_files(folder), module.state_dict()
    keys = {name: name for name in wanted if name in files}
    for name, source in module.all_tied_weights_keys.items():
        if name not in keys and source in files:
            keys[name] = source
    if set(keys) != set(wanted) or set(files) != set(keys.values()):
        return None
    shapes: dict[str, list[int]] = {}
    for file in set(files.values()):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    if any(shapes[key] != list(wanted[name].shape) for name, key in keys.items()):
        return None

    def read(name: str) -> Tensor:
        with safe_open(files[name], framework="pt") as file:  # the file is let go with the last tensor of it
            return file.get_tensor(name)

    return Weights(keys, read, dtype, device)


def stored_files(folder: Path) -> dict[str, Path]:
    """The safetensors file of each weight in a folder, in Transformers' layout; none if it has no such files."""
    if (index := folder / INDEX).is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not (file := folder / ONE_FILE).is_file():
        return {}
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)


class WeightFiles:
    """Reads no weights: only makes sure that their files are there."""

    @staticmethod
    def from_pretrained(location: str, **options: Any) -> Path | None:
        """The folder of a checkpoint's safetensors files, from the hub if need be; None if it has none."""
        options["_raise_exceptions_for_missing_entries"] = False
        if (index := cached_file(location, INDEX, **options)) is not None:
            files, _ = get_checkpoint_shard_files(location, index, **options)
            return Path(files[0]).parent
        file = cached_file(location, ONE_FILE, **options)
        return None if file is None else Path(file).parent
