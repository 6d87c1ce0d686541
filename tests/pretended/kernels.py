"""Launches of Triton kernels on the pretended GPU: Triton's interpreter runs them on the held values.

The interpreter's loads and stores say which memory a kernel uses, whatever address leads there: an
argument, or a number in a table. What is not alive is refused, as `compute-sanitizer` would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, _get_np_dtype

from tests.pretended.machine import CudaFault, Extent, Machine, Memory, Operation, called_from
from tests.pretended.tensor import GpuTensor, held, require_captured_stream

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # on each axis of a grid


@contextmanager
def interpreted_kernels(machine: Machine) -> Iterator[None]:
    """Kernels that are launched with tensors of the pretended GPU run there."""
    launches = Launches(machine, InterpretedFunction.run)
    with ExitStack() as stack:
        stack.enter_context(patch.object(InterpretedFunction, "run", launches.as_method()))
        for name, watch in {
            "create_masked_load": launches.watched_load,
            "create_masked_store": launches.watched_store,
            "create_atomic_rmw": launches.watched_atomic,
        }.items():
            plain = getattr(InterpreterBuilder, name)
            stack.enter_context(patch.object(InterpreterBuilder, name, watch(plain)))
        yield


class Touched:
    """What a kernel has read and written so far: of each allocation its first byte, and the one
    behind its last.
    """

    def __init__(self, machine: Machine, kernel: str) -> None:
        self.machine, self.kernel = machine, kernel
        self.read: dict[int, Extent] = {}
        self.written: dict[int, Extent] = {}

    def touch(self, addresses: np.ndarray, mask: np.ndarray, size: int, writes: bool) -> None:
        """Note a use of numbers of `size` bytes. Raises CudaFault for one that is not there."""
        addresses, mask = np.broadcast_arrays(addresses, mask.astype(bool))
        touched = addresses[mask]
        while touched.size:
            first = int(touched.min())
            memory = self.machine.addresses.memory_at(first)
            if memory is not None:
                inside = touched < memory.end
                end = int(touched[inside].max()) + size
            if memory is None or end > memory.end:
                doing = "writes" if writes else "reads"
                raise CudaFault(
                    f"the kernel {self.kernel} {doing} where there is no memory, or none any more"
                )
            self._note(memory, first, end, writes)
            touched = touched[~inside]

    def _note(self, memory: Memory, first: int, end: int, writes: bool) -> None:
        noted = self.written if writes else self.read
        start, stop = first - memory.first, end - memory.first
        if memory.first in noted:
            _, earlier_start, earlier_stop = noted[memory.first]
            start, stop = min(start, earlier_start), max(stop, earlier_stop)
        noted[memory.first] = memory, start, stop


class Launches:
    """Runs launches for a machine. plain_run: the interpreter's own."""

    def __init__(self, machine: Machine, plain_run: Callable[..., Any]) -> None:
        self.machine, self.plain_run = machine, plain_run
        self.touched: Touched | None = None  # by the kernel that is running

    def as_method(self) -> Callable[..., Any]:
        """What takes the place of `InterpretedFunction.run`."""

        def run(
            kernel: InterpretedFunction, *arguments: Any, grid: Any, warmup: bool, **constants: Any
        ) -> Any:
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
            on_gpu = [isinstance(tensor, GpuTensor) for tensor in tensors]
            if not any(on_gpu):
                return self.plain_run(kernel, *arguments, grid=grid, warmup=warmup, **constants)
            if not all(on_gpu):
                raise CudaFault(
                    "Pointer argument cannot be accessed from Triton (cpu tensor?), at"
                    f" {called_from()[0]}"
                )
            self.machine.require_device()
            binary = binary_of(kernel, arguments, constants)
            if warmup:
                return Compiled(self.machine, binary)
            self.launch(kernel, arguments, grid, constants, binary)

        return run

    def launch(
        self,
        kernel: InterpretedFunction,
        arguments: tuple[Any, ...],
        grid: Any,
        constants: dict[str, Any],
        binary: Any,
    ) -> None:
        machine = self.machine
        require_grid(kernel, grid)
        values = [held(argument) for argument in arguments]
        run = partial(self._interpret, kernel, values, grid, constants)
        if machine.capture is None:
            machine.launched += 1
            machine.loaded.add(binary)
            run()
            return
        if binary not in machine.loaded:
            raise CudaFault(
                f"a graph is being captured, and the kernel {kernel.__name__} has not been loaded"
            )
        require_captured_stream(machine)
        tensors = [argument for argument in arguments if isinstance(argument, GpuTensor)]
        machine.capture.uses([tensor.memory for tensor in tensors])
        machine.capture.operations.append(Operation(run))

    def _interpret(
        self, kernel: InterpretedFunction, arguments: list[Any], grid: Any, constants: dict
    ) -> None:
        """Run a kernel on the held values, as the current stream's next operation."""
        touched = self.touched = Touched(self.machine, kernel.__name__)
        try:
            with _disable_current_modes():
                self.plain_run(kernel, *arguments, grid=grid, warmup=False, **constants)
        except InterpreterError as error:
            raise cause_of(error) from error
        finally:
            self.touched = None
        reads, writes = list(touched.read.values()), list(touched.written.values())
        self.machine.current.launch(reads, writes, allocates=False)

    # the interpreter's methods, which say what they touch

    def watched_load(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def load(builder: InterpreterBuilder, pointers: Any, mask: Any, *rest: Any) -> Any:
            if self.touched is not None:
                size = np.dtype(_get_np_dtype(pointers.get_element_ty())).itemsize
                self.touched.touch(pointers.data, mask.data, size, writes=False)
            return plain(builder, pointers, mask, *rest)

        return load

    def watched_store(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def store(
            builder: InterpreterBuilder, pointers: Any, value: Any, mask: Any, *rest: Any
        ) -> Any:
            if self.touched is not None:
                size = value.data.itemsize
                self.touched.touch(pointers.data, mask.data, size, writes=True)
            return plain(builder, pointers, value, mask, *rest)

        return store

    def watched_atomic(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def update(
            builder: InterpreterBuilder, kind: Any, pointer: Any, value: Any, mask: Any, *rest: Any
        ) -> Any:
            if self.touched is not None:
                size = value.data.itemsize
                self.touched.touch(pointer.data, mask.data, size, writes=True)
            return plain(builder, kind, pointer, value, mask, *rest)

        return update


def require_grid(kernel: InterpretedFunction, grid: tuple[int, ...]) -> None:
    """Raise for a grid that is longer on an axis than those of CUDA."""
    if any(size > most for size, most in zip(grid, MOST_PROGRAMS, strict=False)):
        raise CudaFault(f"a grid of {grid} programs of the kernel {kernel.__name__}")


class Compiled:
    """A kernel that was compiled; `run` loads it."""

    def __init__(self, machine: Machine, binary: Any) -> None:
        self._machine, self._binary = machine, binary

    @property
    def run(self) -> Any:
        self._machine.loaded.add(self._binary)
        return SimpleNamespace()


def binary_of(
    kernel: InterpretedFunction, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> Any:
    """What Triton compiles by: arguments of other types, or on which it specializes otherwise, have
    another binary.
    """
    general = kernel.kwargs.get("do_not_specialize") or ()
    kinds = []
    for name, argument in zip(kernel.arg_names, arguments, strict=False):
        if isinstance(argument, torch.Tensor):
            kinds.append((argument.dtype, argument.data_ptr() % 16 == 0))
        elif isinstance(argument, int) and not isinstance(argument, bool):
            wide = not -(2**31) <= argument < 2**31
            special = () if name in general else (argument == 1, argument % 16 == 0)
            kinds.append((int, wide, special))
        else:
            kinds.append(type(argument))
    return kernel.fn, tuple(kinds), tuple(sorted(constants.items()))


def cause_of(error: BaseException) -> BaseException:
    """What went wrong in a kernel, or in a function that it calls."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error
