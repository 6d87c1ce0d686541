"""`generate` of Transformers: with settings of its own, and whether it may pad the texts of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedModel,
)

from bild_lab.engine.models.hf.admission import (
    distance,
    input_device,
    plain_tokens,
    prompt_length,
    source_tokens,
    tolerance,
)
from bild_lab.engine.models.hf.module_layers import cache_name
from bild_lab.engine.models.hf.positions import max_session_positions

PADDING = 8  # tokens beside the shorter text
CHECKED = 4  # new tokens, as padding may be read at the prompt or behind it


def with_settings(module: PreTrainedModel, settings: GenerationConfig) -> PreTrainedModel:
    """The module with other generation settings. All else is shared with it, and its own settings
    stay: it may be a user's model in memory, and other threads may decode with it.
    """
    same_module = object.__new__(type(module))
    vars(same_module).update(vars(module))  # copy.copy leaves out what module.compile() has made
    same_module.generation_config = settings
    return same_module


def cache_of_its_own(module: PreTrainedModel) -> dict[str, EncoderDecoderCache]:
    """The option of `generate` with an empty cache for an encoder–decoder: transformers 5.23 sizes
    its own by the depth of the encoder.
    """
    return {cache_name(module): EncoderDecoderCache(DynamicCache(), DynamicCache())}


@torch.inference_mode()
def reads_padding(module: PreTrainedModel) -> bool:
    """Whether a text gets other scores beside a longer one, as some modules read the padding: in
    transformers 5.23 those of XLNet, RWKV, MiniMax, and DeepSeek's sparse attention.

    A short text is decoded alone and in a batch. Scores of NaN tell nothing, and are found
    elsewhere.
    """
    if module.config.is_encoder_decoder:
        sources = source_tokens(module)
        short, long = sources[:2], sources
    else:
        length, room = prompt_length(module), max_session_positions(module)
        padding = PADDING if room is None else min(PADDING, room - length - CHECKED)
        drawn = plain_tokens(module.config, 2 * length + padding)
        short, long = drawn[:length], drawn[length:]
    alone, together = _logits(module, [short]), _logits(module, [short, long])
    # positions behind a token that another padding has chosen are of another text
    return distance(together, alone, module.dtype) > tolerance(module.dtype)


def _logits(module: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Float[Tensor, "n vocab"]:
    """The scores of the first row's new tokens, by `generate` over all rows."""
    encoder_decoder = module.config.is_encoder_decoder
    width = max(map(len, rows))
    gaps = [[0] * (width - len(row)) for row in rows]
    texts = [
        ([*row, *gap], [*[1] * len(row), *gap])
        if encoder_decoder
        else ([*gap, *row], [*gap, *[1] * len(row)])
        for row, gap in zip(rows, gaps, strict=True)
    ]
    input_ids, attention_mask = (
        torch.tensor(each, device=input_device(module)) for each in zip(*texts, strict=True)
    )
    settings = GenerationConfig(
        max_new_tokens=CHECKED,
        do_sample=False,
        pad_token_id=0,
        decoder_start_token_id=0 if encoder_decoder else None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    options = cache_of_its_own(module) if encoder_decoder else {}
    generated = with_settings(module, settings).generate(
        input_ids=input_ids, attention_mask=attention_mask, **options
    )
    return torch.stack(generated.logits)[:, 0]
