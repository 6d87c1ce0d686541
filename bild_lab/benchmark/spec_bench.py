"""The table of Spec-Bench over a sweep's points, so that a number lies beside a published one.

As its evaluation/speed.py has it (Xia et al., 2024, Table 2): a question's tokens a second are
those of all its turns together; a task's speedup is the mean over its questions, divided by the
baseline's mean; MT-Bench's eight categories are one task. Mean accepted tokens are those that a
verification appends before the text is cut at its end (evaluation/inference_medusa.py): the
target's own token after an accepted end token counts, which our tokens a target call leave out. Drafts
that end a text unverified (`verify_tail: false`) are no such step, and count nowhere. These
are ratios of means, without pairs or intervals: a sweep's own table has those. A question of which a
server failed to give a text counts nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from bild_lab.errors import UserError
from bild_lab.lab.schema.examples import MeasuredExample, read_examples
from bild_lab.lab.schema.formatting import MISSING, markdown_table, number, point_label, times
from bild_lab.lab.schema.questions import questions_of
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import flat_setting, varying_keys

QUESTIONS = 480
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
    tokens, speedup over all questions. A point's name has what differs in the settings; below it
    says how many questions a point has, if not all.

    Raises UserError if there is none, or a category that Spec-Bench does not have.
    """
    timed = [
        result for result in results if result.speedup.value is not None and not result.is_baseline
    ]
    settings = [flat_setting(result) for result in timed]
    differing = varying_keys(settings)
    rows, notes = [], []
    for result, setting in zip(timed, settings, strict=True):
        label = ", ".join(
            [
                point_label(result, list(result.knobs)),
                *(f"{key} {setting.get(key)}" for key in differing),
            ]
        )
        examples = answered_questions(read_examples(result.folder))
        rows.append([label, *spec_bench_row(examples, result.counts.tokens_per_target_call)])
        count = len(set(_questions(examples)))
        if count < QUESTIONS:
            notes.append(f"{label}: over {count} of the {QUESTIONS} questions.")
    if not rows:
        raise UserError(
            "no point was timed beside a baseline; Spec-Bench's table compares with one:"
            " measure.baseline=vanilla"
        )
    table = markdown_table(["policy", *TASKS, ACCEPTED, OVERALL], rows)
    return "\n\n".join([table, *notes])


def answered_questions(examples: Sequence[MeasuredExample]) -> list[MeasuredExample]:
    """The turns of those questions of which every text came, of the point and of its baseline."""
    examples_with_questions = list(zip(examples, _questions(examples), strict=True))
    failed = {question for example, question in examples_with_questions if example.failed}
    return [example for example, question in examples_with_questions if question not in failed]


def _questions(examples: Sequence[MeasuredExample]) -> list[str]:
    """The question of each text: turns of one share it."""
    return questions_of([example.id for example in examples])


def spec_bench_row(
    examples: Sequence[MeasuredExample], tokens_per_call: float | None = None
) -> list[str]:
    """The cells of a point behind its name. tokens_per_call: of a method whose rounds are not
    stored, such as a server that reports totals.

    Raises UserError for categories of another dataset.
    """
    known = {category for categories in TASKS.values() for category in categories}
    if unknown := {str(example.category) for example in examples} - known:
        raise UserError(
            f"Spec-Bench has no category {sorted(unknown)[0]!r}; measure dataset=spec_bench"
        )
    cells = []
    for categories in TASKS.values():
        of_task = [example for example in examples if example.category in categories]
        cells.append(_shown(speedup_of_means(of_task)))
    accepted = [
        measured_round.accepted + 1
        for example in examples
        for measured_round in example.rounds
        if measured_round.next_token is not None
    ]
    mean_accepted = mean(accepted) if accepted else tokens_per_call
    return [
        *cells,
        MISSING if mean_accepted is None else number(mean_accepted, 2),
        _shown(speedup_of_means(examples)),
    ]


def speedup_of_means(examples: Sequence[MeasuredExample]) -> float | None:
    """The mean of the questions' tokens a second over the baseline's mean; None without questions,
    and for a baseline without tokens.
    """
    baseline = questions_per_s(examples, baseline=True)
    if not any(baseline):
        return None
    return mean(questions_per_s(examples)) / mean(baseline)


def questions_per_s(examples: Sequence[MeasuredExample], baseline: bool = False) -> list[float]:
    """Each question's tokens a second, its turns together; of repeats the median counts."""
    totals: dict[str, list[float]] = {}
    for example, question in zip(examples, _questions(examples), strict=True):
        tokens = example.baseline_token_ids if baseline else example.token_ids
        seconds = example.baseline_latency_s if baseline else example.latency_s
        total = totals.setdefault(question, [0.0, 0.0])
        total[0] += len(tokens)
        total[1] += median(seconds)
    return [tokens / seconds for tokens, seconds in totals.values()]


def _shown(speedup: float | None) -> str:
    return MISSING if speedup is None else times(speedup)
