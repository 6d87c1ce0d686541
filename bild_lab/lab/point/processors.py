"""Logits processors and stop strings of a configuration, as they fit a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import LogitsProcessor

from bild_lab.engine.logits_processors import OF_SOURCES, Processors, score_settings
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.stop import StopStrings
from bild_lab.errors import UserError
from bild_lab.lab.config.schemas import DecodingSpec, stop_strings
from bild_lab.lab.point.build import build
from bild_lab.lab.point.languages import CHECKPOINT, NONE


def processors_of(processors: Any, checkpoint: Checkpoint) -> Processors:
    """The processors of `decoding.processors`: none, those of the target's generation settings, or
    a list.

    Raises UserError for anything else.
    """
    if processors == NONE:
        return Processors()
    if processors == CHECKPOINT:
        settings = score_settings(checkpoint.generation)
        _require_one_vocabulary(settings, checkpoint)
        return Processors(settings)
    if isinstance(processors, str) or not isinstance(processors, Sequence) or not processors:
        raise UserError(
            f"decoding.processors must be {CHECKPOINT}, {NONE}, or a list of Transformers' logits"
            " processors such as [{_target_: transformers.NoRepeatNGramLogitsProcessor,"
            f" ngram_size: 3}}], got {processors!r}"
        )
    return Processors(added=tuple(map(_processor, processors)))


def _require_one_vocabulary(settings: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise UserError for a processor that looks for a source's tokens in a text of another
    vocabulary.
    """
    of_sources = [name for name in OF_SOURCES if name in settings]
    if of_sources and not checkpoint.one_vocabulary:
        raise UserError(
            f"{checkpoint.path} asks for {of_sources[0]}, which looks for the source's tokens in the"
            " text, but has a vocabulary for each; set decoding.processors=none, or list the other"
            " processors"
        )


def stop_of(decoding: DecodingSpec, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The stop strings of `decoding.stop`, and with `processors: checkpoint` those of the
    generation settings.

    Raises UserError as `StopStrings` does.
    """
    strings = decoding.stop
    if decoding.processors == CHECKPOINT:
        strings = (*strings, *stop_strings(checkpoint.generation.stop_strings))
    unique_strings = tuple(dict.fromkeys(strings))
    if unique_strings:
        StopStrings(unique_strings, checkpoint)  # refuses
    return unique_strings


def _processor(node: Any) -> LogitsProcessor:
    try:
        built = build(node, {})
    except ValueError as error:  # the processors check their values themselves
        raise UserError(f"decoding.processors: {error}") from error
    if not isinstance(built, LogitsProcessor):
        raise UserError(
            f"decoding.processors must list logits processors, each with its _target_, got {node!r}"
        )
    return built
