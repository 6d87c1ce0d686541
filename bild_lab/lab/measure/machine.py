"""Two numbers that explain why a method gains more on one machine than on another.

How fast the device reads its memory, as a token of the target alone waits for its weights, and what
it costs to check eight rows rather than one, as a draft does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from bild_lab.engine.models.device import wait_for
from bild_lab.engine.protocols import External
from bild_lab.engine.request import Source
from bild_lab.engine.session import LoadedModel
from bild_lab.lab.point.decoder import Decoder

BUFFER_BYTES = 2**29  # larger than caches
GPU_PASSES = 16  # over the buffer in one timing, so that the host's wait is a small part of it
DRAFT_ROWS = 8
FEWEST_RUNS, MOST_RUNS = 5, 41  # of which the first two do not count
RUNS_S = 0.1  # how long forwards of one kind are repeated, unless these are fewer than FEWEST_RUNS


def median_s(work: Callable[[], Any], synchronize: Callable[[], None], runs: int = 7) -> float:
    """The median seconds of so many runs, without the first two."""
    times = []
    for _ in range(runs):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def read_gb_per_s(device: torch.device, synchronize: Callable[[], None], runs: int = 7) -> float:
    """The bandwidth at which this device reads its memory with as many threads as PyTorch has."""
    buffer = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
    passes = GPU_PASSES if device.type == "cuda" else 1

    def read() -> torch.Tensor:
        sums = [buffer.sum() for _ in range(passes)]
        return sums[-1]

    return passes * BUFFER_BYTES / median_s(read, synchronize, runs) / 1e9


@lru_cache
def _bandwidth(device: torch.device, threads: int) -> float:
    """`read_gb_per_s`, measured once in a process. threads: that PyTorch has."""
    return round(read_gb_per_s(device, partial(wait_for, device), FEWEST_RUNS), 1)


def bandwidth_facts(decoder: Decoder) -> Mapping[str, float]:
    """The bandwidth of the device that a decoder runs on, in 10⁹ bytes a second, for the environment
    of a result.
    """
    return {"read_gb_per_s": _bandwidth(decoder.target.device, torch.get_num_threads())}


# of the models of this process
_costs: dict[tuple[str, ...], float] = {}


def row_cost_facts(decoder: Decoder, source: Source) -> Mapping[str, float]:
    """What a forward of the target over eight rows takes, in tokens, for the environment of a result.

    decoder: of the baseline, whose tokens count. source: a text to be decoded. Nothing where
    another engine runs the target, and where each number of rows would be compiled.
    """
    if isinstance(decoder.method, External) or not decoder.running:
        return {}
    model = decoder.running[0]
    if model.compiled:
        return {}
    key = (
        model.checkpoint.fingerprint,
        model.engine,
        *map(str, (model.dtype, model.bits, model.device, torch.get_num_threads())),
    )
    if key not in _costs:
        _costs[key] = round(rows_over_one(model, source, DRAFT_ROWS, decoder.synchronize), 3)
    return {"eight_rows_cost": _costs[key]}


@torch.inference_mode()
def rows_over_one(
    model: LoadedModel, source: Source, rows: int, synchronize: Callable[[], None]
) -> float:
    """The time of a forward of so many rows after a text, over that of one row.

    The text is the source's prompt without its last tokens, so that no row lies beyond the model's
    positions.
    """
    beginning = source.prompt[: max(1, len(source.prompt) - rows)]
    token = source.prompt[-1]
    session = model.start(replace(source, prompt=beginning, processors=None), 1 + rows)
    session.extend([token])  # with the prompt
    context = session.length

    def forward(count: int) -> None:
        session.rollback(context)
        session.extend([token] * count)

    one_s = median_s(lambda: forward(1), synchronize, FEWEST_RUNS)
    runs = min(MOST_RUNS, max(FEWEST_RUNS, round(RUNS_S / one_s)))
    if runs > FEWEST_RUNS:
        one_s = median_s(lambda: forward(1), synchronize, runs)
    return median_s(lambda: forward(rows), synchronize, runs) / one_s
