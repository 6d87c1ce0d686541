"""`python scripts/train_module.py module=ngram` as a user runs it, and `python run.py` with its
table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

import run
from bild_lab.engine.methods.lookup.ngram import read_table
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.lab.data.prompts import Example
from bild_lab.training.modules.ngrams import reference_tokens
from scripts import train_module
from tests.training.printed import printed_point

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def base(checkpoints: Path, data: Path) -> list[str]:
    return [
        f"pair.target={checkpoints / 't5'}",
        "dataset=multi30k",
        f"dataset.path={data}",
        "dataset.split=test",
    ]


@pytest.mark.slow
def test_a_table_that_was_built_drafts_losslessly(
    command: Command, base: list[str], checkpoints: Path, data: Path
) -> None:
    code, printed = command(train_module, "module=ngram", *base, "name=counted")
    assert code == 0, printed
    rows = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "t5")
    tokens = sum(len(tokenizer(row["en"])["input_ids"]) for row in rows)
    assert f"outputs/counted/table.safetensors: multi30k test, 6 texts, {tokens} tokens" in printed
    point = printed_point(printed)
    assert point.policy == "ngram" and point.knobs["table"] == "outputs/counted/table.safetensors"
    assert point.setting["target"] == str(checkpoints / "t5") and len(point.examples) == 6
    decode = ["policy=ngram", "policy.table=outputs/counted/table.safetensors", "name=tested"]
    quick = ["decoding.max_new_tokens=12", "measure.repeats=1", "measure.warmup=0"]
    code, printed = command(run, *base, *decode, *quick)
    assert code == 0, printed
    frame = pd.read_csv("outputs/tested/sweep.csv")
    assert frame["policy"].tolist() == ["ngram"]
    assert frame["agreement_with_target"].tolist() == [1.0]


@pytest.mark.slow
def test_a_table_that_is_counted_again_is_measured_again(command: Command, base: list[str]) -> None:
    decode = [
        "policy=ngram",
        "policy.table=outputs/counted/table.safetensors",
        "policy.order=1",
        "name=tested",
    ]
    quick = ["decoding.max_new_tokens=4", "measure.repeats=1", "measure.warmup=0"]
    for order in (1, 2):
        assert (
            command(train_module, "module=ngram", *base, "name=counted", f"module.order={order}")[0]
            == 0
        )
        assert "finished before" not in command(run, *base, *decode, *quick)[1]
    assert "finished before" in command(run, *base, *decode, *quick)[1]


@pytest.mark.parametrize("writes_it", [True, False])
def test_texts_from_nothing_are_counted_after_the_begin_of_text_token(
    writes_it: bool, checkpoints: Path
) -> None:
    """Whether the tokenizer writes that token itself or not."""
    checkpoint, example = (
        Checkpoint(str(checkpoints / "llama")),
        Example("0", "w5 w9", "", ("w5 w9",)),
    )
    tokenizer = checkpoint.tokenizer
    start, *ids = tokenizer("w5 w9")["input_ids"]
    assert start == tokenizer.bos_token_id
    if not writes_it:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="$A", pair="$A $B"
        )
        assert tokenizer("")["input_ids"] == []
    assert list(reference_tokens(checkpoint, [example])) == [[start, *ids, tokenizer.eos_token_id]]


def test_order_1_leaves_bigrams_out(command: Command, base: list[str]) -> None:
    code, printed = command(train_module, "module=ngram", *base, "name=counted", "module.order=1")
    assert code == 0, printed
    assert "policy=ngram policy.order=1" in printed and "bigrams" not in printed
    assert read_table(Path("outputs/counted/table.safetensors")).order == 1


BAD_INPUT = {
    "order out of range": (
        ["module.order=3"],
        "the order of n-grams must be a whole number >= 1 and <= 2, got 3",
    ),
    "no references": (["dataset=mt_bench"], "dataset mt_bench has no references to count"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_line_and_leaves_nothing(
    case: str, command: Command, base: list[str]
) -> None:
    words, message = BAD_INPUT[case]
    code, printed = command(train_module, "module=ngram", *base, *words)
    assert code == 2, printed
    (line,) = printed.strip().splitlines()
    assert message in line
    assert list(Path().iterdir()) == []
