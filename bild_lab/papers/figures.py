"""Every table and figure of the papers, drawn from outputs, with the paper's numbers beside
ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError, require_choice
from bild_lab.files import write_atomically
from bild_lab.lab.config.schemas import PICTURE_KINDS
from bild_lab.lab.metrics.sentence_data import FALLBACK
from bild_lab.lab.schema.formatting import counted, number_range, short_value
from bild_lab.lab.schema.numbers import Speedup
from bild_lab.lab.schema.result import Result, Setting
from bild_lab.lab.store.groups import setting_title, telling_knobs
from bild_lab.lab.store.hashing import canonical_text
from bild_lab.lab.store.records import Sweep
from bild_lab.papers import cells, match_rates, recorded_quality
from bild_lab.papers import drawings as draw
from bild_lab.papers.published import (
    AGREES,
    PAPER_BASELINES,
    SCALES,
    SPEEDUP,
    UNKNOWN,
    Comparison,
    MeasuredNumber,
    Published,
    compare,
    load_published,
    markdown,
)
from bild_lab.papers.runs.recipes import BITA_ANSWERS, OPTIONAL_ANSWERS
from bild_lab.report.provenance import caption, notes
from bild_lab.report.style import VECTOR

GENERATE = "_generate_"  # in the names of folders whose points are timed against `generate`
# keys of a setting on which it depends how fast a target decodes alone
TIMED_ALIKE = (
    "weights", "weight_bits", "dtype", "compile", "batch", "device", "device_map", "hardware", "threads",
    "dataset", "split", "prompt_template", "chat_template", "max_source_tokens", "decoding", "processors",
)  # fmt: skip


@dataclass(frozen=True)
class PaperFigure:
    """How outputs become a figure.

    numbers: computes a run's cells. row: which curve a point belongs to. borrowed: rows that come
    from another figure's folder; a data set with only these gets no panel. read: reads the points
    of folders.
    """

    numbers: cells.Cells
    drawing: draw.Drawing = draw.draw_dots
    row: cells.RowOf = cells.policy
    borrowed: frozenset[str] = frozenset()
    read: Callable[[Sequence[Path]], list[Any]] = cells.read_points


def _trade_off(row: cells.RowOf, *borrowed: str) -> PaperFigure:
    return PaperFigure(
        partial(cells.at_losses, row=row), draw.draw_trade_offs, row, frozenset(borrowed)
    )


def _bita(row: cells.RowOf, panel: cells.RowOf = cells.dataset) -> PaperFigure:
    return PaperFigure(
        cells.table(row, {"greedy speedup": lambda point: point.tokens_per_s_ratio}, panel)
    )


def _match_rates(positions: bool) -> PaperFigure:
    return PaperFigure(partial(cells.match_rates, positions=positions), read=match_rates.read_rates)


_SPEEDUP = {"speedup": lambda point: point.speedup}
_ALPHA = {"acceptance rate": lambda point: point.counts.acceptance_rate}
_EXPECTED = {"acceptance rate": lambda point: point.counts.expected_acceptance}
_THEOREM = {"Theorem 3.8": cells.theorem}
FIGURES = {
    "bild_fig2": PaperFigure(cells.replaced_share, draw.draw_engagement, lambda _: "small model"),
    "bild_fig4": _trade_off(cells.alignment),
    "bild_fig5": _trade_off(cells.ablation, "bild"),
    "bild_fig6_7": _trade_off(cells.policy),
    "bild_fig8": PaperFigure(cells.cost_ratios),
    "bild_fig9": _trade_off(cells.rollback_threshold),
    "bild_fig10": PaperFigure(lambda _: [], draw.draw_texts),
    "bild_speculative": PaperFigure(
        cells.against_speculative,
        draw.draw_trade_offs,
        cells.unaligned_or_speculative,
        frozenset({"bild"}),
    ),
    "bild_lossy": _trade_off(cells.lossy_rule, "bild"),
    "spec_tab2": PaperFigure(cells.table(cells.drafter, _SPEEDUP | _ALPHA, by_temperature=True)),
    "spec_tab3": PaperFigure(cells.table(cells.drafter, _EXPECTED, by_temperature=True)),
    "spec_tab4": PaperFigure(cells.theorem_table),
    "spec_tab5": PaperFigure(
        cells.table(cells.lenience, _ALPHA | _THEOREM | _SPEEDUP, by_temperature=True)
    ),
    "spec_fig2_4": PaperFigure(cells.tokens_per_call, draw.draw_tokens_per_call),
    "bita_tab1": _bita(cells.pair),
    "bita_tab2": _bita(cells.policy, cells.pair),
    "bita_tab3_8": _bita(cells.prompt_design),
    "bita_tab4_9": _bita(cells.tree),
    "bita_tab7": PaperFigure(cells.by_category),
    "bita_fig7": _bita(cells.released_or_trained, cells.pair),
    "bita_fig8": _bita(cells.prompt_tokens),
    "bita_fig9": _bita(cells.mask_tokens),
    "ppd_tab1": _match_rates(positions=False),
    "ppd_tab4_6": _match_rates(positions=True),
    "ppd_fig2": PaperFigure(cells.pipeline_trade_off),
    "ppd_fig4": PaperFigure(cells.pipeline_compute),
}


@dataclass(frozen=True)
class DrawnFigure:
    """A figure that was drawn. path: of the files, without a suffix. kinds: of the pictures, beside
    the .md.
    """

    scale: str
    path: Path
    comparison: Comparison
    kinds: Sequence[str]

    @property
    def summary(self) -> str:
        """The files, then a line for each claim, those that hold first, and one that counts the
        numbers that agree.

        Numbers beside a formula are not counted.
        """
        lines = [f"{self.path}.{', .'.join([*self.kinds, 'md'])}: {self.scale} scale"]
        for claim in self.comparison.claims:
            where = "" if claim.verdict == UNKNOWN else f" ({claim.panel})"
            lines.append(f"{claim.verdict}: {claim.order.claim}{where}")
        with_reference = [
            line
            for line in self.comparison.lines
            if line.reference is not None and line.cell.formula is None
        ]
        agree = sum(line.verdict == AGREES for line in with_reference)
        caveat = ", whose models, data and hardware are others" if self.scale == "small" else ""
        if with_reference:
            agrees = "agrees" if agree == 1 else "agree"
            lines.append(
                f"{agree} of {len(with_reference)} numbers {agrees} with the paper{caveat}"
            )
        return "\n  ".join(lines)


def draw_figure(
    name: str,
    outputs: Path,
    folder: Path,
    scale: str | None = None,
    kinds: Sequence[str] = PICTURE_KINDS,
) -> DrawnFigure:
    """Draw a figure from its points in outputs. scale: "paper" or "small"; None takes the first
    that has points.

    kinds: "png" for a screen, "pdf" and "svg" as wide as a column of a paper.

    Raises:
        UserError: there is no such figure or scale, or it has no points in outputs; the message says what to run.
    """
    published = load_published(name)
    require_choice("scale", scale, (*SCALES, None))
    scales = SCALES if scale is None else (scale,)
    for candidate in scales:
        if points := measured(FIGURES[name], published, outputs, candidate):
            return _draw(
                name,
                published,
                points,
                against_generate(published, outputs, candidate),
                candidate,
                folder / (name if candidate == "paper" else f"{name}_small"),
                kinds,
            )
    raise UserError(_nothing(name, published, outputs, scales))


def measured(figure: PaperFigure, published: Published, outputs: Path, scale: str) -> list[Any]:
    """The figure's points in its folders; empty if they give no number and no text."""
    names = [name for name in published.folders[scale] if GENERATE not in name]
    points = figure.read([outputs / name for name in names])
    if figure.borrowed:
        panels = {
            panel for panel, row in cells.curves(points, figure.row) if row not in figure.borrowed
        }
        points = [point for point in points if cells.dataset(point) in panels]
    has_texts = figure.drawing is draw.draw_texts and draw.traced_texts(points)
    return points if figure.numbers(points) or has_texts else []


def _draw(
    name: str,
    published: Published,
    points: list[Any],
    generate_points: Sequence[Result],
    scale: str,
    path: Path,
    kinds: Sequence[str],
) -> DrawnFigure:
    figure = FIGURES[name]
    results = [point for point in points if isinstance(point, Result)]
    comparison = compare(figure.numbers(points), published, scale)
    title, where = f"{published.item} ({published.paper.partition(',')[0]})", _where(points)
    drawn = DrawnFigure(scale, path, comparison, kinds)
    small_scale_panel = published.stands_for.panel if scale == "small" else None
    protocol = recorded_quality.protocol(results) if published.recorded else ""
    subtitle = ", ".join(filter(None, (where, protocol, caption(results))))
    picture = draw.Picture(
        title, subtitle, points, figure.row, comparison, published, small_scale_panel
    )
    for kind in kinds:
        figure.drawing(replace(picture, column=kind in VECTOR), path.with_suffix(f".{kind}"))
    paragraphs = [
        *_page(name, published, drawn, results, where),
        *_over_generate(name, published, results, generate_points, scale),
    ]
    page = "\n\n".join(filter(None, paragraphs)) + "\n"
    write_atomically(path.with_suffix(".md"), page.encode())
    return drawn


def _page(
    name: str, published: Published, drawn: DrawnFigure, results: Sequence[Result], where: str
) -> list[str]:
    """The paragraphs of a figure's Markdown page, empty ones among them. where: see `_where`."""
    count, comparison = len(published.printed), drawn.comparison
    return [
        f"# {published.item}",
        f"{published.paper}. The paper's hardware: {published.hardware}. Here: {where}.",
        published.given,
        f"Of the {count} printed numbers {comparison.missing} were not measured." if count else "",
        *(recorded_quality.notes(results) if published.recorded else ()),
        *notes(results),
        *sentence_notes(results),
        _knobs_in_words(results),
        *(answers_left_out(results) if drawn.scale == "paper" else []),
        (
            "Small scale: other models, data and hardware than the paper's, so a verdict says how"
            " different two numbers are, not that either is wrong. Numbers are compared with the"
            f" paper's {published.stands_for.panel}."
            if drawn.scale == "small"
            else ""
        ),
        f"Drawn by `python scripts/figures.py {name} scale={drawn.scale}`.",
        f"![{published.item}]({drawn.path.name}.{drawn.kinds[0]})",
        markdown(comparison),
    ]


def _knobs_in_words(results: Sequence[Result]) -> str:
    """Which knobs the points differ in, with their values; empty if in none."""
    telling = telling_knobs(results)
    values: dict[str, dict[str, None]] = {}
    for result in results:
        for knob in telling(result):
            text = short_value(result.knobs[knob])
            values.setdefault(f"{result.policy} {knob}", {})[text] = None
    lists = [f"{knob} {', '.join(texts)}" for knob, texts in values.items()]
    return f"The points have {'; '.join(lists)}." if lists else ""


def answers_left_out(results: Sequence[Result]) -> list[str]:
    """A sentence for each data set of `OPTIONAL_ANSWERS` whose answers an adapter or heads of these
    points did not learn, as their training's metrics say.

    Of modules that learned none of `BITA_ANSWERS`, but a file or another paper's data, nothing is
    said.
    """
    learned: dict[Path, str] = {}
    for result in results:
        for folder in (result.knobs.get("adapter"), result.knobs.get("heads")):
            file = Path(str(folder)).parent / "metrics.json"
            if isinstance(folder, str) and file.is_file():
                data = str(json.loads(file.read_text(encoding="utf-8")).get("data"))
                if any(name in data for name in BITA_ANSWERS):
                    learned[file] = data
    sentences = []
    for dataset, hub_id in OPTIONAL_ANSWERS.items():
        if without := sum(dataset not in data for data in learned.values()):
            trained = counted(len(learned), "trained module")
            sentences.append(
                f"{without} of the {trained} learned no answers to {hub_id}, which is gated; the"
                " paper's learned them too (Table 5)."
            )
    return sentences


def _where(points: Sequence[Any]) -> str:
    """The models, data, examples and hardware of the points."""
    settings = [point.setting for point in points if isinstance(point, Result)]
    titles = [
        f"{setting_title(setting)}, {setting.dtype}, {setting.hardware or setting.device}"
        for setting in settings
    ]
    known = list(dict.fromkeys(titles or [f"match rates on {dataset}" for dataset, _ in points]))
    return "; ".join(known[:3]) + (f" and {len(known) - 3} others" if len(known) > 3 else "")


def against_generate(published: Published, outputs: Path, scale: str) -> list[Result]:
    """The points of `vanilla` whose baseline is `generate` of Transformers, the papers' own."""
    folders = [outputs / name for name in published.folders[scale] if GENERATE in name]
    points = [point for folder in folders for point in Sweep(folder).results()]
    return cells.counted_once(
        [point for point in points if point.policy == "vanilla"], keys=TIMED_ALIKE
    )


def over_generate(points: Sequence[Result], generate_points: Sequence[Result]) -> list[Result]:
    """The points with their speeds over `generate`; those with models, data or a machine that it was
    not timed with are left out.

    A speed over `generate` is that over `vanilla`, times that of `vanilla` over `generate`. Their
    intervals are of two runs, so on a logarithmic scale they add in squares.
    """
    known = {_timed_alike(point): point for point in generate_points if point.speedup.value}
    faster = []
    for point in points:
        vanilla = known.get(_timed_alike(point))
        if vanilla is None or point.speedup.value is None:
            continue
        ratio = vanilla.tokens_per_s_ratio or vanilla.speedup.value
        categories = {
            name: replace(category, tokens_per_s_ratio=_times(category.tokens_per_s_ratio, ratio))
            for name, category in (point.categories or {}).items()
        }
        faster.append(
            replace(
                point,
                setting=Setting({**point.setting, "baseline": vanilla.setting.baseline}),
                speedup=_product(point.speedup, vanilla.speedup),
                tokens_per_s_ratio=_times(point.tokens_per_s_ratio, ratio),
                categories=categories or None,
            )
        )
    return faster


def _timed_alike(point: Result) -> str:
    """What two points have in common whose baselines are equally fast."""
    return canonical_text([point.setting.get(key) for key in TIMED_ALIKE])


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _product(speedup: Speedup, further_speedup: Speedup) -> Speedup:
    """A speedup over what another one is over."""
    value = speedup.value * further_speedup.value
    if None in (speedup.low, speedup.high, further_speedup.low, further_speedup.high):
        return Speedup(value)
    down = math.hypot(
        math.log(speedup.value / speedup.low), math.log(further_speedup.value / further_speedup.low)
    )
    up = math.hypot(
        math.log(speedup.high / speedup.value),
        math.log(further_speedup.high / further_speedup.value),
    )
    return Speedup(value, value * math.exp(-down), value * math.exp(up))


def sentence_notes(points: Sequence[Result]) -> list[str]:
    """A sentence on points whose sentences were split without NLTK's data; none usually."""
    count = sum(FALLBACK in (point.quality.signature or "") for point in points)
    if not count:
        return []
    return [
        f"In {count} of {len(points)} points ROUGE-Lsum split sentences by a short list of"
        " abbreviations, as NLTK's punkt_tab was not there, which the papers' scripts take."
    ]


def _over_generate(
    name: str,
    published: Published,
    points: Sequence[Result],
    generate_points: Sequence[Result],
    scale: str,
) -> list[str]:
    """The figure's speedups once more, over `generate`, and what the printed ones are over; nothing
    for a figure without speedups.
    """
    figure = FIGURES[name]
    if not _speedups(figure, points):
        return []
    paper = PAPER_BASELINES[name.partition("_")[0]]
    printed = f"; printed ones are over {paper}" if published.printed else ""
    over = over_generate(points, generate_points)
    if not (numbers := _speedups(figure, over)):
        return [f"Speedups are over `vanilla`{printed}. Over `generate` they were not measured."]
    alike = {_timed_alike(point) for point in over}
    ratios = [point for point in generate_points if _timed_alike(point) in alike]
    comparison = compare(numbers, replace(published, orders=[]), scale)
    speedups = number_range(point.speedup.value for point in ratios)
    examples = number_range((point.setting.n_examples for point in ratios), digits=0)
    return [
        f"Speedups above are over `vanilla`{printed}. Here they are over `generate` of Transformers:"
        f" `vanilla` itself is {speedups} times as fast as"
        f" `generate`, on the first {examples} examples.",
        markdown(comparison),
    ]


def _speedups(figure: PaperFigure, points: Sequence[Result]) -> list[MeasuredNumber]:
    """The figure's numbers that are relative to a baseline's time, beside no formula."""
    numbers = figure.numbers(list(points)) if points else []
    return [
        replace(measured_number, formula=None)
        for measured_number in numbers
        if SPEEDUP in measured_number.quantity
    ]


def _nothing(name: str, published: Published, outputs: Path, scales: Sequence[str]) -> str:
    """What the figure needs, and the commands that make it, one a line. scales: those that were
    asked for.
    """
    folders = dict.fromkeys(
        str(outputs / folder) for candidate in scales for folder in published.folders[candidate]
    )
    commands = [
        f"  python scripts/paper_run.py {name} scale={candidate} run=true" for candidate in scales
    ]
    points = [
        point
        for folder in folders
        if GENERATE not in folder
        for point in Sweep(Path(folder)).results()
    ]
    got = "none"
    if points:
        got = (
            f"{counted(len(points), 'point')} without a number for it, as those that lose too much"
        )
    wants = f"{name} wants finished points in {' or '.join(folders)}, got {got}"
    return "\n".join([f"{wants}; run, or without run=true list, all that they need:", *commands])
