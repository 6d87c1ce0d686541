"""Drafting whole steps: where they end, who writes them, and the whole cascade against one without a cache."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import StepScore
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import StepDrafter
from bild_lab.engine.drafters.steps import LINE, SENTENCE, step_ends
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from tests.engine.lossless.toy import TableModel
from tests.stubs import StubModel

PIECES = ["a", "b", ".", "c", "\n", "d!", " e", "f. ", "<end>"]
POINT, NEW_LINE, END = 2, 4, 8


class Pieces:
    """A tokenizer of a few pieces."""

    all_special_ids = (END,)
    pieces = tuple(PIECES)

    def get_vocab(self) -> dict[str, int]:
        return {piece: place for place, piece in enumerate(self.pieces)}

    def batch_decode(self, texts: list[list[int]]) -> list[str]:
        return ["".join(self.pieces[token] for token in text) for text in texts]


TARGET = SimpleNamespace(checkpoint=SimpleNamespace(encoder_decoder=False, tokenizer=Pieces()))


def test_a_sentence_ends_with_its_mark_or_its_line() -> None:
    assert step_ends(Pieces(), SENTENCE) == {2, 4, 5, 7}
    assert step_ends(Pieces(), LINE) == {4}

    class Others(Pieces):
        pieces = ("a\nb", ".X", "c.\t", "XX. ")

    assert step_ends(Others(), SENTENCE) == {0, 3}


def logits_of(seed: int) -> Tensor:
    table = torch.randn(40, len(PIECES), generator=torch.Generator().manual_seed(seed)).double()
    table[:, END] -= 2  # texts of some length
    table[:, POINT] += 0.7
    return 2 * table


def model(seed: int) -> StubModel:
    """The next token depends on the whole text."""
    table = logits_of(seed)
    return StubModel(lambda tokens: table[sum((at + 1) * (token + 1) for at, token in enumerate(tokens)) % 40])


def cascade(
    target: StubModel, draft: StubModel, threshold: float, window: int, ends: frozenset[int], most: int
) -> tuple:
    """The method in words: [prompt and text], and who wrote each step."""

    def best(one: StubModel, text: list[int]) -> int:
        return int(one.next_logits(text).argmax())

    text, authors = [0], ""

    def full() -> bool:
        return len(text) > most or text[-1] == END

    while not full():
        step: list[int] = []
        while len(step) < window and len(text) + len(step) <= most and not (step and step[-1] in ends | {END}):
            step.append(best(draft, [*text, *step]))
        scores = [target.next_logits([*text, *step[:at]]).log_softmax(-1)[token] for at, token in enumerate(step)]
        if float(sum(scores)) / len(step) >= threshold:
            text += step
            authors += "d"
            if not full():
                text.append(best(target, text))
            continue
        authors += "t"
        written = 0
        while not full() and (not written or (written < window and text[-1] not in ends)):
            text.append(best(target, text))
            written += 1
    return text, authors


@pytest.mark.parametrize(("step", "marks"), [("sentence", SENTENCE), ("line", LINE)])
def test_the_whole_cascade_is_that_of_its_words(step: str, marks: tuple[str, ...]) -> None:
    ends, seen, ended = step_ends(Pieces(), marks), "", set()
    for seed in range(12):
        for threshold in (-1.6, -2.6):
            window = 2 + seed % 5
            target, draft = model(seed), model(seed + 50)
            target.checkpoint = TARGET.checkpoint
            expected, authors = cascade(target, draft, threshold, window, ends, 30)
            drafter = StepDrafter(target, draft, window, step)
            request = Request(Source((0,)), Limits(1, 30, frozenset([END])))
            trace = Trace()
            text = DraftThenVerify(target, drafter, StepScore(threshold)).decode(request, trace)
            assert text == expected, (seed, threshold, authors)
            steps = [one for one in trace.rounds if one.drafted]
            assert "".join("d" if one.accepted else "t" for one in steps) == authors
            assert all(one.accepted in (0, len(one.drafted)) for one in steps)
            seen += authors
            ended |= {one.drafted[-1] in ends for one in steps}
    assert seen.count("d") > 20 and seen.count("t") > 20 and ended == {True, False}


def test_every_token_of_a_step_is_looked_at_for_its_end() -> None:
    """A fixed window is drafted without looking on an accelerator; a step is not."""
    draft = model(1)
    draft.device = torch.device("meta")
    assert StepDrafter(TARGET, draft, 3, "line")._inner.stop_on_eos


def test_steps_are_sampled_from_the_drafter_and_rewritten_by_the_target() -> None:
    p = torch.full((9, 9), 0.02, dtype=torch.float64).fill_diagonal_(0.84)
    q = torch.full((9, 9), 1 / 9, dtype=torch.float64)
    target = TableModel(p)
    target.checkpoint = TARGET.checkpoint
    drafter = StepDrafter(target, TableModel(q), 3, "sentence")
    request = Request(Source((0,)), Limits(1, 40), Sampling(temperature=1.0), torch.Generator().manual_seed(0))
    texts = {}
    for threshold in (-99.0, 0.0):
        texts[threshold] = DraftThenVerify(target, drafter, StepScore(threshold)).decode(request, Trace())
    repeats = {key: sum(a == b for a, b in pairwise(text)) for key, text in texts.items()}
    assert repeats[0.0] > 25 > 20 > repeats[-99.0]
