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
SKIPPING = Waits("1, and 1 for each forward of the view", lambda one: 1 + one.draft_calls)
LEVEL = Waits("1, and 1 for each level of the tree", lambda one: 1 + one.draft_calls)
INNER = Waits("1, and 1 for each inner round", lambda one: 1 + one.draft_calls)
LAYER = Waits("1, and 1 for each layer that is measured", lambda one: 1 + one.stats["exit_layer"])

EAGER = {  # every other policy waits once
    "bild": DRAFTER,
    "bild_early_exit": VIEW,
    "bild_no_rollback": DRAFTER,
    "bild_tree": LEVEL,
    "calm": LAYER,
    "eagle3": LEVEL,
    "early_exit_speculative": TWO,
    "hybrid": TWO,
    "hydra": LEVEL,
    "layer_skip_adaptive": SKIPPING,
    "lookahead": TWO,
    "speculative_hierarchy": INNER,
    "speculative_tree": LEVEL,
    "step_cascade": DRAFTER,
    "token_recycling": TWO,
}
COMPILED = EAGER | {"bild": TWO, "bild_no_rollback": TWO, "step_cascade": TWO}  # native, with runtime.compile=true
SAME = "the same"


def most_waits(policy: str, engine: str) -> Callable[[Round], int]:
    """How often a round of this policy may wait. engine: native, hf or compiled."""
    return (COMPILED if engine == "compiled" else EAGER).get(policy, ONE).most


def table() -> str:
    """The table of docs/design.md."""
    rows = [f"| every policy that is not named here | {ONE.words} | {SAME} |"]
    for policy, waits in EAGER.items():
        compiled = COMPILED[policy]
        rows.append(f"| `{policy}` | {waits.words} | {SAME if compiled is waits else compiled.words} |")
    return "\n".join(["| Policy | Waits in a round | with `runtime.compile=true` |", "|---|---|---|", *rows])
