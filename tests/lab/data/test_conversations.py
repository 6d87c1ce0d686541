"""Conversations: how turns become examples, and what their prompts hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from bild_lab.engine.models.checkpoint.chat import CompleteText
from bild_lab.engine.models.checkpoint.pieces import prompt_tokens
from bild_lab.errors import UserError
from bild_lab.lab.data.conversations import conversation
from bild_lab.lab.data.dataset_spec import DatasetSpec, Template, for_model
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.data.prompts import Continuation, Example, cut_sources, with_answers
from bild_lab.training.batches import tokenize

CHAT = Template("[{question}]", " {answer} | [{question}]")
FIRST = Example("81", "Write.", "", references=("a poem",), category="writing")


def test_a_conversation_is_an_example_for_each_turn() -> None:
    first, second, third = conversation(FIRST, ["Write.", "Rewrite.", "Stop."], CHAT)
    assert first == Example("81", "Write.", "[Write.]", ("a poem",), "writing", 1, None)
    assert second == Example(
        "81/2", "Rewrite.", " | [Rewrite.]", (), "writing", 2, Continuation("81", " ")
    )
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
    assert (
        with_answers(turns, {"81": "One."})[1].prompt == "[{answer}] One. | [{answer} {question}]"
    )


def test_a_turn_whose_answer_is_missing_is_named() -> None:
    turns = conversation(FIRST, ["Write.", "Rewrite."], CHAT)
    with pytest.raises(
        UserError, match=r"turn 2 of example '81/2' needs the answer to '81'.*dataset.turns=1"
    ):
        with_answers(turns, {"82": "Another."})


WORDS = ("Write", "Rewrite", "One")


class Chats:
    """Tokenizers whose chat template is written in Jinja, one word a token.

    added: the special tokens around a text.
    """

    def __init__(self, template: str | None, added: str = "<s> $A") -> None:
        pieces = ("<unk>", "<s>", "</s>", "user", "assistant", "<", ">", "/", *WORDS)
        vocabulary = {piece: place for place, piece in enumerate(pieces)}
        plain = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        plain.pre_tokenizer = Whitespace()
        plain.post_processor = TemplateProcessing(
            single=added, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=plain, bos_token="<s>", eos_token="</s>", chat_template=template
        )
        self.path = "chats"


TURNS = """{{ bos_token }}{% for one in messages %}<{{ one.role }}>{{ one.content }}</>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
ANSWERED = (
    "{% for one in messages %}{{ one.content }}{% if loop.last %} now{% endif %}|{% endfor %}"
)


def chat_spec(**others: Any) -> DatasetSpec:
    return DatasetSpec(
        name="chat",
        path="x",
        source_column="prompt",
        metric=None,
        chat_template="checkpoint",
        **others,
    )


def test_a_checkpoints_own_template_writes_both_turns_as_transformers_does() -> None:
    chats = Chats(TURNS)
    spec = for_model(chat_spec(turns=2), chats)
    whole = with_answers(
        conversation(FIRST, ["Write {answer}.", "Rewrite."], spec.templates[0]), {"81": " One.\n"}
    )
    messages = [("user", "Write {answer}."), ("assistant", " One.\n"), ("user", "Rewrite.")]
    for example, count in zip(whole, (1, 3), strict=True):
        given = [{"role": role, "content": text} for role, text in messages[:count]]
        written = chats.tokenizer.apply_chat_template(
            given, tokenize=False, add_generation_prompt=True
        )
        assert example.prompt == written
    assert for_model(spec, Chats(None)) is spec


@pytest.mark.parametrize("added", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("template", [TURNS, TURNS.removeprefix("{{ bos_token }}")])
def test_prompts_in_a_models_own_template_have_the_tokens_that_it_writes_and_no_others(
    template: str, added: str, tmp_path: Path
) -> None:
    tokenizer = Chats(template, added).tokenizer
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": ["Write", "Rewrite"]}))
    spec = replace(for_model(chat_spec(turns=2), Chats(template, added)), path=str(file))
    examples = load_examples(spec, unanswered=True)
    messages = [("user", "Write"), ("assistant", "One"), ("user", "Rewrite")]
    given = [{"role": role, "content": text} for role, text in messages]
    whole = with_answers(examples, {examples[0].id: "One"})
    for example, count in zip(whole, (1, 3), strict=True):
        written = tokenizer.apply_chat_template(given[:count], add_generation_prompt=True)
        assert prompt_tokens(tokenizer, [example.prompt]) == [written["input_ids"]]
    (unanswered, _) = load_examples(spec, unanswered=True)
    count = lambda prompt: len(prompt_tokens(tokenizer, [prompt])[0])  # noqa: E731
    (cut,) = cut_sources([unanswered], count(unanswered.prompt), count)
    assert cut == unanswered and count(cut.prompt) == count(unanswered.prompt)
    learned = replace(unanswered, references=("One",))
    (tokenized,) = tokenize([learned], tokenizer, False, count(cut.prompt), 8)
    assert [tokenized.prompt.tolist()] == prompt_tokens(tokenizer, [cut.prompt])


@pytest.mark.parametrize(
    "asked", [" {source} ", "Asked:\n{source}\n", "{source}", "{source}|{source} or {source}"]
)
@pytest.mark.parametrize(
    "content", ["one.content", "one.content | trim", "' ' + one.content.strip()"]
)
def test_questions_have_spaces_around_them_where_the_models_own_template_keeps_them(
    content: str, asked: str, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    chats = Chats(TURNS.replace("{{ one.content }}", f"{{{{ {content} }}}} "))
    rows.write_text(json.dumps({"prompt": [" Write  one\n", "\nRewrite "]}) + "\n")
    spec = for_model(chat_spec(turns=2, prompt_template=asked), chats)
    first, second = with_answers(
        load_examples(replace(spec, path=str(rows)), unanswered=True), {"test-0": "One"}
    )
    question = {"role": "user", "content": asked.replace("{source}", " Write  one\n")}
    answer, last = (
        {"role": role, "content": text}
        for role, text in (("assistant", "One"), ("user", "\nRewrite "))
    )
    for example, messages in ((first, [question]), (second, [question, answer, last])):
        assert example.prompt == chats.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


@pytest.mark.parametrize(
    "content", ["one.content.rstrip()", "one.content.strip('\\n')", "one.content | tojson"]
)
def test_a_template_that_keeps_some_of_the_spaces_does_not_trim(content: str) -> None:
    chats = Chats(TURNS.replace("one.content", content))
    (template,) = for_model(chat_spec(), chats).templates
    assert not template.trims


def test_a_template_of_the_users_own_leaves_the_start_token_to_the_tokenizer(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match="not begin with <s>, which the tokenizer adds"):
        replace(chat_spec(), chat_template="<s>{question}")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "Write"}))
    spec = replace(chat_spec(), chat_template="user {question}", path=str(file))
    (example,) = load_examples(spec)
    assert prompt_tokens(Chats(None).tokenizer, [example.prompt]) == [[1, 3, 8]]


DATED = (
    """{{ strftime_now("%d %B %Y") }}{% if thinking %} think{% endif %} {{ messages[0].content }}"""
)


def test_a_template_that_writes_the_date_writes_the_same_one_every_day() -> None:
    assert for_model(chat_spec(), Chats(DATED)).chat_template == (
        "checkpoint",
        "01 January 2026 {question}",
    )
    told = chat_spec(chat_template_date="2025-12-24", chat_template_kwargs={"thinking": True})
    spec = for_model(told, Chats(DATED))
    assert spec.chat_template == ("checkpoint", "24 December 2025 think {question}")
    assert hash(spec) == hash(for_model(told, Chats(DATED))) and not spec.chat_template_kwargs


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"chat_template_date": "24.12.2025"},
            "chat_template_date must be a day such as 2026-01-01",
        ),
        ({"chat_template_kwargs": {"thinkin": True}}, "chats does not name thinkin"),
        ({"chat_template_kwargs": {"messages": []}}, "cannot hold messages, which is set here"),
        (
            {"chat_template": "{question}", "chat_template_kwargs": {"thinking": True}},
            "set template=chat",
        ),
    ],
)
def test_settings_that_no_template_reads_are_refused(others: dict[str, Any], message: str) -> None:
    others = {"chat_template": "checkpoint", **others}
    with pytest.raises(UserError, match=message):
        spec = DatasetSpec(name="chat", path="x", source_column="prompt", metric=None, **others)
        for_model(spec, Chats(DATED))


def test_a_checkpoint_without_a_usable_template_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"tokenizer of chats has no chat template; give another, such as"
    ):
        for_model(chat_spec(), Chats(None))
    with pytest.raises(UserError, match=r"later turns cannot continue it; set dataset\.turns=1"):
        for_model(chat_spec(turns=2), Chats(ANSWERED))
    with pytest.raises(UserError, match="later turns cannot continue it"):
        for_model(chat_spec(turns=2), Chats(DATED))  # it writes the first turn alone
    answered_otherwise = for_model(chat_spec(), Chats(ANSWERED))
    assert answered_otherwise.chat_template == ("checkpoint", "{question} now|")
    with pytest.raises(UserError, match="must contain {question}"):
        _ = chat_spec().templates


def said(*texts: object, roles: tuple[str, ...] = ("user", "assistant")) -> list[dict[str, object]]:
    return [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]


def examples_of(
    tmp_path: Path, *conversations: list[dict[str, object]], **keys: Any
) -> list[Example]:
    file = tmp_path / "chats.jsonl"
    file.write_text(
        "".join(json.dumps({"messages": one, "gold": "g"}) + "\n" for one in conversations)
    )
    keys = {
        "source_column": "messages",
        "metric": "agreement",
        "next_turn_template": " {answer} | {question}",
        **keys,
    }
    return list(load_examples(DatasetSpec(name="chats", path=str(file), **keys), unanswered=True))


ANSWERS = {"reference_column": "messages", "history": "references", "turns": None}


def test_messages_with_roles_are_read_as_those_with_speakers(tmp_path: Path) -> None:
    turns = examples_of(tmp_path, said("One?", "1.", "Two?", "2.", "Three?"), **ANSWERS)
    assert [(one.prompt, one.references) for one in turns] == [
        ("One?", ("1.",)),
        ("One? 1. | Two?", ("2.",)),
    ]
    shared = [
        {"from": {"user": "human", "assistant": "gpt"}[one["role"]], "value": one["content"]}
        for one in said("One?", "1.", "Two?", "2.", "Three?")
    ]
    assert examples_of(tmp_path, shared, **ANSWERS) == turns


def test_a_question_needs_no_answer_unless_answers_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = examples_of(tmp_path, said("One?"), said("Two?", "2."))
    assert [(one.source, one.references) for one in asked] == [("One?", ()), ("Two?", ())]
    assert [
        one.references for one in examples_of(tmp_path, said("One?"), reference_column="gold")
    ] == [("g",)]
    assert not caplog.text
    answered = examples_of(tmp_path, said("One?"), said("Two?", "2."), **ANSWERS)
    assert [one.source for one in answered] == ["Two?"]
    assert "1 conversation without an answered question is left out" in caplog.text


def test_a_system_message_stands_before_the_first_question(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    turns = examples_of(tmp_path, [system, *said("One?", "1.", "Two?", "2.")], **ANSWERS)
    assert [one.prompt for one in turns] == ["Be brief.\n\nOne?", "Be brief.\n\nOne? 1. | Two?"]


@pytest.mark.parametrize("role", ["usr", None, 3])
def test_an_unknown_role_is_refused_with_its_row(tmp_path: Path, role: object) -> None:
    unknown = {"role": role, "content": "One?"}
    with pytest.raises(
        UserError, match=rf"line 2: role of a message must be one of .*, user, .*, got {role!r}"
    ):
        examples_of(tmp_path, said("One?", "1."), [unknown])
    called = [*said("One?", "1."), {"role": "tool", "content": "sunny"}]
    assert [one.source for one in examples_of(tmp_path, called)] == ["One?"]


def test_rows_that_were_left_out_are_told_where_no_other_is_in_the_split(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="no examples in split 'test', as all of its rows were left out: .* rows$"
    ):
        examples_of(tmp_path, said("One?"), said("Two?"), **ANSWERS)
    with pytest.raises(
        UserError, match="no examples in split 'test' after 1 rows; check dataset.sk"
    ):
        examples_of(tmp_path, said("One?"), **ANSWERS, skip=1)
    with pytest.raises(
        UserError,
        match=r"no examples in split 'test'; check whether \S+ has rows, and dataset.split",
    ):
        examples_of(tmp_path, **ANSWERS)


def test_the_parts_of_a_message_are_joined_and_pictures_are_refused(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "?"}]
    assert examples_of(tmp_path, said(parts))[0].source == "One?"
    with pytest.raises(
        UserError, match="line 1: the content of a message must be text, got .*image_url"
    ):
        examples_of(tmp_path, said([{"type": "image_url", "image_url": "x"}]))


GOLD = {"reference_column": "gold", "metric": "exact_match"}


def test_the_last_question_is_asked_where_another_column_has_the_answer(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    one_more = [system, *said("One?", "1.", "Two?", "2.", "{question}?")]
    templates = {
        "chat_template": ["[{question}]", "<{question}>"],
        "next_turn_template": " {answer} | [{question}] ",
        "prompt_template": "Q: {source}",
    }
    first, second, short, _ = examples_of(tmp_path, one_more, said("One?"), **GOLD, **templates)
    prompt = "[Be brief.\n\nOne?] 1. | [Two?]  2. | [Q: {question}?] "
    assert first == Example("test-0@1", "{question}?", prompt, ("g",))
    assert second.prompt.startswith("<Be brief.\n\nOne?> 1. | ")
    assert (short.prompt, short.references) == ("[Q: One?]", ("g",))
    # a long prompt loses the end of this question alone
    assert first.prompt.within(len(prompt) - 2, len) == prompt.replace("{question}?", "{question")


def test_so_does_the_chat_template_of_a_checkpoint_or_it_is_refused(tmp_path: Path) -> None:
    messages = said("One?", "1.", "Two?")
    chat = {**GOLD, "chat_template": "checkpoint"}
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": messages, "gold": "g"}) + "\n")
    spec = DatasetSpec(name="chats", path=str(file), source_column="messages", **chat)
    (example,) = load_examples(for_model(spec, Chats(TURNS)))
    assert example.prompt == "<s><user>One?</><assistant>1.</><user>Two?</><assistant>"
    assert isinstance(example.prompt, CompleteText)  # no tokenizer adds anything to it
    with pytest.raises(UserError, match="first turn otherwise once it is answered, so no question"):
        load_examples(for_model(spec, Chats(ANSWERED)))


@pytest.mark.parametrize(
    "messages",
    [
        said("One?", "1.", "Two?", "2."),
        said("One?", "", "Two?"),
        said("One?", "Two?", roles=("user", "user")),
    ],
)
def test_several_questions_without_the_one_that_is_answered_are_refused(
    tmp_path: Path, messages: list[dict[str, object]]
) -> None:
    with pytest.raises(UserError, match="line 1: messages holds several questions, so the last"):
        examples_of(tmp_path, messages, **GOLD)
    assert examples_of(tmp_path, messages)[0].prompt == "One?"  # without a reference the first
