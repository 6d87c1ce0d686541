"""Drafters of trees tell the host the parents that the device has, so that nobody waits for
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.engine.draft import Draft
from tests.policies import load

TREES = (
    "eagle",
    "medusa",
    "bita",
    "lookahead",
    "eagle3",
    "token_recycling",
    "speculative_tree",
    "bild_tree",
)


@pytest.mark.fast("eagle", "token_recycling", "bild_tree")
@pytest.mark.parametrize("policy", TREES)
def test_parents_on_the_host_are_those_of_the_device(
    policy: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up_to_depth, seen = Draft.up_to_depth, []

    def looking(draft: Draft, depth: int) -> Draft:
        if draft.parents is not None:
            assert list(draft.known_parents) == draft.parents.tolist()
            seen.append(draft)
        return up_to_depth(draft, depth)

    monkeypatch.setattr(Draft, "up_to_depth", looking)
    load(checkpoints, "llama", policy).generate("w5 w9 w30 w12", 12)
    assert any(len(draft) for draft in seen)
