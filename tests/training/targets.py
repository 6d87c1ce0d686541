"""Random models that answer like trained ones: some answers end with an end token, some do not."""

from __future__ import annotations

from transformers import PreTrainedModel

from tests.tiny import END


def ending(model: PreTrainedModel, boost: float) -> PreTrainedModel:
    """The random model with a head that chooses the end token more often, and whose answers differ
    even when tied.
    """
    head = model.lm_head.weight.data
    if model.config.is_encoder_decoder:
        head *= 0.125 / head.std()
    head[END] *= boost
    return model
