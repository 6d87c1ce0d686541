"""Puts the pretended GPU in the place of `torch.cuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.pretended.machine import (
    STREAMS,
    Capture,
    Clock,
    CudaFault,
    Machine,
    Memory,
    Stream,
    alive,
)
from tests.pretended.tensor import (
    DEVICE,
    WHOLE,
    GpuGenerator,
    GpuMode,
    GpuTensor,
    RealGenerator,
    moved,
    pinned,
    poison,
)

GIB = 1024**3
CUDA, META = 1, 14  # c10::DeviceType


@contextmanager
def pretended_gpu(triton: bool = False) -> Iterator[Machine]:
    """A machine with a pretended GPU: inside, `torch.cuda` is available and `cuda` tensors hold CPU
    memory. triton: it runs Triton's kernels, too.

    `torch.compile` gives the function itself. Programs are compiled in the tests of a CPU; what is
    shown here is that they can be captured.
    """
    machine = Machine()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    with ExitStack() as stack:
        stack.enter_context(device_guard())
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        for name, value in cuda_functions(machine).items():
            stack.enter_context(
                patch.object(torch.cuda, name, value, create=not hasattr(torch.cuda, name))
            )
        stack.enter_context(
            patch.object(torch._C, "_cuda_clearCublasWorkspaces", machine.cublas.clear, create=True)
        )
        stack.enter_context(patch.object(torch, "Generator", Generators))
        stack.enter_context(patch.object(torch, "compile", uncompiled))
        stack.enter_context(
            patch.object(
                torch.Tensor, "pin_memory", lambda tensor, device=None: pinned(None, tensor)
            )
        )
        stack.enter_context(
            patch.object(
                torch.Tensor,
                "is_pinned",
                lambda tensor, device=None: getattr(tensor, "pinned", False),
            )
        )
        stack.enter_context(patch.object(torch.Tensor, "to", moving(torch.Tensor.to)))
        stack.enter_context(
            patch.object(torch.Tensor, "cpu", lambda tensor, **options: tensor.to("cpu"))
        )
        stack.enter_context(
            patch.object(torch.Tensor, "cuda", lambda tensor, **options: tensor.to(DEVICE))
        )
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch.object(torch, name, made_on_host(getattr(torch, name))))
        for name in ("zeros", "empty"):
            stack.enter_context(patch.object(torch, name, made_pinned(getattr(torch, name))))
        for name in ("tolist", "numpy"):
            stack.enter_context(
                patch.object(torch.Tensor, name, reading(machine, getattr(torch.Tensor, name)))
            )
        if triton:
            from tests.pretended.kernels import interpreted_kernels  # Triton is not everywhere

            stack.enter_context(interpreted_kernels(machine))
        stack.enter_context(GpuMode(machine))
        yield machine


@contextmanager
def device_guard() -> Iterator[None]:
    """Let torch's own indexing and methods run: in a build without CUDA they look for a guard that
    sets the device.

    The guard of the meta device, which does nothing, stands in for it.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )
    before, guards[CUDA] = guards[CUDA], guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before


def reading(machine: Machine, read: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads the host's memory without an operation that could be seen."""

    def checked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if machine.copies:
            machine.require_copied(tensor)
        return read(tensor, *args, **kwargs)

    return checked


def moving(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to`, without a driver where the device has to do with it."""

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = [*args, *kwargs.values()]
        if isinstance(tensor, GpuTensor) or any(on_gpu(each) for each in named):
            return moved(tensor, *args, **kwargs)
        return plain(tensor, *args, **kwargs)

    return to


def on_gpu(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, GpuTensor) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


def made_on_host(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor` and `torch.as_tensor`: values are laid out on the host, and copied."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, GpuTensor):
            return data.to(*args, **kwargs) if device is None else data.to(device=device, **kwargs)
        if isinstance(data, list | tuple):  # each number that is on the device is read
            data = [value.item() if isinstance(value, GpuTensor) else value for value in data]
        if device is None or not on_gpu(device):
            return plain(data, *args, device=device, **kwargs)
        return plain(data, *args, device="cpu", **kwargs).to(device)

    return made


def made_pinned(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes a tensor, in pinned memory if asked to."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = plain(*args, **kwargs)
        return pinned(None, tensor) if pin_memory else tensor

    return made


def uncompiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return function


class Generators(RealGenerator):
    """Generators of the host, or of the pretended GPU."""

    def __new__(cls, device: torch.device | str = "cpu") -> torch.Generator:
        return GpuGenerator() if torch.device(device).type == "cuda" else RealGenerator()


class GpuStream:
    """A stream, as `torch.cuda.Stream`."""

    def __init__(self, machine: Machine, queue: Stream | None = None) -> None:
        self.machine, self.queue, self.device = (
            machine,
            Stream(machine) if queue is None else queue,
            DEVICE,
        )

    def wait_event(self, event: GpuEvent) -> None:
        self.queue.learn(event.clock)

    def wait_stream(self, other: GpuStream) -> None:
        self.queue.learn(other.queue.clock)

    def record_event(self, event: GpuEvent | None = None) -> GpuEvent:
        event = GpuEvent(self.machine) if event is None else event
        event.record(self)
        return event


class GpuEvent:
    """An event, as `torch.cuda.Event`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock: Clock = {}

    def record(self, stream: GpuStream | None = None) -> None:
        self.clock = (self.machine.current if stream is None else stream.queue).clock

    def synchronize(self) -> None:
        self.machine.wait_unless_known("Event.synchronize", self.clock)


class Pool(Memory):
    """Memory that graphs share. It lives as long as one of them: `graph_pool_handle` gives a name
    alone.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.default, torch.UntypedStorage(1))
        self._graphs: WeakSet[GpuGraph] | None = None

    def enter(self, graph: GpuGraph) -> None:
        """A graph is captured into this memory."""
        if self._graphs is None:
            self._graphs = WeakSet()
        elif not self._graphs:
            raise CudaFault("a graph is captured into a pool whose graphs are all gone")
        self._graphs.add(graph)


class GpuGraph:
    """A graph, as `torch.cuda.CUDAGraph`: replays what was captured over the same memory."""

    def __init__(self, machine: Machine, keep_graph: bool = False) -> None:
        self.machine = machine
        self.captured: Capture | None = None
        self.generators: list[int] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator._cdata)

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        machine = self.machine
        if pool is not None:
            pool.enter(self)
        if machine.capture is not None:
            raise CudaFault("a graph is captured inside the capture of another")
        if machine.current is machine.default:
            raise CudaFault("a graph is captured on the default stream")
        if self.captured is not None:
            raise CudaFault("a graph is captured a second time")
        generators = tuple(self.generators)
        machine.capture = Capture(machine.current, generators=generators, pool=pool)
        machine.capture_error_modes.add(capture_error_mode)

    def capture_end(self) -> None:
        machine, captured = self.machine, self.machine.capture
        if captured is None:
            raise CudaFault("a capture ends that has not begun")
        machine.capture = None
        with _disable_current_modes():
            for now, then in captured.before.values():
                now.copy_(then)
            for values in captured.born:
                poison(values)
        self.captured = captured

    def __del__(self) -> None:
        if self.captured is not None:
            self.machine.cublas.pop(self.captured.stream.id % STREAMS, None)

    def replay(self) -> None:
        machine, captured = self.machine, self.captured
        if captured is None:
            raise CudaFault("a graph is replayed before it was captured")
        if any(memory() is None for memory in captured.outside.values()):
            raise CudaFault(
                "a graph is replayed over memory that has been freed since: a tensor was replaced"
                " or grew"
            )
        machine.launched += 1
        if captured.pool is not None and captured.inside:
            machine.current.launch([], [(captured.pool, 0, WHOLE)], allocates=False)
        with _disable_current_modes():
            for operation in captured.operations:
                reads, writes = alive(operation.reads), alive(operation.writes)
                machine.current.launch(reads, writes, allocates=False)
                operation.run()


def index_of(device: Any) -> int:
    """The number of a device, or of the only one that there is."""
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def cuda_functions(machine: Machine) -> dict[str, Any]:
    """What `torch.cuda` is replaced by."""
    default = GpuStream(machine, machine.default)
    active = [default]

    @contextmanager
    def stream(chosen: GpuStream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        before = machine.current
        active.append(chosen)
        machine.current = chosen.queue
        try:
            yield
        finally:
            active.pop()
            machine.current = before

    @contextmanager
    def graph(
        captured: GpuGraph, pool: Any = None, stream: GpuStream | None = None, **options: Any
    ) -> Iterator[None]:
        machine.require_device()
        machine.wait_for_all("the begin of a capture")
        queue = Stream(machine) if stream is None else stream.queue
        before, machine.current = machine.current, queue
        captured.capture_begin(pool, **options)
        try:
            yield
        finally:
            machine.current = before
            captured.capture_end()

    @contextmanager
    def device(chosen: Any) -> Iterator[None]:
        before, machine.current_device = machine.current_device, index_of(chosen)
        try:
            yield
        finally:
            machine.current_device = before

    def set_device(chosen: Any) -> None:
        machine.current_device = index_of(chosen)

    def made_stream(device: Any = None, priority: int = 0) -> GpuStream:
        machine.require_device(device)
        return GpuStream(machine)

    def current_stream(device: Any = None) -> GpuStream:
        machine.require_device(device)
        return active[-1]

    def synchronize(device: Any = None) -> None:
        machine.wait_for_all("torch.cuda.synchronize")

    properties = SimpleNamespace(
        name="Pretended GPU",
        total_memory=16 * GIB,
        major=8,
        minor=0,
        multi_processor_count=1,
        L2_cache_size=2**20,
        uuid="none",
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: machine.current_device,
        "set_device": set_device,
        "device": device,
        "synchronize": synchronize,
        "Stream": made_stream,
        "Event": lambda enable_timing=False, blocking=False, interprocess=False: GpuEvent(machine),
        "graph_pool_handle": lambda: Pool(machine),
        "CUDAGraph": lambda keep_graph=False: GpuGraph(machine, keep_graph),
        "graph": graph,
        "stream": stream,
        "current_stream": current_stream,
        "is_current_stream_capturing": lambda: machine.capture is not None,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (8, 0),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "mem_get_info": lambda device=None: (15 * GIB, 16 * GIB),
        "max_memory_allocated": lambda device=None: 2**20,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {},
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }


__all__ = ["GpuTensor", "pretended_gpu"]
