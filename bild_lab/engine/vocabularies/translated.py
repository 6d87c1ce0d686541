"""A draft model of another vocabulary in the place of one of the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.vocabulary import (
    same_vocabulary,
    shares_token_ids,
    tokens_without_embedding,
)
from bild_lab.engine.models.processed_session import processed
from bild_lab.engine.request import Source
from bild_lab.engine.session import DEFAULT_OPTIONS, LoadedModel, Session, SessionOptions
from bild_lab.engine.vocabularies.intersection import IntersectionSession, WithinPositions
from bild_lab.engine.vocabularies.overlap import VocabularyOverlap, overlap_of, require_shared
from bild_lab.engine.vocabularies.shared_ids import SharedIdModel
from bild_lab.errors import UserError


class TranslatedModel:
    """A loaded model whose sessions take, and draft, tokens of the target (arXiv 2502.05202).

    All else, such as the checkpoint, is the model's own. The drafter's distribution is known for
    every token that it proposes, so what is lossless stays lossless, however well the two
    vocabularies fit. Its own positions do not limit a text: where they end, it drafts nothing.
    """

    positions = session_positions = source_positions = None

    def __init__(self, model: LoadedModel, overlap: VocabularyOverlap) -> None:
        self.model, self.overlap = model, overlap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def facts(self) -> dict[str, Any]:
        """For a result: the draft model, and what the vocabularies share."""
        overlap = self.overlap
        pieces = {
            "target_pieces": len(overlap.target.pieces.written),
            "draft_pieces": len(overlap.draft.pieces.written),
        }
        return {"draft": overlap.draft.path, "shared": overlap.count, **pieces}

    @property
    def transformers(self) -> TranslatedModel:
        """The draft model's checkpoint as a module of Transformers, translated too."""
        return TranslatedModel(self.model.transformers, self.overlap)

    def with_backend(self, **backend: Any) -> TranslatedModel:
        """The model over `NativeModel.with_backend`."""
        return TranslatedModel(self.model.with_backend(**backend), self.overlap)

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        draft_source = self.overlap.source(source, self.model.source_positions)
        session = self.model.start(draft_source, 2 * room, replace(session_options, target=None))
        translated = IntersectionSession(
            session, self.overlap, source, draft_source, self.model.session_positions
        )
        return WithinPositions(processed(translated, source), translated)

    def text_logits(self, text: Source, count: int | None = None) -> Float[Tensor, "n vocab"]:
        """The scores after the last tokens of the text in its own vocabulary, as far as its
        positions reach.
        """
        draft_text = self.overlap.source(text, self.model.source_positions)
        return self.model.text_logits(
            replace(draft_text, prompt=draft_text.prompt[: self.model.positions]), count
        )


def in_vocabulary_of(target: Checkpoint, model: LoadedModel) -> LoadedModel:
    """The draft model itself if it has the target's vocabulary, or all but a few tokens of it; else
    translated.

    Raises UserError for models of two kinds, and for vocabularies that share too little.
    """
    draft = model.checkpoint
    if target.encoder_decoder != draft.encoder_decoder:
        kinds = {True: "an encoder–decoder", False: "decoder-only"}
        raise UserError(
            f"target and draft must be of one kind, got {target.path}"
            f" ({kinds[target.encoder_decoder]}) and {draft.path} ({kinds[draft.encoder_decoder]});"
            " choose both of one family"
        )
    if shares_token_ids(target, draft):
        same = same_vocabulary(target, draft) and not tokens_without_embedding(target, draft)
        return model if same else SharedIdModel(model, target)
    overlap = overlap_of(target, draft)
    require_shared(overlap)
    return TranslatedModel(model, overlap)
