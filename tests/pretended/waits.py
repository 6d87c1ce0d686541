"""How often a round of each policy waits for the device: what the tests hold it to, and what docs/design.md says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bild_lab.engine.trace import Round


@dataclass(frozen=True)
class Waits:
    """Waits of one round. words: as the table says it."""

    words: str
    most: Callable[[Round], int]


ONE = Waits("1", lambda one: 1)
TWO = Waits("2", lambda one: 2)
DRAFTER = Waits("1, and 1 for each forward of the drafter", lambda one: 1 + one.draft_calls)
VIEW = Waits("2, and 1 for each forward of the view", lambda one: 2 + one.draft_calls)
LEVEL = Waits("1, and 1 for each level of the tree", lambda one: 1 + one.draft_calls)
INNER = Waits("1, and 1 for each inner round", lambda one: 1 + one.draft_calls)
LAYER = Waits("1, and 1 for each layer that is measured", lambda one: 1 + one.stats["exit_layer"])

EAGER = {
    "bild": DRAFTER,
    "bild_early_exit": VIEW,
    "bild_no_fallback": ONE,
    "bild_no_rollback": DRAFTER,
    "bild_tree": LEVEL,
    "bita": ONE,
    "calm": LAYER,
    "early_exit_speculative": TWO,
    "layer_skip": ONE,
    "medusa": ONE,
    "ngram": ONE,
    "ppd": ONE,
    "prompt_lookup": ONE,
    "rejection_sampling": ONE,
    "speculative": ONE,
    "speculative_adaptive": ONE,
    "speculative_cascade": ONE,
    "speculative_hierarchy": INNER,
    "speculative_tree": LEVEL,
    "synthetic": ONE,
    "synthetic_with_cost": ONE,
    "typical_acceptance": ONE,
    "vanilla": ONE,
}
COMPILED = EAGER | {"bild": TWO, "bild_no_rollback": TWO}  # native, with runtime.compile=true


def table() -> str:
    """The table of docs/design.md."""
    rows = [f"| `{policy}` | {EAGER[policy].words} | {words_of_compiled(policy)} |" for policy in sorted(EAGER)]
    return "\n".join(["| Policy | Waits in a round | with `runtime.compile=true` |", "|---|---|---|", *rows])


def words_of_compiled(policy: str) -> str:
    if policy == "ppd":
        return "refused"
    return "the same" if COMPILED[policy] is EAGER[policy] else COMPILED[policy].words
