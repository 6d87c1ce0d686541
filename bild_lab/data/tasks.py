"""What is decoded: a dataset's rows as examples with a source, a prompt and references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bild_lab.data.hub_datasets import hub_rows
from bild_lab.data.loading import Row, canonical_split, local_rows
from bild_lab.errors import UserError
from bild_lab.metrics import METRICS

BUILTIN = ("toy",)


@dataclass(frozen=True)
class Example:
    """One text to decode from, and what a good decoding looks like."""

    id: str  # the dataset's own, or "SPLIT-INDEX"; unique within a split
    source: str
    prompt: str  # what the tokenizer gets
    references: tuple[str, ...] = ()
    category: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Where a dataset is and which of its columns matter: the fields of `conf/dataset/*.yaml`.

    `path` overrides `hub_id`, which overrides `builtin`. A column is a dotted path
    ("translation.de") or several, of which the first that a row has is taken.
    Raises UserError for values that no dataset could satisfy.
    """

    name: str
    hub_id: str | None = None
    hub_config: str | None = None
    hub_data_dir: str | None = None
    hub_revision: str | None = None
    path: str | None = None
    builtin: str | None = None  # "toy": the corpus embedded in the package
    split: str = "test"
    limit: int | None = None  # the first examples only
    source_column: str | Sequence[str]
    reference_column: str | Sequence[str] | None = None
    id_column: str | Sequence[str] | None = None
    category_column: str | Sequence[str] | None = None
    prompt_template: str = "{source}"
    metric: str
    max_source_tokens: int | None = None  # the tokenized prompt is cut to this elsewhere

    def __post_init__(self) -> None:
        for field in ("source_column", "reference_column", "id_column", "category_column"):
            object.__setattr__(self, field, _column_names(field, getattr(self, field)))
        for field in ("path", "split", "prompt_template", "metric", "hub_id"):
            value = getattr(self, field)
            if value is not None and not isinstance(value, str):
                raise UserError(f"dataset.{field} must be text, got {value!r}; quote it: dataset.{field}='\"{value}\"'")
        for field in ("limit", "max_source_tokens"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError(f"dataset.{field} must be a whole number >= 1, got {value!r}; use null for no limit")
        if not self.split:
            raise UserError("dataset.split must name a split (train, validation, test), got an empty one")
        if not self.source_column:
            raise UserError("dataset.source_column must name the column to decode from, got none")
        if "{source}" not in self.prompt_template:
            raise UserError(f"dataset.prompt_template must contain {{source}}, got {self.prompt_template!r}")
        if self.metric not in METRICS:
            raise UserError(f"dataset.metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        if self.metric != "agreement" and not self.reference_column:
            raise UserError(
                f"dataset.metric={self.metric} needs references: set dataset.reference_column, "
                "or use dataset.metric=agreement"
            )
        if self.builtin is not None and self.builtin not in BUILTIN:
            raise UserError(f"dataset.builtin must be one of {', '.join(BUILTIN)}, got {self.builtin!r}")
        if not (self.path or self.hub_id or self.builtin):
            raise UserError(f"dataset {self.name!r} has no data: set dataset.path=DIR or dataset.hub_id=OWNER/NAME")


def load_examples(spec: DatasetSpec) -> tuple[Example, ...]:
    """The split's examples in the dataset's order, at most `spec.limit`; never empty.

    Raises UserError for a missing path, split or column, malformed files, an unreachable hub, and
    rows without a source.
    """
    rows = islice(_rows(spec), spec.limit)
    examples = tuple(_examples(spec, rows))
    if not examples:
        raise UserError(f"dataset {spec.name!r} has no examples in split {spec.split!r}; check dataset.path or split")
    _require_unique_ids(spec, examples)
    return examples


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
    from bild_lab.data.toy import toy_corpus

    if split not in ("train", "validation", "test"):
        raise UserError(f"the toy corpus has splits train, validation and test, got {split!r}")
    return ((f"toy {split} row {index}", dict(row)) for index, row in enumerate(toy_corpus(split)))


def _examples(spec: DatasetSpec, rows: Iterable[tuple[str, Row]]) -> Iterator[Example]:
    split = canonical_split(spec.split)
    for index, (where, row) in enumerate(rows):
        source = _source(spec, where, row)
        own_id, category = _optional(row, spec.id_column), _optional(row, spec.category_column)
        yield Example(
            id=f"{split}-{index}" if own_id is None else str(own_id),
            source=source,
            # replaced, not formatted: a template may hold other braces
            prompt=spec.prompt_template.replace("{source}", source),
            references=_references(spec, where, row),
            category=None if category is None else str(category),
        )


def _source(spec: DatasetSpec, where: str, row: Row) -> str:
    value = _required(spec, where, row, "source_column")
    if isinstance(value, (list, tuple)) and value:
        value = value[0]  # the first turn of a conversation
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"{where}: {' or '.join(spec.source_column)} must be a non-empty string, got {value!r}; "
            "correct the row, or set dataset.limit to stop before it"
        )
    return value


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


def _column_names(field: str, columns: object) -> tuple[str, ...] | None:
    """One column or several, as a tuple; raises UserError for anything but names."""
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
