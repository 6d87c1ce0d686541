"""What is told about a pair, and `decoding.processors`: how much of what a checkpoint says about generation counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import LogitsProcessor

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.processors import Processors, asked_for
from bild_lab.engine.vocabularies import INTERSECTION, STRINGS
from bild_lab.errors import UserError
from bild_lab.lab.decoding.build import build
from bild_lab.lab.decoding.decoder import UNIVERSAL
from bild_lab.lab.decoding.languages import Languages, languages_of

CHECKPOINT, NONE = "checkpoint", "none"
DRAFTED = {
    INTERSECTION: f"the tokens that both have (pair.vocabularies={INTERSECTION})",
    STRINGS: f"its text, tokenized anew (pair.vocabularies={STRINGS})",
    UNIVERSAL: "universal assisted generation of transformers",
}
MOST_SHOWN = 60  # characters of a value in a message
log = logging.getLogger(__name__)


def processors_of(wanted: Any, checkpoint: Checkpoint) -> Processors:
    """The processors of `decoding.processors`: none, those of the target's generation settings, or a list.

    Raises UserError for anything else.
    """
    if wanted == NONE:
        return Processors()
    if wanted == CHECKPOINT:
        return Processors(asked_for(checkpoint.generation))
    if isinstance(wanted, str) or not isinstance(wanted, Sequence) or not wanted:
        raise UserError(
            f"decoding.processors must be {CHECKPOINT}, {NONE}, or a list of Transformers' logits processors such as "
            f"[{{_target_: transformers.NoRepeatNGramLogitsProcessor, ngram_size: 3}}], got {wanted!r}"
        )
    return Processors(own=tuple(_processor(each) for each in wanted))


def _processor(node: Any) -> LogitsProcessor:
    try:
        built = build(node, {})
    except ValueError as error:  # the processors check their values themselves
        raise UserError(f"decoding.processors: {error}") from error
    if not isinstance(built, LogitsProcessor):
        raise UserError(f"decoding.processors must list logits processors, each with its _target_, got {node!r}")
    return built


def warn_of_what_is_left_out(wanted: Any, languages: Languages, checkpoint: Checkpoint) -> None:
    """Log, once for each checkpoint, what it says about generation that will not be followed."""
    if languages.target is None and wanted != CHECKPOINT and languages_of(checkpoint.tokenizer):
        warn(f"NO TARGET LANGUAGE: {checkpoint.path} may write any; set pair.target_language")
    if wanted != NONE or not (settings := asked_for(checkpoint.generation)):
        return
    listed = ", ".join(f"{name}={_short(value)}" for name, value in settings.items())
    text = f"decoding.processors={NONE} leaves out what {checkpoint.path} says: {listed}"
    if "forced_bos_token_id" in settings and languages.target is None:
        warn(f"FIRST TOKEN NOT FORCED: {text}; texts differ from `generate`'s: set decoding.processors={CHECKPOINT}")
    else:
        warn(f"{text}; decoding.processors={CHECKPOINT} follows it")


def warn_of_precision(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Log, once for each checkpoint, that its weights are stored in fewer bits than they are asked for in."""
    stored = getattr(checkpoint.config, "dtype", None)
    if isinstance(stored, torch.dtype) and stored.is_floating_point and stored.itemsize < dtype.itemsize:
        names, times = [str(each).removeprefix("torch.") for each in (stored, dtype)], dtype.itemsize // stored.itemsize
        warn(
            f"{checkpoint.path} is stored in {names[0]} and loads in {names[1]}, with {times} times "
            f"the memory; runtime.dtype={names[0]} loads it as it is"
        )


def warn_of_vocabularies(vocabularies: Sequence[Mapping[str, Any]]) -> None:
    """Log, once for each draft model of another vocabulary than the target's, what they share and how it drafts."""
    for one in vocabularies:
        warn(
            f"{one['draft']} ({one['draft_pieces']:,} pieces) has another vocabulary than the target "
            f"({one['target_pieces']:,}) and shares {one['shared']:,} of its pieces: it drafts by "
            f"{DRAFTED[one['chosen']]}"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


@lru_cache
def warn(text: str) -> None:
    """Log this warning, if it was not yet."""
    log.warning(text)
