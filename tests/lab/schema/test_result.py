"""A result survives its file, and what is no result is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.schema.columns import _reader, from_json, to_json
from bild_lab.lab.schema.numbers import Counts
from bild_lab.lab.schema.result import SCHEMA, Result
from tests.report.sample import sample_drafted, sample_result, with_quality, with_speedup


def through_a_file(result: Result) -> Result:
    return Result.from_json(json.loads(json.dumps(result.to_json())))


def test_a_result_survives_its_file() -> None:
    pipeline = {
        "layers": 8,
        "exit_layer": 4,
        "match_rate": None,
        "latency_units": 4.6,
        "compute_units": 9.0,
    }
    predicted = {"predicted_latency_units": 4.5, "predicted_compute_units": 9.1, "theorem": 1.33}
    category = {"n_examples": 2, "tokens": 9, "tokens_per_s": 3.0, "baseline_tokens_per_s": None}
    category |= {
        "tokens_per_s_ratio": None,
        "speedup": {"value": 2.0},
        "tokens_per_target_call": 1.5,
    }
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
    assert (
        content["knobs"]["rollback"],
        content["speedup"]["high"],
        content["quality"]["value"],
    ) == (
        "inf",
        "inf",
        None,
    )
    json.dumps(content, allow_nan=False)
    again = through_a_file(result)
    assert again.speedup.high == math.inf
    assert again.quality.value is None  # a quality that is not defined
    unknown = replace(result, latency_s=replace(result.latency_s, mean=math.nan))
    assert math.isnan(through_a_file(unknown).latency_s.mean)


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_a_file_of_another_version_is_refused(schema: int) -> None:
    with pytest.raises(UserError, match=f"schema {schema}"):
        Result.from_json({**sample_result("bild", {}, 1.5).to_json(), "schema": schema})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": None}, "with its schema"),
        ({"tokens": "many"}, "tokens must hold a int, got 'many'"),
        ({"tokens": True}, "tokens must hold a int"),
        ({"latency_s": 1.0}, "latency_s must hold a dict"),
        ({"latency_s": {"median": 1.0}}, "p95 is missing in latency_s"),
        ({"seconds": {"load": "long"}}, r"seconds\.load must be a number"),
        (
            {"counts": {"acceptance_by_position": [0.5, "x"]}},
            r"counts\.acceptance_by_position\[1\] must be a number",
        ),
        ({"policy": None}, "policy must hold a str, got None"),
    ],
)
def test_what_is_no_result_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        Result.from_json({**sample_result("bild", {}, 1.5).to_json(), **change})
    assert not isinstance(refused.value, UserError)  # it is damage, not a wish


def test_a_setting_is_read_by_name_and_by_key() -> None:
    setting = sample_result("bild", {}, 1.5, setting={"hardware": "EPYC", "own": 1}).setting
    assert (setting.dataset, setting.temperature, setting.hardware, setting["own"]) == (
        "multi30k",
        0.0,
        "EPYC",
        1,
    )
    assert dict(setting) == to_json(setting)
    assert sample_result("bild", {}, 1.5).setting == sample_result("vanilla", {}, 1.0).setting


def test_relative_latency_is_one_over_the_speedup_and_one_of_the_baseline() -> None:
    assert sample_result("bild", {}, 2.0).relative_latency == 0.5
    assert sample_result("vanilla", {}, 1.1).relative_latency == 1.0
    assert sample_result("bild", {}, None, setting={"baseline": None}).relative_latency is None


def test_keys_without_a_field_are_passed_over() -> None:
    assert from_json(Counts, {"drafted": 3, "of another version": 1}) == Counts(drafted=3)


def test_texts_are_without_a_word_where_the_baselines_have_some() -> None:
    empty = sample_result("bild", {}, 1.5, empty=1.0, baseline_empty=0.5)
    assert empty.wordless and not empty.may_be_best
    assert not replace(empty, baseline_empty=1.0).wordless  # then it is the prompts or the template
    assert not replace(empty, empty=0.9).wordless


def test_how_a_type_is_read_is_found_once_for_all_results() -> None:
    """Fault: the types of every field were looked up for each of the thousands of results that the
    list of runs reads.
    """
    result = sample_result("bild", {}, 1.5)
    assert through_a_file(result) == result
    known = _reader.cache_info()
    assert through_a_file(result) == result and _reader.cache_info().misses == known.misses > 0
