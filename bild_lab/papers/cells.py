"""The points of a paper's figure or table: which row or curve each belongs to, and the numbers that
they give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bild_lab.engine.methods.ppd.pipeline import SHARED
from bild_lab.engine.methods.speculative.theory import expected_tokens
from bild_lab.lab.schema.formatting import short_name
from bild_lab.lab.schema.numbers import Quality, Speedup
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import best_at_loss
from bild_lab.lab.store.hashing import canonical_text
from bild_lab.lab.store.records import Sweep
from bild_lab.papers.match_rates import TOTAL, Rate
from bild_lab.papers.published import Key, MeasuredNumber
from bild_lab.papers.recorded_quality import DECIDING, recordings_of, with_recorded_quality

log = logging.getLogger(__name__)
# the row or curve that a point belongs to; None if it belongs to none
RowOf = Callable[[Result], str | None]

PROMPTS = {"none": "masks only", "shallow": "shallow prompt", "deep": "deep prompt"}
LOSSY_RULES = {  # by policy
    "speculative": "lenience",
    "typical_acceptance": "typical acceptance",
    "static_ensemble": "static ensemble",
}
MINIMAL_LOSS, ONE_POINT = 0.12, 1.19  # the largest losses of quality, in points, in BiLD's Table 1

Number = float | Speedup | Quality | None
# of points, or of match rates with their data sets
Cells = Callable[[Sequence[Any]], list[MeasuredNumber]]


def read_points(folders: Iterable[Path]) -> list[Result]:
    """The finished points of these sweeps, each once (`counted_once`), and of each target in one
    regime (`in_one_regime`).

    Those that were screened have the quality of all examples: see `with_recorded_quality`.
    """
    folders = list(folders)
    points = [result for folder in folders for result in Sweep(folder).results()]
    return in_one_regime(counted_once(with_recorded_quality(points, recordings_of(folders))))


def counted_once(
    points: Sequence[Result], keys: Sequence[str] = (*DECIDING, "compile", "batch")
) -> list[Result]:
    """One point for each policy, knobs and values of these keys of the setting: the newest of those
    with the most examples.

    So a trial on few examples does not count beside the whole, and of a point that was measured
    again, with another seed or another version of the code, not the faster measurement counts.
    """
    counting: dict[str, Result] = {}
    for point in points:
        setting = [point.setting.get(key) for key in keys]
        identity = canonical_text([point.policy, dict(point.knobs), setting])
        counting[identity] = max(
            counting.get(identity, point),
            point,
            # of equally many examples the later one
            key=lambda result: (result.setting.n_examples, result.stored_at or ""),
        )
    return list(counting.values())


def in_one_regime(points: Sequence[Result]) -> list[Result]:
    """The points whose speeds may be compared: of each target those with one value of `compile`.

    A baseline with CUDA graphs is faster than one without, so a claim on two policies says nothing
    across both. The value counts that most policies were measured with, at equal numbers the one
    without graphs. Warns of the others.
    """
    policies: dict[str, dict[str, set[str]]] = {}
    for point in points:
        of_target = policies.setdefault(point.setting.weights, {})
        of_target.setdefault(str(point.setting.compile), set()).add(point.policy)
    regime_of = {
        target: max(
            regimes, key=lambda value, regimes=regimes: (len(regimes[value]), value == "false")
        )
        for target, regimes in policies.items()
    }
    comparable = [
        point for point in points if str(point.setting.compile) == regime_of[point.setting.weights]
    ]
    if len(comparable) < len(points):
        log.warning(
            "%d points with another runtime.compile than the others are left out, as speeds with"
            " CUDA graphs and without are not compared; measure them with the same one, such as"
            " runtime.compile=false",
            len(points) - len(comparable),
        )
    return comparable


def curves(points: Sequence[Result], row: RowOf) -> dict[tuple[str, str], list[Result]]:
    """The points of each curve, by data set and row, in order of appearance.

    Those of the baseline are left out, and those whose quality is undefined.
    """
    curves_of: dict[tuple[str, str], list[Result]] = {}
    for point in points:
        name = None if point.is_baseline or point.quality.value is None else row(point)
        if name is not None:
            curves_of.setdefault((dataset(point), name), []).append(point)
    return curves_of


def baseline_quality(points: Iterable[Result]) -> float | None:
    """The quality of the baseline that the points were compared with."""
    known = (point.quality.baseline for point in points)
    return next((value for value in known if value is not None), None)


def dataset(point: Result) -> str:
    return point.setting.dataset


def policy(point: Result) -> str:
    return point.policy


def pair(point: Result) -> str:
    return point.facts["pair"]


def alignment(point: Result) -> str | None:
    """BiLD's two curves: with the fine-tuned drafter, or the aligned one; and two of the released
    loop.
    """
    loops = {"bild": "", "bild_released": ", released loop"}
    if point.policy not in loops:
        return None
    return f"{'aligned' if point.facts['aligned'] else 'unaligned'}{loops[point.policy]}"


def ablation(point: Result) -> str | None:
    """BiLD with both policies or without one of them, with the aligned drafter."""
    known = (
        point.policy in ("bild", "bild_no_rollback", "bild_no_fallback") and point.facts["aligned"]
    )
    return point.policy if known else None


def unaligned_or_speculative(point: Result) -> str | None:
    if point.policy == "speculative":
        return f"speculative, {'sampled' if point.setting.temperature else 'greedy'}"
    return "bild" if alignment(point) == "unaligned" else None


def lossy_rule(point: Result) -> str | None:
    """BiLD (unaligned), the rule of a cascade, or another lossy rule by its name."""
    if point.policy == "speculative_cascade":
        return f"cascade {point.knobs['rule']}"
    if point.policy in LOSSY_RULES:
        return LOSSY_RULES[point.policy]
    return "bild" if alignment(point) == "unaligned" else None


def rollback_threshold(point: Result) -> str | None:
    return f"rollback {point.knobs['rollback']:g}" if alignment(point) == "aligned" else None


def drafter(point: Result) -> str | None:
    """The draft model's name, or the order of n-grams; of `alpha`, those of the drafter that it
    measures.
    """
    kind, knobs = point.policy, point.knobs
    if kind == "alpha":
        kind, knobs = knobs["drafter"], knobs["knobs"]
    if kind == "ngram":
        return {1: "unigrams", 2: "bigrams"}.get(knobs["order"])
    draft = point.setting.draft
    return short_name(draft) if kind == "speculative" and draft else None


def lenience(point: Result) -> str | None:
    return f"lenience {point.knobs['lenience']:g}" if point.policy == "speculative" else None


def released_or_trained(point: Result) -> str | None:
    """The policy, and of Medusa whether its heads are the authors' or were trained here."""
    trained = point.policy == "medusa" and "heads" in point.facts["trained"]
    return f"{point.policy}, trained here" if trained else point.policy


def prompt_design(point: Result) -> str | None:
    """BiTA's kinds of prompt, as the adapter was trained."""
    return PROMPTS[_adapter(point, "prompt")] if point.policy == "bita" else None


def tree(point: Result) -> str | None:
    """BiTA's ways of decoding; a straightforward chain has one candidate per mask.

    The authors' narrowing tree has the name of the paper's row, efficient tree-based decoding.
    """
    if point.policy != "bita":
        return None
    kind = point.knobs["tree"].replace("narrowing", "efficient")
    return kind if kind == "straightforward" else f"{kind}, k = {point.knobs['top_k']}"


def prompt_tokens(point: Result) -> str | None:
    return f"{_adapter(point, 'prompt_tokens')} prompt tokens" if point.policy == "bita" else None


def mask_tokens(point: Result) -> str | None:
    return f"{_adapter(point, 'mask_tokens')} mask tokens" if point.policy == "bita" else None


def pipeline(point: Result) -> str | None:
    """PPD's heads and number of candidates, and the exit layer unless it is half of the layers."""
    if point.policy != "ppd":
        return None
    heads = "shared head" if point.knobs["heads"] == "shared" else "trained heads"
    exit_layer = point.pipeline.exit_layer
    half = point.knobs["exit_layer"] is None or 2 * exit_layer == point.pipeline.layers
    return f"{heads}, k = {point.knobs['top_k']}" + ("" if half else f", layer {exit_layer}")


def _adapter(point: Result, key: str) -> Any:
    """A setting of the adapter as it was run: the trained value, unless a knob of this name gives a
    smaller one.
    """
    fewer = point.knobs.get(key)
    return point.facts["trained"]["adapter"][key] if fewer is None else fewer


def cell(
    data: str, row: str, quantity: str, number: Number, formula: float | None = None
) -> list[MeasuredNumber]:
    """The number as a cell; no cell for a number that is not known."""
    metric = number.metric if isinstance(number, Quality) else None
    if isinstance(number, Speedup | Quality):
        value, bounds = number.value, (number.low, number.high)
    else:
        value, bounds = number, (None, None)
    return (
        []
        if value is None
        else [MeasuredNumber(data, row, quantity, value, *bounds, formula, metric=metric)]
    )


def at_losses(points: Sequence[Result], row: RowOf) -> list[MeasuredNumber]:
    """The fastest point of each curve at minimal loss and at one point of loss, and its best
    quality.
    """
    numbers = []
    for (panel, name), curve in curves(points, row).items():
        for words, loss in (("minimal loss", MINIMAL_LOSS), ("one point of loss", ONE_POINT)):
            if (best := best_at_loss(curve, loss)) is not None:
                numbers += cell(panel, name, f"speedup at {words}", best.speedup)
                numbers += cell(panel, name, f"quality at {words}", best.quality)
        best = max(curve, key=lambda point: point.quality.value)
        numbers += cell(panel, name, "best quality", best.quality)
    return [*numbers, *_vanilla(points)]


def replaced_share(points: Sequence[Result]) -> list[MeasuredNumber]:
    """BiLD Figure 2: the smallest share of replaced tokens with which quality reaches the large
    model's.
    """
    numbers = []
    for (panel, name), curve in curves(points, lambda _: "small model").items():
        if (quality := baseline_quality(curve)) is not None:
            enough = [
                replaced(point) for point in curve if point.quality.value >= quality - MINIMAL_LOSS
            ]
            numbers += cell(
                panel, name, "share replaced at the target's quality", min(enough, default=None)
            )
    return [*numbers, *_vanilla(points)]


def replaced(point: Result) -> float:
    """The share of a run's tokens that the target put in place of drafted ones."""
    return point.counts.rollbacks / point.tokens


def cost_ratios(points: Sequence[Result]) -> list[MeasuredNumber]:
    """BiLD Figure 8: the costs of the fastest point at minimal loss, relative to the baseline's."""
    numbers = []
    for (panel, name), curve in curves(points, alignment).items():
        best = best_at_loss(curve, MINIMAL_LOSS)
        if best is not None and best.cost is not None:
            numbers += cell(panel, name, "FLOPs", best.cost.flops_ratio)
            numbers += cell(panel, name, "memory operations", best.cost.bytes_ratio)
            numbers += cell(panel, name, "arithmetic intensity", best.cost.intensity_ratio)
            numbers += cell(panel, name, "speedup", best.speedup)
    return numbers


def against_speculative(points: Sequence[Result]) -> list[MeasuredNumber]:
    """BiLD §4.2: the fastest speculative point, and how far BiLD is ahead of it at equal quality
    and at equal speed.

    Greedy and sampled points are rivals of their own: the first have the target's quality, the
    second lose some.
    """
    timed = [point for point in points if point.speedup.value is not None]
    both, numbers = curves(timed, unaligned_or_speculative), []
    for (panel, name), curve in both.items():
        if name == "bild":
            continue
        rival = max(curve, key=lambda point: point.speedup.value)
        numbers += cell(panel, name, "speedup", rival.speedup)
        numbers += cell(panel, name, "quality", rival.quality)
        bild = both.get((panel, "bild"), [])
        as_good = [
            point.speedup.value
            for point in bild
            if point.quality.value >= rival.quality.value - MINIMAL_LOSS
        ]
        as_fast = [
            point.quality.value for point in bild if point.speedup.value >= rival.speedup.value
        ]
        for what, best, reference in (
            ("speedup", as_good, rival.speedup.value),
            ("quality", as_fast, rival.quality.value),
        ):
            numbers += cell(
                panel, "bild", f"{what} ahead of {name}", max(best) - reference if best else None
            )
    return numbers


def table(
    row: RowOf,
    quantities: Mapping[str, Callable[[Result], Number]],
    panel: RowOf = dataset,
    by_temperature: bool = False,
) -> Cells:
    """A table of these quantities, each the greatest of a row's points: a row may have a point for
    each window.
    """

    def cells(points: Sequence[Result]) -> list[MeasuredNumber]:
        numbers = []
        for point in points:
            name, where = row(point), panel(point)
            if not point.is_baseline and name is not None and where is not None:
                at = f", temperature {point.setting.temperature:g}" if by_temperature else ""
                for quantity, number in quantities.items():
                    numbers += cell(where, name, f"{quantity}{at}", number(point))
        return greatest(numbers)

    return cells


def theorem(point: Result) -> float | None:
    """The speedup by Theorem 3.8; None if nothing was predicted."""
    return None if point.prediction is None else point.prediction.theorem


def by_category(points: Sequence[Result]) -> list[MeasuredNumber]:
    """BiTA Table 7: tokens per second over the baseline's, by category of the data set."""
    numbers = []
    for point in points:
        if not point.is_baseline and point.categories:
            for category, number in {**point.categories, "overall": point}.items():
                numbers += cell(category, pair(point), "greedy speedup", number.tokens_per_s_ratio)
    return greatest(numbers)


def theorem_table(points: Sequence[Result]) -> list[MeasuredNumber]:
    """Speculative decoding Table 4: the measured speedup beside Theorem 3.8 with the run's own α
    and c.
    """
    numbers = []
    for point in points:
        name, predicted = drafter(point), theorem(point)
        if name is not None and predicted is not None:
            row = (
                f"{name}, window {point.knobs['window']}, temperature {point.setting.temperature:g}"
            )
            numbers += cell(dataset(point), row, "speedup", point.speedup, predicted)
    return numbers


def tokens_per_call(points: Sequence[Result]) -> list[MeasuredNumber]:
    """Speculative decoding Figure 2: tokens per target call beside Equation 1 at the run's own
    α.
    """
    numbers = []
    for point in points:
        rate = point.counts.acceptance_rate
        if point.policy == "synthetic" and rate is not None:
            window = point.knobs["window"]
            name = f"drafted right with {point.knobs['acceptance_rate']:g}"
            calls, expected = point.counts.tokens_per_target_call, expected_tokens(rate, window)
            numbers += cell(f"window {window}", name, "tokens per target call", calls, expected)
    return numbers


def pipeline_trade_off(points: Sequence[Result]) -> list[MeasuredNumber]:
    """PPD Figure 2: match rate, the latency that the theorem gives for it, mean number of
    processes, and speedup.
    """
    numbers = []
    for (panel, name), curve in curves(points, pipeline).items():
        for point in curve:
            run = point.pipeline
            numbers += cell(panel, name, "match rate", run.match_rate)
            latency = None if run.theorem is None else 1 / run.theorem
            numbers += cell(panel, name, "latency per token by the theorem", latency)
            numbers += cell(
                panel, name, "processes on average", run.compute_units / run.latency_units
            )
            numbers += cell(panel, name, "speedup", point.speedup)
    return numbers


def pipeline_compute(points: Sequence[Result]) -> list[MeasuredNumber]:
    """PPD Figure 4: layers run per token and the speedup, each beside Theorem 4.1 with the measured
    match rate.
    """
    numbers = []
    for (panel, name), curve in curves(points, pipeline).items():
        for point in curve:
            run = point.pipeline
            numbers += cell(
                panel, name, "layers run per token", run.compute_units, run.predicted_compute_units
            )
            numbers += cell(panel, name, "speedup", point.speedup, run.theorem)
    return numbers


def match_rates(rates: Sequence[tuple[str, Rate]], positions: bool) -> list[MeasuredNumber]:
    """PPD Table 1, or Tables 4 to 6 by position of the token."""
    numbers = []
    for data, rate in rates:
        over_all_positions = rate.position == TOTAL
        name = f"layer {rate.layer}, {'shared' if rate.heads == SHARED else 'trained'}, k = {rate.top_k}"
        if over_all_positions or positions:
            positions_label = "" if over_all_positions else f"tokens {rate.position}"
            numbers.append(
                MeasuredNumber(data, name, "match rate", rate.rate, part=positions_label)
            )
    return numbers


def greatest(cells: Sequence[MeasuredNumber]) -> list[MeasuredNumber]:
    """The cell with the greatest value of each row."""
    best: dict[Key, MeasuredNumber] = {}
    for number in cells:
        best[number.key] = max(best.get(number.key, number), number, key=lambda cell: cell.value)
    return list(best.values())


def _vanilla(points: Sequence[Result]) -> list[MeasuredNumber]:
    qualities: dict[str, Quality] = {}
    for point in points:
        if point.quality.baseline is not None:
            qualities.setdefault(dataset(point), point.quality)
    return [
        MeasuredNumber(panel, "vanilla", "quality", quality.baseline, metric=quality.metric)
        for panel, quality in qualities.items()
    ]
