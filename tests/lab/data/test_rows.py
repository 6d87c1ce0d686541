"""Local files: which of them hold a split, and each format read or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.data.rows import find_split_files, local_rows, read_rows


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(*names: str) -> Path:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text('{"a": 1}\n')
        return tmp_path

    return make


def found(path: Path, split: str, *subfolders: str) -> list[str]:
    root = path if path.is_dir() else path.parent
    return [str(file.relative_to(root)) for file in find_split_files(path, split, subfolders)]


@pytest.mark.parametrize(
    "name",
    [
        "validation.jsonl",
        "val.jsonl",
        "valid.csv",
        "dev.tsv",
        "data/validation-00000-of-00001.parquet",
        "iwslt2017-validation.json",
        "de-en/validation/0000.parquet",
    ],
)
@pytest.mark.parametrize("split", ["validation", "val", "valid", "dev"])
def test_every_name_of_the_validation_split_finds_every_layout(folder, name: str, split: str) -> None:
    assert found(folder(name, "test.jsonl"), split) == [name]


SHARDS = [f"data/train-0000{index}-of-00003.parquet" for index in range(3)]
CONFIGS = ["de-en/test-00000-of-00001.parquet", "fr-en/test-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("files", "asked", "names"),
    [
        (SHARDS[::-1], ["train"], SHARDS),  # in order
        (CONFIGS, ["test", "absent", "de-en"], CONFIGS[:1]),  # of the first folder of these that exists
        (["questions.jsonl", "dataset_infos.json", ".cache/test.jsonl"], ["test"], ["questions.jsonl"]),
        (["flickr.jsonl", "test.jsonl"], ["flickr"], ["flickr.jsonl"]),  # a split with a name of its own
    ],
)
def test_the_files_of_a_split_are_its_shards_and_nothing_else(
    folder, files: list[str], asked: list[str], names: list[str]
) -> None:
    assert found(folder(*files), *asked) == names


def test_a_lone_file_without_a_split_word_serves_any_split(folder) -> None:
    path = folder("question.jsonl")
    assert found(path, "train") == found(path / "question.jsonl", "test") == ["question.jsonl"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["test-00000-of-00003.parquet", "test-00002-of-00003.parquet"], "is one of 3 shards, got 2"),
        (["train.jsonl", "val.jsonl", "other.jsonl"], "has no split 'test', only train, validation; set dataset.split"),
        (["a.jsonl", "b.jsonl"], "cannot tell which file .* got a.jsonl, b.jsonl; name it test.jsonl"),
    ],
)
def test_a_folder_without_the_whole_split_is_refused(folder, files: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        found(folder(*files), "test")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", '{"de": "Ja", "en": "Yes"}\n\n{"de": "\\"Nein", "en": "No"}\n'),
        ("rows.json", '{"de": "Ja", "en": "Yes"}\n{"de": "\\"Nein", "en": "No"}'),
        ("array.json", '\n [{"de": "Ja", "en": "Yes"},\n {"de": "\\"Nein", "en": "No"}]'),
        ("rows.csv", 'de,en\nJa,Yes\n"""Nein",No\n'),
        ("rows.tsv", 'de\ten\nJa\tYes\n"Nein\tNo\n'),
        ("marked.csv", '\ufeffde,en\nJa,Yes\n"""Nein",No\n'),
    ],
)
def test_text_formats_give_the_same_rows(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    rows = [row for _, row in read_rows(tmp_path / name)]
    assert rows == [{"de": "Ja", "en": "Yes"}, {"de": '"Nein', "en": "No"}]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_shard_without_rows_is_refused(tmp_path: Path, suffix: str) -> None:
    table = pyarrow.table({"de": ["Ja"]})
    contents = {"jsonl": ('{"de": "Ja"}\n', ""), "csv": ("de\nJa\n", "de\n"), "parquet": (table, table[:0])}
    for index, content in enumerate(contents[suffix]):
        file = tmp_path / f"test-0000{index}-of-00002.{suffix}"
        if suffix == "parquet":
            pyarrow.parquet.write_table(content, file)
        else:
            file.write_text(content)
    rows = local_rows(tmp_path, "test")
    assert next(rows)[1] == {"de": "Ja"}
    with pytest.raises(UserError, match=rf"test-00001-of-00002.{suffix} has no rows, but is one of 2 shards"):
        next(rows)


def test_parquet_shards_are_joined_with_nested_columns(tmp_path: Path) -> None:
    for index in range(2):
        table = pyarrow.table({"translation": [{"de": f"Satz {index}", "en": f"Sentence {index}"}]})
        (tmp_path / "de-en").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, tmp_path / "de-en" / f"test-0000{index}-of-00002.parquet")
    rows = [row["translation"] for _, row in local_rows(tmp_path, "test")]
    assert rows == [{"de": "Satz 0", "en": "Sentence 0"}, {"de": "Satz 1", "en": "Sentence 1"}]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl line 2"),
        ("a.jsonl", b'{"a": 1}\n["b"]\n', "a.jsonl line 2"),
        ("a.json", b'[{"a": 1},\n{"a": 1,}]', "line 2"),
        ("a.json", b'[{"a": 1}, "b"]', "a.json row 1"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "a.csv line 3: wanted 2 columns, got 3"),
        ("a.tsv", b"a\tb\n1\n", "a.tsv line 2: wanted 2 columns, got 1"),
        ("a.csv", b'a,b\n1,"2', "a.csv"),
        ("a.jsonl", b'{"a": "\xff"}\n', "byte 0xff"),
        ("a.parquet", b"version https://git-lfs", "a.parquet"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path: Path, name: str, content: bytes, place: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_rows(tmp_path / name))
    assert name in str(caught.value) and place in str(caught.value)


def test_texts_stay_texts_and_a_changed_file_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would not with `datasets`: dates, numbers with zeros in front, one id as text and one as number."""
    monkeypatch.setenv("HOME", "/nowhere")
    dates = [{"id": "007", "de": "2024-01-01"}, {"id": 8, "de": "2024-01-02"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dates))
    (tmp_path / "b.csv").write_text("id,de\n007,NA\n")
    assert [row for _, row in read_rows(tmp_path / "a.jsonl")] == dates
    assert [row for _, row in read_rows(tmp_path / "b.csv")] == [{"id": "007", "de": "NA"}]
    (tmp_path / "b.csv").write_text("id,de\n008,\n")
    assert [row for _, row in read_rows(tmp_path / "b.csv")] == [{"id": "008", "de": ""}]
