"""What chains and trees that a GPU drafts by itself have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from bild_lab.engine.models.native.gpu.inputs import MAX_ROWS
from bild_lab.engine.models.native.gpu.plan import ForwardPlan
from bild_lab.engine.models.native.packed_pass import SequenceSlice

# forwards of a program; a draft of another number has some more, which do nothing
STEP_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
MAX_STEPS = STEP_COUNTS[-1]
MAX_END_TOKENS = 16

Drafted = TypeVar("Drafted")


def steps_for(count: int) -> int:
    """The forwards of a program that has so many at least."""
    return next(steps for steps in STEP_COUNTS if steps >= count)


def fill_first(
    plan: ForwardPlan, tokens: Sequence[Sequence[int]], texts: Sequence[SequenceSlice]
) -> tuple[list[SequenceSlice], int]:
    """Write the tables of a program's first forward, which scores the last row of each text.

    Returns the texts' rows, and the number of tiles of attention.
    """
    texts = [text._replace(scored=1) for text in texts]
    fed = [token for text_tokens in tokens for token in text_tokens]
    return texts, plan.inputs.fill(texts, fed)


def write_end_tokens(table: np.ndarray, end_tokens: Sequence[Collection[int]]) -> None:
    """Write the end tokens of each text into its line of a table, padded with −1.

    table: [MAX_ROWS, MAX_END_TOKENS].
    """
    table[:] = -1
    for line, tokens in zip(table, end_tokens, strict=False):
        line[: len(tokens)] = list(tokens)


def parts_of(counts: Sequence[int]) -> Iterator[slice]:
    """Texts of so many rows each, in as few forwards as have room for them."""
    start = rows = 0
    for index, count in enumerate(counts):
        if rows + count > MAX_ROWS:
            yield slice(start, index)
            start, rows = index, 0
        rows += count
    yield slice(start, len(counts))


def draft_by_kind(
    kinds: Sequence[Hashable | None],
    counts: Sequence[int],
    draft: Callable[..., Sequence[Drafted]],
    *columns: Sequence[Any],
) -> list[Drafted | None]:
    """What each text drafts, in programs of texts of one kind.

    kinds: of each text; None has no program, so None is what it drafts. That is the text's own
        matter: whoever stands beside it has a program all the same.
    counts: how many rows each text has in a forward.
    draft: drafts for some texts by one program, given each column for them.
    columns: what it takes of each text.
    """
    results: list[Drafted | None] = [None] * len(kinds)
    for kind in dict.fromkeys(kinds):
        if kind is None:
            continue
        same_kind = [place for place, text_kind in enumerate(kinds) if text_kind == kind]
        for part in parts_of([counts[place] for place in same_kind]):
            places = same_kind[part]
            inputs = [[column[place] for place in places] for column in columns]
            for place, drafted in zip(places, draft(*inputs), strict=True):
                results[place] = drafted
    return results
