"""Speculative sampling that keeps tokens which it would reject, if a rule forgives them."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Bool, Float, Int
from torch import Tensor

from bild_lab.engine.acceptance.speculative_sampling import drafter_probs, tried
from bild_lab.engine.acceptance.trees import judged_nodes, judging_rows
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, draw, precise


def judged_probs(logits: Float[Tensor, "n vocab"], sampling: Sampling) -> Float[Tensor, "n vocab"]:
    """p as a rule reads it: what tokens are drawn from; under greedy decoding the target's own, at temperature 1."""
    return precise(logits).softmax(-1) if sampling.greedy else sampling.probs(logits)


def own_decisions(
    draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request
) -> tuple[Bool[Tensor, " n"], Int[Tensor, " n+1"]]:
    """Which drafted tokens lossless speculative sampling keeps, and what it emits behind each row if no child stands.

    Greedy: the tokens that the target itself chooses.
    """
    sampling = request.sampling
    if sampling.greedy:
        chosen = sampling.choose(logits, None)
        return draft.tokens == chosen[judging_rows(draft)], chosen
    p = sampling.probs(logits)
    accepted, rest = tried(p, drafter_probs(draft, p), draft, request.generator)
    return accepted, draw(rest, request.generator)


def forgiving_verdict(
    draft: Draft,
    accepted: Sequence[float],
    forgiven: Sequence[float],
    likelihood: Sequence[float],
    emitted: Sequence[float],
) -> Verdict:
    """Accept, from the root down, the child that lossless decoding keeps, else the likeliest one that is forgiven.

    accepted, forgiven, likelihood: of each node. emitted: the token to emit behind each row, if no child stands.
    The round's statistics say of each node whether it was `forgiven`: it stands, and lossless decoding had rejected it.
    """
    nodes = judged_nodes(draft)
    path: list[int] = []
    row = 0
    while nodes[row]:
        node = next((one for one in nodes[row] if accepted[one]), None)
        if node is None:
            spared = [one for one in nodes[row] if forgiven[one]]
            if not spared:
                break
            node = max(spared, key=likelihood.__getitem__)
        path.append(node)
        row = node + 1
    flags = tuple(int(node in path and not accepted[node]) for node in range(len(draft)))
    return Verdict(tuple(path), int(emitted[row]), stats={"forgiven": flags})
