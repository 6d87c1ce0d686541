"""Self-speculation whose skipped blocks are chosen while decoding (SWIFT, Xia et al., 2024)."""

from __future__ import annotations

import copy
import random
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.model import LowConfidence, ModelDrafter
from bild_lab.engine.models.views import TargetLayers, skipping
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import most_likely, precise
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


@dataclass
class Search:
    """Where the search for blocks to skip has come to.

    used: the blocks that are skipped. tried: how many candidates were. judged: rows on which `candidate` was compared.
    matches: of the blocks in use and of the candidate.
    """

    used: Blocks
    tried: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    candidate: Blocks | None = None
    judged: int = 0
    matches: tuple[int, int] = (0, 0)

    def forget_candidate(self) -> None:
        self.candidate, self.judged, self.matches = None, 0, (0, 0)


class AdaptiveSkipDrafter(Drafter):
    """Drafts with the target's own blocks, and looks for better ones to skip while the text is decoded.

    In each round a candidate reads what was drafted, in one forward, and its most likely tokens are compared with the
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
        self._latest = [Search(draft.first)]  # of the text that began last
        self._begun: dict[Hashable, Search] = {}  # with what each source's first text began

    def begin(self, request: Request, target: Session) -> None:
        self._target, self._guessed = target, None
        self._search = Search(self._part.first)
        if self._keep:
            begun = self._begun.setdefault(request.source.key, copy.deepcopy(self._latest[0]))
            self._latest[0] = self._search = copy.deepcopy(begun)
        self._drafter = self._drafter.start(request, target)
        self._use(self._search.used)

    def propose(self, tokens: list[int]) -> Draft:
        draft, self._guessed = self._drafter.propose(tokens), None
        if not len(draft) or (candidate := self._next()) is None:
            return draft
        rows = Rows(draft.under(tokens[-1])[:-1], position=self._target.length)
        scores = self._target.extend(rows, self._part.without(candidate))
        self._guessed = most_likely(precise(scores.logits))
        return replace(draft, calls=draft.calls + 1)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Count how often the blocks in use and the candidate would have chosen the target's most likely token."""
        self._drafter.observe(draft, scores, verdict)
        if self._guessed is None:
            return
        search, guessed = self._search, self._guessed[: len(draft)]
        right = most_likely(precise(scores.logits[: len(draft)])).to(guessed.device)
        drafted = draft.tokens if draft.probs is None else most_likely(draft.probs)
        search.judged += len(draft)
        used, candidate = search.matches
        matched = torch.stack([drafted == right, guessed == right]).sum(-1).tolist()  # one wait for a GPU
        search.matches = used + matched[0], candidate + matched[1]
        if search.judged >= self._context:
            self._decide()

    def observe_other(self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Nothing to learn: the blocks in use did not draft."""

    def rollback(self, length: int) -> None:
        self._drafter.rollback(length)

    def _use(self, blocks: Blocks) -> None:
        """Leave these blocks out from now on."""
        self._search.used, part = blocks, self._part.without(blocks)
        self._drafter.session.run_only(part.layers, part.skipped)

    def _decide(self) -> None:
        search = self._search
        used, candidate = search.matches
        if candidate > used:
            self._use(search.candidate)
        search.tried = self._candidates if max(used, candidate) == search.judged else search.tried + 1
        search.forget_candidate()

    def _next(self) -> Blocks | None:
        """The set of blocks to compare in this round; None when the search has ended."""
        free, count, search = self._part.free, self._part.count, self._search
        if search.tried >= self._candidates or count == len(free):
            return None
        if search.candidate is None:
            if search.tried % 2:
                out = search.chance.choice(sorted(search.used))
                new = search.chance.choice(sorted(set(free) - search.used))
                search.candidate = search.used - {out} | {new}
            else:
                search.candidate = frozenset(search.chance.sample(free, count))
        return search.candidate
