"""Conversations: how turns become examples, and what their prompts hold."""

from __future__ import annotations

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.data.dataset_spec import Template
from bild_lab.lab.data.examples import Continuation, Example, conversation, with_answers

CHAT = Template("[{question}]", " {answer} | [{question}]")
FIRST = Example("81", "Write.", "", references=("a poem",), category="writing")


def test_a_conversation_is_an_example_for_each_turn() -> None:
    first, second, third = conversation(FIRST, ["Write.", "Rewrite.", "Stop."], CHAT)
    assert first == Example("81", "Write.", "[Write.]", ("a poem",), "writing", 1, None)
    assert second == Example("81/2", "Rewrite.", " | [Rewrite.]", (), "writing", 2, Continuation("81", " "))
    assert (third.id, third.turn, third.continues) == ("81/3", 3, Continuation("81/2", " "))


def test_a_later_prompt_holds_all_turns_and_answers_before_it() -> None:
    turns = conversation(FIRST, ["Write.", "Rewrite.", "Stop."], CHAT)
    whole = with_answers(turns, {"81": "One.", "81/2": "{answer} Two {question}."})
    assert [example.prompt for example in whole] == [
        "[Write.]",
        "[Write.] One. | [Rewrite.]",
        "[Write.] One. | [Rewrite.] {answer} Two {question}. | [Stop.]",
    ]
    assert all(example.continues is None for example in whole)
    assert [example.id for example in whole] == ["81", "81/2", "81/3"]


def test_a_question_that_looks_like_a_placeholder_is_kept() -> None:
    turns = conversation(FIRST, ["{answer}", "{answer} {question}"], CHAT)
    assert with_answers(turns, {"81": "One."})[1].prompt == "[{answer}] One. | [{answer} {question}]"


def test_a_turn_whose_answer_is_missing_is_named() -> None:
    turns = conversation(FIRST, ["Write.", "Rewrite."], CHAT)
    with pytest.raises(UserError, match=r"turn 2 of example '81/2' needs the answer to '81'.*dataset.turns=1"):
        with_answers(turns, {"82": "Another."})
