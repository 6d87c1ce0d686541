"""Weights & Biases: one run per point, grouped by sweep."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bild_lab.errors import UserError
from bild_lab.lab.results.records import Sweep
from bild_lab.report.wandb.panels import panels, relative_latency

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 20
_NOT_METRICS = ("schema", "name", "point", "policy", "knobs", "composition", "setting", "facts", "environment")


class NoLogger:
    """Log nowhere: the outputs folder holds everything."""

    def log_point(self, result: dict, config: dict) -> None:
        """Do nothing."""


class WandbLogger:
    """Log every point as its own Weights & Biases run, with its files under `directory`.

    The run's id is the point's hash, its group the sweep's name. If the server cannot be reached,
    this point and all later ones are written offline, to be sent later with `wandb sync`.
    """

    def __init__(
        self, project: str, entity: str | None, group: str, mode: str, tags: Sequence[str], directory: str
    ) -> None:
        """Check the values; nothing is imported or contacted before the first point.

        Raises:
            UserError: the mode is neither online nor offline.
        """
        if mode not in ("online", "offline"):
            raise UserError(f"logger mode wants online or offline, got {mode}; to log nowhere use logger=none")
        self._project, self._entity, self._group = project, entity, group
        self._mode, self._tags, self._directory = mode, list(tags), Path(directory)

    def log_point(self, result: dict, config: dict) -> None:
        """Write one result as a finished run: `config` as its configuration, the numbers as its summary.

        Its rows, curves and the examples that lie with it in `directory` become tables and charts.
        """
        self._directory.mkdir(parents=True, exist_ok=True)  # else wandb quietly writes to the temporary folder
        logged = panels(result, self._examples(result["point"]))
        run = self._start(result, config)
        run.log(logged)
        run.summary.update(flat_metrics(result))
        run.finish()

    def _examples(self, point: str) -> list[dict]:
        """The point's examples, none where another folder than the sweep's was chosen for wandb's files."""
        sweep = Sweep(self._directory)
        return sweep.examples(point) if sweep.newest(point) is not None else []

    def _start(self, result: dict, config: dict) -> wandb.Run:
        import wandb  # takes seconds

        if self._mode == "online":
            try:
                return self._init(result, config)
            except (wandb.errors.Error, OSError) as error:
                wandb.teardown()  # else its service still holds the run's id
                log.warning(
                    "Weights & Biases could not be reached (%s); this and later points are logged offline, "
                    "send them with: wandb sync %s/wandb/offline-run-*",
                    error,
                    self._directory,
                )
                self._mode = "offline"
        return self._init(result, config)

    def _init(self, result: dict, config: dict) -> wandb.Run:
        import wandb

        return wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            id=result["point"],
            name=f"{result['policy']} {result['point']}",
            dir=str(self._directory.absolute()),  # relative, it would be relative to where its server was started
            mode=self._mode,
            tags=self._tags,
            config={**config, "composition": result["composition"], "environment": result["environment"]},
            resume="allow" if self._mode == "online" else None,  # a point run again replaces its run
            reinit="finish_previous",
            settings=_settings(),
        )


def flat_metrics(result: dict) -> dict[str, float | str | list]:
    """Return the numbers of a result under names like `speedup/value`, without those that do not exist."""
    metrics: dict[str, float | str | list] = {}
    if (latency := relative_latency(result)) is not None:
        metrics["relative_latency"] = latency
    for key, value in result.items():
        parts = {f"{key}/{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value}
        if key not in _NOT_METRICS:
            metrics |= {name: part for name, part in parts.items() if part is not None and part != {}}
    return metrics


def _settings() -> wandb.Settings:
    """Keep wandb from timing the machine, wrapping the terminal or waiting long for a server or a login."""
    import wandb

    return wandb.Settings(
        init_timeout=_INIT_TIMEOUT_S,
        login_timeout=_INIT_TIMEOUT_S,
        silent=True,
        console="off",
        x_disable_stats=True,
    )
