"""A small model that drafts a chain of tokens, as in speculative decoding and BiLD, and how many it
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods.early_exit.views import TargetLayers
from bild_lab.engine.methods.fr_spec import NarrowModel
from bild_lab.engine.methods.speculative.theory import optimal_window
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, pick, precise
from bild_lab.engine.session import (
    LAST_LOGITS,
    ChainProgress,
    ChainResult,
    ChainSpec,
    Model,
    Scores,
    Session,
    for_draft,
    on_device,
)
from bild_lab.errors import require_flag, require_number, require_whole

RELEASED_THRESHOLD = 0.6  # the default of BiLD's released loop


def released_confidence(threshold: float) -> float:
    """The threshold of BiLD's released loop, where 0 stands for 0.6."""
    return RELEASED_THRESHOLD if threshold == 0 else threshold


def require_confidence(stop: float | None) -> float | None:
    """The threshold of a stop rule, or None without one.

    Raises UserError for a number that is no probability.
    """
    if stop is not None:
        require_number(
            "fallback, or stop_confidence,",
            stop,
            0,
            1,
            remedy="it is a probability; 0 never ends a draft",
        )
    return stop


class ModelDrafter(Drafter):
    """Drafts up to `window` tokens with a model, fewer if `stop` or an end token ends the draft.

    Its KV cache drops exactly the rows after the last accepted token, so no token is computed
    twice.

    window: a number, or an object that chooses one before each round, such as `AdaptiveWindow`.
        Neither it nor `stop` sees the token it decides about, so speculative sampling stays
        lossless with both.
    stop: hand over to the target where the drafter's largest probability, at temperature 1, is
        below this (BiLD §3.3); at equality it drafts. None: only the window ends a draft.
    stop_on_eos: whether each drafted token is read, and an end token ends the draft.
    keeps_probs: give the acceptance rule the drafter's distribution at temperature 1, which
        cascades need.
    vocabulary: the only tokens that it drafts; None: all.

    With a stop rule a round's statistics hold `confidence`, the largest probability of each
    forward, and `fallback`, whether the drafter handed over because of low confidence (BiLD §3.3).
    """

    def __init__(
        self,
        draft: Model,
        window: int | WindowPolicy,
        stop: float | None = None,
        keeps_probs: bool = False,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self._model = draft if vocabulary is None else NarrowModel(draft, vocabulary)
        self.runs_target_layers = isinstance(draft, TargetLayers)
        self._window = window if isinstance(window, WindowPolicy) else FixedWindow(window)
        self._stop = require_confidence(stop)
        require_flag("keeps_probs", keeps_probs)
        self._keeps_probs = keeps_probs
        # on an accelerator a fixed window is drafted without reading the tokens, as that would
        # synchronize
        self.stop_on_eos = stop is not None or draft.device.type == "cpu"

    @property
    def gives(self) -> frozenset[str]:
        """Optional fields that its drafts fill, for rules that need them."""
        return frozenset({"unscaled_probs"} if self._keeps_probs else ())

    @property
    def draws_from(self) -> Model | None:
        """The model whose distribution its sampled tokens have, if a session of its own can tell."""
        # a view reads the target's own rows
        return None if self.runs_target_layers else self._model

    def begin(self, request: Request, target: Session) -> None:
        self._request = request
        self._session = self._model.start(
            request.source, request.limits.max_new_tokens, for_draft(target)
        )
        self._window = self._window.start()

    def propose(self, tokens: list[int]) -> Draft:
        limits, sampling = self._request.limits, self._request.sampling
        self._session.rollback(len(tokens) - 1)
        window = min(self._window.size(), limits.room(tokens))
        feed = tokens[self._session.length :]
        uniforms = self._uniforms(window)
        chain = ChainSpec(
            steps=window,
            end_tokens=limits.end_tokens,
            threshold=self._stop,
            temperature=sampling.temperature,
            uniforms=uniforms,
            keeps_probs=self._keeps_probs,
            plain=sampling.plain,
            stop_on_eos=self.stop_on_eos,
        )
        drafted = self._session.draft(feed, chain) if window else None
        if drafted is None:
            drafted = draft_chain(self._session, feed, chain, sampling)
        count = len(drafted.tokens)
        return Draft(
            tokens=on_device(drafted.tokens, self._model.device),
            probs=drafted.probs if count else None,
            calls=drafted.forwards,
            unscaled_probs=drafted.unscaled_probs if count else None,
            stats={}
            if self._stop is None
            else {"fallback": drafted.fallback, "confidence": tuple(drafted.confidences)},
            uniforms=None if uniforms is None else uniforms[:count],
            drawn_from=self.draws_from,
        )

    def _uniforms(self, window: int) -> Float[Tensor, " window"] | None:
        """A random number for each draw of a round."""
        if self._request.sampling.greedy:
            return None
        generator = self._request.generator
        return torch.rand(
            window, dtype=torch.float64, device=self._model.device, generator=generator
        )

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self._window.observe(len(draft), len(verdict.path))

    def observe_other(
        self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict
    ) -> None:
        """Nothing to learn: the window follows this drafter's own acceptance."""

    def rollback(self, length: int) -> None:
        self._session.rollback(length)


def draft_chain(
    session: Session, feed: Sequence[int], chain: ChainSpec, sampling: Sampling
) -> ChainResult:
    """Run these tokens of the text, then draft a chain after them, one forward after the other."""
    rows: Sequence[int] | Tensor = feed
    drafted: list[Tensor] = []  # [1] each
    probs: list[Tensor] = []
    unscaled_probs: list[Tensor] = []
    confidences: list[float] = []
    progress = ChainProgress(chain)
    while not progress.ended:
        logits = session.extend(rows, LAST_LOGITS).logits  # [1, vocab]
        if chain.keeps_probs:
            unscaled_probs.append(precise(logits).softmax(-1))
        if sampling.greedy:
            rows = sampling.choose(logits, None)
        else:
            probs.append(sampling.probs(logits))
            step = progress.forwards
            rows = pick(probs[-1], chain.uniforms[step : step + 1])
        token = confidence = None
        if chain.threshold is not None:
            largest = precise(logits).softmax(-1).amax(-1)  # at temperature 1
            # one transfer
            confidence, token = torch.cat([largest.double(), rows.double()]).tolist()
            confidences.append(confidence)
        elif chain.stop_on_eos:
            token = int(rows)
        if progress.add(token, confidence):
            drafted.append(rows)
    count = progress.drafted
    return ChainResult(
        tokens=torch.cat(drafted) if count else [],
        forwards=progress.forwards,
        fallback=progress.fallback,
        confidences=confidences,
        probs=torch.cat(probs[:count]) if count and probs else None,
        unscaled_probs=torch.cat(unscaled_probs[:count]) if count and unscaled_probs else None,
    )


PRIOR_TOKENS = 4.0  # the weight of the prior acceptance rate, in judged tokens
PROBE_ROUNDS = 8  # if drafting does not pay, one token is still drafted once in this many rounds


@runtime_checkable
class WindowPolicy(Protocol):
    """Decides before each round how many tokens to draft, from the results of earlier rounds."""

    def start(self) -> WindowPolicy:
        """The window of a new text."""
        return self

    def size(self) -> int:
        """The window of the round that starts now; 0 drafts nothing."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Report how many tokens of that round were drafted and accepted."""


@dataclass(frozen=True)
class FixedWindow(WindowPolicy):
    """A window that never changes."""

    tokens: int

    def __post_init__(self) -> None:
        require_whole("the draft window", self.tokens, 1)

    def size(self) -> int:
        return self.tokens


class TargetFirstWindow:
    """A fixed window of tokens, but the target alone begins each text, and goes on alone after a
    rejection.

    So it is in BiLD's released loop, where the large model runs first, and once more after a
    rollback (`init_iters` and `_greedy_search_body` of `T5BiLDModel`,
    src/transformers/models/t5/modeling_t5.py of kssteven418/BigLittleDecoder).
    """

    def __init__(self, tokens: int) -> None:
        require_whole("the draft window", tokens, 1)
        self._tokens, self._next = tokens, 0

    def start(self) -> TargetFirstWindow:
        return TargetFirstWindow(self._tokens)

    def size(self) -> int:
        return self._next

    def observe(self, drafted: int, accepted: int) -> None:
        self._next = 0 if accepted < drafted else self._tokens


class AdaptiveWindow:
    """The best window by Theorem 3.8 at the recent acceptance rate (speculative decoding §3.5).

    cost_ratio: the time of a drafter step over that of a target step, c in the theorem; a run of
        policy=speculative measures it (prediction.cost_ratio in result.json).
    max_window: the most tokens drafted.
    prior: the acceptance rate assumed at the start of a text, with the weight of four judged
        tokens.
    memory: in (0, 1], the weight that past counts keep from one round to the next; 1 never forgets,
        0.9 looks back over about ten rounds.

    The estimate is accepted / (accepted + rejections) of this text, with exponential decay. If
    drafting does not pay, every eighth round still drafts one token. Raises UserError for values
    out of range.
    """

    def __init__(self, cost_ratio: float, max_window: int, prior: float, memory: float) -> None:
        require_whole("max_window", max_window, 1)
        require_number("the window's memory", memory, 0, 1, above=True, remedy="1 never forgets")
        optimal_window(prior, cost_ratio, max_window)  # raises for rates and ratios out of range
        self._cost_ratio = cost_ratio
        self._max_window = max_window
        self._prior = prior
        self._memory = memory
        self._accepted = self._prior * PRIOR_TOKENS
        self._judged = PRIOR_TOKENS
        self._idle_rounds = 0

    def start(self) -> AdaptiveWindow:
        return AdaptiveWindow(self._cost_ratio, self._max_window, self._prior, self._memory)

    @property
    def acceptance_rate(self) -> float:
        """The current estimate of α, the probability that a drafted token is accepted if those
        before it are.
        """
        return self._accepted / self._judged

    def size(self) -> int:
        best = optimal_window(self.acceptance_rate, self._cost_ratio, self._max_window)
        return 1 if best == 0 and self._idle_rounds + 1 >= PROBE_ROUNDS else best

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            self._idle_rounds += 1
            return
        self._idle_rounds = 0
        self._accepted = self._memory * self._accepted + accepted
        self._judged = self._memory * self._judged + accepted + (accepted < drafted)
