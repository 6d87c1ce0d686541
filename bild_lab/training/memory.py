"""How many rows a training holds at once: what a row takes is counted in trial passes, and as many
run together as fit into the free memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import convert_outputs_to_fp32

from bild_lab.engine.models.device import free_bytes
from bild_lab.ranks import launched
from bild_lab.training.distillation import DistillationSpec
from bild_lab.training.train_spec import TrainSpec

if TYPE_CHECKING:
    from bild_lab.training.trainer import Objective

MEMORY_SHARE = 0.9  # of what is free: kernels take buffers, and the allocator cannot use every gap

Bytes = Mapping[torch.device, int]


@dataclass(frozen=True)
class RowsAtOnce:
    """How a step is divided. rows: of a pass in each process. passes: of a step. fits: rows that
    the memory holds; None: they were not counted.
    """

    rows: int
    passes: int
    fits: int | None = None


def room_bytes(device: torch.device) -> int | None:
    """Bytes that a training may still take of a device; None: it is not asked, as on a CPU, which
    divides a step by `train.accumulate` alone.
    """
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return int(MEMORY_SHARE * free_bytes(device))


def rows_at_once(
    objective: Objective, recipe: TrainSpec, device: torch.device, spread: bool
) -> RowsAtOnce:
    """How a step is divided: into as many rows as fit, in at least `train.accumulate` passes of equal size.

    spread: the process uses all devices that it sees. All processes must call this, and all get the
    same answer.
    """
    share = recipe.batch_size // launched().count  # rows of a step in each process
    undivided = RowsAtOnce(share // recipe.accumulate, recipe.accumulate)
    if room_bytes(device) is None:
        return undivided
    devices = [device]
    if spread:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        objective.model.to(device)
    state = state_bytes(objective.model, recipe)
    rooms = {place: room_bytes(place) - state.get(place, 0) for place in devices}
    counted, peaks = counted_peaks(objective, recipe.in_bfloat16, rooms, undivided.rows)
    # what does not grow with the rows is counted as if it did
    fits = min(counted * rooms[place] // max(1, peaks[place]) for place in devices)
    fits = min(launched().gather(max(1, fits)))
    rows = next(rows for rows in range(min(fits, undivided.rows), 0, -1) if share % rows == 0)
    for place in devices:  # the trials are no part of what the training takes
        torch.cuda.reset_peak_memory_stats(place)
    return RowsAtOnce(rows, share // rows, fits)


def state_bytes(model: torch.nn.Module, recipe: TrainSpec) -> Bytes:
    """What stays from pass to pass: gradients, what the optimizer keeps, and of several processes
    the buffers that exchange gradients.

    AdamW keeps two numbers for each trained weight, Adafactor the sums of rows and columns of a
    matrix (Shazeer and Stern, 2018, §3) and one number for each weight of a vector. All are in the
    weights' own precision.
    """
    total: Counter[torch.device] = Counter()
    for weight in model.parameters():
        if not weight.requires_grad:
            continue
        if recipe.optimizer == "adamw":
            numbers = 2 * weight.numel()
        elif weight.ndim < 2:
            numbers = weight.numel()
        else:
            numbers = weight[..., 0].numel() + weight[..., 0, :].numel()
        numbers += weight.numel() * (1 if launched().count == 1 else 2)
        total[weight.device] += numbers * weight.element_size()
    return total


def counted_peaks(
    objective: Objective, bfloat16: bool, rooms: Bytes, most_rows: int
) -> tuple[int, Bytes]:
    """The rows of the largest trial pass, and the most bytes that it took of each device.

    A pass of one row is followed by passes of twice as many while these must fit: twice the rows
    take twice the bytes at most. The more rows, the less counts what does not grow with them.
    Weights and gradients are afterwards as before; the Trainer seeds the generators anew. All
    processes try the same rows.
    """
    devices = list(rooms)
    trial_pass(objective, bfloat16, 1)  # in which libraries take buffers that they keep
    rows, peaks = 1, peak_bytes(partial(trial_pass, objective, bfloat16, 1), devices)
    while all(launched().gather(_twice_fits(peaks, rooms))) and 2 * rows <= most_rows:
        rows *= 2
        peaks = peak_bytes(partial(trial_pass, objective, bfloat16, rows), devices)
    return rows, peaks


def _twice_fits(peaks: Bytes, rooms: Bytes) -> bool:
    return all(2 * peaks[place] <= room for place, room in rooms.items())


def peak_bytes(run: Callable[[], None], devices: Sequence[torch.device]) -> Bytes:
    """The most bytes that were in use at a time in a run, above those before it, by GPU."""
    idle_bytes = {}
    for place in devices:
        torch.cuda.synchronize(place)
        torch.cuda.reset_peak_memory_stats(place)
        idle_bytes[place] = torch.cuda.memory_allocated(place)
    run()
    return {place: torch.cuda.max_memory_allocated(place) - idle_bytes[place] for place in devices}


def trial_pass(objective: Objective, bfloat16: bool, rows: int) -> None:
    """A forward and a backward pass of so many of the longest rows, as the Trainer runs them."""
    model = objective.model.train()
    examples = [objective.longest] * rows
    device = next(model.parameters()).device
    with in_precision(model, bfloat16, device):
        if objective.distillation is not None:
            answers = DistillationSpec(loss=objective.distillation.distillation_spec.loss)
            loss = replace(objective.distillation, distillation_spec=answers)(model, examples, 0)
        else:
            batch = {name: rows.to(device) for name, rows in objective.collate(examples).items()}
            labels = batch.pop("labels")
            soft = {name: batch.pop(name) for name in ("soft_ids", "soft_probs") if name in batch}
            loss = objective.loss(model(**batch, **objective.model_options), labels, **soft)
    loss.backward()
    del loss
    model.zero_grad(set_to_none=True)


@contextmanager
def in_precision(model: torch.nn.Module, bfloat16: bool, device: torch.device) -> Iterator[None]:
    """The model's forward under autocast with outputs in float32, as Accelerate prepares it."""
    if not bfloat16:
        yield
        return
    autocast = torch.autocast(device.type, torch.bfloat16)
    model.forward = convert_outputs_to_fp32(autocast(model.forward))
    try:
        yield
    finally:
        del model.forward


def memory_facts(divided: RowsAtOnce, device: torch.device) -> dict[str, Any]:
    """The entries of metrics.json about rows at once; on a GPU also the most memory that tensors took
    in the training, in GB, of the fullest GPU.
    """
    facts = {"rows_at_once": divided.rows, "passes_a_step": divided.passes}
    if device.type != "cuda":
        return facts
    places = range(torch.cuda.device_count())
    peak = max(torch.cuda.max_memory_allocated(place) for place in places)
    return {**facts, "memory_peak_gb": peak / 1e9}
