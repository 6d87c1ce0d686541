"""Examples: a dataset's rows, and the turns of conversations, with a source, a prompt and
references.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from bild_lab.errors import UserError, require_unicode
from bild_lab.files import shipped_folder
from bild_lab.lab.data.conversations import (
    conversation,
    ends_with_its_question,
    last_turn,
    messages_of,
    questions_and_answers,
)
from bild_lab.lab.data.dataset_spec import REFERENCES, DatasetSpec, Template, fill_template
from bild_lab.lab.data.formats import Row, columns_of, first_value
from bild_lab.lab.data.prompts import (
    Example,
    inserted,
    source_prompt,
    with_answers,
)
from bild_lab.lab.data.rows import canonical_split, hub_rows, local_rows
from bild_lab.lab.metrics.programs import ANSWER
from bild_lab.lab.metrics.text_metrics import needs_references
from bild_lab.lab.schema.questions import questions_of

log = logging.getLogger(__name__)
# SPEED-Bench has this instead of texts it may not distribute
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"
NAME = r"[A-Za-z_][\w.]*"  # a column in a template's braces


def load_examples(spec: DatasetSpec, unanswered: bool = False) -> tuple[Example, ...]:
    """The examples of `spec.limit` rows of the split after `spec.skip`, in the dataset's order;
    never empty. With `spec.categories`, of the rows of these.

    unanswered: allow later turns without their history, which the caller adds. Raises UserError for
    a missing path, split or column, malformed files, an unreachable hub, rows without a source,
    and, unless `unanswered` is set, for later turns without `spec.history`.
    """
    shots = _shots(spec)
    rows = islice(_numbered_rows(spec), spec.skip, None)
    if spec.limit is not None:
        rows = islice(rows, spec.limit)
    by_row = list(_examples(spec, rows, "".join(text for _, text in shots)))
    examples = tuple(_with_shared_sources(by_row))
    if not examples:
        raise _why_none(spec)
    _require_unique_ids(spec, examples)
    # one file may serve as two splits
    if {source for source, _ in shots} & {example.source for example in examples}:
        raise UserError(
            f"split {spec.shot_split!r} of dataset {spec.name!r} has an example of split"
            f" {spec.split!r}, so the prompt would show its answer; give dataset.path a folder with"
            " a file for each split"
        )
    return examples if unanswered and spec.history is None else _with_history(spec, examples)


def _with_shared_sources(
    rows: Sequence[tuple[tuple[str, ...], Sequence[Example]]],
) -> Iterator[Example]:
    """The examples of all rows, which say whether an earlier row has their source, such as a passage
    with several questions on it. rows: the source of each, as texts, and its examples.

    A source that all rows have is no passage but the instruction of a task: there prompts count.
    """
    are_passages = len({source for source, _ in rows}) > 1
    first_ids: dict[tuple[str, ...], str] = {}
    for source, examples in rows:
        (row_id,) = questions_of([examples[0].id])
        first_id = first_ids.setdefault(source if are_passages else (examples[0].prompt,), row_id)
        same_source = None if first_id == row_id else first_id
        yield from (replace(example, same_source=same_source) for example in examples)


def _why_none(spec: DatasetSpec) -> UserError:
    """The error for a dataset without examples."""
    if spec.categories and not spec.skip:
        return UserError(
            f"dataset {spec.name!r} has no row of dataset.categories={list(spec.categories)} in"
            f" split {spec.split!r}; it has {', '.join(_categories(spec)) or 'none'}"
        )
    problem = f"dataset {spec.name!r} has no examples in split {spec.split!r}"
    if next(islice(_numbered_rows(spec), spec.skip, None), None) is not None:
        return UserError(
            f"{problem}, as all of its rows were left out: they have no source, or no answered"
            " question; check dataset.source_column and the rows"
        )
    if spec.skip:
        return UserError(f"{problem} after {spec.skip} rows; check dataset.skip")
    where = f"whether {spec.path} has rows, and " if spec.path else ""
    return UserError(f"{problem}; check {where}dataset.split")


def _require_unique_ids(spec: DatasetSpec, examples: Sequence[Example]) -> None:
    ids = [example.id for example in examples]
    if len(set(ids)) < len(ids):
        repeated_id = next(
            example_id for index, example_id in enumerate(ids) if example_id in ids[:index]
        )
        raise UserError(
            f"dataset {spec.name!r} has two examples with id {repeated_id!r}; set"
            " dataset.id_column=null"
        )


def _with_history(spec: DatasetSpec, examples: tuple[Example, ...]) -> tuple[Example, ...]:
    """The examples, later turns after the answers of `spec.history`. Raises UserError for later
    turns without it.
    """
    if spec.history == REFERENCES:
        return with_answers(
            examples,
            {example.id: example.references[0] for example in examples if example.references},
        )
    if spec.history is not None:
        return with_answers(examples, _history(spec.history, spec.split))
    if any(example.continues for example in examples):
        raise UserError(
            f"the later turns of dataset {spec.name!r} need the answers to the turns before them;"
            " set dataset.turns=1 for first turns only, or dataset.history=DIR, such as"
            " calibration data made with dataset.turns=1"
        )
    return examples


def same_rows(spec: DatasetSpec, split: str) -> bool:
    """Whether another split has the rows of `spec.split`: it is the same one, or one file serves as
    both.

    Raises UserError if one of them is missing.
    """
    if canonical_split(split) == canonical_split(spec.split):
        return True
    # where a row is, names a file; of other datasets of the hub only the number of the row
    in_files = spec.path or spec.hub_data_dir
    return bool(in_files) and _first_place(spec) == _first_place(replace(spec, split=split))


def _first_place(spec: DatasetSpec) -> str | None:
    return next((where for where, _ in _rows(spec)), None)


@lru_cache(maxsize=4)
def cached_examples(spec: DatasetSpec) -> tuple[Example, ...]:
    """The dataset's examples, read once per process.

    Later turns may still lack the earlier answers.
    """
    return load_examples(spec, unanswered=True)


def _history(path: str, split: str) -> dict[str, str]:
    """Answers by the id of their example. Raises UserError for rows without an answer, and for two
    answers to one example.
    """
    answers: dict[str, str] = {}
    for where, row in local_rows(Path(path).expanduser(), canonical_split(split)):
        if not isinstance(row.get("answer"), str) or "id" not in row:
            raise UserError(
                f"{where}: dataset.history needs columns id and answer (text), got"
                f" {columns_of(row)}"
            )
        require_unicode(where, row["answer"])
        if answers.setdefault(str(row["id"]), row["answer"]) != row["answer"]:
            raise UserError(
                f"{where}: dataset.history has another answer to {row['id']!r} before; leave one of"
                " them out"
            )
    return answers


def _rows(spec: DatasetSpec) -> Iterator[tuple[str, Row]]:
    split = canonical_split(spec.split)
    if spec.path:
        folders = [name for name in (spec.hub_data_dir, spec.hub_config) if name]
        return local_rows(Path(shipped_folder(spec.path)).expanduser(), split, folders)
    return hub_rows(
        spec.hub_id,
        split,
        config=spec.hub_config,
        data_dir=spec.hub_data_dir,
        revision=spec.hub_revision,
    )


def _numbered_rows(spec: DatasetSpec) -> Iterator[tuple[int, tuple[str, Row]]]:
    """The rows of the categories that are asked for, each with its number among all."""
    for index, (where, row) in enumerate(_rows(spec)):
        category = _optional(row, spec.category_column) if spec.categories else None
        if not spec.categories or str(category) in spec.categories:
            yield index, (where, row)


def _categories(spec: DatasetSpec) -> list[str]:
    """The categories that the split has, in the order of its rows."""
    categories = (_optional(row, spec.category_column) for _, row in _rows(spec))
    return list(dict.fromkeys(str(category) for category in categories if category is not None))


def _examples(
    spec: DatasetSpec, rows: Iterable[tuple[int, tuple[str, Row]]], shots: str
) -> Iterator[tuple[tuple[str, ...], list[Example]]]:
    """The source of each of these rows, and its examples; rows without a source or an answered
    question are left out. Of a conversation the source is the first turn; where its last one is
    asked, also all before that.

    rows: each with its number in the split. shots: the text that every prompt begins with.
    """
    split = canonical_split(spec.split)
    unanswered = 0
    without_source: list[str] = []
    for index, (where, row) in rows:
        answers: list[str] = []
        if (messages := messages_of(spec, where, row)) is not None:
            turns, answers = questions_and_answers(spec, where, messages)
            for turn in turns:
                _require_whole_text(where, turn)
            if not turns:
                unanswered += 1
                continue
        elif _lacks_source(spec, row):
            without_source.append(where)
            continue
        else:
            turns = _turns(spec, where, row)
        examples = list(_row_examples(spec, where, row, f"{split}-{index}", turns, answers, shots))
        asks_the_last = len(turns) > 1 and ends_with_its_question(spec)
        before = (*turns[:-1], *answers) if asks_the_last else ()
        yield (*before, examples[0].source), examples
    _warn_of_rows(spec.name, unanswered, without_source)


def _warn_of_rows(dataset: str, unanswered: int, without_source: Sequence[str]) -> None:
    """Log what was left out. unanswered: conversations without an answered question.
    without_source: where such rows are.
    """
    if unanswered:
        log.warning(
            "%s: %s without an answered question %s left out",
            dataset,
            "1 conversation" if unanswered == 1 else f"{unanswered} conversations",
            "is" if unanswered == 1 else "are",
        )
    if without_source:
        log.warning(
            "%s: rows without a source are left out, %d of them, first %s",
            dataset,
            len(without_source),
            without_source[0],
        )


def _row_examples(
    spec: DatasetSpec,
    where: str,
    row: Row,
    default_id: str,
    turns: Sequence[str],
    answers: Sequence[str],
    shots: str,
) -> Iterator[Example]:
    """The examples of one row: each of its turns with each template, or the last of them.

    answers: the conversation's own answer to each turn, or to each before the last one, where these
    are used; else none.
    """
    asks_the_last = len(turns) > 1 and ends_with_its_question(spec)
    asked_turn = turns[-1] if asks_the_last else turns[0]
    source, around = _question(spec, where, row, asked_turn, spec.prompt_template)
    around = (shots + around[0], *around[1:])
    question = asked_turn.join(around)
    row_id, category = _optional(row, spec.id_column), _optional(row, spec.category_column)
    example = Example(
        id=default_id if row_id is None else str(row_id),
        source=source,
        prompt=question,
        references=(
            tuple(answers[:1]) if answers and not asks_the_last else _references(spec, where, row)
        ),
        category=None if category is None else str(category),
    )
    texts = [question, *turns, *answers, *example.references, example.id, example.category or ""]
    require_unicode(where, *texts)
    for number, template in enumerate(spec.templates, start=1):
        suffix = f"@{number}" if len(spec.templates) > 1 else ""
        templated_example = replace(example, id=f"{example.id}{suffix}")
        asked_turns, asked_around = turns, around
        if template.trims:
            asked_turns, asked_around = trimmed(turns, around, asks_the_last)
        if asks_the_last:
            yield last_turn(templated_example, asked_turns, answers, template, asked_around)
            continue
        turn_examples = _all_turns(templated_example, asked_turns, asked_around, template)
        if answers and spec.reference_column:
            for turn_example, answer in zip(turn_examples, answers, strict=True):
                yield replace(turn_example, references=(answer,))
        else:
            yield from turn_examples


def _all_turns(
    example: Example, turns: Sequence[str], around: Sequence[str], template: Template
) -> list[Example]:
    """An example for each turn. around: the texts around the source in the first question."""
    first_turn, *later_turns = conversation(example, [turns[0].join(around), *turns[1:]], template)
    texts_around = inserted(template.first_turn.split("{question}"), around)
    prompt = source_prompt(turns[0], texts_around, template.complete)
    return [replace(first_turn, prompt=prompt), *later_turns]


def trimmed(
    turns: Sequence[str], around: Sequence[str], asks_the_last: bool
) -> tuple[list[str], tuple[str, ...]]:
    """The turns and the texts around the asked one, the last or the first, so that no question has
    spaces around it. A turn that is asked several times in a question keeps those inside.
    """
    asked_place = len(turns) - 1 if asks_the_last else 0
    questions = [turn if index == asked_place else turn.strip() for index, turn in enumerate(turns)]
    texts = [around[0].lstrip(), *around[1:]]
    texts[-1] = texts[-1].rstrip()
    turn, spaces_before, spaces_after = turns[asked_place], "", ""
    if not texts[0]:
        spaces_before = turn[: len(turn) - len(turn.lstrip())]
    if not texts[-1]:
        spaces_after = turn[len(turn.rstrip()) :]
    questions[asked_place] = turn.removeprefix(spaces_before).removesuffix(spaces_after)
    texts[1:-1] = [spaces_after + text + spaces_before for text in texts[1:-1]]
    return questions, tuple(texts)


def _shots(spec: DatasetSpec) -> list[tuple[str, str]]:
    """The source and the text of each solved example before every question, of rows that have a
    source.

    Raises UserError if there are too few.
    """
    if not spec.shots:
        return []
    solved_examples = []
    rows = _rows(replace(spec, split=spec.shot_split, shots=0))
    rows_with_source = ((where, row) for where, row in rows if not _lacks_source(spec, row))
    for where, row in islice(rows_with_source, spec.shots):
        turn, reference = _turns(spec, where, row)[0], _column_references(spec, where, row)[0]
        source, around = _question(spec, where, row, turn, spec.shot_template, reference=reference)
        shot = turn.join(around)
        require_unicode(where, shot)
        solved_examples.append((source, shot))
    if len(solved_examples) < spec.shots:
        raise UserError(
            f"dataset.shots={spec.shots}, but split {spec.shot_split!r} has {len(solved_examples)}"
            " examples"
        )
    return solved_examples


def _turns(spec: DatasetSpec, where: str, row: Row) -> list[str]:
    """The source, or the user's text of each turn of a conversation."""
    value = _required_source(spec, where, row)
    turns = list(value[: spec.turns]) if isinstance(value, (list, tuple)) and value else [value]
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            columns = " or ".join(spec.source_column)
            raise UserError(
                f"{where}: {columns} must be a non-empty string, got {turn!r}; correct the row"
            )
        _require_whole_text(where, turn)
    if len(turns) < (len(value) if isinstance(value, list | tuple) else 1):
        known = (name for name in spec.source_column if first_value(row, [name])[1] is not None)
        _require_named_reference(spec, where, next(known))
    return turns


def _require_named_reference(spec: DatasetSpec, where: str, source: str) -> None:
    """Raise UserError for references that may belong to a turn that is not asked, as their columns
    are no places in a list. source: the column of the turns.
    """
    columns = spec.reference_column or ()
    named = all(column.rpartition(".")[2].isdecimal() for column in columns)
    if any(map(needs_references, spec.scored)) and not named:
        reference = columns[0]
        raise UserError(
            f"{where}: {source} holds several turns, of which the first is asked, and"
            f" {reference} may answer another; name the first by dataset.source_column={source}.0,"
            f" and where {reference} is a list, its answer by dataset.reference_column={reference}.0"
        )


def _require_whole_text(where: str, turn: str) -> None:
    """Raise UserError for a text that SPEED-Bench withholds, all of it or a part."""
    if WITHHELD in turn:
        raise UserError(
            f"{where} withholds its text; run NVIDIA's preparation script, and set dataset.path=DIR"
        )


def _lacks_source(spec: DatasetSpec, row: Row) -> bool:
    """Whether the column is there and the row has null or an empty text in it."""
    present, value = first_value(row, spec.source_column or ())
    return present and (value is None or (isinstance(value, str) and not value.strip()))


def _question(
    spec: DatasetSpec, where: str, row: Row, source: str, template: str, **values: str
) -> tuple[str, tuple[str, ...]]:
    """The source with its input, and the texts around the source in a template of the task.

    values: of the template's other placeholders.
    """
    text = _optional(row, spec.input_column)
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where}: {' or '.join(spec.input_column)} must be a string, got {text!r}")
    in_template = "{input}" in template
    if in_template:
        values["input"] = text or ""
    text_before, *texts_after = (
        fill_template(text_around, **values) for text_around in template.split("{source}")
    )
    if in_template or not text or not text.strip():
        return source, (text_before, *texts_after)
    return f"{source}\n{text}", (
        text_before,
        *(f"\n{text}{text_after}" for text_after in texts_after),
    )


def _references(spec: DatasetSpec, where: str, row: Row) -> tuple[str, ...]:
    if spec.reference_template is None:
        return _column_references(spec, where, row) if spec.reference_column else ()
    if not any(map(needs_references, spec.scored)):
        return ()
    # braces around anything but a name stay, as does the place of the answer
    names = set(re.findall("{(" + NAME + ")}", spec.reference_template)) - {ANSWER.strip("{}")}
    values = {name: _text_of(first_value(row, [name])[1]) for name in names}
    if missing := sorted(name for name, value in values.items() if value is None):
        raise UserError(
            f"{where}: dataset.reference_template wants a text in column {missing[0]}, got columns"
            f" {columns_of(row)}"
        )
    return (fill_template(spec.reference_template, **values),)


def _column_references(spec: DatasetSpec, where: str, row: Row) -> tuple[str, ...]:
    """The references of all columns, in their order.

    A column may be null in a row, or blank as an empty cell of a table is, if another one is not.
    """
    values = []
    for column in spec.reference_column:
        present, value = first_value(row, [column])
        if not present:
            raise UserError(
                f"{where}: dataset.reference_column wants column {column}, got columns"
                f" {columns_of(row)}; set it to columns that every row has, if only as null"
            )
        if value is not None:
            values += value if isinstance(value, list | tuple) else [value]
    texts = [_text_of(reference) for reference in values]
    columns = " or ".join(spec.reference_column)
    if not texts:
        raise UserError(
            f"{where}: {columns} holds no reference, got {value!r}; leave the row out of the data,"
            " or set dataset.reference_column=null"
        )
    for text, reference in zip(texts, values, strict=True):
        if text is None:
            remedy = (
                "write the answers as words" if isinstance(reference, bool) else "correct the row"
            )
            raise UserError(
                f"{where}: {columns} must be texts or numbers, or lists of them, got"
                f" {reference!r:.200}; {remedy}"
            )
    # one of several references that is blank is none
    written_texts = [text for text in texts if text.strip()]
    return tuple(written_texts or texts)


def _text_of(value: object) -> str | None:
    """A text, or a number as it is written; None for other values, such as true, which has several
    words.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or (isinstance(value, float | Decimal) and not math.isfinite(value)):
        return None
    if isinstance(value, float):
        return np.format_float_positional(value, trim="0")
    if isinstance(value, Decimal):
        return format(value, "f")
    return str(value) if isinstance(value, int) else None


def _required_source(spec: DatasetSpec, where: str, row: Row) -> object:
    if not spec.source_column:
        raise UserError(
            f"{where} has columns {columns_of(row)}; choose one to decode from:"
            " dataset.source_column=COLUMN"
        )
    present, value = first_value(row, spec.source_column)
    if not present:
        column_names = " or ".join(spec.source_column)
        raise UserError(
            f"{where}: dataset.source_column wants column {column_names}, got columns {columns_of(row)};"
            " set it to one"
        )
    return value


def _optional(row: Row, columns: Sequence[str] | None) -> object:
    return first_value(row, columns)[1] if columns else None
