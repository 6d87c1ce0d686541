"""Sessions over other sessions, and one whose logits pass through logits processors, each with its
row's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessorList

from bild_lab.engine.draft import ROOT, Tree
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import (
    ALL_LOGITS,
    OutputSpec,
    RowsOrTokens,
    Scores,
    Session,
    StagedSession,
    as_rows,
    on_device,
)
from bild_lab.engine.trace import Forward


def processed(session: Session, source: Source) -> Session:
    """The session itself, or one whose logits pass through the source's processors."""
    if source.processors is None:
        return session
    # some remember the width of the first scores that they get, and models of a pair differ in it
    own_processors = LogitsProcessorList(map(copy, source.processors))
    return ProcessedSession(session, own_processors, source.prompt)


class SessionOver(StagedSession):
    """A session over another one, to which it passes on what a subclass does not change.

    It has no programs.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def length(self) -> int:
        return self._session.length

    @property
    def forwards(self) -> list[Forward]:
        return self._session.forwards

    def keep(self, path: Sequence[int]) -> None:
        self._session.keep(path)

    def rollback(self, length: int) -> None:
        self._session.rollback(length)

    def prefill(self) -> None:
        self._session.prefill()

    def commit_row(self, row: int, layers: Sequence[int]) -> None:
        self._session.commit_row(row, layers)


class ProcessedSession(SessionOver):
    """Its logits pass through processors. A row's text is all tokens before it, its branch of the
    tree, and its own.

    Probe rows (BiTA's masks) have no text and keep their logits. A program that drafts several
    tokens in one go does not know the processors. The tokens of every forward are read by the host.
    """

    def __init__(
        self, session: Session, processors: LogitsProcessorList, prompt: Sequence[int]
    ) -> None:
        super().__init__(session)
        self._processors = processors
        self._text = list(prompt[:-1])  # the token at each position
        # the tokens of the last extend, or of the whole tree, and the position of the first
        self._fed: list[int] = []
        self._base = 0

    @torch.inference_mode()
    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        rows = as_rows(rows)
        start = self._session.length if rows.position is None else rows.position
        scores = self._session.extend(rows, output_spec)
        # PPD's candidates, beside the text in a thread
        if rows.position is not None and scores.logits is None:
            return scores
        self._base = start - rows.earlier
        self._fed = [*self._fed[: rows.earlier], *rows.token_list]
        self._text[self._base :] = self._fed
        return scores.with_logits(lambda logits: self._processed(logits, rows.tree))

    def keep(self, path: Sequence[int]) -> None:
        self._text[self._base :] = [self._fed[row] for row in path]
        super().keep(path)

    def _processed(
        self, logits: Float[Tensor, "n vocab"], tree: Tree | None
    ) -> Float[Tensor, "n vocab"]:
        """The logits of the last n rows.

        The first may be the prompt's, which run with the others.
        """
        count, width = logits.shape
        parents = range(-1, len(self._fed) - 1) if tree is None else tree.parents.tolist()
        raw_logits = precise(logits)
        changed = raw_logits.clone()
        for place, row in enumerate(range(len(self._fed) - count, len(self._fed))):
            if row >= 0 and self._fed[row] >= width:  # a probe
                continue
            if row < 0:  # a row of the prompt, counted from its end
                text = self._text[: self._base + row + 1]
            else:
                text = [*self._text[: self._base], *branch(row, parents, self._fed)]
            ids = on_device(text, logits.device)[None]
            changed[place] = self._processors(ids, raw_logits[place : place + 1].clone())[0]
        return changed


def branch(row: int, parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The tokens from the root of a tree to this row."""
    path = []
    while row > ROOT:
        path.append(tokens[row])
        row = parents[row]
    return path[::-1]
