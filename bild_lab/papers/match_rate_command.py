"""What scripts/match_rates.py does: settings checked, match rates measured, table and figure written."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.models.device import resolve_device, resolve_dtype
from bild_lab.engine.ppd.pipeline import SHARED
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError, require_model_path, require_whole
from bild_lab.lab.cli import escape, output, progress
from bild_lab.lab.config import typed
from bild_lab.lab.data.dataset_spec import DatasetSpec, for_model
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.decoding.load import load_model
from bild_lab.lab.formatting import short_name
from bild_lab.lab.hashing import data_hash, file_hash
from bild_lab.lab.measure.environment import environment
from bild_lab.lab.point import sweep_folder
from bild_lab.lab.results.records import require_writable
from bild_lab.papers.match_rates import (
    CSV,
    METRICS,
    TOTAL,
    MatchRates,
    MatchSpec,
    alone,
    layers_of,
    measure_match_rates,
)
from bild_lab.report.style import MUTED, add_panel, marks, paper_figure, write_csv
from bild_lab.training.folder import require_same_settings, write_json, writing

FIGURE = "match_rates.png"
MOVED = frozenset({"model.path", "dataset.path"})  # may differ: hashes of weights and data are compared
FEW = 30  # tokens; positions with fewer are in the table, not in the figure


def match_rates(cfg: DictConfig) -> None:
    """Measure match rates, and write table and figure. Raises UserError for bad input."""
    folder = sweep_folder(cfg)
    require_writable(folder)
    node = {key: cfg[key] for key in ("layers", "top_k", "heads", "positions")}
    spec = typed(MatchSpec, OmegaConf.create(node), "the configuration")
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    longest = cfg.decoding.max_new_tokens
    require_whole("decoding.max_new_tokens", longest, 1)
    target = target_of(cfg)
    dataset = for_model(dataset, target.checkpoint)
    examples = load_examples(dataset)
    settings = {
        "model.path": target.checkpoint.path,
        "model.weights": target.checkpoint.fingerprint,
        "layers": layers_of(spec, target),
        "top_k": spec.top_k,
        "heads": spec.heads,
        "heads' files": [file_hash(heads) for heads in spec.heads],
        "positions": spec.positions,
        "decoding.max_new_tokens": longest,
        "runtime.dtype": str(target.dtype).removeprefix("torch."),
        **{f"dataset.{key}": value for key, value in asdict(dataset).items()},
        "data": data_hash(examples),
    }
    require_same_rates(folder, settings)
    prompts, cut = [one.prompt for one in examples], dataset.max_source_tokens
    requests = Decoder(target, alone(target), (target,)).requests(prompts, longest, None, 0, cut)
    with progress() as bar:
        task = bar.add_task("texts", total=len(requests))
        found = measure_match_rates(target, requests, spec, lambda: bar.advance(task))
    write(found, folder, settings, target)
    output.print(escape(table_of(found)))
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
    counts = {"texts": found.texts, "tokens": found.tokens, "totals": found.totals()}
    what = f"{short_name(target.checkpoint.path)}, {settings['dataset.name']}: {found.tokens:,} tokens"
    with writing(folder, "the match rates"):
        write_csv(folder / CSV, pd.DataFrame(found.rows()))
        draw_match_rates(found, folder / FIGURE, f"{what} of {found.texts:,} greedy texts; bars: 95 % over texts")
        write_json(folder / METRICS, {"settings": settings, **counts, "environment": environment(target.device)})


def table_of(found: MatchRates) -> str:
    """Rates over all positions in percent, with a row for each kind of heads and each layer."""
    rates = pd.DataFrame(found.totals())
    percent = (100 * rates[["rate", "low", "high"]]).to_numpy()
    rates["k ="] = ["{:.1f} [{:.1f}, {:.1f}]".format(*row) for row in percent]
    table = rates.pivot(index=["heads", "layer"], columns="top_k", values="k =").rename_axis(columns="k")
    return f"{table.to_string()}\n\n% of final tokens among the first k choices, with 95 % intervals over texts"


def draw_match_rates(found: MatchRates, path: Path, subtitle: str) -> None:
    """Left: the rate against the layer, a line with 95 % intervals for each k. Right: the rate against the position.

    The right panel shows the middle k, with a line for each layer; a group of positions is drawn at its first one.
    """
    middle = found.top_k[len(found.top_k) // 2]
    totals, rows = pd.DataFrame(found.totals()), pd.DataFrame(found.rows())
    rows = rows[(rows["position"] != TOTAL) & (rows["top_k"] == middle)]
    rows = rows.assign(x=rows["position"].str.partition("-")[0].astype(int), low=rows["rate"], high=rows["rate"])
    rows = rows[(rows["count"] >= FEW) | (rows["x"] == 1)]
    with paper_figure(path, (10.0, 4.8), "Match rates of early layers", subtitle) as figure:
        left = add_panel(figure, (0.07, 0.12, 0.42, 0.68), "all positions", xlabel="layer", ylim=(0, 1.02))
        right = add_panel(figure, (0.55, 0.12, 0.42, 0.68), f"k = {middle}", xlabel="position", ylim=(0, 1.02))
        left.set(ylabel="share of final tokens among the first k choices", xticks=found.layers)
        _draw_lines(left, totals.assign(x=totals["layer"], line="k = " + totals["top_k"].astype(str)))
        _draw_lines(right, rows.assign(line="layer " + rows["layer"].astype(str)))


def _draw_lines(axes: Axes, table: pd.DataFrame) -> None:
    """A line for each kind of heads and each value of `line`, dashed and hollow for the model's own head."""
    looks, names = marks(list(table["line"].unique())), list(table["heads"].unique())
    trained = (name for name in names if name != SHARED)
    dashes = {SHARED: (0, (4, 2)), **dict(zip(trained, cycle(("-", "-.", ":")), strict=False))}
    for (name, label), line in table.groupby(["heads", "line"], sort=False):
        mark = looks[label]
        filling = {"mfc": "white" if name == SHARED else mark.colour, "mec": mark.colour, "ms": 5}
        # rounding may put the rate just outside its interval
        reach = np.clip([line["rate"] - line["low"], line["high"] - line["rate"]], 0, None)
        style = {"color": mark.colour, "linestyle": dashes[name], "elinewidth": 1.0, "linewidth": 1.5}
        axes.errorbar(line["x"], line["rate"], reach, marker=mark.marker, **style, **filling)
    shown = [Line2D([], [], color=mark.colour, marker=mark.marker, ms=5, label=label) for label, mark in looks.items()]
    shown += [Line2D([], [], color=MUTED, linestyle=dashes[name], label=name) for name in names]
    axes.legend(handles=shown, loc="lower right", fontsize=7.5, frameon=False)
