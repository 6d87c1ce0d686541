"""The scores that a module's own forward makes of its decoder's states, or of its head's products:
some models take a part of these (Granite, Cohere), or as much as a cap leaves (Gemma 2).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast


def scores_of_states(
    module: PreTrainedModel, normed: Float[Tensor, "batch n dim"]
) -> Float[Tensor, "batch n vocab"]:
    """The scores of a module shaped like Llama's after these states, its decoder's last, normed."""
    return _forward_without(module, {module.base_model: _States(last_hidden_state=normed)})


def scores_of_products(
    module: PreTrainedModel, products: Float[Tensor, "*rows vocab"]
) -> Float[Tensor, "*rows vocab"]:
    """The scores of a module whose head gave these, for all of its tokens or for some. They are the
    products in an encoder–decoder, and where decoder and head are no parts of their own.
    """
    decoder, head = module.base_model, module.get_output_embeddings()
    if module.config.is_encoder_decoder or not {decoder, head}.issubset(module.children()):
        return products
    states = _States(last_hidden_state=products.new_empty(1, 1, 1))  # the head is not run
    return _forward_without(module, {decoder: states, head: products})


def _forward_without(module: PreTrainedModel, answers: Mapping[nn.Module, Any]) -> Tensor:
    """The scores of the module's forward, without running the parts with an answer."""
    answered = copy.copy(module)  # other threads may run the module itself
    answered._modules = {
        name: _Answer(part, answers[part]) if part in answers else part
        for name, part in module._modules.items()
    }
    token = torch.zeros(1, 1, dtype=torch.long)
    # not a forward that a tool put in its place, as Accelerate does: that one runs the module
    return type(module).forward(answered, input_ids=token, use_cache=False).logits


class _Answer:
    """In place of a part whose answer is known; all else is the part's."""

    def __init__(self, part: nn.Module, answer: Any) -> None:
        self._part, self._answer = part, answer

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._answer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        return self if isinstance(value, nn.Module) else value  # OPT calls a part of its decoder


class _States(MoeModelOutputWithPast):
    """A decoder's states; None for whatever else a forward passes on."""

    def __getattr__(self, name: str) -> None:
        return None
