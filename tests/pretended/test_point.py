"""A whole point on the pretended GPU: loading, warm-up, timing, tracing, certificate and result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import bild_lab
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point import prepare as points
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.point.read_model import load_model
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep
from tests.pretended import pretended_gpu
from tests.triton_interpreter import interpreter, needs_triton  # noqa: F401

PROMPTS = ["w5 w9 w30 w12", "w7 w8", "w39 w38 w3 w20"]
NEW_TOKENS = 6


@pytest.mark.slow
@pytest.mark.parametrize(("family", "compiles"), [("llama", "auto"), ("t5", "false")])
def test_a_point_is_measured_as_on_a_cpu(
    checkpoints: Path, tmp_path: Path, family: str, compiles: str
) -> None:
    pair = str(checkpoints / family), str(checkpoints / f"{family}-draft")
    here = bild_lab.load(
        *pair, policy="bild", fallback=0.3, rollback=0.5, device="cpu", dtype="float64"
    )
    expected = [here.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids for prompt in PROMPTS]
    words = [f"decoding.max_new_tokens={NEW_TOKENS}", "runtime.dtype=float64"]
    with pretended_gpu() as machine:
        result = measured(pair, PROMPTS, tmp_path, *words, f"runtime.compile={compiles}")
        assert torch.cuda.is_available() and machine.launched
    assert (result.setting.device, result.environment["gpu"]) == ("cuda", "Pretended GPU")
    assert result.setting.hardware.startswith("Pretended GPU, ")
    assert result.certificate.equal == len(PROMPTS)
    assert [list(one.token_ids) for one in read_examples(result.folder)] == expected


@pytest.mark.slow
@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_a_point_is_measured_by_our_kernels(checkpoints: Path, tmp_path: Path) -> None:
    pair = str(checkpoints / "llama"), str(checkpoints / "llama-draft")
    words = ["decoding.max_new_tokens=3", "runtime.dtype=float16", "runtime.engine=kernels"]
    with pretended_gpu(triton=True):
        result = measured(pair, PROMPTS[:2], tmp_path, *words)
    assert (result.setting.device, result.setting.engine) == ("cuda", "kernels")
    assert result.certificate.equal == 2


def measured(pair: tuple[str, str], prompts: Sequence[str], folder: Path, *words: str) -> Result:
    """A point of BiLD on the pretended GPU, with its certificate."""
    file = folder / "test.jsonl"
    file.write_text("".join(json.dumps({"de": prompt, "en": "w3"}) + "\n" for prompt in prompts))
    common_words = [
        f"pair.target={pair[0]}",
        f"pair.draft={pair[1]}",
        "dataset=multi30k",
        f"dataset.path={file}",
        "policy=bild",
        "policy.fallback=0.3",
        "policy.rollback=0.5",
        "runtime.device=cuda",
        "measure.certify=true",
        "measure.repeats=1",
        "measure.warmup=1",
        "measure.traced_examples=1",
    ]
    points.cached_examples.cache_clear()
    try:
        return run_point(
            prepare(compose_config([*common_words, *words])),
            Sweep(folder / "sweep"),
            setup_s=0.0,
            stage=lambda name: None,
        )
    finally:
        load_model.cache_clear()  # its models are on a GPU that is gone


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["policy=bild"], "graphs"),
        (["policy=bild", "runtime.compile=false"], "false"),
        (["policy=bild", "runtime.batch=2"], "false"),
        (["policy=bild", "runtime.device=cpu"], "false"),
        (["policy=bild", "runtime.engine=hf"], "false"),
        # layer by layer, launch by launch: their baseline runs so, too
        (["policy=calm"], "false"),
        (["policy=ppd"], "false"),
        (["policy=early_exit_speculative", "policy.exit_layer=1"], "false"),
    ],
)
def test_a_gpu_runs_whole_passes_as_graphs(words: list[str], steps: str) -> None:
    with pretended_gpu():
        point = prepare(
            compose_config(
                ["pair=toy", "dataset=toy", "dataset.limit=2", "runtime.device=cuda", *words]
            )
        )
        models = [model for each in point.decoders.values() for model in each.models]
    load_model.cache_clear()
    assert point.setting["compile"] == steps
    assert {getattr(model, "graphs", False) for model in models} == {steps == "graphs"}


def test_graphs_need_a_gpu(checkpoints: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"CUDA graphs need a GPU, got runtime\.device=cpu; set runtime\.compile=auto",
    ):
        bild_lab.load(str(checkpoints / "llama"), policy="vanilla", device="cpu", compile="graphs")
