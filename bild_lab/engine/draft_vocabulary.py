"""A drafter whose head has some tokens only (FR-Spec, Zhao et al., 2025): its distribution is zero for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.models.processed_session import SessionOver, processed
from bild_lab.engine.models.views import TargetLayers
from bild_lab.engine.request import Source
from bild_lab.engine.session import (
    ALONE,
    EVERYTHING,
    Chain,
    DraftedChain,
    GrownTree,
    Growth,
    Model,
    Opening,
    Rows,
    Scores,
    Session,
    Want,
)
from bild_lab.errors import UserError

T = TypeVar("T")


class DraftVocabulary:
    """The tokens that a drafter's head has, in ascending order, and what the engines have made for them."""

    def __init__(self, tokens: Iterable[int], device: torch.device | str = "cpu") -> None:
        self.tokens: Int[Tensor, " part"] = torch.tensor(sorted(set(tokens)), device=device)
        self._made: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def made_for(self, owner: object, make: Callable[[], T]) -> T:
        """What this owner makes for these tokens, such as its head's rows of them. It is made once."""
        if owner not in self._made:
            self._made[owner] = make()
        return self._made[owner]

    def widened(self, part: Float[Tensor, "n part"], width: int, others: float) -> Float[Tensor, "n vocab"]:
        """A number for each token of the whole vocabulary: these, and `others` for all other tokens."""
        return part.new_full((part.shape[0], width), others).index_copy_(1, self.tokens, part)

    def masked(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """−inf for all other tokens. A row in which a processor leaves none of these tokens stays as it is."""
        part = logits.index_select(1, self.tokens)
        wide = self.widened(part, logits.shape[1], float("-inf"))
        return torch.where(part.amax(1, keepdim=True) > float("-inf"), wide, logits)


class NarrowModel:
    """A draft model, or layers of the target, whose head has these tokens only. All else is the model's own.

    Our decoders compute no other scores; elsewhere, and in compiled steps, the whole head runs and is masked. Raises
    UserError for a draft model of another vocabulary.
    """

    def __init__(self, model: Model, vocabulary: DraftVocabulary) -> None:
        if hasattr(model, "writes_text"):  # a `TranslatedModel`
            raise UserError(
                "a draft vocabulary needs a draft model with the target's tokenizer; set policy.draft_vocabulary=null"
            )
        self.model, self.vocabulary = model, vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def start(self, source: Source, room: int, opening: Opening = ALONE) -> Session:
        if isinstance(self.model, TargetLayers):  # whose scores have been processed
            return NarrowSession(self.model.start(source, room, opening), self.vocabulary)
        session = self.model.start(replace(source, processors=None), room, opening)
        return processed(NarrowSession(session, self.vocabulary), source)


class NarrowSession(SessionOver):
    """A session that asks for the scores of these tokens alone, and masks all others."""

    def __init__(self, session: Session, vocabulary: DraftVocabulary) -> None:
        super().__init__(session)
        self._vocabulary = vocabulary

    @torch.inference_mode()
    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        scores = self._session.extend(rows, replace(want, vocabulary=self._vocabulary))
        return scores if scores.logits is None else replace(scores, logits=self._vocabulary.masked(scores.logits))

    def draft(self, rows: Sequence[int], chain: Chain) -> DraftedChain | None:
        return self._session.draft(rows, replace(chain, vocabulary=self._vocabulary))

    def grow(self, rows: Sequence[int], growth: Growth) -> GrownTree | None:
        return self._session.grow(rows, replace(growth, vocabulary=self._vocabulary))
