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
    ChainResult,
    ChainSpec,
    Drafted,
    DraftSpec,
    OutputSpec,
    RowsOrTokens,
    Scores,
    Skipped,
    TreeSpec,
    as_rows,
    on_device,
)
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError

PROMPT = OutputSpec(logits=1, prompt=True)
LONG_PROMPT = 256  # rows


@dataclass(frozen=True)
class ForwardPass:
    """One forward of some rows through some layers. Keys and values are stored from cache slot
    `start` on.

    tokens: [m].
    tree: None for a chain.
    states: [m, dim], the input of the first layer; None: the tokens' embeddings.
    layers: indices, ascending; None: all.
    logits, head_input: for how many of the last rows; 0: none.
    hidden, fill, skipped, vocabulary: as in `OutputSpec`.
    prompt: how many of the first rows belong to the prompt.
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
    skipped: Skipped
    vocabulary: DraftVocabulary | None

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
    def is_plain(self) -> bool:
        """Whether it is a plain forward: all layers, from token ids to logits, without hidden
        states.
        """
        return self.layers is None and self.states is None and not self.hidden and not self.fill


class Layers(Protocol):
    """What an engine implements: a model's layers and the KV cache of one sequence. By default it
    has no programs.

    reserved: the first slots, which hold a prefix and never roll back.
    source: the number of encoder tokens, 0 for decoder-only models.
    supports_draft_vocab: its head can score the tokens of a `DraftVocabulary` alone.
    program_rows: how many rows a program begins with at most; a prompt that makes them more runs
        before.
    """

    supports_draft_vocab = False
    program_rows = LONG_PROMPT
    config: PreTrainedConfig
    device: torch.device
    depth: int
    reserved: int
    source: int

    def run(self, forward_pass: ForwardPass) -> Scores:
        """Run the rows. `hidden` of the result has all rows."""

    def draft(self, start: int, tokens: Sequence[int], spec: DraftSpec) -> Drafted | None:
        """Run these rows from slot `start` on, and draft a chain or a tree after them; None if there is
        no program for it.
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

    def scored(self, forward_pass: ForwardPass) -> int:
        """For how many rows the head runs."""
        return forward_pass.read

    def gather(self, start: int, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        """Move these rows, counted from slot `start`, to slot `start` and the following slots, in
        these layers.
        """


@dataclass(frozen=True)
class StartedRows:
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
        # the slot after the last rows that ran, also those that ran in some layers only
        self._written = self._cached
        self._pending = list(prompt[:-1])  # prompt tokens that have not run yet
        self._started: StartedRows | None = None
        if layers.source:
            self.forwards.append(
                Forward(layers.config, layers.source, source=layers.source, encoder=True)
            )

    @property
    def length(self) -> int:
        return self._cached - self.layers.reserved + len(self._pending)

    @torch.inference_mode()
    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        rows = as_rows(rows)
        if rows.position is not None:
            self.prefill()
        # 1. the rows, after those of the prompt that have not run
        tokens, tree = on_device(rows.tokens, self.layers.device), rows.tree
        count = tokens.shape[0]
        prompt_count = len(self._pending) if rows.states is None else 0
        if prompt_count:
            tokens, tree = self._prepend_prompt(tokens, tree)
        # 2. of how many of them each output is
        logit_count = count if output_spec.logits is None else output_spec.logits
        shown_count = prompt_count + count if output_spec.prompt else count
        head_input_count = 0
        if output_spec.head_input:
            head_input_count = shown_count if output_spec.prompt else logit_count
        # 3. the forward
        is_text = rows.position is None
        forward_pass = ForwardPass(
            start=self._cached if is_text else self.layers.reserved + rows.position,
            tokens=tokens,
            tree=tree,
            states=rows.states,
            layers=output_spec.layers,
            logits=logit_count,
            head_input=head_input_count,
            hidden=output_spec.hidden,
            fill=output_spec.fill,
            prompt=prompt_count,
            skipped=output_spec.skipped,
            vocabulary=output_spec.vocabulary,
        )
        self._require_runnable(forward_pass, is_text)
        scores = self._run_text(forward_pass) if is_text else self._run_draft(forward_pass)
        self._written = forward_pass.start + forward_pass.count
        if shown_count == forward_pass.count:
            return scores
        return replace(scores, hidden=tuple(states[-shown_count:] for states in scores.hidden))

    @torch.inference_mode()
    def draft(self, rows: Sequence[int], spec: DraftSpec) -> Drafted | None:
        if not spec.plain:
            return None
        is_tree = isinstance(spec, TreeSpec)
        if not is_tree and spec.position is not None:
            return self._draft_ahead(rows, spec, self.layers.reserved + spec.position)
        tokens = self._rows_after_prompt(rows)
        drafted = self.layers.draft(self._cached, tokens, spec)
        if drafted is not None:
            if is_tree:
                self._base = self._cached + len(tokens)
            self._record_program([len(tokens), *drafted.later_rows], spec.vocabulary)
        return drafted

    @torch.inference_mode()
    def forward_until_confident(
        self, token: int, threshold: float
    ) -> tuple[Float[Tensor, "1 vocab"], int] | None:
        self.prefill()
        early_exit = self.layers.forward_until_confident(self._cached, token, threshold)
        if early_exit is None:
            return None
        _, layers = early_exit
        self._base, self._started = self._cached, None
        self._cached = self._record_forwards(
            self._cached, [1], layers=layers, filled_layers=self.layers.depth - layers
        )
        return early_exit

    def _require_runnable(self, forward_pass: ForwardPass, is_text: bool) -> None:
        """Raise UserError for a forward that an engine cannot run: it would read memory that is not the
        model's, or give the scores of other rows.

        is_text: whether its rows go on with the text, and are not drafted at a position.
        """
        ahead, earlier = forward_pass.start - self._cached, forward_pass.earlier
        ran = self._cached - self._base if is_text else ahead
        if earlier < 0 or (earlier and (earlier != ran if is_text else earlier > ran)):
            raise UserError(
                f"a tree of {len(forward_pass.tree)} rows was given {forward_pass.count} tokens after"
                f" {ran} rows of the last extends; a tree has one row for each token, or goes on from"
                " the rows of the extends before, without a position between"
            )
        self._require_no_gap(forward_pass.start)
        if forward_pass.read > forward_pass.count:
            raise UserError(
                f"the last {forward_pass.read} of {forward_pass.count} rows cannot be scored; ask for"
                " as many as are passed, or pass more tokens"
            )
        states = forward_pass.states
        if states is not None and states.shape[0] != forward_pass.count:
            raise UserError(
                f"{forward_pass.count} tokens were given states of {states.shape[0]} rows; give one"
                " row for each token"
            )
        layers, depth = forward_pass.layers, self.layers.depth
        if layers and not (min(layers) >= 0 and max(layers) < depth):
            raise UserError(
                f"a model of {depth} layers has no layers {list(layers)}; name those from 0 to"
                f" {depth - 1}"
            )
        hidden = forward_pass.hidden
        if hidden and not (min(hidden) >= 0 and max(hidden) <= depth):
            raise UserError(
                f"a model of {depth} layers has no hidden states after layers {list(hidden)}; name"
                f" those from 0, the embeddings, to {depth}"
            )

    def _require_no_gap(self, start: int) -> None:
        """Raise UserError unless rows from slot `start` on stand behind the text, right after it or
        after rows that ran there: whatever is in the slots between would be attended to.
        """
        text, end = self._cached, max(self._cached, self._written)
        if not text <= start <= end:
            last = end - self.layers.reserved
            raise UserError(
                f"drafted rows stand behind the {self.length} rows of the text, without a gap, so from"
                f" position {self.length} to {last}, got position {start - self.layers.reserved};"
                " give the session's length, or that and the number of rows drafted after it"
            )

    def keep(self, path: Sequence[int]) -> None:
        ran = self._cached - self._base
        if path and not (min(path) >= 0 and max(path) < ran):
            raise UserError(
                f"of the {ran} rows that ran in the last extends rows {list(path)} cannot be kept;"
                " they count from 0"
            )
        if list(path) != list(range(len(path))):
            with torch.inference_mode():  # only here: entering it takes time
                self.layers.gather(self._base, path)
        self._cached = self._written = self._base + len(path)

    def rollback(self, length: int) -> None:
        if length < 0:
            raise UserError(f"a session keeps 0 rows or more, got rollback({length})")
        self._started = None
        self._cached = min(self._cached, self.layers.reserved + length)
        self._written = min(self._written, self._cached)

    def prefill(self) -> None:
        if self._pending:
            last_token = self._pending.pop()  # the others run with it
            self.extend([last_token], PROMPT)

    @torch.inference_mode()
    def commit_row(self, row: int, layers: Sequence[int]) -> None:
        if row:
            self.layers.gather(self._cached, [row], layers)

    def _rows_after_prompt(self, rows: Sequence[int]) -> list[int]:
        """These rows after the prompt's, unless it is long: a program holds all its rows in
        memory.
        """
        if len(self._pending) + len(rows) > self.layers.program_rows:
            self.prefill()
        return [*self._pending, *rows]

    def _scored_tokens(self, vocabulary: DraftVocabulary | None) -> int | None:
        """How many tokens the head scores; None for all."""
        if vocabulary is None or not self.layers.supports_draft_vocab:
            return None
        return len(vocabulary)

    def _record_program(self, counts: Sequence[int], vocabulary: DraftVocabulary | None) -> None:
        """A program ran forwards of so many rows, the pending ones among the first."""
        self._pending, self._started = [], None
        self._cached = self._record_forwards(
            self._cached, counts, vocabulary=self._scored_tokens(vocabulary)
        )

    def _record_forwards(self, start: int, counts: Sequence[int], **what: int | None) -> int:
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
        prompt_count = len(self._pending)
        tokens = torch.cat([on_device(self._pending, tokens.device), tokens])
        self._pending = []
        if tree is None:
            return tokens, None
        chain = torch.arange(-1, prompt_count - 1, device=tokens.device)
        # a root (-1) follows the last prompt token
        return tokens, Tree(torch.cat([chain, tree.parents + prompt_count]))

    def _run_draft(self, forward_pass: ForwardPass) -> Scores:
        """Run drafted rows. If they ran through the first layers, remember the output of those."""
        layers = forward_pass.layers
        is_plain_start = (
            forward_pass.tree is None
            and layers is not None
            and are_first_layers(layers, forward_pass.skipped)
        )
        if not is_plain_start:
            self._started = None  # other keys and values may stand in its slots then
            return self._run(forward_pass)
        last_output = len(layers)
        scores = self._run(replace(forward_pass, hidden=(*forward_pass.hidden, last_output)))
        *hidden, states = scores.hidden
        rows = StartedRows(forward_pass.tokens, states, len(layers))
        self._remember(forward_pass.start, rows)
        return replace(scores, hidden=tuple(hidden))

    def _draft_ahead(self, rows: Sequence[int], chain: ChainSpec, start: int) -> ChainResult | None:
        """Draft rows of some layers, from slot `start` on, as one program."""
        self.prefill()
        self._require_no_gap(start)
        drafted = self.layers.draft(start, rows, chain)
        if drafted is None:
            return None
        end = self._record_forwards(
            start,
            [len(rows), *drafted.later_rows],
            layers=len(chain.layers),
            skipped_attention=len(chain.skipped.attention),
            skipped_feed_forward=len(chain.skipped.feed_forward),
            vocabulary=self._scored_tokens(chain.vocabulary),
        )
        self._written = end
        if are_first_layers(chain.layers, chain.skipped):
            # a program's tokens may be on the device, where they stay
            tokens = [on_device(part, self.layers.device) for part in (rows, drafted.tokens)]
            ran = torch.cat(tokens)[: end - start]
            self._remember(start, StartedRows(ran, drafted.states, len(chain.layers)))
        else:
            self._started = None
        return drafted

    def _remember(self, start: int, rows: StartedRows) -> None:
        """Drafted rows from slot `start` on have run through the first layers."""
        started, ahead = self._started, start - self._cached
        if ahead == 0:
            self._started = rows
        elif started is None or started.layers != rows.layers:
            self._started = None  # the states of the rows between are not known
        else:
            tokens = torch.cat([started.tokens[:ahead], rows.tokens])
            self._started = StartedRows(
                tokens, torch.cat([started.states[:ahead], rows.states]), rows.layers
            )

    def _run_text(self, forward_pass: ForwardPass) -> Scores:
        """Run the text's next rows. They count as cached once the last layer has run."""
        self._base = forward_pass.start + forward_pass.prompt - forward_pass.earlier
        started, self._started = self._started, None
        same_count = 0
        if started is not None and forward_pass.is_plain and forward_pass.tree is None:
            same_count = started.shared(forward_pass.tokens)
        if same_count:
            states = started.states[:same_count]
            scores = self._run_remaining_layers(forward_pass, states, started.layers)
        else:
            scores = self._run(forward_pass)
        layers = forward_pass.layers
        runs_last_layer = layers is None or self.layers.depth - 1 in layers[-1:]
        if runs_last_layer:
            self._cached = forward_pass.start + forward_pass.count
        return scores

    def _run_remaining_layers(
        self, forward_pass: ForwardPass, states: Float[Tensor, "n dim"], started_layers: int
    ) -> Scores:
        """Complete a forward whose first n rows have run the first `started_layers` layers: run
        these for the other rows, then the layers after them for all rows.
        """
        done = states.shape[0]
        if done < forward_pass.count:
            late = replace(
                forward_pass,
                start=forward_pass.start + done,
                tokens=forward_pass.tokens[done:],
                layers=range(started_layers),
                logits=0,
                head_input=0,
                hidden=(started_layers,),
            )
            states = torch.cat([states, self._run(late).hidden[0]])
        return self._run(
            replace(forward_pass, states=states, layers=range(started_layers, self.layers.depth))
        )

    def _run(self, forward_pass: ForwardPass) -> Scores:
        """Run and record the forward.

        With an empty list of layers, the given states go straight to the head.
        """
        layers = forward_pass.layers
        if layers is not None and not len(layers) and forward_pass.hidden:
            scores = Scores(None)
            if forward_pass.logits:
                scores = self._run(replace(forward_pass, hidden=()))
            return replace(scores, hidden=(forward_pass.states,) * len(forward_pass.hidden))
        layer_count = None
        if layers is not None:
            layer_count = 0 if forward_pass.fill else len(layers)
        first_layer = 0
        if forward_pass.states is not None:
            first_layer = layers[0] if layers else self.layers.depth
        scored = self.layers.scored(forward_pass)
        for cached, rows in self.layers.forwards(forward_pass.start, forward_pass.count):
            self.forwards.append(
                Forward(
                    self.layers.config,
                    rows=rows,
                    cached=cached,
                    scored=min(rows, scored),
                    source=self.layers.source,
                    layers=layer_count,
                    first_layer=first_layer,
                    filled_layers=len(layers) if forward_pass.fill else 0,
                    skipped_attention=len(forward_pass.skipped.attention),
                    skipped_feed_forward=len(forward_pass.skipped.feed_forward),
                    vocabulary=self._scored_tokens(forward_pass.vocabulary),
                )
            )
        return self.layers.run(forward_pass)


def concatenated_scores(parts: Sequence[Scores]) -> Scores:
    """The outputs of a forward whose rows ran in several parts, one after the other."""
    hidden_by_depth = zip(*(scores.hidden for scores in parts), strict=True)
    return Scores(
        concatenated([scores.logits for scores in parts]),
        concatenated([scores.head_input for scores in parts]),
        tuple(torch.cat(states) for states in hidden_by_depth),
    )


def concatenated(tensors: Sequence[Tensor | None], axis: int = 0) -> Tensor | None:
    """These tensors as one, those that are missing left out; None without any."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present, axis) if present else None


def are_first_layers(layers: Sequence[int], skipped: Skipped) -> bool:
    """Whether these are the first layers of the model, with all their blocks."""
    return not skipped and list(layers) == list(range(len(layers)))
