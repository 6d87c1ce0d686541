"""The interfaces for extensions: what a drafter, an acceptance rule and a whole method must
implement.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import ALL_LOGITS, DraftShape, OutputSpec, Scores, Session
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError


class Drafter(Protocol):
    """Proposes tokens for the target to check. This is the base of all drafters, which need only
    write what they change.

    A drafter is configuration and shared weights; `start` gives the drafter of one text, a copy
    that holds its state. Between two proposals the text may become shorter: a `SpeculativeDrafter`
    rolls its inner drafter back whenever the target rejects a token. All tokens except the last are
    then unchanged. A draft continues the given tokens.

    required_outputs: what it needs of the target's forwards.
    gives: which fields of its drafts it fills for rules that need them, such as "unscaled_probs".
    greedy_only: it drafts for no sampled text.
    learns_from_texts: what it drafts depends on earlier texts, which must have ended; a text that
        comes again finds what it found the first time, as each is timed several times.
    hybrid_places: which of a `HybridDrafter`'s two drafters it can be. A drafter with rows of its
        own in the target's forward cannot be the first: they do not run where the second drafts.
    runs_target_layers: its drafts run layers of the target, which first run the prompt.
    """

    drafts_trees: bool = False
    drafts_nothing: ClassVar[bool] = False
    greedy_only: bool = False
    learns_from_texts: bool = False
    hybrid_places: ClassVar[tuple[str, ...]] = ("first", "second")
    runs_target_layers: bool = False
    required_outputs: OutputSpec = ALL_LOGITS
    gives: frozenset[str] = frozenset()

    def prepare(self, request: Request) -> None:
        """Do what is not timed; a second call for one request does nothing."""

    def start(self, request: Request, target: Session) -> Self:
        """The drafter of a new text. target: the session that will verify the drafts."""
        drafter = copy.copy(self)
        drafter.begin(request, target)
        return drafter

    def begin(self, request: Request, target: Session) -> None:
        """Set the state of a new text, on the copy that `start` returns.

        Fields that change must be new ones.
        """

    def forget(self) -> None:
        """Drop what was learned from earlier texts."""

    @abstractmethod
    def propose(self, tokens: list[int]) -> Draft:
        """Draft a continuation of all committed tokens, including the prompt."""

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Receive the result of verifying the draft."""

    def observe_other(
        self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict
    ) -> None:
        """Receive the result of verifying another drafter's draft after these tokens
        (`HybridDrafter`).
        """
        self.observe(draft, scores, verdict)

    def rollback(self, length: int) -> None:
        """Drop what is kept of the text, or of drafts, after its first `length` tokens: other
        tokens come there.
        """


class Acceptance(Protocol):
    """Decides how much of a draft is accepted.

    Row 0 of the logits scores the token after the root, row i + 1 the token after node i. This is
    the base of all rules, which need only write what they change.

    needs: fields of the draft that its drafter must fill.
    required_outputs: what it needs of the target's forward, besides what the drafter needs.
    greedy_only: it has no rule for sampled texts.
    """

    accepts_trees: bool = False
    greedy_only: bool = False
    needs: frozenset[str] = frozenset()
    required_outputs: OutputSpec = ALL_LOGITS

    @abstractmethod
    def lossless(self, sampling: Sampling) -> bool:
        """Whether the output is the target's own: token for token if greedy, else in
        distribution.
        """

    def start(self, request: Request) -> Self:
        """The rule of a new text."""
        rule = copy.copy(self)
        rule.begin(request)
        return rule

    def begin(self, request: Request) -> None:
        """Set the state of a new text, on the copy that `start` returns, as a drafter does."""

    def in_round(self, tokens: Sequence[int], scores: Scores) -> Acceptance:
        """The rule for this round. tokens: all committed tokens, prompt included. scores: what the
        target's forward gave.
        """
        return self

    @abstractmethod
    def __call__(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request
    ) -> Verdict: ...

    def output_distribution(
        self,
        draft: Draft,
        logits: Float[Tensor, "n+1 vocab"],
        request: Request,
        proposal_probs: Float[Tensor, "n vocab"],
    ) -> Float[Tensor, "n+1 vocab"] | None:
        """The distribution of the token that the rule emits after each row, for certificates; None
        without closed form.

        proposal_probs: the distribution that each node was really drawn from, given the siblings
        before it. A row's own children are what is drawn anew; the rows above are accepted.
        `methods/speculative/tree_acceptance.py` adds up accepted and replaced tokens.
        """


@runtime_checkable
class Prepares(Protocol):
    """A method that must prepare for a request, outside the timed decoding.

    Timing calls `prepare` before the clock starts. `decode` calls it too; a second call for one
    request does nothing.
    """

    def prepare(self, request: Request) -> None: ...


@runtime_checkable
class External(Protocol):
    """A method that runs in a process of its own, with packages of another environment.

    versions: of these packages. They are part of a point's name. precision: of the weights that it
    decodes with. A class that reads the blocks of a GGUF file itself, and so decodes with
    `runtime.weights=gguf`, says `reads_gguf_blocks = True`; one that samples says
    `greedy_only = False`, one that ends texts at stop strings `knows_stop_strings = True`, and an
    object that decodes without the target's weights here `reads_target = False`.
    """

    versions: Mapping[str, str]
    precision: str

    def cpu_seconds(self) -> float:
        """What its process has used of the CPU so far; 0.0 before it has started."""


@runtime_checkable
class Served(Protocol):
    """A method of a server: it waits for another machine, so that several texts of a batch can wait
    at once, and a result says more about it.

    arrival_rate: how many requests a second are sent in a batch, at random times; None: each as
    soon as one of the batch has ended.
    """

    arrival_rate: float | None

    def ask(self, request: Request, trace: Trace) -> Any:
        """Wait for an answer. Several threads may ask."""

    def read(self, request: Request, trace: Trace, answer: Any) -> list[int]:
        """The prompt's tokens followed by the emitted tokens of an answer. Not timed."""

    def about(self) -> Mapping[str, Any]:
        """What answered: its address, model and version."""

    def log(self) -> str | None:
        """What it printed, if the method started it."""


@runtime_checkable
class BringsBaseline(Protocol):
    """A method that may be compared with another of its own class, in place of the baseline of the
    measurement.
    """

    @classmethod
    def baseline_knobs(cls, knobs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The knobs of that other one; None: it is compared like any method."""


@runtime_checkable
class Replays(Protocol):
    """A method that decodes nothing: its texts were written before, by any engine.

    So nothing of it is timed. Its texts are judged and scored like all others, and its points have
    no latency, speedup, energy or memory.
    """

    def require_answer(self, request: Request) -> None:
        """Raises UserError for a request without a text. Called before weights load."""


class Method(Protocol):
    """Any way to continue a prompt. One that never samples says `greedy_only = True`."""

    @property
    def engine(self) -> str:
        """The engine that runs its forwards: kernels, native, hf, or a peer's own."""

    @property
    def draft_shape(self) -> DraftShape | None:
        """The most that it feeds the sessions of its models; None if it opens none."""

    def lossless(self, sampling: Sampling) -> bool:
        """Whether the output is the target's own: token for token if greedy, else in
        distribution.
        """

    def decode(self, request: Request, trace: Trace) -> list[int]:
        """The prompt's tokens followed by the emitted tokens."""


def require_text(method: Method, request: Request, tokens: Any) -> None:
    """Raise UserError unless a method's `decode` has returned the prompt's tokens, followed by at most
    `max_new_tokens` others. An external method cuts its texts itself.
    """
    if isinstance(method, External):
        return
    name, limits, prompt = type(method).__name__, request.limits, list(request.source.prompt)
    if not isinstance(tokens, list) or tokens[: len(prompt)] != prompt:
        what = f"a list that begins {tokens[:3]}" if isinstance(tokens, list) else repr(tokens)
        raise UserError(
            f"decode of {name} must return the list of the prompt's tokens, followed by the emitted"
            f" ones, got {what:.200} for a prompt that begins {prompt[:3]}"
        )
    emitted = len(tokens) - len(prompt)
    if emitted > limits.max_new_tokens:
        raise UserError(
            f"{name} has emitted {emitted} tokens, where a text may have {limits.max_new_tokens};"
            " request.limits.append cuts a text, and request.limits.reached says that it has ended"
        )


@runtime_checkable
class Streams(Protocol):
    """A method that can yield its tokens as they are accepted."""

    def stream(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        """The emitted tokens, round by round."""


@runtime_checkable
class DecodesBatches(Protocol):
    """A method with batches of its own, such as Transformers' `generate`: its texts begin and end
    together.
    """

    def decode_batch(self, requests: Sequence[Request]) -> list[list[int]]:
        """The prompt and the emitted tokens of each request."""
