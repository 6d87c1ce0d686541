"""Turns a dataset's rows into examples with a source, a prompt and references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from bild_lab.errors import UserError, require_whole
from bild_lab.lab.data.conversations import Example, Template, conversation, fill_template, with_answers
from bild_lab.lab.data.hub_datasets import hub_rows
from bild_lab.lab.data.local_files import SPLIT_WORDS, SUFFIXES, Row, canonical_split, local_rows
from bild_lab.lab.metrics import METRICS

BUILTIN = ("toy",)
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench has this instead of texts it may not distribute


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Where a dataset is and which of its columns are used: the fields of `conf/dataset/*.yaml`.

    A `name` that is None becomes that of the data's file, folder or hub id. A `metric` that is None becomes agreement,
    if there are no references.
    `path` overrides `hub_id`, which overrides `builtin`. A column is a dotted path ("translation.de"), or a list of
    paths: the first one that a row has is used. `chat_template` and `next_turn_template` belong to a chat model, as in
    `conf/template/*.yaml`. Raises UserError for values that no dataset can satisfy.
    """

    name: str | None  # what tables and logs call the dataset; null: the name of the file, folder or hub id
    hub_id: str | None = None  # of the Hugging Face hub
    hub_config: str | None = None  # the configuration of a dataset of the hub, such as de-en
    hub_data_dir: str | None = None  # a folder inside a dataset of the hub
    hub_revision: str | None = None  # branch, tag or commit of the hub
    path: str | None = None  # a folder or a file (.jsonl .json .csv .tsv .parquet), used instead of the hub
    builtin: str | None = None  # toy: the corpus embedded in the package
    split: str = "test"  # train, validation, test, or another split of the dataset
    limit: int | None = None  # the first rows only, at least 1; null: all
    # the text to decode from; of a list the turns of a conversation. Columns: a name, a.b for a field inside one, or a
    # list of which the first one that a row has is taken
    source_column: str | Sequence[str] | None
    input_column: str | Sequence[str] | None = None  # for {input} of the prompt, else below the source
    reference_column: str | Sequence[str] | None = None  # one or several references; null: dataset.metric=agreement
    id_column: str | Sequence[str] | None = None  # null: examples are numbered
    category_column: str | Sequence[str] | None = None  # the dataset's own division; reports have a table by it
    prompt_template: str = "{source}"  # states the task; must hold {source}
    chat_template: str | Sequence[str] = "{question}"  # holds {question}; with several, each question is asked in all
    next_turn_template: str = Template.next_turn  # holds {answer}, to the turn before, and then {question}
    turns: int | None = 1  # how many turns of a conversation, at least 1; null: all
    history: str | None = None  # a file or folder with columns `id` and `answer`, which later turns continue
    # bleu, rouge, or agreement (the share of texts that are the baseline's own); null: agreement without references
    metric: str | None
    max_source_tokens: int | None = None  # the tokenizer cuts the prompt to this length, at least 1; null: never

    def __post_init__(self) -> None:
        for field in ("source_column", "input_column", "reference_column", "id_column", "category_column"):
            object.__setattr__(self, field, _column_names(field, getattr(self, field)))
        self._require_kinds()
        if self.name is None:
            object.__setattr__(self, "name", _name_of(self.path, self.hub_id))
        if self.metric is None:
            if self.reference_column:
                raise UserError("dataset.metric must be bleu (translations) or rouge (summaries, answers), got none")
            object.__setattr__(self, "metric", "agreement")
        chat = (self.chat_template,) if isinstance(self.chat_template, str) else tuple(self.chat_template or ())
        if not chat or not all(isinstance(one, str) for one in chat):
            raise UserError(f"dataset.chat_template must be text or several texts, got {self.chat_template!r}")
        object.__setattr__(self, "chat_template", chat)
        _ = self.templates
        self._require_metric_fits()
        if self.max_source_tokens is not None and (
            self.turns != 1 or not all(one.endswith("{question}") for one in chat)
        ):
            raise UserError(
                "dataset.max_source_tokens cuts a prompt at its end, which a chat template and later turns need whole, "
                f"got {self.max_source_tokens}; set dataset.max_source_tokens=null"
            )
        if self.builtin is not None and self.builtin not in BUILTIN:
            raise UserError(f"dataset.builtin must be one of {', '.join(BUILTIN)}, got {self.builtin!r}")
        if not (self.path or self.hub_id or self.builtin):
            raise UserError(f"dataset {self.name!r} has no data: set dataset.path=DIR or dataset.hub_id=OWNER/NAME")

    def _require_kinds(self) -> None:
        for field in ("path", "split", "prompt_template", "metric", "hub_id", "history", "next_turn_template"):
            value = getattr(self, field)
            if value is not None and not isinstance(value, str):
                raise UserError(f"dataset.{field} must be text, got {value!r}; quote it: dataset.{field}='\"{value}\"'")
        for field in ("limit", "max_source_tokens", "turns"):
            value = getattr(self, field)
            if value is not None:
                require_whole(f"dataset.{field}", value, 1, remedy="use null for no limit")
        if not self.split:
            raise UserError("dataset.split must name a split (train, validation, test), got an empty one")
        if not self.source_column and not self.path:  # for a path, the columns that there are can be named
            raise UserError("dataset.source_column must name the column to decode from, got none")
        if self.prompt_template is None or "{source}" not in self.prompt_template:
            raise UserError(f"dataset.prompt_template must contain {{source}}, got {self.prompt_template!r}")

    def _require_metric_fits(self) -> None:
        if self.metric not in METRICS:
            raise UserError(f"dataset.metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        if self.metric != "agreement" and not self.reference_column:
            raise UserError(
                f"dataset.metric={self.metric} needs references: set dataset.reference_column, "
                "or use dataset.metric=agreement"
            )
        if self.turns != 1 and self.metric != "agreement":
            raise UserError(
                "dataset.turns beyond the first need dataset.metric=agreement, as references belong to no turn; "
                f"got dataset.metric={self.metric}"
            )

    @property
    def templates(self) -> tuple[Template, ...]:
        """The templates; every question is asked once with each."""
        return tuple(Template(first, self.next_turn_template) for first in self.chat_template)


def load_examples(spec: DatasetSpec, unanswered: bool = False) -> tuple[Example, ...]:
    """The examples of the split's first `spec.limit` rows, in the dataset's order; never empty.

    unanswered: allow later turns without their history, which the caller adds. Raises UserError for a missing path,
    split or column, malformed files, an unreachable hub, rows without a source, and, unless `unanswered` is set, for
    later turns without `spec.history`.
    """
    rows = islice(_rows(spec), spec.limit)
    examples = tuple(_examples(spec, rows))
    if not examples:
        raise UserError(
            f"dataset {spec.name!r} has no examples in split {spec.split!r}; check dataset.path and dataset.split"
        )
    _require_unique_ids(spec, examples)
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
            got = ", ".join(_column_paths(row))
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


def _examples(spec: DatasetSpec, rows: Iterable[tuple[str, Row]]) -> Iterator[Example]:
    split = canonical_split(spec.split)
    for index, (where, row) in enumerate(rows):
        turns = _turns(spec, where, row)
        source, question = _question(spec, where, row, turns[0])
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
            f"{where} has columns {', '.join(_column_paths(row))}; say which one to decode from: dataset.{field}=COLUMN"
        )
    present, value = _first(row, columns)
    if not present:
        raise UserError(
            f"{where}: dataset.{field} wants column {' or '.join(columns)}, "
            f"got columns {', '.join(_column_paths(row))}; set dataset.{field} to one of them"
        )
    return value


def _optional(row: Row, columns: Sequence[str] | None) -> object:
    return _first(row, columns)[1] if columns else None


def _first(row: Row, columns: Sequence[str]) -> tuple[bool, object]:
    """Whether the row has any of the columns, and the first value that is not null."""
    found = [lookup for lookup in (_lookup(row, column) for column in columns) if lookup]
    values = [value for (value,) in found if value is not None]
    return bool(found), values[0] if values else None


def _lookup(row: Row, column: str) -> tuple[object] | None:
    """The value at a dotted path in a one-tuple, or None if the path is absent."""
    if column in row:
        return (row[column],)
    value: object = row
    for key in column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return (value,)


def _column_paths(row: Mapping[str, object], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for key, value in row.items():
        nested = isinstance(value, Mapping) and value
        paths += _column_paths(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return paths


def _name_of(path: str | None, hub_id: str | None) -> str:
    """The name of data without one: that of the file or folder, or of the folder of a file named after its split."""
    if not path:
        return (hub_id or "local").rpartition("/")[2]
    place = Path(path).expanduser().resolve()
    stem = place.stem if place.suffix.lower() in SUFFIXES else place.name
    return place.parent.name if stem.lower() in SPLIT_WORDS else stem


def _column_names(field: str, columns: object) -> tuple[str, ...] | None:
    """One or several column names as a tuple. Raises UserError for anything else."""
    if columns is None:
        return None
    names = (columns,) if isinstance(columns, str) else tuple(columns) if isinstance(columns, Sequence) else (None,)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"dataset.{field} must be a column's name or a list of names, got {columns!r}")
    return names


def _require_unique_ids(spec: DatasetSpec, examples: Sequence[Example]) -> None:
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise UserError(
                f"dataset {spec.name!r} has two examples with id {example.id!r}; set dataset.id_column=null"
            )
        seen.add(example.id)
