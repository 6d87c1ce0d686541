"""Tensors of the pretended GPU: torch sees CUDA tensors, whose operations come here and run on the
CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretended.machine import (
    Copy,
    CudaFault,
    Extent,
    Machine,
    Memory,
    Operation,
    as_captured,
    called_from,
    same_memory,
)

DEVICE = torch.device("cuda", 0)
RealGenerator = torch.Generator
aten = torch.ops.aten

# operations made of others that read: torch takes them apart, and the parts come here
APART = {"item", "is_nonzero", "argwhere", "nonzero_numpy", "one_hot", "allclose"}
ALWAYS_WAIT = {  # their output's shape, or their answer, is on the device
    "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc",
}  # fmt: skip
WAITING_FORMS = {
    aten.where.default,
    aten.repeat_interleave.Tensor,
    aten.repeat_interleave.self_Tensor,
}
GROWS = {"resize_", "set_", "resize_as_"}
HOST_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
SCALAR_HOST = {
    "fill_",
    "index_put_",
    "index_put",
    "where",
    "masked_fill",
    "masked_fill_",
    "lerp",
    "copy_",
    "full_like",
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"}  # by cuBLAS
POISON_WHOLE = -(2**30)
WHOLE = 2**62


class GpuTensor(torch.Tensor):
    """A tensor on the pretended GPU. held: its values. memory: the allocation they lie in."""

    held: torch.Tensor
    memory: Memory
    machine: Machine
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor, memory: Memory, machine: Machine) -> GpuTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=DEVICE, requires_grad=False,
        )  # fmt: skip

    def __init__(self, held: torch.Tensor, memory: Memory, machine: Machine) -> None:
        self.held, self.memory, self.machine = held, memory, machine

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        machine = next(
            each.machine for each in leaves_of(args, kwargs or {}) if isinstance(each, GpuTensor)
        )
        return dispatch(machine, func, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:
        self.read_by_host("print")
        return f"GpuTensor({self.held})"

    def tolist(self) -> Any:
        if self.numel():
            self.read_by_host("tolist")
        return self.held.tolist()

    def read_by_host(self, what: str) -> None:
        """The host waits for the current stream, which reads the values behind its other work."""
        self.machine.current.launch([self.extent], [], allocates=False)
        self.machine.wait(what)

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        raise CudaFault("only host memory can be pinned")

    @property
    def extent(self) -> Extent:
        """The bytes from its first to its last element."""
        if not self.held.numel():
            return self.memory, 0, 0
        size, first = self.held.element_size(), self.held.storage_offset()
        last = first + sum(
            (count - 1) * step
            for count, step in zip(self.held.size(), self.held.stride(), strict=True)
        )
        return self.memory, first * size, (last + 1) * size

    def new_tensor(self, data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return torch.tensor(
            data, dtype=dtype or self.dtype, device=DEVICE if device is None else device
        )

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        copied = self.detach().clone()
        return (
            torch.nn.Parameter(copied, self.requires_grad)
            if isinstance(self, torch.nn.Parameter)
            else copied
        )


class GpuMode(TorchDispatchMode):
    """Sends every operation to the machine, those that make tensors too."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around every operation, for programs that are never compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in ("to", "type_as", "cpu", "cuda") and involved(args, kwargs):
            with self:
                return moved(*args, **kwargs)
        if apart(func) and involved(args, kwargs):
            with self:
                return func.decompose(*args, **kwargs)
        return dispatch(self.machine, func, args, kwargs)


def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to`. torch's own asks a driver which device is meant."""
    kwargs = dict(kwargs)
    copies, layout = kwargs.pop("copy", False), kwargs.pop("layout", None)
    kwargs.pop("pin_memory", None)
    other = kwargs.pop("other", args[0] if args and isinstance(args[0], torch.Tensor) else None)
    if other is not None:
        device, dtype, non_blocking, form = (
            other.device,
            other.dtype,
            kwargs.get("non_blocking", False),
            None,
        )
    else:
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
    device = tensor.device if device is None else torch.device(device)
    dtype = tensor.dtype if dtype is None else dtype
    if device.type == tensor.device.type and dtype == tensor.dtype and not copies and form is None:
        return tensor
    options = {
        "dtype": dtype,
        "device": DEVICE if device.type == "cuda" else device,
        "non_blocking": non_blocking,
    }
    return torch.ops.aten._to_copy.default(tensor, layout=layout, memory_format=form, **options)


def apart(func: Any) -> bool:
    return name_of(func) in APART and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


def involved(args: Any, kwargs: Any) -> bool:
    leaves = leaves_of(args, kwargs)
    return any(
        isinstance(each, GpuTensor) or (isinstance(each, torch.device) and each.type == "cuda")
        for each in leaves
    )


def leaves_of(args: Any, kwargs: Any) -> list[Any]:
    """All arguments of an operation; those in a list too."""
    leaves = []
    for each in (*args, *kwargs.values()):
        leaves += each if isinstance(each, list | tuple) else [each]
    return leaves


@cache
def name_of(func: Any) -> str:
    return func._schema.name.split("::")[1]


def dispatch(machine: Machine, func: Any, args: Any, kwargs: Any) -> Any:
    """One operation: check it as CUDA would, run it on the held values, and keep account of it."""
    name, leaves = name_of(func), leaves_of(args, kwargs)
    gpu = [each for each in leaves if isinstance(each, GpuTensor)]
    host = [
        each
        for each in leaves
        if isinstance(each, torch.Tensor) and not isinstance(each, GpuTensor)
    ]
    device = kwargs.get("device")
    if name == "_pin_memory":
        return pinned(func, args[0])
    if not gpu and (device is None or device.type != "cuda"):
        return on_host(machine, func, name, args, kwargs, host)
    if name in ("_to_copy", "copy_"):
        return copied(machine, func, name, args, kwargs)
    if name == "_has_compatible_shallow_copy_type":
        return False  # so modules get new parameters
    if name == "_local_scalar_dense":
        gpu[0].read_by_host("item")
        return func(gpu[0].held)
    if name in GROWS:
        raise CudaFault(f"{name} moves memory, whose address a graph or a view may hold")
    if device is not None and device.type == "cpu":
        raise CudaFault(f"{name} of a device tensor on the host")
    require_one_device(machine, func, name, gpu, host, args)
    require_generator(machine, leaves)
    masks = name in HOST_INDEX and any(each.dtype == torch.bool for each in indices(args))
    # which needs no count of the mask
    fills = name.startswith("index_put") and args[2].numel() == 1
    if name in ALWAYS_WAIT or func in WAITING_FORMS or (masks and not fills):
        machine.wait(name)
    return launched(machine, func, args, kwargs, gpu)


def on_host(
    machine: Machine, func: Any, name: str, args: Any, kwargs: Any, host: list[torch.Tensor]
) -> Any:
    """An operation of the host alone."""
    for each in host if machine.copies else ():
        machine.require_copied(each)
    if any(isinstance(each, RealGenerator) and of_gpu(each) for each in kwargs.values()):
        raise CudaFault(f"{name} on the host with a generator of the device")
    out = func(*args, **kwargs)
    for each in host:
        if getattr(each, "pinned", False) and isinstance(out, torch.Tensor):
            out.pinned = getattr(out, "pinned", False) or same_memory(each, out)
    return out


def require_one_device(
    machine: Machine, func: Any, name: str, gpu: list[Any], host: list[torch.Tensor], args: Any
) -> None:
    for each in host:
        if name in HOST_INDEX and any(each is index for index in indices(args)):
            machine.wait(f"{name} with an index on the host")
        elif each.dim() or not (torch.Tag.pointwise in func.tags or name in SCALAR_HOST):
            raise CudaFault(
                f"Expected all tensors to be on the same device, but {name} got one on cuda:0 and"
                f" one on the cpu, at {called_from()[0]}"
            )


def require_generator(machine: Machine, leaves: list[Any]) -> None:
    for each in leaves:
        if isinstance(each, RealGenerator):
            if not of_gpu(each):
                raise CudaFault("Expected a 'cuda' device type for generator but found 'cpu'")
            if machine.capture is not None and each._cdata not in machine.capture.generators:
                raise CudaFault(
                    "a graph is being captured, and draws from a generator that is not registered"
                    " with it"
                )


def indices(args: Any) -> list[torch.Tensor]:
    return [each for each in args[1] if isinstance(each, torch.Tensor)]


def launched(machine: Machine, func: Any, args: Any, kwargs: Any, gpu: list[GpuTensor]) -> Any:
    """Run it on the held values; outputs that share memory with an input are views of it."""
    held_args, held_kwargs = (
        [held(each) for each in args],
        {key: held(each) for key, each in kwargs.items()},
    )
    changed = mutated(func, args, kwargs)
    record_before(machine, changed)
    out = func(*held_args, **held_kwargs)
    return accounted(machine, func, held_args, held_kwargs, gpu, changed, out)


def accounted(
    machine: Machine,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    gpu: list[Any],
    changed: list[Any],
    out: Any,
) -> Any:
    fresh: list[Memory] = []
    computed = bool(changed)

    def wrapped(value: Any) -> Any:
        nonlocal computed
        if not isinstance(value, torch.Tensor):
            return value
        for each in gpu:
            if each.held is value:
                return each
        for each in gpu:
            if same_memory(each.held, value):
                with torch.inference_mode(each.is_inference()):  # a view is what its base is
                    return GpuTensor(value, each.memory, machine)
        computed = True
        fresh.append(Memory(machine.current, value.untyped_storage()))
        if machine.capture is not None:
            machine.capture.inside[id(fresh[-1])] = fresh[-1]
            machine.capture.born.append(value)
        return GpuTensor(value, fresh[-1], machine)

    result = [wrapped(each) for each in out] if isinstance(out, list | tuple) else wrapped(out)
    if isinstance(out, tuple):
        result = tuple(result)
    if computed:
        machine.launched += 1
        reads = [each.extent for each in gpu]
        scratch = [machine.cublas_memory()] if name_of(func) in PRODUCTS else []
        writes = [each.extent for each in changed]
        writes += [(memory, 0, WHOLE) for memory in (*fresh, *scratch)]
        machine.current.launch(reads, writes, bool(fresh))
        if machine.capture is not None:
            require_captured_stream(machine)
            machine.capture.uses([each.memory for each in gpu] + scratch)
            again = partial(run_again, func, args, kwargs, out)
            machine.capture.operations.append(
                Operation(again, as_captured(reads), as_captured(writes))
            )
    return result


def require_captured_stream(machine: Machine) -> None:
    if machine.current is not machine.capture.stream:
        raise CudaFault("a graph is being captured on another stream than the current one")


def run_again(func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
    """Run an operation on the held values; what it gave the first time holds its results."""
    pairs = zip(tensors_of(out), tensors_of(func(*args, **kwargs)), strict=True)
    for first, new in pairs:
        if first is not new and not same_memory(first, new):
            first.copy_(new)


def tensors_of(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


@cache
def arguments_of(func: Any) -> list[tuple[int, str, bool]]:
    """Place, name, and whether it is written to, of each argument."""
    arguments = enumerate(func._schema.arguments)
    return [
        (place, each.name, each.alias_info is not None and each.alias_info.is_write)
        for place, each in arguments
    ]


def mutated(func: Any, args: Any, kwargs: Any) -> list[GpuTensor]:
    """The tensors that an operation writes to."""
    found = []
    for place, name, written in arguments_of(func):
        if written:
            value = (
                kwargs.get(name) if name in kwargs else args[place] if place < len(args) else None
            )
            found += [
                each
                for each in (value if isinstance(value, list) else [value])
                if isinstance(each, GpuTensor)
            ]
    return found


def record_before(machine: Machine, changed: list[GpuTensor]) -> None:
    """A capture runs nothing: what it writes outside is put back at its end."""
    if machine.capture is None:
        return
    for each in changed:
        if id(each.memory) not in machine.capture.inside | machine.capture.before:
            whole = torch.empty(0, dtype=each.dtype).set_(each.held.untyped_storage())
            machine.capture.before[id(each.memory)] = whole, whole.clone()


def copied(machine: Machine, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Copies between host and device, and within the device."""
    if name == "copy_":
        to, source, blocks = (
            args[0],
            args[1],
            not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)),
        )
        there = isinstance(to, GpuTensor)
    else:
        source, to, blocks = args[0], None, not kwargs.get("non_blocking", False)
        device = kwargs.get("device")
        there = device.type == "cuda" if device is not None else True
    here = isinstance(source, GpuTensor)
    if here and there:
        plain = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        return launched(
            machine, func, args, plain, [each for each in (to, source) if each is not None]
        )
    if there:
        return to_device(machine, func, to, source, kwargs, blocks)
    return to_host(machine, func, to, source, kwargs, blocks)


def to_device(
    machine: Machine,
    func: Any,
    to: GpuTensor | None,
    source: torch.Tensor,
    kwargs: Any,
    blocks: bool,
) -> Any:
    machine.require_copied(source)
    is_pinned = getattr(source, "pinned", False)
    # CUDA copies nothing, and waits for nothing, without elements
    if source.numel() and (blocks or not is_pinned):
        machine.wait(
            "copy to the device" if is_pinned else "copy of memory that is not pinned to the device"
        )
    plain = {
        key: value
        for key, value in kwargs.items()
        if key not in ("device", "pin_memory", "non_blocking")
    }
    if to is None:
        if machine.capture is not None:
            raise CudaFault("a graph is being captured, and a new tensor is copied to the device")
        result = accounted(machine, func, (source,), plain, [], [], func(source, **plain).clone())
    else:
        record_before(machine, [to])
        to.held.copy_(source)
        result = accounted(machine, aten.copy_.default, (to.held, source), {}, [to], [to], to.held)
    if is_pinned and not blocks:
        stream = machine.current
        machine.copies.append(Copy(source, source.clone(), stream.id, stream.time, to_host=False))
    return result


def to_host(
    machine: Machine,
    func: Any,
    to: torch.Tensor | None,
    source: GpuTensor,
    kwargs: Any,
    blocks: bool,
) -> torch.Tensor:
    machine.current.launch([source.extent], [], allocates=False)
    plain = {
        key: value
        for key, value in kwargs.items()
        if key not in ("device", "pin_memory", "non_blocking")
    }
    values = source.held.clone() if to is not None else func(source.held, **plain).clone()
    target = torch.empty_like(values) if to is None else to
    if not source.numel():
        return target
    if blocks or (to is not None and not getattr(to, "pinned", False)):
        machine.wait("copy to the host")
        return target.copy_(values)
    if machine.capture is not None:
        raise CudaFault("a graph is being captured, and values are copied to the host")
    poison(target)
    target.pinned = True
    machine.copies.append(
        Copy(target, values, machine.current.id, machine.current.time, to_host=True)
    )
    return target


def pinned(func: Any, source: torch.Tensor) -> torch.Tensor:
    if isinstance(source, GpuTensor):
        raise CudaFault("only host memory can be pinned")
    copy = source.clone()
    copy.pinned = True
    return copy


def poison(tensor: torch.Tensor) -> None:
    """Values that no program means."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(max(POISON_WHOLE, torch.iinfo(tensor.dtype).min))


def held(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [held(each) for each in value]
    if isinstance(value, GpuTensor):
        return value.held
    return (
        torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value
    )


class GpuGenerator(RealGenerator):
    """A generator of the pretended GPU. made: all there are, by the address of torch's own object,
    which is all that an operation is given."""

    made: weakref.WeakValueDictionary[int, GpuGenerator] = weakref.WeakValueDictionary()

    def __init__(self, device: Any = None) -> None:
        self.made[self._cdata] = self

    @property
    def device(self) -> torch.device:
        return DEVICE


def of_gpu(generator: torch.Generator) -> bool:
    return generator._cdata in GpuGenerator.made
