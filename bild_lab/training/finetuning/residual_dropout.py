"""Dropout for architectures that have none, such as Llama."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from bild_lab.errors import UserError

OUTPUTS = ("o_proj", "down_proj")  # the last products of attention and feed-forward


def add_residual_dropout(model: PreTrainedModel, probability: float) -> None:
    """While the model trains, drop elements of what each sub-layer adds to the residual stream, and of the embeddings.

    Source: Attention Is All You Need (Vaswani et al., 2017), §5.4. probability: of each element; 0 changes nothing.
    Weights and decoding stay as they are. Raises UserError for an architecture with other sub-layers.
    """
    if not probability:
        return
    ends = [module for name, module in model.named_modules() if name.rpartition(".")[2] in OUTPUTS]
    layers = model.config.get_text_config().num_hidden_layers
    if len(ends) != len(OUTPUTS) * layers:
        raise UserError(
            f"train.residual_dropout knows layers with {' and '.join(OUTPUTS)}, such as Llama's; "
            f"{type(model).__name__} has others: set the dropout of its own configuration, such as "
            "+model.config.dropout_rate=0.1"
        )

    def drop(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, probability, module.training)

    for module in (model.get_input_embeddings(), *ends):
        module.register_forward_hook(drop)
