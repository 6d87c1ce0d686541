"""One sequence in one model: which rows are cached, pending, or partly run.

Shared by both engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from bild_lab.engine.draft import Tree
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.session import (
    ALL_LOGITS,
    NOTHING,
    ChainResult,
    ChainSpec,
    GrownTree,
    OutputSpec,
    Rows,
    Scores,
    Skipped,
    TreeSpec,
    as_rows,
    on_device,
)
from bild_lab.engine.trace import Forward

PROMPT = OutputSpec(logits=1, prompt=True)
LONG_PROMPT = 256  # rows


@dataclass(frozen=True)
class ForwardPass:
    """One forward of some rows through some layers. Keys and values are stored from cache slot
    `start` on.

    tokens: [m]. tree: None for a chain. states: [m, dim], the input of the first layer; None: the
    tokens' embeddings.
    layers: indices, ascending; None: all. logits, head_input: for how many of the last rows; 0:
    none. hidden, fill,
    skipped, vocabulary: as in `OutputSpec`. prompt: how many of the first rows belong to the prompt.
    """

    start: int
    tokens: Int[Tensor, " m"]
    tree: Tree | None
    states: Float[Tensor, "m dim"] | None
    layers: Sequence[int] | None
    logits: int
    head_input: int
    hidden: tuple[int, ...]
    fill: bool
    prompt: int
    skipped: Skipped = NOTHING
    vocabulary: DraftVocabulary | None = None

    @property
    def count(self) -> int:
        return self.tokens.shape[0]

    @property
    def earlier(self) -> int:
        """How many of the tree's rows ran before."""
        return 0 if self.tree is None else len(self.tree) - self.count

    @property
    def read(self) -> int:
        """For how many of the last rows the head's input is needed."""
        return max(self.logits, self.head_input)

    @property
    def whole(self) -> bool:
        """Whether it is a plain forward: all layers, from token ids to logits, without hidden
        states.
        """
        return self.layers is None and self.states is None and not self.hidden and not self.fill


class Layers(Protocol):
    """What an engine implements: a model's layers and the KV cache of one sequence. By default it
    has no programs.

    reserved: the first slots, which hold a prefix and never roll back. source: the number of
    encoder tokens, 0 for decoder-only models. supports_draft_vocab: its head can score the tokens of a
    `DraftVocabulary` alone.
    """

    supports_draft_vocab = False
    config: PreTrainedConfig
    device: torch.device
    depth: int
    reserved: int
    source: int

    def run(self, work: ForwardPass) -> Scores:
        """Run the rows. `hidden` of the result has all rows."""

    def draft(self, start: int, tokens: Sequence[int], chain: ChainSpec) -> ChainResult | None:
        """Run these rows from slot `start` on, and a chain after them; None if there is no program
        for it.
        """
        return None

    def forwards(self, start: int, count: int) -> list[tuple[int, int]]:
        """The forwards that run rows from slot `start` on: the first slot and the number of rows of
        each.

        They begin before this slot if rows have to run again, because a state cannot be cut.
        """
        return [(start, count)]

    def forward_until_confident(
        self, start: int, token: int, threshold: float
    ) -> tuple[Float[Tensor, "1 vocab"], int] | None:
        """As in `StagedSession`, at slot `start`."""
        return None

    def grow(self, start: int, tokens: Sequence[int], tree_spec: TreeSpec) -> GrownTree | None:
        """Run these rows from slot `start` on, and a tree after them; None if there is no program
        for it.
        """
        return None

    def scored(self, work: ForwardPass) -> int:
        """For how many rows the head runs."""
        return work.read

    def last_memory(
        self, layers: int
    ) -> tuple[Float[Tensor, "layers heads s dim"], Float[Tensor, "layers heads s dim"]]:
        """Keys and values of the source in the last so many layers, which have run before."""

    def gather(self, start: int, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        """Move these rows, counted from slot `start`, to slot `start` and the following slots, in
        these layers.
        """


@dataclass(frozen=True)
class Started:
    """Drafted rows after the cached ones that have run through the first layers only, as in early
    exit.

    The cache holds their keys and values for these layers. states: the output of the last of these
    layers.
    """

    tokens: Int[Tensor, " n"]
    states: Float[Tensor, "n dim"]
    layers: int

    def shared(self, tokens: Int[Tensor, " m"]) -> int:
        """The length of the common prefix of these tokens and the given ones.

        Synchronizes with the device.
        """
        both = min(self.tokens.shape[0], tokens.shape[0])
        return int((self.tokens[:both] == tokens[:both]).long().cumprod(0).sum())


class CachedSession:
    """A session over an engine's layers.

    A decoder-only prompt runs together with the first rows. Drafted rows that have run through the
    first layers (`Rows.position`) do not run these again: if the text's next rows have the same
    tokens, only the other layers run (BiLD §4.4).
    """

    def __init__(
        self, layers: Layers, prompt: Sequence[int], forwards: list[Forward] | None = None
    ) -> None:
        self.layers, self.forwards = layers, [] if forwards is None else forwards
        # slots of the prefix and of rows that have run through all layers
        self._cached = layers.reserved
        self._base = self._cached  # the slot of the last extend's first row
        self._pending = list(prompt[:-1])  # prompt tokens that have not run yet
        self._started: Started | None = None
        if layers.source:
            self.forwards.append(
                Forward(layers.config, layers.source, source=layers.source, encoder=True)
            )

    @property
    def length(self) -> int:
        return self._cached - self.layers.reserved + len(self._pending)

    @torch.inference_mode()
    def extend(
        self, rows: Rows | Sequence[int] | Int[Tensor, " m"], output_spec: OutputSpec = ALL_LOGITS
    ) -> Scores:
        rows = as_rows(rows)
        if rows.position is not None:
            self.prefill()
        tokens, tree = on_device(rows.tokens, self.layers.device), rows.tree
        count, waiting = tokens.shape[0], len(self._pending) if rows.states is None else 0
        if waiting:
            tokens, tree = self._prepend_prompt(tokens, tree)
        wanted = count if output_spec.logits is None else output_spec.logits
        shown = waiting + count if output_spec.prompt else count
        work = ForwardPass(
            start=self._cached if rows.position is None else self.layers.reserved + rows.position,
            tokens=tokens,
            tree=tree,
            states=rows.states,
            layers=output_spec.layers,
            logits=wanted,
            head_input=0 if not output_spec.head_input else shown if output_spec.prompt else wanted,
            hidden=output_spec.hidden,
            fill=output_spec.fill,
            prompt=waiting,
            skipped=output_spec.skipped,
            vocabulary=output_spec.vocabulary,
        )
        scores = self._run_text(work) if rows.position is None else self._run_draft(work)
        hidden = (
            scores.hidden
            if shown == work.count
            else tuple(state[-shown:] for state in scores.hidden)
        )
        return Scores(scores.logits, scores.head_input, hidden)

    @torch.inference_mode()
    def draft(self, rows: Sequence[int], chain: ChainSpec) -> ChainResult | None:
        if not chain.plain:
            return None
        if chain.position is not None:
            return self._draft_ahead(rows, chain, self.layers.reserved + chain.position)
        tokens = self._fed(rows)
        drafted = self.layers.draft(self._cached, tokens, chain)
        if drafted is not None:
            self._have_run([len(tokens), *[1] * (drafted.forwards - 1)], chain.vocabulary)
        return drafted

    @torch.inference_mode()
    def forward_until_confident(
        self, token: int, threshold: float
    ) -> tuple[Float[Tensor, "1 vocab"], int] | None:
        self.prefill()
        found = self.layers.forward_until_confident(self._cached, token, threshold)
        if found is not None:
            self._base, self._started = self._cached, None
            self._cached = self._ran(
                self._cached, [1], layers=found[1], filled_layers=self.layers.depth - found[1]
            )
        return found

    @torch.inference_mode()
    def grow(self, rows: Sequence[int], tree_spec: TreeSpec) -> GrownTree | None:
        if not tree_spec.plain:
            return None
        tokens = self._fed(rows)
        grown = self.layers.grow(self._cached, tokens, tree_spec)
        if grown is not None:
            self._base = self._cached + len(tokens)
            self._have_run([len(tokens), *grown.forwards[1:]], tree_spec.vocabulary)
        return grown

    def keep(self, path: Sequence[int]) -> None:
        if list(path) != list(range(len(path))):
            with torch.inference_mode():  # only here: entering it takes time
                self.layers.gather(self._base, path)
        self._cached = self._base + len(path)

    def rollback(self, length: int) -> None:
        self._started = None
        self._cached = min(self._cached, self.layers.reserved + length)

    def prefill(self) -> None:
        if self._pending:
            last = self._pending.pop()  # the others run with it
            self.extend([last], PROMPT)

    def memory(self, layers: int) -> tuple[Tensor, Tensor]:
        return self.layers.last_memory(layers)

    @torch.inference_mode()
    def commit_row(self, row: int, layers: Sequence[int]) -> None:
        if row:
            self.layers.gather(self._cached, [row], layers)

    def _fed(self, rows: Sequence[int]) -> list[int]:
        """These rows after the prompt's, unless it is long: a program holds all its rows in
        memory.
        """
        if len(self._pending) > LONG_PROMPT:
            self.prefill()
        return [*self._pending, *rows]

    def _scored(self, vocabulary: DraftVocabulary | None) -> int | None:
        """How many tokens the head scores; None for all."""
        return (
            len(vocabulary) if vocabulary is not None and self.layers.supports_draft_vocab else None
        )

    def _have_run(self, counts: Sequence[int], vocabulary: DraftVocabulary | None) -> None:
        """A program ran forwards of so many rows, the pending ones among the first."""
        self._pending, self._started = [], None
        self._cached = self._ran(self._cached, counts, vocabulary=self._scored(vocabulary))

    def _ran(self, start: int, counts: Sequence[int], **what: int | None) -> int:
        """Record the forwards of a program, with so many rows each. what: other fields.

        Returns the next slot.
        """
        for index, rows in enumerate(counts):
            source, scored = self.layers.source, rows if index else 1
            self.forwards.append(Forward(self.layers.config, rows, start, scored, source, **what))
            start += rows
        return start

    def _prepend_prompt(self, tokens: Tensor, tree: Tree | None) -> tuple[Tensor, Tree | None]:
        """The pending prompt tokens, then these rows; with a tree, the combined tree."""
        waiting = len(self._pending)
        tokens = torch.cat([on_device(self._pending, tokens.device), tokens])
        self._pending = []
        if tree is None:
            return tokens, None
        chain = torch.arange(-1, waiting - 1, device=tokens.device)
        # a root (-1) follows the last prompt token
        return tokens, Tree(torch.cat([chain, tree.parents + waiting]))

    def _run_draft(self, work: ForwardPass) -> Scores:
        """Run drafted rows. If they ran through the first layers, remember the output of those."""
        first = work.tree is None and is_first(work.layers, work.skipped)
        hidden = (*work.hidden, len(work.layers)) if first else work.hidden
        scores = self._run(replace(work, hidden=hidden))
        if not first:
            self._started = None  # other keys and values may stand in its slots now
            return scores
        *hidden, states = scores.hidden
        self._remember(work.start, Started(work.tokens, states, len(work.layers)))
        return Scores(scores.logits, scores.head_input, tuple(hidden))

    def _draft_ahead(self, rows: Sequence[int], chain: ChainSpec, start: int) -> ChainResult | None:
        """Draft rows of some layers, from slot `start` on, as one program."""
        self.prefill()
        drafted = self.layers.draft(start, rows, chain)
        if drafted is None:
            return None
        end = self._ran(
            start,
            [len(rows), *[1] * (drafted.forwards - 1)],
            layers=len(chain.layers),
            skipped_attention=len(chain.skipped.attention),
            skipped_feed_forward=len(chain.skipped.feed_forward),
            vocabulary=self._scored(chain.vocabulary),
        )
        if is_first(chain.layers, chain.skipped):
            ran = on_device([*rows, *drafted.tokens][: end - start], self.layers.device)
            self._remember(start, Started(ran, drafted.states, len(chain.layers)))
        else:
            self._started = None
        return drafted

    def _remember(self, start: int, ran: Started) -> None:
        """Drafted rows from slot `start` on have run through the first layers."""
        before, ahead = self._started, start - self._cached
        if ahead == 0:
            self._started = ran
        elif before is None or before.layers != ran.layers or before.tokens.shape[0] < ahead:
            self._started = None  # the states of the rows between are not known
        else:
            tokens = torch.cat([before.tokens[:ahead], ran.tokens])
            self._started = Started(
                tokens, torch.cat([before.states[:ahead], ran.states]), ran.layers
            )

    def _run_text(self, work: ForwardPass) -> Scores:
        """Run the text's next rows. They count as cached once the last layer has run."""
        self._base = work.start + work.prompt - work.earlier
        started, self._started = self._started, None
        if (
            started is not None
            and work.whole
            and work.tree is None
            and (same := started.shared(work.tokens))
        ):
            scores = self._run_rest(work, started.states[:same], started.layers)
        else:
            scores = self._run(work)
        if work.layers is None or (work.layers and work.layers[-1] == self.layers.depth - 1):
            self._cached = work.start + work.count
        return scores

    def _run_rest(self, work: ForwardPass, states: Float[Tensor, "n dim"], first: int) -> Scores:
        """The first n rows have run the `first` layers: run these for the other rows, then the rest
        for all rows.
        """
        done = states.shape[0]
        if done < work.count:
            late = replace(
                work,
                start=work.start + done,
                tokens=work.tokens[done:],
                layers=range(first),
                logits=0,
                head_input=0,
                hidden=(first,),
            )
            states = torch.cat([states, self._run(late).hidden[0]])
        return self._run(replace(work, states=states, layers=range(first, self.layers.depth)))

    def _run(self, work: ForwardPass) -> Scores:
        """Run and record the forward.

        With an empty list of layers, the given states go straight to the head.
        """
        chosen = work.layers
        if chosen is not None and not len(chosen) and work.hidden:
            scores = self._run(replace(work, hidden=())) if work.logits else Scores(None)
            return replace(scores, hidden=(work.states,) * len(work.hidden))
        ran = None if chosen is None else 0 if work.fill else len(chosen)
        first = 0 if work.states is None else chosen[0] if chosen else self.layers.depth
        scored = self.layers.scored(work)
        for cached, rows in self.layers.forwards(work.start, work.count):
            self.forwards.append(
                Forward(
                    self.layers.config,
                    rows=rows,
                    cached=cached,
                    scored=min(rows, scored),
                    source=self.layers.source,
                    layers=ran,
                    first_layer=first,
                    filled_layers=len(chosen) if work.fill else 0,
                    skipped_attention=len(work.skipped.attention),
                    skipped_feed_forward=len(work.skipped.feed_forward),
                    vocabulary=self._scored(work.vocabulary),
                )
            )
        return self.layers.run(work)


def is_first(layers: Sequence[int], skipped: Skipped) -> bool:
    """Whether these are the first layers, whole."""
    return not skipped and list(layers) == list(range(len(layers)))
