"""Draft trees that a GPU grows by itself: a forward of each text's rows, and one for each further
level, until no leaf grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bild_lab.engine.draft import ROOT
from bild_lab.engine.models.native.gpu.graphs import GraphCache
from bild_lab.engine.models.native.gpu.growing import add_children, next_level
from bild_lab.engine.models.native.gpu.inputs import (
    MAX_ROWS,
    MAX_TREE,
    CopiedTables,
    PassInputs,
    tables_in,
)
from bild_lab.engine.models.native.gpu.plan import ForwardPlan, Launch, PassShape, padded
from bild_lab.engine.models.native.gpu.programs import (
    MAX_END_TOKENS,
    MAX_STEPS,
    draft_by_kind,
    fill_first,
    steps_for,
    write_end_tokens,
)
from bild_lab.engine.models.native.gpu.tilings import power_of_two
from bild_lab.engine.models.native.packed_pass import SequenceSlice
from bild_lab.engine.session import DraftNode, GrownTree, TreeSpec, prune_tree

MAX_CANDIDATES = 1024  # children of a level


class LevelSizes(NamedTuple):
    """How many levels, texts, rows of a level and children of a row there are at most."""

    levels: int
    texts: int
    width: int
    children: int


class TreeShape(NamedTuple):
    """What decides a program: programs of one shape share a CUDA graph.

    first, level: of the forward of the texts' rows, and of those after it. temperature: as in
    `TreeSpec`.
    """

    first: PassShape
    level: PassShape
    sizes: LevelSizes
    temperature: float


class TreeRules:
    """What a program reads of its trees, at fixed addresses, written by one copy.

    depths, min_probs, prune_confidences: of each text, as in `TreeSpec`; a confidence that none
    reaches for never. end_tokens: [MAX_ROWS, MAX_END_TOKENS], padded with −1.
    """

    def __init__(self, device: torch.device) -> None:
        self._rules = CopiedTables(
            {
                "end_tokens": (MAX_ROWS, MAX_END_TOKENS),
                "depths": (MAX_ROWS,),
                "min_probs": (MAX_ROWS,),
                "prune_confidences": (MAX_ROWS,),
                "running": (1,),
            },
            device,
        )
        tables = self._rules.tables.values()
        self.end_tokens, self.depths, min_probs, prune_confidences, self._running = tables
        self.min_probs = min_probs.view(torch.float64)
        self.prune_confidences = prune_confidences.view(torch.float64)

    def fill(self, tree_specs: Sequence[TreeSpec], running: Tensor) -> None:
        """Write the rules of these trees, and that all of them grow. The host does not wait."""
        count = len(tree_specs)
        tables = self._rules.parts_of(self._rules.next())
        end_tokens, depths, min_probs, prune_confidences, trees = tables.values()
        write_end_tokens(end_tokens, [tree_spec.end_tokens for tree_spec in tree_specs])
        depths[:count] = [tree_spec.depth for tree_spec in tree_specs]
        min_probs.view(np.float64)[:count] = [tree_spec.min_prob for tree_spec in tree_specs]
        prune_confidences.view(np.float64)[:count] = [
            np.inf if tree_spec.prune_confidence is None else tree_spec.prune_confidence
            for tree_spec in tree_specs
        ]
        trees[:] = count
        self._rules.copy()
        running.copy_(self._running)


class GrownLevels:
    """What a program of these sizes grows, in one piece of memory that one copy brings to the host.

    leaves: [levels, texts, width]. tokens, chances: [levels, texts, width, children]. As in
    `growing.py`.
    """

    def __init__(self, sizes: LevelSizes, device: torch.device) -> None:
        shape = tuple(sizes)
        self._shapes = {"leaves": shape[:-1], "tokens": shape, "chances": shape}
        size = sum(map(math.prod, self._shapes.values()))
        self._memory = torch.zeros(size, dtype=torch.int64, device=device)
        self.leaves, self.tokens, chances = tables_in(self._memory, self._shapes).values()
        self.chances = chances.view(torch.float64)

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Leaves, tokens and chances on the host, which waits for the program."""
        tables = tables_in(self._memory.cpu().numpy(), self._shapes)
        leaves, tokens, chances = tables.values()
        return leaves, tokens, chances.view(np.float64)


class TreePrograms:
    """The programs of one decoder.

    All forwards of a program are in one CUDA graph, each with a place for `width` rows of every
    text. After a forward two kernels choose the next leaves and write the tables of their rows, so
    that the host waits once, at the end. When no leaf grows, the kernels of the forwards that
    remain leave at once.
    """

    def __init__(self, plan: ForwardPlan, graphs: GraphCache) -> None:
        self._plan, self._graphs = plan, graphs
        # of the forwards after the first
        self._inputs = PassInputs(plan.stack.heads // plan.stack.kv_heads, plan.device)
        self._rules = TreeRules(plan.device)
        self._grown_levels: dict[LevelSizes, GrownLevels] = {}
        self._roots = torch.full((MAX_TREE,), ROOT, device=plan.device)
        # as `next_level` has them
        self._level_paths = torch.zeros(
            2, MAX_ROWS, MAX_TREE, dtype=torch.int64, device=plan.device
        )

    def draft(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        tree_specs: Sequence[TreeSpec],
    ) -> Sequence[GrownTree | None]:
        """Run the rows of each text, and grow a tree after them; None for a text that has no
        program.
        """
        kinds = [
            (tree_spec.width, tree_spec.children, tree_spec.temperature)
            if has_program(fed, tree_spec)
            else None
            for fed, tree_spec in zip(tokens, tree_specs, strict=True)
        ]
        counts = [
            max(len(fed), tree_spec.width)
            for fed, tree_spec in zip(tokens, tree_specs, strict=True)
        ]
        return draft_by_kind(kinds, counts, self._grow_together, tokens, texts, tree_specs)

    def _grow_together(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        tree_specs: Sequence[TreeSpec],
    ) -> list[GrownTree]:
        """Trees of texts whose rows fit one forward."""
        plan, tree_spec = self._plan, tree_specs[0]
        shape = PassShape.unsized(range(len(plan.stack.layers)), vocabulary=tree_spec.vocabulary)
        # 1. the tables
        texts, tiles = fill_first(plan, tokens, texts)
        level = self._fill_levels(shape._replace(stoppable=True), texts, tree_specs)
        self._rules.fill(tree_specs, plan.buffers.running)
        # 2. the program
        program = TreeShape(
            first=plan.sized(shape, texts, tiles),
            level=level,
            sizes=LevelSizes(
                levels=steps_for(max(tree_spec.depth for tree_spec in tree_specs)),
                texts=len(texts),
                width=tree_spec.width,
                children=tree_spec.children,
            ),
            temperature=tree_spec.temperature,
        )
        self._graphs.run(program, lambda: self.launches(program))
        # 3. the trees
        leaves, child_tokens, chances = self._levels(program).read()
        return [
            tree_of_levels(
                leaves[:, index], child_tokens[:, index], chances[:, index], len(fed), tree_spec
            )
            for index, (fed, tree_spec) in enumerate(zip(tokens, tree_specs, strict=True))
        ]

    def _fill_levels(
        self,
        shape: PassShape,
        texts: Sequence[SequenceSlice],
        tree_specs: Sequence[TreeSpec],
    ) -> PassShape:
        """Write the tables of the forwards after the first, of which `next_level` replaces what a
        level decides: its rows' tokens, slots, positions and paths, and where its keys begin.

        Tiles of attention stay, each text's as of `width` rows in a tree. Returns the shape with
        room for all rows.
        """
        width = tree_specs[0].width
        level_rows = [self._tree_rows(text, width) for text in texts]
        tiles = self._inputs.fill(level_rows, traces_paths=False)
        all_rows = [
            self._tree_rows(text, (tree_spec.depth - 1) * width)
            for text, tree_spec in zip(texts, tree_specs, strict=True)
        ]
        sized = self._plan.sized(shape, all_rows, tiles)
        return sized._replace(rows=padded(width * len(texts)), scored=padded(width * len(texts)))

    def _tree_rows(self, text: SequenceSlice, count: int) -> SequenceSlice:
        """So many rows of a tree after a text's rows, with parents that do not count."""
        start, parents = text.start + text.count, self._roots[:count]
        return text._replace(count=count, start=start, scored=count, parents=parents)

    def launches(self, program: TreeShape) -> list[Callable[[], Any]]:
        """All forwards of a program, each with what grows after it."""
        plan = self._plan
        launches = plan.launches(program.first)
        for level in range(program.sizes.levels):
            if level:
                launches.append(self._next_level(program, level - 1))
                launches += plan.launches(program.level, inputs=self._inputs)
            launches.append(self._add_children(program, level))
        return launches

    def _add_children(self, program: TreeShape, level: int) -> Launch:
        plan, sizes, grown = self._plan, program.sizes, self._levels(program)
        head = plan.heads.of(program.level.vocabulary)
        scores = plan.scores_of(head)
        tile_block = plan.score_tiling(head).block_n
        tiles = scores.compared_tiles
        group = power_of_two(-(-scores.tiles // tiles))
        constants = {
            "FIRST": level == 0,
            "SCALED": program.temperature != 1.0,
            "NARROW": head.tokens is not None,
            "WIDTH": sizes.width,
            "CHILDREN": sizes.children,
            "TILES": tiles,
            "GROUP": group,
            "SPAN": group * tile_block,
            "BLOCK": 512 * scores.warps,
        }
        arguments = {
            **vars(scores),
            "head_tokens": grown.tokens if head.tokens is None else head.tokens,
            "prune_confidences": self._rules.prune_confidences,
            "leaves": grown.leaves,
            "tokens": grown.tokens,
            "chances": grown.chances,
            "vocab": head.vocab,
            "level": level,
            "temperature": program.temperature,
        }
        grid = (sizes.texts, sizes.width if level else 1)
        return plan.launch(add_children, grid, arguments, constants, scores.warps)

    def _next_level(self, program: TreeShape, level: int) -> Launch:
        """The launch that lays out the level after this one."""
        sizes, grown, rules = program.sizes, self._levels(program), self._rules
        candidates = power_of_two(sizes.width * sizes.children)
        constants = {
            "FIRST": level == 0,
            "WIDTH": sizes.width,
            "CHILDREN": sizes.children,
            "ROWS": power_of_two(sizes.width),
            "CANDIDATES": candidates,
            "END_TOKENS": MAX_END_TOKENS,
        }
        arguments = {
            **self._inputs.tables,
            "depths": rules.depths,
            "min_probs": rules.min_probs,
            "end_tokens": rules.end_tokens,
            "leaves": grown.leaves,
            "tokens": grown.tokens,
            "chances": grown.chances,
            "level_paths": self._level_paths,
            "level": level,
        }
        warps = 1 if candidates <= 256 else 4
        return self._plan.launch(next_level, (sizes.texts,), arguments, constants, warps)

    def _levels(self, program: TreeShape) -> GrownLevels:
        """Where programs of these sizes leave what they grow."""
        if program.sizes not in self._grown_levels:
            self._grown_levels[program.sizes] = GrownLevels(program.sizes, self._plan.device)
        return self._grown_levels[program.sizes]


def has_program(tokens: Sequence[int], tree_spec: TreeSpec) -> bool:
    """Whether a text's rows, and those of its tree, fit forwards and tables."""
    return (
        len(tokens) <= MAX_ROWS
        and tree_spec.width <= MAX_ROWS
        and tree_spec.width * tree_spec.children <= MAX_CANDIDATES
        and 1 <= tree_spec.depth <= MAX_STEPS
        and (tree_spec.depth - 1) * tree_spec.width <= MAX_TREE
        and len(tree_spec.end_tokens) <= MAX_END_TOKENS
    )


def tree_of_levels(
    leaves: np.ndarray,
    tokens: np.ndarray,
    chances: np.ndarray,
    fed_count: int,
    tree_spec: TreeSpec,
) -> GrownTree:
    """The tree of one text, of which so many rows were fed.

    leaves: [levels, width]. tokens, chances: [levels, width, children]. As in `growing.py`.
    """
    nodes: list[DraftNode] = []
    forwards: list[int] = []
    children_before: dict[int, int] = {}  # nodes of the level before, by their numbers there
    rows = 0
    for level in range(tree_spec.depth):
        # 1. the rows of this level
        level_nodes = [ROOT]
        if level:
            numbers = leaves[level]
            level_nodes = [children_before[number] for number in numbers[numbers >= 0].tolist()]
            for node in level_nodes:
                nodes[node].row = rows
                rows += 1
        if not level_nodes:
            break
        forwards.append(len(level_nodes) if level else fed_count)
        # 2. their children
        children_before = {}
        for row, parent in enumerate(level_nodes):
            children = zip(tokens[level, row].tolist(), chances[level, row].tolist(), strict=True)
            for child, (token, chance) in enumerate(children):
                if chance >= 0.0:
                    children_before[row * tree_spec.children + child] = len(nodes)
                    nodes.append(DraftNode(token, parent, chance))
    return prune_tree(nodes, tree_spec.nodes, forwards)
