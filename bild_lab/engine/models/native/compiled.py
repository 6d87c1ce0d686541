"""Forwards and drafts of fixed shape: compiled once for each number of rows, one CUDA graph each on
a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bild_lab.engine.models.cached_session import ForwardPass
from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import Memory, T5Decoder
from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.sampling import most_likely, pick, precise
from bild_lab.engine.session import ChainResult, ChainSpec, on_device, result_of_steps

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # other numbers of rows are padded up to the next of these
# tokens before a window that is drafted as one program; more of them run by themselves
MOST_FED = 8
LEAST_CAPACITY = 128
BACKEND = "inductor"
# limit for one process; PyTorch's default is 8, after which it stops compiling
COMPILED_SHAPES = 256

Result = TypeVar("Result")
Outputs = tuple[Float[Tensor, "m vocab"], Float[Tensor, "m dim"]]  # logits, and the head's input
# the logits of rows at slots from `start` on: (tokens, start)
LogitsOf = Callable[[Int[Tensor, " m"], Int[Tensor, ""]], Float[Tensor, "m vocab"]]


@dataclass
class CompiledStep:
    """The compiled step for one number of rows: inputs at fixed memory addresses, and the function
    that runs them.
    """

    tokens: Int[Tensor, " m"]
    start: Int[Tensor, ""]
    depth: Int[Tensor, " m"]
    among: Bool[Tensor, "m m"]
    run: Callable[[], Outputs]
    holds_tree: bool = False


class WindowProgram:
    """A chain drafted as one program of fixed shape, whose inputs lie at fixed addresses.

    All steps run, whatever they draft. Confidences and end tokens are read afterwards, in one
    transfer, and `ChainProgress` says where the chain ended. If neither ends it, nothing is read.

    logits_of: runs rows.
    rows: how many tokens are fed at most.
    chain: gives the number of steps, the temperature, and whether distributions at temperature 1
        are kept.
    """

    def __init__(
        self, logits_of: LogitsOf, rows: int, chain: ChainSpec, device: torch.device
    ) -> None:
        self.steps = chain.steps
        self._logits_of = logits_of
        self._temperature = chain.temperature
        self._keeps_probs = chain.keeps_probs
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self.start = torch.zeros((), dtype=torch.long, device=device)
        self._count = torch.ones(1, dtype=torch.long, device=device)
        self._uniforms = None
        if chain.temperature:
            self._uniforms = torch.zeros(self.steps, dtype=torch.float64, device=device)
        self.run = self.program  # or a graph of it

    def program(self) -> tuple[Float[Tensor, " twice"], Tensor | None, Tensor | None]:
        """Run all steps. Returns the tokens, [steps], and the confidences, [steps], as float64 in
        one vector; each step's distribution at the chain's temperature, and the one at temperature
        1, [steps, vocab] each, None if they are not kept.
        """
        logits = self._logits_of(self.tokens, self.start).index_select(0, self._count - 1)
        slot = self.start + self._count[0]
        draft_tokens, confidences, probs, unscaled_probs = [], [], [], []
        for step in range(self.steps):  # logits: [1, vocab]
            unscaled_probs.append(precise(logits).softmax(-1))
            confidences.append(unscaled_probs[-1].amax(-1))
            if self._uniforms is None:
                draft_tokens.append(most_likely(precise(logits)))
            else:
                probs.append((precise(logits) / self._temperature).softmax(-1))
                draft_tokens.append(pick(probs[-1], self._uniforms[step : step + 1]))
            if step + 1 < self.steps:
                logits = self._logits_of(draft_tokens[-1], slot)
                slot = slot + 1
        return (
            torch.cat([column.double() for column in (*draft_tokens, *confidences)]),
            torch.cat(probs) if probs else None,
            torch.cat(unscaled_probs) if self._keeps_probs else None,
        )

    def draft(self, start: int, tokens: Sequence[int], chain: ChainSpec) -> ChainResult:
        """Run these tokens from slot `start` on, and a chain after them, which may have fewer
        steps.
        """
        # 1. the inputs go to their addresses, and the program runs
        self.tokens[: len(tokens)] = on_device(tokens, self.tokens.device)
        self.start.fill_(start)
        self._count.fill_(len(tokens))
        if self._uniforms is not None:
            self._uniforms[: chain.steps] = chain.uniforms
        tokens_and_confidences, probs, unscaled_probs = self.run()
        # 2. where the chain ended
        if chain.is_read:
            read = tokens_and_confidences.tolist()
            draft_tokens = [int(token) for token in read[: chain.steps]]
            drafted = result_of_steps(chain, draft_tokens, read[self.steps :][: chain.steps])
        else:
            drafted = ChainResult(tokens_and_confidences[: chain.steps].long(), chain.steps)
        # 3. the distributions up to there
        count = len(drafted.tokens)
        return replace(
            drafted,
            probs=None if probs is None else probs[:count],
            unscaled_probs=None if unscaled_probs is None else unscaled_probs[:count],
        )


class Workspace:
    """A KV cache and an encoder memory of fixed shape, for one sequence at a time, and the steps
    that use them.

    Every step reads the whole cache and masks slots beyond the sequence, so that one compiled
    program serves every length.
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: LlamaDecoder | T5Decoder,
        capacity: int,
        source: int,
        on_compiled: Callable[[], None] = lambda: None,
        compiles: bool = True,
    ) -> None:
        """compiles: by torch.compile; else a CUDA graph holds PyTorch's own kernels."""
        self._decoder, self._compiles = decoder, compiles
        self._on_compiled = on_compiled
        layers, heads, dim = decoder.cache_shape
        weight = decoder.embedding
        self.cache = KeyValueCache((layers, heads, capacity, dim), weight.dtype, weight.device)
        self.memory: tuple[Memory, ...] = (
            (decoder.empty_memory(source),) if isinstance(decoder, T5Decoder) else ()
        )
        self.source = source
        self._steps: dict[int, CompiledStep] = {}
        self._windows: dict[tuple[int, float, bool], list[WindowProgram]] = {}
        self._tables: list[Sequence[Tensor]] = []  # tables that graphs read
        decoder.reach(capacity)

    def fits(self, capacity: int, source: int) -> bool:
        return self.cache.capacity >= capacity and self.source >= source

    @torch.inference_mode()
    def remember(self, memory: tuple[Memory, ...]) -> None:
        """Copy the encoder memory of a new sequence."""
        for workspace_memory, source_memory in zip(self.memory, memory, strict=True):
            count = source_memory.keys.shape[2]
            workspace_memory.keys[:, :, :count] = source_memory.keys
            workspace_memory.values[:, :, :count] = source_memory.values
            workspace_memory.visible.fill_(False)[..., :count] = True

    def takes(self, forward_pass: ForwardPass) -> bool:
        """Whether this pass fits the largest step and the cache's capacity, and its tree has no
        earlier rows.
        """
        return (
            not forward_pass.earlier
            and forward_pass.count <= ROW_COUNTS[-1]
            and forward_pass.start + padded(forward_pass.count) <= self.cache.capacity
        )

    def step(self, forward_pass: ForwardPass) -> Outputs:
        """Run rows after the cached ones. Logits and head input are valid until the next step."""
        count, tree = forward_pass.count, forward_pass.tree
        rows = padded(count)
        if rows not in self._steps:
            self._steps[rows] = self._compile(rows, forward_pass.start)
            self._on_compiled()
        step = self._steps[rows]
        step.tokens[:count] = forward_pass.tokens
        step.start.fill_(forward_pass.start)
        if tree is not None:
            step.depth[:count] = tree.depths
            step.among[:count, :count] = tree.ancestors
        elif step.holds_tree:
            step.depth.copy_(self._chain.depth[:rows])
            step.among.copy_(self._chain.among[:rows, :rows])
        step.holds_tree = tree is not None
        logits, final = step.run()
        return logits[:count], final[:count]

    def draft(self, start: int, tokens: Sequence[int], chain: ChainSpec) -> ChainResult | None:
        """Run these tokens, and a window after them, as one CUDA graph; None where it does not fit,
        or without a GPU.

        Distributions are valid until the next window.
        """
        rows, steps = padded(len(tokens)), chain.steps
        room = self.cache.capacity - start - rows
        if not self.cache.keys.is_cuda or rows > MOST_FED or steps > room:
            return None
        windows = self._windows.setdefault((rows, chain.temperature, chain.keeps_probs), [])
        # a few steps too many cost less than another capture, which the end of a text would
        # otherwise ask for
        max_steps = min(2 * steps, room)
        window = next((program for program in windows if steps <= program.steps <= max_steps), None)
        if window is None:
            window = self._compile_window(rows, start, chain)
            windows.append(window)
            self._on_compiled()
        return window.draft(start, tokens, chain)

    def _compile_window(self, rows: int, start: int, chain: ChainSpec) -> WindowProgram:
        """A program that feeds so many rows, and drafts as many steps as this chain."""
        shapes = {count: self._inputs(count) for count in {rows, 1}}

        def logits_of(tokens: Tensor, start: Tensor) -> Tensor:
            step = shapes[tokens.shape[0]]
            logits, _ = self._compiled(
                self._decoder, self.cache, self.memory, tokens, start, step.depth, step.among
            )
            return logits

        window = WindowProgram(logits_of, rows, chain, self.cache.keys.device)
        window.start.fill_(start)
        with torch._dynamo.config.patch(recompile_limit=COMPILED_SHAPES):
            window.program()
        window.run = self._captured(window.program)
        return window

    @cached_property
    def _compiled(self) -> Callable[..., Outputs]:
        return (
            torch.compile(forward, dynamic=False, fullgraph=True, backend=BACKEND)
            if self._compiles
            else forward
        )

    def _captured(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """One CUDA graph.

        The decoder replaces its tables when another text reaches further, so they are kept here.
        """
        self._tables.append(self._decoder.tables)
        return captured(run, self.cache.keys.device)

    @cached_property
    def _chain(self) -> CompiledStep:
        """Depths and ancestors of a chain with the largest number of rows."""
        return self._inputs(ROW_COUNTS[-1])

    def _inputs(self, rows: int) -> CompiledStep:
        device = self.cache.keys.device
        return CompiledStep(
            tokens=torch.zeros(rows, dtype=torch.long, device=device),
            start=torch.zeros((), dtype=torch.long, device=device),
            depth=torch.arange(rows, device=device),
            among=torch.ones(rows, rows, dtype=torch.bool, device=device).tril(),
            run=lambda: (torch.empty(0), torch.empty(0)),
        )

    def _compile(self, rows: int, start: int) -> CompiledStep:
        step = self._inputs(rows)

        def run() -> Outputs:
            return self._compiled(
                self._decoder,
                self.cache,
                self.memory,
                step.tokens,
                step.start,
                step.depth,
                step.among,
            )

        step.start.fill_(start)
        with torch._dynamo.config.patch(recompile_limit=COMPILED_SHAPES):
            run()
        step.run = run if step.tokens.device.type != "cuda" else self._captured(run)
        return step


def forward(
    decoder: LlamaDecoder | T5Decoder,
    cache: KeyValueCache,
    memory: tuple[Memory, ...],
    tokens: Int[Tensor, " m"],
    start: Int[Tensor, ""],
    depth: Int[Tensor, " m"],
    among: Bool[Tensor, "m m"],
) -> Outputs:
    """Run rows at slots start … start + m − 1. depth: [m] and among: [m, m], ancestors, describe
    the chain or tree.
    """
    m = tokens.shape[0]
    places = torch.arange(cache.capacity, device=tokens.device)
    positions = start + depth
    row = places - start  # the row that fills each slot, if it is in 0 … m − 1
    filled, nearest = (row >= 0) & (row < m), row.clamp(0, m - 1)
    rows = PlacedRows(
        start + torch.arange(m, device=tokens.device),
        cache.capacity,
        positions,
        # PyTorch 2.13's compiler copies into an expanded mask wrongly, so this is a lookup
        visible=torch.where(filled, among[:, nearest], row < 0),
        key_positions=torch.where(filled, positions[nearest], places),
    )
    x = decoder.run(decoder.embed(tokens), rows, cache, *memory, layers=range(len(decoder.layers)))
    final = decoder.final(x)
    return decoder.scores(final), final


def captured(run: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """A function's kernels as one CUDA graph over the function's memory. The graph has addresses
    alone, so the caller has to keep the memory. device: where they run, current or not.
    """
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        # warm-up: a graph cannot record the libraries' initialization
        with torch.cuda.stream(aside):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # threads that run another model may allocate meanwhile
        capture = torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local")
        with own_cublas_memory(), capture:
            out = run()

    def replay() -> Result:
        graph.replay()
        return out

    return replay


@contextmanager
def own_cublas_memory() -> Iterator[None]:
    """The graph that is captured inside the block has cuBLAS's memory of its own.

    Otherwise it would share that of its stream. PyTorch gives 32 streams out in turn, and from 2.12
    on frees a stream's memory with any graph that was captured there (pytorch#193402).
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def padded(count: int) -> int:
    """The padded number of rows for a step of `count` rows."""
    return next((rows for rows in ROW_COUNTS if rows >= count), count)


def roomy(slots: int) -> int:
    """A power of two of at least `slots` slots: few distinct capacities, as each needs its own
    compilation.
    """
    return max(LEAST_CAPACITY, 1 << (slots - 1).bit_length())
