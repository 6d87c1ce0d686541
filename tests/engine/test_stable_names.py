"""Rules and drafters have names that stay where files move, and shipped policies use them."""

from __future__ import annotations

from types import ModuleType

import pytest

from bild_lab.engine import acceptance, drafters
from bild_lab.lab.config.compose import compose_policy, policy_names, resolved_policy


@pytest.mark.parametrize(("part", "module"), [("acceptance", acceptance), ("drafter", drafters)])
def test_every_stable_name_is_one_that_a_policy_uses(part: str, module: ModuleType) -> None:
    targets = set()
    for name in policy_names():
        decoder = resolved_policy(compose_policy(name))["decoder"]
        if decoder.get(part):
            targets.add(decoder[part]["_target_"])
    assert targets == {f"{module.__name__}.{name}" for name in module.__all__}
