"""Loggers that stand for no tracker, and for two trackers at once."""

from __future__ import annotations

from typing import Any

from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep


class NoLogger:
    """Log nowhere: the outputs folder holds everything."""

    def log_point(self, result: Result, config: dict) -> None:
        """Do nothing."""

    def log_sweep(self, sweep: Sweep) -> None:
        """Do nothing."""

    def closing(self) -> list[str]:
        """There is nothing to say."""
        return []


class BothLoggers:
    """Log to TensorBoard and to Weights & Biases.

    Each has its own keys, such as logger.wandb.mode.
    """

    def __init__(self, tensorboard: Any, wandb: Any) -> None:
        self._loggers = (tensorboard, wandb)

    def log_point(self, *point: Any, **options: Any) -> None:
        for logger in self._loggers:
            logger.log_point(*point, **options)

    def log_sweep(self, sweep: Sweep) -> None:
        for logger in self._loggers:
            logger.log_sweep(sweep)

    def closing(self) -> list[str]:
        return [line for logger in self._loggers for line in logger.closing()]

    def begin(self, *arguments: Any) -> list[Any]:
        """Begin a run with each; the arguments are those of a logger's `begin`."""
        return [logger.begin(*arguments) for logger in self._loggers]
