"""Which kernels run where, and what they say when they cannot."""

from __future__ import annotations

import importlib
import os
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from bild_lab.engine.models.native import kernels
from bild_lab.engine.models.native.kernels import why_no_kernels, why_unfit_for_gpu

GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that says what it is: change `capability`, `triton`, or the `error` of its start."""
    machine: dict[str, Any] = {"capability": (9, 0), "triton": True, "error": None}

    def start() -> None:
        if machine["error"] is not None:
            raise machine["error"]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine["capability"])
    monkeypatch.setattr(kernels, "find_spec", lambda name: machine["triton"] or None)
    monkeypatch.setattr(kernels, "start_triton", start)
    return machine


def test_a_gpu_runs_half_precision_where_triton_and_its_matrix_units_are(
    gpu: dict[str, Any],
) -> None:
    assert why_no_kernels(GPU, torch.bfloat16) is None
    assert why_no_kernels(GPU, torch.float16, LlamaConfig()) is None
    assert "bfloat16 and float16, not float32" in why_no_kernels(GPU, torch.float32)
    gpu["capability"] = (7, 5)
    assert "compute capability 8.0, and this GPU has 7.5" in why_no_kernels(GPU, torch.float16)
    gpu["triton"] = False
    assert "pip install triton" in why_no_kernels(GPU, torch.float16)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Failed to find C compiler."), "Failed to find C compiler"),
        (CalledProcessError(1, ["/usr/bin/gcc", "driver.c"]), "/usr/bin/gcc failed"),
        (AssertionError("no libcuda.so!\nLook for it"), "no libcuda.so! Look for it"),
    ],
)
def test_where_triton_does_not_start_the_refusal_says_what_is_missing(
    error: Exception, reason: str, gpu: dict[str, Any]
) -> None:
    gpu["error"] = error
    said = why_no_kernels(GPU, torch.bfloat16, LlamaConfig())
    assert said.endswith(f"(gcc and python3-dev), and does not start: {reason}")
    assert "its width, 33" in why_no_kernels(GPU, torch.bfloat16, UNFIT["its width, 33"])


FIT = {
    "t5": T5Config(),
    "qwen2.5 0.5b": Qwen2Config(hidden_size=896, num_attention_heads=14, num_key_value_heads=2),
    "qwen3": Qwen3Config(head_dim=128),
    "gemma3": Gemma3TextConfig(head_dim=256, hidden_size=640),
    "heads of 80": LlamaConfig(hidden_size=320, num_attention_heads=4),
}
UNFIT = {
    "its width, 33": LlamaConfig(hidden_size=33, num_attention_heads=3, head_dim=6),
    "its width, 24": T5Config(d_model=24),
    "the width of its heads, 7": T5Config(d_kv=7),
    "its normed heads, 96": Qwen3Config(head_dim=96),
    "its normed heads, 8": Gemma3TextConfig(head_dim=8, hidden_size=640),
}


@pytest.mark.parametrize("name", FIT)
def test_published_sizes_fit_the_kernels_of_a_gpu(name: str) -> None:
    assert why_unfit_for_gpu(FIT[name]) is None


@pytest.mark.parametrize("reason", UNFIT)
def test_sizes_that_the_kernels_of_a_gpu_cannot_run_are_named(
    reason: str, gpu: dict[str, Any]
) -> None:
    config: PreTrainedConfig = UNFIT[reason]
    assert reason in why_unfit_for_gpu(config)
    assert reason in why_no_kernels(GPU, torch.bfloat16, config)


@pytest.mark.parametrize(
    ("version", "by_registers"),
    [("3.6.0", True), ("3.7.0+git1", True), ("3.7.1", False), ("3.10.0", False)],
)
def test_before_a_safe_triton_products_go_to_matrix_units_that_read_registers(
    version: str, by_registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: units that read shared memory did not wait for what had been copied there."""
    triton = pytest.importorskip("triton")
    gpu_package = importlib.import_module("bild_lab.engine.models.native.gpu")
    switches = ("DISABLE_MMA_V3", "DISABLE_MMA_V5")  # of compute capabilities 9, and 10 and 11
    for switch in switches:
        monkeypatch.setenv(switch, "")
    monkeypatch.setattr(triton, "__version__", version)
    importlib.reload(gpu_package)
    assert [os.environ[switch] for switch in switches] == ["1" if by_registers else ""] * 2
