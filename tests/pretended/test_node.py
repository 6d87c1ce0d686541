"""A pretended node counts memory for each of its GPUs."""

from __future__ import annotations

import gc

import pytest
import torch

from bild_lab.engine.models.device import free_bytes, within_memory
from bild_lab.errors import UserError
from tests.pretended import pretended_node

GB = 10**9


def test_memory_is_counted_for_each_gpu_until_its_last_view_has_gone() -> None:
    with pretended_node() as node, node.tensors():
        assert torch.cuda.device_count() == 8
        large = torch.empty(35 * GB, dtype=torch.float16, device="cuda:3")
        view = large.view(5, -1)[1:]
        assert node.held == [0, 0, 0, 70 * GB, 0, 0, 0, 0]
        assert free_bytes(torch.device("cuda:3")) == 10 * GB
        with pytest.raises(
            UserError, match="the sum does not fit into the memory of cuda:3; halve"
        ):
            with within_memory("the sum", torch.device("cuda:3"), "halve it"):
                view + 1
        other = torch.empty(20 * GB, dtype=torch.int8, device="cuda:4")
        del large
        assert node.held[3:5] == [70 * GB, 20 * GB]
        del view
        gc.collect()  # of some versions of PyTorch the error holds a cycle of references
        assert node.held[3:5] == [0, 20 * GB]
        moved = other.to("cuda:3")
        assert node.held[3:5] == [20 * GB, 20 * GB] and moved.device.index == 3
        with pytest.raises(torch.OutOfMemoryError, match="GPU 4 has 60000000000 free"):
            torch.empty(61 * GB, dtype=torch.int8, device="cuda:4")
    assert node.peak[3:5] == [70 * GB, 20 * GB]


def test_a_forward_pass_holds_what_a_backward_pass_would_read() -> None:
    """Five squashed products of 4 GB each: all are kept for gradients, four tensors at once without."""
    with pretended_node(gpus=1) as node, node.tensors():
        weight = torch.empty(1, 1, device="cuda:0", requires_grad=True)
        rows = torch.empty(GB, 1, device="cuda:0")

        def run() -> torch.Tensor:
            out = rows
            for _ in range(5):
                out = torch.tanh(out @ weight)
            return out

        with torch.no_grad():
            run()
        assert node.held[0] < 4.1 * GB and node.peak[0] == pytest.approx(16 * GB, rel=0.01)
        out = run()
        assert out.requires_grad and node.held[0] == pytest.approx(24 * GB, rel=0.01)
