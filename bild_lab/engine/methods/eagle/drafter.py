"""Drafts by a layer that continues the target's hidden states: EAGLE-1, EAGLE-2's dynamic trees,
and EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.draft import Draft, Tree, Verdict, empty_draft
from bild_lab.engine.methods.candidate_trees import TreeFile
from bild_lab.engine.methods.eagle.module import EAGLE3, Eagle, joined_states
from bild_lab.engine.methods.eagle.static_trees import CHAIN, StaticTree, named_nodes
from bild_lab.engine.methods.speculative.draft_tree import (
    draft_of_tree,
    grow_tree,
    tree_spec_of_policy,
    tree_spec_of_round,
)
from bild_lab.engine.methods.state_layers import states_of_text
from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.models.native.layers import SPARE_ROWS
from bild_lab.engine.models.placed_rows import place_rows
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import (
    ALL_LOGITS,
    LoadedModel,
    OutputSpec,
    RowsOrTokens,
    Scores,
    Session,
    as_rows,
    on_device,
)
from bild_lab.engine.trace import Forward


class EagleDrafter(Drafter):
    """A tree of the most likely continuations of the target's states, by EAGLE's layer.

    The first round of a text drafts nothing: the states of the prompt come out of its verification.
    In every later round the target's states of the tokens accepted before go through the layer, in
    place of those that it drafted from. Its forwards are recorded as those of a Llama of one layer;
    the fusion is not. A token's place in a tree never depends on a random number, so each counts as
    certain (q is one-hot), and speculative sampling is lossless.

    tree: dynamic (EAGLE-2 §4: nodes, width, children and min_prob are as in `ModelTreeDrafter`),
    eagle_tree (EAGLE-1's), chain, or full_tree and efficient_tree with `top_k` candidates, one
    number or one for each depth, or the file of a fitted tree. window: the longest branch. Raises
    UserError for what cannot be.
    """

    def __init__(
        self,
        target: LoadedModel,
        heads: Eagle,
        tree: TreeFile,
        window: int,
        top_k: int | Sequence[int] = 3,
        nodes: int = 15,
        width: int = 4,
        children: int = 3,
        min_prob: float = 0.0,
    ) -> None:
        config = heads.config
        is_eagle3 = config.variant == EAGLE3
        self._target, self._heads = target, heads
        self._tree_spec = tree_spec_of_policy(nodes, window, width, children, min_prob)
        if is_eagle3:
            target.require_layers("EAGLE-3")
        self.required_outputs = OutputSpec(
            head_input=not is_eagle3, hidden=config.target_layers, prompt=True
        )
        static_nodes = named_nodes(tree, top_k, window, config.vocabulary)
        self._static = None if static_nodes is None else StaticTree(static_nodes, target.device)
        self._chain = tree == CHAIN
        self.drafts_trees = not self._chain

    def begin(self, request: Request, target: Session) -> None:
        self._heads.attach_to(self._target)
        self._request = request
        self._session = EagleSession(self._heads, request.max_length, target.forwards)

    def propose(self, tokens: list[int]) -> Draft:
        session, device = self._session, self._target.device
        tree_spec = tree_spec_of_round(self._tree_spec, self._request, tokens)
        if not session.ready:
            return empty_draft(device)
        feed = tokens[session.length :]
        if self._static is not None:
            return self._static.draft(session, feed, tree_spec.depth, self._chain)
        return draft_of_tree(grow_tree(session, feed, tree_spec, self._request.sampling), device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Pass on the states of the prompt, of the last committed token and of the accepted
        ones.
        """
        states = joined_states(self._heads.config.variant, scores.head_input, scores.hidden)
        self._session.receive(states_of_text(states, draft, verdict))


class EagleSession:
    """One text in an EAGLE: pairs of the target's state and the next token, then drafted ones.

    It has of `Session` what growing a tree takes. The first token of a text has no state before it,
    and is never passed. Rows of a tree read the layer's own output at their parent. `receive` drops
    them.
    """

    def __init__(self, eagle: Eagle, room: int, forwards: list[Forward]) -> None:
        self.forwards = forwards
        self._eagle, layer, weight = eagle, eagle.config.layer, eagle.fc.weight
        shape = (1, layer.num_key_value_heads, room + SPARE_ROWS, layer.head_dim)
        self._cache = KeyValueCache(shape, weight.dtype, weight.device)
        self._pairs = 0
        self._received: list[Tensor] = []  # states that were not run yet
        # the outputs of the last pair and of the tree's rows
        self._outputs = weight.new_empty(0, layer.hidden_size)

    @property
    def ready(self) -> bool:
        """Whether there are states of the target to draft from."""
        return bool(self._received)

    @property
    def length(self) -> int:
        """How many tokens of the text do not have to be passed again."""
        return self._pairs + 1

    @torch.inference_mode()
    def receive(self, states: Float[Tensor, "m states"]) -> None:
        """States of the target after those received before. Rows of the last tree are dropped."""
        self._received.append(self._eagle.fused(states))

    @torch.inference_mode()
    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        """Run the text's next tokens, all those whose states were received, or the next level of a
        tree after them.
        """
        rows = as_rows(rows)
        tokens, tree = on_device(rows.tokens, self._cache.keys.device), rows.tree
        count = tokens.shape[0]
        if tree is None:
            states, start = torch.cat(self._received), self._pairs
            self._received, self._pairs = [], start + count
        else:
            start = self._pairs + rows.earlier
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
