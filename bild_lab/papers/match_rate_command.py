"""What scripts/match_rates.py does: settings checked, match rates measured, table and figure written."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bild_lab.engine.models.device import resolve_device, resolve_dtype
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError, require_model_path, require_whole
from bild_lab.lab.cli import escape, output, progress
from bild_lab.lab.config import typed
from bild_lab.lab.data.examples import DatasetSpec, load_examples
from bild_lab.lab.decoding.load import load_model
from bild_lab.lab.formatting import short_name
from bild_lab.lab.hashing import data_hash, file_hash
from bild_lab.lab.measure.environment import environment
from bild_lab.lab.point import sweep_folder
from bild_lab.lab.results.records import require_writable
from bild_lab.papers.match_rate_figure import draw_match_rates
from bild_lab.papers.match_rates import CSV, METRICS, MatchRates, MatchSpec, layers_of, measure_match_rates, write_rates
from bild_lab.training.output_files import require_same_settings, write_json, writing

FIGURE = "match_rates.png"
MOVED = frozenset({"model.path", "dataset.path"})  # may differ: hashes of weights and data are compared


def match_rates(cfg: DictConfig) -> None:
    """Measure match rates, and write table and figure. Raises UserError for bad input."""
    folder = sweep_folder(cfg)
    require_writable(folder)
    node = {key: cfg[key] for key in ("layers", "top_k", "heads", "positions")}
    spec = typed(MatchSpec, OmegaConf.create(node), "the configuration")
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    require_whole("decoding.max_new_tokens", cfg.decoding.max_new_tokens, 1)
    examples = load_examples(dataset)
    target = target_of(cfg)
    layers = layers_of(spec, target)
    settings = {
        **settings_of(spec, layers, target, cfg.decoding.max_new_tokens),
        **{f"dataset.{key}": value for key, value in asdict(dataset).items()},
        "data": data_hash(examples),
    }
    require_same_rates(folder, settings)
    requests = [request_for(target, one.prompt, dataset, cfg.decoding.max_new_tokens) for one in examples]
    with progress() as bar:
        task = bar.add_task("texts", total=len(requests))
        found = measure_match_rates(target, requests, spec, lambda: bar.advance(task))
    write(found, folder, settings, target)
    output.print(table_of(found))
    output.print(escape(f"{folder}: {CSV}, {FIGURE} and {METRICS}; {found.tokens:,} tokens of {found.texts:,} texts"))


def target_of(cfg: DictConfig) -> LoadedModel:
    """The model whose layers are measured. No weights are read."""
    require_model_path("model.path", cfg.model.path)
    if cfg.runtime.threads is not None:
        require_whole("runtime.threads", cfg.runtime.threads, 1)
        torch.set_num_threads(cfg.runtime.threads)
    device, dtype = str(resolve_device(cfg.runtime.device)), resolve_dtype(cfg.runtime.dtype)
    target = load_model(cfg.model.path, cfg.model.revision, device, dtype, "auto")
    target.checkpoint.check()
    target.require_layers("measuring match rates")
    return target


def request_for(target: LoadedModel, prompt: str, dataset: DatasetSpec, max_new_tokens: int) -> Request:
    """One text to decode greedily."""
    source = target.source(prompt, dataset.max_source_tokens)
    return Request(source, Limits(len(source.prompt), max_new_tokens, target.checkpoint.end_tokens))


def settings_of(spec: MatchSpec, layers: tuple[int, ...], target: LoadedModel, max_new_tokens: int) -> dict[str, Any]:
    """Everything except the data that decides the numbers, by the dotted keys of the configuration."""
    return {
        "model.path": target.checkpoint.path,
        "model.weights": target.checkpoint.fingerprint,
        "layers": layers,
        "top_k": spec.top_k,
        "heads": spec.heads,
        "heads' files": [file_hash(heads) for heads in spec.heads],
        "positions": spec.positions,
        "decoding.max_new_tokens": max_new_tokens,
        "runtime.dtype": str(target.dtype).removeprefix("torch."),
    }


def require_same_rates(folder: Path, settings: dict[str, Any]) -> None:
    """Raise UserError if the folder contains anything else than match rates of these settings."""
    remedy = "choose another name=NAME, or remove the folder"
    if not (folder / METRICS).is_file():
        if (folder / CSV).exists():
            raise UserError(f"{folder / CSV} exists, but no {METRICS} says what it contains; {remedy}")
        return
    try:
        held = dict(json.loads((folder / METRICS).read_text())["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / METRICS} does not describe match rates; {remedy}") from error
    require_same_settings(folder, "match rates", held, settings, MOVED)


def write(found: MatchRates, folder: Path, settings: dict[str, Any], target: LoadedModel) -> None:
    """Write the table and the figure, then the file that describes them."""
    metrics = {
        "settings": settings,
        "texts": found.texts,
        "tokens": found.tokens,
        "totals": found.totals(),
        "environment": environment(target.device),
    }
    what = f"{short_name(target.checkpoint.path)}, {settings['dataset.name']}: {found.tokens:,} tokens"
    with writing(folder, "the match rates"):
        write_rates(folder, found.rows())
        draw_match_rates(found, folder / FIGURE, f"{what} of {found.texts:,} greedy texts; bars: 95 % over texts")
        write_json(folder / METRICS, metrics)


def table_of(found: MatchRates) -> Table:
    """Rates over all positions, with a row for each kind of heads and each layer."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    table.add_column("heads", overflow="fold")
    table.add_column("layer", justify="right", no_wrap=True)
    for top_k in found.top_k:
        table.add_column(f"k = {top_k}, %", justify="right", no_wrap=True)
    totals, width = found.totals(), len(found.top_k)
    for start in range(0, len(totals), width):
        line = totals[start : start + width]
        cells = [
            "{:.1f} \\[{:.1f}, {:.1f}]".format(*(100 * row[key] for key in ("rate", "low", "high"))) for row in line
        ]
        table.add_row(escape(line[0]["heads"]), str(line[0]["layer"]), *cells)
    table.caption = "Final tokens among the first k choices after a layer, with 95 % intervals over texts."
    return table
