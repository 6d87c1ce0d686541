"""Triton kernels on the pretended GPU: what a launch uses is known, and the decoder by our kernels
keeps its promises about streams, graphs and copies; mistakes that the interpreter alone forgives are
caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from bild_lab.engine.methods.ppd.pipeline import PredictivePipeline
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.models.native.packed_pass import SequenceSlice
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import ChainSpec, TreeSpec
from bild_lab.engine.trace import Trace
from tests.engine.loops import NEVER
from tests.engine.lossless.random_models import random_target
from tests.policies import in_memory
from tests.pretended import CudaFault, Machine, pretended_gpu
from tests.pretended.machine import by_line
from tests.pretended.tensor import DEVICE
from tests.tiny import START
from tests.triton_interpreter import interpreter, needs_triton, triton_model  # noqa: F401
from tests.triton_races import MemoryWatch

if TYPE_CHECKING:
    from bild_lab.engine.models.native.gpu import TritonDecoder
    from bild_lab.engine.models.native.gpu.inputs import PassInputs
    from bild_lab.engine.models.native.gpu.plan import PassShape

pytestmark = [
    needs_triton,
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="Triton compiles for the GPU that is here"
    ),
]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with pretended_gpu(triton=True) as machine, torch.inference_mode():
        yield machine


@pytest.fixture
def kernels() -> ModuleType:
    from tests.pretended import tiny_kernels  # Triton is not everywhere

    return tiny_kernels


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def address_of(tensor: Tensor) -> Tensor:
    return torch.tensor([tensor.data_ptr()], device=DEVICE)


@contextmanager
def captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)


# what a launch is


def test_a_kernel_runs_on_the_memory_that_an_address_leads_to(
    machine: Machine, kernels: ModuleType
) -> None:
    source, target = numbers(1, 2, 3, 4), torch.zeros(4, device=DEVICE)
    address = address_of(source)
    with machine.counting() as waits:
        kernels.follow[(1,)](address, target, COUNT=4)
    assert not waits
    assert target.tolist() == [1, 2, 3, 4]


def test_a_kernel_reads_no_memory_that_was_freed(machine: Machine, kernels: ModuleType) -> None:
    source, target = numbers(1, 2, 3, 4), torch.zeros(4, device=DEVICE)
    address = address_of(source)
    del source
    torch.zeros(4, device=DEVICE)  # does not take its place
    with pytest.raises(CudaFault, match="follow reads where there is no memory"):
        kernels.follow[(1,)](address, target, COUNT=4)


def test_a_kernel_reaches_behind_no_memory(machine: Machine, kernels: ModuleType) -> None:
    with pytest.raises(CudaFault, match="copy_scaled writes where there is no memory"):
        kernels.copy_scaled[(1,)](numbers(1, 2, 3, 4), torch.zeros(3, device=DEVICE), 2.0, COUNT=4)


def test_memory_of_the_host_is_no_argument(machine: Machine, kernels: ModuleType) -> None:
    with pytest.raises(CudaFault, match="cpu tensor"):
        kernels.copy_scaled[(1,)](torch.ones(4), numbers(0, 0, 0, 0), 2.0, COUNT=4)


def test_a_graph_launches_kernels_on_the_memory_as_it_then_is(
    machine: Machine, kernels: ModuleType
) -> None:
    source, target = numbers(1, 2, 3, 4), torch.zeros(4, device=DEVICE)
    followed = torch.zeros(4, device=DEVICE)
    other, address = numbers(5, 6, 7, 8), address_of(source)
    factor = 2.0
    kernels.follow[(1,)](address, followed, COUNT=4)
    kernels.copy_scaled[(1,)](followed, target, factor, COUNT=4)
    target.zero_()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        kernels.follow[(1,)](address, followed, COUNT=4)
        kernels.copy_scaled[(1,)](followed, target, factor, COUNT=4)
    assert target.tolist() == [0, 0, 0, 0]  # a capture runs nothing
    address.copy_(address_of(other))
    factor = 3.0  # what the host says later changes nothing
    graph.replay()
    assert target.tolist() == [10, 12, 14, 16]
    other.fill_(1)
    graph.replay()
    assert target.tolist() == [2, 2, 2, 2]
    del other
    with pytest.raises(CudaFault, match="follow reads where there is no memory"):
        graph.replay()


def test_a_capture_loads_no_kernel(machine: Machine, kernels: ModuleType) -> None:
    source, target = numbers(1, 2, 3, 4), torch.zeros(4, device=DEVICE)
    with (
        pytest.raises(CudaFault, match="copy_scaled has not been loaded"),
        captured(torch.cuda.CUDAGraph()),
    ):
        kernels.copy_scaled[(1,)](source, target, 2, COUNT=4)
    compiled = kernels.copy_scaled.warmup(source, target, 2, COUNT=4, grid=(1,))
    _ = compiled.run
    with captured(torch.cuda.CUDAGraph()):
        kernels.copy_scaled[(1,)](source, target, 2, COUNT=4)
    with pytest.raises(CudaFault, match="has not been loaded"), captured(torch.cuda.CUDAGraph()):
        kernels.copy_scaled[(1,)](source, target, 1, COUNT=4)  # compiled by itself
    assert target.tolist() == [0, 0, 0, 0]


def test_kernels_race_for_what_an_address_leads_to(machine: Machine, kernels: ModuleType) -> None:
    source, target = numbers(1, 2, 3, 4), torch.zeros(4, device=DEVICE)
    address, aside = address_of(source), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    kernels.follow[(1,)](address, target, COUNT=4)
    with captured(graph):
        kernels.follow[(1,)](address, target, COUNT=4)
    aside.wait_stream(torch.cuda.current_stream())
    source.fill_(1)
    with torch.cuda.stream(aside), pytest.raises(CudaFault, match="has not finished writing"):
        graph.replay()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        graph.replay()
    with pytest.raises(CudaFault, match="has not finished writing"):
        target.tolist()


def test_graphs_of_one_pool_do_not_run_at_once(machine: Machine) -> None:
    pool, aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs, tensors = [], [numbers(1, 2), numbers(3, 4)]
    for tensor in tensors:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            tensor.copy_(tensor * 2)
    aside.wait_stream(torch.cuda.current_stream())
    graphs[0].replay()
    with torch.cuda.stream(aside), pytest.raises(CudaFault, match="has not finished writing"):
        graphs[1].replay()


def test_a_capture_has_a_stream_of_its_own(machine: Machine) -> None:
    with pytest.raises(CudaFault, match="on the default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_an_event_that_is_known_to_be_done_is_no_wait(machine: Machine) -> None:
    event = torch.cuda.Event()
    x = numbers(1, 2) + 1
    event.record()
    with machine.counting() as waits:
        torch.cuda.Event().synchronize()  # never recorded
        assert x.tolist() == [2, 3]
        event.synchronize()
    assert [wait.what for wait in waits] == ["tolist"]


# the tables that a forward reads


@pytest.fixture
def tables(machine: Machine) -> tuple[PassInputs, list[SequenceSlice]]:
    """Tables, and rows of a text at nine slots, each of another forward."""
    from bild_lab.engine.models.native.gpu.inputs import PassInputs

    cache = KeyValueCache((1, 1, 64, 8), torch.float32, DEVICE)
    return PassInputs(1, DEVICE), [SequenceSlice(1, slot, cache, scored=1) for slot in range(9)]


def test_tables_are_filled_without_a_wait_and_never_overwritten_before_they_are_copied(
    machine: Machine, tables: tuple
) -> None:
    from bild_lab.engine.models.native.gpu.inputs import PINNED_PIECES

    inputs, rows = tables
    with machine.counting() as waits:
        for row in rows[:PINNED_PIECES]:
            inputs.fill([row])
    assert not waits
    for row in rows[PINNED_PIECES:]:
        inputs.fill([row])
    torch.cuda.synchronize()
    assert inputs.row_table[1, 0].item() == len(rows) - 1


def test_a_table_that_is_overwritten_before_its_copy_is_done(
    machine: Machine, tables: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bild_lab.engine.models.native.gpu.inputs import CopiedTables

    def hurried(copies: CopiedTables) -> object:
        copies._place = (copies._place + 1) % len(copies._pieces)
        return copies._arrays[copies._place]

    monkeypatch.setattr(CopiedTables, "next", hurried)
    inputs, rows = tables
    for row in rows:
        inputs.fill([row])
    with pytest.raises(CudaFault, match="pinned memory"):
        torch.cuda.synchronize()


# the decoder


@pytest.fixture
def model(machine: Machine) -> NativeModel:
    return in_memory(random_target("llama", 0, 1).float().to(DEVICE), "kernels")


@pytest.mark.parametrize(
    ("chain", "waits"),
    [
        (ChainSpec(2, frozenset(), threshold=0.0), 1),
        pytest.param(ChainSpec(2, frozenset()), 1, marks=pytest.mark.slow),
        pytest.param(ChainSpec(2, frozenset(), stop_on_eos=False), 0, marks=pytest.mark.slow),
    ],
)
def test_a_chain_is_drafted_with_one_wait_or_none(
    chain: ChainSpec, waits: int, machine: Machine, model: NativeModel
) -> None:
    """One where the host reads its end."""
    session = start(model)
    session.draft([3], chain)
    with machine.counting() as counted:
        drafted = session.draft([5], chain)
    assert len(counted) == waits, by_line(counted)
    assert drafted.forwards == 2


def test_texts_that_end_at_different_steps_do_not_race(
    machine: Machine, model: NativeModel
) -> None:
    """While one of them ends, the program of another chooses what it drafts."""
    sessions = [start(model) for _ in range(3)]
    sessions[0].extend([5])  # makes the rotations
    tokens = [[START, 14, 3], [START, 14], [START]]
    texts = [
        session.layers.text_rows(0, len(fed)) for session, fed in zip(sessions, tokens, strict=True)
    ]
    chains = [ChainSpec(steps, frozenset(), threshold=0.0) for steps in (2, 1, 3)]
    chains_drafted = model.packed.draft(tokens, texts, chains)
    assert [chain.forwards for chain in chains_drafted] == [2, 1, 3]
    ends = frozenset[int]()
    tree_specs = [TreeSpec(99, depth, width=2, children=2, end_tokens=ends) for depth in (2, 1, 3)]
    trees = model.packed.draft(tokens, texts, tree_specs)
    assert [len(tree.forwards) for tree in trees] == [2, 1, 3]


def start(model: NativeModel, room: int = 8) -> CachedSession:
    return model.start(Source((START, 14, 3)), room)


def test_passes_of_two_streams_run_one_after_the_other(
    machine: Machine, model: NativeModel
) -> None:
    expected = start(model).extend([3, 5]).logits
    assert torch.equal(in_two_streams(model), expected)


def in_two_streams(model: NativeModel) -> Tensor:
    """The scores of a text whose pass begins beside another text's, in another stream."""
    first, second, aside = start(model), start(model), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    first.extend([7, 8])
    with torch.cuda.stream(aside):
        logits = second.extend([3, 5]).logits
    torch.cuda.current_stream().wait_stream(aside)
    return logits


@contextmanager
def locked(decoder: TritonDecoder) -> Iterator[None]:
    """A mistake: a thread waits for the others, but a stream does not."""
    with decoder._lock:
        yield


def test_a_pass_that_does_not_wait_for_the_one_in_another_stream(
    machine: Machine, model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model.packed), "_alone", locked)
    with pytest.raises(CudaFault, match="what another has not finished"):
        in_two_streams(model)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_the_two_streams_of_a_pipeline(
    waits: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts run on the same buffers, so the second waits for the first."""
    module = random_target("llama", 0, 2).float()
    source = Source((START, 14, 3))
    request = Request(source, Limits(len(source.prompt), 5, NEVER))
    vanilla = in_memory(module, "native")
    expected = target_alone(vanilla).decode(request, Trace())
    model = in_memory(module.to(DEVICE), "kernels")
    pipeline = PredictivePipeline(model, top_k=2)
    request = replace(request, source=source.to(DEVICE))
    if waits:
        assert pipeline.decode(request, Trace()) == expected
        return
    monkeypatch.setattr(type(model.packed), "_alone", locked)
    with pytest.raises(CudaFault, match="what another has not finished"):
        pipeline.decode(request, Trace())


def test_kernels_and_graphs_run_on_the_models_gpu_whichever_is_current(
    machine: Machine, model: NativeModel
) -> None:
    session = start(model)
    torch.cuda.set_device(1)
    session.extend([3, 5])
    assert torch.cuda.current_device() == 1


@pytest.mark.slow
def test_a_cache_that_grew_has_another_address_in_the_tables_of_the_same_graph(
    machine: Machine, model: NativeModel
) -> None:
    assert torch.equal(*(after_growing(model, room) for room in (200, 8)))


def after_growing(model: NativeModel, room: int) -> Tensor:
    """The scores of a row after so many that a cache of little room has grown."""
    session = start(model, room)
    session.extend([5])
    session.extend([6])
    made = model.compiled_steps
    session.layers._reserve(100)
    logits = session.extend([7]).logits
    assert model.compiled_steps == made
    return logits


def test_a_graph_that_runs_on_a_cache_that_was_replaced(
    machine: Machine, model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bild_lab.engine.models.native.gpu import inputs

    addresses = {}

    def remembered(text: SequenceSlice) -> tuple[int, ...]:
        fields = list(text_fields(text))
        fields[3:5] = addresses.setdefault(text.reserved, fields[3:5])
        return tuple(fields)

    text_fields = inputs.text_fields
    monkeypatch.setattr(inputs, "text_fields", remembered)
    with pytest.raises(CudaFault, match="where there is no memory, or none any more"):
        after_growing(model, 8)


def test_a_capture_of_kernels_that_were_not_prepared(
    machine: Machine, model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model.packed.graphs), "_prepare", lambda graphs, launch: None)
    with pytest.raises(CudaFault, match="has not been loaded"):
        start(model).extend([3, 5])


def test_a_pool_ends_with_its_last_graph(machine: Machine) -> None:
    pool, tensor = torch.cuda.graph_pool_handle(), numbers(1, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        tensor.add_(1)
    del graph
    with (
        pytest.raises(CudaFault, match="a pool whose graphs are all gone"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool),
    ):
        tensor.add_(1)


def test_graphs_are_captured_again_after_kernels_ran_one_by_one(
    machine: Machine, model: NativeModel
) -> None:
    """No graph is left then, and so no memory of theirs."""
    graphs = model.packed.graphs
    expected = start(model).extend([3, 5]).logits
    for captures in (False, True):
        graphs.captures = captures
        graphs.clear()
        assert torch.equal(start(model).extend([3, 5]).logits, expected)


def test_graphs_are_captured_after_one_that_was_cut_short(
    machine: Machine, model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bild_lab.engine.models.native.gpu.plan import Launch

    def interrupted(launch: Launch) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Launch, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(model).extend([3, 5])
    assert start(model).extend([3, 5]).logits.isfinite().all()


def test_all_graphs_are_captured_in_one_stream(machine: Machine, model: NativeModel) -> None:
    """So that the memory of one serves the next."""
    session = start(model)
    session.extend([3, 5])
    streams, made = len(machine.streams), model.compiled_steps
    session.extend([7])
    assert model.compiled_steps > made
    assert len(machine.streams) == streams


def test_a_capture_forbids_other_threads_nothing(machine: Machine, model: NativeModel) -> None:
    """In PyTorch's own mode a thread that allocates fails, and breaks the capture."""
    for engine in (model, model.with_backend(compiled=True)):
        machine.capture_error_modes.clear()
        session = start(engine)
        session.extend([3, 5])
        session.extend([7])
        assert machine.capture_error_modes == {"thread_local"}


def test_a_kernel_whose_compilation_was_cut_short_is_compiled_before_the_next_capture(
    machine: Machine, model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.pretended.kernels import Compiled

    def interrupted(compiled: Compiled) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Compiled, "run", property(interrupted))
        with pytest.raises(KeyboardInterrupt):
            start(model).extend([3, 5])
    assert start(model).extend([3, 5]).logits.isfinite().all()


@pytest.mark.parametrize("name", ["t5-large", "qwen2.5-1.5b", "gemma3-270m"])
def test_no_grid_is_longer_than_those_of_cuda(name: str) -> None:
    """With as many programs as 64 rows of long texts have, and as a tree of them has."""
    from bild_lab.engine.models.native.gpu.plan import ForwardPlan, PassShape
    from tests.pretended.kernels import require_grid
    from tests.triton_compiler import SIZES, shapes_alone

    plan = ForwardPlan(shapes_alone(SIZES[name]), (9, 0))
    shape = PassShape(rows=64, scored=64, tiles=64, chunks=4096, source_chunks=4096, layers=(0,))
    for variant in (shape, shape._replace(tree_chunks=8)):
        for launch in plan.launches(variant):
            require_grid(launch.kernel, launch.grid)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "cuda"])
def test_a_number_of_the_host_that_a_graph_holds(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    interpreter: MemoryWatch,  # noqa: F811
) -> None:
    """Where each launch is a call of Python, as without a GPU, it is the number of now."""
    from bild_lab.engine.models.native.gpu.inputs import PassInputs
    from bild_lab.engine.models.native.gpu.plan import ForwardPlan

    def filled(inputs: PassInputs, texts: list[SequenceSlice]) -> int:
        inputs.slot = texts[0].start
        return fill(inputs, texts)

    def launched(plan: ForwardPlan, shape: PassShape, *others: object) -> list[Callable]:
        slot = plan.inputs.row_table[1, :1]
        return [lambda: slot.fill_(plan.inputs.slot), *launches(plan, shape, *others)]

    fill, launches = PassInputs.fill, ForwardPlan.launches
    with pretended_gpu(triton=True), torch.inference_mode():
        module = random_target("llama", 0, 1).float().to(device)
        model = triton_model(module) if device == "cpu" else in_memory(module, "kernels")
        rows = ([3], [5], [6])  # the last two are of one shape
        session = start(model)
        expected = [session.extend(row).logits for row in rows]
        model.packed.graphs.clear()
        monkeypatch.setattr(PassInputs, "fill", filled)
        monkeypatch.setattr(ForwardPlan, "launches", launched)
        session = start(model)
        logits = [session.extend(row).logits for row in rows]
        same = [torch.equal(*pair) for pair in zip(logits, expected, strict=True)]
    assert same == [True, True, device == "cpu"]
    # the old slot is one that attention reads before it waits
    assert bool(interpreter.conflicts) == (device == "cuda")
    interpreter.conflicts.clear()
