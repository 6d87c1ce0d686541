"""Benchmark our loop against Transformers: python scripts/bench.py [SHAPE ...] (or make bench, 5 minutes)"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

import bild_lab
from bild_lab.engine.models.checkpoint import resolve_device
from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.cli import console, output, run_application
from bild_lab.lab.load import load_model
from bild_lab.lab.measure.bench import SHAPES, Bench, drafting_costs, forward_costs, prepare, run, synthetic_benches
from bild_lab.lab.measure.environment import environment

BUSY_PERCENT = 15
REPEATS = {"t5_large": 7, "llama_12": 9}


def toy_bench(device: torch.device) -> Bench:
    """The trained toy pair on one sentence of its corpus."""
    models = {
        (name, engine): load_model(f"toy:{name}", None, str(device), torch.bfloat16, engine)
        for name in ("large", "small")
        for engine in ("native", "hf")
    }
    decoder = bild_lab.load("toy:large", policy="vanilla", dtype="bfloat16", device=str(device))
    request = decoder.request("Vor einem Jahr haben die Mütter den Hahn zurückgegeben, um einen Park zu verlassen.", 64)
    drafts = (models["small", "native"], models["small", "hf"])
    return prepare("toy", models["large", "native"], models["large", "hf"], drafts, request)


def busy_percent() -> float:
    """How much of the machine other processes use while this one waits."""
    return psutil.cpu_percent(interval=2.0)


def table(rows: list[dict]) -> Table:
    """The arms as a table, with a section for each shape."""
    shown = Table(title="milliseconds a token, medians of interleaved runs")
    for title in ("shape", "arm"):
        shown.add_column(title, no_wrap=True)
    for title in (
        "ms/token",
        "range",
        "ratio to\ngenerate",
        "ratio to\nassisted",
        "bandwidth\nshare",
        "linear\nshare",
        "tokens/\ncall",
    ):
        shown.add_column(title, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if index and rows[index - 1]["shape"] != row["shape"]:
            shown.add_section()
        calls = row["tokens_per_target_call"]
        shown.add_row(
            row["shape"],
            row["arm"],
            f"{row['ms_per_token']:.2f}",
            f"{row['ms_low']:.2f}–{row['ms_high']:.2f}",
            f"{row['ratio_to_generate']:.2f}",
            "–" if row["ratio_to_assisted"] is None else f"{row['ratio_to_assisted']:.2f}",
            "–" if row["bandwidth_share"] is None else f"{100 * row['bandwidth_share']:.0f} %",
            f"{100 * row['linear_share']:.0f} %",
            "–" if calls is None else f"{calls:.2f}",
        )
    return shown


def chosen(words: list[str]) -> list[str]:
    """The shapes to measure: those that were named, else all. Raises UserError for one that there is not."""
    every = [*SHAPES, "toy"]
    if unknown := sorted(set(words) - set(every)):
        raise UserError(f"the shapes are {', '.join(every)}, got {unknown[0]!r}")
    return [shape for shape in every if shape in words or not words]


def main() -> None:
    shapes = chosen(sys.argv[1:])
    device = resolve_device("auto")
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    busy = busy_percent()
    if busy > BUSY_PERCENT:
        console.print(f"[bold red]{busy:.0f} % of the machine is busy with something else[/bold red]: timings suffer")
    rows, costs, drafting = [], [], []

    def measure(bench: Bench) -> None:
        console.print(f"{bench.shape} …")
        rows.extend(run(bench, REPEATS.get(bench.shape, 11), synchronize))
        costs.extend(forward_costs(bench, synchronize))
        drafting.extend(drafting_costs(bench, synchronize))

    for bench in synthetic_benches(device, torch.bfloat16, shapes):
        measure(bench)
    if "toy" in shapes:
        measure(toy_bench(device))
    found = {
        "environment": {**environment(device), "busy_percent": busy},
        "rows": rows,
        "forwards": costs,
        "drafting": drafting,
    }
    path = Path("outputs/bench/bench.json")
    write_atomically(path, json.dumps(found, indent=2).encode() + os.linesep.encode())
    Console(width=120).print(table(rows))
    for each in drafting:
        output.print(f"{each['shape']} drafts in {each['ms_per_drafted_token']:.3f} ms a token, {each['arm']}")
    output.print(f"{path} contains these rows, and the cost of a forward by query and context length")


if __name__ == "__main__":
    run_application(main)
