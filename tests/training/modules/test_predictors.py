"""Contexts in an answer, and the loss and scores of what is predicted after them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bild_lab.training.batches import IGNORED, BatchOrder
from bild_lab.training.modules.predictors import (
    AnsweredPrompt,
    EpochOrder,
    OwnLoss,
    PredictionEvaluator,
    PredictionLoss,
    Predictors,
    RandomContexts,
    choose_contexts,
    collate,
    leading_hits,
)


def test_labels_are_the_tokens_after_the_next_one() -> None:
    chosen = choose_contexts(ROW, predictors(1, 2, 3))
    # the first is the prompt alone, the last has one label left
    assert chosen.contexts.tolist() == [3, 4, 5, 6]
    assert chosen.labels.tolist() == [
        [21, 22, 23],
        [22, 23, 24],
        [23, 24, IGNORED],
        [24, IGNORED, IGNORED],
    ]


def test_predictors_of_equal_offset_have_the_same_labels() -> None:
    chosen = choose_contexts(ROW, predictors(0, 0))
    assert chosen.contexts.tolist() == [3, 4, 5, 6, 7] and chosen.labels.tolist()[-1] == [24, 24]


def test_of_a_conversation_answers_alone_have_contexts_and_labels() -> None:
    learned = np.array([False] * 3 + [True] * 2 + [False] * 2 + [True] * 2)
    row = AnsweredPrompt(np.arange(20, 29), prompt_length=3, learned=learned)
    chosen = choose_contexts(row, predictors(1))
    assert chosen.contexts.tolist() == [3, 4, 7]
    assert chosen.labels.tolist() == [[24], [IGNORED], [28]]  # the next question is no label


def test_the_shortest_answer_has_a_label_for_every_predictor() -> None:
    every = predictors(1, 2, 3)
    for length, known in ((every.shortest_answer, True), (every.shortest_answer - 1, False)):
        row = AnsweredPrompt(np.arange(3 + length), prompt_length=3)
        assert (choose_contexts(row, every).labels != IGNORED).any(0).all() == known


def test_contexts_are_chosen_again_in_every_epoch_and_for_every_answer() -> None:
    some, row = predictors(1, per_answer=3), AnsweredPrompt(np.arange(60), prompt_length=2)

    def contexts(epoch: int, index: int, seed: int = 0) -> list[int]:
        return RandomContexts([row] * 2, some, seed)[epoch, index].contexts.tolist()

    assert contexts(0, 0) == contexts(0, 0) == sorted(set(contexts(0, 0)))
    assert (
        len(
            {
                tuple(each)
                for each in (contexts(0, 0), contexts(1, 0), contexts(0, 1), contexts(0, 0, 1))
            }
        )
        == 4
    )
    assert choose_contexts(row, some).contexts.tolist() == [2, 21, 40]


def test_consecutive_contexts_start_anywhere_and_have_every_label() -> None:
    """BiTA's released code: the first is the prompt alone, the last leaves a label to every
    mask.
    """
    masks = replace(predictors(1, 2, 3, per_answer=4), consecutive=True)
    # contexts of 3 to 10 tokens have all labels
    row = AnsweredPrompt(np.arange(100, 114), prompt_length=3)
    starts = set()
    for epoch in range(40):
        chosen = RandomContexts([row], masks, seed=0)[epoch, 0]
        first = int(chosen.contexts[0])
        assert chosen.contexts.tolist() == [*range(first, first + 4)]
        assert chosen.labels.tolist() == [
            [100 + n + offset for offset in (1, 2, 3)] for n in chosen.contexts
        ]
        # the last context reads no further
        assert chosen.tokens.tolist() == [*range(100, 103 + first)]
        starts.add(first)
    assert starts == {3, 4, 5, 6, 7}
    # an answer of five has two such contexts
    few = choose_contexts(ROW, masks, np.random.default_rng(0))
    assert few.contexts.tolist() == [3, 4] and few.labels.tolist() == [[21, 22, 23], [22, 23, 24]]


def test_the_order_has_the_number_of_the_epoch() -> None:
    order = list(EpochOrder(BatchOrder([5] * 5, batch_size=2, steps=5, seed=0)))
    assert [epoch for epoch, _ in order] == [0] * 4 + [1] * 4 + [2] * 2  # 4 of 5 fill batches
    assert len({index for epoch, index in order if epoch == 0}) == 4


def test_rows_end_with_their_longest_context_and_fill_up_with_unlabelled_ones() -> None:
    every = predictors(1, 2)
    short = AnsweredPrompt(np.array([7, 8, 9]), prompt_length=1)
    batch = collate([choose_contexts(row, every) for row in (ROW, short)])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 22], [7, 0, 0, 0, 0, 0]]
    assert batch["contexts"].tolist() == [[3, 4, 5, 6], [1, 1, 1, 1]]
    assert batch["labels"][1].tolist() == [[9, IGNORED]] + [[IGNORED, IGNORED]] * 3


ROW = AnsweredPrompt(np.array([10, 11, 12, 20, 21, 22, 23, 24]), prompt_length=3)


def predictors(*offsets: int, per_answer: int | None = None) -> Predictors:
    """Predictors a, b, c with these offsets."""
    return Predictors(tuple("abc"[: len(offsets)]), offsets, (1.0,) * len(offsets), per_answer)


class Parrot(nn.Module):
    """Gives these logits for any input."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
        return self.logits[: contexts.shape[0]]


def test_an_evaluation_counts_hits_by_predictor_and_the_leading_ones() -> None:
    # of labels 21 22, 22 23, 23 24, 24 –
    chosen = torch.tensor([[[21, 22], [5, 23], [23, 0], [24, 0]]])
    logits = 10.0 * nn.functional.one_hot(chosen, 30).float()
    logits[0, 2, 1, 24] = 9.0  # the second choice
    evaluate = PredictionEvaluator([ROW], predictors(1, 2), batch_size=4)
    scores = evaluate(Parrot(logits), PredictionLoss((1.0, 0.5)))
    assert scores["top_1_a"] == pytest.approx(3 / 4) and scores["top_1_b"] == pytest.approx(2 / 3)
    assert scores["top_5_b"] == 1.0
    assert 0 < scores["seconds"] < 10
    assert scores["accepted"] == (2 + 0 + 1 + 1) / 4
    twice = PredictionEvaluator([ROW, ROW, ROW], predictors(1, 2), batch_size=1)
    again = twice(Parrot(logits), PredictionLoss((1.0, 0.5)))  # three batches
    assert {name: again[name] for name in scores if name != "seconds"} == pytest.approx(
        {name: value for name, value in scores.items() if name != "seconds"}
    )
    model = Parrot(torch.cat([logits, -logits]))
    sums = twice._sums(model, PredictionLoss((1.0, 0.5)))
    assert sums[2] == 3 * 4  # contexts of all batches
    assert sums.dtype == torch.double  # a small loss counts beside the sum of many
    right, rest = -np.log(np.e**10 / (np.e**10 + 29)), np.log(np.e**10 + 29)
    second = np.log(np.e**10 + np.e**9 + 28) - 9
    assert scores["loss"] == pytest.approx(
        (3 * right + rest + 0.5 * (2 * right + second)) / 7, rel=1e-5
    )


class Learner(Parrot):
    """Has a loss of its own for the first predictor."""

    def forward(self, input_ids: torch.Tensor, contexts: torch.Tensor) -> OwnLoss:
        return OwnLoss(super().forward(input_ids, contexts), torch.full((*contexts.shape, 1), 3.0))


def test_a_fifth_choice_is_near_and_a_sixth_is_not_whatever_the_loss() -> None:
    logits = torch.zeros(1, 4, 2, 30)
    logits[0, :, 0, :6] = torch.arange(6.0, 0.0, -1.0)
    for context, (label, score) in enumerate([(21, 2.5), (22, 1.5), (23, 2.5), (24, 6.5)]):
        logits[0, context, 0, label] = score
    evaluate = PredictionEvaluator([ROW], predictors(1, 2), batch_size=4)
    for module in (Parrot(logits), Learner(logits)):
        scores = evaluate(module, PredictionLoss((0.5, 0.5)))
        assert (scores["top_1_a"], scores["top_5_a"]) == (1 / 4, 3 / 4)
    assert scores["loss"] == pytest.approx(0.5 * 4 * 3.0 / 7)


def test_choices_of_one_predictor_do_not_pass_for_those_of_all() -> None:
    evaluate = PredictionEvaluator([ROW], predictors(1, 2), batch_size=4)
    with pytest.raises(ValueError, match="choices of 1 predictors for the labels of 2"):
        evaluate(Learner(torch.zeros(1, 4, 1, 30)), PredictionLoss((0.5, 0.5)))


def test_a_loss_is_weighted_by_predictor_and_divided_by_the_labels_of_the_whole_step() -> None:
    chosen = torch.tensor([[[0, 1], [0, 1]]])
    logits = 2.0 * nn.functional.one_hot(chosen, 3).float()
    labels = torch.tensor([[[0, 2], [1, IGNORED]]])
    right, wrong = -np.log(np.e**2 / (np.e**2 + 2)), np.log(np.e**2 + 2)
    loss = PredictionLoss((1.0, 0.5))
    assert loss.total(logits, labels).item() == pytest.approx(right + 0.5 * wrong + wrong)
    # of one row
    assert loss.total(logits[0], labels[0]).item() == loss.total(logits, labels).item()
    assert loss(logits, labels).item() == pytest.approx((right + 1.5 * wrong) / 3)
    assert loss(logits, labels, num_items_in_batch=10).item() == pytest.approx(
        (right + 1.5 * wrong) / 10
    )


def test_a_modules_own_losses_may_be_of_the_first_predictors_alone() -> None:
    labels = torch.tensor([[[5, 6, 7], [8, IGNORED, 9]]])
    own = OwnLoss(torch.zeros(1, 2, 3, 10), torch.tensor([[[1.0, 2.0], [4.0, 100.0]]]))
    assert PredictionLoss((1.0, 0.25, 7.0)).total(own, labels).item() == 1 + 0.25 * 2 + 4


def test_leading_hits_end_at_the_first_wrong_choice_of_each_context() -> None:
    hits = torch.tensor(
        [[True, True, False], [False, True, True], [True, False, True], [True, True, True]]
    )
    assert leading_hits(hits).tolist() == [2.0, 0.0, 1.0, 3.0]
