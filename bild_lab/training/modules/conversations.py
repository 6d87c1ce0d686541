"""Conversations of any number of turns as rows to learn from: all is read, only answers are
learned.

So FastChat trains Vicuna (`fastchat/train/train.py`, `preprocess`): every token that is not of an
answer, or of the end token after one, has no label. PPD trains its heads on the same conversations
(Appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.pieces import once_started
from bild_lab.errors import UserError
from bild_lab.lab.data.dataset_spec import Template
from bild_lab.lab.data.prompts import Example
from bild_lab.training.answers import END, LENGTH, TargetAnswer
from bild_lab.training.modules.predictors import AnsweredPrompt


@dataclass(frozen=True)
class Conversation(TargetAnswer):
    """A whole conversation. prompt: all before the first answer. answer_token_ids: all after that.

    learned: which of answer_token_ids are answers; the others are later questions.
    """

    prompt_token_ids: list[int]
    learned: list[bool]

    def row(self, longest: int) -> AnsweredPrompt:
        """The conversation as tokens, of which the first `longest` are kept."""
        tokens = np.array([*self.prompt_token_ids, *self.answer_token_ids], np.int32)
        learned = np.array([*[False] * len(self.prompt_token_ids), *self.learned])
        return AnsweredPrompt(tokens, len(self.prompt_token_ids), learned).cut(longest)


def tokenize_conversations(
    base: Checkpoint, template: Template, examples: Sequence[Example], longest: int
) -> Iterator[Conversation]:
    """The conversations of these turns, which come in order, each with its answer as its reference.

    longest: tokens of a conversation, prompts included (PPD Table 2: 2,048). Raises UserError for
    an encoder–decoder, and for a tokenizer that does not say where its tokens come from.
    """
    if base.encoder_decoder:
        raise UserError(
            "a conversation is one row of questions and answers, which a decoder reads, but"
            f" {base.path} is an encoder–decoder; set dataset.turns=1"
        )
    if not base.tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {base.path} does not say which text a token comes from, so answers"
            " cannot be told from questions; give it a tokenizer.json, or set dataset.turns=1"
        )
    turns: list[Example] = []
    for example in examples:
        if turns and example.continues is None:
            yield _conversation(base, template, turns, longest)
            turns = []
        turns.append(example)
    yield _conversation(base, template, turns, longest)


def _conversation(
    base: Checkpoint, template: Template, turns: Sequence[Example], longest: int
) -> Conversation:
    between, text, answers = template.around_answer[0], "", []
    for turn in turns:
        text += turn.prompt + between
        answers.append((len(text), len(text) + len(turn.references[0])))
        text += turn.references[0]
    encoded = base.tokenizer(
        text,
        add_special_tokens=not template.complete,
        return_offsets_mapping=True,
        verbose=False,
    )
    tokens = once_started(base.tokenizer, text, encoded["input_ids"])
    offsets = encoded["offset_mapping"][-len(tokens) :]
    ids = np.array([*tokens, base.tokenizer.eos_token_id])
    starts, stops = np.array([*offsets, (len(text), len(text))]).T
    learned = np.zeros(len(ids), bool)
    for start, stop in answers:
        learned |= (starts < stop) & (stops > start)
        # the template's, after an answer and white space
        next_text = len(text) - len(text[stop:].lstrip())
        learned |= (starts == next_text) & (ids == base.tokenizer.eos_token_id)
    length, ids, learned = len(ids), ids[:longest], learned[:longest]
    answer_start = int(learned.argmax()) if learned.any() else len(ids)
    return Conversation(
        id=turns[0].id,
        prompt=turns[0].prompt,
        answer=turns[-1].references[0],
        answer_token_ids=ids[answer_start:].tolist(),
        finish_reason=END if length == len(ids) else LENGTH,
        prompt_token_ids=ids[:answer_start].tolist(),
        learned=learned[answer_start:].tolist(),
    )
