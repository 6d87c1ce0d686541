"""TensorBoard gets each point's numbers and the sweep's picture; several trackers get the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from PIL import Image

from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.point.build import build
from bild_lab.lab.store.records import Sweep
from bild_lab.report.trackers.loggers import BothLoggers
from bild_lab.training.reports import LogToRun, training_logger
from tests.report.sample import sample_result

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(folder: Path) -> events.EventAccumulator:
    found = events.EventAccumulator(str(folder))
    found.Reload()
    return found


def logger_of(*words: str):
    return build(OmegaConf.to_container(compose_config([*words]).logger, resolve=True), {})


def test_points_and_the_sweep_become_runs(tmp_path: Path) -> None:
    result = sample_result("bild", {"fallback": 0.5}, 1.5)
    sweep = Sweep(tmp_path)
    sweep.write_point(result.point, "", result, [])
    Image.new("RGB", (8, 5)).save(tmp_path / "pareto.png")
    logger = logger_of("logger=tensorboard", f"logger.directory={tmp_path}")
    for _ in range(2):  # a repeated command replaces its runs
        logger.log_point(result, {})
    logger.log_sweep(sweep)
    run = read(tmp_path / "tensorboard" / result.point)
    assert [one.value for one in run.Scalars("speedup/value")] == [1.5]
    assert "_hparams_/session_start_info" in run.Tags()["tensors"] or run.summary_metadata
    whole = read(tmp_path / "tensorboard" / "sweep")
    assert len(whole.Images("pareto")) == 1
    assert (
        b"bild (fallback 0.5) decodes 1.50"
        in whole.Tensors("sweep/text_summary")[0].tensor_proto.string_val[0]
    )
    assert logger.closing() == [
        f"logged to TensorBoard: tensorboard --logdir {tmp_path}/tensorboard"
    ]


def test_a_point_that_a_newer_one_replaced_has_no_run(tmp_path: Path) -> None:
    """Fault: after a change of code a sweep of one point has two in TensorBoard."""
    sweep, logger = Sweep(tmp_path), logger_of("logger=tensorboard", f"logger.directory={tmp_path}")
    (tmp_path / "tensorboard" / "training").mkdir(parents=True)
    for point in ("before", "after"):
        result = sample_result("bild", {}, 1.5, point=point)
        sweep.write_point(point, "", result, [])
        logger.log_point(result, {})
        logger.log_sweep(sweep)
    runs = {folder.name for folder in (tmp_path / "tensorboard").iterdir()}
    assert runs == {"after", "sweep", "training"}


def test_a_training_has_its_curve(tmp_path: Path) -> None:
    assert training_logger(compose_config([]).logger) is None
    cfg = compose_config(["logger=tensorboard", f"logger.directory={tmp_path}"])
    run = training_logger(cfg.logger).begin("a", "small", {"recipe": "short"}, "training")
    callback = LogToRun(run, "bleu")
    for step in (1, 2):
        callback.on_log(
            None, SimpleNamespace(global_step=step), None, {"loss": 2.0 / step, "note": "text"}
        )
    callback.on_train_end(None, SimpleNamespace(best_metric=30.0, best_global_step=2), None)
    assert [(one.step, one.value) for one in read(tmp_path / "tensorboard/a").Scalars("loss")] == [
        (1, 2.0),
        (2, 1.0),
    ]


def test_both_trackers_get_everything_and_keep_their_own_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = logger_of(
        "logger=both", "logger.wandb.mode=offline", f"logger.tensorboard.directory={tmp_path}"
    )
    assert [type(one).__name__ for one in both._loggers] == ["TensorBoardLogger", "WandbLogger"]
    calls: list[tuple] = []

    class Given:
        def __getattr__(self, name: str):
            return lambda *given, **more: calls.append((name, *given, *more.items())) or [name]

    both = BothLoggers(Given(), Given())
    both.log_point(1, {}, force=True)
    both.log_sweep(2)
    assert both.closing() == ["closing", "closing"] and both.begin("a") == [["begin"], ["begin"]]
    assert calls[:4] == [("log_point", 1, {}, ("force", True))] * 2 + [("log_sweep", 2)] * 2


def test_without_its_package_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bild_lab.report.trackers.tensorboard.find_spec", lambda name: None)
    assert not GlobalHydra.instance().is_initialized()
    with pytest.raises(UserError, match=r"pip install 'bild_lab\[tensorboard\]'"):
        logger_of("logger=tensorboard")
