"""Lookahead decoding: n-grams from Jacobi iterations, made and verified in the same forward (Fu et
al., 2024).
"""

from __future__ import annotations

import random

from bild_lab.engine.draft import ROOT, Draft, Tree, Verdict
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import most_likely, precise
from bild_lab.engine.session import Model, Scores, Session, on_device
from bild_lab.errors import require_whole

NGram = tuple[int, ...]


class LookaheadDrafter(Drafter):
    """The lookahead branch and the verification branch of Fu et al., 2024, §3.1 and §3.2 (Figure
    2b).

    A window of `window` columns slides over the positions ahead. Its `ngram` − 1 levels are what
    the last Jacobi iterations guessed: level i of column j is i + j positions after the last
    committed token, which is column 0 of level 0. Level 0 is a chain; a token of a later level
    follows the token above it in its column. The rows of the last level give the newest guesses.
    Each column, with the newest guess after it, is an n-gram for the pool, and the oldest level is
    dropped. Until there are all levels, the window starts from tokens drawn from the prompt.

    The draft is a tree of at most `guesses` n-grams of the pool that begin with the last committed
    token, the newest first. The pool begins empty with every text. The window moves on by one
    position a round, as in the released code.
    """

    drafts_trees = True
    hybrid_places = ("second",)

    def __init__(self, target: Model, window: int, ngram: int, guesses: int) -> None:
        require_whole("the lookahead window", window, 1)
        require_whole(
            "ngram",
            ngram,
            2,
            remedy="an n-gram has the token that it begins with and those it drafts",
        )
        require_whole("guesses", guesses, 1)
        self._device = target.device
        self._window, self._ngram, self._guesses = window, ngram, guesses

    def begin(self, request: Request, target: Session) -> None:
        self._limits = request.limits
        prompt = [*request.source.prompt, *request.source.copyable]
        width = self._window + self._ngram - 2
        self._levels = [random.Random(0).choices(prompt, k=width)]
        self._pool: dict[int, dict[NGram, None]] = {}  # what may follow a token, the newest last

    def propose(self, tokens: list[int]) -> Draft:
        room, positions_left = self._limits.room(tokens), self._limits.positions_left(tokens)
        last_token = tokens[-1]
        drafted, parents = self._branches(last_token, min(room, positions_left))
        self._levels[0][0] = last_token
        self._newest_rows: list[int] = []  # the newest level's rows in the forward
        parent_rows = [ROOT, *(parent + 1 for parent in parents)]
        probes = self._window_rows(parent_rows) if self._fits(room, positions_left) else []
        rows = on_device(parent_rows, self._device)
        return Draft(
            on_device(drafted, self._device),
            rows[1 : len(drafted) + 1] - 1 if drafted else None,
            probes=on_device(probes, self._device) if probes else None,
            shape=Tree(rows),
            known_parents=parents if drafted else None,
        )

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Take the newest guesses, and the n-grams that they complete."""
        if not self._newest_rows:
            return
        rows = on_device(self._newest_rows, scores.logits.device)
        logits = scores.logits.index_select(0, rows)
        guessed = most_likely(precise(logits)).tolist()
        if len(self._levels) < self._ngram - 1:
            self._levels = [level[1:] for level in [*self._levels, guessed]]
            return
        for first_token, *followers in zip(*self._levels, guessed, strict=True):
            ngrams = self._pool.setdefault(first_token, {})
            ngram = tuple(followers)
            ngrams.pop(ngram, None)
            ngrams[ngram] = None
            if len(ngrams) > self._guesses:
                oldest = next(iter(ngrams))
                del ngrams[oldest]
        self._levels = [*self._levels[1:], guessed]

    def observe_other(
        self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict
    ) -> None:
        """Nothing to learn: another drafter's forward has no rows of the window."""

    def _branches(self, last_token: int, depth: int) -> tuple[list[int], list[int]]:
        """The pool's n-grams after this token as a tree: tokens and parents."""
        drafted: list[int] = []
        parents: list[int] = []
        nodes: dict[tuple[int, int], int] = {}  # the node of each parent and token
        for ngram in reversed(self._pool.get(last_token, {})):
            parent = ROOT
            for token in ngram[:depth]:
                if (parent, token) not in nodes:
                    nodes[parent, token] = len(drafted)
                    drafted.append(token)
                    parents.append(parent)
                parent = nodes[parent, token]
                if token in self._limits.end_tokens:
                    break
        return drafted, parents

    def _fits(self, room: int, positions_left: int) -> bool:
        """Whether the window runs, cut to the columns that the models have positions for."""
        columns = min(len(self._levels[0]), positions_left - len(self._levels) + 2)
        if room < 2 or columns < 1:  # n-grams could not be used any more
            return False
        self._levels = [level[:columns] for level in self._levels]
        return True

    def _window_rows(self, parent_rows: list[int]) -> list[int]:
        """The window's tokens.

        Appends the parent row of each token to `parent_rows`, and finds the rows of the newest
        level.
        """
        tokens: list[int] = []
        level_rows = [0]
        for token in self._levels[0][1:]:
            tokens.append(token)
            parent_rows.append(level_rows[-1])
            level_rows.append(len(parent_rows) - 1)
        for level in self._levels[1:]:
            tokens += level
            first_row = len(parent_rows)
            parent_rows += level_rows
            level_rows = list(range(first_row, first_row + len(level)))
        self._newest_rows = level_rows
        return tokens
