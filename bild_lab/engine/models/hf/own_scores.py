"""What a module's own forward makes of its decoder's states, and of its head's products.

Some models score by a part of these products (Granite, Cohere), or by as much as a cap leaves
(Gemma 2, T5Gemma), or add a bias (Phi, Marian).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast


def scores_of_states(
    module: PreTrainedModel, normed: Float[Tensor, "batch n dim"]
) -> Float[Tensor, "batch n vocab"]:
    """The scores of a module shaped like Llama's after these states, its decoder's last, normed."""
    return _forward_with(module, {module.base_model: _giving(_States(last_hidden_state=normed))})


def scores_of_products(
    module: PreTrainedModel,
    products: Float[Tensor, "*rows vocab"],
    tokens: Int[Tensor, " vocab"] | None = None,
) -> Float[Tensor, "*rows vocab"]:
    """The scores of a module whose head's weights give these. tokens: their ids; None: the first
    ones, or all.
    """
    bias = getattr(module.get_output_embeddings(), "bias", None)
    if bias is None:  # BART and its kin keep it beside the head, [1, vocab]
        bias = getattr(module, "final_logits_bias", None)
    if bias is not None:
        of_tokens = slice(products.shape[-1]) if tokens is None else tokens
        products = products + bias.detach().flatten().to(products)[of_tokens]
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
    width = module.config.get_text_config(decoder=True).hidden_size
    row = outputs.new_zeros(1, 1, width, dtype=module.dtype)
    states, head = _States(last_hidden_state=row), _part_with_head(module)
    return _forward_with(module, {module.base_model: _giving(states), head: _giving(outputs)})


def _has_parts(module: PreTrainedModel) -> bool:
    """Whether its decoder and what holds its head are parts of its own; of encoder–decoders, only
    whether there is anything behind the head, as in a T5Gemma.
    """
    text = module.config.get_text_config(decoder=True)
    behind_head = getattr(text, "final_logit_softcapping", None) is not None
    has_parts = module.base_model in module.children() and _part_with_head(module) is not None
    return has_parts and (behind_head or not module.config.is_encoder_decoder)


def _part_with_head(module: PreTrainedModel) -> nn.Module | None:
    """The part of a module that its head is, or lies in: T5Gemma's is in one of its own."""
    head = module.get_output_embeddings()
    parts = (part for part in module.children() if part is not module.base_model)
    return next((part for part in parts if head in part.modules()), None)


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
