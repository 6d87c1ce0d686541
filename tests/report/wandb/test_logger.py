"""Tests of the Weights & Biases logger: offline runs, and the way there when nothing can be reached."""

import logging

import pytest

from bild_lab.errors import UserError
from bild_lab.report.wandb.logger import NoLogger, WandbLogger, flat_metrics
from bild_lab.report.wandb.panels import panels, title
from tests.report.sample import sample_baseline, sample_result


def logger(directory, mode):
    return WandbLogger("bild_lab", None, group="first", mode=mode, tags=["test"], directory=str(directory))


def offline_runs(directory):
    """The ids of the runs: the names of their folders without the word offline and the time."""
    return sorted(path.name.split("-", 3)[3] for path in (directory / "wandb").glob("offline-run-*"))


@pytest.mark.slow
def test_every_point_becomes_one_offline_run_under_the_outputs(tmp_path):
    results = [sample_baseline(), sample_result("bild", {"fallback": 0.5}, 1.5)]
    offline = logger(tmp_path / "outputs" / "first", "offline")
    for result in (*results, *results):  # the second time they are known
        offline.log_point(result, {"policy": {"fallback": 0.5}})
    assert offline_runs(tmp_path / "outputs" / "first") == sorted(f"first-{result.point}" for result in results)


def test_what_a_point_does_not_have_is_no_panel():
    alone = sample_result("bild", {}, None, setting={"baseline": None})
    assert set(panels(alone, [], {})) == {"points"}
    assert set(panels(sample_baseline(), [], {})) == {"points", "quality_against_latency"}


def test_an_online_run_that_cannot_start_falls_back_to_offline_with_a_warning(tmp_path, caplog):
    online = logger(tmp_path, "online")
    with caplog.at_level(logging.WARNING):
        online.log_point(sample_baseline(), {})
        online.log_point(sample_result("bild", {}, 1.5), {})
    warnings = [record.message for record in caplog.records if record.name == "bild_lab.report.wandb.logger"]
    assert len(warnings) == 1  # the second point does not try again
    assert "logged offline" in warnings[0]
    assert len(offline_runs(tmp_path)) == 2


def test_metrics_are_flat_and_missing_ones_are_left_out():
    metrics = flat_metrics(sample_baseline())
    assert (metrics["quality/value"], metrics["speedup/value"], metrics["stages_s/draft"]) == (41.0, 1.0, 0.0)
    assert not {"acceptance_rate", "quality/difference", "quality/extra", "policy", "setting/seed"} & set(metrics)


def test_a_run_is_named_by_policy_and_knobs_of_paths_the_last_part_at_most_128_characters():
    assert title(sample_baseline()) == "vanilla"
    own = sample_result("medusa", {"heads": "outputs/medusa/heads", "top_k": 3, "tree": "auto"}, 1.5)
    assert title(own) == "medusa (heads medusa, top_k 3, tree auto)"
    long = title(sample_result("bild", {f"knob_{number}": number for number in range(40)}, 1.5))
    assert len(long) == 128 and long.endswith("…")


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(UserError, match="disabled"):
        logger(tmp_path, "disabled")


def test_no_logger_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    NoLogger().log_point(sample_baseline(), {})
    assert list(tmp_path.iterdir()) == []
