"""Datasets as examples: columns, prompts, ids, limits, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.data import examples as examples_module
from bild_lab.lab.data.conversations import conversation
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples, same_rows, trimmed
from bild_lab.lab.data.prompts import Example, with_answers
from bild_lab.lab.metrics.quality import Scoring, score
from tests.tiny import START, tiny_tokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
CONFIGS = sorted((REPOSITORY / "conf" / "dataset").glob("*.yaml"))

needs_shared_data = pytest.mark.skipif(
    not SHARED_DATA.is_dir(), reason="no shared/data folder beside the repository"
)


def spec(**fields: object) -> DatasetSpec:
    defaults = {"name": "made", "source_column": "de", "reference_column": "en", "metric": "bleu"}
    return DatasetSpec(**{**defaults, **fields})


def from_config(name: str, **overrides: object) -> DatasetSpec:
    fields = yaml.safe_load((REPOSITORY / "conf" / "dataset" / f"{name}.yaml").read_text())
    dataset = OmegaConf.create({"dataset": {**fields, **overrides}})
    return DatasetSpec(**OmegaConf.to_container(dataset, resolve=True)["dataset"])


@pytest.fixture
def rows_file(tmp_path: Path):
    def write(*rows: object) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_an_example_has_its_columns_its_filled_prompt_and_an_id_from_split_and_index(
    rows_file,
) -> None:
    path = rows_file({"de": "Ja.", "en": "Yes."}, {"de": "Nein.", "en": "No."})
    examples = load_examples(spec(path=path, prompt_template="de: {source} {x}"))
    assert examples[1] == Example("test-1", "Nein.", "de: Nein. {x}", ("No.",), None)


@pytest.mark.parametrize(
    ("row", "column", "source"),
    [
        ({"translation": {"de": "Ja."}}, "translation.de", "Ja."),
        ({"a.de": "Ja."}, "a.de", "Ja."),  # the column's own name has a dot
        ({"turns": ["Write.", "Rewrite."]}, ["prompt", "turns"], "Write."),
        ({"prompt": None, "turns": ["Sing."]}, ["prompt", "turns"], "Sing."),
    ],
)
def test_the_first_column_that_exists_is_taken_a_field_of_one_or_the_first_turn_of_a_list(
    rows_file, row: dict, column: str | list[str], source: str
) -> None:
    asked = spec(
        path=rows_file(row), source_column=column, reference_column=None, metric="agreement"
    )
    assert [(one.source, one.references) for one in load_examples(asked)] == [(source, ())]


def test_with_an_empty_template_texts_are_written_from_nothing(rows_file) -> None:
    """Table 3 of speculative decoding: rows in the layout of the hub's conversion of lm1b."""
    (example,) = load_examples(from_config("lm1b", path=rows_file({"text": "The show goes on ."})))
    assert (example.prompt, example.references) == ("", ("The show goes on .",))


ALPACA = {
    "source_column": "instruction",
    "input_column": "input",
    "reference_column": None,
    "metric": "agreement",
}


def test_an_input_goes_below_its_instruction_unless_it_is_empty(rows_file) -> None:
    rows = [
        {"instruction": "Sort.", "input": "b, a"},
        {"instruction": "Sing.", "input": ""},
        {"instruction": "Hum."},
        {"instruction": "Rest.", "input": " "},
    ]
    examples = load_examples(spec(path=rows_file(*rows), prompt_template="Q: {source}", **ALPACA))
    prompts = ["Q: Sort.\nb, a", "Q: Sing.", "Q: Hum.", "Q: Rest."]
    assert [example.prompt for example in examples] == prompts
    assert examples[0].source == "Sort.\nb, a"


def test_each_question_is_asked_in_every_chat_template(rows_file) -> None:
    path = rows_file({"de": "Ja.", "en": "Yes."}, {"de": "Nein.", "en": "No."})
    examples = load_examples(
        spec(
            path=path,
            prompt_template="de: {source}",
            chat_template=["Be nice. [{question}]", "[{question}]"],
        )
    )
    assert [(example.id, example.prompt) for example in examples] == [
        ("test-0@1", "Be nice. [de: Ja.]"),
        ("test-0@2", "[de: Ja.]"),
        ("test-1@1", "Be nice. [de: Nein.]"),
        ("test-1@2", "[de: Nein.]"),
    ]
    assert examples[3].references == ("No.",)


TURNS = {
    "source_column": "turns",
    "reference_column": None,
    "metric": "agreement",
    "id_column": "id",
}


@pytest.mark.parametrize(
    ("turns", "ids"), [(1, ["7"]), (2, ["7", "7/2"]), (None, ["7", "7/2", "7/3"])]
)
def test_as_many_turns_are_examples_as_are_asked_for(
    rows_file, turns: int | None, ids: list[str]
) -> None:
    path = rows_file({"turns": ["Write.", "Rewrite.", "Stop."], "id": 7})
    examples = load_examples(spec(path=path, turns=turns, **TURNS), unanswered=True)
    assert [example.id for example in examples] == ids


def test_later_turns_follow_on_the_history_that_is_given(rows_file, tmp_path: Path) -> None:
    path = rows_file({"turns": ["Write.", "Rewrite."], "id": 7})
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "test-0.jsonl").write_text('{"id": 7, "answer": "A poem."}\n')
    history = str(tmp_path / "history")
    assert (
        load_examples(spec(path=path, turns=2, history=history, **TURNS))[1].prompt
        == "Write.\nA poem.\nRewrite."
    )


def test_a_history_with_two_answers_to_one_turn_is_refused(rows_file, tmp_path: Path) -> None:
    """Fault: the last one was taken, such as that of another model in the same file."""
    path, file = rows_file({"turns": ["Write.", "Rewrite."], "id": 7}), tmp_path / "answers.jsonl"
    given = spec(path=path, turns=2, history=str(file), **TURNS)
    file.write_text('{"id": 7, "answer": "A poem."}\n{"id": "7", "answer": "A poem."}\n')
    assert load_examples(given)[1].prompt == "Write.\nA poem.\nRewrite."
    file.write_text('{"id": 7, "answer": "A poem."}\n{"id": "7", "answer": "A song."}\n')
    with pytest.raises(UserError, match=r"line 2: .* has another answer to '7' before"):
        load_examples(given)


@pytest.mark.parametrize(
    "scored", [{"metric": "rouge"}, {"metric": "agreement", "reference_column": None}]
)
def test_questions_on_one_passage_name_the_first_of_them(
    rows_file, scored: dict[str, str | None]
) -> None:
    """Planted: SQuAD's five questions on a passage, or rows that repeat a text, as independent."""
    rows = [("Rome", "a"), ("Rome", "b"), ("Oslo", "c"), ("Rome", "a")]
    path = rows_file(*({"de": passage, "question": asked, "en": "A"} for passage, asked in rows))
    fields = {"input_column": "question", **scored}
    template = "{source} {input}"
    examples = load_examples(spec(path=path, prompt_template=template, **fields))
    assert [example.same_source for example in examples] == [None, "test-0", None, "test-0"]
    examples = load_examples(spec(path=path, **fields))  # the input belongs to the source
    assert [example.same_source for example in examples] == [None, None, None, "test-0"]
    rows = [{"de": "Translate.", "question": text, "en": "A"} for text in ("a", "b", "c", "b")]
    fields["prompt_template"] = template  # the instruction of all of them joins none
    examples = load_examples(spec(path=rows_file(*rows), **fields))
    assert [example.same_source for example in examples] == [None, None, None, "test-1"]


def test_later_turns_share_the_source_that_their_first_turn_shares(rows_file) -> None:
    turns = (["Hi", "More"], ["Ho", "More"], ["Hi", "Less"])
    path = rows_file(*({"de": list(asked)} for asked in turns))
    fields = {"reference_column": None, "metric": "agreement", "turns": None}
    two_templates = {"chat_template": ["[{question}]", "<{question}>"]}
    examples = load_examples(spec(path=path, **fields, **two_templates), unanswered=True)
    assert [example.same_source for example in examples] == [None] * 8 + ["test-0"] * 4
    rows = [[("user", first), ("assistant", "A"), ("user", "More")] for first in ("Hi", "Ho", "Hi")]
    messages = [[{"role": role, "content": text} for role, text in row] for row in rows]
    path = rows_file(*({"de": row, "en": "B"} for row in messages))
    examples = load_examples(spec(path=path, metric="bleu"))
    assert [example.same_source for example in examples] == [None, None, "test-0"]


def test_ids_and_categories_come_from_the_data_where_it_has_them(rows_file) -> None:
    path = rows_file(
        {"de": "a", "en": "b", "number": 81, "kind": "writing"}, {"de": "c", "en": "d"}
    )
    examples = load_examples(spec(path=path, id_column=["uid", "number"], category_column="kind"))
    assert [(example.id, example.category) for example in examples] == [
        ("81", "writing"),
        ("test-1", None),
    ]


def test_skipped_rows_leave_the_others_with_their_ids(rows_file) -> None:
    """Rows that chose thresholds are held out. Fault: ids are counted anew, so that two halves of a
    split look like the same examples.
    """
    rows = [{"de": name, "en": name} for name in "abcde"]
    path = rows_file(*rows)
    every, held_out = (load_examples(spec(path=path, skip=skip, limit=3)) for skip in (0, 3))
    assert [example.source for example in (*every, *held_out)] == list("abcde")
    assert len({example.id for example in (*every, *held_out)}) == 5
    assert len(load_examples(spec(path=path, skip=3, limit=sys.maxsize))) == 2
    for chosen in ({}, {"category_column": "de", "categories": ["a"]}):
        with pytest.raises(UserError, match=r"after 9 rows; check dataset\.skip"):
            load_examples(spec(path=path, skip=9, **chosen))
    for key in ("skip", "limit"):
        with pytest.raises(UserError, match=f"dataset.{key} must be .* <= {sys.maxsize}, got"):
            spec(path=path, **{key: sys.maxsize + 1})


def test_the_limit_takes_the_first_examples_and_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"de": "a", "en": "b"}\n{"de": "c", "en": "d"}\nnot json\n')
    assert [example.source for example in load_examples(spec(path=str(path), limit=2))] == [
        "a",
        "c",
    ]


WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
GOOD = {"de": "a", "en": "b"}
REFUSED = {  # the rows, what is asked of them, and what the message names
    "other columns": (
        [{"translation": {"fr": "Oui.", "en": "Yes."}, "id": 3}],
        {"source_column": ["de", "translation.de"]},
        [
            "line 1: dataset.source_column",
            "de or translation.de",
            "translation.fr, translation.en, id",
        ],
    ),
    "no reference": ([{"de": "Ja."}], {}, ["dataset.reference_column", "column en", "columns de"]),
    "an input that is no text": (
        [{"instruction": "Sort.", "input": ["b"]}],
        ALPACA,
        ["line 1: input must be a string", "['b']"],
    ),
    "a withheld text": (
        [{"turns": [WITHHELD], "id": 1}],
        TURNS,
        ["line 1", "withholds", "dataset.path=DIR"],
    ),
    "a withheld message": (
        [{"turns": [{"role": "user", "content": f"Read this. {WITHHELD}"}], "id": 1}],
        TURNS,
        ["line 1", "withholds", "dataset.path=DIR"],
    ),
    "one id twice": ([{**GOOD, "id": 1}] * 2, {"id_column": "id"}, ["id '1'", "id_column=null"]),
    "later turns without a history": (
        [{"turns": ["a", "b"], "id": 7}],
        {"turns": 2, **TURNS},
        ["dataset.turns=1"],
    ),
    **{
        f"source {value!r}": (
            [GOOD, {"de": value, "en": "b"}],
            {},
            ["line 2: de must be a non-empty string"],
        )
        for value in [7, [], [1], {"a": 1}]
    },
    **{
        f"reference {value!r}": (
            [{"de": "a", "en": value}],
            {},
            ["line 1: en must be texts or numbers, or lists of them"],
        )
        for value in [["a", None], float("nan"), True, {"a": "b"}]
    },
    **{
        f"no reference {value!r}": (
            [{"de": "a", "en": value}],
            {},
            [f"line 1: en holds no reference, got {value!r}"],
        )
        for value in [None, []]
    },
    "a reference beside several turns": (
        [{"turns": ["One?", "Two?"], "en": ["1", "2"]}],
        {"source_column": "turns"},
        ["line 1: turns holds several turns", "source_column=turns.0", "reference_column=en.0"],
    ),
    "one of the reference columns": (
        [{"de": "a", "en": "b", "also": None}, {"de": "a", "en": "b"}],
        {"reference_column": ["en", "also"]},
        ["line 2: dataset.reference_column wants column also", "if only as null"],
    ),
    "no rows": ([], {}, ["'made'", "split 'test'"]),
}


def test_all_reference_columns_count_and_the_first_is_shown_as_solved(
    rows_file, tmp_path: Path
) -> None:
    rows = [
        {"de": "a", "en": "b", "also": ["c", "d"]},
        {"de": "e", "en": None, "also": ["f"]},
        {"de": "g", "en": "h", "also": None},
    ]
    examples = load_examples(spec(path=rows_file(*rows), reference_column=["en", "also"]))
    assert [one.references for one in examples] == [("b", "c", "d"), ("f",), ("h",)]
    folder = tmp_path / "splits"
    folder.mkdir()
    for split, content in (("train", rows[:2]), ("test", [{"de": "i", "en": "j", "also": "k"}])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, content)))
    solved = {"shot_split": "train", "shot_template": "{source} is {reference}. "}
    asked = spec(path=str(folder), reference_column=["en", "also"], shots=2, **solved)
    (example,) = load_examples(asked)
    assert example.prompt == "a is b. e is f. i"
    with pytest.raises(UserError, match=r"dataset.shots=3, but split 'train' has 2 examples"):
        load_examples(replace(asked, shots=3))


def test_a_blank_reference_beside_another_one_is_none(rows_file) -> None:
    rows = [
        {"de": "a", "en": "b", "also": ""},
        {"de": "c", "en": " ", "also": ["d", ""]},
        {"de": "e", "en": "", "also": ""},  # which a metric of words refuses
    ]
    examples = load_examples(spec(path=rows_file(*rows), reference_column=["en", "also"]))
    assert [one.references for one in examples] == [("b",), ("d",), ("", "")]


def test_of_the_hub_another_split_has_other_rows_unless_a_file_serves_as_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str | None, str | None]] = []

    def rows(hub_id: str, split: str, **options: str | None) -> Iterator[tuple[str, dict]]:
        asked.append((options["revision"], options["data_dir"]))
        yield ("a file" if options["data_dir"] == "one" else f"{split} file"), {}

    monkeypatch.setattr(examples_module, "hub_rows", rows)
    hub = spec(hub_id="me/data", split="validation", hub_revision="old")
    assert same_rows(hub, "dev") and not same_rows(hub, "test") and not asked
    assert same_rows(replace(hub, hub_data_dir="one"), "test")
    assert not same_rows(replace(hub, hub_data_dir="many"), "test")
    assert set(asked) == {("old", "one"), ("old", "many")}


def test_a_decimal_number_is_written_without_an_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"de": "Wie viel?", "en": [Decimal("1E+3"), Decimal("0.50")]}]
    given = [("a file of tables", row) for row in rows]
    monkeypatch.setattr(examples_module, "hub_rows", lambda *_, **__: iter(given))
    (example,) = load_examples(spec(hub_id="me/data"))
    assert example.references == ("1000", "0.50")


def test_a_turn_in_the_middle_of_a_question_keeps_the_spaces_around_it() -> None:
    turns = [" first ", " last "]
    assert trimmed(turns, ("Asked:", "."), True) == (["first", " last "], ("Asked:", "."))
    assert trimmed(turns, ("Asked:", "."), False) == ([" first ", "last"], ("Asked:", "."))
    assert trimmed(turns, ("", " . "), True) == (["first", "last "], ("", " ."))


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (18, ("18",)),
        (18.0, ("18.0",)),
        (0.5, ("0.5",)),
        (1e22, ("10000000000000000000000.0",)),
        ([1, "2"], ("1", "2")),
    ],
)
def test_numbers_are_references_as_they_are_written(
    rows_file, value: object, texts: tuple[str, ...]
) -> None:
    (example,) = load_examples(spec(path=rows_file({"de": "a", "en": value})))
    assert example.references == texts


def test_rows_without_a_source_are_left_out_and_counted(
    rows_file, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        GOOD,
        *({"de": value, "en": "b"} for value in (None, "", "  \n")),
        {"de": "c", "en": "d"},
    ]
    assert [(one.id, one.source) for one in load_examples(spec(path=rows_file(*rows)))] == [
        ("test-0", "a"),
        ("test-4", "c"),
    ]
    assert (
        "rows without a source are left out, 3 of them, first " in caplog.text
        and "line 2" in caplog.text
    )


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("val.jsonl", "validation"),
        ("my/dev-small.csv", "validation"),
        ("rows.jsonl", "test"),
        ("train", "test"),
        (None, "test"),
    ],
)
def test_a_split_that_is_not_named_is_the_files_own(path: str | None, split: str) -> None:
    assert (
        DatasetSpec(
            name="a", path=path, hub_id="a/b", split=None, source_column="a", metric=None
        ).split
        == split
    )


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_give_no_example_are_refused_by_place_and_key(rows_file, case: str) -> None:
    rows, asked, named = REFUSED[case]
    with pytest.raises(UserError) as caught:
        load_examples(spec(path=rows_file(*rows), **asked))
    assert all(part in str(caught.value) for part in named), caught.value


@pytest.mark.parametrize(
    ("fields", "key", "value"),
    [
        *(({"limit": value}, "limit", str(value)) for value in (0, True, 1.5)),
        *(({"skip": value}, "skip", str(value)) for value in (-1, True, None)),
        ({"turns": 0}, "turns", "0"),
        ({"max_source_tokens": -1}, "max_source_tokens", "-1"),
        ({"prompt_template": "summarize:"}, "prompt_template", "'summarize:'"),
        ({"metric": "meteor"}, "metric", "'meteor'"),
        ({"metrics": ["bleu", "bleu"]}, "metrics", "bleu"),
        ({"metrics": []}, "metrics", "[]"),
        ({"metrics": ["bleu", "evaluate:"]}, "metric", "'evaluate:'"),
        ({"reference_column": None}, "metric=bleu", "reference_column"),
        ({"source_column": None, "path": None, "hub_id": "some/data"}, "source_column", "none"),
        ({"source_column": []}, "source_column", "[]"),
        ({"id_column": 3}, "id_column", "3"),
        ({"split": ""}, "split", "empty"),
        ({"path": None}, "path=DIR", "'made'"),
        ({"turns": 2}, "turns", "set dataset.turns=1, or dataset.metric=agreement"),
        ({"turns": None, "metric": "agreement", "max_source_tokens": 9}, "max_source_tokens", "9"),
        *(
            ({"chat_template": value}, "chat_template", repr(value))
            for value in ([], "hello", "<s> {question}")
        ),
        *(
            ({"next_turn_template": value}, "next_turn_template", value)
            for value in ("{question}", "{question}{answer}")
        ),
        (
            {"metric": "pass_at_1", "reference_template": "{prompt}"},
            "reference_template",
            "{answer}",
        ),
        ({"shots": 2, "split": "training", "shot_split": "train"}, "shot_split", "'training'"),
        (
            {"shots": 2, "reference_column": None, "metric": "agreement"},
            "shots=2",
            "reference_column",
        ),
        ({"shots": 2, "shot_template": "{source}"}, "shot_template", "'{source}'"),
        ({"prompt_template": "{source} {input}"}, "prompt_template", "dataset.input_column"),
        (
            {"shots": 2, "shot_template": "{source} {input} {reference}"},
            "shot_template",
            "dataset.input_column",
        ),
        (
            {"shots": 2, "input_column": "about", "prompt_template": "{source} {input}"},
            "shot_template must hold {input}",
            "{reference}",
        ),
    ],
)
def test_a_spec_that_no_dataset_could_satisfy_is_refused(
    fields: dict[str, object], key: str, value: str
) -> None:
    with pytest.raises(UserError) as caught:
        spec(**{"path": "data.jsonl", **fields})
    assert key in str(caught.value) and value in str(caught.value), caught.value


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_dataset_config_is_a_valid_spec_named_after_its_file(config: Path) -> None:
    own = {"path": "local.jsonl"} if config.stem == "local" else {}
    size = "_1k" if config.stem == "speed_bench_throughput" else ""
    assert from_config(config.stem, **own).name == config.stem + size
    assert config.read_text().startswith("# ")
    assert f"python run.py dataset={config.stem}" in config.read_text().splitlines()[0]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_toy_corpus_needs_neither_path_nor_hub(split: str) -> None:
    examples = load_examples(from_config("toy", split=split, limit=3))
    assert [example.id for example in examples] == [
        f"{'validation' if split == 'val' else split}-{i}" for i in range(3)
    ]
    assert all(
        example.prompt == example.source and len(example.references) == 1 for example in examples
    )


@pytest.mark.fast("test-1000")
@needs_shared_data
@pytest.mark.parametrize(
    ("split", "count"), [("test", 1000), ("validation", 1014), ("train", 29000)]
)
def test_multi30k_loads_from_a_folder(split: str, count: int) -> None:
    examples = load_examples(
        from_config("multi30k", path=str(SHARED_DATA / "multi30k"), split=split)
    )
    assert len(examples) == count
    if split == "test":
        assert examples[0].prompt == "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt."
        assert examples[0].references == ("A man in an orange hat starring at something.",)


@needs_shared_data
@pytest.mark.parametrize("path", ["mt_bench", "mt_bench/question.jsonl"])
def test_mt_bench_gives_both_turns_with_their_categories(path: str) -> None:
    examples = load_examples(from_config("mt_bench", path=str(SHARED_DATA / path)), unanswered=True)
    assert len(examples) == 160
    assert (examples[0].id, examples[0].category, examples[0].references) == ("81", "writing", ())
    assert examples[0].prompt.startswith("Compose an engaging travel blog post")
    assert (examples[1].id, examples[1].category, examples[1].turn) == ("81/2", "writing", 2)
    assert (
        examples[1].source
        == "Rewrite your previous response. Start every sentence with the letter A."
    )


ROWS_OF = {
    "lima": ({"conversations": ["Why?", "Because."], "source": "x"}, "train-0", "Why?"),
    "alpaca_gpt4": (
        {"instruction": "Sort.", "input": "b, a", "output": "a, b", "text": "x"},
        "train-0",
        "Sort.\nb, a",
    ),
    "open_platypus": (
        {"input": "", "output": "1", "instruction": "Prove.", "data_source": "x"},
        "train-0",
        "Prove.",
    ),
    "cip": ({"prompt": "Hi", "response": "Hello"}, "test-0", "Hi"),
    "humaneval_x": (
        {"task_id": "Python/0", "prompt": "def f():", "declaration": "x"},
        "Python/0",
        "def f():",
    ),
    "spec_bench": (
        {"question_id": 241, "category": "translation", "turns": ["Translate."]},
        "241",
        "Translate.",
    ),
    "speed_bench": (
        {"question_id": "ab", "category": "rag", "turns": ["Find."], "source": "x"},
        "ab",
        "Find.",
    ),
    "speed_bench_throughput": (
        {"question_id": "cd", "category": "low_entropy", "turns": ["Sort."], "source": "x"},
        "cd",
        "Sort.",
    ),
    "squad": (
        {
            "id": "56b",
            "context": "It rained.",
            "question": "Did it?",
            "answers": {"text": ["Yes", "yes"]},
        },
        "56b",
        "We have provided context information below.\nIt rained.\n"
        "### Given this information, please answer the question: Did it?\n### Assistant:",
    ),
}


@pytest.mark.parametrize("name", ROWS_OF)
def test_a_row_in_the_form_of_its_data_set_becomes_a_prompt(rows_file, name: str) -> None:
    row, own_id, prompt = ROWS_OF[name]
    (example,) = load_examples(from_config(name, path=rows_file(row)))
    assert (example.id, example.prompt, example.category) == (own_id, prompt, row.get("category"))


TEMPLATES = sorted((REPOSITORY / "conf" / "template").glob("*.yaml"))


def test_both_splits_of_speed_bench_are_read_as_nvidias_script_writes_them(tmp_path: Path) -> None:
    rows = {
        "qualitative": {"category": "rag", "messages": ["Find.", "And then?"]},
        "throughput_1k": {"category": "mixed", "messages": ["Short."]},
        "throughput_8k": {"category": "high_entropy", "messages": ["Long."]},
    }
    for name, row in rows.items():
        messages = [{"role": "user", "content": text} for text in row["messages"]]
        written = {"question_id": name, **row, "messages": messages}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(written) + "\n")
    first, second = load_examples(from_config("speed_bench", path=str(tmp_path)), unanswered=True)
    assert (first.prompt, first.category) == ("Find.", "rag")
    assert (second.source, second.category, second.turn) == ("And then?", "rag", 2)
    for size, tier, prompt in (("1k", "mixed", "Short."), ("8k", "high_entropy", "Long.")):
        config = f"throughput_{size}"
        spec = from_config("speed_bench_throughput", path=str(tmp_path), hub_config=config)
        (example,) = load_examples(spec)
        assert (example.id, example.category, example.prompt) == (config, tier, prompt)
        assert spec.name == f"speed_bench_throughput_{size}"


def from_template(config: Path, **fields: object) -> DatasetSpec:
    return spec(**{**yaml.safe_load(config.read_text()), **TURNS, **fields})


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        (
            "llama2_short",
            [
                "[INST] Write. [/INST]",
                "[INST] Write. [/INST] A poem. </s><s>[INST] Rewrite. [/INST]",
            ],
        ),
        (
            "vicuna_short",
            [
                "USER: Write. ASSISTANT:",
                "USER: Write. ASSISTANT: A poem.</s>USER: Rewrite. ASSISTANT:",
            ],
        ),
        (
            "falcon",
            [
                "User: Write.\nAssistant:",
                "User: Write.\nAssistant: A poem.\nUser: Rewrite.\nAssistant:",
            ],
        ),
    ],
)
def test_the_short_templates_are_those_of_bitas_table_6(
    rows_file, tmp_path: Path, name: str, prompts
) -> None:
    (tmp_path / "history.json").write_text('[{"id": "7", "answer": "A poem."}]')
    asked = from_template(
        REPOSITORY / "conf" / "template" / f"{name}.yaml",
        path=rows_file({"turns": ["Write.", "Rewrite."], "id": 7}),
        turns=2,
        history=str(tmp_path / "history.json"),
    )
    assert [example.prompt for example in load_examples(asked)] == prompts


@pytest.mark.parametrize("family", ["llama2", "vicuna"])
def test_both_templates_of_a_family_are_its_full_and_its_short_one(family: str) -> None:
    folder = REPOSITORY / "conf" / "template"
    full, short, both = (
        yaml.safe_load((folder / f"{family}_{kind}.yaml").read_text())
        for kind in ("full", "short", "both")
    )
    # BiTA's released code ends Llama's in a space
    plain = [text.removesuffix(" ") for text in both["chat_template"]]
    assert plain == [full["chat_template"], short["chat_template"]]
    assert both["next_turn_template"] == full["next_turn_template"] == short["next_turn_template"]
    assert full["chat_template"].endswith(short["chat_template"].removeprefix("[INST] "))


@pytest.mark.parametrize(
    ("name", "starts"), [("llama2_full", 2), ("vicuna_full", 1), ("falcon", 1)]
)
def test_the_start_token_comes_once_before_a_conversation_and_where_a_template_says_so(
    name: str, starts: int
) -> None:
    """The tokenizer adds it in front; Llama-2 has it before every turn."""
    (template,) = from_template(
        REPOSITORY / "conf" / "template" / f"{name}.yaml", path="data.jsonl"
    ).templates
    turns = conversation(Example("7", "w5", ""), ["w5", "w6"], template)
    ids = [
        tiny_tokenizer(False)(one.prompt)["input_ids"] for one in with_answers(turns, {"7": "w9"})
    ]
    assert [one.count(START) for one in ids] == [1, starts]
    assert all(one[0] == START for one in ids)


def local(path: str | Path, **fields: object) -> DatasetSpec:
    return from_config("local", path=str(path), **fields)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("reviews.jsonl", "reviews"),
        ("faq/test.csv", "faq"),
        ("faq/Dev.tsv", "faq"),
        ("my.data", "my.data"),
    ],
)
def test_own_data_are_called_as_their_file_or_folder_is(
    file: str, name: str, tmp_path: Path
) -> None:
    assert local(tmp_path / file).name == name
    assert replace(local(tmp_path / file), name="mine").name == "mine"


def test_own_data_are_scored_by_agreement_or_else_need_a_metric_for_their_references(
    rows_file,
) -> None:
    path, question = rows_file({"question": "Who?", "answer": "Me."}), {"source_column": "question"}
    assert local(path, **question).metric == "agreement"
    assert load_examples(local(path, **question))[0].references == ()
    with pytest.raises(UserError, match="dataset.metric must be"):
        local(path, **question, reference_column="answer")
    assert load_examples(local(path, **question, reference_column="answer", metric="rouge"))[
        0
    ].references == ("Me.",)


def test_own_data_without_a_column_name_those_that_there_are(rows_file) -> None:
    with pytest.raises(
        UserError, match=r"rows.jsonl line 1 .*question, meta.by; .*dataset.source_column="
    ):
        load_examples(local(rows_file({"question": "Who?", "meta": {"by": 1}})))


def test_gsm8k_asks_after_eight_solved_problems_of_its_train_split_that_have_a_question(
    tmp_path: Path,
) -> None:
    solved = [
        {"question": f"What is {n} and {n}?", "answer": f"{2 * n}\n#### {2 * n}"} for n in range(12)
    ]
    empty = {"question": None, "answer": "0"}
    for split, rows in (("train", [*solved[:3], empty, *solved[3:9]]), ("test", solved[9:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = load_examples(from_config("gsm8k", path=str(tmp_path)))
    assert [one.source for one in examples] == [row["question"] for row in solved[9:]]
    *shots, asked = examples[0].prompt.split("\n\n")
    assert shots == [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in solved[:8]]
    assert asked == f"Question: {solved[9]['question']}\nAnswer:"
    assert examples[0].references == (solved[9]["answer"],)


@pytest.mark.parametrize(
    ("templates", "prompt"),
    [
        ({}, "Who?\nA text.\nMe {input}.\n\nWhat?\n{reference}"),
        (
            {
                "prompt_template": "{input} Q: {source} A:",
                "shot_template": "{input} Q: {source} A: {reference} | ",
            },
            "A text. Q: Who? A: Me {input}. | {reference} Q: What? A:",
        ),
    ],
)
def test_a_solved_example_has_its_input_as_a_question_has(
    tmp_path: Path, templates: dict[str, str], prompt: str
) -> None:
    rows = {
        "train": {"question": "Who?", "about": "A text.", "answer": "Me {input}."},
        "test": {"question": "What?", "about": "{reference}", "answer": "It."},
    }
    for split, row in rows.items():
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    columns = {"source_column": "question", "input_column": "about", "reference_column": "answer"}
    (example,) = load_examples(spec(path=str(tmp_path), shots=1, **columns, **templates))
    assert example.prompt == prompt


def test_only_rows_of_the_categories_count_and_keep_their_names(rows_file) -> None:
    kinds = ["math", "code", None, "math", "logic"]
    rows = [
        {"de": f"Frage {at}", "en": f"answer {at}", "kind": kind} for at, kind in enumerate(kinds)
    ]
    asked = {"path": rows_file(*rows), "category_column": "kind"}
    examples = load_examples(spec(**asked, categories=["math", "logic"]))
    assert [example.id for example in examples] == ["test-0", "test-3", "test-4"]
    assert [example.category for example in examples] == ["math", "math", "logic"]
    limited = load_examples(spec(**asked, categories="math", limit=2))
    assert limited == examples[:2]
    with pytest.raises(
        UserError, match=r"no row of dataset.categories=\['maths'\].* has math, code"
    ):
        load_examples(spec(**asked, categories=["maths"]))
    with pytest.raises(UserError, match="set dataset.category_column"):
        spec(path=asked["path"], categories=["math"])


def test_a_column_may_be_a_place_in_a_list(rows_file) -> None:
    path = rows_file({"de": "Ja.", "en": ["Yes.", "Yeah."]}, {"de": "Nein.", "en": ["No."]})
    first = load_examples(spec(path=path, reference_column="en.0"))
    assert [example.references for example in first] == [("Yes.",), ("No.",)]
    with pytest.raises(UserError, match="wants column en.1"):
        load_examples(spec(path=path, reference_column="en.1"))


def test_of_several_turns_the_first_has_the_reference_that_is_named(rows_file) -> None:
    path = rows_file({"turns": ["One?", "Two?"], "en": ["1", "2"], "id": 7})
    for source_column in ("turns", "turns.0"):
        asked = spec(path=path, source_column=source_column, reference_column="en.0")
        (example,) = load_examples(asked)
        assert (example.source, example.references) == ("One?", ("1",))
    (example,) = load_examples(spec(path=path, source_column="turns.0"))
    assert example.references == ("1", "2")  # either is right


@needs_shared_data
def test_mathematics_of_mt_bench_has_numbers_as_answers() -> None:
    asked = from_config(
        "mt_bench",
        path=str(SHARED_DATA / "mt_bench"),
        categories=["math"],
        turns=1,
        reference_column="reference.0",
        metric="numeric",
    )
    examples = load_examples(asked)
    assert len(examples) == 10 and {example.category for example in examples} == {"math"}
    references = [example.references for example in examples]
    Scoring(("numeric",)).fitted(references)  # none is without a number
    answers = ["The area is 3.", "12000 dollars", "So 19 %", "It is 35/36."]
    assert score("numeric", answers, references[:4]).value == 100


def test_a_reference_may_be_made_of_columns_and_keeps_other_braces(rows_file) -> None:
    row = {"prompt": "def f():\n", "test": "assert f() == {1}", "entry": {"point": "f"}}
    made = {
        "source_column": "prompt",
        "reference_column": None,
        "path": rows_file(row),
        "metric": "pass_at_1",
    }
    template = "{prompt}{answer}\n{test}\ncheck({entry.point}, {})"
    (example,) = load_examples(spec(**made, reference_template=template))
    assert example.references == ("def f():\n{answer}\nassert f() == {1}\ncheck(f, {})",)
    with pytest.raises(UserError, match="line 1: dataset.reference_template .*column tests"):
        load_examples(spec(**made, reference_template="{answer}{tests}"))
    agreement = spec(**{**made, "metric": "agreement"}, reference_template="{answer}{tests}")
    assert load_examples(agreement)[0].references == ()  # nobody asks for them


@needs_shared_data
def test_humaneval_has_a_program_for_each_answer() -> None:
    path = str(SHARED_DATA / "humaneval")
    examples = load_examples(from_config("humaneval", path=path, metric="pass_at_1"))
    assert len(examples) == 164 and all(
        one.references[0].count("{answer}") == 1 for one in examples
    )
    assert examples[0].references[0].startswith(examples[0].prompt)
    assert examples[0].references[0].endswith("\n\ncheck(has_close_elements)\n")


@pytest.mark.parametrize("column", ["de", "en"])
def test_half_a_character_in_a_prompt_or_a_reference_is_refused_with_its_row(
    rows_file, column: str
) -> None:
    """JSON can name one, and no tokenizer, hash or file can hold it."""
    rows = [{"de": "eins", "en": "one"}, {"de": "zwei", "en": "two"} | {column: "ab\ud800"}]
    with pytest.raises(
        UserError, match=r"line 2 must be Unicode text, got \\ud800 alone at character 2"
    ):
        load_examples(spec(path=rows_file(*rows)))


def test_so_is_one_in_the_answers_of_a_history(rows_file, tmp_path: Path) -> None:
    path = rows_file({"de": ["eins", "zwei"], "en": "one"})
    (tmp_path / "answers.jsonl").write_text(json.dumps({"id": "test-0", "answer": "\udc00"}) + "\n")
    with pytest.raises(UserError, match="must be Unicode text"):
        load_examples(
            spec(
                path=path,
                turns=2,
                metric="agreement",
                history=str(tmp_path / "answers.jsonl"),
                reference_column=None,
            )
        )
