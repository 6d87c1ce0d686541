"""A result survives its file, whatever version wrote that, and what is no result is refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.results.table import write_table
from bild_lab.lab.schema.analysis_columns import CHANGE
from bild_lab.lab.schema.json_values import from_json, to_json
from bild_lab.lab.schema.result import SCHEMA, Counts, Result
from bild_lab.report.wandb.logger import flat_metrics
from tests.report.sample import sample_drafted, sample_result, with_quality, with_speedup

VERSION_1 = Path(__file__).parent / "version1"  # files that version 1 of the package wrote
POLICIES = ("bild", "hf_assisted", "ppd")


def version_1(policy: str) -> dict[str, Any]:
    return json.loads((VERSION_1 / f"{policy}.json").read_text())


def through_a_file(result: Result) -> Result:
    return Result.from_json(json.loads(json.dumps(result.to_json())))


def test_a_result_survives_its_file() -> None:
    pipeline = {"match_rate": None, "latency_units": 4.6, "compute_units": 9.0}
    predicted = {"predicted_latency_units": 4.5, "predicted_compute_units": 9.1, "theorem": 1.33}
    category = {"n_examples": 2, "tokens": 9, "tokens_per_s": 3.0, "baseline_tokens_per_s": None}
    category |= {"tokens_per_s_ratio": None, "speedup": {"value": 2.0}, "tokens_per_target_call": 1.5}
    result = sample_drafted(
        "bild",
        {"fallback": 0.5, "adapter": None, "tail": True},
        1.5,
        -0.2,
        (0.8, 0.9),
        pipeline={**pipeline, **predicted},
        categories={"math": {**category, "acceptance_rate": None}},
        certificate={"equal": 97, "ties": 2, "defects": 1},
    )
    assert through_a_file(result) == result
    assert result.categories["math"].speedup.value == 2.0 and result.pipeline.exit is None
    assert result.to_json()["schema"] == SCHEMA


def test_where_a_result_lies_is_no_part_of_it() -> None:
    result = replace(sample_result("bild", {}, 1.5), folder=Path("points/abc"))
    assert "folder" not in result.to_json()
    assert result == replace(result, folder=None)


def test_numbers_that_json_does_not_have_survive() -> None:
    result = with_speedup(sample_result("bild", {"rollback": math.inf}, 1.5), high=math.inf)
    result = with_quality(result, value=math.nan)
    content = result.to_json()
    assert (content["knobs"]["rollback"], content["speedup"]["high"], content["quality"]["value"]) == (
        "inf",
        "inf",
        None,
    )
    json.dumps(content, allow_nan=False)
    again = through_a_file(result)
    assert again.speedup.high == math.inf
    assert again.quality.value is None  # a quality that is not defined
    assert math.isnan(through_a_file(replace(result, tokens_per_s=math.nan)).tokens_per_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_file_of_version_1_loses_nothing(policy: str) -> None:
    """Every value of the old file is found under its name, which for counts has a group in front.

    But for the number of forwards, which nothing read.
    """
    old = version_1(policy)
    new = Result.from_json(old).to_json()
    counts = {each.name for each in fields(Counts)}
    assert new.pop("stored_at") == old.pop("stored")
    assert (new.pop("schema"), old.pop("schema")) == (2, 1)
    assert (new.pop("facts"), new.pop("same_as_baseline")) == (None, None)
    assert (new.pop("change"), new.pop("further_qualities"), new.pop("work")) == (None, {}, None)
    if old["cost"] is not None:
        del old["cost"]["forwards"]
    if new["pipeline"] is not None:
        assert (new["pipeline"].pop("layers"), new["pipeline"].pop("exit_layer")) == (None, None)
    assert {new["certificate"].pop(key) for key in ("unjudged", "output", "rounding")} == {None}
    assert {key: new["counts"][key] if key in counts else new[key] for key in old} == old
    assert set(new) == {key for key in old if key not in counts} | {"counts"}


def test_the_table_of_version_1_is_the_table_of_today(tmp_path: Path) -> None:
    write_table([Result.from_json(version_1(policy)) for policy in POLICIES], tmp_path / "sweep.csv")
    old, new = pd.read_csv(VERSION_1 / "sweep.csv"), pd.read_csv(tmp_path / "sweep.csv")
    assert new.pop("busy_elsewhere_percent").tolist() == [90.6, 91.1, 87.8]
    assert new.pop("temperature").tolist() == [0, 0, 0]
    assert new.pop("batch").tolist() == [1, 1, 1]
    certificates = ("certificate_unjudged", "certificate_output", "certificate_rounding")
    later = new[[*(column.name for column in CHANGE), *certificates, "side_by_side"]]
    assert later.isna().all(axis=None)
    pd.testing.assert_frame_equal(new.drop(columns=later.columns), old)


def test_the_summary_of_a_run_has_the_names_that_it_had_in_version_1() -> None:
    names = (VERSION_1 / "summary_names.txt").read_text().split()
    assert sorted(flat_metrics(Result.from_json(version_1("bild")))) == names


def test_older_files_of_version_1_lack_what_was_not_measured_then() -> None:
    old = version_1("bild")
    for key in ("prediction", "pipeline", "categories", "certificate", "cost", "stored", "nothing_accepted"):
        del old[key]
    result = Result.from_json(old)
    assert (result.prediction, result.stored_at, result.counts.nothing_accepted) == (None, None, None)
    assert result.counts.acceptance_rate == old["acceptance_rate"]


def test_a_newer_version_is_refused_with_the_remedy() -> None:
    newer = {**sample_result("bild", {}, 1.5).to_json(), "schema": SCHEMA + 1}
    with pytest.raises(UserError, match=r"written by a newer version .* up to schema 2, got schema 3; update bild_lab"):
        Result.from_json(newer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": None}, "with its schema"),
        ({"tokens": "many"}, "tokens must hold a int, got 'many'"),
        ({"tokens": True}, "tokens must hold a int"),
        ({"latency_s": 1.0}, "latency_s must hold a dict"),
        ({"latency_s": {"median": 1.0}}, "p95 is missing in latency_s"),
        ({"seconds": {"load": "long"}}, r"seconds\.load must be a number"),
        ({"counts": {"acceptance_by_position": [0.5, "x"]}}, r"counts\.acceptance_by_position\[1\] must be a number"),
        ({"policy": None}, "policy must hold a str, got None"),
    ],
)
def test_what_is_no_result_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        Result.from_json({**sample_result("bild", {}, 1.5).to_json(), **change})
    assert not isinstance(refused.value, UserError)  # it is damage, not a wish


def test_a_setting_is_read_by_name_and_by_key() -> None:
    setting = sample_result("bild", {}, 1.5, setting={"hardware": "EPYC", "own": 1}).setting
    assert (setting.dataset, setting.temperature, setting.hardware, setting["own"]) == ("multi30k", 0.0, "EPYC", 1)
    assert dict(setting) == to_json(setting)
    assert sample_result("bild", {}, 1.5).setting == sample_result("vanilla", {}, 1.0).setting


def test_relative_latency_is_one_over_the_speedup_and_one_of_the_baseline() -> None:
    assert sample_result("bild", {}, 2.0).relative_latency == 0.5
    assert sample_result("vanilla", {}, 1.1).relative_latency == 1.0
    assert sample_result("bild", {}, None, setting={"baseline": None}).relative_latency is None


def test_a_result_says_whether_it_is_the_baseline_and_an_older_one_tells_it_by_the_name() -> None:
    setting = {"baseline": "beam"}
    told = {same: sample_result("beam", {}, 2.0, setting=setting, same_as_baseline=same) for same in (True, False)}
    assert told[True].is_baseline and not told[False].is_baseline
    assert told[False].relative_latency == 0.5
    assert through_a_file(told[False]) == told[False]
    assert sample_result("beam", {}, 2.0, setting=setting).is_baseline
    assert not sample_result("bild", {}, 2.0, setting=setting).is_baseline


def test_a_greedy_speedup_is_one_of_greedy_decoding() -> None:
    sampled = {"decoding": {"temperature": 1.0}}
    assert sample_result("bild", {}, 1.5, tokens_per_s_ratio=1.4).greedy_speedup == 1.4
    assert sample_result("bild", {}, 1.5, tokens_per_s_ratio=1.4, setting=sampled).greedy_speedup is None


def test_keys_without_a_field_are_passed_over() -> None:
    assert from_json(Counts, {"drafted": 3, "of another version": 1}) == Counts(drafted=3)
