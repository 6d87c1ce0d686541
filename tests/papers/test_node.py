"""Every item of the papers on a pretended node of eight GPUs with 80 GB: each step has GPUs that hold
its models, and its command line is taken by Accelerate and composes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import get_balanced_memory
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from bild_lab.engine.models import device
from bild_lab.engine.models.hf.layer_control import decoder_layers
from bild_lab.papers.published import published_names
from bild_lab.papers.runs import step_processes
from bild_lab.papers.runs.machine import Placement, machine_of, placement_of
from bild_lab.papers.runs.needs import needs
from bild_lab.papers.runs.paper_runs import (
    RunSetting,
    application_of,
    composed,
    found_configuration,
    hub,
    replaced_words,
)
from bild_lab.papers.runs.step_runs import TO_DO, plan
from bild_lab.papers.runs.steps import Step, StepKind
from docs.hooks.papers import paper_steps
from tests.papers.test_paper_runs import setting
from tests.pretended import Node, pretended_node

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
DTYPES["auto"] = torch.float32
UNMADE = "nothing writes outputs/bita_falcon_40b"  # no adapter can be trained for Falcon


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "consented")
    monkeypatch.setattr(device, "usable_cores", lambda: 64)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pretended_node() as node:
        yield node


@cache
def outline(name: str) -> nn.Module | None:
    """A published model without values; None for one whose configuration is not known."""
    card = hub()["models"].get(name)
    if card is None or card["outline"] is None:
        return None
    values = dict(hub()["outlines"][card["outline"]])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


def whole(setting: RunSetting, placement: Placement) -> list[Tensor]:
    """A target's weights where Accelerate puts its parts, on the GPUs that the step sees."""
    target, dtype = outline(setting.target), DTYPES[setting.dtype]
    places = {"": 0}
    if placement.manner == "spread":
        seen = {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(placement.gpus)}
        options = {"no_split_module_classes": list(target._no_split_modules), "dtype": dtype}
        room = get_balanced_memory(target, seen, **options)
        places = infer_auto_device_map(target, room, **options)
        assert all(isinstance(gpu, int) for gpu in places.values()), f"off the GPUs: {places}"
    held = []
    for name, weight in target.named_parameters():
        part = max((part for part in places if name.startswith(part)), key=len)
        held.append(torch.empty(weight.shape, dtype=dtype, device=f"cuda:{places[part]}"))
    return held


def sharded(setting: RunSetting, placement: Placement) -> list[Tensor]:
    """What the first process holds: its part of every decoder layer, one gathered layer, the rest."""
    target, dtype = outline(setting.target), DTYPES[setting.dtype]
    layers = decoder_layers(target)
    inside = {id(weight) for layer in layers for weight in layer.parameters()}
    counts = [weight.numel() for weight in target.parameters() if id(weight) not in inside]
    counts += [weight.numel() for weight in layers[0].parameters()]
    for layer in layers:
        counts += [-(-weight.numel() // placement.processes) for weight in layer.parameters()]
    return [torch.empty(count, dtype=dtype, device="cuda:0") for count in counts]


def models_of(step: Step, placement: Placement) -> list[Tensor]:
    """The weights of a step, and the caches of a text, on the GPUs that it sees."""
    held: list[Tensor] = []
    for asked in step.settings[:1]:
        if outline(asked.target) is not None:
            held += (sharded if placement.manner == "sharded" else whole)(asked, placement)
        for name in filter(outline, asked.drafts):
            held += whole(replace(asked, target=name), Placement())
        gigabytes = (needs(asked, "a100").row_gb or 0.0) / max(1, placement.gpus)
        held.append(torch.empty(int(gigabytes * 1e9), dtype=torch.uint8, device="cuda:0"))
    return held


def require_command(step: Step, placement: Placement) -> None:
    """A step's command line is read by Accelerate, and its configuration composes and is divisible."""
    words = replaced_words(tuple(shlex.split(step.command)), placement.overrides)
    if placement.processes == 1 and not placement.overrides:
        return
    started: list[list[str]] = []
    with patch.object(
        step_processes.subprocess, "Popen", lambda command, **_: started.append(command)
    ):
        step_processes.start(step, placement, {})
    if placement.processes > 1:
        read = launch_command_parser().parse_args(started[0][3:])
        assert (read.multi_gpu, read.num_processes) == (True, placement.processes)
        assert (read.module, read.training_script) == (True, "bild_lab")
        assert read.training_script_args == [Path(words[1]).stem, *words[2:]]
    cfg = composed(application_of(words[1]), tuple(words[2:]))
    if step.work is not StepKind.ANSWERING:
        rows = cfg.train.batch_size // (cfg.train.accumulate or 1)
        assert rows % placement.processes == 0
    if "runtime" in cfg:
        assert (OmegaConf.select(cfg, "runtime.device_map") is None) == (
            placement.manner != "spread"
        )
    if "model" in cfg and "sharded" in cfg.model:
        assert cfg.model.sharded == (placement.manner == "sharded")


@pytest.mark.slow
@pytest.mark.parametrize("item", published_names())
def test_every_step_of_an_item_has_gpus_that_hold_its_models(item: str, node: Node) -> None:
    machine = machine_of(None, tries=False)
    assert (machine.gpu, machine.gpus, machine.devices[7]) == ("a100", 8, "7")
    steps = paper_steps(item)
    held: dict[Any, bool] = {}
    for step, status in plan(steps, machine):
        if status.startswith(UNMADE):
            continue
        assert status == TO_DO, f"{step.command}: {status}"
        placement = placement_of(step, machine)
        assert placement.gpus <= 8
        with found_configuration():
            require_command(step, placement)
        key = (
            placement,
            [(asked.target, asked.drafts, asked.dtype) for asked in step.settings[:1]],
        )
        if str(key) not in held:
            with node.tensors():
                held[str(key)] = bool(models_of(step, placement))
            assert not any(node.held), "something is left"


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_model_on_fewer_gpus_than_a_step_takes_runs_out_of_memory(gpus: int, node: Node) -> None:
    """Llama-2-70B and a drafter of 7 billion weights take three GPUs; on two Accelerate fills both."""
    target, drafter = (f"meta-llama/Llama-2-{size}b-chat-hf" for size in (70, 7))
    spread = setting(target=target, drafts=(drafter,), dtype="float16", spread=True, points=1)
    step = Step("python run.py name=x", "x", (), (), settings=(spread,))
    placement = placement_of(step, machine_of(None, tries=False))
    assert str(placement) == "3 GPUs, spread"
    with node.tensors():
        assert models_of(step, placement)
    with node.tensors(), pytest.raises((torch.OutOfMemoryError, AssertionError)):
        models_of(step, replace(placement, gpus=gpus))
