"""Predictive pipelined decoding on a real machine (Yang et al., 2023, Algorithm 1), future work in
the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.batch_scheduler import current_batch
from bild_lab.engine.decode import TokenLoop
from bild_lab.engine.draft import ROOT, Tree
from bild_lab.engine.methods.early_exit.layer_heads import (
    LayerHeads,
    LayerHeadsConfig,
    require_heads_of,
)
from bild_lab.engine.methods.ppd.theory import require_exit
from bild_lab.engine.models.checkpoint.vocabulary import biased, head_bias
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import (
    DraftShape,
    LoadedModel,
    OutputSpec,
    Rows,
    SessionOptions,
    StagedSession,
)
from bild_lab.engine.trace import Round, Trace
from bild_lab.errors import UserError, require_whole
from bild_lab.files import NamesFile

SHARED = "shared"

Work = Callable[[], Tensor]
RunBoth = Callable[[Work, Work], tuple[Tensor, Tensor]]  # two pieces at once, and both results

# from a layer, counted from 1, and its output
Head = Callable[[int, Float[Tensor, "n dim"]], Float[Tensor, "n vocab"]]


@dataclass(frozen=True)
class PredictivePipeline(TokenLoop):
    """The target without a drafter: each token starts while the one before it finishes. Lossless.

    After the exit layer d̄ of d a head predicts the next token. The k most likely candidates run
    through the first d − d̄ layers, as one batch, while the current token runs through the last d −
    d̄ layers: on the CPU in two threads with one intra-op thread each, on a GPU in two streams. The
    next token is always the one that the last layer chooses, greedily or sampled. If it was a
    candidate, its first layers are not run again.

    A candidate attends to the current token and everything before it, but to no other candidate.
    Both use different layers of the cache, so they may run at once. A round's statistics hold, in
    layer-time units, `latency_units` (layers that the current token ran one after another),
    `compute_units` (those, plus the layers of every candidate) and `concurrent_units` (the part of
    the latency during which candidates could run), and `matched`, whether the next token was a
    candidate, None for the last token. The text's statistics hold `layers`, `exit_layer` and
    `top_k`.

    exit_layer: d̄, from d/2 to d − 1; None for half the layers, rounded up.
    top_k: k.
    heads: "shared" for the target's own head, or a folder of heads trained for each layer.

    Raises UserError for values out of range, and for a target or heads that do not fit.
    """

    draft_shape: ClassVar[DraftShape] = DraftShape.TREES
    cuda_graph_safe: ClassVar[bool] = False

    target: LoadedModel
    exit_layer: int | None = None
    top_k: int = 3
    heads: Annotated[str, NamesFile((SHARED,))] = SHARED

    def __post_init__(self) -> None:
        self.target.require_layers("ppd", at_once=True)
        if self.target.compiled:
            raise UserError(
                "ppd runs parts of the target's layers, which are not compiled; set"
                " runtime.compile=false"
            )
        self._require_exit()
        vocabulary = self.target.checkpoint.columns
        require_whole("top_k", self.top_k, 1, vocabulary, f"the target has {vocabulary} tokens")
        if not isinstance(self.heads, str) or not self.heads:
            raise UserError(
                f"heads must be {SHARED} or a folder of heads trained for each layer, got"
                f" {self.heads!r}"
            )
        if self.heads != SHARED:
            require_heads_of(self.target, LayerHeadsConfig.read(self.heads), self.heads, self._exit)

    def lossless(self, sampling: Sampling) -> bool:
        return True

    def prepare(self, request: Request) -> None:
        """Read the heads."""
        _ = self._trained_head

    def rounds(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        trace.stats |= {"layers": self.target.depth, "exit_layer": self._exit, "top_k": self.top_k}
        limits = request.limits
        tokens = list(request.source.prompt)
        candidate_layers = self.target.depth - self._exit
        with trace.span("prefill"):
            session = self.target.start(
                request.source, limits.max_new_tokens + self.top_k, SessionOptions(trace.forwards)
            )
        # the current token after d − d̄ layers, if it was a candidate
        states: Float[Tensor, "1 dim"] | None = None
        with two_lanes(self.target.device) as run_both:
            while not limits.reached(tokens):
                layers_done = 0 if states is None else candidate_layers
                step = PipelineStep(self, session, request, trace, run_both, layers_done)
                with one_thread_a_lane(self.target.device):
                    token, states = step.next(tokens, states)
                tokens = limits.append(tokens, [token])
                matched = None if limits.reached(tokens) else states is not None
                stats = {**step.units, "matched": matched}
                trace.rounds.append(Round(next_token=token, stats=stats))
                yield [token]

    @cached_property
    def _trained_head(self) -> Head | None:
        """The heads trained for each layer; None if the target's own head is used."""
        if self.heads == SHARED:
            return None
        target = self.target
        heads = LayerHeads.load(self.heads).to(target.device, target.dtype).requires_grad_(False)
        bias = head_bias(target.checkpoint, target.dtype, target.device)
        return lambda layer, states: biased(heads.logits(layer, states), bias)

    @property
    def _exit(self) -> int:
        return math.ceil(self.target.depth / 2) if self.exit_layer is None else self.exit_layer

    def _require_exit(self) -> None:
        depth = self.target.depth
        if depth == 1:
            raise UserError("ppd needs a target of two layers or more, got one; use policy=vanilla")
        require_exit(depth, self._exit)
        if self._exit == depth:
            raise UserError(
                f"exit_layer must leave a layer to run beside the candidates, got {self._exit} of"
                f" {depth}; use at most {depth - 1}"
            )


@dataclass
class PipelineStep:
    """One token: it runs to the exit layer, then to the last layer in parallel with the next
    token's candidates.

    layers_done: how many layers it ran as a candidate.
    """

    pipeline: PredictivePipeline
    session: StagedSession
    request: Request
    trace: Trace
    run_both: RunBoth
    layers_done: int

    def __post_init__(self) -> None:
        self.exit = self.pipeline._exit
        self.depth = self.pipeline.target.depth
        self.candidate_layers = self.depth - self.exit
        self.candidate_count = 0

    @property
    def units(self) -> dict[str, int]:
        """Layer-time units of the token, after it was chosen."""
        latency = self.depth - self.layers_done
        return {
            "latency_units": latency,
            "compute_units": latency + self.candidate_layers * self.candidate_count,
            "concurrent_units": self.candidate_layers,
        }

    def next(
        self, tokens: list[int], states: Float[Tensor, "1 dim"] | None
    ) -> tuple[int, Tensor | None]:
        """The next token, and its hidden state after d − d̄ layers if it was a candidate.

        states: the current token's, if it was a candidate.
        """
        is_last = self.request.limits.room(tokens) == 1  # no token comes after the next one
        with self.trace.span("draft"):
            rows, candidates = self._run_to_exit(tokens, states, is_last)
        with self.trace.span("verify"):
            if candidates is None:
                return int(self._choose(self._finish(rows))), None
            self.candidate_count = candidates.shape[0]
            position = self.session.length + len(rows.states)
            logits, candidate_states = self.run_both(
                lambda: self._finish(rows), lambda: self._start(candidates, position)
            )
            token, *candidate_tokens = torch.cat([self._choose(logits), candidates]).tolist()
        if token not in candidate_tokens:
            return token, None
        row = candidate_tokens.index(token)
        self.session.commit_row(row, range(self.candidate_layers))
        return token, candidate_states[row : row + 1]

    def _run_to_exit(
        self, tokens: list[int], states: Float[Tensor, "1 dim"] | None, is_last: bool
    ) -> tuple[Rows, Int[Tensor, " k"] | None]:
        """Run the new rows to the exit layer.

        Returns them and the candidates for the next token.
        """
        trained_head = self.pipeline._trained_head
        reads_target_head = not is_last and trained_head is None
        output_spec = OutputSpec(
            logits=int(reads_target_head),
            layers=range(self.layers_done, self.exit),
            hidden=(self.exit,),
            prompt=True,
        )
        new_tokens = tokens[self.session.length :]
        scores = self.session.extend(Rows(new_tokens, states=states), output_spec)
        (exit_states,) = scores.hidden
        rows = Rows(tokens[-len(exit_states) :], states=exit_states)
        if is_last:
            return rows, None
        last_state = exit_states[-1:]
        logits = scores.logits if trained_head is None else trained_head(self.exit, last_state)
        return rows, logits[-1].topk(self.pipeline.top_k).indices

    def _finish(self, rows: Rows) -> Float[Tensor, "1 vocab"]:
        """Run the current token through the layers after the exit."""
        return self.session.extend(
            rows, OutputSpec(logits=1, layers=range(self.exit, self.depth))
        ).logits

    def _start(self, candidates: Int[Tensor, " k"], position: int) -> Float[Tensor, "k dim"]:
        """Run the candidates for this position through their first layers.

        They do not attend to each other.
        """
        siblings = Tree(torch.full_like(candidates, ROOT))
        output_spec = OutputSpec(
            logits=0, layers=range(self.candidate_layers), hidden=(self.candidate_layers,)
        )
        rows = Rows(candidates, siblings, position=position)
        return self.session.extend(rows, output_spec).hidden[0]

    def _choose(self, logits: Float[Tensor, "1 vocab"]) -> Int[Tensor, " 1"]:
        return self.request.sampling.choose(logits, self.request.generator)


@contextmanager
def two_lanes(device: torch.device) -> Iterator[RunBoth]:
    """A function that runs two functions at once and returns both results when both are done.

    In a batch they run one after the other, each together with the rows of other texts.
    """
    if current_batch() is not None:
        yield lambda here, beside: (here(), beside())
        return
    if device.type == "cuda":
        yield partial(in_two_streams, torch.cuda.Stream(device))
        return
    with ThreadPoolExecutor(1) as worker:
        yield partial(in_two_threads, worker)


@contextmanager
def one_thread_a_lane(device: torch.device) -> Iterator[None]:
    """Inside the block PyTorch has one thread of the CPU for each lane. A stream leaves the block with each
    token, as its reader may do something else then.
    """
    if current_batch() is not None or device.type == "cuda":
        yield
        return
    threads = torch.get_num_threads()
    # The number is per thread; a new thread starts with the last one set. More than one thread per
    # lane would not help: idle PyTorch threads of one lane spin on the core that the other lane
    # needs.
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_two_threads(worker: ThreadPoolExecutor, here: Work, beside: Work) -> tuple[Tensor, Tensor]:
    """Run `beside` in the worker thread. Kernels release Python's GIL, so both run in parallel."""
    # inference mode is per thread
    second_future = worker.submit(torch.inference_mode()(beside))
    try:
        first_result = here()
    finally:
        # wait for it even after an error: it uses the same cache
        second_result = second_future.result()
    return first_result, second_result


def in_two_streams(aside: torch.cuda.Stream, here: Work, beside: Work) -> tuple[Tensor, Tensor]:
    """Run `beside` in its own stream.

    Both start after the current stream's queued work, which then waits for both.
    """
    current = torch.cuda.current_stream(aside.device)
    begun = current.record_event()
    first_result = here()  # launched first, as the text waits for it
    aside.wait_event(begun)
    with torch.cuda.stream(aside):
        second_result = beside()
    current.wait_stream(aside)
    return first_result, second_result
