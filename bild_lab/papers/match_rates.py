"""How often a head on an early layer has the final token among its first choices (PPD §4.3, Tables
1, 4 to 6).

`match_rates` is what scripts/match_rates.py does: settings checked, rates measured, table and
figure written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from omegaconf import DictConfig, OmegaConf
from rich.markup import escape
from torch import Tensor

from bild_lab.engine.batch_decoding import auto_batch_size
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.methods.early_exit.layer_heads import (
    LayerHeads,
    LayerHeadsConfig,
    require_heads_of,
)
from bild_lab.engine.methods.ppd.pipeline import SHARED
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.checkpoint.hub import commits_read
from bild_lab.engine.models.device import dtype_name, resolve_device, set_threads
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import LoadedModel, OutputSpec, Rows, Session
from bild_lab.errors import UserError, require_whole
from bild_lab.files import write_json
from bild_lab.lab.config.console import output, progress_bar
from bild_lab.lab.config.schemas import stop_strings, typed
from bild_lab.lab.data.dataset_spec import DatasetSpec, for_model
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.data.prompts import cut_sources
from bild_lab.lab.metrics.bootstrap import central_interval, resample_counts
from bild_lab.lab.point.decoder import Decoder
from bild_lab.lab.point.environment import environment
from bild_lab.lab.point.identity import sweep_folder
from bild_lab.lab.point.read_model import configured_model
from bild_lab.lab.schema.columns import to_json
from bild_lab.lab.schema.formatting import short_name
from bild_lab.lab.store.hashing import data_hash, file_hash
from bild_lab.lab.store.inputs import require_same_settings
from bild_lab.lab.store.records import require_writable
from bild_lab.lab.store.table import write_csv
from bild_lab.report.style import MUTED, as_panel, marks, paper_figure
from bild_lab.training.folder import writing

CSV, METRICS = "match_rates.csv", "metrics.json"
TOTAL = "all"  # the position of a row that covers all positions
FIGURE = "match_rates.png"
# may differ: hashes of weights and data are compared
MOVED = frozenset({"model.path", "dataset.path"})
FEW = 30  # tokens; positions with fewer are in the table, not in the figure


@dataclass(frozen=True, kw_only=True)
class MatchSpec:
    """What to measure. Raises UserError for values that no model has.

    layers: None for all layers that have heads. top_k: the values of k. heads: "shared" for the
    model's own head, a folder of trained heads, or several of these, which are compared on the same
    texts. positions: tokens in a group, which are counted together.
    """

    layers: list[int] | None
    top_k: list[int]
    heads: Any
    positions: int

    def __post_init__(self) -> None:
        heads = (self.heads,) if isinstance(self.heads, str) else tuple(self.heads or ())
        if not heads or not all(isinstance(head, str) and head for head in heads):
            raise UserError(
                f"heads must be {SHARED}, a folder of trained heads, or several, got {self.heads!r}"
            )
        object.__setattr__(self, "heads", tuple(dict.fromkeys(heads)))
        object.__setattr__(self, "top_k", _ascending("top_k", self.top_k))
        if self.layers is not None:
            object.__setattr__(self, "layers", _ascending("layers", self.layers))
        require_whole("positions", self.positions, 1)


def _ascending(key: str, values: Sequence[int]) -> tuple[int, ...]:
    if not values:
        raise UserError(f"{key} must list whole numbers, such as [1,3,5], got none")
    for value in values:
        require_whole(f"each of {key}", value, 1)
    return tuple(sorted(set(values)))


def layers_of(spec: MatchSpec, target: LoadedModel) -> tuple[int, ...]:
    """The layers to measure; reads small files only.

    Raises UserError for layers that the target or the heads do not have, heads of another model,
    and k beyond the vocabulary.
    """
    depth, vocabulary = target.depth, target.checkpoint.columns
    require_whole(
        "each of top_k", spec.top_k[-1], 1, vocabulary, f"the target has {vocabulary} tokens"
    )
    trained = {path: LayerHeadsConfig.read(path) for path in spec.heads if path != SHARED}
    for path, heads in trained.items():
        require_heads_of(target, heads, path, heads.layers[0])
    if spec.layers is None:
        common = set(range(1, depth + 1)).intersection(
            *(heads.layers for heads in trained.values())
        )
        if not common:
            raise UserError(
                f"no layer has heads in all of {', '.join(trained)}; measure them one by one"
            )
        return tuple(sorted(common))
    require_whole("each of layers", spec.layers[-1], 1, depth, f"the target has {depth} layers")
    for path, heads in trained.items():
        if missing := sorted(set(spec.layers) - set(heads.layers)):
            raise UserError(
                f"layers must be ones that {path} has heads for, {list(heads.layers)}, got"
                f" {missing}"
            )
    return spec.layers


@torch.inference_mode()
def greedy_states(
    target: LoadedModel, request: Request
) -> tuple[Session, list[int], Float[Tensor, "layers n dim"]]:
    """The text's session, the target's own greedy text, and every layer's output where each token
    is predicted.
    """
    output_spec = OutputSpec(logits=1, hidden=tuple(range(1, target.depth + 1)))
    session = target.start(request.source, request.limits.max_new_tokens)
    tokens, states = list(request.source.prompt), []
    while not request.limits.reached(tokens):
        scores = session.extend(tokens[session.length :], output_spec)
        states.append(torch.stack([state[-1] for state in scores.hidden]))
        tokens.append(int(precise(scores.logits).argmax(-1)))
    return session, tokens[request.limits.prompt_length :], torch.stack(states, 1)


class Rate(NamedTuple):
    """A row of the table: of `count` tokens at these positions, from 1, so many were among the
    first `top_k`.

    heads: "shared" or the folder of trained ones. position: such as "1-16", or "all".
    """

    layer: int
    top_k: int
    heads: str
    position: str
    matches: int
    count: int
    rate: float


def read_rates(folders: Iterable[Path]) -> list[tuple[str, Rate]]:
    """Every match rate of these folders, with its data set."""
    rates: list[tuple[str, Rate]] = []
    for folder in folders:
        if not (folder / CSV).is_file():
            continue
        metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        table = pd.read_csv(
            folder / CSV, dtype={"heads": str, "position": str}, keep_default_na=False
        )
        rates += [
            (metrics["settings"]["dataset.name"], Rate(*row))
            for row in table[list(Rate._fields)].itertuples(index=False, name=None)
        ]
    return rates


@dataclass(frozen=True)
class MatchRates:
    """Counted matches, by text and group of positions; groups after a text's end have counts of 0.

    heads, layers, top_k: the values along the axes of `matches`. positions: tokens in a group.
    """

    heads: tuple[str, ...]
    layers: tuple[int, ...]
    top_k: tuple[int, ...]
    positions: int
    matches: Int[np.ndarray, "texts heads layers ks groups"]
    counts: Int[np.ndarray, "texts groups"]

    @property
    def texts(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def rows(self) -> list[Rate]:
        """Every layer, k and heads: a row for each group of positions, then one for all."""
        rates: list[Rate] = []
        labels = [*map(self.label, range(self.counts.shape[1])), TOTAL]
        counts = with_sum(self.counts.sum(0))
        for (h, heads), (i, layer), (j, top_k) in product(
            *map(enumerate, (self.heads, self.layers, self.top_k))
        ):
            matches = with_sum(self.matches[:, h, i, j].sum(0))
            for label, match_count, count in zip(labels, matches, counts, strict=True):
                rates.append(
                    Rate(
                        layer,
                        top_k,
                        heads,
                        label,
                        match_count,
                        count,
                        match_count / count,
                    )
                )
        return rates

    def totals(self) -> list[dict[str, object]]:
        """The rows over all positions, with their 95 % intervals: by bootstrap over texts, whose
        tokens are related.
        """
        matches_of_text = self.matches.sum(-1).reshape(self.texts, -1)  # in the order of the rows
        statistics = np.column_stack([matches_of_text, self.counts.sum(-1)]).astype(float)
        sums = resample_counts(self.texts, 0) @ statistics
        bounds = [central_interval(rates) for rates in (sums[:, :-1] / sums[:, -1:]).T]
        rows = [row for row in self.rows() if row.position == TOTAL]
        return [
            {**row._asdict(), "low": low, "high": high}
            for row, (low, high) in zip(rows, bounds, strict=True)
        ]

    def label(self, group: int) -> str:
        """The positions of a group as the paper's tables name them: 1-16."""
        start, end = group * self.positions + 1, (group + 1) * self.positions
        return str(start) if start == end else f"{start}-{end}"


def measure_match_rates(
    target: LoadedModel,
    requests: Sequence[Request],
    spec: MatchSpec,
    advance: Callable[[], None] = lambda: None,
) -> MatchRates:
    """Decode every request greedily, once, and rank each token of the texts by all heads at all
    layers.

    Texts decode in batches where the target can. advance: called after each text. Raises UserError
    as `layers_of` does.
    """
    layers = layers_of(spec, target)
    trained = {
        name: LayerHeads.load(name).to(target.device, target.dtype)
        for name in spec.heads
        if name != SHARED
    }
    heads = [trained.get(name) for name in spec.heads]  # None for the target's own norm and head
    target.load()
    loops = [partial(hits_of, target, heads, layers, spec.top_k, request) for request in requests]
    batch = Batch(auto_batch_size(target_alone(target), [target], requests))
    hits = [text.result for text in batch.run(loops, lambda index: advance())]
    groups = -(-max(hit.shape[-1] for hit in hits) // spec.positions)
    matches = np.stack([grouped(hit, spec.positions, groups) for hit in hits])
    counts = np.stack(
        [grouped(np.ones(hit.shape[-1:], int), spec.positions, groups) for hit in hits]
    )
    return MatchRates(spec.heads, layers, spec.top_k, spec.positions, matches, counts)


@torch.inference_mode()
def hits_of(
    target: LoadedModel,
    heads: Sequence[LayerHeads | None],
    layers: Sequence[int],
    top_k: Sequence[int],
    request: Request,
) -> Int[np.ndarray, "heads layers ks n"]:
    """Whether each token of the request's greedy text is among the first k of each head at each
    layer, 1 or 0.

    heads: None for the target's own norm and head. top_k: in ascending order.
    """
    session, tokens, states = greedy_states(target, request)
    target_tokens = torch.tensor(tokens, device=states.device)[:, None]
    hits = []
    for layer_heads, layer in product(heads, layers):
        hidden = states[layer - 1]
        if layer_heads is None:
            rows = Rows([0] * len(hidden), states=hidden)
            logits = session.extend(rows, OutputSpec(layers=())).logits
        else:
            logits = layer_heads.logits(layer, hidden)
        choices = logits.topk(top_k[-1]).indices  # [n, largest k]
        # a token that was met at rank r is among the first k for every k from r on
        met = (choices == target_tokens).cumsum(-1).T.cpu().numpy()  # [largest k, n]
        hits.append(met[np.array(top_k) - 1])
    return np.stack(hits).reshape(len(heads), len(layers), len(top_k), len(tokens))


def with_sum(counts: Int[np.ndarray, " groups"]) -> list[int]:
    return [*counts.tolist(), int(counts.sum())]


def grouped(
    values: Int[np.ndarray, "*axes n"], size: int, groups: int
) -> Int[np.ndarray, "*axes groups"]:
    """Sums over groups of `size` values; groups after the last value are zero."""
    padded = np.zeros((*values.shape[:-1], groups * size), int)
    padded[..., : values.shape[-1]] = values
    return padded.reshape(*values.shape[:-1], groups, size).sum(-1)


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
    stop = stop_strings(cfg.decoding.stop)
    decoder = Decoder(target, target_alone(target), (target,), stop=stop)
    examples = cut_sources(load_examples(dataset), dataset.max_source_tokens, decoder.prompt_length)
    settings = {
        "model.path": target.checkpoint.path,
        "model.weights": target.checkpoint.fingerprint,
        "layers": layers_of(spec, target),
        "top_k": spec.top_k,
        "heads": spec.heads,
        "heads' files": [file_hash(heads) for heads in spec.heads],
        "positions": spec.positions,
        "decoding.max_new_tokens": longest,
        **({"decoding.stop": sorted(stop)} if stop else {}),
        "runtime.dtype": dtype_name(target.dtype),
        **{f"dataset.{key}": value for key, value in asdict(dataset).items()},
        "data": data_hash(examples),
    }
    if (file := folder / METRICS).is_file():
        # none of a training, which may have the name
        stored_settings = json.loads(file.read_text(encoding="utf-8")).get("settings", {})
        require_same_settings(folder, "match rates", stored_settings, settings, MOVED)
    requests = decoder.requests([example.prompt for example in examples], longest)
    with progress_bar() as bar:
        task = bar.add_task("texts", total=len(requests))
        rates = measure_match_rates(target, requests, spec, lambda: bar.advance(task))
    write(rates, folder, settings, target)
    output.print(escape(table_of(rates)))
    output.print(
        escape(
            f"{folder}: {CSV}, {FIGURE} and {METRICS}; {rates.tokens:,} tokens of {rates.texts:,}"
            " texts"
        )
    )


def target_of(cfg: DictConfig) -> LoadedModel:
    """The model whose layers are measured. No weights are read."""
    set_threads(cfg.runtime.threads)
    target = configured_model(cfg, resolve_device(cfg.runtime.device), cfg.runtime.dtype)
    target.checkpoint.check()
    target.require_layers("measuring match rates")
    return target


def write(
    match_rates: MatchRates, folder: Path, settings: dict[str, Any], target: LoadedModel
) -> None:
    """Write the table and the figure, then the file that describes them."""
    counts = {
        "texts": match_rates.texts,
        "tokens": match_rates.tokens,
        "totals": to_json(match_rates.totals()),
    }
    what = f"{short_name(target.checkpoint.path)}, {settings['dataset.name']}: {match_rates.tokens:,} tokens"
    with writing(folder, "the match rates"):
        write_csv(folder / CSV, pd.DataFrame(match_rates.rows()))
        draw_match_rates(
            match_rates,
            folder / FIGURE,
            f"{what} of {match_rates.texts:,} greedy texts; bars: 95 % over texts",
        )
        write_json(
            folder / METRICS,
            {
                "settings": settings,
                **counts,
                "environment": environment(target.device),
                "commits": commits_read(),
            },
        )


def table_of(match_rates: MatchRates) -> str:
    """Rates over all positions in percent, with a row for each kind of heads and each layer."""
    rates = pd.DataFrame(match_rates.totals())
    percent = (100 * rates[["rate", "low", "high"]]).to_numpy()
    rates["k ="] = ["{:.1f} [{:.1f}, {:.1f}]".format(*row) for row in percent]
    table = rates.pivot(index=["heads", "layer"], columns="top_k", values="k =").rename_axis(
        columns="k"
    )
    return (
        f"{table.to_string()}\n\n% of final tokens among the first k choices, with 95 % intervals"
        " over texts"
    )


def draw_match_rates(match_rates: MatchRates, path: Path, subtitle: str) -> None:
    """Left: the rate against the layer, a line with 95 % intervals for each k. Right: the rate
    against the position.

    The right panel shows the middle k, with a line for each layer; a group of positions is drawn at
    its first one.
    """
    middle = match_rates.top_k[len(match_rates.top_k) // 2]
    totals, rows = pd.DataFrame(match_rates.totals()), pd.DataFrame(match_rates.rows())
    rows = rows[(rows["position"] != TOTAL) & (rows["top_k"] == middle)]
    rows = rows.assign(
        x=rows["position"].str.partition("-")[0].astype(int), low=rows["rate"], high=rows["rate"]
    )
    rows = rows[(rows["count"] >= FEW) | (rows["x"] == 1)]
    with paper_figure(path, (10.0, 4.8), "Match rates of early layers", subtitle) as figure:
        left, right = figure.subplots(1, 2)
        as_panel(left, "all positions", xlabel="layer", ylim=(0, 1.02))
        as_panel(right, f"k = {middle}", xlabel="position", ylim=(0, 1.02))
        left.set(
            ylabel="share of final tokens among the first k choices", xticks=match_rates.layers
        )
        _draw_lines(
            left, totals.assign(x=totals["layer"], line="k = " + totals["top_k"].astype(str))
        )
        _draw_lines(right, rows.assign(line="layer " + rows["layer"].astype(str)))


def _draw_lines(axes: Axes, table: pd.DataFrame) -> None:
    """A line for each kind of heads and each value of `line`, dashed and hollow for the model's own
    head.
    """
    looks, names = marks(list(table["line"].unique())), list(table["heads"].unique())
    trained = (name for name in names if name != SHARED)
    dashes = {SHARED: (0, (4, 2)), **dict(zip(trained, cycle(("-", "-.", ":")), strict=False))}
    for (name, label), line in table.groupby(["heads", "line"], sort=False):
        mark = looks[label]
        filling = {"mfc": "white" if name == SHARED else mark.colour, "mec": mark.colour, "ms": 5}
        # rounding may put the rate just outside its interval
        reach = np.clip([line["rate"] - line["low"], line["high"] - line["rate"]], 0, None)
        style = {
            "color": mark.colour,
            "linestyle": dashes[name],
            "elinewidth": 1.0,
            "linewidth": 1.5,
        }
        axes.errorbar(line["x"], line["rate"], reach, marker=mark.marker, **style, **filling)
    shown = [
        Line2D([], [], color=mark.colour, marker=mark.marker, ms=5, label=label)
        for label, mark in looks.items()
    ]
    shown += [Line2D([], [], color=MUTED, linestyle=dashes[name], label=name) for name in names]
    axes.legend(handles=shown, loc="lower right", fontsize=7.5, frameon=False)
