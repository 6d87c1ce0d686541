"""Drafts by a layer that continues the target's hidden states: EAGLE-1, EAGLE-2's dynamic trees,
and EAGLE-3.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.draft import Tree
from bild_lab.engine.methods.eagle.module import EAGLE3, Eagle, joined_states
from bild_lab.engine.methods.eagle.state_trees import StateSession, StateTreeDrafter
from bild_lab.engine.models.checkpoint.vocabulary import head_bias
from bild_lab.engine.models.native.attention import KeyValueCache, place_rows
from bild_lab.engine.models.native.layers import SPARE_ROWS
from bild_lab.engine.request import Request
from bild_lab.engine.session import (
    ALL_LOGITS,
    OutputSpec,
    RowsOrTokens,
    Scores,
    Session,
    as_rows,
    on_device,
)
from bild_lab.engine.trace import Forward


class EagleDrafter(StateTreeDrafter):
    """A tree by EAGLE's layer.

    In every round the target's states of the tokens accepted before go through the layer, in place
    of those that it drafted from. Its forwards are recorded as those of a Llama of one layer; the
    fusion is not.
    """

    _heads: Eagle

    def target_outputs(self) -> OutputSpec:
        config = self._heads.config
        is_eagle3 = config.variant == EAGLE3
        if is_eagle3:
            self._target.require_layers("EAGLE-3")
        return OutputSpec(head_input=not is_eagle3, hidden=config.target_layers, prompt=True)

    def open_session(self, request: Request, target: Session) -> EagleSession:
        self._heads.attach(
            *self._target.vocabulary_weights(),
            head_bias(self._target.checkpoint, self._target.dtype, self._target.device),
        )
        return EagleSession(self._heads, request.max_length, target.forwards)

    def target_states(self, scores: Scores) -> Float[Tensor, "m states"]:
        return joined_states(self._heads.config.variant, scores.head_input, scores.hidden)


class EagleSession(StateSession):
    """One text in an EAGLE: pairs of the target's state and the next token, then drafted ones.

    Rows of a tree read the layer's own output at their parent. `receive` drops them.
    """

    def __init__(self, eagle: Eagle, room: int, forwards: list[Forward]) -> None:
        self.forwards = forwards
        self._eagle, layer, weight = eagle, eagle.config.layer, eagle.fc.weight
        shape = (1, layer.num_key_value_heads, room + SPARE_ROWS, layer.head_dim)
        self._cache = KeyValueCache(shape, weight.dtype, weight.device)
        self._pairs = 0
        self._received = []
        # the outputs of the last pair and of the tree's rows
        self._outputs = weight.new_empty(0, layer.hidden_size)

    @property
    def length(self) -> int:
        return self._pairs + 1

    @torch.inference_mode()
    def receive(self, states: Float[Tensor, "m states"]) -> None:
        self._received.append(self._eagle.fused(states))

    @torch.inference_mode()
    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        rows = as_rows(rows)
        tokens, tree = on_device(rows.tokens, self._cache.keys.device), rows.tree
        count = tokens.shape[0]
        if tree is None:
            states, start = torch.cat(self._received), self._pairs
            self._received, self._pairs = [], start + count
        else:
            start = self._pairs + len(tree) - count
            states = self._outputs[tree.parents[-count:] + 1]
        outputs = self._run(tokens, states, start, tree)
        self._outputs = outputs[-1:] if tree is None else torch.cat([self._outputs, outputs])
        shown = outputs if output_spec.logits is None else outputs[-output_spec.logits :]
        self.forwards.append(
            Forward(self._eagle.config.layer, rows=count, cached=start, scored=shown.shape[0])
        )
        return Scores(self._eagle.logits(shown))

    def _run(
        self,
        tokens: Int[Tensor, " m"],
        states: Float[Tensor, "m dim"],
        start: int,
        tree: Tree | None,
    ) -> Float[Tensor, "m dim"]:
        count = tokens.shape[0]
        if start + count > self._cache.capacity:
            self._cache = self._cache.grown(2 * (start + count))
        cache, placed = self._cache, place_rows(start, count, tokens.device, tree)

        def store(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            cache.write(0, placed, keys[0].transpose(0, 1), values[0].transpose(0, 1))
            return cache.keys[:, :, : placed.stop], cache.values[:, :, : placed.stop]

        mask = None if placed.visible is None else placed.visible[None, None]
        return self._eagle(
            self._eagle.embed(tokens)[None], states[None], placed.positions, store, mask
        )[0]
