"""The table of Spec-Bench over a sweep's points, so that a number lies beside a published one.

As its evaluation/speed.py has it (Xia et al., 2024, Table 2): a question's tokens a second are
those of all its turns together; a task's speedup is the mean over its questions, divided by the
baseline's mean; MT-Bench's eight categories are one task; mean accepted tokens are tokens a
verification. These are ratios of means, without pairs or intervals: a sweep's own table has those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median

from bild_lab.errors import UserError
from bild_lab.lab.schema.examples import MeasuredExample, read_examples
from bild_lab.lab.schema.formatting import MISSING, number, point_label, times
from bild_lab.lab.schema.result import Result

MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
TASKS = {  # as the table calls them: the categories of its questions
    "MT-Bench": MT_BENCH,
    "Translation": ("translation",),
    "Summarization": ("summarization",),
    "QA": ("qa",),
    "Math": ("math_reasoning",),
    "RAG": ("rag",),
}
OVERALL = "Overall"
ACCEPTED = "mean accepted tokens"


def spec_bench_table(results: Sequence[Result]) -> str:
    """A row in Markdown for each timed point with a baseline: speedup by task, mean accepted
    tokens, speedup over all questions.

    Raises UserError if there is none, or a category that Spec-Bench does not have.
    """
    rows = []
    for result in results:
        if result.speedup.value is not None and not result.is_baseline:
            label = point_label(result, list(result.knobs))
            rows.append([label, *spec_bench_row(read_examples(result.folder))])
    if not rows:
        raise UserError(
            "no point was timed beside a baseline; Spec-Bench's table compares with one:"
            " measure.baseline=vanilla"
        )
    titles = ["policy", *TASKS, ACCEPTED, OVERALL]
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def spec_bench_row(examples: Sequence[MeasuredExample]) -> list[str]:
    """The cells of a point behind its name. Raises UserError for categories of another dataset."""
    known = {category for categories in TASKS.values() for category in categories}
    if unknown := {str(example.category) for example in examples} - known:
        raise UserError(
            f"Spec-Bench has no category {sorted(unknown)[0]!r}; measure dataset=spec_bench"
        )
    cells = []
    for categories in TASKS.values():
        of_task = [example for example in examples if example.category in categories]
        cells.append(times(speedup_of_means(of_task)) if of_task else MISSING)
    accepted = [
        measured_round.accepted + 1 for example in examples for measured_round in example.rounds
    ]
    return [
        *cells,
        number(mean(accepted), 2) if accepted else MISSING,
        times(speedup_of_means(examples)),
    ]


def speedup_of_means(examples: Sequence[MeasuredExample]) -> float:
    """The mean of the questions' tokens a second over the baseline's mean."""
    return mean(questions_per_s(examples)) / mean(questions_per_s(examples, baseline=True))


def questions_per_s(examples: Iterable[MeasuredExample], baseline: bool = False) -> list[float]:
    """Each question's tokens a second, its turns together; of repeats the median counts."""
    totals: dict[str, list[float]] = {}
    for example in examples:
        tokens = example.baseline_token_ids if baseline else example.token_ids
        seconds = example.baseline_latency_s if baseline else example.latency_s
        total = totals.setdefault(example.id, [0.0, 0.0])
        total[0] += len(tokens)
        total[1] += median(seconds)
    return [tokens / seconds for tokens, seconds in totals.values()]
