"""Which row of the target's logits judges which drafted token, which path is accepted, and what a
rule emits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict

PerRow = Float[Tensor, "n+1 vocab"]  # logits or distributions after the text, and after each node
PerNode = Float[Tensor, "n vocab"]
Distribution = Float[Tensor, " vocab"]
# A trial gets the distribution that is left for a node, and the node. It gives the probability that
# each token is accepted if it is the one drafted there, and what is left for the next sibling, or
# to draw the token from.
Trial = Callable[[Distribution, int], tuple[Distribution, Distribution]]
# chooses which of these siblings is accepted; None if none is
Choice = Callable[[list[int]], int | None]


def judging_rows(draft: Draft) -> Int[Tensor, " n"]:
    """The row of logits that judges each node: 0 for the root's children, i + 1 for the children of
    node i.
    """
    if draft.parents is None:
        return torch.arange(len(draft), device=draft.tokens.device)
    return draft.parents + 1


def judged_nodes(draft: Draft) -> list[list[int]]:
    """The nodes that each row judges, in the order drafted: the root's children for row 0, node i's
    for row i + 1.
    """
    nodes: list[list[int]] = [[] for _ in range(len(draft) + 1)]
    for node, parent in enumerate(draft.parent_list):
        nodes[parent + 1].append(node)
    return nodes


def accepted_path(draft: Draft, choose: Choice) -> tuple[tuple[int, ...], int]:
    """The accepted nodes from the root down, and the row of logits after them."""
    siblings_of_row = judged_nodes(draft)
    path: list[int] = []
    row = 0
    while siblings_of_row[row]:
        node = choose(siblings_of_row[row])
        if node is None:
            break
        path.append(node)
        row = node + 1
    return tuple(path), row


def tree_verdict(
    draft: Draft, choose: Choice, target_tokens: Sequence[float], **statistics: Sequence[float]
) -> Verdict:
    """What is accepted from the root down, and the target's own token after it.

    target_tokens: [n+1], the token that the target has chosen or drawn after each row.
    statistics: [n] each, of each drafted token, by name.
    """
    path, row = accepted_path(draft, choose)
    stats = {name: tuple(values) for name, values in statistics.items()}
    return Verdict(path, int(target_tokens[row]), stats)


def chain_verdict(
    draft: Draft,
    accept_length: Int[Tensor, " 1"],
    next_token: Int[Tensor, " 1"],
    **statistics: Float[Tensor, " n"],
) -> Verdict:
    """So many of a chain's tokens are accepted, and this one follows them; all are read from the
    device at once. statistics: of each drafted token, by name.
    """
    accepted_count, next_tokens, *values = draft.to_host(
        accept_length, next_token, *statistics.values()
    )
    path = tuple(range(int(accepted_count[0])))
    stats = dict(zip(statistics, map(tuple, values), strict=True))
    return Verdict(path, int(next_tokens[0]), stats)


def first_accepted(accepted: Sequence[float]) -> Choice:
    """Choose the sibling drafted first among those accepted."""
    return lambda siblings: next((node for node in siblings if accepted[node]), None)


def best_sibling(scores: Sequence[float], threshold: float) -> Choice:
    """Choose the sibling of the highest score, if that reaches the threshold."""

    def choose(siblings: list[int]) -> int | None:
        passing = [node for node in siblings if scores[node] >= threshold]
        return max(passing, key=scores.__getitem__, default=None)

    return choose


def output_of_trials(judge: Trial, draft: Draft, p: PerRow, proposal_probs: PerNode) -> PerRow:
    """The distribution of the token emitted after each row, by a rule that tries the children of a
    row in order.

    If a child drawn from d is accepted with probability a, and r is left after it, then what is
    emitted from this child on is d·a + (1 − Σ d·a)·r, where r is what is emitted from the next
    child on. p: left for the first child of each row. proposal_probs: d of each node, given the siblings
    before it.
    """
    output = p.clone()
    for row, children in enumerate(judged_nodes(draft)):
        remaining = p[row]
        accepted_terms: list[Distribution] = []
        for node in children:
            acceptance_probs, remaining = judge(remaining, node)
            accepted_terms.append(proposal_probs[node] * acceptance_probs)
        emitted = remaining
        for accepted in reversed(accepted_terms):
            emitted = accepted + (1 - accepted.sum()) * emitted
        output[row] = emitted
    return output


def output_of_threshold(
    passes: Bool[Tensor, "n+1 vocab"], draft: Draft, p: PerRow, proposal_probs: PerNode
) -> PerRow | None:
    """`output_of_trials` for a rule that accepts the tokens that pass a threshold, and else draws
    from p. In a tree siblings compete: None.

    passes: whether each token after each row passes.
    """
    if draft.parents is not None:
        return None
    return output_of_trials(lambda left, node: (passes[node].to(p), left), draft, p, proposal_probs)
