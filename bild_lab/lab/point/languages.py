"""The languages that a translation model reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from transformers import (
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerBase,
)

from bild_lab.engine.logits_processors import (
    STOP_STRINGS,
    sampling_settings,
    score_settings,
    search_settings,
)
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint, Prompt
from bild_lab.engine.request import Source
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError, warn_once

CHECKPOINT, NONE = "checkpoint", "none"  # values of decoding.processors
NEAREST = 5  # language codes named in a message


@dataclass(frozen=True)
class Languages:
    """Codes of the tokenizer's own table, such as de_DE (mBART), de (M2M-100) or deu_Latn (NLLB);
    None: as it comes.

    source: is marked in the encoder's text. target: its token starts the decoder's text, in mBART
    instead of the start token. This token is part of the prompt, so it does not count as a new one.
    """

    source: str | None = None
    target: str | None = None

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise UserError for a language that the checkpoint's tokenizer does not know."""
        for key, code in (("source", self.source), ("target", self.target)):
            if code is None:
                continue
            if not (known := languages_of(checkpoint.tokenizer)):
                raise UserError(
                    f"pair.{key}_language names a language of mBART, mBART-50, M2M-100 or NLLB, got"
                    f" {code!r} for {checkpoint.path} ({type(checkpoint.tokenizer).__name__});"
                    " leave it null"
                )
            if code not in known:
                nearest = get_close_matches(str(code), known, NEAREST, cutoff=0.0)
                raise UserError(
                    f"pair.{key}_language must be a language of {checkpoint.path}, got {code!r}; "
                    f"the nearest are {', '.join(nearest)}"
                )

    def text(self, model: LoadedModel, prompt: Prompt, max_tokens: int | None) -> Source:
        """The prompt as token ids, in these languages."""
        tokenizer = model.checkpoint.tokenizer
        if self.source is None:
            source = model.source(prompt, max_tokens)
        else:
            earlier_language = tokenizer.src_lang  # all decoders of the process share the tokenizer
            tokenizer.src_lang = self.source
            try:
                source = model.source(prompt, max_tokens)
            finally:
                tokenizer.src_lang = earlier_language
        if self.target is None:
            return source
        language_token = languages_of(tokenizer)[self.target]
        starts = () if isinstance(tokenizer, MBartTokenizer) else source.prompt
        return replace(source, prompt=(*starts, language_token))


def languages_of(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, int]:
    """Each language that a tokenizer can mark, with its token; none for other tokenizers."""
    if isinstance(tokenizer, MBartTokenizer | MBart50Tokenizer | M2M100Tokenizer):
        return tokenizer.lang_code_to_id
    # its languages are its further special tokens, and it has no table
    if isinstance(tokenizer, NllbTokenizer):
        return {
            code: tokenizer.convert_tokens_to_ids(code) for code in tokenizer.extra_special_tokens
        }
    return {}


def warn_of_what_is_left_out(
    processors: Any, languages: Languages, checkpoint: Checkpoint, sampled: bool = False
) -> None:
    """Log, once for each checkpoint, what it says about generation that will not be followed.

    sampled: whether texts are sampled.
    """
    if languages.target is None and processors != CHECKPOINT and languages_of(checkpoint.tokenizer):
        warn_once(f"NO TARGET LANGUAGE: {checkpoint.path} may write any; set pair.target_language")
    ignored = list(score_settings(checkpoint.generation)) if processors == NONE else []
    unsupported = list(search_settings(checkpoint.generation))
    if checkpoint.generation.stop_strings and processors != CHECKPOINT:
        (ignored if processors == NONE else unsupported).append(STOP_STRINGS)
    if ignored:
        warn_once(
            f"{checkpoint.path} asks for {', '.join(ignored)}; decoding.processors={CHECKPOINT}"
            " follows it"
        )
    if unsupported:
        warn_once(
            f"{checkpoint.path} sets {', '.join(unsupported)} for `generate`, which is left out: one"
            " text is decoded, up to decoding.max_new_tokens and decoding.stop"
        )
    # a list is chosen, with them or without
    of_sampling = list(sampling_settings(checkpoint.generation)) if sampled else []
    if of_sampling and isinstance(processors, str):
        warn_once(
            f"{checkpoint.path} asks for {', '.join(of_sampling)} where it samples, which is left"
            " out; a list of decoding.processors may have it, such as"
            " [{_target_: transformers.MinPLogitsWarper, min_p: 0.05}]"
        )
