"""Contexts in an answer: where they are, what follows them, and their order in a training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bild_lab.training.batches import IGNORED, BatchOrder
from bild_lab.training.frozen.contexts import AnsweredPrompt, ContextChooser, EpochOrder, RandomContexts, collate

ROW = AnsweredPrompt(np.array([10, 11, 12, 20, 21, 22, 23, 24]), prompt_length=3)


def test_labels_are_the_tokens_after_the_next_one() -> None:
    chosen = ContextChooser((1, 2, 3), per_answer=None, seed=0).at_random(ROW, 0, 0)
    assert chosen.contexts.tolist() == [3, 4, 5, 6]  # the first is the prompt alone, the last has one label left
    assert chosen.labels.tolist() == [[21, 22, 23], [22, 23, 24], [23, 24, IGNORED], [24, IGNORED, IGNORED]]


def test_predictors_of_equal_offset_have_the_same_labels() -> None:
    chosen = ContextChooser((0, 0), per_answer=None, seed=0).at_random(ROW, 0, 0)
    assert chosen.contexts.tolist() == [3, 4, 5, 6, 7] and chosen.labels.tolist()[-1] == [24, 24]


def test_contexts_are_chosen_again_in_every_epoch_and_for_every_answer() -> None:
    chooser, row = ContextChooser((1,), per_answer=3, seed=0), AnsweredPrompt(np.arange(60), prompt_length=2)

    def contexts(epoch: int, index: int, chooser: ContextChooser = chooser) -> list[int]:
        return chooser.at_random(row, epoch, index).contexts.tolist()

    assert contexts(0, 0) == contexts(0, 0) == sorted(set(contexts(0, 0)))
    others = [contexts(1, 0), contexts(0, 1), contexts(0, 0, replace(chooser, seed=1))]
    assert len({tuple(each) for each in [contexts(0, 0), *others]}) == 4
    assert chooser.evenly(row).contexts.tolist() == [2, 21, 40]


def test_the_order_has_the_number_of_the_epoch() -> None:
    order = list(EpochOrder(BatchOrder([5] * 5, batch_size=2, steps=5, seed=0)))
    assert [epoch for epoch, _ in order] == [0] * 4 + [1] * 4 + [2] * 2  # 4 of 5 fill batches
    assert len({index for epoch, index in order if epoch == 0}) == 4
    chooser = ContextChooser((1,), per_answer=2, seed=0)
    chosen = RandomContexts([ROW] * 5, chooser)[order[4]]
    assert chosen.contexts.tolist() == chooser.at_random(ROW, *order[4]).contexts.tolist()


def test_rows_end_with_their_longest_context_and_fill_up_with_unlabelled_ones() -> None:
    chooser = ContextChooser((1, 2), per_answer=None, seed=0)
    short = AnsweredPrompt(np.array([7, 8, 9]), prompt_length=1)
    batch = collate([chooser.at_random(row, 0, 0) for row in (ROW, short)])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 22], [7, 0, 0, 0, 0, 0]]
    assert batch["contexts"].tolist() == [[3, 4, 5, 6], [1, 1, 1, 1]]
    assert batch["labels"][1].tolist() == [[9, IGNORED]] + [[IGNORED, IGNORED]] * 3
