"""Chains that a GPU drafts by itself: forwards of one row a text, until every chain has ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.models.native.gpu.graphs import GraphCache
from bild_lab.engine.models.native.gpu.heads import Head, ScoreBuffers
from bild_lab.engine.models.native.gpu.inputs import MAX_ROWS, CopiedTables, PassInputs
from bild_lab.engine.models.native.gpu.plan import ForwardPlan, Launch, PassShape, padded
from bild_lab.engine.models.native.gpu.programs import (
    MAX_END_TOKENS,
    MAX_STEPS,
    draft_by_kind,
    fill_first,
    steps_for,
    write_end_tokens,
)
from bild_lab.engine.models.native.gpu.rows import choose
from bild_lab.engine.models.native.packed_pass import SequenceSlice
from bild_lab.engine.sampling import pick
from bild_lab.engine.session import ChainResult, ChainSpec, result_of_steps


@dataclass(frozen=True)
class ChainShape:
    """What decides a program: programs of one shape share a CUDA graph.

    first, step: of the forward of the fed rows, and of those after it.
    texts, steps: how many at most; a place without a chain is as one that has ended.
    temperature, keeps_probs: as in `ChainSpec`.
    keeps_states: return the rows' states after the last layer that ran.
    """

    first: PassShape
    step: PassShape
    texts: int
    steps: int
    temperature: float
    keeps_probs: bool
    keeps_states: bool


class KeptProbs:
    """Where programs leave the distributions of each step.

    Programs of all shapes share one piece of memory, as one of them runs at a time and its results
    are copied. For a shape that needs more, a piece of at least twice the size is made. A shape
    stays where it was first put, since graphs write there, so all pieces together are at most twice
    as large as the last.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device=device)
        self._places: dict[tuple[int, int, int], Tensor] = {}

    def of(self, steps: int, texts: int, vocab: int) -> Float[Tensor, "steps texts vocab"]:
        """The distributions of a program of so many steps and texts."""
        shape = (steps, texts, vocab)
        if shape not in self._places:
            size = math.prod(shape)
            if size > len(self._memory):
                self._memory = self._memory.new_empty(max(size, 2 * len(self._memory)))
            self._places[shape] = self._memory[:size].view(shape)
        return self._places[shape]


class KeptStates:
    """Where programs leave the states of their rows after the last layer that ran.

    first: [MAX_ROWS, dim], of the first forward. The forwards after it have one row a text.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        self.first = torch.zeros(MAX_ROWS, dim, dtype=torch.float32, device=device)
        self._later = torch.zeros(
            (MAX_STEPS - 1) * MAX_ROWS * dim, dtype=torch.float32, device=device
        )

    def later(self, steps: int, texts: int) -> Float[Tensor, "later texts dim"]:
        """Where the forwards after the first write, in a program of so many steps and texts."""
        shape = (steps - 1, texts, self.first.shape[1])
        return self._later[: math.prod(shape)].view(shape)


class ChainTables:
    """What a program reads of its chains, and what it drafts, at fixed addresses.

    A chain's row r is text r's. See `choose` for the tables. The rules are written by one copy, and
    what is drafted is read by one.
    """

    def __init__(self, device: torch.device) -> None:
        self._rules = CopiedTables(
            {
                "chains": (2, MAX_ROWS),
                "thresholds": (MAX_ROWS,),
                "end_tokens": (MAX_ROWS, MAX_END_TOKENS),
                "running": (1,),
            },
            device,
        )
        self.chains, thresholds, self.end_tokens, self._running = self._rules.tables.values()
        self.thresholds = thresholds.view(torch.float64)
        self.uniforms = torch.zeros(MAX_STEPS, MAX_ROWS, dtype=torch.float64, device=device)
        self.picked = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        # of each step the tokens, then the bits of the confidences
        self._drafted = torch.zeros(MAX_STEPS, 2, MAX_ROWS, dtype=torch.int64, device=device)
        self.tokens = self._drafted[:, 0]
        self.confidences = self._drafted.view(torch.float64)[:, 1]
        self.probs, self.unscaled_probs = KeptProbs(device), KeptProbs(device)

    def fill(self, chains: Sequence[ChainSpec], running: Int[Tensor, "1"]) -> None:
        """Write the chains' rules, and that all of them run. The host does not wait."""
        count = len(chains)
        tables = self._rules.parts_of(self._rules.next())
        rules, thresholds, end_tokens, running_chains = tables.values()
        rules[0] = 0
        rules[0, :count] = [chain.steps for chain in chains]
        rules[1, :count] = [chain.threshold is not None for chain in chains]
        thresholds.view(np.float64)[:count] = [chain.threshold or 0.0 for chain in chains]
        ends = [chain.end_tokens if chain.is_read else () for chain in chains]
        write_end_tokens(end_tokens, ends)
        for index, chain in enumerate(chains):
            if chain.uniforms is not None:
                self.uniforms[: chain.steps, index] = chain.uniforms
        running_chains[:] = count
        self._rules.copy()
        running.copy_(self._running)

    def read(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and the confidences of so many steps, [steps, MAX_ROWS] each, on the host,
        which waits for the program.
        """
        drafted = self._drafted[:steps].cpu().numpy()
        return drafted[:, 0], drafted.view(np.float64)[:, 1]


class ChainPrograms:
    """The programs of one decoder.

    All forwards of a program are in one CUDA graph. Once every chain has ended, by a confidence, an
    end token or its length, the kernels of the forwards that remain leave at once. `ChainProgress`
    says afterwards where each chain ended, from the same tokens and confidences.
    """

    def __init__(self, plan: ForwardPlan, graphs: GraphCache) -> None:
        self._plan, self._graphs = plan, graphs
        # of the forwards after the first
        self._inputs = PassInputs(plan.stack.heads // plan.stack.kv_heads, plan.device)
        self._tables = ChainTables(plan.device)
        self._kept_states: KeptStates | None = None

    def draft(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        chains: Sequence[ChainSpec],
    ) -> Sequence[ChainResult | None]:
        """Run the rows of each text, and a chain after them; None for a text that has no program."""
        kinds = [
            (chain.temperature, chain.keeps_probs) if has_program(fed, chain) else None
            for fed, chain in zip(tokens, chains, strict=True)
        ]
        counts = [len(fed) for fed in tokens]
        return draft_by_kind(kinds, counts, self._draft_together, tokens, texts, chains)

    def _draft_together(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        chains: Sequence[ChainSpec],
    ) -> list[ChainResult]:
        """Chains of texts whose rows fit one forward."""
        plan, chain = self._plan, chains[0]
        # 1. the tables of the first forward, of those after it, and of the chains
        texts, tiles = fill_first(plan, tokens, texts)
        next_rows = [
            text._replace(count=1, start=text.start + text.count, scored=1) for text in texts
        ]
        step_tiles = self._inputs.fill(next_rows)
        self._tables.fill(chains, plan.buffers.running)
        # 2. the program
        last_rows = [
            row._replace(start=row.start + max(0, spec.steps - 2))
            for row, spec in zip(next_rows, chains, strict=True)
        ]
        layers = range(len(plan.stack.layers)) if chain.layers is None else chain.layers
        shape = PassShape.unsized(layers, skipped=chain.skipped, vocabulary=chain.vocabulary)
        program = ChainShape(
            first=plan.sized(shape, texts, tiles),
            step=plan.sized(shape._replace(stoppable=True), last_rows, step_tiles),
            texts=padded(len(texts)),
            steps=steps_for(max(chain.steps for chain in chains)),
            temperature=chain.temperature,
            keeps_probs=chain.keeps_probs,
            keeps_states=chain.layers is not None,
        )
        self._graphs.run(program, lambda: self.launches(program))
        # 3. what was drafted
        return self._results(program, texts, chains)

    def launches(self, program: ChainShape) -> list[Callable[[], Any]]:
        """All forwards of a program, each with the choice of its tokens."""
        plan = self._plan
        head = plan.heads.of(program.step.vocabulary)
        scores = plan.scores_of(head)
        launches = plan.launches(program.first)
        launches += self._choice(program, 0, head, scores)
        for step in range(1, program.steps):
            launches += plan.launches(program.step, inputs=self._inputs)
            launches += self._choice(program, step, head, scores)
        return launches

    def _choice(
        self, program: ChainShape, step: int, head: Head, scores: ScoreBuffers
    ) -> list[Callable[[], Any]]:
        """Choose the tokens of one step, and keep what the results need of it."""
        tables, plan, texts = self._tables, self._plan, program.texts
        logits = scores.logits[:texts]
        launches: list[Callable[[], Any]] = []
        if program.keeps_states and step == 0:
            launches.append(plan.copy_of_stream(self._states.first, program.first))
        elif program.keeps_states:
            states = self._states.later(program.steps, texts)[step - 1]
            launches.append(plan.copy_of_stream(states, program.step._replace(rows=texts)))
        if program.keeps_probs:
            unscaled_probs = tables.unscaled_probs.of(program.steps, texts, head.vocab)[step]
            launches.append(lambda: torch.softmax(logits, -1, out=unscaled_probs))
        if program.temperature > 0:
            probs = tables.probs.of(program.steps, texts, head.vocab)[step]
            temperature, uniforms = program.temperature, tables.uniforms[step, :texts]

            def draw() -> None:
                torch.softmax(logits / temperature, -1, out=probs)
                columns, picked = pick(probs, uniforms), tables.picked[:texts]
                if head.tokens is None:
                    torch.add(columns, 0, out=picked)
                else:
                    torch.index_select(head.tokens, 0, columns, out=picked)

            launches.append(draw)
        launches.append(self._choose(program, step, head, scores))
        return launches

    def _choose(self, program: ChainShape, step: int, head: Head, scores: ScoreBuffers) -> Launch:
        tables = self._tables
        constants = {
            "ADVANCES": step > 0,
            "PICKED": program.temperature > 0,
            "NARROW": head.tokens is not None,
            "TILES": scores.compared_tiles,
            "STEP_NUMBERS": tables.tokens.stride(0),
            "END_TOKENS": MAX_END_TOKENS,
        }
        arguments = {
            **vars(scores),
            **self._inputs.tables,
            "picked": tables.picked,
            "head_tokens": tables.picked if head.tokens is None else head.tokens,
            "chain_table": tables.chains,
            "thresholds": tables.thresholds,
            "end_tokens": tables.end_tokens,
            "drafted": tables.tokens,
            "confidences": tables.confidences,
            "step": step,
        }
        return self._plan.launch(choose, (program.texts,), arguments, constants, scores.warps)

    def _results(
        self, program: ChainShape, texts: Sequence[SequenceSlice], chains: Sequence[ChainSpec]
    ) -> list[ChainResult]:
        """What each chain drafted, up to its end; one transfer to the host."""
        tables = self._tables
        reads = any(chain.is_read for chain in chains)
        if reads:
            all_tokens, all_confidences = tables.read(max(chain.steps for chain in chains))
        results, first_row = [], 0
        for index, (text, chain) in enumerate(zip(texts, chains, strict=True)):
            steps = slice(chain.steps)
            if reads:
                drafted = result_of_steps(
                    chain,
                    all_tokens[steps, index].tolist(),
                    all_confidences[steps, index].tolist(),
                )
            else:
                drafted = ChainResult(tables.tokens[steps, index].clone(), chain.steps)
            count, forwards = len(drafted.tokens), drafted.forwards
            results.append(
                replace(
                    drafted,
                    probs=self._probs(tables.probs, program, index, count, chain.temperature > 0),
                    unscaled_probs=self._probs(
                        tables.unscaled_probs, program, index, count, chain.keeps_probs
                    ),
                    states=self._chain_states(program, index, text, first_row, forwards),
                )
            )
            first_row += text.count
        return results

    @property
    def _states(self) -> KeptStates:
        """Made once a program keeps them, as few methods ask for them."""
        if self._kept_states is None:
            self._kept_states = KeptStates(self._plan.dim, self._plan.device)
        return self._kept_states

    def _probs(
        self,
        store: KeptProbs,
        program: ChainShape,
        index: int,
        count: int,
        is_kept: bool,
    ) -> Float[Tensor, "n vocab"] | None:
        """The distributions of a chain's drafted tokens, if they are kept."""
        if not is_kept:
            return None
        heads = self._plan.heads
        head = heads.of(program.step.vocabulary)
        probs = store.of(program.steps, program.texts, head.vocab)[:count, index]
        return heads.widened(probs, head, 0.0)

    def _chain_states(
        self, program: ChainShape, index: int, text: SequenceSlice, first_row: int, forwards: int
    ) -> Float[Tensor, "rows dim"] | None:
        """The states of a text's rows that ran, if they are kept."""
        if not program.keeps_states:
            return None
        fed_states = self._states.first[first_row : first_row + text.count]
        drafted_states = self._states.later(program.steps, program.texts)[: forwards - 1, index]
        return torch.cat([fed_states, drafted_states])


def has_program(tokens: Sequence[int], chain: ChainSpec) -> bool:
    """Whether a text's rows, and its chain, fit a forward and tables."""
    return (
        len(tokens) <= MAX_ROWS
        and chain.steps <= MAX_STEPS
        and len(chain.end_tokens) <= MAX_END_TOKENS
    )
