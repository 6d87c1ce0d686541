"""Whether whole texts decode on this GPU as fast as the kernels and the theory say, the host
included.

Models have random weights at published sizes. The drafter drafts with all its forwards, and its
tokens are then those of a synthetic drafter, so that the acceptance rate is the chosen one.
`scripts/check_gpu.py` prints the findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from bild_lab.benchmark.kernel_check import Finding, KernelCheck, attempted, outcome
from bild_lab.benchmark.kernel_times import replay_ms
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.synthetic import SyntheticDrafter
from bild_lab.engine.methods.speculative.theory import optimal_window, walltime_improvement
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.device import wait_for
from bild_lab.engine.models.native.layers import NativeLayers
from bild_lab.engine.protocols import Drafter, Method
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import DEFAULT_OPTIONS, Model, Session, SessionOptions
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.timing import TimedTexts, TimingOptions, time_methods, total_s

ACCEPTANCE_RATE = 0.8
TEXTS, NEW_TOKENS, REPEATS = 8, 128, 3
SHARED_PROMPT = 24  # tokens, few enough to run by the kernels
# how far the time of `vanilla` against itself may be from 1
MOST_DIFFERENCE = 0.02
MAX_WINDOW = 12
PAIRS = {  # a target and its drafter, of `kernel_check`
    "t5-large:t5-small": ("t5-large", "t5-small"),
    "t5-3b:t5-small": ("t5-3b", "t5-small"),
    "llama-7b:llama-68m": ("llama-7b", "llama-68m"),
    "qwen2.5-1.5b:qwen2.5-0.5b": ("qwen2.5-1.5b", "qwen2.5-0.5b"),
    "qwen2.5-1.5b-Q4_K_M:qwen2.5-0.5b-Q8_0": ("qwen2.5-1.5b-Q4_K_M", "qwen2.5-0.5b-Q8_0"),
    "llama-7b-Q4_K_M:llama-68m": ("llama-7b-Q4_K_M", "llama-68m"),
}
# what `make gpu` checks; the others by their names
USUAL_PAIRS = ("t5-large:t5-small", "qwen2.5-1.5b:qwen2.5-0.5b")


@dataclass(frozen=True)
class KernelModel(Model):
    """The model of a check, as methods use models."""

    check: KernelCheck

    @property
    def device(self) -> torch.device:
        return self.check.device

    @property
    def engine(self) -> str:
        return "kernels"

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> CachedSession:
        layers = NativeLayers(self.check.decoder, source, room, packed=self.check.kernels)
        return CachedSession(layers, source.prompt, session_options.forwards)


class ChosenAcceptance(Drafter):
    """Drafts with a model's forwards, and proposes what a synthetic drafter does.

    Verify with `ExactMatch`.
    """

    def __init__(self, drafter: ModelDrafter, synthetic: SyntheticDrafter) -> None:
        self._drafter, self._synthetic = drafter, synthetic

    def prepare(self, request: Request) -> None:
        self._synthetic.prepare(request)

    def begin(self, request: Request, target: Session) -> None:
        self._drafting = self._drafter.start(request, target)
        self._proposing = self._synthetic.start(request, target)

    def propose(self, tokens: list[int]) -> Draft:
        self._drafting.propose(tokens)
        return self._proposing.propose(tokens)


class DecodingCheck:
    """The checks of one pair. Both must have the same vocabulary."""

    def __init__(self, target: KernelCheck, draft: KernelCheck) -> None:
        self.target, self.draft = KernelModel(target), KernelModel(draft)
        self.vanilla = target_alone(self.target)
        self.options = TimingOptions(
            synchronize=partial(wait_for, target.device),
            compiled_steps=lambda: target.kernels.captures + draft.kernels.captures,
            rehearses=True,
        )
        self.requests = [
            Request(self._source(index), Limits(self._prompt_length, NEW_TOKENS))
            for index in range(TEXTS)
        ]

    @property
    def _prompt_length(self) -> int:
        return 1 if self.target.check.source_ids is not None else SHARED_PROMPT

    def _source(self, index: int) -> Source:
        """The source of a text. All have the same length, and other tokens."""
        check = self.target.check
        ids = check.source_ids
        if ids is None:
            start = index * SHARED_PROMPT
            return Source(tuple(check.tokens[start : start + SHARED_PROMPT]), device=check.device)
        return Source((0,), ids.roll(index, dims=1), check.device)

    def findings(self) -> Iterator[Finding]:
        """All checks, one after the other."""
        for check in (
            self.texts_are_the_targets,
            self.vanilla_is_itself,
            self.host_share,
            self.speculation,
        ):
            yield attempted(check)

    def texts_are_the_targets(self) -> Finding:
        """A drafter of random weights, which is nearly always wrong, changes no text."""
        speculative = self.speculative(window=4)
        right = all(
            speculative.decode(request, Trace()) == self.vanilla.decode(request, Trace())
            for request in self.requests
        )
        return outcome(f"texts of speculative decoding, {TEXTS} of {NEW_TOKENS} tokens", right)

    def vanilla_is_itself(self) -> Finding:
        """`vanilla`, timed against itself text by text in turn, takes the same time."""
        timed = self.timed({"vanilla": self.vanilla, "again": self.vanilla})
        ratio = total_s(timed["again"]) / total_s(timed["vanilla"])
        ratios = [
            median(second_text.latency_s) / median(first_text.latency_s)
            for first_text, second_text in zip(timed["vanilla"], timed["again"], strict=True)
        ]
        return Finding(
            f"vanilla against itself: {ratio:.3f}, of single texts {min(ratios):.3f} to"
            f" {max(ratios):.3f}",
            abs(ratio - 1) <= MOST_DIFFERENCE,
        )

    def host_share(self) -> Finding:
        """How much longer a token of `vanilla` takes than its forward on the GPU."""
        forward_ms = self.forward_ms(self.target)
        token_ms = self.token_ms(self.timed({"vanilla": self.vanilla}), "vanilla")
        return Finding(
            f"ms a token of vanilla {token_ms:.3f}, of its forward {forward_ms:.3f}:"
            f" {token_ms / forward_ms:.2f} times"
        )

    def speculation(self) -> Finding:
        """The speedup at a chosen acceptance rate beside Theorem 3.8 of Leviathan et al. (2023), at
        the window that is best by it.
        """
        cost_ratio = self.forward_ms(self.draft) / self.forward_ms(self.target)
        window = max(1, optimal_window(ACCEPTANCE_RATE, cost_ratio, MAX_WINDOW))
        synthetic = SyntheticDrafter(self.target, ACCEPTANCE_RATE, window)
        drafter = ChosenAcceptance(ModelDrafter(self.draft, window), synthetic)
        speculative = DraftThenVerify(self.target, drafter, ExactMatch())
        timed = self.timed({"vanilla": self.vanilla, "speculative": speculative})
        speedup = total_s(timed["vanilla"]) / total_s(timed["speculative"])
        rounds = sum(len(text.trace.rounds) for text in timed["speculative"])
        tokens = sum(len(text.token_ids) for text in timed["speculative"])
        predicted = walltime_improvement(ACCEPTANCE_RATE, window, cost_ratio)
        return Finding(
            f"at an acceptance rate of {ACCEPTANCE_RATE}, window {window}: {speedup:.2f} times as"
            f" fast, {predicted:.2f} by Theorem 3.8 with c {cost_ratio:.3f}; ms a token"
            f" {self.token_ms(timed, 'vanilla'):.3f} and {self.token_ms(timed, 'speculative'):.3f},"
            f" {tokens / rounds:.2f} tokens a round"
        )

    def speculative(self, window: int) -> DraftThenVerify:
        return DraftThenVerify(self.target, ModelDrafter(self.draft, window), ExactMatch())

    def timed(self, methods: dict[str, Method]) -> TimedTexts:
        return time_methods(methods, self.requests, REPEATS, self.options)

    def token_ms(self, timed: TimedTexts, name: str) -> float:
        """Milliseconds of a method a token, the encoder and the prompt included."""
        return 1000 * total_s(timed[name]) / sum(len(text.token_ids) for text in timed[name])

    def forward_ms(self, model: KernelModel) -> float:
        """Milliseconds of a graph of one row in the middle of a text, without the host."""
        session = model.start(self.requests[0].source, NEW_TOKENS)
        session.extend(model.check.tokens[: NEW_TOKENS // 2])
        return replay_ms(model.check, session, session.length)


def check_pair(name: str, device: torch.device) -> Iterator[Finding]:
    """The findings of one pair in bfloat16."""
    target, draft = (KernelCheck.of(model, device) for model in PAIRS[name])
    yield from DecodingCheck(target, draft).findings()
