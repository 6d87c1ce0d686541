"""Which examples are of one question."""

from __future__ import annotations

from bild_lab.lab.data.prompts import Example
from bild_lab.lab.schema.questions import questions_of, source_ids


def test_templates_and_turns_of_a_question_share_it() -> None:
    ids = ["train-0@1", "train-0@1/2", "train-0@2", "train-0@2/2", "HumanEval/2", "HumanEval/2/2"]
    assert questions_of(ids) == ["train-0"] * 4 + ["HumanEval/2"] * 2
    assert questions_of(["HumanEval/1", "HumanEval/2"]) == ["HumanEval/1", "HumanEval/2"]


def test_examples_of_one_source_and_their_turns_are_of_one_question() -> None:
    shared = [("a", None), ("a/2", None), ("b@1", "a"), ("b@1/2", "a"), ("c", None)]
    examples = [Example(name, "", "", same_source=first) for name, first in shared]
    assert questions_of(source_ids(examples)) == ["a"] * 4 + ["c"]
