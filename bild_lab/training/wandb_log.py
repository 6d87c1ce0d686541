"""A training in Weights & Biases: one run, with curves that grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import TrainerCallback

from bild_lab.lab.cli import console, escape
from bild_lab.report.wandb.logger import TRAINING, WandbLogger


class TrainingLogger(WandbLogger):
    """Logs a training as one run, as `WandbLogger` logs a sweep's points; an alignment logs both.

    If the server cannot be reached, the run is written offline.
    """

    def start(self, identity: str, title: str, model: str, config: Mapping[str, Any], environment: Mapping) -> Any:
        """Begin the run; a resumed training continues the run of the same identity."""
        described = {**config, "composition": model, "environment": dict(environment)}
        return self.begin(identity, title, described, TRAINING)


def training_logger(logger: DictConfig) -> TrainingLogger | None:
    """The logger that `conf/logger` describes; None if it has no values."""
    values = {key: value for key, value in OmegaConf.to_container(logger, resolve=True).items() if key != "_target_"}
    return TrainingLogger(**values) if values else None


def print_closing(logger: TrainingLogger | None) -> None:
    """Print where the runs of this process are; nothing without a logger."""
    for line in [] if logger is None else logger.closing():
        console.print(escape(line))


class LogToWandb(TrainerCallback):
    """Sends every log and evaluation of a training to a run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def on_log(self, args, state, control, logs=None, **kwargs):
        """The numbers, under their step."""
        numbers = {key: value for key, value in (logs or {}).items() if isinstance(value, int | float)}
        self._run.log(numbers, step=state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        """The best score as the run's summary."""
        if state.best_metric is not None:
            self._run.summary.update({"best": state.best_metric, "best_step": state.best_global_step})
        self._run.finish()
