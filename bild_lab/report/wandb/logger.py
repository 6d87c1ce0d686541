"""Weights & Biases: one run per point, grouped by sweep."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bild_lab.errors import UserError
from bild_lab.lab.schema.measured_examples import read_examples
from bild_lab.lab.schema.result import Result
from bild_lab.report.wandb.panels import panels

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 20
# what identifies a point; everything else in a result was measured
_NOT_METRICS = (
    "schema",
    "name",
    "point",
    "policy",
    "knobs",
    "composition",
    "setting",
    "facts",
    "environment",
    "stored_at",
)


class NoLogger:
    """Log nowhere: the outputs folder holds everything."""

    def log_point(self, result: Result, config: dict) -> None:
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

    def log_point(self, result: Result, config: dict) -> None:
        """Write one result as a finished run: `config` as its configuration, the numbers as its summary.

        Its row, its curves and the examples in its folder become tables and charts.
        """
        logged = panels(result, read_examples(result.folder))
        described = {**config, "composition": result.composition, "environment": dict(result.environment)}
        run = self.begin(result.point, f"{result.policy} {result.point}", described)
        run.log(logged)
        run.summary.update(flat_metrics(result))
        run.finish()

    def begin(self, run_id: str, title: str, config: dict) -> wandb.Run:
        """Begin a run, offline if the server cannot be reached."""
        import wandb  # takes seconds

        self._directory.mkdir(parents=True, exist_ok=True)  # otherwise wandb silently writes to the temporary folder
        if self._mode == "online":
            try:
                return self._init(run_id, title, config)
            except (wandb.errors.Error, OSError) as error:
                wandb.teardown()  # otherwise its service keeps the run's id
                log.warning(
                    "Weights & Biases could not be reached (%s); this and later points are logged offline, "
                    "send them with: wandb sync %s/wandb/offline-run-*",
                    error,
                    self._directory,
                )
                self._mode = "offline"
        return self._init(run_id, title, config)

    def _init(self, run_id: str, title: str, config: dict) -> wandb.Run:
        import wandb

        return wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            id=run_id,
            name=title,
            dir=str(self._directory.absolute()),  # absolute: wandb's service has its own working folder
            mode=self._mode,
            tags=self._tags,
            config=config,
            resume="allow" if self._mode == "online" else None,  # a point run again replaces its run
            reinit="finish_previous",
            settings=_settings(),
        )


def flat_metrics(result: Result) -> dict[str, float | str | list]:
    """Return the numbers of a result under names like `speedup/value`, without those that do not exist.

    Counts of the rounds have no group, for example `acceptance_rate`.
    """
    metrics: dict[str, float | str | list] = {}
    if result.relative_latency is not None:
        metrics["relative_latency"] = result.relative_latency
    content = {key: value for key, value in result.to_json().items() if key not in _NOT_METRICS}
    counts = content.pop("counts")
    for key, value in {**content, **counts}.items():
        parts = {f"{key}/{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value}
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
