"""What a folder of outputs is, and the lab book's entries of trainings, comparisons, figures and data."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bild_lab.files import is_held
from bild_lab.lab.formatting import number, percent, short_name, times
from bild_lab.report.book.entry import (
    COMPARISON,
    FIGURE,
    FINISHED,
    INTERRUPTED,
    OTHER,
    RUNNING,
    SWEEP,
    TRAINING,
    Entry,
    Link,
)
from bild_lab.report.book.listing import moment
from bild_lab.report.book.pictures import curve, intervals
from bild_lab.report.book.sweeps import is_sweep, read_sweep

METRICS = "metrics.json"
WORK, ANSWERS = "training", "calibration"  # folders of a training: until it ends; the answers made for it
MOST_CLAIMS = 2  # of a paper, told in the headline of a figure
_STEP = re.compile(r"checkpoint-(\d+)$")


def read_training(folder: Path) -> Entry:
    """The entry of a training: its loss and best score, or the step that it has reached."""
    metrics = _training_metrics(folder)
    if metrics is None:
        return _unfinished(folder)
    best, metric = metrics.get("best"), metrics["metric"]
    scored = f", {metric} {number(best[metric])} at step {best['step']:,}" if best else ""
    said = f"{metrics['steps']:,} steps, loss {number(metrics['loss'], 3)}{scored}."
    what = metrics.get("noun", "checkpoint")
    losses = [(float(one["step"]), float(one["loss"])) for one in metrics["history"] if "loss" in one]
    scores = [(float(one["step"]), float(one["eval_loss"])) for one in metrics["history"] if "eval_loss" in one]
    return Entry(
        name=folder.name,
        kind=TRAINING,
        headline=" ".join(filter(None, [f"{what[0].upper()}{what[1:]}: {said}", _aligned(metrics)])),
        pair=short_name(metrics["start"] or ""),
        data=metrics.get("data", ""),
        date=metrics.get("environment", {}).get("started", ""),
        picture=curve("Loss over steps; dots are evaluations", losses, scores),
    )


def _training_metrics(folder: Path) -> Mapping[str, Any] | None:
    """The metrics of a finished training: beside its result, or with it if the process ended in between."""
    inside = [file for file in sorted(folder.glob(f"*/{METRICS}")) if file.parent.name != ANSWERS]
    file = next((file for file in (folder / METRICS, *inside) if file.is_file()), None)
    return None if file is None else json.loads(file.read_bytes())


def _unfinished(folder: Path) -> Entry:
    """A training whose result is not there yet."""
    if not (folder / WORK).is_dir():
        return replace(read_answers(folder / ANSWERS), name=folder.name, kind=TRAINING, state=INTERRUPTED)
    settings = json.loads((folder / WORK / "job.json").read_bytes())
    steps = [int(match[1]) for one in (folder / WORK).iterdir() if (match := _STEP.search(one.name))]
    reached = f"step {max(steps, default=0):,}" + (
        f" of {settings['train.max_steps']:,}" if "train.max_steps" in settings else ""
    )
    runs = is_held(folder / WORK / ".running.lock")
    return Entry(
        name=folder.name,
        kind=TRAINING,
        headline="Not finished; the same command continues it.",
        state=RUNNING if runs else INTERRUPTED,
        progress=reached,
    )


def _aligned(metrics: Mapping[str, Any]) -> str:
    """What an alignment changed; empty for other trainings."""
    compared = metrics.get("alignment", {}).get("compared", {})
    told = []
    for key, words, shown in (
        ("token_agreement", "of the target's tokens predicted", percent),
        ("speculative_speedup", "speculative", times),
    ):
        if key in compared:
            before, after = (shown(compared[key][side]) for side in ("before", "after"))
            told.append(f"{words} {before} before, {after} after")
    return f"{'; '.join(told).capitalize()}." if told else ""


def read_comparison(folder: Path) -> Entry:
    """The entry of a comparison of two sweeps."""
    with (folder / "compare.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    about = folder / "compare.json"
    said = json.loads(about.read_bytes()) if about.is_file() else {}  # older comparisons have none
    sides = [str(name) for name in said.get("names", ())]
    names = ("latency_ratio_low", "latency_ratio", "latency_ratio_high")
    ratios = [tuple(float(row[name]) for name in names) for row in rows if all(row.get(name) for name in names)]
    return Entry(
        name=folder.name,
        kind=COMPARISON,
        date=said.get("compared", ""),
        headline=said.get("summary") or f"{len(rows)} points compared.",
        pair=" and ".join(Path(side).name for side in sides),
        sides=sides,
        picture=intervals(f"Latency of B over A, {len(ratios)} points; left of the line B is faster", ratios),
    )


def read_figures(folder: Path) -> list[Entry]:
    """An entry for each figure of a folder: what its Markdown says, or its picture alone."""
    return [_figure(folder, picture) for picture in sorted(folder.glob("*.png"))]


def _figure(folder: Path, picture: Path) -> Entry:
    text = picture.with_suffix(".md")
    title, where, said = _told(text.read_text(encoding="utf-8")) if text.is_file() else (picture.stem, "", "")
    files = [picture.with_suffix(suffix) for suffix in (".png", ".pdf", ".md", ".csv")]
    present = [file for file in files if file.is_file()]
    return Entry(
        name=f"{folder.name}/{picture.stem}",
        kind=FIGURE,
        headline=" ".join(filter(None, [f"{title}.", said])),
        data=where,
        size_bytes=sum(file.stat().st_size for file in present),
        links=[Link(file.suffix[1:], f"{folder.name}/{file.name}") for file in present],
        image=f"{folder.name}/{picture.name}",
        date=moment(picture.stat().st_mtime),
    )


def _told(markdown: str) -> tuple[str, str, str]:
    """A figure's title, where its points come from, and what became of the paper's claims, from its Markdown."""
    title, *paragraphs = [part.strip() for part in markdown.split("\n\n") if part.strip()]
    cited = paragraphs[0] if paragraphs else ""
    where = cited.partition(" Here: ")[2].rstrip(".")
    table = next((part for part in paragraphs if part.startswith("| claim of the paper |")), "")
    claims = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in table.splitlines()[2:]]
    said = [f"{claim[-1].capitalize()}: {claim[0]}." for claim in claims[:MOST_CLAIMS]]
    if (others := len(claims) - MOST_CLAIMS) > 0:
        said.append(f"{others} more claim{'' if others == 1 else 's'}.")
    first = next((part for part in paragraphs[1:] if part[0] not in "!|#"), "")
    return title.lstrip("# "), where, " ".join(said) or first


def read_match_rates(folder: Path) -> Entry:
    """The entry of a table of match rates."""
    metrics = json.loads((folder / METRICS).read_bytes())
    settings, totals = metrics["settings"], metrics["totals"]
    fewest = min(one["top_k"] for one in totals)
    rates: dict[int, float] = {}  # with the better of several heads
    for one in totals:
        if (one["top_k"], one["position"]) == (fewest, "all"):
            rates[one["layer"]] = max(one["rate"], rates.get(one["layer"], 0.0))
    first, last = min(rates), max(rates)
    said = f"layer {first} in {percent(rates[first])}, of layer {last} in {percent(rates[last])}"
    picture = folder / "match_rates.png"
    return Entry(
        name=folder.name,
        kind=OTHER,
        headline=f"The next token is in the top {fewest} of {said} of {metrics['tokens']:,} cases.",
        pair=short_name(settings["model.path"]),
        data=f"{settings['dataset.name']} {settings['dataset.split']}, {metrics['texts']} texts",
        image=f"{folder.name}/{picture.name}" if picture.is_file() else "",
    )


def read_answers(folder: Path) -> Entry:
    """The entry of a model's greedy answers."""
    plan = json.loads((folder / "plan.json").read_bytes())
    spans = [re.fullmatch(r"\w+-(\d+)-(\d+)\.parquet", one.name) for one in folder.iterdir()]
    done = sum(int(span[2]) - int(span[1]) for span in spans if span)
    finished = (folder / "manifest.json").is_file()
    dataset = plan["dataset"]
    return Entry(
        name=folder.name,
        kind=OTHER,
        headline=f"{done:,} greedy answers, to align drafters with and to train small modules on.",
        pair=short_name(plan["model"]["path"]),
        data=f"{dataset['name']} {dataset['split']}",
        state=FINISHED if finished else INTERRUPTED,
        progress="" if finished else f"{done:,} of {plan['count']:,} answers",
    )


def read_bench(folder: Path) -> Entry:
    """The entry of a benchmark."""
    content = json.loads((folder / "bench.json").read_bytes())
    rows, environment = content["rows"], content["environment"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    return Entry(
        name=folder.name,
        kind=OTHER,
        headline=f"Benchmark: {len(rows)} arms, {', '.join(shapes)}.",
        data=environment.get("gpu") or environment.get("cpu") or "",
        date=environment.get("started", ""),
    )


def read_unknown(folder: Path) -> Entry:
    """The entry of any other folder: the names of its first files."""
    names = sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Entry(name=folder.name, kind=OTHER, headline=f"Contains {told}." if names else "Empty.")


@dataclass(frozen=True)
class Reader:
    """Reads folders of one kind. fits: whether a folder is of it, by the names of its files."""

    kind: str
    fits: Callable[[Path], bool]
    read: Callable[[Path], list[Entry]]


def _one(read: Callable[[Path], Entry]) -> Callable[[Path], list[Entry]]:
    return lambda folder: [read(folder)]


def _with(*names: str) -> Callable[[Path], bool]:
    return lambda folder: any((folder / name).exists() for name in names)


def _is_training(folder: Path) -> bool:
    """An aligned drafter's folder has points too."""
    return _with(WORK, ANSWERS)(folder) or any(file.parent.name != ANSWERS for file in folder.glob(f"*/{METRICS}"))


_READERS = (  # the first that fits
    Reader(TRAINING, _is_training, _one(read_training)),
    Reader(SWEEP, is_sweep, _one(read_sweep)),
    Reader(COMPARISON, _with("compare.csv"), _one(read_comparison)),
    Reader(OTHER, _with("plan.json"), _one(read_answers)),
    Reader(OTHER, _with("match_rates.csv"), _one(read_match_rates)),
    Reader(OTHER, _with("bench.json"), _one(read_bench)),
    Reader(TRAINING, _with(METRICS), _one(read_training)),
    Reader(FIGURE, lambda folder: any(folder.glob("*.png")), read_figures),
    Reader(OTHER, lambda folder: True, _one(read_unknown)),
)


def reader_of(folder: Path) -> Reader:
    """Who reads this folder."""
    return next(reader for reader in _READERS if reader.fits(folder))
