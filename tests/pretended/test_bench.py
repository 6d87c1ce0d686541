"""The benchmark on the pretended GPU: our Triton kernels take part, with weights of fewer bits too."""

from __future__ import annotations

import pytest
import torch

from bild_lab.benchmark import bench
from bild_lab.benchmark.bench import Shape, run, synthetic_bench
from bild_lab.engine.models.native import compiled
from bild_lab.lab.measure import machine
from tests.benchmark.test_bench import llama
from tests.pretended import pretended_gpu
from tests.triton_interpreter import interpreter, needs_triton  # noqa: F401


@pytest.mark.slow
@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_kernels_are_timed_beside_the_other_engines_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "SHAPES", {"tiny": Shape(llama(2), 4, llama(1))})
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(machine, "BUFFER_BYTES", 2**12)
    with pretended_gpu(triton=True):
        device = torch.device("cuda")
        with synthetic_bench("tiny", device, torch.float16) as tiny:
            kept = ("hf_generate", "native_graphs", "kernels")
            assert {"native_speculative", "kernels_speculative"} < tiny.methods.keys()
            for name in tiny.methods.keys() - {"hf_assisted"}:
                if not name.startswith(kept):
                    del tiny.methods[name]
            rows = {row["method"]: row for row in run(tiny, 1, torch.cuda.synchronize)}
    assert {"kernels", "kernels_int8", "kernels_int4", "kernels_speculative"} < rows.keys()
    assert rows["kernels_int4"]["precision"] == "int4"
    assert all(row["bandwidth_share"] > 0 for row in rows.values())
    assert rows["kernels"]["same_tokens"]
