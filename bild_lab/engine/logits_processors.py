"""Transformers' own logits processors inside the loop: they change scores before a token is
chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
)
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from bild_lab.engine.request import Limits, Source
from bild_lab.errors import UserError

# Fields of a generation configuration that become processors, with the values that switch them off.
SWITCHED_OFF: dict[str, tuple[Any, ...]] = {
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "guidance_scale": (1,),
    "watermarking_config": (),
}
# Fields that change the text of `generate` in other ways, with the values that switch them off.
SEARCH: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "token_healing": (False,),
    "max_length": (20,),  # what Transformers writes where nobody asked for a length
    "max_time": (),
}
# Fields that leave out tokens where `generate` samples, beside those that `Sampling` has.
OF_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (1.0,),
}
STOP_STRINGS = "stop_strings"
# fields whose processors read the encoder's ids as the text's own
OF_SOURCES = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
REFUSED = ("guidance_scale", "watermarking_config")
STATEFUL = (
    ClassifierFreeGuidanceLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def score_settings(generation: GenerationConfig) -> dict[str, Any]:
    """The fields of a generation configuration that would change scores, with their values."""
    return _switched_on(generation, SWITCHED_OFF)


def search_settings(generation: GenerationConfig) -> dict[str, Any]:
    """The fields that would change the text of `generate` by another search or length, with their
    values.
    """
    return _switched_on(generation, SEARCH)


def sampling_settings(generation: GenerationConfig) -> dict[str, Any]:
    """The fields that would leave out tokens of a sampled text, other than top-k and top-p, with
    their values.
    """
    return _switched_on(generation, OF_SAMPLING)


def _switched_on(
    generation: GenerationConfig, off_values: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    values = {name: getattr(generation, name, None) for name in off_values}
    return {
        name: value
        for name, value in values.items()
        if value is not None and value not in off_values[name]
    }


@dataclass(frozen=True)
class Processors:
    """Processors that target and drafter pass through alike; for a text they become a list of
    Transformers.

    settings: fields of a generation configuration, as `score_settings` finds them. added: further
    processors, which must depend on the text and the scores alone. Raises UserError for processors
    that run the model again or remember earlier calls.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    added: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        refused = [name for name in REFUSED if name in self.settings]
        for processor in self.added:
            if isinstance(processor, STATEFUL):
                refused.append(type(processor).__name__)
        if refused:
            raise UserError(
                f"a processor must depend on the text and its scores alone, got {refused[0]}, which"
                " runs the model again or remembers earlier calls; set decoding.processors=none,"
                " or list the other processors"
            )

    def __bool__(self) -> bool:
        return bool(self.settings or self.added)

    def for_text(
        self, source: Source, limits: Limits, config: PreTrainedConfig
    ) -> LogitsProcessorList | None:
        """The list that `generate` would build for this text; None if it is empty.

        Its processors are the text's own, as they may remember the first scores that they get.
        """
        settings = GenerationConfig(**self.settings)
        prompt_length, device = limits.prompt_length, source.device
        settings.max_length = prompt_length + limits.max_new_tokens
        if settings.min_new_tokens is not None:
            settings.min_length = prompt_length + settings.min_new_tokens
        end_tokens = torch.tensor(sorted(limits.end_tokens), device=device)
        settings._eos_token_tensor = end_tokens if limits.end_tokens else None
        builder = GenerationMixin()
        builder.config = config
        encoder_ids = source.encoder_ids
        if encoder_ids is None:
            encoder_ids = torch.tensor([source.prompt], device=device)
        processors = builder._get_logits_processor(
            settings,
            input_ids_seq_length=prompt_length,
            encoder_input_ids=encoder_ids,
            logits_processor=LogitsProcessorList(map(copy, self.added)),
            device=device,
        )
        return processors or None
