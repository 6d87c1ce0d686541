"""How often a head on an early layer has the final token among its first choices (PPD §4.3, Tables 1, 4 to 6)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.batch import Batch
from bild_lab.engine.batched import quiet_batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import NoDraft
from bild_lab.engine.heads.layer_heads import LayerHeads, LayerHeadsConfig, require_heads_of, require_layers
from bild_lab.engine.ppd.pipeline import SHARED
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import LoadedModel, Rows, Session, Want
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.metrics.text_metrics import interval, resampled_sums

CSV, METRICS = "match_rates.csv", "metrics.json"
TOTAL = "all"  # the position of a row that covers all positions


@dataclass(frozen=True, kw_only=True)
class MatchSpec:
    """What to measure. Raises UserError for values that no model has.

    layers: None for all layers that have heads. top_k: the values of k. heads: "shared" for the model's own head, a
    folder of trained heads, or several of these, which are compared on the same texts. positions: tokens in a group,
    which are counted together.
    """

    layers: list[int] | None
    top_k: list[int]
    heads: Any
    positions: int

    def __post_init__(self) -> None:
        heads = (self.heads,) if isinstance(self.heads, str) else tuple(self.heads or ())
        if not heads or not all(isinstance(one, str) and one for one in heads):
            raise UserError(f"heads must be {SHARED}, a folder of trained heads, or several, got {self.heads!r}")
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

    Raises UserError for layers that the target or the heads do not have, heads of another model, and k beyond the
    vocabulary.
    """
    config = target.checkpoint.config
    depth = target.depth
    if spec.top_k[-1] > config.vocab_size:
        raise UserError(
            f"top_k must be at most the target's vocabulary of {config.vocab_size} tokens, got {spec.top_k[-1]}"
        )
    trained = {path: LayerHeadsConfig.read(path) for path in spec.heads if path != SHARED}
    for path, heads in trained.items():
        require_heads_of(target, heads, path, heads.layers[0])
    if spec.layers is None:
        common = set(range(1, depth + 1)).intersection(*(heads.layers for heads in trained.values()))
        if not common:
            raise UserError(f"no layer has heads in all of {', '.join(trained)}; measure them one by one")
        return tuple(sorted(common))
    require_layers(spec.layers, depth)
    for path, heads in trained.items():
        if missing := sorted(set(spec.layers) - set(heads.layers)):
            raise UserError(f"layers must be ones that {path} has heads for, {list(heads.layers)}, got {missing}")
    return spec.layers


def scores_of(
    session: Session, heads: LayerHeads | None, layer: int, hidden: Float[Tensor, "n dim"]
) -> Float[Tensor, "n vocab"]:
    """What the heads make of a layer's output. layer: counted from 1."""
    if heads is None:
        return session.extend(Rows([0] * len(hidden), states=hidden), Want(layers=())).logits
    return heads.logits(layer, hidden)


@torch.inference_mode()
def greedy_states(target: LoadedModel, request: Request) -> tuple[Session, list[int], Float[Tensor, "layers n dim"]]:
    """The text's session, the target's own greedy text, and every layer's output where each token is predicted."""
    want = Want(logits=1, hidden=tuple(range(1, target.depth + 1)))
    session = target.start(request.source, request.limits.max_new_tokens)
    tokens, states = list(request.source.prompt), []
    while not request.limits.reached(tokens):
        scores = session.extend(tokens[session.length :], want)
        states.append(torch.stack([state[-1] for state in scores.hidden]))
        tokens.append(int(precise(scores.logits).argmax(-1)))
    return session, tokens[request.limits.prompt_length :], torch.stack(states, 1)


class Rate(NamedTuple):
    """A row of the table: of `count` tokens at these positions, from 1, so many were among the first `top_k`.

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
    """Every match rate of these folders, with its data set. Raises UserError for files of another form."""
    found: list[tuple[str, Rate]] = []
    for folder in folders:
        if not (folder / CSV).is_file():
            continue
        try:
            dataset = json.loads((folder / METRICS).read_text())["settings"]["dataset.name"]
            table = pd.read_csv(folder / CSV, dtype={"heads": str, "position": str}, keep_default_na=False)
            found += [(dataset, Rate(*row)) for row in table[list(Rate._fields)].itertuples(index=False, name=None)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder} holds no match rates of scripts/match_rates.py: {error!r}; make them anew"
            ) from error
    return found


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
        found: list[Rate] = []
        labels = [*map(self.label, range(self.counts.shape[1])), TOTAL]
        counts = with_sum(self.counts.sum(0))
        for (h, heads), (i, layer), (j, top_k) in product(*map(enumerate, (self.heads, self.layers, self.top_k))):
            matches = with_sum(self.matches[:, h, i, j].sum(0))
            for label, some, count in zip(labels, matches, counts, strict=True):
                found.append(Rate(layer, top_k, heads, label, some, count, some / count))
        return found

    def totals(self) -> list[dict[str, object]]:
        """The rows over all positions, with their 95 % intervals: by bootstrap over texts, whose tokens are related."""
        each = self.matches.sum(-1).reshape(self.texts, -1)  # in the order of the rows
        sums = resampled_sums(np.column_stack([each, self.counts.sum(-1)]).astype(float), 0)
        bounds = [interval(rates) for rates in (sums[:, :-1] / sums[:, -1:]).T]
        rows = [row for row in self.rows() if row.position == TOTAL]
        return [{**row._asdict(), "low": low, "high": high} for row, (low, high) in zip(rows, bounds, strict=True)]

    def label(self, group: int) -> str:
        """The positions of a group as the paper's tables name them: 1-16."""
        first, last = group * self.positions + 1, (group + 1) * self.positions
        return str(first) if first == last else f"{first}-{last}"


def measure_match_rates(
    target: LoadedModel, requests: Sequence[Request], spec: MatchSpec, advance: Callable[[], None] = lambda: None
) -> MatchRates:
    """Decode every request greedily, once, and rank each token of the texts by all heads at all layers.

    Texts decode in batches where the target can. advance: called after each text. Raises UserError as `layers_of` does.
    """
    layers, top_k = layers_of(spec, target), np.array(spec.top_k)
    trained = {name: LayerHeads.load(name).to(target.device, target.dtype) for name in spec.heads if name != SHARED}
    heads = [trained.get(name) for name in spec.heads]  # None for the target's own norm and head

    @torch.inference_mode()
    def hits_of(request: Request) -> Int[np.ndarray, "heads layers ks n"]:
        session, tokens, states = greedy_states(target, request)
        wanted = torch.tensor(tokens, device=states.device)[:, None]
        found = []
        for own, layer in product(heads, layers):
            choices = scores_of(session, own, layer, states[layer - 1]).topk(spec.top_k[-1]).indices  # [n, most]
            found.append((choices == wanted).cumsum(-1).T.cpu().numpy()[top_k - 1])
        return np.stack(found).reshape(len(heads), len(layers), len(top_k), len(tokens))

    target.load()
    loops = [lambda request=request: hits_of(request) for request in requests]
    batch = Batch(quiet_batch(alone(target), [target], requests))
    hits = [text.result for text in batch.run(loops, lambda index: advance())]
    groups = -(-max(hit.shape[-1] for hit in hits) // spec.positions)
    matches = np.stack([grouped(hit, spec.positions, groups) for hit in hits])
    counts = np.stack([grouped(np.ones(hit.shape[-1:], int), spec.positions, groups) for hit in hits])
    return MatchRates(spec.heads, layers, spec.top_k, spec.positions, matches, counts)


def alone(target: LoadedModel) -> DraftThenVerify:
    """The target decodes by itself."""
    return DraftThenVerify(target, NoDraft(target), ExactMatch())


def with_sum(counts: Int[np.ndarray, " groups"]) -> list[int]:
    return [*counts.tolist(), int(counts.sum())]


def grouped(values: Int[np.ndarray, "*axes n"], size: int, groups: int) -> Int[np.ndarray, "*axes groups"]:
    """Sums over groups of `size` values; groups after the last value are zero."""
    padded = np.zeros((*values.shape[:-1], groups * size), int)
    padded[..., : values.shape[-1]] = values
    return padded.reshape(*values.shape[:-1], groups, size).sum(-1)
