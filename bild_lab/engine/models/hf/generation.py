"""`generate` of Transformers: with settings of its own, and whether it may pad the texts of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
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
NEW_TOKENS = 4  # that are compared, as padding may be read at the prompt or after it


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


class _ForcedTokens(LogitsProcessor):
    """Lets the new tokens of every row be these, whatever their scores. prompt_width: as in
    `generate`, of every row.
    """

    def __init__(self, tokens: Sequence[int], prompt_width: int) -> None:
        self._tokens, self._prompt_width = tokens, prompt_width

    def __call__(
        self, input_ids: Int[Tensor, "rows n"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        next_token = self._tokens[input_ids.shape[1] - self._prompt_width]
        forced_scores = torch.full_like(scores, -torch.inf)
        forced_scores[:, next_token] = 0.0
        return forced_scores


@torch.inference_mode()
def reads_padding(module: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether a text gets other scores beside a longer one, as some modules read the padding: in
    transformers 5.23 those of XLNet, RWKV, MiniMax, and DeepSeek's sparse attention.

    A short text is decoded alone and in a batch, with the same tokens: a rounding would choose
    others where two scores are close. dtype: the precision of the module's products, which under
    autocast is not that of its weights. Scores of NaN tell nothing, and are found elsewhere.
    """
    if module.config.is_encoder_decoder:
        sources = source_tokens(module)
        short, long, new = sources[:2], sources, plain_tokens(module.config, NEW_TOKENS)
    else:
        length, room = prompt_length(module), max_session_positions(module)
        padding = PADDING if room is None else min(PADDING, room - length - NEW_TOKENS)
        drawn = plain_tokens(module.config, 2 * length + padding)
        short, long, new = drawn[:length], drawn[length:], drawn[-NEW_TOKENS:]
    alone, together = _logits(module, [short], new), _logits(module, [short, long], new)
    return distance(together, alone, dtype) > tolerance(dtype)


def _logits(
    module: PreTrainedModel, rows: Sequence[Sequence[int]], new: Sequence[int]
) -> Float[Tensor, "n vocab"]:
    """The scores of the first row's new tokens, by `generate` over all rows."""
    encoder_decoder = module.config.is_encoder_decoder
    width = max(map(len, rows))
    input_ids, attention_mask = [], []
    for row in rows:
        gap, ones = [0] * (width - len(row)), [1] * len(row)
        input_ids.append([*row, *gap] if encoder_decoder else [*gap, *row])
        attention_mask.append([*ones, *gap] if encoder_decoder else [*gap, *ones])
    device = input_device(module)
    settings = GenerationConfig(
        max_new_tokens=len(new),
        do_sample=False,
        pad_token_id=0,
        decoder_start_token_id=0 if encoder_decoder else None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    forced = _ForcedTokens(new, 1 if encoder_decoder else width)
    options = cache_of_its_own(module) if encoder_decoder else {}
    generated = with_settings(module, settings).generate(
        input_ids=torch.tensor(input_ids, device=device),
        attention_mask=torch.tensor(attention_mask, device=device),
        logits_processor=LogitsProcessorList([forced]),
        **options,
    )
    return torch.stack(generated.logits)[:, 0]
