"""Rows of one data file, in each format.

Files are read with `json`, `csv` and `pyarrow`, which also decompresses. `datasets` would make
dates of texts and numbers of ids, locks files in the home folder, reads a file to its end whatever
the limit, and names no line in its errors.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from bild_lab.errors import UserError

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
# after any other suffix of text; as pyarrow calls them
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}

_QUOTED = re.compile(r'"(?:[^"]|"")*"')

_REMEDIES = {  # for a line with too few or too many columns
    ".csv": "correct the line: a text that holds the delimiter stands in quotation marks",
    ".tsv": "correct the line: quotation marks do not keep a tab inside a text, so save such texts"
    " as .csv or .jsonl",
}

_SHORT_FLOATS = {"halffloat": np.float16, "float": np.float32}  # by the names of Arrow's types

Row = dict[str, Any]


def suffix_of(file: PurePath) -> str | None:
    """The format of a data file, one of SUFFIXES; None for another file."""
    suffix = PurePath(plain_name(file)).suffix.lower()
    return suffix if suffix in SUFFIXES else None


def plain_stem(file: PurePath) -> str:
    """A file's name without its suffixes: `train` of `train.jsonl.gz`."""
    return PurePath(plain_name(file)).stem


def plain_name(file: PurePath) -> str:
    return file.stem if file.suffix.lower() in COMPRESSED else file.name


def read_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Rows of one file, each with its location. They are read lazily, so a limit reads no more than
    needed.

    Raises UserError naming the file, and the line if the format has lines.
    """
    try:
        for where, row in _READERS[suffix_of(file)](file):
            if not isinstance(row, dict):
                raise UserError(
                    f"{file} {where}: wanted an object with named columns, got {type(row).__name__}"
                )
            yield f"{file} {where}", row
    except UserError:
        raise
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}: {error.reason}"
        raise UserError(f"{file} is not UTF-8 ({byte}); convert it to UTF-8") from error
    # errors of JSON, UTF-8 and Arrow are ValueErrors
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"cannot read {file}: {error}; correct it, or copy it again") from error


def _opened(file: Path, newline: str | None = None) -> io.TextIOWrapper:
    # utf-8-sig: a byte order mark is not part of the first column's name
    return io.TextIOWrapper(_bytes_of(file), encoding="utf-8-sig", newline=newline)


def _bytes_of(file: Path) -> io.BufferedIOBase:
    if (compression := COMPRESSED.get(file.suffix.lower())) is None:
        return file.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file), compression=compression))


def _distinct(names: Sequence[str], where: str) -> None:
    """Raise UserError for a name that two columns have: only one of them could be used."""
    if repeated_names := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"{where}: two columns are called {repeated_names[0]!r}; rename or remove one"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises UserError for a key that it has twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        _distinct([key for key, _ in pairs], "an object")
    return members


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with _opened(file) as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line, object_pairs_hook=_object)
                except (json.JSONDecodeError, UserError) as error:
                    raise UserError(
                        f"{file} line {number}: wanted one JSON object a line, got {error}"
                    ) from error


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    """An array, or lines."""
    with _opened(file) as handle:
        if not next((line.lstrip() for line in handle if line.strip()), "").startswith("["):
            yield from _json_lines(file)
            return
    with _opened(file) as handle:
        try:
            rows = json.load(handle, object_pairs_hook=_object)
        except UserError as error:
            raise UserError(f"{file}: {error}") from error
    yield from ((f"row {index}", row) for index, row in enumerate(rows))


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    # texts may be longer than csv's own limit of 131,072 characters
    csv.field_size_limit(sys.maxsize)
    with _opened(file, newline="") as handle:
        # tab-separated corpora use no quotes: a line that starts with a quotation mark is plain
        # text
        if suffix_of(file) == ".tsv":
            reader = csv.reader(handle, strict=True, delimiter="\t", quoting=csv.QUOTE_NONE)
            rows = ([_unquoted(text) for text in values] for values in reader)
        else:
            header_line = handle.readline()
            reader = csv.reader(
                chain([header_line], handle), strict=True, delimiter=_delimiter(header_line)
            )
            rows = reader
        names = next(rows, [])
        if any("\0" in name for name in names):
            raise UserError(f"{file} holds zero bytes; convert it to UTF-8")
        _distinct(names, str(file))
        for values in filter(None, rows):
            if len(values) != len(names):
                raise UserError(
                    f"{file} line {reader.line_num}: wanted {len(names)} columns, got {len(values)};"
                    f" {_REMEDIES[suffix_of(file)]}"
                )
            yield f"line {reader.line_num}", dict(zip(names, values, strict=True))


def _unquoted(text: str) -> str:
    """A field of a tab-separated file as it was, where programs such as pandas have quoted it: in
    quotation marks, with those inside it doubled.
    """
    doubled = '""' in text[1:-1] and _QUOTED.fullmatch(text)
    return text[1:-1].replace('""', '"') if doubled else text


def _delimiter(header: str) -> str:
    """What parts most columns of a header; commas, semicolons as of spreadsheets in many languages,
    or tabs.
    """
    outside_quotes = re.sub(r'"[^"]*"', "", header)
    return max(",;\t", key=outside_quotes.count)


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    parquet_file = pyarrow.parquet.ParquetFile(file)
    yield from _arrow_rows(
        file, parquet_file.schema_arrow, parquet_file.iter_batches(batch_size=1024)
    )


def _arrow(file: Path) -> Iterator[tuple[str, Any]]:
    """A file of `datasets.save_to_disk`, which is a stream, or one in Arrow's own format."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            batches = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            arrow_file = pyarrow.ipc.open_file(source)
            yield from _arrow_rows(
                file,
                arrow_file.schema,
                (arrow_file.get_batch(index) for index in range(arrow_file.num_record_batches)),
            )
            return
        yield from _arrow_rows(file, batches.schema, batches)


def _arrow_rows(
    file: Path, schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch]
) -> Iterator[tuple[str, Any]]:
    """Rows, with the names of classes in place of their numbers, where `datasets` wrote the
    file.
    """
    _distinct(schema.names, str(file))
    label = (
        labels({}) if b"huggingface" not in (schema.metadata or {}) else labels(_features(schema))
    )
    written = as_written(schema)
    for index, row in enumerate(row for batch in batches for row in batch.to_pylist()):
        yield f"row {index}", label(written(row))


def _features(schema: pyarrow.Schema) -> Mapping[str, Any]:
    """The features that `datasets` wrote into a file; none where it cannot read them."""
    if b"ClassLabel" not in schema.metadata[b"huggingface"]:
        return {}
    import datasets  # takes seconds

    return datasets.Features.from_arrow_schema(schema)


def as_written(schema: pyarrow.Schema) -> Callable[[Row], Row]:
    """A function that gives a row's numbers of half and single precision as they were written: 3.8,
    where Python's own precision shows 3.799999952316284; also those inside fields and lists.
    """
    columns = {column.name: column.type for column in schema if _has_short_floats(column.type)}

    def written(row: Row) -> Row:
        return {**row, **{name: _shortest(row[name], kind) for name, kind in columns.items()}}

    return written if columns else lambda row: row


def _has_short_floats(kind: pyarrow.DataType) -> bool:
    """Whether a type of Arrow is of numbers of half or single precision, or holds some."""
    inner = (kind.field(place).type for place in range(kind.num_fields))
    return str(kind) in _SHORT_FLOATS or any(map(_has_short_floats, inner))


def _shortest(value: Any, kind: pyarrow.DataType) -> Any:
    """The value with its numbers of half and single precision by the fewest digits that tell them."""
    if isinstance(value, float) and str(kind) in _SHORT_FLOATS:
        return float(str(_SHORT_FLOATS[str(kind)](value)))
    if isinstance(value, Mapping):
        fields = {field.name: field.type for field in map(kind.field, range(kind.num_fields))}
        return {name: _shortest(inner, fields[name]) for name, inner in value.items()}
    if isinstance(value, list) and kind.num_fields == 1:
        return [_shortest(element, kind.field(0).type) for element in value]
    return value


def labels(features: Mapping[str, Any]) -> Callable[[Row], Row]:
    """A function that gives a row the names of its classes, in place of their numbers; also those
    inside fields and lists.
    """
    columns = {column: feature for column, feature in features.items() if _has_classes(feature)}

    def labelled(row: Row) -> Row:
        named = {column: _with_names(row[column], feature) for column, feature in columns.items()}
        return {**row, **named} if named else row

    return labelled


def _has_classes(feature: Any) -> bool:
    """Whether a feature of `datasets` is of classes, or holds some."""
    if isinstance(feature, Mapping):
        return any(map(_has_classes, feature.values()))
    inner = _of_list(feature)
    return type(feature).__name__ == "ClassLabel" or (inner is not None and _has_classes(inner))


def _of_list(feature: Any) -> Any:
    """What a list of `datasets` is of; None for what is none."""
    if isinstance(feature, list):
        return feature[0]
    return getattr(feature, "feature", None)


def _with_names(value: Any, feature: Any) -> Any:
    """The value with the names of classes in place of their numbers."""
    if isinstance(value, Mapping) and isinstance(feature, Mapping):
        return {key: _with_names(inner, feature.get(key)) for key, inner in value.items()}
    if isinstance(value, list) and (inner := _of_list(feature)) is not None:
        return [_with_names(element, inner) for element in value]
    is_class = type(feature).__name__ == "ClassLabel" and isinstance(value, int)
    return feature.names[value] if is_class and 0 <= value < len(feature.names) else value


def first_value(row: Row, columns: Sequence[str]) -> tuple[bool, object]:
    """Whether the row has any of the columns, and the first value that is not null.

    `a.b` is a field inside a, and `a.0` the first of a list.
    """
    present = False
    for column in columns:
        value: object = {column: row[column]} if column in row else row
        for key in [column] if column in row else column.split("."):
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                break
        else:
            present = True
            if value is not None:
                return True, value
    return present, None


def columns_of(row: Row, prefix: str = "") -> str:
    """The names of all columns, and of the fields inside them."""
    return ", ".join(
        (
            columns_of(value, f"{prefix}{key}.")
            if isinstance(value, Mapping) and value
            else f"{prefix}{key}"
        )
        for key, value in row.items()
    )


_READERS = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
