"""A forward as a list of kernel launches over buffers that stay where they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.native.gpu.attention import attend
from bild_lab.engine.models.native.gpu.block_matrix import ProductWeights, several_types
from bild_lab.engine.models.native.gpu.exits import leave_if_confident
from bild_lab.engine.models.native.gpu.heads import Head, Heads, ScoreBuffers
from bild_lab.engine.models.native.gpu.inputs import (
    CHUNK,
    MAX_ROWS,
    MAX_TREE,
    PassInputs,
    tree_start,
)
from bild_lab.engine.models.native.gpu.products import (
    SQUARES_COLUMNS,
    feed_forward,
    project,
    residual,
    score,
)
from bild_lab.engine.models.native.gpu.rows import add_normed, begin_stream, copy_rows
from bild_lab.engine.models.native.gpu.tilings import (
    Tiling,
    block_tiling,
    power_of_two,
    tiling_of,
)
from bild_lab.engine.models.native.packed_pass import SequenceSlice
from bild_lab.engine.models.native.stack import ACTIVATIONS, Layer, Stack, Weight
from bild_lab.engine.session import NOTHING, Skipped

LOG2_E = math.log2(math.e)
STREAM_BLOCK = 64  # columns of a program of `begin_stream` and `add_normed`
STREAM_ROWS = 8
# numbers of rows; others are padded up to the next of these, so that few graphs serve all
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
HALF_RANGE = 16.0  # what the scaled stream is divided by in float16, whose largest number is 65,504


class PassShape(NamedTuple):
    """What decides the kernels of a forward: forwards of one shape share a CUDA graph.

    rows, scored, tiles: how many at most.
    chunks, source_chunks: of CHUNK slots, which attention covers at most.
    tree_chunks: those among them that have rows of a tree, 0 without one.
    layers: indices.
    from_states: the stream begins with states, not tokens.
    has_prefix: of any text.
    masks: the address of the prefix's.
    fill, hidden, skipped, vocabulary: as in `KernelDecoder.run`.
    stoppable: the forward does nothing once no chain is running, and no tree.
    exits: its one row may leave early.
    """

    rows: int
    scored: int
    tiles: int
    chunks: int
    source_chunks: int
    layers: tuple[int, ...]
    from_states: bool = False
    tree_chunks: int = 0
    has_prefix: bool = False
    masks: int | None = None
    fill: bool = False
    hidden: bool = False
    skipped: Skipped = NOTHING
    vocabulary: DraftVocabulary | None = None
    stoppable: bool = False
    exits: bool = False

    @classmethod
    def unsized(cls, layers: Sequence[int], **fields: Any) -> PassShape:
        """A shape of these layers without room for any row, which `ForwardPlan.sized` gives it."""
        return cls(
            rows=0, scored=0, tiles=0, chunks=0, source_chunks=0, layers=tuple(layers), **fields
        )


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    arguments: those that may change from launch to launch, by the names of the kernel's parameters
    and in their order. constants: its compile-time arguments, and how it is launched.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]

    @property
    def values(self) -> list[Any]:
        return list(self.arguments.values())

    @property
    def binary(self) -> Hashable:
        """What decides how the kernel is compiled."""
        values = tuple(
            (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, Tensor) else value
            for value in self.values
        )
        return self.kernel, values, tuple(self.constants.items())

    @property
    def in_turn(self) -> Launch:
        """The launch that begins when the kernel before it has ended."""
        constants = {name: value for name, value in self.constants.items() if name != "launch_pdl"}
        return replace(self, constants=constants)

    def __call__(self) -> None:
        self.kernel[self.grid](*self.values, **self.constants)


class Buffers:
    """What kernels of a forward leave for those after them, by the names of their parameters. Made
    once, with room for MAX_ROWS rows.
    """

    def __init__(self, plan: ForwardPlan) -> None:
        stack, dim = plan.stack, plan.dim
        zeros = partial(torch.zeros, dtype=torch.float32, device=plan.device)
        inner = stack.hidden * (1 + stack.layers[0].inner.gated)
        widest = max(plan.projected, inner, dim)
        scratch_parts = 8
        # 1. the residual stream; `scaled` and `squares` as `products.py` says
        self.x = zeros(MAX_ROWS, dim)
        self.scaled = zeros(MAX_ROWS, dim, dtype=plan.dtype)
        self.squares = zeros(MAX_ROWS, plan.groups)
        # 2. a block's result that is still to be normed
        self.block = zeros(MAX_ROWS, dim)
        self.block_squares = zeros(MAX_ROWS, plan.groups)
        # 3. what is within a block
        self.queries = zeros(MAX_ROWS, plan.width, dtype=plan.dtype)
        self.mixed = zeros(MAX_ROWS, plan.width, dtype=plan.dtype)
        self.inner = zeros(MAX_ROWS, stack.hidden, dtype=plan.dtype)
        # 4. what a forward begins with in place of embeddings, and each layer's output
        self.states = zeros(MAX_ROWS, dim)
        self.layer_outputs = zeros(len(stack.layers), MAX_ROWS, dim)
        # 5. partial sums, of which the last tile may reach beyond its outputs, and tickets, which
        # are zero between forwards
        self.scratch = zeros(scratch_parts * MAX_ROWS * (widest + 256))
        ticket_count = max(MAX_ROWS // 8 * (widest // 16 + 1), MAX_ROWS * stack.heads)
        self.tickets = zeros(ticket_count, dtype=torch.int32)
        # 6. how many chains or trees are running; of a row that may leave early, whether it is; and 1,
        # for kernels that nothing stops
        self.running = zeros(1, dtype=torch.int64)
        self.always = torch.ones_like(self.running)
        # 7. of a row that may leave early
        self.exit_threshold = zeros(1, dtype=torch.float64)
        self.layer_input = zeros(dim)
        self.layers_run = zeros(1, dtype=torch.int64)
        # 8. results of chunks of attention, of the longest text so far
        self.partial = zeros(0)


class ForwardPlan:
    """Makes the launches of a stack's forwards.

    capability: of the GPU; (0, 0) for Triton's interpreter on a CPU. From 9.0 on kernels begin
    while those before them still run.
    """

    def __init__(self, stack: Stack, capability: tuple[int, int]) -> None:
        self.stack, self.capability = stack, capability
        self.overlap = capability >= (9, 0)
        self.device = stack.embedding.device
        self.dtype = stack.embedding.dtype
        self.known, self.dim = stack.embedding.shape
        self.width = stack.heads * stack.head_dim
        self.range = HALF_RANGE if self.dtype == torch.float16 else 1.0
        self.groups = power_of_two(self.dim // int(SQUARES_COLUMNS))
        self.head_block = max(16, power_of_two(stack.head_dim))
        self.heads = Heads(stack)
        self._scores: dict[int, ScoreBuffers] = {}
        self.inputs = PassInputs(stack.heads // stack.kv_heads, self.device)
        self.buffers = Buffers(self)
        self.scores_of(self.heads.of(None))
        for layer in stack.layers:  # refused now rather than at the first forward
            self.parts_of(layer.qkv, self.projected, layer.head_norm is not None)
            for weight in (layer.out, layer.inner, layer.outer):
                ProductWeights.whole(weight.matrix)
        self.nothing = torch.zeros(16, dtype=self.dtype, device=self.device)
        empty = torch.zeros(1, 0, stack.head_dim, dtype=torch.float32, device=self.device)
        self.cos, self.sin = empty, empty
        self.distance_bias = self.nothing
        self.farthest = 0
        if stack.distance_bias is not None:
            self.distance_bias = (stack.distance_bias.float() * LOG2_E).contiguous()
            self.farthest = stack.distance_bias.shape[1] - 1

    def tiling(
        self,
        product: str,
        inputs: int,
        outputs: int,
        type: int,
        head_dim: int | None = None,
    ) -> Tiling:
        """As `tiling_of`, on this GPU. type: as in `ProductWeights`."""
        if type:
            return block_tiling(inputs, outputs, head_dim)
        return tiling_of(product, inputs, outputs, self.capability, head_dim)

    def parts_of(
        self, weight: Weight, outputs: int, normed_heads: bool
    ) -> list[tuple[ProductWeights, Tiling]]:
        """The parts of a projection, each with its tiling.

        Raises UserError where a tile would have outputs of two.
        """
        head_dim = self.stack.head_dim if normed_heads else None
        weights = list(ProductWeights.parts(weight.matrix))
        parts = [
            (part, self.tiling("project", self.dim, outputs, part.type, head_dim))
            for part in weights
        ]
        for part, tiling in parts:
            stop = part.first + part.outputs
            if part.first % tiling.block_n or (stop < outputs and stop % tiling.block_n):
                raise several_types(weights)
        return parts

    def score_tiling(self, head: Head) -> Tiling:
        return self.tiling("score", self.dim, head.vocab, head.weights.type)

    @property
    def projected(self) -> int:
        """How many queries, keys and values a row has."""
        return (self.stack.heads + 2 * self.stack.kv_heads) * self.stack.head_dim

    @property
    def rotary(self) -> bool:
        return self.stack.distance_bias is None

    @property
    def positions(self) -> float:
        """How many positions the kernels can place."""
        return self.cos.shape[1] if self.rotary else float("inf")

    def scores_of(self, head: Head) -> ScoreBuffers:
        """Where the scores of this head go."""
        if head.vocab not in self._scores:
            tiling = self.score_tiling(head)
            tiles = -(-head.vocab // tiling.block_n)
            self._scores[head.vocab] = ScoreBuffers(head.vocab, tiles, self.device)
        return self._scores[head.vocab]

    def sized(self, shape: PassShape, texts: Sequence[SequenceSlice], tiles: int) -> PassShape:
        """A shape with room for these texts' rows."""
        rows = sum(text.count for text in texts)
        stop = max(text.start + text.count for text in texts)
        most_tree_chunks = max(map(tree_chunks, texts))
        sources = [text.memory[0].shape[2] for text in texts if text.memory is not None]
        return shape._replace(
            rows=padded(rows),
            scored=padded(sum(text.scored for text in texts)),
            tiles=power_of_two(tiles),
            chunks=power_of_two(-(-stop // CHUNK)),
            tree_chunks=power_of_two(most_tree_chunks) if most_tree_chunks else 0,
            source_chunks=power_of_two(-(-max(sources, default=1) // CHUNK)),
        )

    def partial_results(self, chunks: int) -> tuple[Tensor, Tensor]:
        """Where attention to so many chunks leaves the result of each, and its statistics."""
        results = MAX_ROWS * self.stack.heads * chunks
        size = results * (self.head_block + 2)
        if self.buffers.partial.shape[0] < size:
            self.buffers.partial = self.buffers.x.new_zeros(size)
        partial = self.buffers.partial
        return partial, partial[results * self.head_block :]

    def buffer_bytes(self, slots: int) -> int:
        """As `KernelDecoder.buffer_bytes`: all buffers but those of partial results are there from
        the beginning.

        For a longer text these are made anew, at least twice as large. A graph keeps those that it
        was made with, so all together are at most twice as large as the last.
        """
        chunks = power_of_two(-(-slots // CHUNK))
        return 2 * 4 * MAX_ROWS * self.stack.heads * chunks * (self.head_block + 2)

    def running(self, shape: PassShape) -> Int[Tensor, "1"]:
        """What a forward's kernels ask whether to run."""
        return self.buffers.running if shape.stoppable or shape.exits else self.buffers.always

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        warps: int = 4,
    ) -> Launch:
        """A launch of a kernel, whose parameters get these values, and all others what the plan has
        under their names. Raises KeyError for one that has none.
        """
        stack, names = self.stack, kernel.arg_names
        known_arguments = {
            **vars(self.buffers),
            "embedding": stack.embedding,
            "masks": self.nothing,
            "bias": self.nothing,
            "head_norm": self.nothing,
            "distance_bias": self.distance_bias,
            "farthest": self.farthest,
            "cos": self.cos,
            "sin": self.sin,
            "positions_count": self.cos.shape[1],
            "dim": self.dim,
            "K": self.dim,
            "known": self.known,
            "epsilon": stack.epsilon,
            **arguments,
        }
        known_constants = {
            "HEADS": stack.heads,
            "KV_HEADS": stack.kv_heads,
            "HEAD_DIM": stack.head_dim,
            "HEAD_BLOCK": self.head_block,
            "ROTARY": self.rotary,
            "GROUPS": self.groups,
            "RANGE": self.range,
            "CHUNK": CHUNK,
            "MAX_ROWS": MAX_ROWS,
            "MAX_TILES": self.inputs.max_tiles,
            "MAX_DEPTH": MAX_TREE,
            "ROWS": STREAM_ROWS,
            "BLOCK_N": STREAM_BLOCK,
            "OVERLAP": self.overlap,
            **constants,
        }
        how = {"num_warps": warps} | ({"launch_pdl": True} if self.overlap else {})
        return Launch(
            kernel,
            grid,
            {name: known_arguments[name] for name in names if name not in known_constants},
            {name: known_constants[name] for name in names if name in known_constants} | how,
        )

    def stream_grid(self, rows: int) -> tuple[int, int]:
        """The grid of a kernel that takes the residual stream of so many rows piece by piece."""
        return -(-rows // STREAM_ROWS), -(-self.dim // STREAM_BLOCK)

    def copy_of_stream(self, target: Float[Tensor, "rows dim"], shape: PassShape) -> Launch:
        """The launch that copies the residual stream of a forward's rows."""
        arguments = {
            "running": self.running(shape),
            "source": self.buffers.x,
            "target": target,
            "m": shape.rows,
        }
        constants = {"STOPPABLE": shape.stoppable or shape.exits}
        return self.launch(copy_rows, self.stream_grid(shape.rows), arguments, constants)

    def launches(
        self, shape: PassShape, masks: Tensor | None = None, inputs: PassInputs | None = None
    ) -> list[Callable[[], Any]]:
        """The launches of a forward of this shape. inputs: its tables; None: the plan's own."""
        forward = _Forward(self, shape, masks, self.inputs if inputs is None else inputs)
        return forward.launches()


def tree_chunks(text: SequenceSlice) -> int:
    """How many chunks have rows of a text's tree; 0 without one."""
    first_slot, last_slot = tree_start(text), text.start + text.count - 1
    return 0 if text.parents is None else last_slot // CHUNK - first_slot // CHUNK + 1


def padded(count: int) -> int:
    """The padded number of rows of a forward."""
    return next((rows for rows in ROW_COUNTS if rows >= count), count) if count else 0


class Block(NamedTuple):
    """A part of a layer that begins with a norm of its input.

    norm: None for what takes the stream as it is. add: adds the block's launches, given the norm
    for which it leaves the stream.
    """

    norm: Tensor | None
    add: Callable[[Tensor], None]


class _Forward:
    """The launches of one forward."""

    def __init__(
        self, plan: ForwardPlan, shape: PassShape, masks: Tensor | None, inputs: PassInputs
    ) -> None:
        self.plan, self.shape, self.masks, self.inputs = plan, shape, masks, inputs
        self.stack, self.buffers = plan.stack, plan.buffers
        self.arguments = {"running": plan.running(shape), "m": shape.rows, **inputs.tables}
        self.launched: list[Launch] = []

    def launches(self) -> list[Callable[[], Any]]:
        if self.shape.fill:
            for index in self.shape.layers:
                layer = self.stack.layers[index]
                self.begin(layer.norm)
                self.project(index, layer, keys_only=True)
            return self.launched
        # each block leaves the stream for the norm of the next one, the last for the head
        blocks = list(self.blocks())
        first_norm, *next_norms = norms_to_come(blocks, self.stack.final_norm)
        self.begin(first_norm)
        for block, next_norm in zip(blocks, next_norms, strict=True):
            block.add(next_norm)
        if self.shape.scored:
            self.score()
        return list(after_measurements(self.launched))

    def blocks(self) -> Iterator[Block]:
        """What the layers do, in order."""
        for place, index in enumerate(self.shape.layers):
            layer = self.stack.layers[index]
            if self.shape.exits:
                yield Block(None, partial(self.leave_if_confident, place))
            if index not in self.shape.skipped.attention:
                yield Block(layer.norm, partial(self.attention_block, index, layer))
                if layer.cross_query is not None:
                    yield Block(layer.cross_norm, partial(self.cross_block, index, layer))
            if index not in self.shape.skipped.feed_forward:
                yield Block(layer.feed_norm, partial(self.feed_forward_block, layer))
            if self.shape.hidden:
                yield Block(None, partial(self.copy_hidden, place))
        if self.shape.exits:
            yield Block(None, partial(self.leave_if_confident, len(self.shape.layers)))

    def attention_block(self, index: int, layer: Layer, next_norm: Tensor) -> None:
        self.project(index, layer)
        self.attend(index, layer)
        self.residual(self.buffers.mixed, layer.out, layer.out_norm, next_norm)

    def cross_block(self, index: int, layer: Layer, next_norm: Tensor) -> None:
        self.project(index, layer, crosses=True)
        self.attend(index, layer, crosses=True)
        self.residual(self.buffers.mixed, layer.cross_out, None, next_norm)

    def feed_forward_block(self, layer: Layer, next_norm: Tensor) -> None:
        self.feed_forward(layer.inner)
        self.residual(self.buffers.inner, layer.outer, layer.feed_out_norm, next_norm)

    def copy_hidden(self, place: int, next_norm: Tensor) -> None:
        """Keep the layer's output; the stream goes on as it is."""
        target = self.buffers.layer_outputs[place]
        self.launched.append(self.plan.copy_of_stream(target, self.shape))

    # the kernels, in the order of a layer

    def begin(self, next_norm: Tensor) -> None:
        arguments = {"next_norm": next_norm, "scale": float(self.stack.embedding_scale)}
        if self.masks is not None:
            arguments["masks"] = self.masks
        constants = {
            "FROM_STATES": self.shape.from_states,
            "HAS_MASKS": self.masks is not None,
            "STOPPABLE": self.shape.stoppable,
        }
        self.add(begin_stream, self.plan.stream_grid(self.shape.rows), arguments, constants)

    def leave_if_confident(self, layers_before: int, next_norm: Tensor) -> None:
        """The measurement before a layer, or after the last one."""
        arguments = {
            "next_norm": next_norm,
            "layers_before": layers_before,
            "layers": len(self.shape.layers),
        }
        constants = {"BLOCK": max(int(SQUARES_COLUMNS), power_of_two(self.plan.dim))}
        self.add(leave_if_confident, (1,), arguments, constants, warps=8)

    def project(
        self, index: int, layer: Layer, crosses: bool = False, keys_only: bool = False
    ) -> None:
        """crosses: queries of cross-attention. keys_only: keys and values, no queries."""
        stack, plan = self.stack, self.plan
        weight = layer.cross_query if crosses else layer.qkv
        kv_heads = 0 if crosses else stack.kv_heads
        head_norm = None if crosses else layer.head_norm
        outputs = (stack.heads + 2 * kv_heads) * stack.head_dim
        first_output = stack.heads * stack.head_dim if keys_only else 0
        arguments = {"layer": index, "kind": layer.kind}
        if head_norm is not None:
            arguments["head_norm"] = head_norm
        constants = {
            "KV_HEADS": kv_heads,
            "HAS_HEAD_NORM": head_norm is not None,
            "FILLS": self.shape.exits and not crosses,
        }
        for weights, tiling in plan.parts_of(weight, outputs, head_norm is not None):
            stop = weights.first + weights.outputs
            if first_output >= stop:
                continue
            first_tile = max(first_output, weights.first) // tiling.block_n
            place = {"first_tile": first_tile, "first_line": weights.first}
            outputs_left = stop - first_tile * tiling.block_n
            self.add_product(
                project, weights, weight.bias, tiling, outputs_left, arguments | place, constants
            )

    def attend(self, index: int, layer: Layer, crosses: bool = False) -> None:
        stack, plan, shape, inputs = self.stack, self.plan, self.shape, self.inputs
        chunks = shape.source_chunks if crosses else shape.chunks
        tree_chunks = 0 if crosses else shape.tree_chunks
        row_tiles = shape.rows * inputs.tiles_per_row
        programs = shape.tiles * chunks + row_tiles * tree_chunks
        results, statistics = plan.partial_results(chunks)
        arguments = {
            "partial": results,
            "statistics": statistics,
            "layer": index,
            "window": layer.window,
            "scale": float(stack.scale * LOG2_E),
            "tiles": shape.tiles,
            "chunks": chunks,
            "tree_chunks": tree_chunks,
        }
        constants = {
            "BIASED": not plan.rotary and not crosses,
            "CROSS": crosses,
            "TREE": tree_chunks > 0,
            "WINDOWED": bool(layer.window) and not crosses,
            "HAS_PREFIX": shape.has_prefix,
        }
        warps = 8 if plan.head_block > 128 else 4
        self.add(attend, (programs, stack.kv_heads), arguments, constants, warps)

    def residual(
        self, block_inputs: Tensor, weight: Weight, block_norm: Tensor | None, next_norm: Tensor
    ) -> None:
        plan, weights = self.plan, ProductWeights.whole(weight.matrix)
        inputs = block_inputs.shape[1]
        arguments = {"inputs": block_inputs, "K": inputs, "next_norm": next_norm}
        constants = {"NORMED": block_norm is not None}
        tiling = plan.tiling("residual", inputs, plan.dim, weights.type)
        self.add_product(residual, weights, weight.bias, tiling, plan.dim, arguments, constants)
        if block_norm is not None:
            arguments = {"block_norm": block_norm, "next_norm": next_norm}
            self.add(add_normed, plan.stream_grid(self.shape.rows), arguments, {})

    def feed_forward(self, weight: Weight) -> None:
        stack, plan = self.stack, self.plan
        weights, outputs = ProductWeights.whole(weight.matrix), stack.hidden * (1 + weight.gated)
        constants = {
            "ACTIVATION": list(ACTIVATIONS).index(stack.activation),
            "GATED": weight.gated,
        }
        tiling = plan.tiling("feed_forward", plan.dim, outputs, weights.type)
        arguments = {"hidden": stack.hidden}
        self.add_product(feed_forward, weights, weight.bias, tiling, outputs, arguments, constants)

    def score(self) -> None:
        plan = self.plan
        head = plan.heads.of(self.shape.vocabulary)
        arguments = {
            **vars(plan.scores_of(head)),
            "m": self.shape.scored,
            "vocab": head.vocab,
            "scale": float(self.stack.final_scale),
        }
        constants = {"STOPPABLE": self.shape.stoppable}
        tiling = plan.score_tiling(head)
        self.add_product(score, head.weights, head.bias, tiling, head.vocab, arguments, constants)

    def add_product(
        self,
        kernel: Any,
        weights: ProductWeights,
        bias: Tensor | None,
        tiling: Tiling,
        outputs: int,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
    ) -> None:
        """Add a matrix product with so many outputs, cut as the tiling says."""
        arguments = {"K": self.plan.dim, **self.arguments, **weights.arguments, **arguments}
        if bias is not None:
            arguments["bias"] = bias
        cut = {
            "ROWS": tiling.rows,
            "BLOCK_N": tiling.block_n,
            "BLOCK_K": tiling.block_k,
            "WAYS": tiling.ways,
            "STAGES": tiling.stages,
            "EVEN": tiling.divides(arguments["K"]),
            "SPLIT": tiling.split,
            "RESIDENT": tiling.resident,
            "TYPE": weights.type,
            "HAS_BIAS": bias is not None,
        }
        grid = (-(-arguments["m"] // tiling.rows), -(-outputs // tiling.block_n), tiling.split)
        self.add(kernel, grid, arguments, {**constants, **cut}, tiling.warps)

    def add(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        warps: int = 4,
    ) -> None:
        """Add a launch, as `ForwardPlan.launch` makes it. By default it may be stopped."""
        constants = {"STOPPABLE": self.shape.stoppable or self.shape.exits, **constants}
        launch = self.plan.launch(kernel, grid, self.arguments | arguments, constants, warps)
        self.launched.append(launch)


def norms_to_come(blocks: Sequence[Block], final_norm: Tensor) -> list[Tensor]:
    """At the beginning, and after each block, the norm of the next block that has one; after the
    last such block the final norm.
    """
    norms = [final_norm]
    for block in reversed(blocks):
        norms.append(norms[-1] if block.norm is None else block.norm)
    return norms[::-1]


def after_measurements(launches: Sequence[Launch]) -> Iterator[Launch]:
    """These launches, those after a measurement in turn, as `leave_if_confident` asks for."""
    measured = False
    for launch in launches:
        yield launch.in_turn if measured else launch
        measured = launch.kernel is leave_if_confident
