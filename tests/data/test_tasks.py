"""Datasets as examples: columns, prompts, ids, limits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bild_lab.data import DatasetSpec, Example, load_examples
from bild_lab.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
CONFIGS = sorted((REPOSITORY / "conf" / "dataset").glob("*.yaml"))

needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no shared/data folder beside the repository")


def spec(**fields: object) -> DatasetSpec:
    defaults = {"name": "made", "source_column": "de", "reference_column": "en", "metric": "bleu"}
    return DatasetSpec(**{**defaults, **fields})


def from_config(name: str, **overrides: object) -> DatasetSpec:
    fields = yaml.safe_load((REPOSITORY / "conf" / "dataset" / f"{name}.yaml").read_text())
    return DatasetSpec(**{**fields, **overrides})


@pytest.fixture
def rows_file(tmp_path: Path):
    def write(*rows: object) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_an_example_has_its_columns_its_filled_prompt_and_an_id_from_split_and_index(rows_file) -> None:
    path = rows_file({"de": "Ja.", "en": "Yes."}, {"de": "Nein.", "en": "No."})
    examples = load_examples(spec(path=path, prompt_template="de: {source} {x}"))
    assert examples[1] == Example("test-1", "Nein.", "de: Nein. {x}", ("No.",), None)


def test_a_source_with_braces_is_not_evaluated(rows_file) -> None:
    path = rows_file({"de": "{source} {0.__class__}", "en": "x"})
    assert load_examples(spec(path=path))[0].prompt == "{source} {0.__class__}"


def test_a_dotted_path_reads_nested_columns(rows_file) -> None:
    path = rows_file({"translation": {"de": "Ja.", "en": "Yes."}})
    example = load_examples(spec(path=path, source_column="translation.de", reference_column="translation.en"))[0]
    assert (example.source, example.references) == ("Ja.", ("Yes.",))


def test_a_column_whose_own_name_has_a_dot_is_read(rows_file) -> None:
    assert load_examples(spec(path=rows_file({"a.de": "Ja.", "en": "Yes."}), source_column="a.de"))[0].source == "Ja."


def test_the_first_column_that_exists_is_taken_and_the_first_turn_of_a_list(rows_file) -> None:
    path = rows_file({"turns": ["Write.", "Rewrite."]}, {"prompt": None, "turns": ["Sing."]})
    examples = load_examples(
        spec(path=path, source_column=["prompt", "turns"], reference_column=None, metric="agreement")
    )
    assert [example.source for example in examples] == ["Write.", "Sing."]
    assert examples[0].references == ()


def test_a_list_of_references_is_kept_whole(rows_file) -> None:
    assert load_examples(spec(path=rows_file({"de": "Ja.", "en": ["Yes.", "Yeah."]})))[0].references == (
        "Yes.",
        "Yeah.",
    )


def test_ids_and_categories_come_from_the_data_where_it_has_them(rows_file) -> None:
    path = rows_file({"de": "a", "en": "b", "number": 81, "kind": "writing"}, {"de": "c", "en": "d"})
    examples = load_examples(spec(path=path, id_column=["uid", "number"], category_column="kind"))
    assert [(example.id, example.category) for example in examples] == [("81", "writing"), ("test-1", None)]


def test_two_examples_with_one_id_are_refused(rows_file) -> None:
    path = rows_file({"de": "a", "en": "b", "id": 1}, {"de": "c", "en": "d", "id": 1})
    with pytest.raises(UserError, match="two examples with id '1'.*id_column=null"):
        load_examples(spec(path=path, id_column="id"))


def test_the_limit_takes_the_first_examples_and_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"de": "a", "en": "b"}\n{"de": "c", "en": "d"}\nnot json\n')
    assert [example.source for example in load_examples(spec(path=str(path), limit=2))] == ["a", "c"]


def test_a_limit_beyond_the_data_takes_all_of_it(rows_file) -> None:
    assert len(load_examples(spec(path=rows_file({"de": "a", "en": "b"}), limit=10))) == 1


def test_wrong_columns_are_refused_with_those_wanted_and_those_that_came(rows_file) -> None:
    path = rows_file({"translation": {"fr": "Oui.", "en": "Yes."}, "id": 3})
    with pytest.raises(UserError) as caught:
        load_examples(spec(path=path, source_column=["de", "translation.de"]))
    assert "line 1: dataset.source_column wants column de or translation.de" in str(caught.value)
    assert "got columns translation.fr, translation.en, id" in str(caught.value)


def test_a_missing_reference_column_is_refused(rows_file) -> None:
    with pytest.raises(UserError, match="dataset.reference_column wants column en, got columns de"):
        load_examples(spec(path=rows_file({"de": "Ja."})))


@pytest.mark.parametrize("value", ["", "  \n", None, 7, [], [1], {"a": 1}])
def test_a_source_that_is_no_text_is_refused_with_its_line(rows_file, value: object) -> None:
    path = rows_file({"de": "a", "en": "b"}, {"de": value, "en": "b"})
    with pytest.raises(UserError, match="line 2: de must be a non-empty string, got"):
        load_examples(spec(path=path))


@pytest.mark.parametrize("value", [None, 7, ["a", None]])
def test_a_reference_that_is_no_text_is_refused_with_its_line(rows_file, value: object) -> None:
    with pytest.raises(UserError, match="line 1: en must be a string or strings, got"):
        load_examples(spec(path=rows_file({"de": "a", "en": value})))


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("\n")
    with pytest.raises(UserError, match="dataset 'made' has no examples in split 'test'"):
        load_examples(spec(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"limit": 0}, "dataset.limit must be a whole number >= 1, got 0"),
        ({"limit": True}, "dataset.limit must be a whole number >= 1, got True"),
        ({"limit": 1.5}, "dataset.limit must be a whole number >= 1, got 1.5"),
        ({"max_source_tokens": -1}, "dataset.max_source_tokens must be a whole number >= 1, got -1"),
        ({"prompt_template": "summarize:"}, "must contain {source}, got 'summarize:'"),
        ({"metric": "meteor"}, "dataset.metric must be one of bleu, rouge, agreement, got 'meteor'"),
        ({"reference_column": None}, "dataset.metric=bleu needs references"),
        ({"source_column": None}, "dataset.source_column must name the column"),
        ({"source_column": []}, "dataset.source_column must be a column's name or a list of names, got []"),
        ({"id_column": 3}, "dataset.id_column must be a column's name or a list of names, got 3"),
        ({"split": ""}, "dataset.split must name a split"),
        ({"path": None}, "dataset 'made' has no data: set dataset.path=DIR"),
        ({"builtin": "wmt"}, "dataset.builtin must be one of toy, got 'wmt'"),
    ],
)
def test_a_spec_that_no_dataset_could_satisfy_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        spec(**{"path": "data.jsonl", **fields})
    assert message in str(caught.value)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_dataset_config_is_a_valid_spec_named_after_its_file(config: Path) -> None:
    assert DatasetSpec(**yaml.safe_load(config.read_text())).name == config.stem
    assert config.read_text().startswith("# ")
    assert f"python run.py dataset={config.stem}" in config.read_text().splitlines()[0]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_toy_corpus_needs_neither_path_nor_hub(split: str) -> None:
    examples = load_examples(from_config("toy", split=split, limit=3))
    assert [example.id for example in examples] == [
        f"{'validation' if split == 'val' else split}-{i}" for i in range(3)
    ]
    assert all(example.prompt == example.source and len(example.references) == 1 for example in examples)


def test_a_split_that_the_toy_corpus_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="splits train, validation and test, got 'dev2'"):
        load_examples(from_config("toy", split="dev2"))


@needs_shared_data
@pytest.mark.parametrize(("split", "count"), [("test", 1000), ("validation", 1014), ("train", 29000)])
def test_multi30k_loads_from_a_folder(split: str, count: int) -> None:
    examples = load_examples(from_config("multi30k", path=str(SHARED_DATA / "multi30k"), split=split))
    assert len(examples) == count
    if split == "test":
        assert examples[0].prompt == "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt."
        assert examples[0].references == ("A man in an orange hat starring at something.",)


@needs_shared_data
def test_iwslt_names_the_splits_there_are() -> None:
    path = str(SHARED_DATA / "iwslt2017-de-en")
    assert len(load_examples(from_config("iwslt2017", path=path, split="val"))) == 888
    with pytest.raises(UserError, match="has no split 'test', only validation; set dataset.split"):
        load_examples(from_config("iwslt2017", path=path))


@needs_shared_data
@pytest.mark.parametrize("path", ["mt_bench", "mt_bench/question.jsonl"])
def test_mt_bench_gives_first_turns_with_their_categories(path: str) -> None:
    examples = load_examples(from_config("mt_bench", path=str(SHARED_DATA / path)))
    assert len(examples) == 80
    assert (examples[0].id, examples[0].category, examples[0].references) == ("81", "writing", ())
    assert examples[0].prompt.startswith("Compose an engaging travel blog post")


@needs_shared_data
def test_a_json_array_and_a_lone_file_of_another_name_load() -> None:
    alpaca = spec(
        path=str(SHARED_DATA / "code_alpaca"),
        source_column="instruction",
        reference_column="output",
        limit=2000,
    )
    assert load_examples(alpaca)[0].source == "What are the distinct values from the given list?"
    humaneval = spec(
        path=str(SHARED_DATA / "humaneval"), source_column="prompt", reference_column="canonical_solution",
        id_column="task_id",
    )  # fmt: skip
    assert len(load_examples(humaneval)) == 164 and load_examples(humaneval)[3].id == "HumanEval/3"
