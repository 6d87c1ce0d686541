"""Beam search with the target, and speculative beam search (speculative decoding, A.4)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import ROOT, Tree, common_prefix
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.engine.session import Feed, Model, Opening, Rows, Session, Want, on_device, require_scores
from bild_lab.engine.trace import Forward, Round, Trace
from bild_lab.errors import UserError, require_finite, require_flag, require_whole

Text = tuple[int, ...]  # the prompt's last token, then the emitted tokens
MostLikely = Mapping[Text, list[tuple[int, float]]]  # tokens that may follow a text, with their log-probabilities


@dataclass(frozen=True)
class Hypothesis:
    """A text and its score: Σ log p of its emitted tokens, over length ** length_penalty once it has ended."""

    text: Text
    score: float


@dataclass(frozen=True)
class Search:
    """The state of a search. Both tuples are sorted best first; all running hypotheses have the same length."""

    running: tuple[Hypothesis, ...]
    ended: tuple[Hypothesis, ...] = ()
    over: bool = False


@dataclass(frozen=True)
class BeamSearch:
    """Beam search like `generate` of Transformers, for greedy requests; with a drafter, in fewer target calls.

    beams: how many hypotheses run. length_penalty: the score of an ended hypothesis is divided by its
    length, including the end token, to this power. early_stopping: stop as soon as `beams` hypotheses have
    ended. Otherwise stop only when the best running hypothesis, if it ended now, would not beat the worst
    ended one.

    A step extends all running hypotheses by all tokens. Among the `beams` best candidates, those that end
    the text or reach the length limit are done. The `beams` best candidates that do not end it keep running.
    Scores are sums, in float64, of log-probabilities in float32 or better.

    The drafter's candidates for the next steps are verified in one forward of the target, as a tree. The
    target's search is then replayed over these scores. A drafted step is accepted if every hypothesis that
    the target keeps is among the candidates (top_w of the target ⊆ top_u of the drafter). The scores of the
    first step that is not accepted still give the target's own selection, and so do those after the last
    drafted step; drafting continues from there. The text equals that of the search without a drafter, up to
    ties from rounding.

    A `Round` counts steps: drafted holds one token per step, from the drafter's best hypothesis; accepted is
    the number of accepted steps; next_token is the last token of the target's best hypothesis. So the
    acceptance rate is per step. Steps after the one that ends the search were not verified and are left out.
    A search may continue after the winning text has ended. So tokens per target call are fewer than steps
    per target call, and without a drafter at most 1.

    Raises UserError for values out of range, and for requests that sample.
    """

    target: Model
    beams: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    drafter: BeamDrafter | None = None

    def __post_init__(self) -> None:
        require_whole("beams", self.beams, 2, remedy="use policy=vanilla for a single hypothesis")
        require_finite("length_penalty", self.length_penalty, remedy="0 ignores how long a text is")
        require_flag("early_stopping", self.early_stopping)
        if self.drafter is not None and self.drafter.beams is not None:
            remedy = "fewer never hold all the target selects"
            require_whole("draft_beams", self.drafter.beams, self.beams, remedy=remedy)

    @property
    def engine(self) -> str:
        return self.target.engine

    @property
    def feeds(self) -> Feed:
        return Feed.TREES

    def lossless(self, sampling: Sampling) -> bool:
        """A beam search does not give the target's greedy text."""
        return False

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        if not request.sampling.greedy:
            raise UserError(
                f"beam search needs decoding.temperature=0, got {request.sampling.temperature}; use decoding=greedy"
            )
        search = self._search(request, trace)
        return request.limits.append(request.source.prompt, search.ended[0].text[1:])

    def _search(self, request: Request, trace: Trace) -> Search:
        limits = request.limits
        with trace.span("prefill"):
            target = SharedPrefix(self.target, request, trace.forwards)
            drafter = self.drafter
            if drafter is not None:
                drafter = self.drafter.start(request, self.beams, trace.forwards)
        search = Search(running=(Hypothesis(request.source.prompt[-1:], 0.0),))
        while not search.over:
            with trace.span("draft"):
                drafted = [] if drafter is None else drafter.propose(search.running)
            with trace.span("verify"):
                texts = [one.text for step in (search.running, *drafted) for one in step]
                most_likely = target.most_likely(texts, self.beams + len(limits.end_tokens))
            steps = 0
            while not search.over and all(one.text in most_likely for one in search.running):
                search = self.step(search, most_likely, limits)
                steps += 1
            trace.rounds.append(round_of(drafted, steps, search))
        return search

    def step(self, search: Search, most_likely: MostLikely, limits: Limits) -> Search:
        """Extend every hypothesis by one token. `most_likely` holds at least beams + end tokens entries for each."""
        candidates = extended(search.running, most_likely)
        length = len(candidates[0].text) - 1
        last, divisor = length == limits.max_new_tokens, length**self.length_penalty
        done = [one for one in candidates[: self.beams] if last or one.text[-1] in limits.end_tokens]
        ended = best_first([*search.ended, *(Hypothesis(one.text, one.score / divisor) for one in done)])[: self.beams]
        running = () if last else unended(candidates, limits)[: self.beams]
        over = not running or (
            len(ended) == self.beams and (self.early_stopping or running[0].score / divisor <= ended[-1].score)
        )
        return Search(running, ended, over)


class BeamDrafter:
    """Drafts `window` steps with its own beam search, starting from the target's hypotheses and their scores.

    beams: candidates per step, u in the paper; None: as many as the target has hypotheses. No candidate
    ends a text: after an end token there is nothing to verify.
    """

    def __init__(self, draft: Model, window: int, beams: int | None = None) -> None:
        require_scores(draft, "speculative beam search")
        self._model = draft
        require_whole("the draft window", window, 1)
        self._window = window
        self.beams = beams

    def start(self, request: Request, beams: int, forwards: list[Forward]) -> BeamDrafter:
        """The drafter of a new text. beams: how many hypotheses the target keeps."""
        text = copy.copy(self)
        text._width = beams if self.beams is None else self.beams
        text._limits = request.limits
        text._prefix = SharedPrefix(self._model, request, forwards)
        return text

    def propose(self, running: Sequence[Hypothesis]) -> list[tuple[Hypothesis, ...]]:
        """The candidates of each step after these hypotheses; none for the last step before the length limit."""
        room = self._limits.max_new_tokens - (len(running[0].text) - 1)
        steps: list[tuple[Hypothesis, ...]] = []
        while len(steps) < min(self._window, room - 1):
            texts = [one.text for one in running]
            most_likely = self._prefix.most_likely(texts, self._width + len(self._limits.end_tokens))
            running = unended(extended(running, most_likely), self._limits)[: self._width]
            steps.append(running)
        return steps


class SharedPrefix:
    """Several texts after one prompt in one session. Its KV cache holds their common prefix.

    A session keeps a single path. So the rows in which the texts differ are run again, as a tree, in every
    forward: k texts that diverged r tokens ago cost up to k · r rows in addition to the new ones.
    """

    def __init__(self, model: Model, request: Request, forwards: list[Forward]) -> None:
        self._device = model.device
        source = replace(request.source, processors=None)
        self._session: Session = model.start(source, request.limits.max_new_tokens, Opening(forwards))
        self._processors, self._before = request.source.processors, source.prompt[:-1]
        self._behind = len(self._before)  # tokens of the sequence before a text
        self._cached: Text = ()
        self._rows: dict[Text, int] = {}  # of the last forward, by the text that ends in each

    def most_likely(self, texts: Sequence[Text], count: int) -> MostLikely:
        """The `count` most likely tokens after each text, with log-probabilities: one forward, one transfer.

        texts: shortest first. They include every prefix of a text that is at least as long as the first text.
        """
        self._keep_common(texts)
        shortest = len(texts[0])
        inner = {text[:end]: None for end in range(len(self._cached) + 1, shortest) for text in texts}
        self._rows = {text: row for row, text in enumerate((*inner, *texts))}
        parents = [self._rows.get(text[:-1], ROOT) for text in self._rows]
        chain = parents == list(range(-1, len(parents) - 1))
        logits = self._session.extend(
            Rows([text[-1] for text in self._rows], None if chain else Tree(on_device(parents, self._device))),
            Want(logits=len(texts)),
        ).logits
        log_probs = precise(logits).log_softmax(-1)
        if self._processors is not None:  # `generate` has them change log-probabilities, and leaves these as they are
            log_probs = torch.cat([self._changed(*each) for each in zip(texts, log_probs.split(1), strict=True)])
        best = log_probs.topk(min(count, logits.shape[-1]))  # [texts, count]
        values, tokens = torch.stack([best.values.double(), best.indices.double()]).tolist()
        return {
            text: [(int(token), value) for token, value in zip(ids, logs, strict=True)]
            for text, ids, logs in zip(texts, tokens, values, strict=True)
        }

    def _changed(self, text: Text, log_probs: Float[Tensor, "1 vocab"]) -> Float[Tensor, "1 vocab"]:
        return self._processors(torch.tensor([[*self._before, *text]], device=self._device), log_probs)

    def _keep_common(self, texts: Sequence[Text]) -> None:
        """Keep the rows of the texts' common prefix that have run, and drop all other rows from the cache."""
        common = texts[0][: min(len(texts[0]) - 1, common_prefix(min(texts), max(texts)))]
        path = [self._rows[common[:end]] for end in range(1, len(common) + 1) if common[:end] in self._rows]
        if self._rows:
            self._session.keep(path)
        self._cached = common[: common_prefix(common, self._cached) + len(path)]
        self._session.rollback(self._behind + len(self._cached))


def extended(running: Sequence[Hypothesis], most_likely: MostLikely) -> list[Hypothesis]:
    """Every hypothesis extended by each of its most likely tokens, best first."""
    return best_first(
        [Hypothesis((*one.text, token), one.score + logp) for one in running for token, logp in most_likely[one.text]]
    )


def best_first(hypotheses: Sequence[Hypothesis]) -> tuple[Hypothesis, ...]:
    """Sorted by score; equal scores keep their order."""
    return tuple(sorted(hypotheses, key=lambda one: -one.score))


def unended(hypotheses: Sequence[Hypothesis], limits: Limits) -> tuple[Hypothesis, ...]:
    return tuple(one for one in hypotheses if one.text[-1] not in limits.end_tokens)


def round_of(drafted: Sequence[Sequence[Hypothesis]], steps: int, search: Search) -> Round:
    """The record of one verification: how many steps were drafted, and how many the target's search took."""
    judged = steps - 1 if search.over else len(drafted)
    return Round(
        drafted=drafted[-1][0].text[-len(drafted) :][:judged] if drafted else (),
        accepted=steps - 1,
        next_token=(search.running or search.ended)[0].text[-1],
        draft_calls=len(drafted),
    )
