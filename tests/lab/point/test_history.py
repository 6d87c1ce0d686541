"""Later turns follow on the target's own answers, made once and the same for every policy."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

import bild_lab
from bild_lab.engine.models.checkpoint.chat import (
    ChatSettings,
    CompleteText,
    answer_in_history,
)
from bild_lab.errors import UserError
from bild_lab.lab.data.conversations import conversation
from bild_lab.lab.data.dataset_spec import Template
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.point.history import ANSWER_KEYS, greedy_history, with_history

SETTING = {**dict.fromkeys(ANSWER_KEYS, "x"), "target": "tiny", "max_source_tokens": None}
LIMIT = 5


@pytest.fixture(scope="module")
def vanilla(checkpoints: Path) -> bild_lab.Decoder:
    return bild_lab.load(str(checkpoints / "llama"), policy="vanilla")


@pytest.fixture
def turns() -> tuple[Example, ...]:
    template = Template("{question}", " {answer} {question}")
    talk = conversation(Example("a", "w5 w6", ""), ["w5 w6", "w7", "w8 w9"], template)
    return (*talk, *conversation(Example("b", "w10", ""), ["w10"], template))


def test_each_turn_follows_on_the_greedy_answers_to_those_before(
    vanilla, turns, tmp_path: Path
) -> None:
    one = vanilla.generate("w5 w6", LIMIT).text
    two = vanilla.generate(f"w5 w6 {one} w7", LIMIT).text
    whole = with_history(turns, vanilla, SETTING, LIMIT, tmp_path)
    assert [example.prompt for example in whole] == [
        "w5 w6",
        f"w5 w6 {one} w7",
        f"w5 w6 {one} w7 {two} w8 w9",
        "w10",
    ]
    assert [example.id for example in whole] == ["a", "a/2", "a/3", "b"]


KEEPS_THE_END = (  # of an answer, as a template that leaves out its thinking
    "{% for m in messages %}{% if m.role == 'user' %}w20 {{ m.content }} w21{% else %}"
    " {{ m.content.split(' ', 2)[-1] }} {% endif %}{% endfor %}"
)


def test_an_answer_is_continued_as_the_models_own_chat_template_keeps_it(
    vanilla, turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vanilla.target.checkpoint.tokenizer, "chat_template", KEEPS_THE_END)
    first, second, *_ = turns
    for prompt, cut in (("w5 w6", 0), (CompleteText("w5 w6"), 2)):
        whole = vanilla.generate(prompt, LIMIT).text
        answers = greedy_history([replace(first, prompt=prompt), second], vanilla, LIMIT)
        assert answers == {"a": " ".join(whole.split(" ")[cut:])}


def test_an_answer_stays_whole_in_a_template_that_writes_the_rest_otherwise(vanilla) -> None:
    tokenizer = copy.copy(vanilla.target.checkpoint.tokenizer)
    tokenizer.chat_template = "{{ messages[1].content | length }}{{ messages[1].content }}"
    kept = lambda answer: answer_in_history(tokenizer, "tiny", answer, ChatSettings())  # noqa: E731
    assert kept(" w7") == " w7"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
    assert kept(" w7 question;\n") == "w7 question;"
    # an answer that is left out ends where the next question begins
    tokenizer.chat_template = (
        "{% for m in messages if m.content != 'w9' %}{{ m.content }};{% endfor %}"
    )
    assert kept("w9") == "w9"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content or raise_exception('empty') }}{% endfor %}"
    )
    assert kept("") == ""
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    assert kept("analysisw9assistantfinalw7") == "w7"  # what is left of gpt-oss's channels


def test_thinking_alone_is_left_out_by_a_template_with_no_space_before_no_answer(vanilla) -> None:
    tokenizer = copy.copy(vanilla.target.checkpoint.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% set rest = m.content.split('/')[-1] %}"
        "{{ ' ' + rest if rest }};{% endfor %}"
    )
    kept = answer_in_history(tokenizer, "tiny", "w7/", ChatSettings())
    assert kept == ""


def test_an_answer_is_kept_as_the_template_is_told(vanilla, turns, monkeypatch) -> None:
    template = KEEPS_THE_END.replace("m.content.split", "m.content if whole else m.content.split")
    monkeypatch.setattr(vanilla.target.checkpoint.tokenizer, "chat_template", template)
    first = replace(turns[0], prompt=CompleteText("w5 w6"))
    told = replace(vanilla, chat=ChatSettings(values={"whole": True}))
    answers = greedy_history([first, turns[1]], told, LIMIT)
    assert answers == {"a": vanilla.generate(first.prompt, LIMIT).text}


def test_the_answers_are_to_prompts_cut_as_the_measured_ones(
    vanilla, turns, tmp_path: Path
) -> None:
    whole = with_history(turns, vanilla, {**SETTING, "max_source_tokens": 2}, LIMIT, tmp_path)
    answer = vanilla.generate("w5 w6", LIMIT, max_source_tokens=2).text
    assert whole[1].prompt == f"w5 w6 {answer} w7"
    assert whole[1].prompt != with_history(turns, vanilla, SETTING, LIMIT, tmp_path)[1].prompt


def test_only_turns_that_others_follow_are_answered(vanilla, turns) -> None:
    assert list(greedy_history(turns, vanilla, LIMIT)) == ["a", "a/2"]


def test_the_answers_are_made_once_for_all_points_of_a_sweep(
    vanilla, turns, tmp_path: Path
) -> None:
    with_history(turns, vanilla, SETTING, LIMIT, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({"answers": {"a": "w11", "a/2": "w12"}}))
    assert (
        with_history(turns, vanilla, SETTING, LIMIT, tmp_path)[2].prompt == "w5 w6 w11 w7 w12 w8 w9"
    )


@pytest.mark.parametrize(
    "key", "weights weight_bits data engine dtype device code max_source_tokens".split()
)
def test_what_decides_the_answers_decides_which_are_taken(
    vanilla, turns, tmp_path: Path, key: str
) -> None:
    with_history(turns, vanilla, SETTING, LIMIT, tmp_path)
    with_history(turns, vanilla, {**SETTING, key: 3}, LIMIT, tmp_path)
    with_history(turns, vanilla, SETTING, LIMIT + 1, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_examples_of_one_turn_need_no_history_and_leave_no_file(
    vanilla, turns, tmp_path: Path
) -> None:
    assert with_history(turns[:1], vanilla, SETTING, LIMIT, tmp_path / "history") == turns[:1]
    assert not (tmp_path / "history").exists()


def test_a_history_that_cannot_be_read_is_named(vanilla, turns, tmp_path: Path) -> None:
    with_history(turns, vanilla, SETTING, LIMIT, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    with pytest.raises(
        UserError, match=f"cannot read the conversations' history in {file}.*remove this file"
    ):
        with_history(turns, vanilla, SETTING, LIMIT, tmp_path)
