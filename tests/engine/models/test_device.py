"""Which GPUs a process sees, and whether the CPU has cores enough for those that drive them."""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine.models import device
from bild_lab.engine.models.device import few_cores, visible_gpus


@pytest.mark.parametrize(
    ("listed", "count", "seen"),
    [
        (None, 2, ("0", "1")),
        ("3, 1", 2, ("3", "1")),
        ("GPU-a,GPU-b", 2, ("GPU-a", "GPU-b")),
        ("0,1,2", 2, ("0", "1")),  # CUDA has one fewer than the variable
        ("0,-1,2", 1, ("0",)),  # it reads up to the first that is none
        ("0,,2", 1, ("0",)),
        ("", 0, ()),
        ("-1", 0, ()),
        ("4,5", 0, ("4", "5")),  # without a driver the variable tells
    ],
)
def test_the_gpus_that_are_seen_have_the_names_of_the_variable(
    listed: str | None, count: int, seen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus() == seen


def test_two_cores_for_each_of_several_processes_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 7)
    assert few_cores(3) == ""
    assert "7 CPU cores for 4 processes" in few_cores(4) and "such as 3," in few_cores(4)
    monkeypatch.setattr(device, "usable_cores", lambda: 8)
    assert few_cores(4) == ""
    monkeypatch.setattr(device, "usable_cores", lambda: 1)
    assert few_cores(1) == ""  # which waits for no other
    assert "such as 1," in few_cores(2)
