"""AutoJudge's search: which of the drafter's mismatches change the outcome of the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import common_prefix
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import most_likely, precise
from bild_lab.engine.session import Model, Scores, Want

Unchanged = Callable[[Sequence[int]], bool]  # whether a text has the outcome of the target's own


@dataclass(frozen=True)
class Mismatch:
    """A place where the drafter would have written another token.

    place: in the answer, from 0. important: the outcome changes if the drafter's token is accepted. hidden: what the
    target's head reads after the drafter's token, in float32.
    """

    place: int
    target_token: int
    draft_token: int
    important: bool
    hidden: Float[Tensor, " dim"]


@dataclass(frozen=True)
class Found:
    """What the search found for one prompt.

    own: the target's own answer. kept: the answer with all unimportant swaps.
    """

    own: tuple[int, ...]
    kept: tuple[int, ...]
    mismatches: tuple[Mismatch, ...]


@torch.inference_mode()
def search(target: Model, draft: Model, request: Request, judged: Callable[[tuple[int, ...]], Unchanged]) -> Found:
    """Walk through the target's greedy answer and try the drafter's token at every mismatch (AutoJudge, Algorithm 1).

    At the first place from where the search is, at which the drafter's most likely token is another one, the target
    continues after the drafter's token. If the outcome stays, the mismatch is unimportant, and its text takes the
    place of the answer; else it is important, and the answer stays. The search goes on after it. judged: given the
    target's own answer, the test that others are put to.
    """
    writer = Reader(target, request.source, request.limits)
    drafter = Reader(draft, request.source, request.limits)
    own = text = tuple(writer.written([]))
    unchanged = judged(own)
    place, found = 0, []
    while place < len(text):
        choices = most_likely(precise(drafter.read(text[:-1], len(text) - place).logits)).tolist()
        others = [at for at, token in enumerate(choices, place) if token != text[at]]
        if not others:
            break
        place = others[0]
        tried = [*text[:place], choices[place - len(text)]]
        hidden = writer.read(tried, 1, head=True).head_input[-1].float().cpu().clone()
        alternative = tuple(writer.written(tried))
        stays = unchanged(alternative)
        found.append(Mismatch(place, text[place], tried[-1], not stays, hidden))
        text = alternative if stays else text
        place += 1
    return Found(own, text, tuple(found))


class Reader:
    """A model that reads answers to one prompt. What two answers share is read once."""

    def __init__(self, model: Model, source: Source, limits: Limits) -> None:
        self._session = model.start(source, limits.max_new_tokens)
        self._start, self._prompt, self._limits = self._session.length, list(source.prompt), limits
        self._read: list[int] = []  # tokens after the prompt without its last

    def read(self, answer: Sequence[int], rows: int, head: bool = False) -> Scores:
        """What follows the last tokens of the prompt and this answer. head: also what the head reads there."""
        tokens = [self._prompt[-1], *answer]
        same = min(common_prefix(self._read, tokens), len(tokens) - rows)
        self._session.rollback(self._start + same)
        scores = self._session.extend(tokens[same:], Want(logits=rows, head_input=head))
        self._read = tokens
        return scores

    def written(self, answer: Sequence[int]) -> list[int]:
        """The answer, continued greedily to its end."""
        tokens = list(answer)
        while not self._limits.reached([*self._prompt, *tokens]):
            tokens.append(int(most_likely(precise(self.read(tokens, 1).logits))))
        return tokens
