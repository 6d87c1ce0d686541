"""The interface between methods and models: a method passes rows, and gets the outputs that it asks
for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bild_lab.engine.draft import ROOT, Tree
from bild_lab.engine.request import Source
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError

if TYPE_CHECKING:
    from bild_lab.engine.draft_vocabulary import DraftVocabulary
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint, Prompt


@dataclass(frozen=True)
class Rows:
    """Rows to run.

    tokens: [m].
    tree: the shape of the rows; None: a chain. A tree may have more rows than there are tokens:
        then its first rows are those of the extends before, and these tokens are its last rows.
    position: None for rows that go on with the sequence, in a draft model's own session also those
        of drafts, which `rollback` drops and `keep` sorts. For rows drafted beside the text, in the
        target's own session, it is a position in the sequence: `length`, or a later one without a
        gap behind the rows drafted last. Such rows are never kept, no tree goes on from them, and
        later rows overwrite them.
    states: [m, dim], the output of the layer before `OutputSpec.layers` for these rows; the tokens
        are then not embedded.
    """

    tokens: Sequence[int] | Int[Tensor, " m"]
    tree: Tree | None = None
    position: int | None = None
    states: Float[Tensor, "m dim"] | None = None

    @property
    def token_list(self) -> list[int]:
        """The tokens on the host."""
        return self.tokens.tolist() if isinstance(self.tokens, Tensor) else list(self.tokens)

    @property
    def earlier(self) -> int:
        """How many rows of the tree ran before."""
        return 0 if self.tree is None else len(self.tree) - len(self.tokens)


RowsOrTokens = Rows | Sequence[int] | Int[Tensor, " m"]  # token ids alone are a chain


@dataclass(frozen=True)
class Skipped:
    """The layers, by index, whose blocks of each kind add nothing.

    attention: to the text, and to the source of an encoder–decoder.
    """

    attention: frozenset[int] = frozenset()
    feed_forward: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.attention or self.feed_forward)


NOTHING = Skipped()


@dataclass(frozen=True)
class OutputSpec:
    """What to run and what to return.

    logits: for how many of the last rows; None: all that are passed.
    head_input: also return the head's input at these rows.
    hidden: after how many layers to return the hidden states of all rows, 0 for the embeddings.
    prompt: hidden and head_input include the prompt's rows that run with the first rows.
    layers: indices of the layers to run, ascending; None: all. Without the last layer the head
        reads the output of the last layer that ran (an early exit). Rows of the text count as
        cached once the last layer has run.
    fill: compute only the keys and values of these layers, all from the same states.
    skipped: blocks that are left out of these layers; for drafted rows only.
    vocabulary: the tokens whose scores are enough, in logits that keep the full vocabulary; None:
        all.
    """

    logits: int | None = None
    head_input: bool = False
    hidden: tuple[int, ...] = ()
    prompt: bool = False
    layers: Sequence[int] | None = None
    fill: bool = False
    skipped: Skipped = NOTHING
    vocabulary: DraftVocabulary | None = None


ALL_LOGITS = OutputSpec()
LAST_LOGITS = OutputSpec(logits=1)


def merged_outputs(first_outputs: OutputSpec, second_outputs: OutputSpec) -> OutputSpec:
    """What serves both parts of a method. Raises UserError if they need different hidden states."""
    first_states = replace(first_outputs, head_input=False)
    second_states = replace(second_outputs, head_input=False)
    if ALL_LOGITS not in (first_states, second_states) and first_states != second_states:
        raise UserError(
            "the parts of a method must read the same hidden states of the target, got two that"
            " differ; choose one that reads logits alone"
        )
    return replace(
        second_states if first_states == ALL_LOGITS else first_states,
        head_input=first_outputs.head_input or second_outputs.head_input,
    )


@dataclass(frozen=True)
class Scores:
    """The requested outputs of a forward.

    logits: row i scores the token after the i-th of the last rows; None if none were requested.
    head_input: the last layer's output after the final norm, for the same rows, after those of the
        prompt if these were asked for.
    hidden: one entry for each of `OutputSpec.hidden`.
    """

    logits: Float[Tensor, "m vocab"] | None
    head_input: Float[Tensor, "n dim"] | None = None
    hidden: tuple[Float[Tensor, "n dim"], ...] = ()

    def with_logits(self, change: Callable[[Tensor], Tensor]) -> Scores:
        """The outputs with changed logits; as they are where none were requested."""
        return self if self.logits is None else replace(self, logits=change(self.logits))


@dataclass(frozen=True)
class Prefix:
    """Additions for probe rows only: keys and values before the text, and embeddings beyond the
    vocabulary.

    keys, values: BiTA's prompt, p may be 0. masks: the embeddings of token ids from the
    vocabulary's size on.
    """

    keys: Float[Tensor, "layers heads p dim"]
    values: Float[Tensor, "layers heads p dim"]
    masks: Float[Tensor, "masks dim"] | None = None

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def probe(self, tokens: Int[Tensor, " m"], vocabulary: int) -> Bool[Tensor, " m"] | None:
        """Which of these rows are probes; None without masks."""
        return None if self.masks is None else tokens >= vocabulary

    def embed(
        self, tokens: Int[Tensor, " m"], vocabulary: int, look_up: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "m dim"]:
        """Embeddings of tokens (from `look_up`) and of masks, without synchronizing with the
        device.
        """
        if self.masks is None:
            return look_up(tokens)
        beyond = tokens - vocabulary
        words = look_up(tokens.clamp(max=vocabulary - 1))
        return torch.where((beyond >= 0)[:, None], self.masks[beyond.clamp(min=0)], words)


@dataclass(frozen=True)
class ChainSpec:
    """A chain of tokens to draft in one go, each fed to the model after the one before it.

    steps: how many at most.
    end_tokens: end the chain, and belong to it.
    threshold: the chain ends before a token if the largest probability of its forward, at
        temperature 1, is smaller; None: never.
    uniforms: [steps] in [0, 1), one for each draw at this temperature; None with temperature 0.
    keeps_probs: return the distributions at temperature 1 too.
    plain: every token may be drawn, neither top-k nor top-p.
    stop_on_eos: False: tokens after an end token may be drafted too, where reading it would
        synchronize; with a threshold every token is read, and ends the chain.
    position, layers, skipped: for drafted rows of some of the layers, as in `Rows` and
        `OutputSpec`.
    vocabulary: the tokens that may be drafted; None: all.
    """

    steps: int
    end_tokens: frozenset[int]
    threshold: float | None = None
    temperature: float = 0.0
    uniforms: Float[Tensor, " steps"] | None = None
    keeps_probs: bool = False
    plain: bool = True
    stop_on_eos: bool = True
    position: int | None = None
    layers: tuple[int, ...] | None = None
    skipped: Skipped = NOTHING
    vocabulary: DraftVocabulary | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host reads the tokens, so that the chain may end before its last step.

        Of a chain that nobody reads every step counts as drafted, with its distribution, so all
        run.
        """
        return self.threshold is not None or self.stop_on_eos


@dataclass
class ChainProgress:
    """How far a chain is drafted, and whether it has ended: the one rule of where a draft ends.

    After each forward, in this order (BiLD, Kim et al., 2023, §3.3, for the fallback):

    1. A confidence below the threshold ends the chain before the forward's token (`fallback`). A
       confidence that equals the threshold does not.
    2. Otherwise the token is drafted.
    3. An end token ends the chain, and so does the last of its `steps` tokens.

    Every way of drafting a chain follows it: this class one forward after another, and after a
    program of fixed shape; `choose` in `models/native/cpu/drafting.h` within the CPU kernels.
    """

    chain: ChainSpec
    forwards: int = 0
    drafted: int = 0
    fallback: bool = False
    drafted_end_token: bool = False

    @property
    def ended(self) -> bool:
        return self.fallback or self.drafted_end_token or self.drafted >= self.chain.steps

    def add(self, token: int | None, confidence: float | None) -> bool:
        """Count one more forward, and return whether its token is drafted.

        token: None for one that is not read, which ends nothing. confidence: the largest
        probability of the forward at temperature 1; None without a threshold.
        """
        self.forwards += 1
        if self.chain.threshold is not None and confidence < self.chain.threshold:
            self.fallback = True
            return False
        self.drafted += 1
        self.drafted_end_token = token in self.chain.end_tokens
        return True

    @staticmethod
    def after(
        chain: ChainSpec, tokens: Sequence[int], confidences: Sequence[float]
    ) -> ChainProgress:
        """The progress after a program that ran all steps, given each forward's token and
        confidence.
        """
        progress = ChainProgress(chain)
        for token, confidence in zip(tokens, confidences, strict=True):
            if progress.ended:
                break
            progress.add(token, confidence)
        return progress


@dataclass(frozen=True)
class ChainResult:
    """What was drafted of a chain; by default nothing.

    tokens: on the host if a program read them.
    forwards: how many ran, up to the chain's end.
    fallback: the last one's confidence was below the threshold.
    confidences: of every forward, empty without a threshold.
    probs, unscaled_probs: of the drafted tokens, as in `Draft`.
    states: of every row that ran, after the last of the chain's layers, if these are given.
    """

    tokens: list[int] | Int[Tensor, " n"] = field(default_factory=list)
    forwards: int = 0
    fallback: bool = False
    confidences: list[float] = field(default_factory=list)
    probs: Float[Tensor, "n vocab"] | None = None
    unscaled_probs: Float[Tensor, "n vocab"] | None = None
    states: Float[Tensor, "rows dim"] | None = None

    @property
    def later_rows(self) -> list[int]:
        """How many rows each forward after the first ran."""
        return [1] * (self.forwards - 1)


def result_of_steps(
    chain: ChainSpec, tokens: Sequence[int], confidences: Sequence[float]
) -> ChainResult:
    """What a program drafted of a chain that ran all steps, given each step's token and confidence.
    Without distributions and states.
    """
    progress = ChainProgress.after(chain, tokens, confidences)
    return ChainResult(
        tokens=list(tokens[: progress.drafted]),
        forwards=progress.forwards,
        fallback=progress.fallback,
        confidences=[] if chain.threshold is None else list(confidences[: progress.forwards]),
    )


@dataclass(frozen=True)
class TreeSpec:
    """A tree of tokens to grow in one go, from the most likely leaves (EAGLE-2, Li et al., 2024,
    §4).

    A token's chance is the product of the probabilities of all tokens on its branch.

    nodes: how many tokens at most, the most likely.
    depth: of the longest branch.
    width: how many leaves grow in one forward, the most likely.
    children: of a leaf, its most likely next tokens.
    prune_confidence: a leaf whose largest probability, at temperature 1, is not smaller has one
        child; None: never.
    min_prob: growing ends when no leaf has this chance.
    end_tokens: have no children.
    temperature: of the probabilities that are multiplied.
    plain, vocabulary: as in `ChainSpec`.
    """

    nodes: int
    depth: int
    width: int
    children: int
    end_tokens: frozenset[int]
    prune_confidence: float | None = None
    min_prob: float = 0.0
    temperature: float = 1.0
    plain: bool = True
    vocabulary: DraftVocabulary | None = None


@dataclass(frozen=True)
class GrownTree:
    """What was grown; by default nothing.

    tokens, parents: of each node, as in `Draft`.
    rows: the place of each node among the rows that ran after the text, as `keep` counts them; None
        for a node that did not run.
    forwards: how many rows each forward ran.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rows: list[int | None] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)

    @property
    def later_rows(self) -> list[int]:
        """How many rows each forward after the first ran."""
        return self.forwards[1:]


# what a program drafts in one go, and what it gives
DraftSpec = ChainSpec | TreeSpec
Drafted = ChainResult | GrownTree


@dataclass
class DraftNode:
    """A token of a growing tree. parent: its index or ROOT. row: see `GrownTree`."""

    token: int
    parent: int
    chance: float
    row: int | None = None


def prune_tree(nodes: list[DraftNode], max_nodes: int, forwards: list[int]) -> GrownTree:
    """The most likely nodes, in the order grown.

    A parent is never less likely than its children, and comes first.
    """
    most_likely_first = sorted(range(len(nodes)), key=lambda index: -nodes[index].chance)
    indices = sorted(most_likely_first[:max_nodes])
    new_index = {ROOT: ROOT} | {old: new for new, old in enumerate(indices)}
    remaining = [nodes[index] for index in indices]
    return GrownTree(
        tokens=[node.token for node in remaining],
        parents=[new_index[node.parent] for node in remaining],
        rows=[node.row for node in remaining],
        forwards=forwards,
    )


class Session(Protocol):
    """One sequence in one model.

    Its last committed token is not cached yet. By default it has no programs.
    """

    forwards: list[Forward]  # every forward so far, of all sessions of one decoding

    @property
    def length(self) -> int:
        """How many tokens of the sequence do not have to be passed again."""

    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        """Run rows after the cached ones. Plain token ids are a chain.

        The prompt of a decoder-only model runs together with the first rows, in one forward. Raises
        UserError for rows, layers and scores that the model does not have.
        """

    def draft(self, rows: Sequence[int], spec: DraftSpec) -> Drafted | None:
        """Run these rows of the text, and draft a chain or grow a tree after them, in one go; None if
        there is no program for it.
        """
        return None

    def keep(self, path: Sequence[int]) -> None:
        """Keep these rows of the last `extend` or tree (in order, root to leaf) and drop the
        others. Raises UserError for rows that did not run.
        """

    def rollback(self, length: int) -> None:
        """Drop every cached row from this position on."""

    def prefill(self) -> None:
        """Run the prompt now instead of with the first rows."""


class StagedSession(Session, Protocol):
    """A target's own session, whose layers may have run different rows (CALM, PPD)."""

    def forward_until_confident(
        self, token: int, threshold: float
    ) -> tuple[Float[Tensor, "1 vocab"], int] | None:
        """Run the text's next row up to the first layer whose output's cosine with its input
        exceeds the threshold.

        In one go; None if there is no program for it. The layers after it get their keys and values
        from that output. Returns the head's scores of it, and how many layers ran.
        """
        return None

    def commit_row(self, row: int, layers: Sequence[int]) -> None:
        """Move this drafted row (from 0) to the first slot after the cached rows, in these
        layers.
        """


@dataclass(frozen=True)
class SessionOptions:
    """What a session begins with besides its source.

    forwards: where to record forwards; None: in a list of its own.
    target: the session that the model drafts for; a view of the target uses its cache.
    prefix: extra keys, values and embeddings for probe rows.
    """

    forwards: list[Forward] | None = None
    target: Session | None = None
    prefix: Prefix | None = None


DEFAULT_OPTIONS = SessionOptions()


def for_draft(target: Session) -> SessionOptions:
    """For a draft model's session: its forwards are recorded among the target's."""
    return SessionOptions(target.forwards, target)


class DraftShape(IntEnum):
    """The most that a method feeds a session after the prompt: one row at a time, chains of rows,
    or trees.
    """

    ROWS = 0
    CHAINS = 1
    TREES = 2


class Model(Protocol):
    """A model that can start sessions."""

    @property
    def device(self) -> torch.device: ...

    @property
    def engine(self) -> str:
        """What runs its forwards: kernels, native or hf."""

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        """A session for this source, with room for about so many rows after the prompt."""


class LoadedModel(Model, Protocol):
    """A checkpoint that implements the session protocol."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    bits: int | None  # the bits of weights that were quantized at load
    compiled: bool  # whether steps go through torch.compile
    compiled_steps: int  # so far

    @property
    def transformers(self) -> LoadedModel:
        """The checkpoint as a module of Transformers."""

    def load(self) -> None:
        """Read the weights now rather than at the first decoding."""

    def admit(self, draft_shape: DraftShape) -> None:
        """Raise UserError unless its sessions give the model's own scores, however rows of this
        shape are fed. It loads the weights.
        """

    def text_logits(self, text: Source, count: int | None = None) -> Float[Tensor, "n vocab"]:
        """The scores after the last so many tokens of a text, in one forward; None: after all."""

    def vocabulary_weights(self) -> tuple[Float[Tensor, "vocab dim"], Float[Tensor, "vocab dim"]]:
        """The embedding and the head, on the model's device. Loads the weights."""

    def scores_of_products(
        self, products: Float[Tensor, "*rows vocab"], tokens: Int[Tensor, " vocab"] | None = None
    ) -> Float[Tensor, "*rows vocab"]:
        """What the model makes of the products of its head's weights, such as a part of them.

        tokens: the ids that they are of; None: the first ones, or all.
        """

    @property
    def positions(self) -> int | None:
        """The longest text, in tokens, that it can read; None for any length."""

    @property
    def session_positions(self) -> int | None:
        """The longest text of a session.

        A rotation that changes with the length makes keys in the cache wrong.
        """

    @property
    def source_positions(self) -> int | None:
        """The longest text that its encoder can read."""

    @property
    def depth(self) -> int:
        """How many decoder layers it has."""

    def source(self, prompt: Prompt, max_tokens: int | None = None) -> Source:
        """The prompt as token ids on the device, with the special tokens of the checkpoint's
        tokenizer.
        """

    def require_layers(self, what: str, at_once: bool = False, by_block: bool = False) -> None:
        """Raise UserError unless the layers can be run one by one. what: the method that needs it,
        for the message. at_once: in several forwards at a time. by_block: also attention and
        feed-forward separately.
        """

    def prompt_cache(self, embeddings: Float[Tensor, "p dim"]) -> Prefix:
        """Keys and values of a shallow prompt (BiTA), [p, dim] embeddings: causal attention, no
        rotary positions.
        """


def as_rows(rows: RowsOrTokens) -> Rows:
    """The rows, with plain token ids turned into a chain."""
    return rows if isinstance(rows, Rows) else Rows(rows)


def on_device(tokens: Sequence[int] | Int[Tensor, " m"], device: torch.device) -> Int[Tensor, " m"]:
    """Token ids on the device. A list is copied to a GPU without synchronizing."""
    if isinstance(tokens, Tensor) or device.type != "cuda":
        return torch.as_tensor(tokens, dtype=torch.long, device=device)
    return torch.tensor(tokens, dtype=torch.long).pin_memory().to(device, non_blocking=True)
