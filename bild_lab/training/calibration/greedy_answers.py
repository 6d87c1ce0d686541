"""A model's own greedy answers to many prompts, decoded in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache

from bild_lab.engine.hf_generation import plain_generation_config
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.training.batches import padded_with_mask


def greedy_answers(
    model: HuggingFaceModel,
    sources: Sequence[Source],
    max_new_tokens: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The tokens that `vanilla` emits for each prompt, decoded in batches of prompts of similar length.

    They are equal in float32; in bfloat16 the rounding of a batch may flip near-ties. advance: called after each
    batch with its number of prompts.
    """
    order = sorted(range(len(sources)), key=lambda index: -source_length(sources[index]))
    answers: list[list[int]] = [[]] * len(sources)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        for index, tokens in zip(batch, _generate(model, [sources[i] for i in batch], max_new_tokens), strict=True):
            answers[index] = tokens
        advance(len(batch))
    return answers


def source_length(source: Source) -> int:
    """Tokens that the model reads before it emits the first one."""
    return len(source.prompt) if source.encoder_ids is None else source.encoder_ids.shape[1]


@torch.inference_mode()
def _generate(model: HuggingFaceModel, sources: Sequence[Source], max_new_tokens: int) -> list[list[int]]:
    limits = Limits(0, max_new_tokens, model.checkpoint.end_tokens)
    settings = plain_generation_config(model, Request(sources[0], limits))
    model.module.generation_config = settings  # `generate` takes missing settings from here
    options: dict[str, Any] = {}
    if model.checkpoint.encoder_decoder:
        rows, prompt_length = [source.encoder_ids[0].tolist() for source in sources], 1
        start = torch.tensor([source.prompt for source in sources])  # [n 1]
        # transformers 5.23 sizes the cache it makes itself by the depth of the encoder
        options = {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}
        options["decoder_input_ids"] = start.to(model.device)
    else:
        rows = [source.prompt for source in sources]
        prompt_length = max(map(len, rows))
    side = "right" if model.checkpoint.encoder_decoder else "left"
    ids, mask = padded_with_mask([np.array(row) for row in rows], settings.pad_token_id, side)
    out = model.module.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), **options)
    return [limits.append([], row[prompt_length:]) for row in out.tolist()]
