"""Drafting again after one text, with other random numbers: does a draw decide whether it is
verified?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, common_prefix
from bild_lab.engine.request import Request

REDRAWS = 4  # how often a context is drafted again
# total variation that rounding, in half precision too, makes between rows of one q: models differ
# by more
SAME_Q = 0.1


@torch.inference_mode()
def draws_are_kept(method: DraftThenVerify, request: Request, text: Sequence[int]) -> bool:
    """Whether all that is drawn after this text is verified, as far as a few drafts show.

    A token that is drawn must be verified whatever it is, since those that are left after dropping
    some have another distribution than q. So whether a next token is drawn, and from which q, may
    depend on the tokens before it alone. text: with the prompt.
    """
    drafts = [_begun_after(method, request, text, index) for index in range(REDRAWS)]
    return all(drawn_alike(drafts[0], draft) for draft in drafts[1:])


def drawn_alike(first: Draft, second: Draft) -> bool:
    """Whether two drafts after one text draw each token from the same q, or both draw none, as far
    as they have the same tokens before it. Of trees the first token counts.
    """
    if first.probs is None or second.probs is None:
        return first.probs is second.probs
    is_tree = first.parents is not None or second.parents is not None
    shared = 0 if is_tree else common_prefix(first.token_list, second.token_list)
    if shared == min(len(first), len(second)):
        return len(first) == len(second)
    if first.probs.shape[-1] != second.probs.shape[-1]:
        return False
    rows = slice(shared + 1)
    distances = (first.probs[rows] - second.probs[rows]).abs().sum(-1) / 2
    return bool((distances <= SAME_Q).all())


def _begun_after(
    method: DraftThenVerify, request: Request, text: Sequence[int], index: int
) -> Draft:
    """The draft of a drafter that begins with this text. index: other random numbers for each."""
    limits = request.limits
    begun = replace(
        request.seeded(len(text), index),
        source=replace(request.source, prompt=tuple(text)),
        limits=replace(limits, prompt_length=len(text), max_new_tokens=limits.room(text)),
    )
    method.prepare(begun)
    session = method.target.start(begun.source, begun.limits.max_new_tokens)
    draft = method.drafter.start(begun, session).propose(list(text))
    # a compiled step reuses its memory
    probs = None if draft.probs is None else draft.probs.clone()
    return replace(draft, tokens=draft.tokens.clone(), probs=probs)
