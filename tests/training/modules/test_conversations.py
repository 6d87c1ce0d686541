"""ShareGPT's conversations: how rows become turns, which tokens are learned, and a training of
heads on a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import config_dir
from bild_lab.lab.data.dataset_spec import DatasetSpec, Template
from bild_lab.lab.data.examples import load_examples
from bild_lab.training.batches import IGNORED
from bild_lab.training.modules.conversations import tokenize_conversations
from bild_lab.training.modules.layer_heads import LayerHeadsSpec
from bild_lab.training.modules.predictors import choose_contexts
from bild_lab.training.modules.states import OneRowCheckpoint
from scripts import train_lm_heads
from tests.loopback_hub import loopback_hub, printed_in_a_fresh_process
from tests.tiny import END, START

Command = Callable[..., tuple[int, str]]
# as Vicuna's, </s> after each answer
CHAT = Template("w20 {question} w21", " {answer}</s>w20 {question} w21")
TALK = [("human", "w4 w5"), ("gpt", "w6 w7"), ("human", "w8"), ("gpt", "w9 w10 w11")]
SPEC = DatasetSpec(**yaml.safe_load((config_dir() / "dataset/sharegpt.yaml").read_text()))

LOAD = """
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.config.schemas import typed
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
for words in ([], ["dataset.hub_data_dir=ShareGPT_V4.json"]):
    cfg = compose_config(["dataset=sharegpt", *words], "train_lm_heads")
    try:
        print([one.source for one in load_examples(typed(DatasetSpec, cfg.dataset, "dataset"))])
    except UserError as error:
        print(" ".join(str(error).split()))
"""


def row(name: str, messages: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        "id": name,
        "conversations": [{"from": speaker, "value": text} for speaker, text in messages],
    }


def file(folder: Path, *talks: list[tuple[str, Any]]) -> str:
    path = folder / "ShareGPT_V3_unfiltered_cleaned_split.json"
    path.write_text(json.dumps([row(f"talk_{place}", talk) for place, talk in enumerate(talks)]))
    return str(path)


def spec(path: str, **changes: Any) -> DatasetSpec:
    templates = {"chat_template": CHAT.first_turn, "next_turn_template": CHAT.next_turn}
    return replace(SPEC, path=path, **templates, **changes)


def test_each_turn_continues_the_answers_of_its_conversation(tmp_path: Path) -> None:
    first, second = load_examples(spec(file(tmp_path, TALK)))
    assert (first.prompt, first.references) == ("w20 w4 w5 w21", ("w6 w7",))
    assert second.prompt == "w20 w4 w5 w21 w6 w7</s>w20 w8 w21"
    assert (second.id, second.references, second.turn) == ("train-0/2", ("w9 w10 w11",), 2)
    (alone,) = load_examples(spec(file(tmp_path, TALK), turns=1))
    assert alone == first


@pytest.mark.parametrize(
    ("talk", "pairs"),
    [
        ([("gpt", "w20"), *TALK], 2),  # begins with the rest of an answer
        ([*TALK, ("human", "w12")], 2),  # the last question has no answer
        ([*TALK, ("system", "w12"), ("human", "w13"), ("gpt", "w14")], 2),
        ([*TALK[:2], ("gpt", "w12"), *TALK[2:]], 1),  # two answers in turn
        ([*TALK[:3], ("gpt", " ")], 1),
        ([("user", "w4"), ("chatgpt", "w6")], 1),
    ],
)
def test_a_conversation_ends_where_its_speakers_do_not_take_turns(
    talk: list[tuple[str, str]], pairs: int, tmp_path: Path
) -> None:
    assert len(load_examples(spec(file(tmp_path, talk)))) == pairs


def test_conversations_without_an_answered_question_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = file(tmp_path, [], TALK, [("human", "w4")], [("gpt", "w4")])
    assert [one.id for one in load_examples(spec(path))] == ["train-1", "train-1/2"]
    assert "sharegpt: 3 conversations without an answered question are left out" in caplog.text


def test_only_answers_and_the_end_tokens_after_them_are_learned(
    tmp_path: Path, checkpoints: Path
) -> None:
    """The mask against the roles of the tokens, written out, as FastChat's `preprocess` masks
    them.
    """
    turns = load_examples(spec(file(tmp_path, TALK), history=None), unanswered=True)
    base = OneRowCheckpoint(str(checkpoints / "llama"))
    (found,) = tokenize_conversations(base, CHAT, turns, longest=100)
    line = found.row(100)
    assert line.tokens.tolist() == [START, 20, 4, 5, 21, 6, 7, END, 20, 8, 21, 9, 10, 11, END]
    assert (
        line.tokens[line.learned].tolist() == [6, 7, END, 9, 10, 11, END]
        and line.prompt_length == 5
    )
    chosen = choose_contexts(
        line, LayerHeadsSpec(layers=[1, 2], rank=None, labels="data").predictors
    )
    assert chosen.contexts.tolist() == [5, 6, 7, 11, 12, 13, 14]
    assert chosen.labels.tolist() == [[token, token] for token in (6, 7, END, 9, 10, 11, END)]
    assert IGNORED not in chosen.labels
    (cut,) = tokenize_conversations(base, CHAT, turns, longest=9)
    assert (
        cut.row(100).tokens.tolist() == [START, 20, 4, 5, 21, 6, 7, END, 20]
        and cut.finish_reason == "length"
    )
    complete = replace(CHAT, complete=True)  # without a start token
    (found,) = tokenize_conversations(base, complete, turns, longest=100)
    assert found.row(100).tokens.tolist() == line.tokens.tolist()[1:]
    (unlearned,) = tokenize_conversations(base, CHAT, turns, longest=4)
    assert unlearned.row(100).answer_length == 0  # a training leaves it out
    with pytest.raises(UserError, match=r"is an encoder–decoder; set dataset.turns=1"):
        list(tokenize_conversations(Checkpoint(str(checkpoints / "t5")), CHAT, turns, 9))


def test_an_end_token_after_white_space_is_learned_and_one_start_token_read(
    tmp_path: Path, checkpoints: Path
) -> None:
    """As Llama's template writes turns, here with the start token in the prompt."""
    base = OneRowCheckpoint(str(checkpoints / "llama"))
    templates = {"next_turn_template": " {answer} </s><s>w20 {question} w21"}
    begun = {"chat_template": "{question}", "prompt_template": "<s>w20 {source} w21"}
    of = replace(SPEC, path=file(tmp_path, TALK), history=None, **templates, **begun)
    (found,) = tokenize_conversations(
        base, of.templates[0], load_examples(of, unanswered=True), longest=100
    )
    line = found.row(100)
    assert line.tokens.tolist() == [
        *[START, 20, 4, 5, 21, 6, 7, END],
        *[START, 20, 8, 21, 9, 10, 11, END],
    ]
    assert line.tokens[line.learned].tolist() == [6, 7, END, 9, 10, 11, END]


def test_heads_train_on_a_file_of_conversations(
    command: Command, checkpoints: Path, tmp_path: Path
) -> None:
    path = file(tmp_path, *[TALK] * 8)
    line = [
        "name=heads",
        f"model.path={checkpoints / 'llama'}",
        "dataset=sharegpt",
        f"dataset.path={path}",
    ]
    line += [
        "layers=[1]",
        "held_out=1",
        "train.max_steps=2",
        "train.batch_size=4",
        "train.accumulate=1",
    ]
    line += [
        "train.evaluate_every=null",
        "train.device=cpu",
        f"dataset.chat_template={CHAT.first_turn}",
    ]
    code, printed = command(train_lm_heads, *line, f"dataset.next_turn_template={CHAT.next_turn}")
    assert code == 0, printed
    metrics = json.loads(Path("outputs/heads/metrics.json").read_text())
    # conversations, not turns
    assert (metrics["train_examples"], metrics["dropped_examples"]) == (7, 0)
    assert metrics["data"] == "references of sharegpt (train)"


@pytest.mark.slow
def test_the_hub_gives_the_one_file_that_is_named(tmp_path: Path) -> None:
    named = json.dumps([row("one", TALK)]).encode()
    files = {
        SPEC.hub_data_dir: named,
        "HTML_cleaned_raw_dataset/sg_90k_part1.json": b"broken",
        "README.md": b"",
    }
    with loopback_hub({SPEC.hub_id: files}) as endpoint:
        found, missing = printed_in_a_fresh_process(LOAD, endpoint, tmp_path)
    assert found == "['w4 w5', 'w8']" and "no folder 'ShareGPT_V4.json'" in missing
