"""How many tokens to draft in the next round: a fixed number, or one that adapts to the acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bild_lab.engine.speculative_theory import optimal_window
from bild_lab.errors import UserError, require_whole

PRIOR_TOKENS = 4.0  # the weight of the prior acceptance rate, in judged tokens
PROBE_ROUNDS = 8  # if drafting does not pay, one token is still drafted once in this many rounds


@runtime_checkable
class Window(Protocol):
    """Decides before each round how many tokens to draft, from the results of earlier rounds."""

    def start(self) -> None:
        """Start a new text."""

    def size(self) -> int:
        """The window of the round that starts now; 0 drafts nothing."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Report how many tokens of that round were drafted and accepted."""


@dataclass(frozen=True)
class FixedWindow:
    """The same window in every round."""

    tokens: int

    def __post_init__(self) -> None:
        require_whole("the draft window", self.tokens, 1)

    def start(self) -> None:
        """Nothing to forget."""

    def size(self) -> int:
        return self.tokens

    def observe(self, drafted: int, accepted: int) -> None:
        """Nothing to learn."""


class AdaptiveWindow:
    """The best window by Theorem 3.8 at the recent acceptance rate (speculative decoding §3.5).

    cost_ratio: the time of one drafter step divided by that of one target step, c in the theorem. A run of
    policy=speculative measures it: prediction.cost_ratio in its result.json. If reading the weights
    takes most of the time, it is close to the ratio of the two models' sizes.
    largest: drafts no more than this.
    prior: the acceptance rate assumed at the start of a text, with the weight of four judged tokens.
    memory: in (0, 1], the weight that past counts keep from one round to the next; 1 never forgets,
    0.9 looks back over about ten rounds.

    The estimate is accepted / (accepted + rejections), with exponential decay. Drafted tokens after a
    rejection were never judged and do not count. The estimate is reset for every text, so that a text
    does not depend on the ones before it. If drafting does not pay, every eighth round still drafts one
    token, as the estimate could not change otherwise. Raises UserError for values out of range.
    """

    def __init__(self, cost_ratio: float, largest: int, prior: float, memory: float) -> None:
        require_whole("the largest draft window", largest, 1)
        if not 0.0 < memory <= 1.0:
            raise UserError(f"the window's memory must lie in (0, 1], got {memory!r}; 1 never forgets")
        optimal_window(prior, cost_ratio, largest)  # raises for rates and ratios out of range
        self._cost_ratio = cost_ratio
        self._largest = largest
        self._prior = prior
        self._memory = memory
        self.start()

    def start(self) -> None:
        self._accepted = self._prior * PRIOR_TOKENS
        self._judged = PRIOR_TOKENS
        self._idle_rounds = 0

    @property
    def acceptance_rate(self) -> float:
        """The current estimate of α, the probability that a drafted token is accepted if those before it are."""
        return self._accepted / self._judged

    def size(self) -> int:
        best = optimal_window(self.acceptance_rate, self._cost_ratio, self._largest)
        return 1 if best == 0 and self._idle_rounds + 1 >= PROBE_ROUNDS else best

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            self._idle_rounds += 1
            return
        self._idle_rounds = 0
        self._accepted = self._memory * self._accepted + accepted
        self._judged = self._memory * self._judged + accepted + (accepted < drafted)
