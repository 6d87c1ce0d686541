"""What mask tokens predict, by one forward of the Hugging Face module over everything, and
Algorithm 1 over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from bild_lab.engine.methods.bita import BitaAdapter
from bild_lab.engine.models.hf.module_layers import cache_name
from tests.stubs import NextLogits

MaskLogits = Callable[[list[int]], Tensor]  # [M, vocab] of a group behind these tokens


def uncached_masks(module: PreTrainedModel, adapter: BitaAdapter) -> MaskLogits:
    """The logits of a whole group behind a text: rows of the text, then of the masks, with nothing
    cached of either.

    A deep prompt stands in the cache, as there is no other way to hand it in; a shallow one runs as
    rows of its own, all at position 0. Who sees whom is written down cell by cell.
    """
    config = adapter.config
    deep = config.prompt_tokens if config.prompt == "deep" else 0
    shallow = config.prompt_tokens if config.prompt == "shallow" else 0

    @torch.inference_mode()
    def mask_logits(tokens: list[int]) -> Tensor:
        words = module.get_input_embeddings()(torch.tensor(tokens))
        rows = torch.cat(
            [*([adapter.prompt_embeddings] if shallow else []), words, adapter.masks]
        ).to(words.dtype)
        kinds = ["prompt"] * shallow + ["text"] * len(tokens) + ["mask"] * config.mask_tokens
        visible = torch.zeros(len(kinds), deep + len(kinds), dtype=torch.bool)
        for row, kind in enumerate(kinds):
            visible[row, :deep] = kind == "mask"
            for other in range(row + 1):
                visible[row, deep + other] = kind == "mask" or kinds[other] == kind
        hidden = torch.full_like(visible, torch.finfo(words.dtype).min, dtype=words.dtype)
        positions = [0] * shallow + list(range(len(tokens) + config.mask_tokens))
        cache = DynamicCache()
        for layer in range(config.layers if deep else 0):
            prefix = (
                each[None, layer].to(words.dtype)
                for each in (adapter.prompt_keys, adapter.prompt_values)
            )
            cache.update(*prefix, layer)
        out = module(
            inputs_embeds=rows[None],
            attention_mask=hidden.masked_fill(visible, 0.0)[None, None],
            position_ids=torch.tensor([positions]),
            **{cache_name(module): cache},
        )
        return out.logits[0, -config.mask_tokens :]

    return mask_logits


@dataclass(frozen=True)
class Step:
    """One forward of Algorithm 1: the candidates drafted at each depth, and the tokens that it
    appended.
    """

    candidates: list[list[int]]
    appended: list[int]


def algorithm_1(
    next_logits: NextLogits,
    masks: MaskLogits,
    prompt: list[int],
    widths: list[int],
    length: int,
    full: bool,
) -> list[Step]:
    """Algorithm 1 of BiTA, line by line and without any cache, until `length` tokens are there.

    full: children of every candidate rather than of the most likely alone. Where fewer tokens than
    the tree is deep may still come, the tree is cut there.
    """

    def most_likely(tokens: list[int]) -> list[list[int]]:
        rows = masks(tokens)
        return [rows[i].topk(width).indices.tolist() for i, width in enumerate(widths)]

    output: list[int] = []
    steps: list[Step] = []
    candidates: list[list[int]] = []
    while len(output) < length:
        candidates = candidates[: length - len(output)]
        a = int(next_logits([*prompt, *output]).argmax())
        appended = []
        for level in candidates:
            if a not in level:
                break
            appended.append(a)
            a = int(next_logits([*prompt, *output, *appended]).argmax())
            if appended[-1] != level[0] and not full:
                break
        steps.append(Step(candidates, [*appended, a]))
        candidates = most_likely([*prompt, *output, *appended])
        output += [*appended, a]
    return steps


def straightforward(
    next_logits: NextLogits, masks: MaskLogits, prompt: list[int], count: int, length: int
) -> list[Step]:
    """Figure 4: one group of masks behind the text so far, which does not see the draft beside
    it.
    """
    output: list[int] = []
    steps: list[Step] = []
    draft: list[int] = []
    while len(output) < length:
        draft = draft[: length - len(output)]
        context = [*prompt, *output]
        predicted = masks(context)[:count].argmax(-1).tolist()
        a = int(next_logits(context).argmax())
        appended = []
        for token in draft:
            if a != token:
                break
            appended.append(a)
            a = int(next_logits([*context, *appended]).argmax())
        steps.append(Step([[token] for token in draft], [*appended, a]))
        draft = predicted[len(appended) :]  # those for tokens that are there now are of no more use
        output += [*appended, a]
    return steps
