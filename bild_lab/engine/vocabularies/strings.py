"""String-level exact match: the drafter's text is retokenized for the target to verify (arXiv 2502.05202, §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import common_prefix
from bild_lab.engine.drafters.model import draft_chain
from bild_lab.engine.models.processed_session import SessionOver
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import EVERYTHING, Chain, DraftedChain, Rows, Scores, Session, Want
from bild_lab.engine.vocabularies.overlap import Overlap, natural
from bild_lab.errors import UserError


class StringsSession(SessionOver):
    """A session that drafts text after the target's tokens, over a session of the draft model.

    The text so far is tokenized for the draft model. It keeps the rows that have the same tokens as before, so it reads
    again only what a new tokenization changed. What it drafts is tokenized for the target after the committed
    tokens, which never change. A draft is the most likely text, whatever the sampling, so each of its tokens counts as
    certain (q is one-hot). It cannot give scores, nor trees.

    source, own: the prompt in both vocabularies. positions: how many tokens the draft model reads.
    """

    def __init__(self, session: Session, overlap: Overlap, source: Source, own: Source, positions: int | None) -> None:
        super().__init__(session)
        self._overlap, self._positions = overlap, positions
        self._begins = source.encoder_ids is not None  # a decoder's text begins after its start token
        self._first, self._prompt = len(source.prompt) - 1, list(own.prompt)
        self._tokens: list[int] = []  # the target's, from the prompt's last one on
        self._cached = self._prompt[:-1]  # the draft model's tokens of which it has rows, or will have with the prompt

    @property
    def length(self) -> int:
        return self._first + len(self._tokens)

    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        raise UserError(
            "drafted text has no scores in the target's vocabulary, and this policy reads them; "
            "set pair.vocabularies=intersection"
        )

    grow = extend  # refused likewise

    @torch.inference_mode()
    def draft(self, rows: Sequence[int], chain: Chain) -> DraftedChain:
        self._tokens += rows
        text = self._overlap.pieces.text(self._tokens[1:])
        if self._begins:
            text = natural(text, self._overlap.pieces)
        own = [*self._prompt, *self._overlap.draft_pieces.tokens(text, behind=not self._begins)]
        if self._positions is not None and len(own) + chain.steps > self._positions:
            return DraftedChain()
        same = common_prefix(self._cached, own[:-1])
        self._session.rollback(same)  # rows that are not the text's
        feed, own_chain = own[same:], Chain(chain.steps, self._overlap.draft.end_tokens, chain.threshold)
        drafted = self._session.draft(feed, own_chain)
        if drafted is None:
            drafted = draft_chain(self._session, feed, own_chain, Sampling())
        written = torch.as_tensor(drafted.tokens).tolist()
        self._cached = [*own, *written][: self._session.length]
        tokens = self._target_tokens(text, own, written)[: chain.steps]
        return replace(drafted, tokens=tokens, probs=None, own_probs=None)

    def keep(self, path: Sequence[int]) -> None:
        """Its rows are those of a text. The next draft keeps what the text then has of them."""

    def rollback(self, length: int) -> None:
        del self._tokens[max(0, length - self._first) :]

    def _target_tokens(self, text: bytes, own: list[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens for the drafted ones, up to a token that writes nothing or ends the text.

        text: what the target has written so far. own: the same for the draft model, perhaps only a part of it, or what
        its tokenizer made of it.
        """
        theirs, ours = self._overlap.draft_pieces, self._overlap.pieces
        stop = next((at for at, token in enumerate(drafted) if token not in theirs.written), len(drafted))
        before, new = theirs.text(own[len(self._prompt) :]), theirs.text(drafted[:stop])
        whole = before + new
        if self._begins:
            before, whole = natural(before, theirs), natural(whole, theirs)
        if text.startswith(before):  # the rest of a character that the draft model could not read is not new
            new = whole[len(text) :] if whole.startswith(text) else b""
        tokens = ours.tokens(new, behind=bool(text) or not self._begins)
        end = self._overlap.target.tokenizer.eos_token_id
        ends = stop < len(drafted) and drafted[stop] in self._overlap.draft.end_tokens
        return [*tokens, end] if ends and end is not None else tokens
