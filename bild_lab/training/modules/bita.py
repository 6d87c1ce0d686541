"""Bi-directional tuning: mask tokens learn to predict the tokens after the next, with a frozen
model (BiTA §3.1).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bild_lab.engine.methods.bita import BitaAdapter
from bild_lab.engine.methods.module_folder import base_sizes
from bild_lab.engine.models.checkpoint.checkpoint import auto_class_of
from bild_lab.engine.models.hf.admission import input_device
from bild_lab.engine.models.hf.module_layers import cache_name
from bild_lab.errors import UserError, require_flag, require_whole
from bild_lab.training.modules.predictors import Predictors
from bild_lab.training.modules.states import ModuleSpec, SmallModule

ATTENTION = "bild_lab_bita"  # in Transformers' register of attention functions


@dataclass(frozen=True, kw_only=True)
class BitaSpec(ModuleSpec):
    """An adapter to train: the fields of `bita` in `conf/train_bita.yaml`.

    prompt: deep, shallow or none (BiTA Table 3). splits: split points of an answer in each epoch,
    all beside one another. consecutive: they follow one another from a random start, and each has
    the labels of all masks, as in the released code (`preprocess_efficient_supervised_dataset`);
    otherwise they are drawn from all of the answer.
    markov_rank: of a `MarkovHead` beside the masks; 0: none.
    """

    prompt: str
    prompt_tokens: int
    mask_tokens: int
    splits: int
    consecutive: bool
    markov_rank: int = 0

    group: ClassVar[str] = "bita"
    result_name: ClassVar[str] = "adapter"
    noun: ClassVar[str] = "BiTA adapter"

    def __post_init__(self) -> None:
        require_whole("bita.mask_tokens", self.mask_tokens, 1)
        require_whole("bita.splits", self.splits, 1)
        require_whole("bita.markov_rank", self.markov_rank, 0)
        require_flag("bita.consecutive", self.consecutive)

    @property
    def predictors(self) -> Predictors:
        """Mask j (from 0) after n tokens predicts token n + j + 1, as the last token's own row
        predicts token n.

        All masks have the same weight (BiTA Eq. 1).
        """
        ahead = self.mask_tokens if self.markov_rank else 0
        choices = {"per_answer": self.splits, "consecutive": self.consecutive, "ahead": ahead}
        return Predictors.in_turn("mask", 1, [1.0] * self.mask_tokens, **choices)

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError for an encoder–decoder, an unknown prompt, one without tokens, and
        attention out of reach or that a deep prompt does not fit.
        """
        self._fresh(config, {}, 0)
        with torch.device("meta"):
            outline = auto_class_of(config).from_config(copy.deepcopy(config), dtype=torch.bfloat16)
        # some look at values, which there are none of yet: to choose experts, or for padding
        with suppress(RuntimeError):
            require_reached(outline, self.prompt)

    def build(self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int) -> BitaModule:
        """Raises UserError if the model's attention cannot be given a prompt."""
        return BitaModule(base, self._fresh(base.config, origin, seed))

    def words(self, folder: Path) -> list[str]:
        return ["-m", "policy=bita", f"policy.adapter={folder}", "policy.top_k=1,3,5"]

    def _fresh(self, config: PreTrainedConfig, origin: Mapping[str, Any], seed: int) -> BitaAdapter:
        sizes = (self.prompt_tokens, self.mask_tokens)
        return BitaAdapter.fresh(config, origin, self.prompt, *sizes, seed, self.markov_rank)


@dataclass(frozen=True)
class PromptRows:
    """What the attention takes from the adapter in one forward. layers: collects the layers that
    used it, and the heads and dimensions of their keys and of their values.

    keys, values: [layers, kv_heads, P, head_dim], without rotary position; None without a deep
    prompt.
    """

    keys: Float[Tensor, "layers heads p dim"] | None
    values: Float[Tensor, "layers heads p dim"] | None
    layers: dict[int, tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)


class BitaModule(SmallModule):
    """Runs the mask tokens of many contexts of an answer through the frozen model, all beside one
    another.

    The tokens run first. They see neither prompt nor masks, so nothing that learns reaches them:
    they need no gradient, and leave keys and values as a cache. The rows after them are [shallow
    prompt, groups of M masks]. A mask of the group after n tokens sees these tokens, the prompt,
    itself and the masks before it in its group, and no other group (BiTA Figure 3). A group's masks
    have the positions n, n + 1, …; prompt rows have position 0.
    """

    def __init__(self, base: PreTrainedModel, adapter: BitaAdapter) -> None:
        super().__init__(base, adapter)
        require_reached(base, adapter.config.prompt)

    def forward(
        self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch contexts"]
    ) -> Float[Tensor, "batch contexts masks vocab"]:
        base, masks, device = self.base, self.weights.masks, input_ids.device
        (batch, groups), count, tokens = contexts.shape, masks.shape[0], input_ids.shape[1]
        cache = DynamicCache(config=base.config)
        options = {cache_name(base): cache, "use_cache": True}
        with torch.no_grad():
            base.base_model(input_ids, bita_prompt=PromptRows(None, None), **options)
        shallow, prompt = self._prompt()
        rows = torch.cat([shallow, masks.repeat(groups, 1)]).to(base.dtype).expand(batch, -1, -1)
        depth = torch.arange(count, device=device)
        beside = torch.zeros_like(contexts[:, :1]).expand(-1, shallow.shape[0])
        deep = 0 if prompt.keys is None else prompt.keys.shape[2]
        logits = base(
            inputs_embeds=rows,
            attention_mask=visible_rows(contexts, deep, tokens, shallow.shape[0], count)[:, None],
            position_ids=torch.cat([beside, (contexts[..., None] + depth).flatten(1)], 1),
            logits_to_keep=groups * count,
            bita_prompt=prompt,
            **options,
        ).logits.view(batch, groups, count, -1)
        markov = self.weights.markov
        return logits if markov is None else logits + markov.along(input_ids, contexts, count)

    def _prompt(self) -> tuple[Float[Tensor, "p dim"], PromptRows]:
        """The rows of a shallow prompt, and the keys and values of a deep one."""
        adapter = self.weights
        kind = adapter.config.prompt
        rows = adapter.prompt_embeddings if kind == "shallow" else adapter.masks[:0]
        deep = (adapter.prompt_keys, adapter.prompt_values) if kind == "deep" else (None, None)
        return rows, PromptRows(*deep)


def require_reached(base: PreTrainedModel, prompt: str) -> None:
    """Give a model our attention.

    Raises UserError unless every layer's goes through Transformers' interface and sees all rows, and
    for a deep prompt whose keys and values are not of the layers' sizes.
    """
    config, reached = base.config.get_text_config(), PromptRows(None, None)
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        cause = "its layers see only a window of the text"
    else:
        cause = "its attention does not go through Transformers' AttentionInterface"
        AttentionInterface.register(ATTENTION, attend_with_prompt)
        base.set_attn_implementation(ATTENTION)
        token_ids = torch.ones(1, 1, dtype=torch.long, device=input_device(base))
        # the model may not take the extra argument, or such a cache
        refusals = (UserError, TypeError, ValueError, AttributeError, IndexError)
        with torch.no_grad(), suppress(*refusals):
            # without a cache some look at values, which a model without memory has not
            cached = {cache_name(base): DynamicCache(config=config), "use_cache": True}
            base(input_ids=token_ids, bita_prompt=reached, **cached)
    if len(reached.layers) != config.num_hidden_layers:
        raise UserError(
            f"bi-directional tuning cannot reach into a {config.model_type} model: {cause}; "
            "choose one such as Llama or Qwen2"
        )
    sizes = base_sizes(base.config, "a BiTA adapter")
    expected = (sizes["kv_heads"], sizes["head_dim"])
    if prompt == "deep" and set(reached.layers.values()) != {(expected, expected)}:
        raise UserError(
            f"a deep prompt has keys and values of {expected[0]} heads with {expected[1]} dimensions,"
            f" but those of a {config.model_type} have other sizes; set bita.prompt=shallow"
        )


def attend_with_prompt(
    module: nn.Module,
    query: Float[Tensor, "batch heads m dim"],
    key: Float[Tensor, "batch kv_heads n dim"],
    value: Float[Tensor, "batch kv_heads n dim"],
    attention_mask: Bool[Tensor, "batch 1 m columns"] | None,
    bita_prompt: PromptRows,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over the deep prompt's rows before the others (an attention function of
    Transformers).

    attention_mask: of all columns, those of the prompt first; None: causal, among the rows that are
    passed.
    """
    layer = module.layer_idx
    bita_prompt.layers[layer] = (tuple(key.shape[1::2]), tuple(value.shape[1::2]))
    if bita_prompt.keys is not None:
        prompts = (bita_prompt.keys[layer], bita_prompt.values[layer])
        key, value = (
            torch.cat([prompt.to(rows).expand(rows.shape[0], -1, -1, -1), rows], 2)
            for prompt, rows in zip(prompts, (key, value), strict=True)
        )
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def visible_rows(
    contexts: Int[Tensor, "batch contexts"], deep: int, tokens: int, shallow: int, masks: int
) -> Bool[Tensor, "batch rows columns"]:
    """Which columns [deep prompt, tokens, rows] each row [shallow prompt, masks] sees (BiTA Figure
    3).
    """
    (batch, groups), device = contexts.shape, contexts.device
    first_column = deep + tokens  # the column of the first row
    rows = shallow + groups * masks
    visible = torch.zeros(batch, rows, first_column + rows, dtype=torch.bool, device=device)
    visible[:, :shallow, first_column : first_column + shallow] = causal(shallow, device)
    mask_rows = visible[:, shallow:]
    mask_rows[..., :deep] = mask_rows[..., first_column : first_column + shallow] = True
    in_context = (
        torch.arange(tokens, device=device) < contexts[..., None]
    )  # [batch contexts tokens]
    mask_rows[..., deep:first_column] = in_context.repeat_interleave(masks, 1)
    mask_rows[..., first_column + shallow :] = torch.block_diag(*[causal(masks, device)] * groups)
    return visible


def causal(count: int, device: torch.device) -> Bool[Tensor, "n n"]:
    """Every row sees itself and those before it."""
    return torch.ones(count, count, dtype=torch.bool, device=device).tril()
