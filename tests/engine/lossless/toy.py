"""Toy models with a table for a mind, the exact law of the texts that a method samples with them,
and samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import chisquare
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Draft
from bild_lab.engine.protocols import Acceptance, Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import (
    ALL_LOGITS,
    DraftSpec,
    OutputSpec,
    Rows,
    Scores,
    Session,
    as_rows,
)
from bild_lab.engine.trace import Forward, Trace

FIRST = 0  # the token that every text follows
# of a drafter's token: with what probability each is drafted and accepted, and what a rejection
# draws from
Judge = Callable[[list[float], list[float]], tuple[list[float], list[float]]]


@dataclass
class TableModel:
    """The next token hangs on the last one alone, so that a session keeps nothing but its
    length.
    """

    probs: Tensor  # [vocab vocab], a row for each last token
    device: torch.device = torch.device("cpu")
    engine: str = "stub"

    def __post_init__(self) -> None:
        self.logits = self.probs.log()

    def start(self, source: Source, room: int, *_: object) -> TableSession:
        return TableSession(self.logits, len(source.prompt) - 1)


class TableSession:
    def __init__(self, logits: Tensor, length: int) -> None:
        self._logits, self.length = logits, length
        self.forwards: list[Forward] = []
        self._fed = 0

    def extend(
        self, rows: Rows | Sequence[int] | Tensor, output_spec: OutputSpec = ALL_LOGITS
    ) -> Scores:
        rows = as_rows(rows)
        tokens = torch.as_tensor(rows.tokens)
        self.length += len(tokens)
        self._fed = len(tokens) if rows.tree is None else len(rows.tree)
        return Scores(self._logits[tokens[-(output_spec.logits or len(tokens)) :]])

    def draft(self, rows: Sequence[int], spec: DraftSpec) -> None:
        """There is no program."""

    def keep(self, path: Sequence[int]) -> None:
        self.length += len(path) - self._fed

    def rollback(self, length: int) -> None:
        self.length = min(self.length, length)


class TreeDrafter(Drafter):
    """Two siblings, drawn without replacement, and two behind the first of them where there is
    room.
    """

    drafts_trees = True

    def __init__(self, probs: Tensor) -> None:
        self._probs = probs

    def begin(self, request: Request, target: Session) -> None:
        self._request = request

    def propose(self, tokens: list[int]) -> Draft:
        drafted, rows = self._siblings(tokens[-1])
        if self._request.limits.room(tokens) == 1:
            return Draft(drafted, torch.tensor([ROOT, ROOT]), rows)
        below, rows_below = self._siblings(int(drafted[0]))
        parents = torch.tensor([ROOT, ROOT, 0, 0])
        return Draft(torch.cat([drafted, below]), parents, torch.cat([rows, rows_below]))

    def _siblings(self, last: int) -> tuple[Tensor, Tensor]:
        first = self._probs[last]
        drafted = torch.multinomial(first, 2, generator=self._request.generator)
        second = first.clone()
        second[drafted[0]] = 0.0
        return drafted, torch.stack([first, second / second.sum()])


def sampled_texts(
    target: Tensor, drafter: Drafter, rule: Acceptance, length: int, count: int, seed: int
) -> list[tuple[int, ...]]:
    """Texts of this length by the whole loop, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    request = Request(Source((FIRST,)), Limits(1, length), Sampling(temperature=1.0), generator)
    model = TableModel(target)
    return [
        tuple(DraftThenVerify(model, drafter, rule).decode(request, Trace())[1:])
        for _ in range(count)
    ]


def text_law(judge: Judge, target: Tensor, draft: Tensor, window: int, length: int) -> Tensor:
    """The probability of every text of drafted chains, one axis a token: all that can happen is
    walked through.
    """
    p, q = target.tolist(), draft.tolist()
    law = torch.zeros([len(p)] * length, dtype=torch.float64)

    def drafted(text: tuple[int, ...], left: int, chance: float) -> None:
        if len(text) == length:
            law[text] += chance
            return
        last = text[-1] if text else FIRST
        if left == 0:  # the whole draft stands
            chosen(text, p[last], chance)
            return
        accepted, rest = judge(p[last], q[last])
        for token, share in enumerate(accepted):
            drafted((*text, token), left - 1, chance * share)
        chosen(text, rest, chance * (1 - sum(accepted)))

    def chosen(text: tuple[int, ...], probs: list[float], chance: float) -> None:
        for token, share in enumerate(probs):
            drafted((*text, token), min(window, length - len(text) - 1), chance * share)

    drafted((), min(window, length), 1.0)
    return law


def own_law(target: Tensor, length: int) -> Tensor:
    """The law of the target's own texts."""
    law = target[FIRST]
    for _ in range(length - 1):
        law = law[..., None] * target
    return law


def p_value(texts: Sequence[tuple[int, ...]], law: Tensor) -> float:
    """Of a chi-square test of the texts against the law; cells of which fewer than 5 texts are
    expected are one.
    """
    vocabulary, length = law.shape[0], law.dim()
    place = vocabulary ** torch.arange(length - 1, -1, -1)
    seen = torch.bincount(torch.tensor(texts) @ place, minlength=law.numel()).double()
    expected = len(texts) * law.flatten()
    order = expected.argsort()
    seen, expected = seen[order], expected[order]
    pooled = max(1, int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    cells = [
        torch.cat([each[:pooled].sum()[None], each[pooled:]]).numpy() for each in (seen, expected)
    ]
    return float(chisquare(*cells).pvalue)
