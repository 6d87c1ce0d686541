"""Self-speculation whose skipped blocks are chosen while decoding (SWIFT, Xia et al., 2024)."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.memory import Memory
from bild_lab.engine.drafters.model import LowConfidence, ModelDrafter
from bild_lab.engine.models.views import TargetLayers, skipping
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import likeliest, precise
from bild_lab.engine.session import LoadedModel, Rows, Scores, Session, Want
from bild_lab.errors import UserError, require_flag, require_whole

Block = tuple[int, bool]  # a layer, and whether it is its feed-forward
Blocks = frozenset[Block]


class AdaptiveSkip(TargetLayers):
    """The target without a share of its blocks, which may be others from one forward to the next (SWIFT §4.2).

    share: of all attention and feed-forward blocks, how many are skipped, r there. The first and the last layer run
    whole, as there, in a target of more than two layers. Skipping begins with blocks at even distances.
    """

    def __init__(self, target: LoadedModel, share: float) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share < 1.0:
            raise UserError(f"share must lie between 0 and 1, got {share!r}; 0.45 skips almost half of the blocks")
        depth = target.depth
        layers = range(1, depth - 1) if depth > 2 else range(depth)
        self.free: list[Block] = [(layer, fed) for layer in layers for fed in (False, True)]
        self.count = max(1, min(round(share * 2 * depth), len(self.free) - (depth < 3)))
        places = [at * len(self.free) // self.count for at in range(self.count)]
        self.first = frozenset(self.free[place] for place in places)
        super().__init__(target, ())
        part = self.without(self.first)
        self.layers, self.skipped = tuple(part.layers), part.skipped
        target.require_blocks("skipping attention or feed-forward")

    def without(self, blocks: Blocks) -> Want:
        """What runs without these blocks."""
        attention, feed_forward = (frozenset(at for at, fed in blocks if fed == kind) for kind in (False, True))
        layers, skipped = skipping(self.depth, attention, feed_forward)
        return Want(layers=layers, skipped=skipped)


class AdaptiveSkipDrafter(Drafter):
    """Drafts with the target's own blocks, and looks for better ones to skip while the text is decoded.

    In each round a candidate reads what was drafted, in one forward, and its likeliest tokens are compared with the
    target's, as those of the blocks in use are ("matchness", SWIFT §4.2, Eq. 3). After `context` rows the one with
    more matches is used. Candidates are in turn a random set and the set in use with one block exchanged. The search
    ends after `candidates`, or once every row of one comparison matched.

    SWIFT scores candidates on the last generated tokens, and takes every 25th from Bayesian optimization.

    window, stop: as of `ModelDrafter`. keep: go on from one text to the next with the blocks in use, and with the
    search. A prompt that comes again begins as it did the first time, so repeated timings do the same work.
    """

    drafts_trees = False

    def __init__(
        self,
        draft: AdaptiveSkip,
        window: int,
        context: int,
        candidates: int,
        stop: LowConfidence | None = None,
        keep: bool = False,
    ) -> None:
        require_whole("context", context, 1)
        require_whole("candidates", candidates, 0)
        require_flag("keep", keep)
        self._part, self._drafter = draft, ModelDrafter(draft, window, stop)
        self._context, self._candidates, self._keep = context, candidates, keep
        self._begun = Memory()
        self._reset()

    def start(self, request: Request, target: Session) -> None:
        self._target = target
        if not self._keep:
            self._reset()
        elif request.source in self._begun:
            self._chance, state = random.Random(), self._begun[request.source]
            self._used, self._tried, self._candidate, self._judged, self._matches = state[:-1]
            self._chance.setstate(state[-1])
        else:
            state = (self._used, self._tried, self._candidate, self._judged, self._matches, self._chance.getstate())
            self._begun.put(request.source, state)
        self._drafter.start(request, target)
        self._use(self._used)

    def propose(self, tokens: list[int]) -> Draft:
        draft, self._guessed = self._drafter.propose(tokens), None
        if not len(draft) or (candidate := self._next()) is None:
            return draft
        rows = Rows(draft.under(tokens[-1])[:-1], position=self._target.length)
        scores = self._target.extend(rows, self._part.without(candidate))
        self._guessed = likeliest(precise(scores.logits))
        return replace(draft, calls=draft.calls + 1)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Count how often the blocks in use and the candidate would have chosen the target's likeliest token."""
        self._drafter.observe(draft, scores, verdict)
        if self._guessed is None:
            return
        guessed = self._guessed[: len(draft)]
        right = likeliest(precise(scores.logits[: len(draft)])).to(guessed.device)
        drafted = draft.tokens if draft.probs is None else likeliest(draft.probs)
        self._judged += len(draft)
        used, candidate = self._matches
        matched = torch.stack([drafted == right, guessed == right]).sum(-1).tolist()  # one wait for a GPU
        self._matches = used + matched[0], candidate + matched[1]
        if self._judged >= self._context:
            self._decide()

    def observe_other(self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Nothing to learn: the blocks in use did not draft."""

    def forget(self, length: int) -> None:
        self._drafter.forget(length)

    def _reset(self) -> None:
        """Begin the search anew."""
        self._chance = random.Random(0)
        self._used, self._tried = self._part.first, 0
        self._guessed: Int[Tensor, " n"] | None = None
        self._forget_candidate()

    def _forget_candidate(self) -> None:
        self._candidate: Blocks | None = None
        self._judged, self._matches = 0, (0, 0)  # rows, and matches of the blocks in use and of the candidate

    def _use(self, blocks: Blocks) -> None:
        """Leave these blocks out from now on."""
        self._used, part = blocks, self._part.without(blocks)
        self._drafter.session.run_only(part.layers, part.skipped)

    def _decide(self) -> None:
        used, candidate = self._matches
        if candidate > used:
            self._use(self._candidate)
        self._tried = self._candidates if max(used, candidate) == self._judged else self._tried + 1
        self._forget_candidate()

    def _next(self) -> Blocks | None:
        """The set of blocks to compare in this round; None when the search has ended."""
        free, count = self._part.free, self._part.count
        if self._tried >= self._candidates or count == len(free):
            return None
        if self._candidate is None:
            if self._tried % 2:
                out = self._chance.choice(sorted(self._used))
                new = self._chance.choice(sorted(set(free) - self._used))
                self._candidate = self._used - {out} | {new}
            else:
                self._candidate = frozenset(self._chance.sample(free, count))
        return self._candidate
