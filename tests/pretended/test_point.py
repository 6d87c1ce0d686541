"""A whole point on the pretended GPU: loading, warm-up, timing, tracing, certificate and result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bild_lab
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point import prepare as points
from bild_lab.lab.point.load import load_model
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.store.records import Sweep
from tests.pretended import pretended_gpu

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
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"de": prompt, "en": "w3"}) + "\n" for prompt in PROMPTS))
    words = [
        f"pair.target={pair[0]}",
        f"pair.draft={pair[1]}",
        "dataset=multi30k",
        f"dataset.path={file}",
    ]
    words += [
        f"decoding.max_new_tokens={NEW_TOKENS}",
        "policy=bild",
        "policy.fallback=0.3",
        "policy.rollback=0.5",
    ]
    words += [
        "runtime.device=cuda",
        "runtime.dtype=float64",
        f"runtime.compile={compiles}",
        "measure.certify=true",
    ]
    words += ["measure.repeats=1", "measure.warmup=1", "measure.traced_examples=1"]
    points.cached_examples.cache_clear()
    with pretended_gpu() as machine:
        result = run_point(
            prepare(compose_config(words)),
            Sweep(tmp_path / "sweep"),
            setup_s=0.0,
            stage=lambda name: None,
        )
        assert torch.cuda.is_available() and machine.launched
    load_model.cache_clear()  # its models are on a GPU that is gone
    assert (result.setting.device, result.environment["gpu"]) == ("cuda", "Pretended GPU")
    assert result.setting.hardware.startswith("Pretended GPU, ")
    assert result.certificate.equal == len(PROMPTS)
    assert [list(one.token_ids) for one in read_examples(result.folder)] == expected


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
