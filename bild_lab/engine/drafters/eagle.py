"""Drafts by a layer that continues the target's hidden states: EAGLE-1, EAGLE-2's dynamic trees, and EAGLE-3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.adapters.eagle import EAGLE3, Eagle, joined_states
from bild_lab.engine.draft import ROOT, Draft, Tree, Verdict, empty_draft
from bild_lab.engine.drafters.model_tree import grow
from bild_lab.engine.drafters.tree_file import read_trees
from bild_lab.engine.drafters.trees import GROWTHS, Node, efficient_tree, widths_of
from bild_lab.engine.models.native.attention import place_rows
from bild_lab.engine.models.native.cache import KeyValueCache
from bild_lab.engine.models.native.model import SPARE_ROWS
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import EVERYTHING, Growth, LoadedModel, Rows, Scores, Session, Want, as_rows, on_device
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError, require_whole

DYNAMIC, CHAIN, PUBLISHED = "dynamic", "chain", "eagle_tree"
# the ranks of each branch's candidates in EAGLE-1's tree for 7B models, which Figure 7 of the paper shows
BRANCHES = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"  # one digit a rank
).split()


class EagleDrafter(Drafter):
    """A tree of the likeliest continuations of the target's states.

    The first round of a text drafts nothing: the states of the prompt come out of its verification. In every other
    round the states of the tokens accepted before go through the layer, in place of those that it drafted from.

    tree: dynamic (EAGLE-2 §4, as in `ModelTreeDrafter`: nodes, width, children and least are its knobs), eagle_tree
    (EAGLE-1's), chain, or full_tree and efficient_tree with `top_k` candidates, one number or one for each depth, or a
    file in the form of `scripts/fit_shape.py`. window: the longest branch. A token's place in a tree never depends on
    a random number, so each counts as certain (q is one-hot), and speculative sampling is lossless.

    The layer's forwards are recorded as those of a Llama of one layer; the fusion is not.
    """

    def __init__(
        self,
        target: LoadedModel,
        heads: Eagle,
        tree: str,
        window: int,
        top_k: int | Sequence[int] = 3,
        nodes: int = 15,
        width: int = 4,
        children: int = 3,
        least: float = 0.0,
    ) -> None:
        for name, value in (("nodes", nodes), ("window", window), ("width", width), ("children", children)):
            require_whole(name, value, 1)
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0.0 <= least <= 1.0:
            raise UserError(f"least is a probability and must lie in [0, 1], got {least!r}; 0 always grows on")
        self._target, self._eagle, self._window = target, heads, window
        self._growth = Growth(nodes, window, width, children, frozenset(), None, least)
        shape = named_nodes(tree, top_k, window, heads.config.vocabulary)
        self._static = None if shape is None else StaticTree(shape, target.device)
        self._chain = tree == CHAIN
        self.drafts_trees = not self._chain
        third = heads.config.variant == EAGLE3
        self.wants = Want(head_input=not third, hidden=heads.config.target_layers, prompt=True)

    def start(self, request: Request, target: Session) -> None:
        self._request = request
        self._eagle.attach(*self._target.vocabulary_weights())
        room = len(request.source.prompt) + request.limits.max_new_tokens
        self._session = EagleSession(self._eagle, room, target.forwards)

    def propose(self, tokens: list[int]) -> Draft:
        limits, sampling, session = self._request.limits, self._request.sampling, self._session
        depth = min(self._window, limits.room(tokens))
        if not session.ready or depth < 1:
            return empty_draft(self._target.device)
        feed = tokens[session.length :]
        if self._static is not None:
            return self._static.draft(session, feed, depth, self._chain)
        growth = Growth(
            self._growth.nodes,
            depth,
            self._growth.width,
            self._growth.children,
            limits.end_tokens,
            least=self._growth.least,
            temperature=1.0 if sampling.greedy else sampling.temperature,
        )
        grown = grow(session, feed, growth, sampling)
        device = self._target.device
        return Draft(on_device(grown.tokens, device), on_device(grown.parents, device), calls=len(grown.forwards))

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Take the states of the prompt, of the last committed token and of the accepted ones."""
        states = joined_states(self._eagle.config.variant, scores.head_input, scores.hidden)
        before = states.shape[0] - len(draft) - 1  # rows of the prompt
        rows = [*range(before), *(before + row for row in (0, *(node + 1 for node in verdict.path)))]
        self._session.receive(states if len(rows) == states.shape[0] else states[on_device(rows, states.device)])


class EagleSession:
    """One text in an EAGLE: the pairs of a state of the target and the token after it, and drafted ones behind them.

    `length` counts the tokens that need not be passed again, as in `Session`; the first token of a text is in no pair.
    Rows of a tree read the layer's own output at their parent. `receive` drops them.
    """

    def __init__(self, eagle: Eagle, room: int, forwards: list[Forward]) -> None:
        self.forwards = forwards
        self._eagle, layer, weight = eagle, eagle.config.layer, eagle.fc.weight
        shape = (1, layer.num_key_value_heads, room + SPARE_ROWS, layer.head_dim)
        self._cache = KeyValueCache(shape, weight.dtype, weight.device)
        self._pairs = 0
        self._received: list[Tensor] = []
        self._outputs = weight.new_empty(0, layer.hidden_size)  # of the last pair, and of the tree's rows

    @property
    def ready(self) -> bool:
        """Whether there are states of the target to draft from."""
        return self._pairs > 0 or bool(self._received)

    @property
    def length(self) -> int:
        return self._pairs + 1

    @torch.inference_mode()
    def receive(self, states: Float[Tensor, "m states"]) -> None:
        """States of the target behind those received before."""
        self._received.append(self._eagle.fused(states))

    @torch.inference_mode()
    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        """Run the text's next tokens, all those whose states were received, or rows of a tree behind them."""
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
        shown = outputs if want.logits is None else outputs[-want.logits :]
        self.forwards.append(Forward(self._eagle.config.layer, rows=count, cached=start, scored=shown.shape[0]))
        return Scores(self._eagle.logits(shown))

    def _run(
        self, tokens: Int[Tensor, " m"], states: Float[Tensor, "m dim"], start: int, tree: Tree | None
    ) -> Float[Tensor, "m dim"]:
        count = tokens.shape[0]
        if start + count > self._cache.capacity:
            self._cache = self._cache.grown(2 * (start + count))
        cache, placed = self._cache, place_rows(start, count, tokens.device, tree)

        def store(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            cache.write(0, placed.slots, keys[0].transpose(0, 1), values[0].transpose(0, 1))
            return cache.keys[:, :, : placed.stop], cache.values[:, :, : placed.stop]

        mask = None if placed.visible is None else placed.visible[None, None]
        return self._eagle(self._eagle.embed(tokens)[None], states[None], placed.positions, store, mask)[0]


@dataclass(frozen=True)
class Level:
    """The nodes of one depth. above: for each, the place of its parent among the rows of the level before that ran.

    ranks: of the nodes. runs: which nodes have children, and so run. rows: the shape of the tree of all rows up to
    these; None if none runs.
    """

    above: Int[Tensor, " n"]
    ranks: Int[Tensor, " n"]
    runs: Int[Tensor, " m"]
    rows: Tree | None


class StaticTree:
    """A tree whose shape never changes: each node is the candidate of one rank behind its parent."""

    def __init__(self, nodes: Sequence[Node], device: torch.device) -> None:
        self._nodes, self._device = nodes, device
        self._widest = max(node.rank for node in nodes) + 1
        self._levels = lru_cache(maxsize=None)(self._lay_out)

    def draft(self, session: EagleSession, feed: Sequence[int], depth: int, chain: bool) -> Draft:
        """Run these tokens of the text, then one level after the other, down to this depth."""
        levels, parents, shape = self._levels(depth)
        scores = session.extend(feed, Want(logits=1))
        drafted, calls = [], 1
        for level in levels:
            likeliest = scores.logits.topk(self._widest).indices  # [rows, widest]
            drafted.append(likeliest[level.above, level.ranks])
            if level.rows is not None:
                scores = session.extend(Rows(drafted[-1][level.runs], level.rows))
                calls += 1
        tokens = torch.cat(drafted)
        return Draft(tokens, calls=calls) if chain else Draft(tokens, parents, calls=calls, shape=shape)

    def _lay_out(self, depth: int) -> tuple[list[Level], Int[Tensor, " n"], Tree]:
        nodes = [number for number, node in enumerate(self._nodes) if node.depth < depth]
        nodes.sort(key=lambda number: self._nodes[number].depth)
        place = {ROOT: ROOT, **{number: at for at, number in enumerate(nodes)}}
        parents = [place[self._nodes[number].parent] for number in nodes]
        inner = sorted({parent for parent in parents if parent != ROOT})  # these run
        row = {ROOT: ROOT, **{node: at for at, node in enumerate(inner)}}
        levels, first = [], 0
        before = [ROOT]
        for level in range(max(self._nodes[number].depth for number in nodes) + 1):
            own = [at for at, number in enumerate(nodes) if self._nodes[number].depth == level]
            running = [at for at in own if at in row]
            ran = inner[: first + len(running)]
            levels.append(
                Level(
                    above=self._on_device([before.index(parents[at]) for at in own]),
                    ranks=self._on_device([self._nodes[nodes[at]].rank for at in own]),
                    runs=self._on_device([own.index(at) for at in running]),
                    rows=Tree(self._on_device([row[parents[at]] for at in ran])) if running else None,
                )
            )
            first, before = first + len(running), running
        below = self._on_device(parents)
        return levels, below, Tree(torch.cat([below.new_full((1,), ROOT), below + 1]))

    def _on_device(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def named_nodes(tree: str, top_k: int | Sequence[int], window: int, vocabulary: int) -> Sequence[Node] | None:
    """The nodes of a static tree down to this depth; None for a dynamic one. Raises UserError for anything else."""
    if tree == DYNAMIC:
        return None
    if tree == CHAIN:
        return efficient_tree([1] * window)
    if tree == PUBLISHED:
        return published_tree()
    if isinstance(tree, str) and tree in GROWTHS:
        return GROWTHS[tree](widths_of(top_k, window, vocabulary))
    if isinstance(tree, str) and Path(tree).expanduser().is_file():
        return read_trees(tree, window, 0, vocabulary)[-1].nodes
    kinds = ", ".join([DYNAMIC, CHAIN, PUBLISHED, *GROWTHS])
    raise UserError(f"tree must be one of {kinds} or a file of scripts/fit_shape.py, got {tree!r}")


def published_tree() -> list[Node]:
    """EAGLE-1's tree for 7B models: 25 nodes, 5 deep."""
    place = {"": ROOT, **{branch: at for at, branch in enumerate(BRANCHES)}}
    return [Node(len(branch) - 1, int(branch[-1]), place[branch[:-1]]) for branch in BRANCHES]
