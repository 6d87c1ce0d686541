"""What `scripts/fit_shape.py` and `tree: auto` share: which texts to decode, what to tell, where to keep it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table

from bild_lab.engine.drafters.candidates import CandidateDrafter
from bild_lab.engine.drafters.tree_file import trees_in
from bild_lab.engine.request import Request
from bild_lab.errors import UserError
from bild_lab.files import cache_folder
from bild_lab.lab.cli import console, escape
from bild_lab.lab.config import resolved, typed
from bild_lab.lab.data.examples import DatasetSpec, Example, load_examples
from bild_lab.lab.data.rows import canonical_split
from bild_lab.lab.decoding.build import named_files
from bild_lab.lab.hashing import content_hash, data_hash, file_hash
from bild_lab.lab.point import Point
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.timed import METHOD
from bild_lab.lab.shapes.fit import Budget, Effort, Fitted, fit_tree
from bild_lab.lab.shapes.window import DraftedRound

AUTO_EXAMPLES = 200  # read to fit a tree on, until there are enough rounds
SHOWN_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 17, 20, 24, 28, 32, 33, 40, 48, 49, 56, 64)


def requests_of(point: Point, examples: Sequence[Example]) -> list[Request]:
    """The point's requests for these examples."""
    decoder, tokens = point.decoders[METHOD], point.decoding.max_new_tokens
    return [
        decoder.request(each.prompt, tokens, point.sampling, point.seed, point.max_source_tokens) for each in examples
    ]


def told(point: Point, split: str) -> dict[str, Any]:
    """What a file tells of the machine, the models and the texts."""
    setting = point.setting
    machine = {key: setting[key] for key in ("hardware", "threads", "engine", "dtype", "device", "code")}
    dataset = {"dataset": setting["dataset"], "split": split}
    return {"policy": point.policy, "target": setting["weights"], "machine": machine, "texts": dataset}


def with_fitted_tree(point: Point) -> Point:
    """The point with `tree: auto` fitted, or as it is if its policy asks for none.

    The first fit for a target, adapter, engine, precision, machine and data is kept in the cache. It uses a split that
    the point does not report on, if the dataset has another.
    """
    decoder = point.decoders[METHOD]
    drafter = getattr(decoder.method, "drafter", None)
    if not isinstance(drafter, CandidateDrafter) or drafter.fitted:
        return point
    split, examples = other_texts(point)
    knobs = resolved(OmegaConf.create(point.config_yaml).policy)
    decisive = {
        **told(point, split),
        "adapter": [file_hash(path) for path in named_files(knobs).values()],
        "knobs": {key: value for key, value in point.knobs.items() if key not in named_files(knobs)},
        "decoding": asdict(point.decoding),
        "source": point.max_source_tokens,
        "data": data_hash(examples),
    }
    path = cache_folder() / "trees" / f"{content_hash(decisive)}.json"
    ranks = decoder.ranks  # processes that share the target must draft the same tree, whatever each of them measures
    kept = ranks.broadcast(path.read_text() if path.is_file() else None)
    if kept is not None:
        console.print(escape(f"the tree is that of {path}"))
    else:
        same = " — the texts of the run itself, as there is no other split" if split == point.setting["split"] else ""
        console.print(escape(f"fitting the tree on {len(examples)} texts of {point.setting['dataset']} {split}{same}"))
        found = fit_tree(decoder, requests_of(point, examples), Effort(), told(point, split))
        kept = ranks.broadcast(json.dumps(found.content))
        if ranks.first:
            found.write(path)
        console.print(escape(f"{summary(found)}; kept in {path}"))
    content = json.loads(kept)
    method = replace(decoder.method, drafter=drafter.drafting(trees_in(content)))
    facts = {**point.facts, "trained": {**point.facts["trained"], "tree": content}}
    return replace(point, facts=facts, decoders={**point.decoders, METHOD: replace(decoder, method=method)})


def other_texts(point: Point) -> tuple[str, list[Example]]:
    """A split that the point does not report on, with its first texts; the point's own if there is no other."""
    dataset = typed(DatasetSpec, OmegaConf.create(point.config_yaml).dataset, "dataset")
    reported = {one.prompt for one in point.examples}
    for split in ("validation", "train"):
        if split == canonical_split(dataset.split):
            continue
        spec = replace(dataset, split=split, limit=AUTO_EXAMPLES, turns=1, history=None)
        with suppress(UserError):  # the dataset lacks this split
            examples = [one for one in load_examples(spec) if one.prompt not in reported]
            if examples:
                return split, examples
    return dataset.split, [one for one in point.examples if one.turn == 1][:AUTO_EXAMPLES]


def rounds_of_sweep(folder: Path, point: Point) -> list[DraftedRound]:
    """The rounds of the finished point in this folder with the point's policy and its largest window.

    Raises UserError if there is none, and if its window is smaller than the point's.
    """
    others = {key: value for key, value in point.knobs.items() if key != "window"}
    fitting = [
        one
        for one in Sweep(folder).results()
        if one.policy == point.policy and {key: one.knobs[key] for key in one.knobs if key != "window"} == others
    ]
    if not fitting:
        raise UserError(
            f"{folder} must have points of policy {point.policy} with these knobs, got none; fit without it"
        )
    largest = max(fitting, key=lambda one: one.knobs["window"])
    if largest.knobs["window"] < point.knobs["window"]:
        raise UserError(
            f"{folder} must have a point with window {point.knobs['window']}, got at most {largest.knobs['window']}; "
            f"set fit.window={largest.knobs['window']}"
        )
    examples = read_examples(largest.folder)
    return [DraftedRound(len(one.drafted), one.accepted, one.draft_calls) for each in examples for one in each.rounds]


def summary(found: Fitted) -> str:
    """One line about what was chosen."""
    best, alone = found.chosen, found.budgets[0]
    return (
        f"{best.tokens:.2f} tokens and {best.rows:.1f} rows in a round of {best.ms:.2f} ms: {best.tokens_per_s:.0f} "
        f"tokens/s, {best.tokens_per_s / alone.tokens_per_s:.2f} times the target alone"
    )


def budget_table(found: Fitted) -> Table:
    """Expected tokens, milliseconds and tokens per second by rows."""
    table = Table(
        "rows", "tokens per round", "ms per round", "tokens/s", "", title="Expected, by the rows of a forward"
    )
    shown = [one for one in found.budgets if one.rows in SHOWN_ROWS or len(found.budgets) <= len(SHOWN_ROWS)]
    fastest = max(found.budgets, key=lambda one: one.tokens_per_s)
    for one in sorted({*shown, fastest}, key=lambda one: one.rows):
        table.add_row(*cells(one), "← fastest" if one == fastest else "", style="bold" if one == fastest else None)
    return table


def cells(one: Budget) -> tuple[str, str, str, str]:
    return f"{one.rows:.0f}", f"{one.tokens:.3f}", f"{one.ms:.3f}", f"{one.tokens_per_s:.1f}"
