"""The first tokens of a text are the target's own, whatever the rule after them does."""

from __future__ import annotations

import math

import pytest
import torch
import yaml

from bild_lab.engine.acceptance import ExactPrefix, Rollback, SpeculativeSampling
from bild_lab.engine.draft import Draft
from bild_lab.engine.session import Scores
from bild_lab.errors import UserError
from bild_lab.lab.config import compose_policy, config_dir, resolved
from tests.checkpoints import tiny_checkpoints
from tests.engine.acceptance.exact import DRAFTER, GREEDY, TARGET, chain_of, rows, rows_after, sampled
from tests.policies import load

EVERYTHING = {"bild": {"fallback": 0.0, "rollback": math.inf}, "typical_acceptance": {"epsilon": 1e-9, "delta": 1e-9}}
PROMPTS = ("w5 w9 w30 w12", "w7", "w39 w38 w3 w3 w20 w21")


def after(length: int, rule: ExactPrefix, emitted: int) -> ExactPrefix:
    return rule.in_round([0] * (1 + emitted), Scores(None))


@pytest.mark.parametrize("emitted", [0, 1, 2, 3])
def test_the_border_lies_after_so_many_generated_tokens(emitted: int) -> None:
    """The declared distributions before it are the target's, those after it the rule's own; the rule's differ."""
    draft, _ = next(chain_of(DRAFTER, 3))
    logits, request = rows_after(draft, TARGET), sampled()
    lossy = Rollback(1.2).output_distribution(draft, logits, request, draft.probs)
    own = torch.cat([TARGET[:1], TARGET[draft.tokens]])
    assert not torch.allclose(lossy[:3], own[:3])
    output = after(2, ExactPrefix(2, Rollback(1.2), SpeculativeSampling()), emitted).output_distribution(
        draft, logits, request, draft.probs
    )
    left = max(2 - emitted, 0)
    torch.testing.assert_close(output, torch.cat([own[:left], lossy[left:]]))


def test_a_tree_is_judged_by_both_rules() -> None:
    """Of the root's children the argmax is taken exactly; below it the rule takes the likelier of two far tokens."""
    draft = Draft(torch.tensor([1, 0, 1, 2, 0]), torch.tensor([-1, -1, 1, 1, 3]))
    likely, unlike = [0.6, 0.3, 0.1], [0.5, 0.2, 0.3]
    logits = rows(likely, likely, unlike, likely, [0.1, 0.2, 0.7], likely)
    rule = ExactPrefix(1, Rollback(1.5), SpeculativeSampling())
    verdict = rule(draft, logits, GREEDY)
    assert (verdict.path, verdict.next_token) == ((1, 3), 2)  # 0.1 for the last is too far
    assert verdict.stats["distance"][:2] == (None, None)
    assert verdict.stats["distance"][3] == pytest.approx(-math.log(0.3))
    assert ExactPrefix(2, Rollback(1.5), SpeculativeSampling())(draft, logits, GREEDY).path == (1,)
    assert Rollback(1.5)(draft, logits, GREEDY).path == (1, 3) != Rollback(0.4)(draft, logits, GREEDY).path
    assert ExactPrefix(1, Rollback(0.4), SpeculativeSampling())(draft, logits, GREEDY).path == (1,)


@pytest.mark.parametrize("policy", EVERYTHING)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_texts_begin_as_the_targets(policy: str, family: str) -> None:
    """Rules that accept everything change the very beginning, unless it is verified exactly."""
    own = [load(tiny_checkpoints(), family, "vanilla").generate(prompt, 24).token_ids for prompt in PROMPTS]
    tails = [{}, {"verify_tail": False}] if policy == "bild" else [{}]
    for length in (0, 1, 5, 12):
        for tail in tails:
            decoder = load(tiny_checkpoints(), family, policy, **EVERYTHING[policy], **tail, exact_prefix=length)
            texts = [decoder.generate(prompt, 24).token_ids for prompt in PROMPTS]
            assert [one[:length] for one in texts] == [one[:length] for one in own]
            assert texts != own and not decoder.method.lossless(decoder.request("w7", 1).sampling)


def test_every_lossy_rule_has_the_knob_and_it_is_part_of_the_policy() -> None:
    knobs, lossless = set(), {"ExactMatch", "RejectionSampling", "BlockVerification", "Overlap", "TruncationSampling"}
    for file in (config_dir() / "policy").glob("*.yaml"):
        policy = yaml.safe_load(file.read_text())
        rule = policy["decoder"].get("acceptance", {}).get("_target_", "ExactMatch").rpartition(".")[2]
        assert (rule in lossless or ("lenience" not in policy and rule == "SpeculativeSampling")) == (
            "exact_prefix" not in policy
        ), file
        knobs.add(rule)
    assert len(knobs) == 13
    plain, exact = (resolved(compose_policy("bild", {"exact_prefix": length})) for length in (0, 3))
    assert plain["decoder"]["acceptance"]["_target_"].endswith("Rollback")
    assert exact["decoder"]["acceptance"] | {"rule": 0, "exact": 0} == {
        "_target_": "bild_lab.engine.acceptance.ExactPrefix",
        "length": 3,
        "rule": 0,
        "exact": 0,
    }
    with pytest.raises(UserError, match="policy.exact_prefix must be a whole number >= 1, got -1"):
        load(tiny_checkpoints(), "llama", "bild", exact_prefix=-1)
