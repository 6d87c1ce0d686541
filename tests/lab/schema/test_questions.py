"""Which examples are of one question."""

from __future__ import annotations

from bild_lab.lab.schema.questions import questions_of


def test_templates_and_turns_of_a_question_share_it() -> None:
    ids = ["train-0@1", "train-0@1/2", "train-0@2", "train-0@2/2", "HumanEval/2", "HumanEval/2/2"]
    assert questions_of(ids) == ["train-0"] * 4 + ["HumanEval/2"] * 2
    assert questions_of(["HumanEval/1", "HumanEval/2"]) == ["HumanEval/1", "HumanEval/2"]
