"""A pretended node: several GPUs of one size, whose memory is counted by the tensors on them.

Tensors have shapes and no values (`FakeTensorMode`), so that models of real size fit into the CPU's
memory. One that exceeds its GPU fails as on CUDA. A forward pass holds what its backward pass would
read; the backward pass itself needs a build of torch with CUDA.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretended.gpu import device_guard, index_of


class Node:
    """What is held on each GPU, and the most that was, in bytes."""

    def __init__(self, gpus: int, size: int) -> None:
        self.gpus, self.size = gpus, size
        self.held, self.peak = [0] * gpus, [0] * gpus

    def allocate(self, gpu: int, count: int) -> None:
        """Raises OutOfMemoryError where there is no room."""
        if self.held[gpu] + count > self.size:
            free = self.size - self.held[gpu]
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {count} bytes, GPU {gpu} has {free} free"
            )
        self.held[gpu] += count
        self.peak[gpu] = max(self.peak[gpu], self.held[gpu])

    def free(self, gpu: int, count: int) -> None:
        self.held[gpu] -= count

    @contextmanager
    def tensors(self) -> Iterator[None]:
        """Inside, tensors on `cuda:N` have no values, and their memory is counted."""
        # a PyTorch for CUDA would ask a driver, but these GPUs are pretended
        without_driver = patch("torch._subclasses.fake_tensor.init_gpu_context")
        with device_guard(), without_driver, FakeTensorMode(), CountingAllocator(self):
            yield


class CountingAllocator(TorchDispatchMode):
    """Counts each allocation once, with whatever views there are of it, until the last has gone."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            if storage in self.counted:
                continue
            gpu, count = tensor.device.index or 0, storage.nbytes()
            self.node.allocate(gpu, count)
            self.counted.add(storage)
            weakref.finalize(storage, self.node.free, gpu, count)
        return made


@contextmanager
def pretended_node(
    gpus: int = 8, gigabytes: float = 80, name: str = "NVIDIA A100-SXM4-80GB"
) -> Iterator[Node]:
    """Inside, `torch.cuda` says that so many GPUs of this name and size are there."""
    node = Node(gpus, int(gigabytes * 1e9))
    properties = SimpleNamespace(name=name, total_memory=node.size, major=8, minor=0)

    def memory(device: Any = None) -> tuple[int, int]:
        return node.size - node.held[index_of(0 if device is None else device)], node.size

    functions = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (8, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": memory,
        "memory_allocated": lambda device=None: node.held[index_of(device or 0)],
        "max_memory_allocated": lambda device=None: node.peak[index_of(device or 0)],
    }
    with ExitStack() as stack:
        for key, function in functions.items():
            stack.enter_context(patch.object(torch.cuda, key, function))
        yield node
