"""String-level exact match: the drafter's text is retokenized for the target to verify (arXiv 2502.05202, §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import ROOT, common_prefix
from bild_lab.engine.drafters.model import draft_chain
from bild_lab.engine.drafters.model_tree import grow
from bild_lab.engine.models.processed_session import SessionOver
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import (
    EVERYTHING,
    Chain,
    DraftedChain,
    GrownTree,
    Growth,
    Rows,
    Scores,
    Session,
    Want,
)
from bild_lab.engine.vocabularies.overlap import Overlap, natural
from bild_lab.errors import UserError

LONGEST_TAIL = 600  # bytes of the text that are tokenized in every round
SHORTEST_TAIL = 300


class StringsSession(SessionOver):
    """A session that drafts text after the target's tokens, over a session of the draft model.

    The text so far is tokenized for the draft model. It keeps the rows that have the same tokens as before, so it reads
    again only what a new tokenization changed. What it drafts is tokenized for the target after the committed
    tokens, which never change. A draft is the most likely text, whatever the sampling, so each of its tokens counts as
    certain (q is one-hot). It cannot give scores.

    source, own: the prompt in both vocabularies. positions: how many tokens the draft model reads.
    """

    def __init__(self, session: Session, overlap: Overlap, source: Source, own: Source, positions: int | None) -> None:
        super().__init__(session)
        self._overlap, self._positions = overlap, positions
        self._begins = source.encoder_ids is not None  # a decoder's text begins after its start token
        self._first, self._prompt = len(source.prompt) - 1, list(own.prompt)
        self._tokens: list[int] = []  # the target's, from the prompt's last one on
        self._cached = self._prompt[:-1]  # the draft model's tokens of which it has rows, or will have with the prompt
        self._settled: tuple[bytes, list[int]] = (b"", [])  # a beginning of the text that is not tokenized again
        self._grown: tuple[int, GrownTree] | None = None  # a tree of the draft model after so many cached tokens

    @property
    def length(self) -> int:
        return self._first + len(self._tokens)

    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        raise UserError(
            "drafted text has no scores in the target's vocabulary, and this policy reads them; "
            "set pair.vocabularies=intersection"
        )

    @torch.inference_mode()
    def draft(self, rows: Sequence[int], chain: Chain) -> DraftedChain:
        text, own = self._read(rows)
        if self._positions is not None and len(own) + chain.steps > self._positions:
            return DraftedChain()
        feed = self._behind_cached(own)
        ends = self._overlap.draft.end_tokens
        own_chain = Chain(chain.steps, ends, chain.threshold)
        drafted = self._session.draft(feed, own_chain)
        if drafted is None:
            drafted = draft_chain(self._session, feed, own_chain, Sampling())
        written = torch.as_tensor(drafted.tokens).tolist()
        self._cached = [*own, *written][: self._session.length]
        tokens = self._target_tokens(text, own, written)[: chain.steps]
        return replace(drafted, tokens=tokens, probs=None, own_probs=None)

    @torch.inference_mode()
    def grow(self, rows: Sequence[int], growth: Growth) -> GrownTree:
        text, own = self._read(rows)
        if self._positions is not None and len(own) + growth.depth * growth.width > self._positions:
            return GrownTree()
        feed = self._behind_cached(own)
        growth_of_text = replace(growth, end_tokens=self._overlap.draft.end_tokens, temperature=1.0, plain=True)
        grown = self._session.grow(feed, growth_of_text) or grow(self._session, feed, growth_of_text, Sampling())
        self._cached = own
        self._grown = (len(own), grown) if len(grown.forwards) > 1 else None
        tokens, parents = merged(
            [self._target_tokens(text, own, branch)[: growth.depth] for branch in branches(grown)], growth.nodes
        )
        return GrownTree(tokens, parents, [None] * len(tokens), grown.forwards)

    def keep(self, path: Sequence[int]) -> None:
        """Its rows are those of a text. The next draft keeps what the text then has of the tree."""

    def rollback(self, length: int) -> None:
        del self._tokens[max(0, length - self._first) :]

    def _read(self, rows: Sequence[int]) -> tuple[bytes, list[int]]:
        """Add these tokens to the text. Returns what it writes after the prompt, and the draft model's tokens."""
        self._tokens += rows
        text = self._overlap.pieces.text(self._tokens[1:])
        if self._begins:
            text = natural(text, self._overlap.pieces)
        return text, [*self._prompt, *self._tokenized(text)]

    def _tokenized(self, text: bytes) -> list[int]:
        """The draft model's tokens. A long text is settled word by word, but for its last ones."""
        known, tokens = self._settled if text.startswith(self._settled[0]) else (b"", [])
        pieces = self._overlap.draft_pieces
        if len(text) - len(known) > LONGEST_TAIL and (cut := text.rfind(b" ", len(known) + 1, -SHORTEST_TAIL)) > 0:
            tokens = [*tokens, *pieces.tokens(text[len(known) : cut], behind=bool(known) or not self._begins)]
            known = text[:cut]
        self._settled = known, tokens
        return [*tokens, *pieces.tokens(text[len(known) :], behind=bool(known) or not self._begins)]

    def _behind_cached(self, own: list[int]) -> list[int]:
        """Drop the rows that are not the text's. Returns the draft model's tokens that have to run."""
        if self._grown is not None:
            self._keep_branch(own)
        same = common_prefix(self._cached, own[:-1])
        self._session.rollback(same)
        return own[same:]

    def _keep_branch(self, own: list[int]) -> None:
        """Keep the rows of the tree that the text has gone along."""
        start, grown = self._grown
        path, node = [], ROOT
        for token in own[start:]:
            below = zip(grown.tokens, grown.parents, grown.rows, strict=True)
            node = next((at for at, (one, parent, row) in enumerate(below) if parent == node and one == token), None)
            if node is None or grown.rows[node] is None:
                break
            path.append(node)
        same = own[:start] == self._cached
        self._session.keep([grown.rows[node] for node in path] if same else [])
        if same:
            self._cached = [*self._cached, *(grown.tokens[node] for node in path)]
        self._grown = None

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
        ends = stop < len(drafted) and drafted[stop] in self._overlap.draft.end_tokens
        return [*tokens, self._overlap.target.tokenizer.eos_token_id] if ends and self._has_end else tokens

    @property
    def _has_end(self) -> bool:
        return self._overlap.target.tokenizer.eos_token_id is not None


def branches(grown: GrownTree) -> list[list[int]]:
    """The tokens of every branch of a tree, from the root to a leaf, in the order in which the leaves grew."""
    paths: list[list[int]] = []
    for token, parent in zip(grown.tokens, grown.parents, strict=True):
        paths.append([*(paths[parent] if parent != ROOT else []), token])
    inner = set(grown.parents)
    return [path for node, path in enumerate(paths) if node not in inner]


def merged(chains: Sequence[Sequence[int]], most: int) -> tuple[list[int], list[int]]:
    """A tree of these chains: tokens and parents, at most so many."""
    tokens: list[int] = []
    parents: list[int] = []
    places: dict[tuple[int, int], int] = {}
    for chain in chains:
        node = ROOT
        for token in chain:
            if (node, token) not in places:
                if len(tokens) == most:
                    break
                places[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = places[node, token]
    return tokens, parents
