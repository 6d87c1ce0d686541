"""A small model that drafts a tree of tokens, grown where acceptance is most likely (EAGLE-2, Li et
al., 2024).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bild_lab.engine.draft import ROOT, Draft, Tree, Verdict
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods.fr_spec import NarrowModel
from bild_lab.engine.methods.speculative.draft_model import require_confidence
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.engine.session import (
    LAST_LOGITS,
    DraftNode,
    GrownTree,
    Model,
    OutputSpec,
    Rows,
    Scores,
    Session,
    TreeSpec,
    for_draft,
    on_device,
    prune_tree,
)
from bild_lab.errors import require_number, require_whole


class ModelTreeDrafter(Drafter):
    """Drafts a tree of up to `nodes` tokens, of which the target can accept one branch.

    A token's chance is the product of the drafter's probabilities along its branch. In each of at
    most `window` forwards the `width` most likely leaves grow `children` each; of all tokens the
    `nodes` most likely are drafted (EAGLE-2 §4). The tree depends on the drafter's distributions
    alone, never on a random number. So every drafted token counts as certain (q is one-hot), and
    speculative sampling is lossless.

    stop: a leaf where the drafter's largest probability is not below this has one child; an unsure
        one branches instead of handing over to the target (BiLD's fallback, §3.3, as branching).
        None: every leaf branches.
    min_prob: growing ends when no leaf has this chance.
    vocabulary: the only tokens that it drafts; None: all.

    Sampled text multiplies the probabilities that it samples from, greedy text those at
    temperature 1.
    """

    drafts_trees = True

    def __init__(
        self,
        draft: Model,
        nodes: int,
        window: int,
        width: int,
        children: int,
        min_prob: float = 0.0,
        stop: float | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self._model = draft if vocabulary is None else NarrowModel(draft, vocabulary)
        self._tree_spec = tree_spec_of_policy(
            nodes, window, width, children, min_prob, require_confidence(stop)
        )

    def begin(self, request: Request, target: Session) -> None:
        self._request = request
        self._session = self._model.start(
            request.source, request.limits.max_new_tokens, for_draft(target)
        )
        self._grown = GrownTree()

    def propose(self, tokens: list[int]) -> Draft:
        self._session.rollback(len(tokens) - 1)
        tree_spec = tree_spec_of_round(self._tree_spec, self._request, tokens)
        feed = tokens[self._session.length :]
        grown = self._session.draft(feed, tree_spec)
        if grown is None:  # there is no program
            grown = grow_tree(self._session, feed, tree_spec, self._request.sampling)
        self._grown = grown
        return draft_of_tree(grown, self._model.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Keep the accepted tokens that have run."""
        if len(self._grown.forwards) > 1:
            rows = (self._grown.rows[node] for node in verdict.path)
            self._session.keep([row for row in rows if row is not None])

    def observe_other(
        self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict
    ) -> None:
        """Nothing to keep."""

    def rollback(self, length: int) -> None:
        self._session.rollback(length)


def tree_spec_of_policy(
    nodes: int,
    window: int,
    width: int,
    children: int,
    min_prob: float,
    prune_confidence: float | None = None,
) -> TreeSpec:
    """How a policy's trees grow. Raises UserError for values out of range."""
    for name, value in (
        ("nodes", nodes),
        ("window", window),
        ("width", width),
        ("children", children),
    ):
        require_whole(name, value, 1)
    require_number("min_prob", min_prob, 0, 1, remedy="0 always grows on")
    return TreeSpec(nodes, window, width, children, frozenset(), prune_confidence, min_prob)


def tree_spec_of_round(tree_spec: TreeSpec, request: Request, tokens: list[int]) -> TreeSpec:
    """The tree's growth within the room after these tokens, by the probabilities that tokens are
    sampled from.
    """
    limits, sampling = request.limits, request.sampling
    return replace(
        tree_spec,
        depth=min(tree_spec.depth, limits.room(tokens)),
        end_tokens=limits.end_tokens,
        temperature=1.0 if sampling.greedy else sampling.temperature,
        plain=sampling.greedy or sampling.plain,
    )


def draft_of_tree(grown: GrownTree, device: torch.device) -> Draft:
    return Draft(
        on_device(grown.tokens, device),
        on_device(grown.parents, device),
        calls=len(grown.forwards),
        known_parents=grown.parents,
    )


def grow_tree(
    session: Session, feed: list[int], tree_spec: TreeSpec, sampling: Sampling
) -> GrownTree:
    """Run these tokens of the text, then grow a tree after them, one forward for each level."""
    nodes: list[DraftNode] = []
    parents: list[int] = []  # the parent row of each row that has run after the text
    forwards = [len(feed)]
    logits = session.extend(feed, LAST_LOGITS).logits
    leaves = [ROOT]
    while True:
        # 1. the children of the rows that ran last
        level_start = len(nodes)
        nodes += most_likely_children(logits, leaves, nodes, tree_spec, sampling)
        # 2. which of them grow
        growing = [
            n
            for n in range(level_start, len(nodes))
            if nodes[n].token not in tree_spec.end_tokens and nodes[n].chance >= tree_spec.min_prob
        ]
        most_likely_first = sorted(growing, key=lambda n: -nodes[n].chance)
        leaves = sorted(most_likely_first[: tree_spec.width])
        if not leaves or len(forwards) == tree_spec.depth:
            break
        # 3. they run
        for leaf in leaves:
            nodes[leaf].row = len(parents)
            above = nodes[leaf].parent
            parents.append(ROOT if above == ROOT else nodes[above].row)
        rows = Rows([nodes[leaf].token for leaf in leaves], Tree(on_device(parents, logits.device)))
        logits = session.extend(rows, OutputSpec()).logits
        forwards.append(len(leaves))
    return prune_tree(nodes, tree_spec.nodes, forwards)


def most_likely_children(
    logits: torch.Tensor,
    leaves: list[int],
    nodes: list[DraftNode],
    tree_spec: TreeSpec,
    sampling: Sampling,
) -> list[DraftNode]:
    """The most likely tokens after each leaf, from its row of logits."""
    probs = precise(logits).softmax(-1)
    confidences = probs.amax(-1)
    if not sampling.greedy:
        probs = sampling.probs(logits)
    chances, tokens = probs.topk(min(tree_spec.children, probs.shape[-1]))
    # one transfer
    read = torch.cat(
        [confidences[:, None].double(), chances.double(), tokens.double()], -1
    ).tolist()
    max_children = chances.shape[-1]
    bar = tree_spec.prune_confidence
    children: list[DraftNode] = []
    for leaf, (confidence, *values) in zip(leaves, read, strict=True):
        child_count = 1 if bar is not None and confidence >= bar else max_children
        child_chances, child_tokens = values[:max_children], values[max_children:]
        leaf_chance = 1.0 if leaf == ROOT else nodes[leaf].chance
        for chance, token in zip(child_chances[:child_count], child_tokens, strict=False):
            if chance > 0.0:
                children.append(DraftNode(int(token), leaf, leaf_chance * chance))
    return children
