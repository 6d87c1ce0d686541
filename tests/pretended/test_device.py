"""The pretended GPU refuses what CUDA refuses, notices what goes wrong there in silence, and counts
every wait.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bild_lab.engine.models.native.compiled import captured
from tests.pretended import CudaFault, Machine, pretended_gpu
from tests.pretended.machine import STREAMS
from tests.pretended.tensor import DEVICE


@pytest.fixture
def machine() -> Iterator[Machine]:
    with pretended_gpu() as machine, torch.inference_mode():
        yield machine


def test_a_tensor_knows_where_it_is(machine: Machine) -> None:
    made = torch.arange(6, device="cuda").view(2, 3)
    assert made.is_cuda and (made + 1)[:, 1].device == DEVICE
    assert made.cpu().device.type == "cpu" and torch.ones(2).to("cuda").is_cuda


def test_outside_there_is_no_gpu() -> None:
    with pretended_gpu():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available() or torch.version.cuda
    assert type(torch.ones(1)) is torch.Tensor


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: int(x[1]),
        lambda x: bool(x[1] > 0),
        lambda x: x.cpu(),
        lambda x: str(x),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.ones(2).to(x.device, non_blocking=True),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[: x[1]],
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([5, x[0]]),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_each_kind_of_wait_is_counted_with_its_line(machine: Machine, read: object) -> None:
    x = torch.arange(4, device="cuda")
    with machine.counting() as waits:
        read(x)
    assert len(waits) == 1
    assert waits[0].line.startswith("tests/pretended/test_device.py:")


def test_work_that_stays_on_the_device_waits_for_nothing(machine: Machine) -> None:
    with machine.counting() as waits:
        x = torch.zeros(3, 4, device="cuda")
        assert x[:0].tolist() == [] and torch.tensor([], device="cuda").is_cuda  # nothing to copy
        x[:, :2] = 1.0
        x[0, torch.full((1,), 3, device="cuda")] = 2.0
        pinned = torch.tensor([1, 2]).pin_memory().to("cuda", non_blocking=True)
        x = x.index_select(0, pinned).masked_fill(x[1:] > 0, -1.0) * 2 + torch.tensor(1.0)
        torch.where(x > 0, x, 0.0).softmax(-1).argmax(-1)
    assert not waits


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(4),
        lambda x: torch.cat([x, torch.ones(1)]),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: x.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
        lambda x: x.view(2, 2) @ torch.ones(2, 2),
        lambda x: torch.ones(4)[x.long()],
    ],
)
def test_tensors_of_two_devices_do_not_mix(machine: Machine, mix: object) -> None:
    with pytest.raises(CudaFault, match="same device"):
        mix(torch.ones(4, device="cuda"))


def test_a_transfer_is_not_read_before_the_copy_is_done(machine: Machine) -> None:
    tokens = torch.tensor([7, 8], device="cuda").to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    for read in (tokens.tolist, tokens.sum, tokens.numpy):
        with pytest.raises(CudaFault, match="not been copied yet"):
            read()
    copied.synchronize()
    assert tokens.tolist() == [7, 8]


def test_pinned_memory_is_left_alone_until_its_copy_is_done(machine: Machine) -> None:
    staging = torch.tensor([1, 2]).pin_memory()
    staging.to("cuda", non_blocking=True)
    staging.fill_(9)
    with pytest.raises(CudaFault, match="pinned memory"):
        torch.cuda.synchronize()


def test_a_graph_replays_over_the_same_memory(machine: Machine) -> None:
    step, total = torch.zeros((), device="cuda"), torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(step)
        doubled = total * 2
    assert total.tolist() == [0.0, 0.0] and doubled.isnan().all()  # a capture runs nothing
    step.fill_(3)
    graph.replay()
    graph.replay()
    assert total.tolist() == [6.0, 6.0] and doubled.tolist() == [12.0, 12.0]


def test_a_graph_keeps_its_memory_when_another_of_its_stream_goes(machine: Machine) -> None:
    weights = torch.ones(2, 2, device="cuda")
    graphs = [captured(lambda: weights @ weights, weights.device) for _ in range(2 * STREAMS)]
    del graphs[: STREAMS + 1]
    assert graphs[0]().tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    ("forbidden", "message"),
    [
        (lambda x: x.sum().item(), "the host waits"),
        (lambda x: x[x > 0], "the host waits"),
        (lambda x: 1 if x[0] > 0 else 2, "the host waits"),
        (lambda x: torch.cuda.synchronize(), "the host waits"),
        (lambda x: torch.tensor([1], device="cuda"), "the host waits"),
        (lambda x: x.resize_(9), "moves memory"),
        (
            lambda x: torch.rand(2, device="cuda", generator=torch.Generator("cuda")),
            "not registered",
        ),
    ],
)
def test_a_capture_refuses_what_cuda_forbids_in_it(
    machine: Machine, forbidden: object, message: str
) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(CudaFault, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        forbidden(x)


def test_two_streams_race_unless_one_waits(machine: Machine) -> None:
    x, aside = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    written = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(aside):
        aside.wait_event(written)
        half = x[:2] + 1
    x[2:].fill_(1.0)  # the other half
    with pytest.raises(CudaFault, match="writes what another has not finished reading"):
        x[:2].fill_(5.0)
    for read in (lambda: half * 2, half.tolist, half.sum, half[0].item):
        with pytest.raises(CudaFault, match="reads what another has not finished writing"):
            read()
    torch.cuda.current_stream().wait_stream(aside)
    assert (x[:2].fill_(5.0) + half).tolist() == [6.0, 6.0]


def test_memory_is_not_given_out_while_another_stream_uses_it(machine: Machine) -> None:
    x, aside = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        kept = x + 1
    del x
    with pytest.raises(CudaFault, match="given out again"):
        torch.zeros(4, device="cuda")
    torch.cuda.current_stream().wait_stream(aside)
    assert (torch.zeros(4, device="cuda") + kept).tolist() == [1.0] * 4
