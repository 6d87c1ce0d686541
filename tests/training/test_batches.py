"""What a model gets of an example, and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.lab.data.prompts import Example, cut_sources
from bild_lab.training.batches import (
    AnsweredExample,
    BatchOrder,
    Collator,
    SoftTargets,
    TokenizedExample,
    evaluation_batches,
    spread_evenly,
    spread_over_questions,
    tokenize,
)
from tests.tiny import END, START, tiny_tokenizer

TWO = [
    TokenizedExample(np.array([5, 6, 7]), np.array([8, 1])),
    TokenizedExample(np.array([9]), np.array([10, 11, 1])),
]
EXAMPLE = Example("train-0", "w5 w6", "w5 w6 w7", ("w8 w9 w10", "another"))


def test_an_encoder_decoder_reads_the_prompt_and_learns_the_answer() -> None:
    batch = Collator(pad=0, start=2)(TWO)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["decoder_input_ids"].tolist() == [[2, 8, 0], [2, 10, 11]]
    assert batch["labels"].tolist() == [[8, 1, -100], [10, 11, 1]]


def test_a_decoder_reads_both_and_learns_the_answer_alone() -> None:
    batch = Collator(pad=0, start=None)(TWO)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 1], [9, 10, 11, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 8, 1], [-100, 10, 11, 1, -100]]
    assert "decoder_input_ids" not in batch


def test_soft_targets_lie_beside_their_labels() -> None:
    """Wherever no label is learned, no token has a share."""
    soft = [
        SoftTargets(np.array([[8, 5], [1, 6]]), np.array([[0.75, 0.25], [0.5, 0.5]], np.float16)),
        SoftTargets(
            np.array([[10, 4], [3, 11], [1, 2]]),
            np.array([[1, 0], [0.625, 0.375], [0.875, 0.125]], np.float16),
        ),
    ]
    taught = [replace(one, soft=each) for one, each in zip(TWO, soft, strict=True)]
    for start, gaps in ((2, (0, 0)), (None, (3, 1))):
        batch, plain = Collator(pad=0, start=start)(taught), Collator(pad=0, start=start)(TWO)
        assert set(plain) == set(batch) - {"soft_ids", "soft_probs"}
        assert all(torch.equal(batch[name], plain[name]) for name in plain)
        assert batch["soft_ids"].dtype == torch.int64 and batch["soft_probs"].dtype == torch.float32
        for row, (each, gap) in enumerate(zip(soft, gaps, strict=True)):
            place = slice(gap, gap + len(each.ids))
            assert batch["soft_ids"][row, place].tolist() == each.ids.tolist()
            assert batch["soft_probs"][row, place].tolist() == each.probs.tolist()
        assert torch.equal(batch["soft_probs"].sum(-1), (batch["labels"] != -100).float())


def test_prompts_of_a_decoder_are_padded_on_the_left() -> None:
    assert Collator(pad=0, start=None).prompts(TWO)["input_ids"].tolist() == [[5, 6, 7], [0, 0, 9]]
    assert Collator(pad=0, start=None).prompts(TWO)["attention_mask"].tolist() == [
        [1, 1, 1],
        [0, 0, 1],
    ]
    assert Collator(pad=0, start=2).prompts(TWO)["input_ids"].tolist() == [[5, 6, 7], [9, 0, 0]]


def test_the_first_reference_is_the_answer_and_ends_with_the_end_token() -> None:
    for encoder_decoder, prompt in ((True, [5, 6, 7, END]), (False, [START, 5, 6, 7])):
        (tokenized,) = tokenize(
            [EXAMPLE], tiny_tokenizer(encoder_decoder), encoder_decoder, None, 20
        )
        assert tokenized.prompt.tolist() == prompt
        assert tokenized.answer.tolist() == [8, 9, 10, END]


def test_a_long_answer_is_cut_and_does_not_end() -> None:
    for longest, answer in ((2, [8, 9]), (3, [8, 9, 10]), (4, [8, 9, 10, END])):
        (tokenized,) = tokenize([EXAMPLE], tiny_tokenizer(True), True, None, longest)
        assert tokenized.answer.tolist() == answer
        assert tokenized.complete == (answer[-1] == END)


def test_a_models_answer_is_learned_as_it_was_emitted() -> None:
    """Fault: its text tokenized anew, with the tokenizer's end token in place of the emitted one."""
    answered = AnsweredExample("0", "w5", "w5", ("w8 w9",), answer_token_ids=(20, 8, 9, 30))
    for longest, answer in ((4, [20, 8, 9, 30]), (3, [20, 8, 9])):
        for examples in ([answered], cut_sources([answered], 5, len)):
            (tokenized,) = tokenize(examples, tiny_tokenizer(True), True, None, longest)
            assert tokenized.answer.tolist() == answer
            assert tokenized.complete == (longest == 4)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_prompts_are_tokenized_as_for_decoding(name: str, checkpoints: Path) -> None:
    checkpoint = Checkpoint(str(checkpoints / name))
    for longest in (None, 3):
        source = checkpoint.source(EXAMPLE.prompt, longest)
        (tokenized,) = tokenize(
            [EXAMPLE], checkpoint.tokenizer, checkpoint.encoder_decoder, longest, 20
        )
        decoded = source.prompt if source.encoder_ids is None else source.encoder_ids[0].tolist()
        assert tokenized.prompt.tolist() == list(decoded)


def test_a_start_token_that_the_prompt_has_is_not_added_again(checkpoints: Path) -> None:
    checkpoint, prompt = Checkpoint(str(checkpoints / "llama")), "<s>w5 w6 w7"
    for longest in (None, 3):
        example = replace(EXAMPLE, prompt=prompt)
        (tokenized,) = tokenize([example], checkpoint.tokenizer, False, longest, 20)
        assert tokenized.prompt.tolist() == [START, 5, 6, 7][: longest or 4]
    assert list(checkpoint.source(prompt).prompt) == [START, 5, 6, 7]


def test_every_pass_has_every_example_once() -> None:
    order = list(BatchOrder([3, 1, 4, 1, 5, 9, 2, 6], batch_size=4, steps=6, seed=0))
    assert len(order) == 24
    passes = [order[start : start + 8] for start in (0, 8, 16)]
    assert all(sorted(each) == list(range(8)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3


def test_what_does_not_fill_a_batch_waits_for_another_pass() -> None:
    order = list(BatchOrder(range(10), batch_size=4, steps=40, seed=0))
    for start in range(0, 160, 8):
        assert max(Counter(order[start : start + 8]).values()) == 1
    assert set(order) == set(range(10))


def test_fewer_examples_than_a_batch_are_repeated() -> None:
    order = list(BatchOrder([1, 1, 1], batch_size=8, steps=2, seed=0))
    assert sorted(Counter(order[:8]).values()) == [2, 3, 3]


def test_a_longer_training_begins_like_a_shorter_one() -> None:
    lengths = list(range(50))
    short, long = (BatchOrder(lengths, batch_size=4, steps=steps, seed=3) for steps in (20, 60))
    assert list(short) == list(islice(long, 80))
    assert list(short) != list(BatchOrder(lengths, batch_size=4, steps=20, seed=4))


def test_batches_hold_examples_of_like_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, size=400)
    order = np.array(list(BatchOrder(lengths, batch_size=10, steps=40, seed=0))).reshape(40, 10)
    spread = np.ptp(lengths[order], axis=1).mean()
    assert spread < 15  # of random batches about 80
    longest = lengths[order].max(axis=1)
    # in random order
    assert not any(np.all(np.diff(longest[start : start + 10]) <= 0) for start in (0, 10, 20, 30))


def test_processes_share_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 9, 1, 7, 5]
    assert list(evaluation_batches(lengths, 2)) == [[1, 3], [4, 0], [2]]
    monkeypatch.setenv("WORLD_SIZE", "2")
    shares = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        shares.append(list(evaluation_batches(lengths, 2)))
    assert shares == [[[1, 4], [2]], [[3, 0], []]]  # as many batches in each


def test_indices_are_spread_evenly_and_all_differ() -> None:
    assert spread_evenly(3, 9) == [0, 3, 6]
    assert spread_evenly(2, 8) == [0, 4]
    assert spread_evenly(7, 8) == sorted(set(spread_evenly(7, 8))) and spread_evenly(0, 8) == []


def test_no_two_passes_have_the_same_batches() -> None:
    lengths = list(range(40))
    order = np.array(list(BatchOrder(lengths, batch_size=4, steps=20, seed=0))).reshape(2, 10, 4)
    first, second = ({tuple(sorted(batch)) for batch in turn} for turn in order.tolist())
    assert len(first & second) < 5


def test_all_answers_to_a_question_are_held_out_together() -> None:
    for count, among in ((3, 9), (7, 8), (200, 1001)):  # one answer each: as rows are spread
        alone = [str(index) for index in range(among)]
        assert spread_over_questions(count, alone) == spread_evenly(count, among)
    twice = ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert spread_over_questions(4, twice) == [0, 1, 4, 5]
    assert spread_over_questions(1, twice) == [0, 1]
    assert spread_over_questions(2, ["a", "b", "b"]) == [0]  # one question is left to learn
    with pytest.raises(UserError, match="all 2 answers are to one question"):
        spread_over_questions(1, ["a", "a"])
