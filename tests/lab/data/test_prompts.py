"""`dataset.max_source_tokens` cuts the source; what a template, shots or an input put around it
stays whole.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import inserted, load_examples
from bild_lab.lab.data.prompts import (
    Example,
    SourcePrompt,
    cut_sources,
    longest_fitting,
)

SOURCE = "a b c d e f g h"


def words(text: str) -> int:
    return len(text.split())


def cut(folder: Path, most: int | None, **others: Any) -> Example:
    for split, source in (("test", SOURCE), ("train", "x y")):
        row = {"s": source, "i": "in", "r": "out"}
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    spec = DatasetSpec(
        name="d",
        path=str(folder),
        source_column="s",
        metric="agreement",
        max_source_tokens=most,
        **others,
    )
    (example,) = cut_sources(load_examples(spec), most, words)
    return example


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        ({"prompt_template": "{source}"}, "a b c d e f"),
        ({"prompt_template": "To {source} say"}, "To a b c d say"),
        ({"prompt_template": "{source} or {source} ?"}, "a b or a b ?"),
        ({"prompt_template": "To {source} with {input}", "input_column": "i"}, "To a b c with in"),
        ({"prompt_template": "To {source} say", "input_column": "i"}, "To a b c \nin say"),
        ({"prompt_template": "To {source}", "chat_template": "[ {question} ]"}, "[ To a b c ]"),
        (
            {"reference_column": "r", "shots": 1, "shot_template": "{source} {reference} "},
            "x y out a b c",
        ),
    ],
)
def test_the_source_alone_loses_its_end(
    tmp_path: Path, others: dict[str, Any], wanted: str
) -> None:
    whole = cut(tmp_path, None, **others).prompt
    example = cut(tmp_path, 6, **others)
    assert example.prompt.split() == wanted.split() and words(whole) > 6
    assert cut(tmp_path, 99, **others).prompt == whole
    assert example.source.startswith(SOURCE)  # what the dataset holds


def test_no_room_for_the_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"max_source_tokens=3 cuts the source alone, .* around it has 4 tokens"
    ):
        cut(tmp_path, 3, prompt_template="one two {source} three four")


def test_a_prompt_knows_its_source_after_a_copy() -> None:
    prompt = SourcePrompt("a b", ("x ", " y"))
    again = copy.deepcopy(prompt)
    assert again == prompt == "x a b y" and (again.source, again.around) == ("a b", ("x ", " y"))


def test_texts_around_a_source_nest() -> None:
    assert inserted(["a", "b"], ["c", "d"]) == ("ac", "db")
    assert inserted(["a", "b", "z"], ["c", "d"]) == ("ac", "dbc", "dz")
    assert inserted(["a", "b"], ["c"]) == ("acb",)  # an empty prompt has no source


def test_the_longest_length_below_the_whole_that_fits_is_found() -> None:
    assert [longest_fitting(9, lambda n, most=most: n <= most) for most in (0, 1, 5, 8, 20)] == [
        0,
        1,
        5,
        8,
        8,
    ]
