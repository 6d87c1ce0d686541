"""`speculation_profile.json`: what it says of hand-made rounds, and what is predicted from it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.measure.profile import (
    PROFILE,
    acceptance_lengths,
    best_window,
    read_profile,
    speculation_profile,
)
from bild_lab.lab.schema.examples import MeasuredExample
from scripts import sweeps as script
from tests.checkpoints import tiny_checkpoints
from tests.policies import load
from tests.report.sample import (
    sample_baseline,
    sample_example,
    sample_prediction,
    sample_result,
)


def text(
    *accepted: int, category: str | None = None, drafted: int = 3, ends_in_draft: bool = False
) -> MeasuredExample:
    """A text of rounds that each drafted so many tokens. ends_in_draft: by the last accepted one."""
    rounds = [{"drafted": [1] * drafted, "accepted": one} for one in accepted]
    token_ids = [1] * (sum(accepted) + len(accepted) - ends_in_draft)
    return sample_example(category=category, rounds=rounds, token_ids=token_ids)


def profile(
    *examples: MeasuredExample, policy: str = "speculative", longest: int = 3, **facts: str
) -> dict:
    judged = [[1, 0, 0]] * longest
    result = sample_result(policy, {"window": longest}, 1.0, drafted=9, judged_by_position=judged)
    result = replace(result, facts={"acceptance": "SpeculativeSampling", **facts})
    return speculation_profile(result, examples, load(tiny_checkpoints(), "llama", policy))


def test_the_rates_are_those_of_the_lengths() -> None:
    """Of 10 rounds 4 emitted one token, 3 two, 3 three: the example of Model-Optimizer's own
    tests.
    """
    found = profile(text(0, 0, 0, 0, 1, 1), text(1, 2, 2, 2))
    assert found["marginal_accept_rates"] == pytest.approx([0.6, 0.3, 0.0])
    assert found["conditional_accept_rates"] == pytest.approx([0.6, 0.5, 0.0])
    assert found["acceptance_length_histogram"] == {"1": 4, "2": 3, "3": 3}
    assert (
        found["mean_accept_length"]
        == pytest.approx(1 + sum(found["marginal_accept_rates"]))
        == pytest.approx(1.9)
    )
    assert found["mean_accept_length_per_request"] == pytest.approx((8 / 6 + 11 / 4) / 2)
    assert found["num_speculative_tokens"] == 3 and found["per_category"] is None
    gap = profile(text(0, 0, 2, 2, 2), longest=2)  # a length that no round has
    assert gap["marginal_accept_rates"] == pytest.approx([0.6, 0.6])
    assert gap["conditional_accept_rates"] == pytest.approx([0.6, 1.0])


def test_a_token_after_an_accepted_end_is_not_emitted_and_lowers_no_rate() -> None:
    texts = [
        text(1, 2, category="writing", ends_in_draft=True),
        text(0, 3, category="math", ends_in_draft=True),
        text(2, category="math"),
    ]
    found = profile(*texts)
    emitted = sum(len(one.token_ids) for one in texts)
    assert found["acceptance_length_histogram"] == {"1": 1, "2": 2, "3": 2}
    assert found["mean_accept_length"] == pytest.approx(emitted / 5) == pytest.approx(11 / 5)
    assert found["accept_length_by_k"] == {"3": found["mean_accept_length"]}
    assert found["mean_accept_length_per_request"] == pytest.approx((4 / 2 + 4 / 2 + 3) / 3)
    means = {name: one["mean_accept_length"] for name, one in found["per_category"].items()}
    assert means == {"writing": 2.0, "math": pytest.approx(7 / 3)}
    assert found["marginal_accept_rates"] == pytest.approx([4 / 5, 3 / 5, 1 / 5])
    tail = {"drafted": [1, 1], "accepted": 2, "next_token": None}  # returned without verification
    verified = {"drafted": [1], "accepted": 1}
    unverified = sample_example(rounds=[verified, tail], token_ids=[1] * 4)
    assert acceptance_lengths(unverified) == [2]
    ended = sample_example(rounds=[tail, verified], token_ids=[1] * 3)
    assert acceptance_lengths(ended) == [1]


def test_verifications_of_shorter_drafts_and_of_none_lower_the_rates_too() -> None:
    rounds = [{"drafted": [1] * drafted, "accepted": drafted} for drafted in (3, 1, 0, 0)]
    found = profile(sample_example(rounds=rounds, token_ids=[1] * 8))
    assert found["marginal_accept_rates"] == pytest.approx([2 / 4, 1 / 4, 1 / 4])
    assert found["mean_accept_length"] == pytest.approx(1 + sum(found["marginal_accept_rates"]))


def test_it_says_by_category_and_how_drafts_were_verified() -> None:
    found = profile(
        text(0, 2, category="writing"), text(3, category="math"), text(1, category="writing")
    )
    assert found["per_category"] == {
        "writing": {"mean_accept_length": 2.0, "num_steps": 3},
        "math": {"mean_accept_length": 4.0, "num_steps": 1},
    }
    assert (found["verification_method"], found["accept_length_model"]) == (
        "longest_prefix",
        "chain_analytic",
    )
    assert found["measurement_conditions"]["lossless"] and found["draft_checkpoint"]["id"].endswith(
        "/llama-draft"
    )
    assert found["target_model"]["id"].count("/") == 1  # no path of this machine
    block = profile(text(1), policy="block_verification", acceptance="BlockVerification")
    assert (block["verification_method"], block["accept_length_model"]) == (
        "block",
        "measured_per_k",
    )
    assert profile(text(1), policy="speculative_tree")["verification_method"] == "tree"
    lossy = profile(text(1), policy="bild", acceptance="Rollback")
    assert (lossy["accept_length_model"], lossy["measurement_conditions"]["lossless"]) == (
        "measured_per_k",
        False,
    )
    assert profile(text(1, drafted=0), longest=0)["measured"] is True
    assert profile(sample_example())["measured"] is False


def test_the_best_window_weighs_the_measured_rates_against_the_drafters_cost() -> None:
    found = profile(text(0, 0, 0, 0, 1, 1), text(1, 2, 2, 2))  # 1, 1.6, 1.9 and 1.9 tokens a call
    assert best_window(found, 0.1) == (2, pytest.approx((1.9 / 1.2) / (1.9 / 1.3)))
    assert best_window(found, 0.5) == (1, pytest.approx((1.6 / 1.5) / (1.9 / 2.5)))
    assert best_window(found, 0.7) == (0, pytest.approx(3.1 / 1.9))
    assert best_window({**found, "accept_length_model": "measured_per_k"}, 0.1) is None


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    assert read_profile(tmp_path) is None
    for content, message in (
        ("[", "cannot be read"),
        ('{"measured": true}', "marginal_accept_rates"),
    ):
        (tmp_path / PROFILE).write_text(content)
        with pytest.raises(UserError, match=message):
            read_profile(tmp_path)
    (tmp_path / PROFILE).write_text(json.dumps({"measured": False}))
    assert read_profile(tmp_path) is None


def test_a_finished_sweep_says_which_windows_would_have_been_best(
    command: Callable[..., tuple[int, str]],
) -> None:
    prediction = sample_prediction("bild", {"window": 5}, 1.4)
    results = [
        sample_result("bild", {"window": 5}, 1.4, prediction=prediction),
        sample_result("hf_assisted", {}, 1.1),
    ]
    for number, one in enumerate([*results, sample_baseline()]):
        folder = Path(f"outputs/field/points/{number}")
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(one.to_json()))
    known = {
        "measured": True,
        "accept_length_model": "chain_analytic",
        "marginal_accept_rates": [0.6, 0.1],
    }
    (Path("outputs/field/points/0") / PROFILE).write_text(json.dumps(known))
    code, out = command(script, *script.as_overrides(["predict", "outputs/field"]), config="sweeps")
    assert code == 0 and "predicted, not measured" in out
    with Path("outputs/field/predicted.csv").open() as stream:
        rows = {row["policy"]: row for row in csv.DictReader(stream)}
    assert {policy: row["best_window"] for policy, row in rows.items()} == {
        "bild": "1",
        "hf_assisted": "",
    }
    for words in ([], ["outputs/nothing"]):
        assert command(script, *script.as_overrides(["predict", *words]), config="sweeps")[0] == 2
