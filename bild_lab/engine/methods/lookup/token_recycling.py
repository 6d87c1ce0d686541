"""Drafts from candidates that the target itself found likely when it last read a token (Token
Recycling).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from bild_lab.engine.draft import ROOT, Draft, Verdict, empty_draft
from bild_lab.engine.methods.candidate_trees import MAX_NODES, CandidateNode
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import Model, Scores, Session, on_device
from bild_lab.errors import require_flag, require_whole

MAX_CANDIDATES = 64
# the most likely next tokens after a token, the most likely first
Candidates = dict[int, Sequence[int]]


class TokenRecycling(Drafter):
    """A tree of the candidates that followed each token when the target last read it (Luo et al.,
    2024, §3).

    The adjacency matrix has the `top_k` most likely next tokens of every token that the target has
    read, in the text or in a draft, accepted or not; the newest row of a token counts. The tree is
    static: a node's i-th child is the i-th candidate of its token. Nodes without a candidate, and
    those below them, are left out. The rows of the prompt are not scored, so they add no candidates
    here, as they do in the paper.

    nodes: of the static tree. keep: keep the matrix from one text to the next ("hot start", §4.3).
    A prompt that comes again begins with the matrix that it found the first time, so repeated
    timings do the same work. Of a text that was decoded in part and later further, the longer counts.
    """

    drafts_trees = True

    def __init__(self, target: Model, nodes: int, top_k: int, keep: bool = False) -> None:
        require_whole("nodes", nodes, 1, MAX_NODES)
        require_whole("top_k", top_k, 1, MAX_CANDIDATES)
        require_flag("keep", keep)
        self._device, self._nothing = target.device, empty_draft(target.device)
        self.learns_from_texts = keep
        self._top_k = top_k
        self._tree = static_tree(nodes, top_k)
        # the first text of each source, and the matrix at its end, in the order in which the
        # sources first came
        self._kept: dict[Hashable, tuple[list[int], Candidates]] = {}

    def begin(self, request: Request, target: Session) -> None:
        self._limits, self._key = request.limits, request.source.key
        self._candidates = self._known_before(self._key)

    def _known_before(self, key: Hashable) -> Candidates:
        """The matrix at the end of the text before this source's first one."""
        earlier_texts = list(self._kept.values())
        if key in self._kept:
            earlier_texts = earlier_texts[: list(self._kept).index(key)]
        return dict(earlier_texts[-1][1]) if earlier_texts else {}

    def forget(self) -> None:
        self._kept.clear()

    def propose(self, tokens: list[int]) -> Draft:
        self._tokens, self._last_token = tokens, tokens[-1]
        max_depth = self._limits.room(tokens)
        drafted: list[int] = []
        parents: list[int] = []
        draft_index: dict[int, int] = {ROOT: ROOT}  # by the node's index in the static tree
        for index, node in enumerate(self._tree):
            if node.depth >= max_depth or node.parent not in draft_index:
                continue
            parent = draft_index[node.parent]
            parent_token = self._last_token if parent == ROOT else drafted[parent]
            token = self._candidate(parent_token, node)
            if token is not None:
                draft_index[index] = len(drafted)
                drafted.append(token)
                parents.append(parent)
        if not drafted:
            return self._nothing
        return Draft(
            on_device(drafted, self._device),
            on_device(parents, self._device),
            known_parents=parents,
        )

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Take the candidates of every row that the target has just read; those of the accepted
        rows last.
        """
        logits = scores.logits[: len(draft) + 1]
        count = min(self._top_k, logits.shape[-1])
        candidates = logits.topk(count).indices.tolist()
        row_tokens = [self._last_token, *draft.token_list]
        for row in [*range(len(row_tokens)), *verdict.rows]:
            self._candidates[row_tokens[row]] = candidates[row]
        if self.learns_from_texts:
            self._keep(draft, verdict)

    def _keep(self, draft: Draft, verdict: Verdict) -> None:
        """Remember the text so far, if it begins as the one before."""
        text = [*self._tokens, *verdict.tokens(draft)]
        kept_text, _ = self._kept.get(self._key, ([], {}))
        if text[: len(kept_text)] == kept_text:
            self._kept[self._key] = text, self._candidates

    def observe_other(
        self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict
    ) -> None:
        self._tokens, self._last_token = tokens, tokens[-1]
        self.observe(draft, scores, verdict)

    def _candidate(self, token: int, node: CandidateNode) -> int | None:
        """What this node of the static tree drafts below this token."""
        if token in self._limits.end_tokens and node.parent != ROOT:
            return None
        candidates = self._candidates.get(token, ())
        return candidates[node.rank] if node.rank < len(candidates) else None


def static_tree(nodes: int, top_k: int) -> list[CandidateNode]:
    """The tree of this many nodes that a draft is most likely to follow furthest, parents first.

    A node's chance is that of its rank times its parent's: the optimum for ranks that are right
    independently (Sequoia, Chen et al., 2024, §3), in place of the paper's tree, which was found by
    hand.
    """
    chances = [chance_of(rank) for rank in range(top_k)]
    tree: list[CandidateNode] = []
    # nodes that may come next: the negated chance, depth, rank, parent
    frontier = [(-chances[0], 0, 0, ROOT)]
    while len(tree) < nodes:
        chance, depth, rank, parent = heapq.heappop(frontier)
        index = len(tree)
        tree.append(CandidateNode(depth, rank, parent))
        child_chance = chance * chances[0]
        heapq.heappush(frontier, (child_chance, depth + 1, 0, index))
        if rank + 1 < top_k:
            sibling_chance = chance / chances[rank] * chances[rank + 1]
            heapq.heappush(frontier, (sibling_chance, depth, rank + 1, parent))
    return tree


def chance_of(rank: int) -> float:
    """How often the candidate of this rank, from 0, is the next token, where there are candidates.

    A law near what was measured on Multi30k with two small models, T5 and Llama: 0.42, 0.09, 0.04,
    0.02, 0.02, …
    """
    return 0.42 / (rank + 1) ** 2
