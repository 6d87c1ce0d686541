"""Rows of a local dataset: which files of a folder hold a split, and how each format is read.

The files are read with `json`, `csv` and `pyarrow`, not with `datasets`: this avoids an import that takes seconds and
a copy in the home folder's cache, and errors can name the file and the line.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from bild_lab.errors import UserError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
# files that `datasets` and the hub write next to the data
METADATA_FILES = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}

Row = dict[str, Any]


def canonical_split(split: str) -> str:
    """The standard name of a split: "val", "valid" and "dev" are "validation". Other names are unchanged."""
    return SPLIT_WORDS.get(split.lower(), split)


def local_rows(path: Path, split: str, subfolders: Sequence[str] = ()) -> Iterator[tuple[str, Row]]:
    """Rows of one split of a local dataset, each with its location ("FILE line 3").

    path: a file, or a folder in the hub's layout (`test.jsonl`, `data/test-00000-of-00001.parquet`,
    `CONFIG/test/0000.parquet`). subfolders: possible names of a config's folder; the first that exists is used.
    Raises UserError for a missing path or split, for files that cannot be read, and for a shard without rows.
    """
    files = find_split_files(path, split, subfolders)
    for file in files:
        rows = read_rows(file)
        first = next(rows, None)
        if first is not None:
            yield first
        elif len(files) > 1:
            raise UserError(f"{file} has no rows, but is one of {len(files)} shards; copy it again, or remove it")
        yield from rows


def find_split_files(path: Path, split: str, subfolders: Sequence[str] = ()) -> list[Path]:
    """The data files of `split`, in the order of their shards.

    A single file whose name contains no split (`question.jsonl`) is used for any split. Raises UserError if the
    path, the split or one of its shards is missing, or if two datasets are mixed.
    """
    if not path.exists():
        raise UserError(f"dataset.path {path} does not exist; give a folder or a file ({' '.join(SUFFIXES)})")
    if path.is_file():
        root, files = path.parent, [path]
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"cannot read {path}: wanted one of {' '.join(SUFFIXES)}, got {path.suffix or 'no suffix'}")
    else:
        root = next((path / name for name in subfolders if (path / name).is_dir()), path)
        files = _data_files(root)
    if not files:
        raise UserError(f"no data files under {root}: wanted {' '.join(SUFFIXES)}; point dataset.path at them")

    split = canonical_split(split)
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(root), split), []).append(file)
    if split in by_split:
        if path.is_dir():
            _require_one_dataset(root, split, by_split[split])
        return by_split[split]
    if by_split.keys() == {None} and len(files) == 1:
        return files
    raise UserError(_missing_split(path, split, by_split))


def _data_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES
        and file.is_file()
        and file.name not in METADATA_FILES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _split_of(relative: Path, wanted: str) -> str | None:
    """The split in a file's name, else the split in the nearest folder's name; None if there is none."""
    for part in (relative.stem, *reversed(relative.parent.parts)):
        for word in re.split(r"[^a-z0-9]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
            if word == wanted.lower():  # a split with a non-standard name
                return wanted
    return None


def _require_one_dataset(root: Path, split: str, files: Sequence[Path]) -> None:
    """Raise UserError unless the files are the shards of one dataset: two configs or formats must not be mixed."""
    families = {re.sub(r"\d+", "#", str(file.relative_to(root))) for file in files}
    if len(families) > 1:
        found = ", ".join(sorted(families))
        raise UserError(f"{root} holds split {split!r} more than once ({found}); point dataset.path at one of them")
    shards = re.search(r"-of-(\d+)", files[0].name)
    if shards and int(shards[1]) != len(files):
        raise UserError(f"{files[0]} is one of {int(shards[1])} shards, got {len(files)}; copy the others next to it")


def _missing_split(path: Path, split: str, by_split: dict[str | None, list[Path]]) -> str:
    there = sorted(name for name in by_split if name is not None)
    if there:
        return f"{path} has no split {split!r}, only {', '.join(there)}; set dataset.split to one of them"
    names = ", ".join(file.name for file in by_split[None][:5])
    return (
        f"cannot tell which file under {path} is split {split!r}, got {names}; "
        f"name it {split}.jsonl or point dataset.path at one file"
    )


def read_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Rows of one file, each with its location. They are read lazily, so a limit reads no more than needed.

    Raises UserError naming the file, and the line if the format has lines.
    """
    suffix = file.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _parquet_rows(file)
            return
        # utf-8-sig: a byte order mark is not part of the first column's name
        with file.open(encoding="utf-8-sig", newline="" if suffix in (".csv", ".tsv") else None) as handle:
            if suffix in (".csv", ".tsv"):
                yield from _csv_rows(file, handle, suffix)
            elif suffix == ".json" and _starts_with_bracket(handle):
                yield from _json_array_rows(file, handle)
            else:
                yield from _json_line_rows(file, handle)
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error


def _json_line_rows(file: Path, handle: Iterable[str]) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(handle, start=1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: wanted one JSON object a line, got {error.msg} at column {error.colno}"
            ) from error
        yield where, _require_object(where, row)


def _json_array_rows(file: Path, handle: TextIO) -> Iterator[tuple[str, Row]]:
    try:
        rows = json.load(handle)
    except json.JSONDecodeError as error:
        raise UserError(f"{file} line {error.lineno}: not valid JSON, {error.msg} at column {error.colno}") from error
    for index, row in enumerate(rows):
        where = f"{file} row {index}"
        yield where, _require_object(where, row)


def _starts_with_bracket(handle: TextIO) -> bool:
    first = next((line.lstrip() for line in handle if line.strip()), "")
    handle.seek(0)
    return first.startswith("[")


def _require_object(where: str, row: object) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: wanted a JSON object with named columns, got {type(row).__name__}")
    return row


def _csv_rows(file: Path, handle: Iterable[str], suffix: str) -> Iterator[tuple[str, Row]]:
    # tab-separated corpora use no quotes: a line that starts with a quotation mark is plain text
    if suffix == ".tsv":
        reader = csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.DictReader(handle, strict=True)
    try:
        for row in reader:
            where = f"{file} line {reader.line_num}"
            if None in row or None in row.values():
                got = sum(value is not None for value in row.values()) + len(row.get(None) or []) - (None in row)
                raise UserError(f"{where}: wanted {len(reader.fieldnames or [])} columns, got {got}")
            yield where, row
    except csv.Error as error:
        raise UserError(f"{file} line {reader.line_num}: {error}") from error


def _parquet_rows(file: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        index = 0
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{file} row {index}", row
                index += 1
    except pyarrow.ArrowException as error:
        raise UserError(f"{file} is not a readable parquet file: {error}; copy or download it again") from error
