"""What a module's own forward makes of its decoder's states, and of its head's products.

Some models score by a part of these products (Granite, Cohere), or by as much as a cap leaves
(Gemma 2), or add a bias (Phi); the head of others reads a part of the states (MiniCPM 3).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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
    return _forward_with(module, {module.base_model: _giving(_States(last_hidden_state=normed))})


def head_inputs(
    module: PreTrainedModel, normed: Float[Tensor, "batch n dim"]
) -> Float[Tensor, "batch n dim"]:
    """What a module's head reads of these states, its decoder's last, normed; the states themselves
    where `_has_parts` is false.
    """
    if not _has_parts(module):
        return normed
    read: list[Tensor] = []

    def keep(rows: Tensor) -> Tensor:
        read.append(rows)
        return rows

    states = _States(last_hidden_state=normed)
    head = module.get_output_embeddings()
    _forward_with(module, {module.base_model: _giving(states), head: keep})
    return read[0]


def scores_of_products(
    module: PreTrainedModel, products: Float[Tensor, "*rows vocab"]
) -> Float[Tensor, "*rows vocab"]:
    """The scores of a module whose head's weights give these, for all of its tokens or for the first
    ones.
    """
    bias = getattr(module.get_output_embeddings(), "bias", None)
    if bias is not None:
        products = products + bias.detach()[: products.shape[-1]].to(products)
    return scores_of_outputs(module, products)


def scores_of_outputs(
    module: PreTrainedModel, outputs: Float[Tensor, "*rows vocab"]
) -> Float[Tensor, "*rows vocab"]:
    """The scores of a module whose head gives these, for all of its tokens or for some; the outputs
    themselves where `_has_parts` is false.
    """
    if not _has_parts(module):
        return outputs
    # the head is not run, but what some models have before it is, such as a ModernBERT
    width = module.config.get_text_config().hidden_size
    row = outputs.new_zeros(1, 1, width, dtype=module.dtype)
    states, head = _States(last_hidden_state=row), module.get_output_embeddings()
    return _forward_with(module, {module.base_model: _giving(states), head: _giving(outputs)})


def _has_parts(module: PreTrainedModel) -> bool:
    """Whether it is a decoder-only model whose decoder and head are parts of its own."""
    parts = {module.base_model, module.get_output_embeddings()}
    return not module.config.is_encoder_decoder and parts.issubset(module.children())


def _giving(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _forward_with(module: PreTrainedModel, runs: Mapping[nn.Module, Callable[..., Any]]) -> Tensor:
    """The scores of the module's forward, with these functions in place of some of its parts."""
    changed = copy.copy(module)  # other threads may run the module itself
    changed._modules = {
        name: _StandIn(part, runs[part]) if part in runs else part
        for name, part in module._modules.items()
    }
    token = torch.zeros(1, 1, dtype=torch.long)
    # not a forward that a tool put in its place, as Accelerate does: that one runs the module
    return type(module).forward(changed, input_ids=token, use_cache=False).logits


class _StandIn:
    """In place of a part, runs something else; all else is the part's."""

    def __init__(self, part: nn.Module, run: Callable[..., Any]) -> None:
        self._part, self._run = part, run

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._run(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        return self if isinstance(value, nn.Module) else value  # OPT runs a part of its decoder


class _States(MoeModelOutputWithPast):
    """A decoder's states; None for whatever else a forward passes on."""

    def __getattr__(self, name: str) -> None:
        return None
