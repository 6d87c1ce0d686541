"""Two vocabularies side by side: which tokens they share, and one's text in the tokens of the
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.request import Source
from bild_lab.errors import UserError

# the share of the target's pieces that must be shared: with fewer, the draft model's tokenizer is
# hardly its own, or of another script
MIN_SHARED = 0.01


@dataclass(frozen=True)
class VocabularyOverlap:
    """A target's and a draft model's vocabularies: what their tokens write."""

    target: Checkpoint
    draft: Checkpoint

    @cached_property
    def width(self) -> int:
        """The width of the target's logits."""
        return self.target.config.get_text_config(decoder=True).vocab_size

    @cached_property
    def shared(self) -> dict[int, int]:
        """The draft model's token for each target token that it can propose: both write the same
        bytes.

        Special tokens of one name or role are shared too. No token has two partners.
        """
        target_tokens, draft_tokens = self.target.pieces.tokens_of, self.draft.pieces.tokens_of
        ordinary = {
            token: draft_tokens[text]
            for text, token in target_tokens.items()
            if text in draft_tokens
        }
        draft_width = self.draft.config.get_text_config(decoder=True).vocab_size
        partners = {**ordinary, **self._special}
        return {
            target_token: draft_token
            for target_token, draft_token in partners.items()
            if target_token < self.width and draft_token < draft_width
        }

    @property
    def count(self) -> int:
        """How many ordinary tokens are shared."""
        return sum(token in self.target.pieces.written for token in self.shared)

    @cached_property
    def _special(self) -> dict[int, int]:
        """The draft model's token for each special one of the target that has a partner."""
        unknown = self.target.tokenizer.unk_token_id
        partners: dict[int, int] = {}
        for target_token, draft_token in self._special_pairs():
            if target_token is None or draft_token is None or target_token == unknown:
                continue
            if target_token not in partners and draft_token not in partners.values():
                partners[target_token] = draft_token
        return partners

    def _special_pairs(self) -> Iterator[tuple[int | None, int | None]]:
        """Special tokens that may be partners, the surest pairs first; None for one that is not
        there.
        """
        target, draft = self.target, self.draft
        yield target.tokenizer.eos_token_id, draft.tokenizer.eos_token_id
        for name, token in target.pieces.special.items():
            yield token, draft.pieces.special.get(name)
        for role in ("bos_token_id", "pad_token_id"):
            yield getattr(target.tokenizer, role), getattr(draft.tokenizer, role)
        for token in sorted(target.end_tokens):
            yield token, min(draft.end_tokens, default=None)

    def draft_tokens(self, token: int) -> list[int]:
        """Tokens of the draft model that write what this target token writes: one or more, whatever
        it is.
        """
        if token in self.shared:
            return [self.shared[token]]
        text = self.target.pieces.written.get(token, b"")
        return self.draft.pieces.tokens(text, continues=True) or [self._placeholder]

    @cached_property
    def most_draft_tokens(self) -> int:
        """The most tokens of the draft model that a target token takes."""
        return max(
            (len(self.draft_tokens(token)) for token in self.target.pieces.written), default=1
        )

    @cached_property
    def _placeholder(self) -> int:
        """Stands for a token that the draft model cannot write."""
        unknown = self.draft.tokenizer.unk_token_id
        return 0 if unknown is None else unknown

    def source(self, source: Source, most_encoded: int | None = None) -> Source:
        """The source in the draft model's tokens, with the special tokens that its tokenizer adds.

        most_encoded: how many tokens its encoder reads; a longer source is cut.
        """
        start, end = self.draft.pieces.template
        if source.encoder_ids is None:
            prompt = (*start, *self._body(source.prompt))
            return Source(prompt or (self._placeholder,), device=source.device)
        encoded = [*start, *self._body(source.encoder_ids[0].tolist()), *end][:most_encoded]
        prompt = (self.draft.decoder_start, *self._body(source.prompt[1:]))
        return Source(prompt, torch.tensor([encoded], device=source.device), source.device)

    def _body(self, tokens: Sequence[int]) -> list[int]:
        """A text's tokens without those that the target's tokenizer adds, run by run between
        special ones.
        """
        start, end = self.target.pieces.template
        tokens = list(tokens)
        if start and tokens[: len(start)] == start:
            tokens = tokens[len(start) :]
        if end and tokens[-len(end) :] == end:
            tokens = tokens[: -len(end)]
        draft_tokens: list[int] = []
        for ordinary, run in itertools.groupby(
            tokens, lambda token: token in self.target.pieces.written
        ):
            if ordinary:
                text = self.target.pieces.text(run)
                # before the first word
                if not draft_tokens and self.target.pieces.adds_space:
                    text = text.removeprefix(b" ")
                draft_tokens += self.draft.pieces.tokens(text, continues=bool(draft_tokens))
            else:
                draft_tokens += [self._special[token] for token in run if token in self._special]
        return draft_tokens


@lru_cache(maxsize=8)
def overlap_of(target: Checkpoint, draft: Checkpoint) -> VocabularyOverlap:
    """The overlap of two vocabularies, worked out once. Two of 100,000 pieces take a second."""
    return VocabularyOverlap(target, draft)


def require_shared(overlap: VocabularyOverlap) -> None:
    """Raise UserError for vocabularies that share too little to draft by what both have."""
    target_count = len(overlap.target.pieces.written)
    draft_count = len(overlap.draft.pieces.written)
    if overlap.count < max(1, MIN_SHARED * target_count):
        raise UserError(
            f"{overlap.target.path} ({target_count} pieces) and {overlap.draft.path} ({draft_count}"
            f" pieces) have different vocabularies that share {overlap.count} pieces; check that the"
            " draft model's folder holds its own tokenizer files, or choose another draft model"
        )
