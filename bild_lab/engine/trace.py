"""The record of decoding one prompt: the rounds and forwards, and where it is asked for the time of
each stage.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bild_lab.engine.draft import Draft, Stats, Verdict
from bild_lab.engine.draft_checks import require_statistics

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedConfig

Span = tuple[str, float, float]  # a stage, its start and its end, in seconds since decoding began


@dataclass(frozen=True)
class Forward:
    """One forward of a model: of the source through its encoder, or of rows through its decoder.

    config: of the model that ran, one object per model.
    rows: how many ran.
    cached: how many rows the cache held before.
    scored: for how many rows the head ran.
    source: the number of encoder tokens, 0 for decoder-only models.
    encoder: whether it is the encoder's forward.
    layers: how many decoder layers ran, None for all.
    first_layer: how many layers the rows had run in earlier forwards.
    filled_layers: for how many layers only keys and values were computed.
    skipped_attention, skipped_feed_forward: in how many of the layers that ran these blocks did
        not.
    vocabulary: how many tokens the head scored, None for all.
    """

    config: PreTrainedConfig
    rows: int
    cached: int = 0
    scored: int = 0
    source: int = 0
    encoder: bool = False
    layers: int | None = None
    first_layer: int = 0
    filled_layers: int = 0
    skipped_attention: int = 0
    skipped_feed_forward: int = 0
    vocabulary: int | None = None


@dataclass(frozen=True)
class Round:
    """One draft and its verification.

    accepted: the number of accepted drafted tokens.
    next_token: the target's own token after them, None if an unverified tail ended the text.
    branch: the length of a tree's longest branch; None for a chain.
    stats: statistics specific to the method, by name: flags, numbers, or tuples with one number per
        drafted token or forward.
    """

    drafted: tuple[int, ...] = ()
    accepted: int = 0
    next_token: int | None = None
    draft_calls: int = 0
    branch: int | None = None
    stats: Stats = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """How many drafted tokens could have been accepted."""
        return len(self.drafted) if self.branch is None else self.branch

    @property
    def rollback(self) -> bool:
        """Whether the target replaced a drafted token and dropped the tokens after it."""
        return self.next_token is not None and self.accepted < self.depth


@dataclass(frozen=True)
class ReportedRounds:
    """The rounds of a text in totals, as another engine tells them.

    verifications: forwards of the target, with the prompt's where they are told.
    drafted, accepted: tokens; None where they are not told.
    steps: how many verifications accepted so many of so many drafted tokens, by (drafted,
        accepted); None where totals alone are told.
    """

    verifications: int
    drafted: int | None = None
    accepted: int | None = None
    steps: Mapping[tuple[int, int], int] | None = None


@dataclass(frozen=True)
class EngineReport:
    """What another engine told of a text.

    pieces_s: the seconds since the request was sent at which each piece of the text came; a piece
        is one or several tokens.
    attempts: how often it was asked.
    error: why there is no text; None if there is one.
    later_tokens: how many came in the pieces after the first; None where the engine does not tell.
    """

    pieces_s: tuple[float, ...] = ()
    rounds: ReportedRounds | None = None
    attempts: int = 1
    error: str | None = None
    later_tokens: int | None = None


@dataclass
class Trace:
    """The rounds and forwards of one example. It has no clock.

    stats: statistics of the whole text, specific to the method, by name.
    paused_s: seconds of recording that are no part of decoding.
    report: what another engine told of the text.
    """

    rounds: list[Round] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    paused_s: float = 0.0
    report: EngineReport | None = None

    @property
    def reads_logits(self) -> bool:
        """Whether `emitted` needs the logits, so that no program may decode several tokens."""
        return False

    @property
    def failed(self) -> bool:
        """Whether another engine gave no text."""
        return self.report is not None and self.report.error is not None

    @property
    def stages_s(self) -> dict[str, float]:
        """The seconds of each stage; none without a clock."""
        return {}

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def emitted(
        self, tokens: Sequence[int], logits: Float[Tensor, "n vocab"], rows: Sequence[int]
    ) -> None:
        """A round emits these tokens, each after one of these rows of the target's logits."""

    def step(
        self,
        draft: Draft,
        verdict: Verdict | None,
        end_tokens: frozenset[int] = frozenset(),
        stopped: int | None = None,
    ) -> None:
        """Record one round.

        No drafted token after an end token counts, whether it was accepted or not: a drafter on an
        accelerator drafts on without looking. What was drafted after a stop string does not count
        either.

        verdict: None for a draft that is accepted as a whole, unverified.
        stopped: how many of the round's tokens there are up to the one that completes a stop
            string; None without.
        """
        # 1. what was accepted, up to where the text ends
        drafted = draft.token_list
        path = range(len(draft)) if verdict is None else verdict.path
        accepted_tokens = [drafted[node] for node in path]
        accepted = until_end(accepted_tokens[:stopped], end_tokens)
        next_token = None
        if verdict is not None:
            next_token = (*accepted_tokens, verdict.next_token)[accepted]
        # 2. what could have been accepted: nothing after the end of the text. A stop string that
        # does not end in the draft ends with the target's own token
        stops_in_draft = stopped is not None and stopped <= len(accepted_tokens)
        if draft.parents is None:
            branch = None
            counted = accepted if stops_in_draft else until_end(drafted, end_tokens)
        else:
            has_end_token = accepted > 0 and accepted_tokens[accepted - 1] in end_tokens
            branch = accepted if stops_in_draft or has_end_token else draft.depth
            counted = len(drafted)
        # 3. the statistics of the counted tokens
        stats = dict(draft.stats)
        if verdict is not None:
            stats |= _stats_of_first(verdict.stats, counted)
        if not self.rounds:  # once a text, as rounds are timed
            require_statistics(stats)
        self.rounds.append(
            Round(
                drafted=tuple(drafted[:counted]),
                accepted=accepted,
                next_token=next_token,
                draft_calls=draft.calls,
                branch=branch,
                stats=stats,
            )
        )

    @property
    def target_calls(self) -> int:
        return sum(r.next_token is not None for r in self.rounds)

    @property
    def draft_calls(self) -> int:
        return sum(r.draft_calls for r in self.rounds)

    @property
    def drafted(self) -> int:
        return sum(len(r.drafted) for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def fallbacks(self) -> int:
        return sum(bool(r.stats.get("fallback")) for r in self.rounds)

    @property
    def rollbacks(self) -> int:
        return sum(r.rollback for r in self.rounds)


def until_end(tokens: Sequence[int], end_tokens: frozenset[int]) -> int:
    """How many tokens there are up to the first end token, which is counted too."""
    return next(
        (place + 1 for place, token in enumerate(tokens) if token in end_tokens), len(tokens)
    )


def _stats_of_first(stats: Stats, count: int) -> dict[str, Any]:
    """The statistics of the first `count` drafted tokens."""
    return {
        name: value[:count] if isinstance(value, tuple) else value for name, value in stats.items()
    }


def no_wait() -> None:
    """Wait for nothing: the device has no queue."""


@dataclass
class StageTrace(Trace):
    """Also times every stage, and scores emitted tokens while its clock is paused.

    synchronize: waits for the device at each stage's start and end, for a slower pass of its own.
    started: when decoding began, on the clock of `time.perf_counter`.
    spans: every stage in order, with its start and end in seconds since then, without pauses.
    score: what tokens add to `log_probability`, given a row of logits for each; None: nothing.
    scored: how many tokens so far.
    """

    synchronize: Callable[[], None] = no_wait
    started: float = field(default_factory=time.perf_counter)
    spans: list[Span] = field(default_factory=list)
    score: Callable[[Float[Tensor, "m vocab"], Sequence[int]], float] | None = None
    log_probability: float = 0.0
    scored: int = 0

    @property
    def reads_logits(self) -> bool:
        return self.score is not None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.synchronize()
        start = self._now()
        yield
        self.synchronize()
        self.spans.append((name, start, self._now()))

    def emitted(
        self, tokens: Sequence[int], logits: Float[Tensor, "n vocab"], rows: Sequence[int]
    ) -> None:
        if self.score is not None:
            since = time.perf_counter()
            self.log_probability += self.score(logits[rows[: len(tokens)]], tokens)
            self.scored += len(tokens)
            self.paused_s += time.perf_counter() - since

    @property
    def stages_s(self) -> dict[str, float]:
        """The seconds of each stage, over all its spans."""
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in self.spans:
            seconds[name] += end - start
        return seconds

    def _now(self) -> float:
        return time.perf_counter() - self.started - self.paused_s
