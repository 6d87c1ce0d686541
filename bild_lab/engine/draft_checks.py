"""What a drafter proposed and a rule decided, checked: an extension that returns something else is
refused in words before the loop goes on with it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Stats, Verdict, misplaced_node
from bild_lab.errors import UserError

# what a round records of every method, under names that no statistic may have
ROUND_KEYS = frozenset({"drafted", "accepted", "next_token", "draft_calls"})
SAME_SUM = 1e-3  # how far from 1 a distribution's sum in float32 may be


def require_draft(draft: Any, drafter_name: str, drafts_trees: bool) -> None:
    """Raise UserError for what is no draft: another object, tokens that are no vector of ids, a
    distribution missing or too many, a tree of a drafter that says it drafts none, and a node whose
    parent is no node before it.

    What is on an accelerator is not read for this, as that would wait for it.
    """
    if not isinstance(draft, Draft):
        raise UserError(
            f"{drafter_name} must draft a Draft, got {type(draft).__name__}; without a proposal it"
            " returns empty_draft(device)"
        )
    tokens = draft.tokens
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.long or tokens.ndim != 1:
        raise UserError(
            f"{drafter_name} must draft a vector of token ids,"
            f" torch.tensor(ids, dtype=torch.long, device=target.device), got {described(tokens)}"
        )
    for name, dimensions in (("probs", 2), ("unscaled_probs", 2), ("uniforms", 1)):
        value = getattr(draft, name)
        if value is None:
            continue
        is_tensor = isinstance(value, Tensor)
        if not is_tensor or value.ndim != dimensions or len(value) != len(draft):
            entry = "a row of the vocabulary" if dimensions == 2 else "a number"
            raise UserError(
                f"{drafter_name} has drafted {len(draft)} tokens, so {name} must hold {entry} for"
                f" each of them, got {described(value)}"
            )
    parents = draft.parents
    if parents is not None and (not isinstance(parents, Tensor) or parents.ndim != 1):
        raise UserError(
            f"{drafter_name} must draft parents as a vector, torch.tensor(parents), or as None for a"
            f" chain, got {described(parents)}"
        )
    if parents is not None and not drafts_trees:
        raise UserError(
            f"{drafter_name} has drafted a tree, and says drafts_trees = False; say True, so that"
            " rules and models that take chains alone are refused"
        )
    require_tree(draft, drafter_name)


def require_tree(draft: Draft, drafter_name: str) -> None:
    """Raise UserError for a tree with a node whose parent is no node before it.

    Parents that are on an accelerator alone are not read for this, as that would wait for it.
    """
    if draft.parents is None or (
        draft.known_parents is None and draft.parents.device.type != "cpu"
    ):
        return
    parents = draft.parent_list
    if len(parents) != len(draft):
        raise UserError(
            f"{drafter_name} has drafted {len(draft)} tokens and {len(parents)} parents; give each"
            " token one"
        )
    if (node := misplaced_node(parents)) is not None:
        raise UserError(
            f"{drafter_name} has drafted a tree in which node {node} has the parent {parents[node]};"
            f" a parent is an earlier node, from 0 on, or {ROOT} for a node that follows the text"
        )


def require_distributions(draft: Draft, drafter_name: str) -> None:
    """Raise UserError for a draft whose probs are no distributions. Those on an accelerator are
    not read.
    """
    if draft.probs is None or draft.probs.device.type != "cpu" or not draft.probs.numel():
        return
    # in float32, as it is timed: float64 takes eight times as long
    wide = torch.promote_types(draft.probs.dtype, torch.float32)
    sums = draft.probs.sum(-1, dtype=wide).tolist()
    minima = draft.probs.amin(-1).tolist()
    for node, (total, minimum) in enumerate(zip(sums, minima, strict=True)):
        fault = ""
        if not abs(total - 1) < SAME_SUM:  # NaN too
            fault = f"sum to {total:g}"
        elif minimum < 0:
            fault = f"go down to {minimum:g}"
        if fault:
            raise UserError(
                f"{drafter_name} has drafted token {node} from probs that {fault}; give the"
                " distribution that the token was drawn from, such as"
                " request.sampling.probs(logits)"
            )


def require_verdict(
    verdict: Any, draft: Draft, logits: Float[Tensor, "n+1 vocab"], rule_name: str
) -> None:
    """Raise UserError for what is no verdict on this draft: another object, a path that does not
    lead from the root down through the draft, and a next token beyond the vocabulary.
    """
    if not isinstance(verdict, Verdict):
        raise UserError(
            f"{rule_name} must return a Verdict, got {type(verdict).__name__};"
            " Verdict(tuple(range(accepted)), next_token) accepts the first tokens of a chain"
        )
    path, size = verdict.path, len(draft)
    vocabulary_size = logits.shape[-1]
    if draft.parents is None:
        leads_down = len(path) <= size and path == tuple(range(len(path)))
    else:
        above = (ROOT, *path)
        leads_down = all(
            0 <= node < size and draft.parent_list[node] == parent
            for parent, node in zip(above, path, strict=False)
        )
    if not leads_down:
        raise UserError(
            f"{rule_name} has accepted the nodes {list(path)} of a draft of {size} tokens; a path"
            " begins at the root and leaves none out: 0, 1, 2 … of a chain, of a tree each node"
            " under the one before it"
        )
    if not 0 <= verdict.next_token < vocabulary_size:
        raise UserError(
            f"{rule_name} must emit a token from 0 to {vocabulary_size - 1}, got {verdict.next_token}"
        )


def require_statistics(stats: Stats) -> None:
    """Raise UserError for statistics of a round that cannot be stored: under the name of what every
    round records, and for a value or a part of it that is no plain number, flag or text.
    """
    if taken := sorted(ROUND_KEYS & stats.keys()):
        raise UserError(
            f"a round records {taken[0]!r} itself; give the statistic of the draft or verdict"
            " another name"
        )
    for name, value in stats.items():
        parts = value if isinstance(value, list | tuple) else (value,)
        for part in parts:
            if not isinstance(part, bool | int | float | str | list | tuple | dict | None):
                raise UserError(
                    f"the statistic {name!r} of a draft or verdict must be a number, a flag or a"
                    f" tuple of numbers, got {type(part).__name__}; .tolist() makes numbers of a"
                    " tensor"
                )


def described(value: Any) -> str:
    """The shape and type of a tensor, or the type of another object."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
