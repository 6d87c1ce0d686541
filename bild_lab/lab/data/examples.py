"""Turns a dataset's rows into examples with a source, a prompt and references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.data.conversations import Example, conversation, fill_template, with_answers
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.hub_datasets import hub_rows
from bild_lab.lab.data.local_files import Row, canonical_split, local_rows
from bild_lab.lab.data.row_values import column_paths, filled, first_value
from bild_lab.lab.metrics.programs import ANSWER

WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench has this instead of texts it may not distribute


def load_examples(spec: DatasetSpec, unanswered: bool = False) -> tuple[Example, ...]:
    """The examples of the split's first `spec.limit` rows, in the dataset's order; never empty.

    unanswered: allow later turns without their history, which the caller adds. Raises UserError for a missing path,
    split or column, malformed files, an unreachable hub, rows without a source, and, unless `unanswered` is set, for
    later turns without `spec.history`.
    """
    shots, rows = _shots(spec), islice(_rows(spec), spec.limit)
    examples = tuple(_examples(spec, rows, "".join(text for _, text in shots)))
    if not examples:
        raise UserError(
            f"dataset {spec.name!r} has no examples in split {spec.split!r}; check dataset.path and dataset.split"
        )
    _require_unique_ids(spec, examples)
    _require_unseen(spec, examples, {source for source, _ in shots})
    if spec.history is not None:
        return with_answers(examples, _history(spec.history, spec.split))
    if not unanswered and any(example.continues for example in examples):
        raise UserError(
            f"the later turns of dataset {spec.name!r} need the answers to the turns before them; set dataset.turns=1 "
            "for first turns only, or dataset.history=DIR, such as calibration data made with dataset.turns=1"
        )
    return examples


def _history(path: str, split: str) -> dict[str, str]:
    """Answers by the id of their example. Raises UserError for rows without an answer."""
    answers = {}
    for where, row in local_rows(Path(path).expanduser(), canonical_split(split)):
        if not isinstance(row.get("answer"), str) or "id" not in row:
            got = ", ".join(column_paths(row))
            raise UserError(f"{where}: dataset.history needs columns id and answer (text), got {got}")
        answers[str(row["id"])] = row["answer"]
    return answers


def _rows(spec: DatasetSpec) -> Iterator[tuple[str, Row]]:
    split = canonical_split(spec.split)
    if spec.path:
        folders = [name for name in (spec.hub_data_dir, spec.hub_config) if name]
        return local_rows(Path(spec.path).expanduser(), split, folders)
    if spec.hub_id:
        return hub_rows(
            spec.hub_id, split, config=spec.hub_config, data_dir=spec.hub_data_dir, revision=spec.hub_revision
        )
    return _toy_rows(split)


def _toy_rows(split: str) -> Iterator[tuple[str, Row]]:
    from bild_lab.lab.data.toy import toy_corpus

    if split not in ("train", "validation", "test"):
        raise UserError(f"the toy corpus has splits train, validation and test, got {split!r}")
    return ((f"toy {split} row {index}", dict(row)) for index, row in enumerate(toy_corpus(split)))


def _examples(spec: DatasetSpec, rows: Iterable[tuple[str, Row]], shots: str) -> Iterator[Example]:
    """shots: what every prompt begins with."""
    split = canonical_split(spec.split)
    for index, (where, row) in enumerate(rows):
        turns = _turns(spec, where, row)
        source, question = _question(spec, where, row, turns[0])
        question = shots + question
        own_id, category = _optional(row, spec.id_column), _optional(row, spec.category_column)
        example = Example(
            id=f"{split}-{index}" if own_id is None else str(own_id),
            source=source,
            prompt=question,
            references=_references(spec, where, row),
            category=None if category is None else str(category),
        )
        for number, template in enumerate(spec.templates, start=1):
            asked = example if len(spec.templates) == 1 else replace(example, id=f"{example.id}@{number}")
            yield from conversation(asked, [question, *turns[1:]], template)


def _shots(spec: DatasetSpec) -> list[tuple[str, str]]:
    """The source and the text of each solved example before every question. Raises UserError if there are too few."""
    if not spec.shots:
        return []
    other = replace(spec, split=spec.shot_split, limit=spec.shots, shots=0)
    found = []
    for where, row in islice(_rows(other), spec.shots):
        (source, *_) = _turns(spec, where, row)
        (reference, *_) = _column_references(spec, where, row)
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
            raise UserError(
                f"{where}: {' or '.join(spec.source_column)} must be a non-empty string, got {turn!r}; "
                "correct the row, or set dataset.limit to stop before it"
            )
        if turn.startswith(WITHHELD):
            raise UserError(
                f"{where} has a notice instead of its text; complete the dataset with NVIDIA's preparation script, "
                "then set dataset.path=DIR"
            )
    return turns


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
        return _column_references(spec, where, row)
    if spec.scored == ("agreement",):
        return ()
    reference, missing = filled(spec.reference_template, row, ANSWER)
    if missing:
        raise UserError(
            f"{where}: dataset.reference_template wants a text in column {missing[0]}, "
            f"got columns {', '.join(column_paths(row))}"
        )
    return (reference,)


def _column_references(spec: DatasetSpec, where: str, row: Row) -> tuple[str, ...]:
    if not spec.reference_column:
        return ()
    value = _required(spec, where, row, "reference_column")
    references = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(reference, str) for reference in references):
        raise UserError(f"{where}: {' or '.join(spec.reference_column)} must be a string or strings, got {value!r}")
    return references


def _required(spec: DatasetSpec, where: str, row: Row, field: str) -> object:
    columns = getattr(spec, field)
    if not columns:
        raise UserError(
            f"{where} has columns {', '.join(column_paths(row))}; say which one to decode from: dataset.{field}=COLUMN"
        )
    present, value = first_value(row, columns)
    if not present:
        raise UserError(
            f"{where}: dataset.{field} wants column {' or '.join(columns)}, "
            f"got columns {', '.join(column_paths(row))}; set dataset.{field} to one of them"
        )
    return value


def _optional(row: Row, columns: Sequence[str] | None) -> object:
    return first_value(row, columns)[1] if columns else None


def _require_unseen(spec: DatasetSpec, examples: Sequence[Example], shown: set[str]) -> None:
    """Raise UserError if a solved example is one of those to decode: one file may serve as two splits."""
    if shown & {example.source for example in examples}:
        raise UserError(
            f"split {spec.shot_split!r} of dataset {spec.name!r} has an example of split {spec.split!r}, so the prompt "
            "would show its answer; give dataset.path a folder with a file for each split"
        )


def _require_unique_ids(spec: DatasetSpec, examples: Sequence[Example]) -> None:
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise UserError(
                f"dataset {spec.name!r} has two examples with id {example.id!r}; set dataset.id_column=null"
            )
        seen.add(example.id)
