"""`python scripts/check_gpu.py`: whatever goes wrong is said, and hides nothing that comes after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bild_lab.errors import UserError
from scripts import check_gpu
from tests.triton_interpreter import needs_triton

pytestmark = needs_triton


class Gpu:
    """What the script asks a GPU, and the processes that it starts. lost: it answers no more."""

    def __init__(self) -> None:
        self.lost = False
        self.checked: list[str] = []
        self.started: list[list[str]] = []

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def findings(self, name: str, *_: Any) -> Iterator[Any]:
        """Of a model or a pair: of `t5-large` one is right, and then an error is raised."""
        from bild_lab.benchmark.kernel_check import Finding

        self.checked.append(name)
        yield Finding("the same bits", right=True)
        if name == "t5-large":
            raise RuntimeError("no memory")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    from bild_lab.benchmark import decoding_check, kernel_times
    from bild_lab.engine.models import native
    from bild_lab.lab.measure import machine

    gpu = Gpu()
    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda device: "A GPU",
        "synchronize": gpu.synchronize,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(native, "why_no_kernels", lambda device, dtype: None)
    monkeypatch.setattr(machine, "read_gb_per_s", lambda device, synchronize: 4000.0)
    monkeypatch.setattr(kernel_times, "check_model", gpu.findings)
    monkeypatch.setattr(decoding_check, "check_pair", gpu.findings)
    monkeypatch.setattr(check_gpu.subprocess, "run", gpu.started.append)
    monkeypatch.setattr(check_gpu.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    return gpu


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Runs the script with these words; returns what it printed and the message at its end."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["check_gpu.py", *words])
        try:
            check_gpu.main()
        except UserError as error:
            return f"{capsys.readouterr().out}{error}"
        return capsys.readouterr().out

    return run


def test_models_come_before_pairs(gpu: Gpu, check: Callable[..., str]) -> None:
    printed = check("llama-7b:llama-68m", "t5-small")
    assert gpu.checked == ["t5-small", "llama-7b:llama-68m"]
    assert printed.count("right") == 2
    assert "WRONG" not in printed


def test_an_error_is_wrong_and_the_rest_is_checked(gpu: Gpu, check: Callable[..., str]) -> None:
    printed = check("t5-large", "t5-small")
    assert gpu.checked == ["t5-large", "t5-small"]
    assert "t5-large raised an error" in printed and "RuntimeError: no memory" in printed
    assert printed.endswith("1 findings are wrong, marked WRONG above")
    assert gpu.started == []


def test_after_an_error_that_takes_the_gpu_a_fresh_process_checks_the_rest(
    gpu: Gpu, check: Callable[..., str]
) -> None:
    gpu.lost = True
    printed = check("t5-large", "t5-small", "t5-large:t5-small")
    assert gpu.checked == ["t5-large"]
    assert gpu.started == [
        [sys.executable, "-m", "bild_lab", "check_gpu", "t5-small", "t5-large:t5-small"]
    ]
    assert printed.endswith("after the findings marked WRONG above")
