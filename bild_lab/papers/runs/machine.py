"""The machine that a paper's steps run on: its GPUs, how many of them a step takes, and why a step
cannot run there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bild_lab.errors import UserError, require_choice, require_whole
from bild_lab.papers.runs.needs import ASSUMED_GPU, GPUS, Needs, needs
from bild_lab.papers.runs.repositories import blocked_by_repositories
from bild_lab.papers.runs.steps import Step, StepKind

SPREAD, SHARDED = "spread", "sharded"  # manners in which several GPUs hold one copy of a target
MOST_SPREAD = 64  # GPUs over which a message says that a model can be spread


@dataclass(frozen=True)
class Machine:
    """Where steps run."""

    gpu: str  # of needs.GPUS, for estimates
    room_gb: float | None  # of its memory; None: there is no GPU here
    gated: bool  # there is a login, which repositories want that ask for consent
    tries: bool = False  # steps also start where they should not fit
    # how many, which is how many processes run side by side; without a GPU, processes on the CPU
    gpus: int = 1
    assumption: str = ""  # that the estimates are of another GPU than the one here; or empty
    few_cores: str = ""  # that the CPU has few; or empty
    # as CUDA_VISIBLE_DEVICES names those that are here; empty where there are none
    devices: tuple[str, ...] = ()

    @property
    def warning(self) -> str:
        return "\n".join(filter(None, (self.assumption, self.few_cores)))


@dataclass(frozen=True)
class Placement:
    """What a step takes of a machine. gpus: 0 where it runs no model. processes: that Accelerate
    starts for it; 1: it is a process of its own. overrides: KEY=VALUE that its command gets there.
    manner: how it uses several GPUs.
    """

    gpus: int = 1
    processes: int = 1
    overrides: tuple[str, ...] = ()
    manner: str = ""

    @property
    def spread_over(self) -> int:
        """The GPUs that hold the target together."""
        return self.gpus if self.manner in (SPREAD, SHARDED) else 1

    def __str__(self) -> str:
        if self.gpus == 0:
            return "no GPU"
        count = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return f"{count}, {self.manner}" if self.manner else count


def machine_of(
    gpu: str | None, tries: bool, gpus: int | None = None, processes: int | None = None
) -> Machine:
    """The machine with so many GPUs of this name; None: the one that is here.

    gpus: of the named machine, by default one. processes: how many of the GPUs steps may take; None:
    all, and one process on a machine without a GPU. Raises UserError for an unknown GPU, and for
    more processes than GPUs.
    """
    import torch  # late: it takes seconds to load
    from huggingface_hub import get_token

    from bild_lab.engine.models.device import few_cores, visible_gpus

    if processes is not None:
        require_whole("processes", processes, 1)
    gated = get_token() is not None
    devices = visible_gpus() if torch.cuda.is_available() else ()
    if gpu is not None:
        require_choice("gpu", gpu, GPUS)
        count = _count(processes, 1 if gpus is None else gpus, f"gpus={gpus or 1}")
        return Machine(gpu, GPUS[gpu][0], gated, tries, count, devices=devices[:count])
    if gpus is not None:
        raise UserError(
            "gpus=N counts the GPUs of a machine that is not here, so gpu=NAME names them; here"
            " processes=N says how many are taken"
        )
    assumption = (
        f"times are estimated for an {ASSUMED_GPU}; gpu=NAME takes another of {', '.join(GPUS)}"
    )
    if not devices:
        count = processes or 1
        no_gpu = f"there is no GPU here, so {assumption}"
        return Machine(ASSUMED_GPU, None, gated, tries, count, no_gpu, few_cores(count))
    count = _count(processes, len(devices), f"{len(devices)} visible")
    device = torch.cuda.get_device_properties(0)
    name = known_gpu(device.name)
    unlisted = f"the GPU here, {device.name}, is not in the list, so {assumption}"
    return Machine(
        name or ASSUMED_GPU,
        device.total_memory / 1e9,
        gated,
        tries,
        count,
        unlisted if name is None else "",
        few_cores(count),
        devices[:count],
    )


def _count(processes: int | None, gpus: int, words: str) -> int:
    """How many GPUs steps may take. words: which there are, for a message."""
    require_whole("gpus", gpus, 1)
    if processes is not None and processes > gpus:
        raise UserError(
            f"each process takes a GPU of its own, got processes={processes} with {words}; leave"
            " processes out to take all"
        )
    return processes or gpus


def known_gpu(name: str) -> str | None:
    """Which of `GPUS` this is, by the name that CUDA gives it; None for others, and for a part of
    one or a laptop's.
    """
    words = re.sub(r"\brtx (?=\d)", "rtx", name.lower()).replace("-", " ").split()
    if "mig" in words or "laptop" in words:
        return None
    return next((gpu for gpu in GPUS if gpu in words), None)


def needs_of(step: Step, machine: Machine) -> list[Needs]:
    """What each setting of a step needs on this machine."""
    return [needs(setting, machine.gpu, machine.gpus, machine.room_gb) for setting in step.settings]


def placement_of(step: Step, machine: Machine) -> Placement | None:
    """What a step takes of this machine; None where its models do not fit.

    A training and a calibration take every GPU, a training as many as divide its rows evenly. A
    model that is too large for one GPU is cut among the processes of a training beside it, and
    spread over some where it decodes or answers. Toys take one GPU.
    """
    if step.work is StepKind.NONE:
        return Placement(gpus=0)
    place = {StepKind.DECODING: _place_decoding, StepKind.ANSWERING: _place_answering}
    placement = place.get(step.work, _place_training)(step, machine)
    if placement is None and machine.tries:
        return Placement()
    return placement


def _place_decoding(step: Step, machine: Machine) -> Placement | None:
    step_needs = needs_of(step, machine)
    fewest = fewest_gpus(step_needs, machine)
    if fewest == 1:
        return Placement()
    if not _is_spread(step_needs):
        return None
    if fewest is not None:
        return Placement(_spread_gpus(step_needs, machine, fewest), manner=SPREAD)
    return Placement(machine.gpus, manner=SPREAD) if machine.tries else None


def _place_answering(step: Step, machine: Machine) -> Placement | None:
    step_needs = needs_of(step, machine)
    fewest = fewest_gpus(step_needs, machine)
    mapped = () if _is_spread(step_needs) else ("runtime.device_map=auto",)
    if fewest is not None:
        count = _spread_gpus(step_needs, machine, fewest)
        if count > 1:  # it must, or takes fewer GPU-hours, as more rows fit together
            return Placement(count, 1, mapped, SPREAD)
    if fewest == 1:
        return _divided(step_needs, machine.gpus, "questions divided")
    return Placement(machine.gpus, 1, mapped, SPREAD) if machine.tries else None


def _place_training(step: Step, machine: Machine) -> Placement | None:
    step_needs = needs_of(step, machine)
    fewest = fewest_gpus(step_needs, machine)
    processes = max(count for count in range(1, machine.gpus + 1) if step.rows % count == 0)
    if fewest == 1:
        return _divided(step_needs, processes, "data parallel")
    fits = fewest is not None and fewest <= processes
    if step.work is StepKind.TRAINING_BESIDE_FROZEN and processes > 1 and (fits or machine.tries):
        overrides = (*_whole_target(step_needs), "model.sharded=true")
        return Placement(processes, processes, overrides, SHARDED)
    return None


def _divided(step_needs: Sequence[Needs], processes: int, manner: str) -> Placement:
    """A step whose models fit on one GPU, its rows divided among processes with a GPU each; on one
    GPU if nothing is known of its models.
    """
    if processes == 1 or not has_known_sizes(step_needs):
        return Placement()
    return Placement(processes, processes, _whole_target(step_needs), manner)


def _whole_target(step_needs: Sequence[Needs]) -> tuple[str, ...]:
    """Overrides that put the whole target on the GPU of each process."""
    return ("runtime.device_map=null",) if _is_spread(step_needs) else ()


def _is_spread(step_needs: Sequence[Needs]) -> bool:
    """Whether the step's configurations themselves spread the target over several GPUs."""
    return bool(step_needs) and all(need.setting.spread for need in step_needs)


def _spread_gpus(step_needs: Sequence[Needs], machine: Machine, fewest: int) -> int:
    """Over how many GPUs a step's target is spread: as its hours are estimated, if the machine has
    so many, as more GPUs may hold more rows at once.
    """
    if machine.room_gb is None:  # processes of a CPU
        return fewest
    estimated = max((need.gpus for need in step_needs), default=1)
    return estimated if fewest <= estimated <= machine.gpus else fewest


def fewest_gpus(step_needs: Sequence[Needs], machine: Machine) -> int | None:
    """Over how many of the machine's GPUs the models of a step fit; None: over none of its numbers."""
    if machine.room_gb is None:  # nothing is known of the memory
        return 1
    return next(
        (
            count
            for count in range(1, machine.gpus + 1)
            if all(need.memory_on(count) <= machine.room_gb for need in step_needs)
        ),
        None,
    )


def describe_placement(step: Step, machine: Machine) -> str:
    """What a step takes, in a few words: `8 GPUs, data parallel`; empty where it does not fit.
    Toys take the CPU of a machine without a GPU.
    """
    placement = placement_of(step, machine)
    if placement is None:
        return ""
    if machine.room_gb is None and placement.gpus and not has_known_sizes(needs_of(step, machine)):
        return "CPU"
    return str(placement)


def has_known_sizes(step_needs: Sequence[Needs]) -> bool:
    """Whether models are listed, so that memory and times can be estimated; toys are not."""
    return any(need.weights_gb for need in step_needs)


def blocked_by(step: Step, machine: Machine) -> str | None:
    """Why a step cannot run on this machine; None if it can."""
    if step.missing:
        return (
            f"nothing writes outputs/{step.missing[0]}: put it there, or add its command to"
            " bild_lab/papers/runs/recipes.py"
        )
    for setting in step.settings:
        if setting.target is None:
            return (
                "it takes models of your own: give pair.target=DIR, and data in place of"
                f" {setting.dataset['name']}"
            )
    reason = blocked_by_repositories(step.repositories, machine.gated, machine.tries)
    if reason is not None:
        return reason
    step_needs = needs_of(step, machine)
    if machine.tries or not has_known_sizes(step_needs):
        return None
    if machine.room_gb is None:
        return "no GPU here; gpu=NAME says what one needs, force=true tries"
    return None if placement_of(step, machine) else _too_large(step, step_needs, machine)


def _too_large(step: Step, step_needs: Sequence[Needs], machine: Machine) -> str:
    """A sentence that a step's models do not fit, and what would help."""
    largest = max(need.memory_gb for need in step_needs)
    spread = all(need.setting.spread for need in step_needs)
    if step.work is StepKind.TRAINING:
        remedy = "a training of all weights needs a larger GPU"
    elif step.work is StepKind.DECODING and not spread:
        remedy = "runtime.device_map=auto spreads a model"
    elif (fewest := fewest_gpus(step_needs, replace(machine, gpus=MOST_SPREAD))) is not None:
        remedy = f"{fewest} such GPUs hold it"
    else:
        remedy = "what is not weights fits into none, so lower dataset.max_source_tokens"
    return (
        f"memory: {largest:.0f} GB, here are {machine.gpus} × {machine.room_gb:.0f} GB;"
        f" {remedy}, force=true tries"
    )
