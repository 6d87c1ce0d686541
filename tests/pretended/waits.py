"""How often a round of each policy waits for the device, which is what the tests hold it to."""

from __future__ import annotations

from collections.abc import Callable

from bild_lab.engine.trace import Round

Waits = Callable[[Round], int]


def once_and_each_draft_call(one: Round) -> int:
    """A draft call is a forward of the drafter or of the view, a level of a tree, or an inner
    round.
    """
    return 1 + one.draft_calls


EAGER: dict[str, Waits] = {  # every other policy waits once
    "bild": once_and_each_draft_call,
    "bild_early_exit": lambda one: 2 + one.draft_calls,
    "bild_hybrid": once_and_each_draft_call,  # a copy waits for nothing
    "bild_no_rollback": once_and_each_draft_call,
    "bild_released": lambda one: 2 + one.draft_calls,  # once more where the whole draft is accepted
    "bild_tree": once_and_each_draft_call,
    "calm": lambda one: 1 + one.stats["exit_layer"],  # each layer that is measured
    "eagle3": once_and_each_draft_call,
    "early_exit_speculative": lambda one: 2,
    "hybrid": lambda one: 2,
    "lookahead": lambda one: 2,
    "speculative_hierarchy": once_and_each_draft_call,
    "speculative_tree": once_and_each_draft_call,
    "token_recycling": lambda one: 2,
}
GRAPHS = EAGER | dict.fromkeys(["bild", "bild_hybrid", "bild_no_rollback"], lambda one: 2)

# chains, trees and early exits are programs
KERNELS = EAGER | {
    "bild": lambda _: 2,
    "bild_early_exit": lambda _: 3,
    "bild_hybrid": lambda _: 2,
    "bild_no_rollback": lambda _: 2,
    "bild_released": lambda _: 3,
    "bild_tree": lambda _: 2,
    "calm": lambda _: 2,
    "layer_skip": lambda _: 2,  # of two layers the second is left out, as by an early exit
    # an inner round drafts a token or more
    "speculative_hierarchy": lambda round_: 1 + len(round_.drafted),
    "speculative_tree": lambda _: 2,
}


def most_waits(policy: str, engine: str) -> Waits:
    """How often a round of this policy may wait. engine: native, hf, graphs or kernels."""
    by_policy = {"graphs": GRAPHS, "kernels": KERNELS}.get(engine, EAGER)
    return by_policy.get(policy, lambda _: 1)
