"""Every acceptance rule and drafter that a policy uses has a name that stays where files move."""

from __future__ import annotations

from types import ModuleType

import pytest

from bild_lab.engine import acceptance, drafters
from bild_lab.lab.config.compose import compose_policy, resolved_policy
from bild_lab.lab.config.policies import policy_names


@pytest.mark.parametrize(("part", "module"), [("acceptance", acceptance), ("drafter", drafters)])
def test_the_parts_of_all_policies_have_a_stable_name(part: str, module: ModuleType) -> None:
    used = set()
    for name in policy_names():
        decoder = resolved_policy(compose_policy(name))["decoder"]
        if decoder.get(part):
            used.add(decoder[part]["_target_"].rpartition(".")[2])
    assert len(used) > 5 and used == set(module.__all__)
