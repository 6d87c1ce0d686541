"""Draft models whose head has some tokens alone (FR-Spec, Zhao et al., 2025): those of a file, or
the most frequent ones of an n-gram table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods.early_exit.views import TargetLayers
from bild_lab.engine.methods.lookup.ngram import load_table
from bild_lab.engine.models.processed_session import SessionOver, processed
from bild_lab.engine.request import Source
from bild_lab.engine.session import (
    ALL_LOGITS,
    DEFAULT_OPTIONS,
    Drafted,
    DraftSpec,
    LoadedModel,
    Model,
    OutputSpec,
    RowsOrTokens,
    Scores,
    Session,
    SessionOptions,
)
from bild_lab.engine.vocabularies import TranslatedModel
from bild_lab.errors import UserError, require_whole
from bild_lab.files import FilePath

NUMBERS = re.compile(r"[\s\d,\[\]]*\d[\s\d,\[\]]*", re.ASCII)  # one a line, or a JSON list


def draft_vocabulary(
    target: LoadedModel, tokens: int | FilePath | None, ranking: FilePath | None
) -> DraftVocabulary | None:
    """The tokens of `policy.draft_vocabulary`, and the target's end tokens; None for the whole
    vocabulary.

    tokens: how many, the first of `ranking`; or the path of a ranking, of which all are taken.
    ranking: see `ranked`. Raises UserError for a number without a ranking or larger than it, and
    for tokens that the target does not have.
    """
    if tokens is None and ranking is None:
        return None
    if isinstance(tokens, str) == (ranking is not None):
        raise UserError(
            "give policy.draft_vocabulary a file of token ids, or a number, and then"
            f" policy.draft_vocabulary_from an n-gram table or a file of token ids; got {tokens!r}"
            f" and {ranking!r}"
        )
    path, checkpoint = str(tokens if ranking is None else ranking), target.checkpoint
    token_ids = ranked(path, target)
    if not isinstance(tokens, str):
        require_whole(
            "policy.draft_vocabulary", tokens, 1, len(token_ids), f"{path} ranks {len(token_ids)}"
        )
        token_ids = token_ids[:tokens]
    if unknown := set(token_ids) - set(checkpoint.vocabulary.values()):
        raise UserError(
            f"{path} names the token {min(unknown)}, which {checkpoint.path} does not have; count"
            " anew"
        )
    checkpoint.require_row(max(token_ids), f"the tokens of {path}")
    return DraftVocabulary([*token_ids, *checkpoint.end_tokens], target.device)


def ranked(path: str, target: LoadedModel) -> list[int]:
    """Token ids without repetition, the most frequent first.

    path: of an n-gram table; or of a text file of ids in an order of its own, one a line or as a
    JSON list. Raises UserError for others.
    """
    named = Path(path).expanduser()
    if named.suffix == ".safetensors":
        return load_table(target, path, 1).unigrams.tokens.tolist()
    text = named.read_text("utf-8", errors="replace") if named.is_file() else ""
    if not NUMBERS.fullmatch(text):
        raise UserError(
            "policy.draft_vocabulary_from, or policy.draft_vocabulary without it, is a text file of"
            " token ids, or the table that scripts/train_module.py module=ngram counts, got"
            f" {path!r}"
        )
    return list(dict.fromkeys(map(int, re.findall(r"\d+", text))))


class NarrowModel:
    """A draft model, or layers of the target, whose head has these tokens only. All else is the
    model's own.

    Our decoders compute no other scores; elsewhere, and in compiled steps, the whole head runs and
    is masked. Raises UserError for a draft model of another vocabulary.
    """

    def __init__(self, model: Model, vocabulary: DraftVocabulary) -> None:
        if isinstance(model, TranslatedModel):
            raise UserError(
                "a draft vocabulary needs a draft model with the target's tokenizer; set"
                " policy.draft_vocabulary=null"
            )
        self.model, self.vocabulary = model, vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        if isinstance(self.model, TargetLayers):  # the target has processed its scores
            return NarrowSession(self.model.start(source, room, session_options), self.vocabulary)
        session = self.model.start(replace(source, processors=None), room, session_options)
        return processed(NarrowSession(session, self.vocabulary), source)


class NarrowSession(SessionOver):
    """A session that asks for the scores of these tokens alone, and masks all others."""

    def __init__(self, session: Session, vocabulary: DraftVocabulary) -> None:
        super().__init__(session)
        self._vocabulary = vocabulary

    @torch.inference_mode()
    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        scores = self._session.extend(rows, replace(output_spec, vocabulary=self._vocabulary))
        return scores.with_logits(self._vocabulary.masked)

    def draft(self, rows: Sequence[int], spec: DraftSpec) -> Drafted | None:
        return self._session.draft(rows, replace(spec, vocabulary=self._vocabulary))
