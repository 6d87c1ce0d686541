"""Benchmark our loop against Transformers, CTranslate2 and OpenVINO: python scripts/bench.py [SHAPE …] [KEY=VALUE …]

    python scripts/bench.py                      all shapes, up to 12 minutes (or make bench)
    python scripts/bench.py t5_small llama_12    these shapes; after them, runtime.dtype=float32 runtime.threads=1
    python scripts/bench.py pair.target=DIR pair.draft=DIR dataset=multi30k dataset.path=DIR dataset.limit=20

outputs/NAME/bench.json keeps the rows: name=bench unless another is given.
CTranslate2 and OpenVINO take part after `make peers`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.cli import console, escape, output, run_application, stages
from bild_lab.lab.config import DecodingSpec, PairSpec, RuntimeSpec, compose_config, typed

if TYPE_CHECKING:
    import torch

    from bild_lab.lab.measure.bench.arms import Bench, Models

BUSY_PERCENT = 15
ROUNDS = {"t5_large": 5, "llama_12": 9}
ROUNDS_OF_A_PAIR = 5  # of several texts each
DEFAULTS = ["name=bench", "runtime.dtype=bfloat16", "dataset.limit=20", "decoding.max_new_tokens=64"]
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
LEGEND = (
    "Medians of interleaved rounds. to gen., to asst.: how many times as fast as Transformers' generate, and as its "
    "assisted generation. bandwidth: of the speed at which the machine reads the weights. linear: of the speed of "
    "PyTorch's own products. same: the texts of generate."
)
TOY = ["dataset.limit=1"]  # the pair that is measured with the shapes: one sentence


def pair_bench(cfg: DictConfig, name: str, device: torch.device, dtype: torch.dtype, peers: bool) -> Bench:
    """A pair of checkpoints on texts of a dataset."""
    from bild_lab.engine.request import Limits, Request
    from bild_lab.engine.vocabularies import in_vocabulary_of
    from bild_lab.lab.data.examples import DatasetSpec, load_examples
    from bild_lab.lab.measure.bench.arms import peer_methods, prepare

    pair, decoding = typed(PairSpec, cfg.pair, "pair"), typed(DecodingSpec, cfg.decoding, "decoding")
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    examples = load_examples(dataset)
    target = loaded(pair.target, pair.target_revision, device, dtype)
    draft = None if pair.draft is None else loaded(pair.draft, pair.draft_revision, device, dtype)
    for each in (target, draft):
        if each is not None:
            each[0].checkpoint.check()
    if draft is not None:
        draft = tuple(in_vocabulary_of(target[0].checkpoint, each, pair.vocabularies) for each in draft)
    checkpoint = target[0].checkpoint
    requests = []
    for example in examples:
        source = target[0].source(example.prompt, dataset.max_source_tokens)
        requests.append(Request(source, Limits(len(source.prompt), decoding.max_new_tokens, checkpoint.end_tokens)))
    shared = draft is not None and draft[0].checkpoint.vocabulary == checkpoint.vocabulary  # as OpenVINO wants it
    others = peer_methods(checkpoint, draft[0].checkpoint if shared else None, dtype) if peers else {}
    return prepare(name, target, draft, tuple(requests), others)


def loaded(path: str, revision: str | None, device: torch.device, dtype: torch.dtype) -> Models:
    """A checkpoint on both engines of ours that PyTorch runs."""
    from bild_lab.lab.decoding.load import load_model

    native, hf = (load_model(path, revision, str(device), dtype, engine) for engine in ("native", "hf"))
    native.load()
    hf.load()
    return native, hf


def busy_percent() -> float:
    """How much of the machine other processes use while this one waits."""
    return psutil.cpu_percent(interval=2.0)


def table(rows: list[dict]) -> Table:
    """The arms as a table of 80 columns, with a section for each shape."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, caption_justify="left", caption=LEGEND)
    shown.add_column("arm", no_wrap=True)
    for title in ("", "ms/\ntoken", "range", "to\ngen.", "to\nasst.", "band-\nwidth", "linear", "tok/\ncall", "same"):
        shown.add_column(title, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if index == 0 or rows[index - 1]["shape"] != row["shape"]:
            shown.add_section()
            shown.add_row(escape(row["shape"]), style="bold")
        shown.add_row(
            row["arm"],
            SHORT.get(row["precision"], row["precision"]),
            f"{row['ms_per_token']:.2f}" if row["per"] == "emitted token" else f"{row['ms_per_token']:.3f}",
            f"{row['ms_low']:.3g}–{row['ms_high']:.3g}",
            decimals(row["ratio_to_generate"]),
            decimals(row.get("ratio_to_assisted")),
            percent(row["bandwidth_share"]),
            percent(row.get("linear_share")),
            decimals(row.get("tokens_per_target_call")),
            {True: "yes", False: "no", None: "–"}[row.get("same_tokens")],
        )
    return shown


def decimals(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def chosen(words: list[str], overrides: list[str]) -> list[str]:
    """The shapes to measure: those that were named, else all, else `pair` if a pair or a dataset was given.

    Raises UserError for one that there is not.
    """
    from bild_lab.lab.measure.bench.shapes import DRAFTERS, SHAPES

    every = [*SHAPES, "toy", *DRAFTERS]
    if unknown := sorted(set(words) - set(every)):
        raise UserError(f"the shapes are {', '.join(every)}, got {unknown[0]!r}")
    if any(word.startswith(("pair", "dataset", "template")) for word in overrides):
        if words:
            raise UserError(f"give shapes or a pair, got {words[0]!r} and {overrides[0]!r}")
        return ["pair"]
    return [shape for shape in every if shape in words or not words]


def main() -> None:
    overrides = [word for word in sys.argv[1:] if "=" in word]
    stages.enter("loading libraries")
    import torch  # late: it takes seconds to load

    from bild_lab.engine.models.device import resolve_device, resolve_dtype
    from bild_lab.lab.measure.bench.arms import synthetic_benches, why_no_peer_arms
    from bild_lab.lab.measure.bench.costs import drafter_rows, forward_costs
    from bild_lab.lab.measure.bench.rounds import run
    from bild_lab.lab.measure.bench.shapes import DRAFTERS
    from bild_lab.lab.measure.environment import environment

    shapes = chosen([word for word in sys.argv[1:] if "=" not in word], overrides)
    cfg = compose_config([*DEFAULTS, *(overrides if shapes == ["pair"] else [*TOY, *overrides])])
    runtime = typed(RuntimeSpec, cfg.runtime, "runtime")
    device, dtype = resolve_device(runtime.device), resolve_dtype(runtime.dtype)
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    if (lacking := why_no_peer_arms(device, dtype)) is not None:
        console.print(f"no peers: {lacking}")
    peers = lacking is None
    busy = busy_percent()
    if busy > BUSY_PERCENT:
        console.print(f"[bold red]{busy:.0f} % of the machine is busy with something else[/bold red]: timings suffer")
    rows, costs = [], []

    def measure(bench: Bench) -> None:
        stages.enter(f"timing {bench.shape}, {len(bench.methods)} arms")
        rounds = ROUNDS_OF_A_PAIR if shapes == ["pair"] else ROUNDS.get(bench.shape, 11)
        rows.extend(run(bench, rounds, synchronize))
        costs.extend(forward_costs(bench, synchronize))
        bench.close()

    for bench in synthetic_benches(device, dtype, shapes, peers):
        measure(bench)
    for name in ("toy", "pair"):
        if name in shapes:
            measure(pair_bench(cfg, Path(cfg.pair.target).name if name == "pair" else name, device, dtype, peers))
    for name in DRAFTERS:
        if name in shapes:
            rows.extend(drafter_rows(name, device, dtype, synchronize))
    found = {"environment": {**environment(device), "busy_percent": busy}, "rows": rows, "forwards": costs}
    path = Path("outputs", cfg.name, "bench.json")
    write_atomically(path, json.dumps(found, indent=2).encode() + os.linesep.encode())
    output.print(table(rows))
    output.print(f"{path} contains these rows, and the cost of a forward by query and context length")


if __name__ == "__main__":
    run_application(main)
