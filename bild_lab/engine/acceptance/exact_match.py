"""Keep drafted tokens as long as they are the ones the target itself chooses, in the whole text or at its beginning."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch

from bild_lab.engine.acceptance.trees import PerNode, PerRow, accepted_path, first_of
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import Scores
from bild_lab.errors import require_whole


class ExactMatch(Acceptance):
    """The target chooses a token after every row; a drafted path is accepted as far as it agrees.

    Lossless: every emitted token is the target's own choice (its argmax, or a sample from its distribution).
    """

    accepts_trees = True

    def lossless(self, sampling: Sampling) -> bool:
        return True

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        (chosen,) = draft.to_host(request.sampling.choose(logits, request.generator))  # [n+1]
        drafted = zip(draft.token_list, draft.parent_list, strict=True)
        path, row = accepted_path(draft, first_of([token == chosen[parent + 1] for token, parent in drafted]))
        return Verdict(path, int(chosen[row]))

    def output_distribution(self, draft: Draft, logits: PerRow, request: Request, drawn: PerNode) -> PerRow:
        return request.sampling.probs(logits)  # whatever was drafted


class ExactPrefix(Acceptance):
    """Verify the first tokens of a text by an exact rule, and all after them by one that may change them.

    Lossy rules lose most with the first tokens (SecureSD, Zhang et al., 2026, §V, whose border is soft). A draft that
    crosses the border is judged by both: its first part exactly, and below what is accepted of it by the other rule, as
    a draft of its own after these tokens. Its statistics are those of the other rule, None for the first part.

    length: how many generated tokens are verified exactly. exact: the rule for them, such as speculative sampling.
    """

    def __init__(self, length: int, rule: Acceptance, exact: Acceptance) -> None:
        require_whole("policy.exact_prefix", length, 1, remedy="0 verifies no token exactly")
        self.exact_prefix, self._rule, self._exact = length, rule, exact
        self.accepts_trees, self.needs, self.wants = rule.accepts_trees, rule.needs, rule.wants
        self._text: Sequence[int] = ()  # with the prompt
        self._scores = Scores(None)

    def lossless(self, sampling: Sampling) -> bool:
        return self._rule.lossless(sampling)

    def in_round(self, tokens: Sequence[int], scores: Scores) -> Acceptance:
        """The rule after this text."""
        rule = copy(self)
        rule._text, rule._scores = tokens, scores
        return rule

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        left = self._left(request)
        if left <= 0:
            return self._rule.in_round(self._text, self._scores)(draft, logits, request)
        draft = replace(draft, probes=None, shape=None)
        first = [node for node, depth in enumerate(draft.depths) if depth <= left]
        verdict = self._exact(draft.only(first), logits[[0, *(node + 1 for node in first)]], request)
        path = tuple(first[node] for node in verdict.path)
        below = draft.below(path[-1]) if len(path) == left else []
        if not below:
            return replace(verdict, path=path)
        rule = self._after([draft.token_list[node] for node in path], rows := [node + 1 for node in (path[-1], *below)])
        rest = rule(draft.only(below), logits[rows], request)
        noted = {
            name: tuple(dict(zip(below, value, strict=True)).get(node) for node in range(len(draft)))
            for name, value in rest.stats.items()
            if isinstance(value, tuple)
        }
        return Verdict((*path, *(below[node] for node in rest.path)), rest.next_token, {**rest.stats, **noted})

    def output_distribution(self, draft: Draft, logits: PerRow, request: Request, drawn: PerNode) -> PerRow | None:
        """Of a chain: exact before the border, and after it the other rule's."""
        if draft.parents is not None:
            return None
        left = min(max(self._left(request), 0), len(draft))
        rows, draft = list(range(left, len(draft) + 1)), replace(draft, probes=None, shape=None)
        before = self._exact.output_distribution(draft, logits, request, drawn)
        rule, rest = self._after(draft.token_list[:left], rows), draft.only(rows[:-1])
        after = rule.output_distribution(rest, logits[rows], request, drawn[left:])
        return None if after is None else torch.cat([before[:left], after])

    def _left(self, request: Request) -> int:
        """How many of the next tokens are verified exactly."""
        return self.exact_prefix - max(0, len(self._text) - request.limits.prompt_length)

    def _after(self, accepted: Sequence[int], rows: Sequence[int]) -> Acceptance:
        """The other rule after the text and these tokens, with the scores of these rows."""
        held = {"logits": self._scores.logits, "head_input": self._scores.head_input}
        picked = {name: None if one is None else one[list(rows)] for name, one in held.items()}
        return self._rule.in_round([*self._text, *accepted], replace(self._scores, **picked))
