"""Speculative sampling: keep drafted tokens so that the output has the target's distribution."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.engine.acceptance.exact_match import ExactMatch
from bild_lab.engine.acceptance.laws import acceptance, law_of
from bild_lab.engine.acceptance.trees import judged_nodes, judging_rows, likeliest_path
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, draw, precise
from bild_lab.errors import UserError


class SpeculativeSampling:
    """Accept a token drawn from q with probability min(1, p / (l q)) (speculative decoding, Algorithm 1, A.5).

    At the first rejection the next token is drawn from norm(max(0, p − l q)). After a fully accepted
    draft it is drawn from p. In a tree the children of a node are tried in the order drafted; after a
    rejected child its residual replaces p for the next child.

    lenience: l in (0, 1]. At 1 the output has the target's distribution. This also holds for trees
    whose siblings were drawn one after another from their rows of `draft.probs`. Below 1 no token is
    emitted with a probability above p / l.

    Under greedy decoding p and q are one-hot and this is exact match. With lenience below 1 a token is
    then accepted if p(token) >= l · max p, where p is the target's distribution at temperature 1 before
    standardizing. If several siblings pass, the one most likely under p is taken.
    """

    accepts_trees = True
    needs: frozenset[str] = frozenset()

    def __init__(self, lenience: float = 1.0) -> None:
        if isinstance(lenience, bool) or not isinstance(lenience, int | float) or not 0.0 < lenience <= 1.0:
            raise UserError(f"lenience must lie in (0, 1], got {lenience!r}; use 1 for lossless decoding")
        self._lenience = lenience
        self._exact = ExactMatch()

    def lossless(self, sampling: Sampling) -> bool:
        return self._lenience == 1.0

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        if request.sampling.greedy:
            if self._lenience == 1.0:
                return self._exact(draft, logits, request)
            return near_match(draft, logits, request, self._lenience)
        p = request.sampling.probs(logits)  # [n+1, vocab]
        q = self._lenience * drafter_probs(draft, p)  # [n, vocab]
        verify = verify_chain if draft.parents is None else verify_tree
        return verify(p, q, draft, request.generator)

    def law(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request, drawn: Float[Tensor, "n vocab"]
    ) -> Float[Tensor, "n+1 vocab"]:
        p = request.sampling.probs(logits)
        return speculative_law(draft, p, self._lenience * drafter_probs(draft, p), drawn)


def verify_chain(
    p: Float[Tensor, "n+1 vocab"],
    q: Float[Tensor, "n vocab"],
    draft: Draft,
    generator: torch.Generator | None,
    **noted: Float[Tensor, " n"],
) -> Verdict:
    """Accept each token with min(1, p / q) up to the first rejection, then draw from norm(max(0, p − q)).

    q is the drafter's distribution times the lenience. noted: statistics of each drafted token, by name.
    """
    drafted = draft.tokens[:, None]
    uniform = torch.rand(len(draft), generator=generator, device=p.device, dtype=p.dtype)
    kept = before_rejection(uniform * q.gather(-1, drafted)[:, 0] < p[:-1].gather(-1, drafted)[:, 0])
    # after a fully accepted draft there is no q: it is padded with 0, so p − q is p
    after = residual(p.index_select(0, kept), pad(q, (0, 0, 0, 1)).index_select(0, kept))
    counted, chosen, *values = draft.to_host(kept, draw(after, generator), *noted.values())
    stats = {name: tuple(each) for name, each in zip(noted, values, strict=True)}
    return Verdict(path=tuple(range(int(counted[0]))), next_token=int(chosen[0]), stats=stats)


def verify_tree(
    p: Float[Tensor, "n+1 vocab"], q: Float[Tensor, "n vocab"], draft: Draft, generator: torch.Generator | None
) -> Verdict:
    """`verify_chain` for a tree, from the root down: each sibling is tried against the residual of those before it.

    The residuals do not depend on the random draws. So all rows are computed at once on the device, and
    the accepted path is found on the host.
    """
    accepted, rest = tried(p, q, draft, generator)
    (stands, chosen) = draft.to_host(accepted, draw(rest, generator))
    nodes = judged_nodes(draft)
    path: list[int] = []
    row = 0
    while (node := next((child for child in nodes[row] if stands[child]), None)) is not None:
        path.append(node)
        row = node + 1
    return Verdict(path=tuple(path), next_token=int(chosen[row]))


def tried(
    p: Float[Tensor, "n+1 vocab"], q: Float[Tensor, "n vocab"], draft: Draft, generator: torch.Generator | None
) -> tuple[Bool[Tensor, " n"], Float[Tensor, "n+1 vocab"]]:
    """Which nodes are accepted if the siblings before them are not, and what is drawn from behind each row if none is.

    A chain is a tree without siblings.
    """
    nodes, rows = judged_nodes(draft), judging_rows(draft)  # the host needs the number of siblings
    table = sibling_table(rows, max(map(len, nodes)))
    uniform = torch.rand(len(draft), generator=generator, device=p.device, dtype=p.dtype)
    bar = uniform * q.gather(-1, draft.tokens[:, None])[:, 0]  # [n]
    q = pad(q, (0, 0, 0, 1))  # index n, which means no further child, has q = 0
    accepted = torch.zeros_like(bar, dtype=torch.bool)
    every = torch.arange(len(draft), device=p.device)
    for children in table:  # [n+1], the first child of every row, then the second, …
        accepted |= (children[rows] == every) & (bar < p[rows, draft.tokens])
        p = residual(p, q[children])
    return accepted, p


def speculative_law(
    draft: Draft, p: Float[Tensor, "n+1 vocab"], q: Float[Tensor, "n vocab"], drawn: Float[Tensor, "n vocab"]
) -> Float[Tensor, "n+1 vocab"]:
    """What `verify_chain` and `verify_tree` emit behind each row, if each node is drawn from its row of `drawn`."""
    return law_of(
        draft, p, drawn, lambda owed, node: (acceptance(owed, q[node]), residual(owed[None], q[node][None])[0])
    )


def sibling_table(rows: Int[Tensor, " n"], most: int) -> Int[Tensor, "most n+1"]:
    """Entry [i, row] is the (i + 1)-th child of this row, or n if it has none. most: the most children of any row."""
    n = rows.shape[0]
    rank = (rows == rows[:, None]).tril(-1).sum(-1)  # [n], how many siblings come before each node
    table = rows.new_full((most, n + 1), n)
    table[rank, rows] = torch.arange(n, device=rows.device)
    return table


def near_match(draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request, lenience: float) -> Verdict:
    """Keep tokens with p(token) >= lenience · max p, then the target's own choice (speculative decoding, A.5)."""
    logits = precise(logits)
    rows = judging_rows(draft)
    # log(p(token) / max p): the normalizer of p cancels
    behind = logits[rows, draft.tokens] - logits.amax(-1)[rows]  # [n]
    gaps, chosen = draft.to_host(behind, request.sampling.choose(logits, request.generator))
    path, row = likeliest_path(draft, gaps, math.log(lenience))
    return Verdict(path, int(chosen[row]))


def before_rejection(accepted: Bool[Tensor, " n"]) -> Int[Tensor, " 1"]:
    """How many tokens of a chain come before the first rejection. The result stays on the device."""
    return accepted.long().cumprod(0).sum(0, keepdim=True)


def drafter_probs(draft: Draft, p: Float[Tensor, "n+1 vocab"]) -> Float[Tensor, "n vocab"]:
    """q as wide as p: one-hot if the draft has no probs, zero-padded if the models' padded vocabularies differ."""
    if draft.probs is not None:
        return as_wide_as(p, draft.probs)
    return torch.zeros_like(p[:-1]).scatter_(-1, draft.tokens[:, None], 1.0)


def as_wide_as(p: Float[Tensor, "m vocab"], q: Float[Tensor, "n other"]) -> Float[Tensor, "n vocab"]:
    """q with p's vocabulary, device and precision."""
    return pad(q.to(p), (0, p.shape[-1] - q.shape[-1]))


def residual(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """norm(max(0, p − q)) of each row; p itself if the difference rounds to zero."""
    difference = (p - q).clamp(min=0)
    total = difference.sum(-1, keepdim=True)
    return torch.where(total > 0, difference / total, p)
