"""Examples: a dataset's rows, and the turns of conversations, with a source, a prompt and references."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path

from bild_lab.errors import UserError, require_unicode
from bild_lab.files import shipped
from bild_lab.lab.data.dataset_spec import REFERENCES, DatasetSpec, Template
from bild_lab.lab.data.rows import Row, canonical_split, hub_rows, local_rows
from bild_lab.lab.metrics.programs import ANSWER
from bild_lab.lab.metrics.text_metrics import needs_references

log = logging.getLogger(__name__)
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench has this instead of texts it may not distribute
ASKING, ANSWERING = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")  # "from" in ShareGPT's files
NAME = r"[A-Za-z_][\w.]*"  # of a column in a template's braces


@dataclass(frozen=True)
class Continuation:
    """What comes before a later turn: the prompt of turn `id`, the text `between`, and the answer to that turn."""

    id: str
    between: str


@dataclass(frozen=True)
class Example:
    """One input text and its references.

    prompt: the text for the tokenizer. While `continues` is set, the answer to the previous turn is not known, and
    `prompt` is only the text after that answer. `with_answers` gives the complete prompt.
    """

    id: str  # from the dataset, or "SPLIT-INDEX"; unique within a split
    source: str
    prompt: str
    references: tuple[str, ...] = ()
    category: str | None = None
    turn: int = 1
    continues: Continuation | None = None


def load_examples(spec: DatasetSpec, unanswered: bool = False) -> tuple[Example, ...]:
    """The examples of the split's first `spec.limit` rows, in the dataset's order; never empty.

    unanswered: allow later turns without their history, which the caller adds. Raises UserError for a missing path,
    split or column, malformed files, an unreachable hub, rows without a source, and, unless `unanswered` is set, for
    later turns without `spec.history`.
    """
    shots = _shots(spec)
    examples = tuple(_examples(spec, islice(_rows(spec), spec.limit), "".join(text for _, text in shots)))
    if not examples:
        raise UserError(f"dataset {spec.name!r} has no examples in split {spec.split!r}; check dataset.split")
    ids = [example.id for example in examples]
    if len(set(ids)) < len(ids):
        twice = next(one for place, one in enumerate(ids) if one in ids[:place])
        raise UserError(f"dataset {spec.name!r} has two examples with id {twice!r}; set dataset.id_column=null")
    if {source for source, _ in shots} & {example.source for example in examples}:  # one file may serve as two splits
        raise UserError(
            f"split {spec.shot_split!r} of dataset {spec.name!r} has an example of split {spec.split!r}, so the prompt "
            "would show its answer; give dataset.path a folder with a file for each split"
        )
    if spec.history == REFERENCES:
        return with_answers(examples, {one.id: one.references[0] for one in examples if one.references})
    if spec.history is not None:
        return with_answers(examples, _history(spec.history, spec.split))
    if not unanswered and any(example.continues for example in examples):
        raise UserError(
            f"the later turns of dataset {spec.name!r} need the answers to the turns before them; set dataset.turns=1 "
            "for first turns only, or dataset.history=DIR, such as calibration data made with dataset.turns=1"
        )
    return examples


@lru_cache(maxsize=4)
def cached_examples(spec: DatasetSpec) -> tuple[Example, ...]:
    """The dataset's examples, read once per process. Later turns may still lack the earlier answers."""
    return load_examples(spec, unanswered=True)


def _history(path: str, split: str) -> dict[str, str]:
    """Answers by the id of their example. Raises UserError for rows without an answer."""
    answers = {}
    for where, row in local_rows(Path(path).expanduser(), canonical_split(split)):
        if not isinstance(row.get("answer"), str) or "id" not in row:
            raise UserError(f"{where}: dataset.history needs columns id and answer (text), got {columns_of(row)}")
        require_unicode(where, row["answer"])
        answers[str(row["id"])] = row["answer"]
    return answers


def _rows(spec: DatasetSpec) -> Iterator[tuple[str, Row]]:
    split = canonical_split(spec.split)
    if spec.path:
        folders = [name for name in (spec.hub_data_dir, spec.hub_config) if name]
        return local_rows(Path(shipped(spec.path)).expanduser(), split, folders)
    return hub_rows(spec.hub_id, split, config=spec.hub_config, data_dir=spec.hub_data_dir, revision=spec.hub_revision)


def _examples(spec: DatasetSpec, rows: Iterable[tuple[str, Row]], shots: str) -> Iterator[Example]:
    """shots: what every prompt begins with."""
    split, unanswered, lacking = canonical_split(spec.split), 0, list[str]()
    for index, (where, row) in enumerate(rows):
        answers: list[str] = []
        if _has_roles(spec, row):
            turns, answers = _dialogue(spec, row)
            if not turns:
                unanswered += 1
                continue
        elif _lacks_source(spec, row):
            lacking.append(where)
            continue
        else:
            turns = _turns(spec, where, row)
        source, question = _question(spec, where, row, turns[0])
        question = shots + question
        own_id, category = _optional(row, spec.id_column), _optional(row, spec.category_column)
        example = Example(
            id=f"{split}-{index}" if own_id is None else str(own_id),
            source=source,
            prompt=question,
            references=tuple(answers[:1]) if answers else _references(spec, where, row),
            category=None if category is None else str(category),
        )
        texts = (question, *turns, *answers, *example.references, example.id, example.category or "")
        require_unicode(where, *texts)
        for number, template in enumerate(spec.templates, start=1):
            asked = example if len(spec.templates) == 1 else replace(example, id=f"{example.id}@{number}")
            asked_turns = conversation(asked, [question, *turns[1:]], template)
            for turn, answer in zip(asked_turns, answers or [None] * len(asked_turns), strict=True):
                yield turn if answer is None or not spec.reference_column else replace(turn, references=(answer,))
    if unanswered:
        log.warning("%s: %d conversations without an answered question are left out", spec.name, unanswered)
    if lacking:
        log.warning("%s: rows without a source are left out, %d of them, first %s", spec.name, len(lacking), lacking[0])


def _shots(spec: DatasetSpec) -> list[tuple[str, str]]:
    """The source and the text of each solved example before every question, of rows that have a source.

    Raises UserError if there are too few.
    """
    found = []
    other = replace(spec, split=spec.shot_split, limit=spec.shots, shots=0) if spec.shots else spec
    whole = ((where, row) for where, row in _rows(other) if not _lacks_source(spec, row))
    for where, row in islice(whole, spec.shots):
        source, reference = _turns(spec, where, row)[0], _column_references(spec, where, row)[0]
        require_unicode(where, source, reference)
        found.append((source, fill_template(spec.shot_template, source=source, reference=reference)))
    if len(found) < spec.shots:
        raise UserError(f"dataset.shots={spec.shots}, but split {spec.shot_split!r} has {len(found)} examples")
    return found


def _turns(spec: DatasetSpec, where: str, row: Row) -> list[str]:
    """The source, or the user's text of each turn of a conversation."""
    value = _required(spec, where, row, "source_column")
    turns = list(value[: spec.turns]) if isinstance(value, (list, tuple)) and value else [value]
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            columns = " or ".join(spec.source_column)
            raise UserError(f"{where}: {columns} must be a non-empty string, got {turn!r}; correct the row")
        if turn.startswith(WITHHELD):
            raise UserError(f"{where} withholds its text; run NVIDIA's preparation script, and set dataset.path=DIR")
    return turns


def _lacks_source(spec: DatasetSpec, row: Row) -> bool:
    """Whether the column is there and the row has null or an empty text in it."""
    present, value = first_value(row, spec.source_column or ())
    return present and (value is None or (isinstance(value, str) and not value.strip()))


def _has_roles(spec: DatasetSpec, row: Row) -> bool:
    """Whether the source is a conversation of messages, each with its speaker: {"from", "value"}."""
    value = first_value(row, spec.source_column)[1] if spec.source_column else None
    if not isinstance(value, list) or (not value and spec.history != REFERENCES):
        return False
    return all(isinstance(one, Mapping) and {"from", "value"} <= set(one) for one in value)


def _dialogue(spec: DatasetSpec, row: Row) -> tuple[list[str], list[str]]:
    """The questions of a conversation, and the answer to each.

    An answer before the first question is skipped, as FastChat does (`train.py`, `preprocess`). The conversation ends
    at the first message that is empty, of another speaker or out of turn, which FastChat does not take.
    """
    messages = first_value(row, spec.source_column)[1]
    if messages and messages[0]["from"] not in ASKING:
        messages = messages[1:]
    expected = (ASKING if place % 2 == 0 else ANSWERING for place in range(len(messages)))
    fitting = takewhile(
        lambda pair: pair[0]["from"] in pair[1] and (pair[0]["value"] or "").strip(),
        zip(messages, expected, strict=True),
    )
    texts = [message["value"] for message, _ in fitting]
    pairs = list(zip(texts[::2], texts[1::2], strict=False))[: spec.turns]  # a last question may have no answer
    return [question for question, _ in pairs], [answer for _, answer in pairs]


def _question(spec: DatasetSpec, where: str, row: Row, source: str) -> tuple[str, str]:
    """The source with its input, and the question that the task asks about it."""
    text = _optional(row, spec.input_column)
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where}: {' or '.join(spec.input_column)} must be a string, got {text!r}")
    if spec.input_column and "{input}" in spec.prompt_template:
        return source, fill_template(spec.prompt_template, source=source, input=text or "")
    if text and text.strip():
        source = f"{source}\n{text}"
    return source, fill_template(spec.prompt_template, source=source)


def _references(spec: DatasetSpec, where: str, row: Row) -> tuple[str, ...]:
    if spec.reference_template is None:
        return _column_references(spec, where, row) if spec.reference_column else ()
    if not any(map(needs_references, spec.scored)):
        return ()
    # braces around anything but a name stay, as does the place of the answer
    names = set(re.findall("{(" + NAME + ")}", spec.reference_template)) - {ANSWER.strip("{}")}
    values = {name: first_value(row, [name])[1] for name in names}
    if missing := sorted(name for name, value in values.items() if not isinstance(value, str)):
        raise UserError(
            f"{where}: dataset.reference_template wants a text in column {missing[0]}, got columns {columns_of(row)}"
        )
    return (fill_template(spec.reference_template, **values) if values else spec.reference_template,)


def _column_references(spec: DatasetSpec, where: str, row: Row) -> tuple[str, ...]:
    value = _required(spec, where, row, "reference_column")
    references = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(reference, str) for reference in references):
        raise UserError(f"{where}: {' or '.join(spec.reference_column)} must be a string or strings, got {value!r}")
    return references


def _required(spec: DatasetSpec, where: str, row: Row, field: str) -> object:
    columns = getattr(spec, field)
    if not columns:
        raise UserError(f"{where} has columns {columns_of(row)}; choose one to decode from: dataset.{field}=COLUMN")
    present, value = first_value(row, columns)
    if not present:
        wanted = " or ".join(columns)
        raise UserError(f"{where}: dataset.{field} wants column {wanted}, got columns {columns_of(row)}; set it to one")
    return value


def _optional(row: Row, columns: Sequence[str] | None) -> object:
    return first_value(row, columns)[1] if columns else None


def first_value(row: Row, columns: Sequence[str]) -> tuple[bool, object]:
    """Whether the row has any of the columns, and the first value that is not null. `a.b` is a field inside a."""
    present = False
    for column in columns:
        value: object = {column: row[column]} if column in row else row
        for key in [column] if column in row else column.split("."):
            if not isinstance(value, Mapping) or key not in value:
                break
            value = value[key]
        else:
            present = True
            if value is not None:
                return True, value
    return present, None


def columns_of(row: Row, prefix: str = "") -> str:
    """The names of all columns, and of the fields inside them."""
    return ", ".join(
        columns_of(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else f"{prefix}{key}"
        for key, value in row.items()
    )


def fill_template(template: str, **values: str) -> str:
    """The template with its placeholders replaced. Other braces, and braces in the values, are unchanged."""
    names = "|".join(map(re.escape, values))
    return re.sub("{(" + names + ")}", lambda match: values[match[1]], template)


def conversation(first: Example, questions: Sequence[str], template: Template) -> list[Example]:
    """An example for each question: the first with a complete prompt, later ones without the previous turns."""
    between, _, after = template.next_turn.partition("{answer}")
    turns = [replace(first, prompt=fill_template(template.first, question=questions[0]))]
    for number, question in enumerate(questions[1:], start=2):
        turns.append(
            replace(
                first,
                id=f"{first.id}/{number}",
                source=question,
                prompt=fill_template(after, question=question),
                references=(),
                turn=number,
                continues=Continuation(turns[-1].id, between),
            )
        )
    return turns


def with_answers(examples: Sequence[Example], answers: Mapping[str, str]) -> tuple[Example, ...]:
    """The examples with complete prompts. answers: the answer to each earlier turn, by the turn's id.

    Raises UserError if an answer is missing. A turn must come before the turns that continue it.
    """
    whole: dict[str, Example] = {}
    for example in examples:
        whole[example.id] = with_earlier_turns(example, whole, answers)
    return tuple(whole.values())


def with_earlier_turns(example: Example, before: Mapping[str, Example], answers: Mapping[str, str]) -> Example:
    """One example with its complete prompt. before: the previous turns, with complete prompts."""
    if example.continues is None:
        return example
    earlier = example.continues.id
    if earlier not in answers:
        raise UserError(
            f"turn {example.turn} of example {example.id!r} needs the answer to {earlier!r}, which is not in "
            "dataset.history; add it, set dataset.turns=1 for first turns only, or set dataset.history=null"
        )
    prompt = before[earlier].prompt + example.continues.between + answers[earlier] + example.prompt
    return replace(example, prompt=prompt, continues=None)
