"""A draft model whose tokens have the target's ids, except a few that one of the two lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.processed_session import SessionOver, processed
from bild_lab.engine.request import Source
from bild_lab.engine.session import (
    ALL_LOGITS,
    DEFAULT_OPTIONS,
    Drafted,
    DraftSpec,
    LoadedModel,
    OutputSpec,
    RowsOrTokens,
    Scores,
    Session,
    SessionOptions,
    as_rows,
)


class SharedIdModel:
    """A loaded model that drafts only the tokens that have one id in both vocabularies (see
    `shares_token_ids`).

    It reads any token of the target: one that it lacks, or has no embedding for, is read as its own
    token of that name, or else as its token for unknown text. All else, such as the checkpoint, is
    the model's own.
    """

    def __init__(self, model: LoadedModel, target: Checkpoint) -> None:
        self.model, self._target = model, target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def transformers(self) -> SharedIdModel:
        """The draft model's checkpoint as a module of Transformers."""
        return SharedIdModel(self.model.transformers, self._target)

    def with_backend(self, **backend: Any) -> SharedIdModel:
        """The model over `NativeModel.with_backend`."""
        return SharedIdModel(self.model.with_backend(**backend), self._target)

    @cached_property
    def shared(self) -> DraftVocabulary:
        """The tokens that it may draft."""
        target, draft = self._target, self.model.checkpoint
        width = min(target.rows, target.columns, draft.rows, draft.columns)
        same = [
            token
            for piece, token in target.vocabulary.items()
            if draft.vocabulary.get(piece) == token < width
        ]
        # end tokens may have no piece
        ends = [token for token in target.end_tokens & draft.end_tokens if token < width]
        return DraftVocabulary([*same, *ends], self.model.device)

    @cached_property
    def stand_ins(self) -> dict[int, int]:
        """What it reads in place of the target's tokens that it does not have."""
        draft, shared = self.model.checkpoint, set(self.shared.tokens.tolist())
        stand_ins = {}
        for piece, token in self._target.vocabulary.items():
            if token not in shared:
                possible = (draft.vocabulary.get(piece), draft.tokenizer.unk_token_id)
                stand_ins[token] = next(
                    (
                        token_id
                        for token_id in possible
                        if token_id is not None and token_id < draft.rows
                    ),
                    0,
                )
        return stand_ins

    @cached_property
    def _table(self) -> Int[Tensor, " ids"]:
        """What it reads in place of each id."""
        size = max(self._target.rows, self._target.source_rows, *self.stand_ins) + 1
        table = torch.arange(size)
        table[list(self.stand_ins)] = torch.tensor(list(self.stand_ins.values()))
        return table.clamp_(
            max=max(self.model.checkpoint.rows, self.model.checkpoint.source_rows) - 1
        ).to(self.model.device)

    def read(self, tokens: Sequence[int] | Int[Tensor, "*n"]) -> Sequence[int] | Int[Tensor, "*n"]:
        """The model's own tokens for these of the target."""
        if not self.stand_ins:
            return tokens
        if isinstance(tokens, Tensor):
            return self._table[tokens]
        return [self.stand_ins.get(token, token) for token in tokens]

    def source(self, source: Source) -> Source:
        """The source in the model's own tokens."""
        encoder_ids = None if source.encoder_ids is None else self.read(source.encoder_ids)
        return replace(source, prompt=tuple(self.read(source.prompt)), encoder_ids=encoder_ids)

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        session = self.model.start(
            replace(self.source(source), processors=None), room, session_options
        )
        return processed(SharedIdSession(session, self), source)

    def text_logits(self, text: Source, count: int | None = None) -> Float[Tensor, "n vocab"]:
        """The scores after the last tokens of the text, −inf for what it may not draft."""
        return self.scored(self.model.text_logits(self.source(text), count), self.shared)

    def scored(
        self, logits: Float[Tensor, "n own"], vocabulary: DraftVocabulary
    ) -> Float[Tensor, "n vocab"]:
        """Scores as wide as the target's, −inf for all but these tokens."""
        missing = self._target.columns - logits.shape[1]
        masked = vocabulary.masked(logits)
        # a negative number cuts
        return pad(masked, (0, missing), value=float("-inf")) if missing else masked


class SharedIdSession(SessionOver):
    """A session of a `SharedIdModel`, which takes, and drafts, tokens of the target."""

    def __init__(self, session: Session, model: SharedIdModel) -> None:
        super().__init__(session)
        self._model = model

    def _vocabulary(self, vocabulary: DraftVocabulary | None) -> DraftVocabulary:
        return self._model.shared.intersection(vocabulary)

    @torch.inference_mode()
    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        rows, vocabulary = as_rows(rows), self._vocabulary(output_spec.vocabulary)
        draft_rows = replace(rows, tokens=self._model.read(rows.tokens))
        scores = self._session.extend(draft_rows, replace(output_spec, vocabulary=vocabulary))
        return scores.with_logits(lambda logits: self._model.scored(logits, vocabulary))

    def draft(self, rows: Sequence[int], spec: DraftSpec) -> Drafted | None:
        spec = replace(spec, vocabulary=self._vocabulary(spec.vocabulary))
        return self._session.draft(self._model.read(rows), spec)
