"""Local files: which of them hold a split, and each format read or refused."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.data.formats import labels, read_rows
from bild_lab.lab.data.rows import find_split_files, local_rows


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
def test_every_name_of_the_validation_split_finds_every_layout(
    folder, name: str, split: str
) -> None:
    assert found(folder(name, "test.jsonl"), split) == [name]


SHARDS = [f"data/train-0000{index}-of-00003.parquet" for index in range(3)]
FINGERPRINTS = [
    "data/test-00000-of-00002-a09b74b3ef9c3b56.parquet",
    "data/test-00001-of-00002-1c2d3e4f5a6b7c8d.parquet",
]
CONFIGS = ["de-en/test-00000-of-00001.parquet", "fr-en/test-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("files", "asked", "names"),
    [
        (SHARDS[::-1], ["train"], SHARDS),  # in order
        # of the first folder of these that exists
        (CONFIGS, ["test", "absent", "de-en"], CONFIGS[:1]),
        # of a file a configuration
        (["size_1k.jsonl", "size_2k.jsonl"], ["test", "size_2k"], ["size_2k.jsonl"]),
        (
            ["questions.jsonl", "dataset_infos.json", ".cache/test.jsonl"],
            ["test"],
            ["questions.jsonl"],
        ),
        # 2 before 10
        (
            [f"test-{shard}.jsonl" for shard in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)],
            ["test"],
            [f"test-{shard}.jsonl" for shard in range(1, 11)],
        ),
        # rows of each, as calibrations name them
        (
            ["test-4-6.jsonl", "test-0-2.jsonl", "test-2-4.jsonl"],
            ["test"],
            ["test-0-2.jsonl", "test-2-4.jsonl", "test-4-6.jsonl"],
        ),
        (
            ["test-1000-1999.jsonl", "test-0-999.jsonl"],
            ["test"],
            ["test-0-999.jsonl", "test-1000-1999.jsonl"],
        ),
        # with the fingerprints that older versions of datasets wrote
        (FINGERPRINTS[::-1], ["test"], FINGERPRINTS),
        # a word that is no number of shards
        (["test-best-of-10.jsonl"], ["test"], ["test-best-of-10.jsonl"]),
        # a split with a name of its own
        (["flickr.jsonl", "test.jsonl"], ["flickr"], ["flickr.jsonl"]),
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
        (
            ["test-00000-of-00003.parquet", "test-00002-of-00003.parquet"],
            "is one of 3 shards, got 2",
        ),
        # of two uploads, and of two years
        ([FINGERPRINTS[0], FINGERPRINTS[0].replace("a09b", "b09b")], "is one of 2 shards, got 2"),
        (
            ["test-2014-00000-of-00002.parquet", "test-2015-00000-of-00002.parquet"],
            "is one of 2 shards, got 2; copy the others next to it, and leave no shard there twice",
        ),
        (
            ["test-00000.parquet", "test-00002.parquet"],
            "test-00000.parquet, test-00002.parquet, whose numbers are not those of shards",
        ),
        (["test-2014.jsonl", "test-2015.jsonl"], "whose numbers are not those of shards"),
        (["test-0-2.jsonl", "test-4-6.jsonl"], "whose numbers are not those of shards"),
        (["test-1-1.jsonl", "test-2-2.jsonl"], "whose numbers are not those of shards"),
        (
            ["1.0.0/test/0000.parquet", "3.0.0/test/0000.parquet"],
            r"more than once \(1.0.0/test/#.parquet, 3.0.0/test/#.parquet\)",
        ),
        (
            ["train.jsonl", "val.jsonl", "other.jsonl"],
            "has no split 'test', only train, validation; set dataset.split",
        ),
        (
            ["a.jsonl", "b.jsonl"],
            "cannot tell which file .* got a.jsonl, b.jsonl; name it test.jsonl",
        ),
    ],
)
def test_a_folder_without_the_whole_split_is_refused(
    folder, files: list[str], message: str
) -> None:
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


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('"He says ""yes""."', 'He says "yes".'),  # as pandas.to_csv(sep="\t") does
        ('"""Yes"""', '"Yes"'),
        ('""""', '"'),
        ('"Yes"', '"Yes"'),  # plain text, as in the files of translations
        ('"Yes" and "no"', '"Yes" and "no"'),
        ('"Yes""', '"Yes""'),
        ('""', '""'),
        ('He says ""yes"".', 'He says ""yes"".'),
    ],
)
def test_a_tab_separated_text_that_was_quoted_is_as_before(
    tmp_path: Path, written: str, text: str
) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text(f"de\ten\n{written}\tb\n")
    assert [row for _, row in read_rows(file)] == [{"de": text, "en": "b"}]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_shard_without_rows_is_refused(tmp_path: Path, suffix: str) -> None:
    table = pyarrow.table({"de": ["Ja"]})
    contents = {
        "jsonl": ('{"de": "Ja"}\n', ""),
        "csv": ("de\nJa\n", "de\n"),
        "parquet": (table, table[:0]),
    }
    for index, content in enumerate(contents[suffix]):
        file = tmp_path / f"test-0000{index}-of-00002.{suffix}"
        if suffix == "parquet":
            pyarrow.parquet.write_table(content, file)
        else:
            file.write_text(content)
    rows = local_rows(tmp_path, "test")
    assert next(rows)[1] == {"de": "Ja"}
    with pytest.raises(
        UserError, match=rf"test-00001-of-00002.{suffix} has no rows, but is one of 2 shards"
    ):
        next(rows)


def test_numbers_of_short_precision_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Fault: a score of 3.8 was the reference 3.799999952316284, which no answer equals."""
    single, half = pyarrow.float32(), pyarrow.float16()
    inner = pyarrow.struct([("value", single), ("exact", pyarrow.float64())])
    schema = pyarrow.schema(
        [("score", single), ("half", half), ("several", pyarrow.list_(single)), ("inner", inner)]
    )
    rows = [
        {"score": 3.8, "half": 0.1, "several": [0.3, None], "inner": {"value": 1e-7, "exact": 0.7}},
        {"score": None, "half": 2.0, "several": None, "inner": None},
    ]
    stored = [{**row, "half": np.float16(row["half"])} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(stored, schema), tmp_path / "a.parquet")
    assert [row for _, row in read_rows(tmp_path / "a.parquet")] == rows


def test_parquet_shards_are_joined_with_nested_columns(tmp_path: Path) -> None:
    for index in range(2):
        table = pyarrow.table({"translation": [{"de": f"Satz {index}", "en": f"Sentence {index}"}]})
        (tmp_path / "de-en").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(
            table, tmp_path / "de-en" / f"test-0000{index}-of-00002.parquet"
        )
    rows = [row["translation"] for _, row in local_rows(tmp_path, "test")]
    assert rows == [{"de": "Satz 0", "en": "Sentence 0"}, {"de": "Satz 1", "en": "Sentence 1"}]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl line 2"),
        ("a.jsonl", b'{"a": 1}\n["b"]\n', "a.jsonl line 2"),
        ("a.json", b'[{"a": 1},\n{"a": 1,}]', "line 2"),
        ("a.json", b'[{"a": 1}, "b"]', "a.json row 1"),
        (
            "a.csv",
            b"a,b\n1,2\n1,2,3\n",
            "a.csv line 3: wanted 2 columns, got 3; correct the line: a text that holds the delimiter",
        ),
        (
            "a.tsv",
            b'a\tb\n"1\t2"\t3\n',
            "a.tsv line 2: wanted 2 columns, got 3; correct the line: quotation marks do not keep",
        ),
        ("a.csv", b'a,b\n1,"2', "a.csv"),
        ("a.jsonl", b'{"a": "\xff"}\n', "byte 0xff"),
        ("a.csv", "a,b\nMüller,1\n".encode("latin-1"), "convert it to UTF-8"),
        ("a.csv", "a,b\nMüller,1\n".encode("utf-16"), "convert it to UTF-8"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16-le"), "zero bytes; convert it to UTF-8"),
        ("a.csv", b"a,b,a\n1,2,3\n", "two columns are called 'a'"),
        (
            "a.jsonl",
            b'{"a": 1, "b": 2}\n{"a": 1, "a": 2}\n',
            "a.jsonl line 2: wanted one JSON object a line, got an object: two columns are called 'a'",
        ),
        ("a.json", b'[{"a": {"b": 1, "b": 2}}]', "two columns are called 'b'"),
        ("a.jsonl.gz", b"\x1f\x8bno", "a.jsonl.gz"),
        ("a.arrow", b"not one", "a.arrow"),
        ("a.parquet", b"version https://git-lfs", "a.parquet"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(
    tmp_path: Path, name: str, content: bytes, place: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_rows(tmp_path / name))
    assert name in str(caught.value) and place in str(caught.value)


def test_texts_stay_texts_and_a_changed_file_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they would not with `datasets`: dates, numbers with zeros in front, one id as text and one
    as number.
    """
    monkeypatch.setenv("HOME", "/nowhere")
    dates = [{"id": "007", "de": "2024-01-01"}, {"id": 8, "de": "2024-01-02"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dates))
    (tmp_path / "b.csv").write_text("id,de\n007,NA\n")
    assert [row for _, row in read_rows(tmp_path / "a.jsonl")] == dates
    assert [row for _, row in read_rows(tmp_path / "b.csv")] == [{"id": "007", "de": "NA"}]
    (tmp_path / "b.csv").write_text("id,de\n008,\n")
    assert [row for _, row in read_rows(tmp_path / "b.csv")] == [{"id": "008", "de": ""}]


def values(file: Path) -> list[dict[str, object]]:
    return [row for _, row in read_rows(file)]


def test_fields_of_any_length_and_semicolons_are_read(tmp_path: Path) -> None:
    file, text = tmp_path / "a.csv", "long, " * 50_000
    file.write_bytes(f'id;text\r\n1;"{text}"\r\n2;"two\nlines"\r\n\r\n'.encode("utf-8-sig"))
    assert values(file) == [{"id": "1", "text": text}, {"id": "2", "text": "two\nlines"}]
    file.write_text('"a;b",c\n1,2\n')
    assert values(file) == [{"a;b": "1", "c": "2"}]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", '{"a": "ü"}\n'), ("a.json", '[\n{"a": "ü"}]'), ("a.csv", "a\nü\n")],
)
def test_compressed_files_are_read_as_others(
    tmp_path: Path, suffix: str, name: str, text: str
) -> None:
    file = tmp_path / f"train-{name}{suffix}"
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": pyarrow.Codec("zstd").compress}[
        suffix
    ]
    file.write_bytes(pack(text.encode()))
    assert values(file) == [{"a": "ü"}]
    assert found(tmp_path, "train") == [file.name]


def saved(folder: Path, shards: int = 1) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = datasets.Dataset.from_dict(
        {"text": ["a", "b", "c"], "label": [1, 0, 1]}, features=features
    )
    rows.save_to_disk(folder, num_shards=shards)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_that_datasets_saved_is_read_with_the_names_of_its_classes(
    tmp_path: Path, shards: int
) -> None:
    saved(tmp_path / "saved", shards)
    (tmp_path / "saved" / "cache-12ab.arrow").write_bytes(b"what a map has left")
    rows = [row for _, row in local_rows(tmp_path / "saved", "test")]
    assert rows == [
        {"text": "a", "label": "yes"},
        {"text": "b", "label": "no"},
        {"text": "c", "label": "yes"},
    ]
    saved(tmp_path / "splits" / "train")
    saved(tmp_path / "splits" / "test")
    assert found(tmp_path / "splits", "test") == ["test/data-00000-of-00001.arrow"]


def test_classes_inside_lists_and_fields_have_their_names_too(tmp_path: Path) -> None:
    """Planted: 0 and 1 where a column of its own says no and yes."""
    import datasets

    answer = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "answers": datasets.List(answer),
            "one": {"label": answer, "score": datasets.Value("int64")},
            "several": datasets.List({"label": answer}),
        }
    )
    row = {"text": "a", "answers": [0, 1], "one": {"label": 1, "score": 1}}
    rows = [row | {"several": [{"label": 0}]}, row | {"answers": None, "several": []}]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "test.parquet")
    first, second = values(tmp_path / "test.parquet")
    assert first == {
        "text": "a",
        "answers": ["no", "yes"],
        "one": {"label": "yes", "score": 1},
        "several": [{"label": "no"}],
    }
    assert (second["answers"], second["several"]) == (None, [])


def test_a_number_without_a_name_stays_a_number() -> None:
    """-1 stands for an unknown class."""
    import datasets

    answer = datasets.ClassLabel(names=["no", "yes"])
    named = labels({"one": answer, "several": [answer], "text": datasets.Value("string")})
    assert named({"one": -1, "several": [1, 2], "text": "a"}) == {
        "one": -1,
        "several": ["yes", 2],
        "text": "a",
    }


def test_a_file_of_another_configuration_is_not_taken_for_it(folder) -> None:
    path = folder("throughput_1k.jsonl")
    assert found(path, "test", "throughput_1k") == ["throughput_1k.jsonl"]
    assert found(path / "throughput_1k.jsonl", "test", "main") == ["throughput_1k.jsonl"]
    with pytest.raises(UserError, match="no file or folder of the configuration throughput_8k"):
        find_split_files(path, "test", ["throughput_8k"])


def test_a_saved_folder_may_be_of_any_configuration(tmp_path: Path) -> None:
    saved(tmp_path)
    assert found(tmp_path, "test", "main") == ["data-00000-of-00001.arrow"]


def test_a_lost_shard_of_a_saved_folder_is_missed(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match="one of 2 shards, got 1"):
        find_split_files(tmp_path, "test")


def test_parquet_keeps_the_names_of_classes_and_refuses_two_columns_of_one_name(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "saved")
    with pyarrow.memory_map(str(tmp_path / "saved" / "data-00000-of-00001.arrow")) as source:
        table = pyarrow.ipc.open_stream(source).read_all()
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [row["label"] for row in values(tmp_path / "a.parquet")] == ["yes", "no", "yes"]
    pyarrow.parquet.write_table(table.rename_columns(["text", "text"]), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: two columns are called 'text'"):
        values(tmp_path / "b.parquet")


@pytest.mark.parametrize("split", ["train[:100]", "train+test", "train[:10%]"])
def test_a_slice_of_a_local_file_is_refused_and_not_the_whole(folder, split: str) -> None:
    with pytest.raises(
        UserError, match=r"is a slice or a sum, .*by dataset\.skip and dataset\.limit"
    ):
        found(folder("questions.jsonl"), split)
