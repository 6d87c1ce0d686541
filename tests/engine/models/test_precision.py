"""`dtype=auto`: float32 on a CPU; on a GPU as the checkpoint is stored, large float32 ones in
bfloat16.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.precision import LARGE, parameters, resolve_dtype
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.point.load import load
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.point.read_model import load_model
from tests.policies import shipped
from tests.pretended import pretended_gpu
from tests.tiny_architectures import build, word_tokenizer

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class Configured(Checkpoint):
    """A configuration without weights."""

    settings: PreTrainedConfig = field(default_factory=LlamaConfig)

    @cached_property
    def config(self) -> PreTrainedConfig:
        return self.settings


@pytest.mark.parametrize(
    ("precision", "variable", "device", "said"),
    [
        ("high", None, GPU, "its float32_matmul_precision is 'high'; set it to 'highest', or"),
        ("medium", None, CPU, "its float32_matmul_precision is 'medium'; set it to 'highest', or"),
        ("highest", "NVIDIA_TF32_OVERRIDE", GPU, "as NVIDIA_TF32_OVERRIDE=1 says; unset NVIDIA"),
        ("highest", "ONEDNN_DEFAULT_FPMATH_MODE", CPU, "MODE=1 says; unset ONEDNN"),
        ("highest", "ONEDNN_DEFAULT_FPMATH_MODE", GPU, None),
        ("highest", None, GPU, None),
        ("high", "NVIDIA_TF32_OVERRIDE", CPU, None),
    ],
)
def test_float32_with_fewer_digits_is_refused(
    precision: str,
    variable: str | None,
    device: torch.device,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: texts and trainings with TF32 were called those of float32."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    if variable:
        monkeypatch.setenv(variable, "1")
    checkpoint = llama("float32")
    HuggingFaceModel(checkpoint, device, torch.bfloat16)
    if said is None:
        HuggingFaceModel(checkpoint, device, torch.float32)
    else:
        with pytest.raises(UserError, match=f"with fewer digits here, .*{said}"):
            HuggingFaceModel(checkpoint, device, torch.float32)


@pytest.mark.parametrize(
    ("setting", "value", "refused_on"),
    [
        ("cuda.matmul.fp32_precision", "tf32", [GPU]),
        ("mkldnn.matmul.fp32_precision", "bf16", [CPU]),
        ("fp32_precision", "tf32", [GPU]),
    ],
)
def test_precisions_of_single_backends_are_understood(
    setting: str, value: str, refused_on: list[torch.device]
) -> None:
    """Fault: every decoding in float32 ended in a traceback, as PyTorch then refuses to tell one
    precision for all.
    """
    program = f"""
import torch
from bild_lab.engine.models.device import require_float32
from bild_lab.errors import UserError
torch.backends.{setting} = {value!r}
for name in ("cpu", "cuda"):
    try:
        require_float32(torch.float32, torch.device(name))
    except UserError as error:
        print(name, error)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    refusals = found.stdout.splitlines()
    assert [line.split()[0] for line in refusals] == [device.type for device in refused_on]
    assert f"matmul.fp32_precision is {value!r}; set it to 'ieee'" in refusals[0]


def test_float32_has_all_its_digits_in_a_container_of_nvidia() -> None:
    program = "import bild_lab, torch; print(torch.get_float32_matmul_precision())"
    process = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
    )
    assert process.stdout.split() == ["highest"]


def llama(dtype: str | None, layers: int = 1) -> Configured:
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "vocab_size": 100,
        "num_hidden_layers": layers,
    }
    return Configured("llama", settings=LlamaConfig(**sizes, dtype=dtype))


@pytest.mark.fast("bfloat16-1-on_gpu0", "None-200-on_gpu5")
@pytest.mark.parametrize(
    ("stored", "layers", "on_gpu"),
    [
        ("bfloat16", 1, torch.bfloat16),
        ("float16", 1, torch.float16),
        ("float32", 1, torch.float32),
        (None, 1, torch.float32),
        ("float32", 200, torch.bfloat16),
        (None, 200, torch.bfloat16),
        ("float16", 200, torch.float16),
    ],
)
def test_auto_is_float32_on_a_cpu_and_on_a_gpu_what_is_stored(
    stored: str | None, layers: int, on_gpu: torch.dtype
) -> None:
    checkpoint = llama(stored, layers)
    assert resolve_dtype("auto", checkpoint, CPU) == torch.float32
    assert resolve_dtype("auto", checkpoint, GPU) == on_gpu
    assert resolve_dtype("float64", checkpoint, GPU) == torch.float64
    assert (parameters(checkpoint) >= LARGE) == (layers == 200)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"runtime\.dtype must be one of auto, float32, .* got 'half'"
    ):
        resolve_dtype("half", llama(None), CPU)


def test_a_point_stores_the_precision_that_auto_was() -> None:
    # the toy pair is stored in bfloat16
    words = ["pair=toy", "dataset=toy", "dataset.limit=2", "policy=bild"]
    automatic, named = (
        prepare(compose_config([*words, *more])) for more in ([], ["runtime.dtype=float32"])
    )
    assert automatic.setting["dtype"] == "float32"
    assert automatic.id == named.id  # finished points stay finished
    with pretended_gpu():
        point = prepare(compose_config([*words, "runtime.device=cuda"]))
        models = [
            model for each in (*point.decoders.values(), point.vanilla) for model in each.models
        ]
    load_model.cache_clear()  # its models are on a GPU that is gone
    assert point.setting["dtype"] == point.specs.runtime.dtype == "bfloat16"
    assert {model.dtype for model in models} == {torch.bfloat16}


def test_a_model_in_memory_keeps_its_precision(tmp_path: Path) -> None:
    loaded = (build("llama").bfloat16(), word_tokenizer())
    decoder = load(loaded, policy=shipped("vanilla"))
    assert (
        decoder.target.dtype == torch.bfloat16 and len(decoder.generate("w5 w9", 4).token_ids) == 4
    )
    with pytest.raises(UserError, match="a model in memory comes with its tokenizer"):
        load(loaded[0], policy=shipped("vanilla"))
