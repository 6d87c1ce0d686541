"""The machine that a paper's steps run on: its GPU, and why a step cannot run there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bild_lab.errors import require_choice
from bild_lab.papers.needs import ASSUMED_GPU, GPUS, needs
from bild_lab.papers.paper_runs import hub
from bild_lab.papers.steps import Step


@dataclass(frozen=True)
class Machine:
    """Where steps run. gpu: of needs.GPUS, for estimates. room_gb: of its memory; None: there
    is no GPU here.

    gpus: how many. tries: steps also start where they should not fit. gated: ids that want a login
    may be read.
    warning: that the estimates are of another GPU than the one here; empty if they are not.
    """

    gpu: str
    room_gb: float | None
    gated: bool
    tries: bool = False
    gpus: int = 1
    warning: str = ""


def machine_of(gpu: str | None, tries: bool) -> Machine:
    """The machine with the GPU of this name; None: the one that is here.

    Raises UserError for an unknown one.
    """
    import torch  # late: it takes seconds to load
    from huggingface_hub import get_token

    gated = get_token() is not None
    if gpu is not None:
        require_choice("gpu", gpu, GPUS)
        return Machine(gpu, GPUS[gpu][0], gated, tries)
    assumption = (
        f"times are estimated for an {ASSUMED_GPU}; gpu=NAME takes another of {', '.join(GPUS)}"
    )
    if not torch.cuda.is_available():
        warning = f"there is no GPU here, so {assumption}"
        return Machine(ASSUMED_GPU, None, gated, tries, warning=warning)
    device, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    name = known_gpu(device.name)
    if name is None:
        warning = f"the GPU here, {device.name}, is not in the list, so {assumption}"
        return Machine(ASSUMED_GPU, device.total_memory / 1e9, gated, tries, count, warning)
    return Machine(name, device.total_memory / 1e9, gated, tries, count)


def known_gpu(name: str) -> str | None:
    """Which of `GPUS` this is, by the name that CUDA gives it; None for others, and for a part of
    one or a laptop's.
    """
    words = re.sub(r"\brtx (?=\d)", "rtx", name.lower()).replace("-", " ").split()
    if "mig" in words or "laptop" in words:
        return None
    return next((gpu for gpu in GPUS if gpu in words), None)


def blocked_by(step: Step, machine: Machine) -> str | None:
    """Why a step cannot run on this machine; None if it can."""
    if step.missing:
        return (
            f"nothing writes outputs/{step.missing[0]}: put it there, or add its command to"
            " bild_lab/papers/recipes.py"
        )
    for setting in step.settings:
        if setting.target is None:
            return (
                "it takes models of your own: give pair.target=DIR, and data in place of"
                f" {setting.dataset['name']}"
            )
    step_needs = [needs(setting, machine.gpu) for setting in step.settings]
    if machine.tries or not any(need.weights_gb for need in step_needs):
        return None
    cards = {**hub()["models"], **hub()["datasets"]}
    downloads = {name for need in step_needs for name in need.download_gb}
    gated = sorted(name for name in downloads if cards[name].get("gated"))
    if gated and not machine.gated:
        return f"gated: accept the terms on the page of {gated[0]}, then hf auth login"
    if machine.room_gb is None:
        return "no GPU here; gpu=NAME says what one needs, force=true tries"
    for need in step_needs:
        room_gb = machine.room_gb * (machine.gpus if need.setting.spread else 1)
        if need.memory_gb > room_gb:
            return (
                f"memory: {need.memory_gb:.0f} GB, here are"
                f" {machine.gpus} × {machine.room_gb:.0f} GB; runtime.device_map=auto spreads a"
                " model, force=true tries"
            )
    return None
