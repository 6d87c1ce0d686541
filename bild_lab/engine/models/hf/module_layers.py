"""The decoder layers of a module of Transformers, with the cache of one text."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from bild_lab.engine.models.cached_session import ForwardPass, Layers, concatenated_scores
from bild_lab.engine.models.checkpoint.checkpoint import decoder_depth
from bild_lab.engine.models.checkpoint.vocabulary import biased
from bild_lab.engine.models.hf.admission import input_device
from bild_lab.engine.models.hf.layer_control import (
    Plan,
    current_plan,
    following,
    sets_positions,
    wrap_layers,
)
from bild_lab.engine.models.hf.slot_cache import SlotCache, Snapshots
from bild_lab.engine.models.placed_rows import place_rows
from bild_lab.engine.request import Source
from bild_lab.engine.session import Prefix, Scores
from bild_lab.errors import UserError

NO_BRANCHES = (
    "a {} has layers whose state holds all rows that ran, so its drafts cannot branch; use a policy"
    " that drafts chains"
)
NO_SINGLE_LAYERS = (
    "a {} has layers whose state holds all rows that ran, so they all run together; choose a policy"
    " that runs whole models, such as speculative or prompt_lookup"
)

# the second and third until transformers 5.23, and in models that bring their own code
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


class ModuleLayers(Layers):
    """A module's decoder layers and the cache of one sequence. A prefix fills the cache's first
    slots.

    one_by_one: run rows after the prompt each in a forward of its own, for a recurrent module that
    begins several rows from an empty state. bias: added to the scores (`head_bias`). Raises
    UserError for a module that takes no cache.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        source: Source,
        prefix: Prefix | None = None,
        one_by_one: bool = False,
        bias: Float[Tensor, " vocab"] | None = None,
    ) -> None:
        self.module, self.config = module, module.config
        self.device, self.depth = input_device(module), decoder_depth(module.config)
        self.reserved = 0 if prefix is None else prefix.length
        self.source = source.encoder_length
        self._prefix = prefix
        self._inputs = inspect.signature(module.forward).parameters
        self._cache_name = cache_name(module)
        self._encoded: dict[str, Any] = {}
        self._cache = SlotCache(module.config)
        self._one_by_one, self._bias = one_by_one, bias
        self._snapshots = None if self._cache.cuts else Snapshots(self._cache)
        self._past: SlotCache | EncoderDecoderCache = self._cache
        self._ids_name = "input_ids"
        if source.encoder_ids is not None:
            self._past = EncoderDecoderCache(self._cache, DynamicCache())
            self._ids_name = "decoder_input_ids"
            self._encoded["encoder_outputs"] = module.get_encoder()(
                input_ids=source.encoder_ids, return_dict=True
            )
        with following(Plan(start=0)):
            for layer in range(0 if self.reserved == 0 else prefix.keys.shape[0]):
                self._cache.update(prefix.keys[None, layer], prefix.values[None, layer], layer)
        self._keeps_logits = "logits_to_keep" in self._inputs
        wrap_layers(module)

    @property
    def stored(self) -> set[int]:
        """How many rows the layers with keys and values hold; empty if states take the place of all
        of them.
        """
        return self._cache.lengths

    def run(self, forward_pass: ForwardPass) -> Scores:
        if self._snapshots is not None:
            return self._run_from_state(forward_pass, self._snapshots)
        plan = Plan(
            forward_pass.start,
            forward_pass.layers,
            forward_pass.states,
            forward_pass.hidden,
            forward_pass.fill,
            stop=not forward_pass.read,
            skipped=forward_pass.skipped,
        )
        # a chain needs a mask too where there is a prefix, to hide it
        needs_mask = forward_pass.tree is not None or self.reserved
        inputs = self._place(forward_pass, plan) if needs_mask else {}
        return self._run(forward_pass, plan, inputs)

    def forwards(self, start: int, count: int) -> list[tuple[int, int]]:
        if self._snapshots is None:
            return [(start, count)]
        restart, end = self._snapshots.restart_slot(start), start + count
        if self._one_by_one and restart:
            return [(slot, 1) for slot in range(restart, end)]
        return [(restart, end - restart)]

    def scored(self, forward_pass: ForwardPass) -> int:
        """Some models of Transformers run their head for all rows."""
        runs_for_all = forward_pass.read and not self._keeps_logits
        return forward_pass.count if runs_for_all else forward_pass.read

    def gather(self, start: int, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        if self._snapshots is not None:
            raise UserError(NO_BRANCHES.format(self.config.model_type))
        self._cache.gather(
            start, list(rows), range(len(self._cache.layers)) if layers is None else layers
        )

    def _run_from_state(self, forward_pass: ForwardPass, snapshots: Snapshots) -> Scores:
        """Run a chain through layers whose states cannot be cut, after the rows that have to run
        again.
        """
        if forward_pass.tree is not None or self.reserved:
            raise UserError(NO_BRANCHES.format(self.config.model_type))
        if forward_pass.layers is not None or forward_pass.states is not None:
            raise UserError(NO_SINGLE_LAYERS.format(self.config.model_type))
        # 1. the rows of each forward
        forwards = self.forwards(forward_pass.start, forward_pass.count)
        repeated_tokens = snapshots.go_back(forward_pass.start)
        tokens = forward_pass.tokens
        if repeated_tokens is not None:
            tokens = torch.cat([repeated_tokens, tokens])
        tokens_by_forward = tokens.split([count for _, count in forwards])
        # 2. the forwards
        scores_by_forward = []
        for (start, count), rows in zip(forwards, tokens_by_forward, strict=True):
            snapshots.add(rows)
            part_pass = replace(
                forward_pass, start=start, tokens=rows, logits=min(count, forward_pass.read)
            )
            # some modules count from 0
            positions = torch.arange(start, start + count, device=self.device)[None]
            inputs = {"position_ids": positions} if "position_ids" in self._inputs else {}
            plan = Plan(start, hidden=forward_pass.hidden, stop=not forward_pass.read)
            scores_by_forward.append(self._run(part_pass, plan, inputs))
        # 3. the outputs of the rows that were asked for
        scores = concatenated_scores(scores_by_forward)
        logits = head_inputs = None
        if forward_pass.logits:
            logits = scores.logits[-forward_pass.logits :]
        if forward_pass.head_input:
            head_inputs = scores.head_input[-forward_pass.head_input :]
        hidden = tuple(states[-forward_pass.count :] for states in scores.hidden)
        return Scores(logits, head_inputs, hidden)

    def _run(self, forward_pass: ForwardPass, plan: Plan, inputs: dict[str, Any]) -> Scores:
        reads_head = head_input(self.module, plan) if forward_pass.head_input else nullcontext([])
        logits = None
        with reads_head as read, following(plan):
            logits = self.module(
                **self._tokens(forward_pass.tokens),
                **self._encoded,
                **inputs,
                **({"logits_to_keep": forward_pass.read} if self._keeps_logits else {}),
                **{self._cache_name: self._past},
                use_cache=True,
            ).logits
        hidden = tuple(plan.outputs[depth].to(self.device) for depth in forward_pass.hidden)
        if not forward_pass.read:
            return Scores(None, hidden=hidden)
        logits = biased(logits[0, -forward_pass.logits :], self._bias)
        read_there = read[0][0, -forward_pass.head_input :].to(logits.device) if read else None
        return Scores(logits, read_there, hidden)

    def _tokens(self, fed: Int[Tensor, " m"]) -> dict[str, Tensor]:
        """The module's inputs: token ids, or embeddings if the prefix has masks (ids beyond the
        vocabulary).
        """
        if self._prefix is None or self._prefix.masks is None:
            return {self._ids_name: fed[None]}
        look_up = self.module.get_input_embeddings()
        return {"inputs_embeds": self._prefix.embed(fed, look_up.num_embeddings, look_up)[None]}

    def _place(self, forward_pass: ForwardPass, plan: Plan) -> dict[str, Any]:
        """Mask and positions: every row attends to the text and its own ancestors, at its logical
        position.
        """
        module, probe = self.module, None
        if self._prefix is not None:
            probe = self._prefix.probe(
                forward_pass.tokens, module.get_input_embeddings().num_embeddings
            )
        rows = place_rows(
            forward_pass.start,
            forward_pass.count,
            forward_pass.tokens.device,
            forward_pass.tree,
            self.reserved,
            probe,
        )
        if rows.visible is None:
            return {}
        if not module.config.is_encoder_decoder:
            plan.branches = rows
            return {"position_ids": rows.positions[None]} if "position_ids" in self._inputs else {}
        if not sets_positions(module):
            raise UserError(
                "tree drafts need a T5, mT5 or decoder-only target, got"
                f" {module.config.model_type}; use a chain drafter"
            )
        plan.distances = rows.key_positions[None, :] - rows.positions[:, None]
        return {"decoder_attention_mask": additive(rows.visible, module.dtype)[None, None]}


def cache_name(module: PreTrainedModel) -> str:
    """The parameter of its forward that takes a module's cache. Raises UserError if there is none."""
    inputs = inspect.signature(module.forward).parameters
    name = next((name for name in CACHE_NAMES if name in inputs), None)
    if name is None:
        raise UserError(
            f"a {module.config.model_type} takes no cache, so no row can be added to a text that"
            " has run; use policy=hf_generate"
        )
    return name


def additive(visible: Bool[Tensor, "m n"], dtype: torch.dtype) -> Float[Tensor, "m n"]:
    """The mask as a term added to attention scores.

    A boolean 4-D mask is silently wrong with eager attention.
    """
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


@contextmanager
def head_input(module: PreTrainedModel, plan: Plan) -> Iterator[list[Tensor]]:
    """Collect the head's inputs in the forwards inside that follow the plan, [1, m, dim] each; nothing
    if the model has no head. Another thread's forwards of the same module follow another plan.
    """
    read: list[Tensor] = []

    def collect(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if current_plan() is plan:
            read.append(inputs[0])

    head = module.get_output_embeddings()
    hook = None if head is None else head.register_forward_pre_hook(collect)
    try:
        yield read
    finally:
        if hook is not None:
            hook.remove()
