"""Weights & Biases: one run per point and one for the sweep as a whole, in one group.

`wandb/logged.jsonl` in a sweep's folder records what was logged, a line for each run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bild_lab.errors import UserError
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.formatting import counted
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import best_at_loss
from bild_lab.lab.store.groups import Group, by_setting, pair_title
from bild_lab.lab.store.hashing import content_hash
from bild_lab.lab.store.inputs import examples_of, stored_config
from bild_lab.lab.store.records import Sweep
from bild_lab.report.headline import best_group, headline
from bild_lab.report.trackers.wandb_panels import (
    flat_metrics,
    front_lines,
    front_status,
    point_panels,
    run_config,
    run_title,
    sweep_panels,
)

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

OFFLINE, ONLINE, DISABLED = "offline", "online", "disabled"
_MODES = {"dryrun": OFFLINE, "run": ONLINE}  # old words for WANDB_MODE
_PRIVATE = (ONLINE, OFFLINE, DISABLED)  # the more private mode comes later
POINT, SWEEP, TRAINING = "point", "sweep", "training"  # types of jobs
_INIT_TIMEOUT_S = 20
_NOT_IN_NAMES = "/\\#?%:"  # of projects and entities: they are parts of an address
_LONGEST_TAG = 64  # the service's limit
# characters of a group's name in the id of a run, which the service limits to 128
_LONGEST_GROUP = 60
# characters of a sweep's name in it, where the group has another
_LONGEST_SWEEP = 40
_RECORD = Path("wandb", "logged.jsonl")  # in the folder of a sweep
# how many small losses of quality (`MetricScale`) are allowed for an alias
_LOSS_OF_ALIAS = {"best": 0.0, "best-within-one-point": 1.0}
_REPORT_FILES = ("report.html", "pareto.png", "sweep.csv")


@dataclass(frozen=True)
class LoggedRun:
    """One run.

    measured: when its point was measured, None for a run that is no point. mode: "online" or
    "offline". on_front: whether the point was on the front of its sweep's points then.
    """

    run: str
    measured: str | None
    mode: str
    project: str
    entity: str | None
    on_front: bool | None = None


class WandbLogger:
    """Log every point as its own Weights & Biases run, with its files under `directory`.

    The run's id is made of the group, the sweep's name where the group has another, and the
    point's hash. If the server cannot be reached, this point and all later ones are written
    offline, to be sent later with `wandb sync`.
    """

    def __init__(
        self,
        project: str,
        entity: str | None,
        group: str,
        mode: str,
        tags: Sequence[str],
        directory: str,
    ) -> None:
        """Check the values, by the rules of wandb itself; nothing is contacted before the first
        point.

        Where WANDB_MODE in the environment is more private than `mode`, it counts.

        Raises:
            UserError: the mode is neither online nor offline, or wandb does not take a name or a tag.
        """
        if mode not in (ONLINE, OFFLINE):
            raise UserError(
                f"logger mode wants online or offline, got {mode}; to log nowhere use logger=none"
            )
        self._project, self._entity, self._group = project, entity, str(group)
        self._tags, self._directory = tags if isinstance(tags, str) else list(tags), Path(directory)
        self._require_names()
        self._mode = private_mode(mode, os.environ.get("WANDB_MODE"))
        if os.environ.get("WANDB_DIR"):
            log.warning(
                "WANDB_DIR is not used: runs are written to %s, which logger.directory names",
                directory,
            )
        self._begun: Counter[str] = Counter()  # runs by mode
        self._address = ""  # of the last run online
        self._warned = False

    def _require_names(self) -> None:
        """Raise UserError for a project, entity, tag or group that wandb would refuse when the
        first run begins.
        """
        import wandb  # takes seconds

        if isinstance(self._tags, str) or not all(
            isinstance(tag, str | int | float) for tag in self._tags
        ):
            raise UserError(
                f"logger.tags must be a list of words, got {self._tags!r}; write"
                " logger.tags=[one,two]"
            )
        self._tags = [str(tag) for tag in self._tags]
        for key, name in {"project": self._project, "entity": self._entity}.items():
            text = "" if name is None else str(name).strip()
            if (not text and (key, name) != ("entity", None)) or set(text) & set(_NOT_IN_NAMES):
                raise UserError(
                    f"logger.{key} must be a name without {' '.join(_NOT_IN_NAMES)}, got {name!r}; "
                    "logger.entity=OWNER logger.project=NAME are two keys"
                )
        identity = self._id("0" * 12)
        try:
            wandb.Settings(
                project=str(self._project),
                run_tags=self._tags,
                run_group=self._group,
                run_id=identity,
            )
        except (wandb.errors.Error, ValueError) as error:
            lines = [line.strip() for line in str(error).splitlines()]
            what = next((line for line in lines if "characters" in line), lines[0])
            raise UserError(
                "Weights & Biases does not take what the logger is given:"
                f" {what.partition(' [type=')[0]}; correct logger.project, logger.tags or"
                " logger.group"
            ) from error

    def log_point(self, result: Result, config: dict, force: bool = False) -> None:
        """Write one result as a finished run: `config` as its configuration, the numbers as its
        summary.

        Its row, its curves and its examples become tables and charts, its files an artifact. A
        measurement that is in the project already is left out unless `force` is set, or it joined
        or left its sweep's front since.
        """
        if self._mode == DISABLED:
            return
        stored = Sweep(result.folder.parents[1]).results() if result.folder else []
        siblings = [sibling for sibling in stored if sibling.point != result.point]
        status = _status_among(result, [*siblings, result])
        logged = self._logged_point(result, status)
        if force or logged not in recorded_runs(self._directory):
            self._write_point(result, config, status)

    def _write_point(self, result: Result, config: dict, status: Mapping[str, Any]) -> None:
        examples = read_examples(result.folder)
        dataset, reason = examples_of([result]) if examples else (None, "")
        if reason and not self._warned:
            self._warned = True
            log.warning(
                "examples are logged without references, as the dataset cannot be read again: %s",
                reason,
            )
        point_config = run_config(result, config)
        tags = [
            pair_title(result.setting)[:_LONGEST_TAG],
            str(result.setting.dataset)[:_LONGEST_TAG],
        ]
        identity = self._identity(self._sweep_of(result), result.point)
        run = self.begin(identity, run_title(result), point_config, POINT, tags=tags)
        run.log(point_panels(result, examples, dataset or {}))
        run.summary.update({**flat_metrics(result), **status})
        if result.folder:
            run.log_artifact(self._files(result), aliases=[result.point])
        self._end(run, self._logged_point(result, status))

    def log_sweep(self, sweep: Sweep) -> None:
        """Write a run for the sweep as a whole: its points with the Pareto fronts, the picture, the
        headline.

        Report, picture and table are attached as an artifact, and the artifact of the best point
        gets an alias. Points that joined or left the front since they were logged are logged again.
        A sweep without a finished point is left out.
        """
        import wandb

        results = sweep.results()
        if not results or self._mode == DISABLED:
            return
        groups = by_setting(results)
        self._update_fronts(groups)
        findings = headline(results)
        config = {
            "sweep": sweep.name,
            "policies": sorted({result.policy for result in results}),
            "setting": _shared_setting(results),
        }
        identity = self._identity(sweep.name, SWEEP)
        run = self.begin(identity, sweep.name, config, SWEEP, findings)
        run.log(sweep_panels(results, sweep.folder / "pareto.png", sweep.name))
        run.summary.update(
            {
                "headline": findings,
                "failed": len(sweep.failures()),
                "panels": list(front_lines(results, sweep.name)),
                "points": len(results),
            }
        )
        artifact = wandb.Artifact(f"sweep-{_plain(sweep.name, 100)}", "sweep", description=findings)
        for name in _REPORT_FILES:
            if (sweep.folder / name).is_file():
                artifact.add_file(str(sweep.folder / name))
        run.log_artifact(artifact)
        self._name_best_points(run, best_group(groups))
        self._end(run, self._logged(identity))

    def _update_fronts(self, groups: Sequence[Group]) -> None:
        """Log the points again that joined or left the front since they were logged."""
        latest_runs = {logged.run: logged for logged in recorded_runs(self._directory)}
        for group in groups:
            for result in group.results:
                status = front_status(result, group)
                logged = latest_runs.get(self._logged_point(result, status).run)
                if logged is not None and logged.on_front != status["on_front"]:
                    self._write_point(result, stored_config(result), status)

    def _name_best_points(self, run: wandb.Run, group: Group) -> None:
        """Give the artifacts of a setting's best points their aliases."""
        for alias, small_losses in _LOSS_OF_ALIAS.items():
            best = best_at_loss(group.judged, small_losses * group.scale.small_loss)
            if best is not None and best.folder:
                # the same files: one more alias for that version
                run.log_artifact(self._files(best), aliases=[alias])

    def closing(self) -> list[str]:
        """Where the runs of this process are: their address, and how to send those written
        offline.
        """
        if self._mode == DISABLED:
            return ["not logged to Weights & Biases, as WANDB_MODE=disabled is set"]
        lines = []
        if online := self._begun[ONLINE]:
            lines.append(
                f"logged to Weights & Biases: {counted(online, 'run')} in group {self._group}."
                f" {self._address}".strip()
            )
        if offline := self._begun[OFFLINE]:
            lines.append(
                f"logged offline: {counted(offline, 'run')}. Send with:"
                f" {sync_command(self._directory)}"
            )
        return lines

    def begin(
        self,
        identity: str,
        name: str,
        config: dict,
        kind: str,
        notes: str | None = None,
        tags: Sequence[str] = (),
    ) -> wandb.Run:
        """Begin a run, offline if the server cannot be reached.

        identity: of the run within its group. name: as shown. kind: the type of its job. tags:
        beside the logger's.
        """
        import wandb  # takes seconds

        # otherwise wandb silently writes to the temporary folder
        self._directory.mkdir(parents=True, exist_ok=True)
        about = {
            "project": self._project,
            "entity": self._entity,
            "group": self._group,
            "id": self._id(identity),
            "name": name,
            "config": config,
            "job_type": kind,
            "notes": notes,
            "tags": list(dict.fromkeys([*self._tags, *tags])),
            # absolute: wandb's service has its own working folder
            "dir": str(self._directory.absolute()),
            "reinit": "finish_previous",
            "settings": _settings(kind),
        }
        run = None
        if self._mode == ONLINE:
            try:
                # a point run again replaces its run
                run = wandb.init(**about, mode=ONLINE, resume="allow")
            except (wandb.errors.Error, OSError) as error:
                wandb.teardown()  # otherwise its service keeps the run's id
                log.warning(
                    "Weights & Biases could not be reached (%s); this and later runs are logged"
                    " offline",
                    error,
                )
                self._mode = OFFLINE
        run = run or wandb.init(**about, mode=self._mode)
        self._begun[self._mode] += 1
        if self._mode == ONLINE:
            self._address = run.url
        return run

    def _id(self, identity: str) -> str:
        return f"{_plain(self._group, _LONGEST_GROUP)}-{identity}"

    def _identity(self, sweep: str, what: str) -> str:
        """A run's identity in the group, which several sweeps may share. what: its point, or that
        it is the sweep as a whole.
        """
        return what if sweep == self._group else f"{_plain(sweep, _LONGEST_SWEEP)}-{what}"

    def _sweep_of(self, result: Result) -> str:
        """The name of the sweep whose folder holds a result."""
        return result.folder.parents[1].name if result.folder else self._group

    def _files(self, result: Result) -> wandb.Artifact:
        """A point's folder: a version of the artifact that all points of the sweep share."""
        import wandb

        artifact = wandb.Artifact(
            f"points-{_plain(self._sweep_of(result), 100)}", POINT, description=run_title(result)
        )
        for file in sorted(result.folder.iterdir()):  # add_dir would print
            artifact.add_file(str(file))
        return artifact

    def _logged(
        self, identity: str, measured: str | None = None, on_front: bool | None = None
    ) -> LoggedRun:
        return LoggedRun(
            self._id(identity), measured, self._mode, self._project, self._entity, on_front
        )

    def _logged_point(self, result: Result, status: Mapping[str, Any]) -> LoggedRun:
        """A point's run. status: its `front_status`."""
        identity = self._identity(self._sweep_of(result), result.point)
        return self._logged(identity, result.environment.started, status["on_front"])

    def _end(self, run: wandb.Run, logged: LoggedRun) -> None:
        run.finish()
        record_run(self._directory, logged)


def _status_among(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    """The `front_status` of a result among the results of its sweep."""
    for group in by_setting(results):
        if any(group_result is result for group_result in group.results):
            return front_status(result, group)
    raise ValueError("the result is none of the sweep's")


def _shared_setting(results: Sequence[Result]) -> dict[str, Any]:
    """The keys of the setting that have one value in all of these results."""
    settings = [dict(result.setting) for result in results]
    return {
        key: value
        for key, value in settings[0].items()
        if all(setting.get(key) == value for setting in settings)
    }


def private_mode(mode: str, environment: str | None) -> str:
    """The more private of the logger's mode and WANDB_MODE: disabled, offline, online.

    Raises UserError for another.
    """
    requested = environment or mode
    requested_mode = _MODES.get(requested, requested)
    if requested_mode not in _PRIVATE:
        raise UserError(
            f"WANDB_MODE must be one of {', '.join(_PRIVATE)}, got {environment}; correct or"
            " unset it"
        )
    return max(mode, requested_mode, key=_PRIVATE.index)


def record_run(folder: Path, logged: LoggedRun) -> None:
    """Add a run to the record of a sweep's folder."""
    file = folder / _RECORD
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(logged)) + "\n")


def recorded_runs(folder: Path) -> list[LoggedRun]:
    """The record of a sweep's folder, oldest first; empty if nothing was logged."""
    file, logged_runs = folder / _RECORD, []
    if not file.is_file():
        return []
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError, TypeError):  # a line that a killed process left half written
            logged_runs.append(LoggedRun(**json.loads(line)))
    return logged_runs


def sync_command(folder: Path) -> str:
    """The command line that sends a folder's offline runs; those that were sent before are left out
    by wandb.
    """
    return f"wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"


def _plain(name: str, longest: int) -> str:
    """The name where it may be part of an address; else the part of it that may be, with a hash of
    all.
    """
    plain = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)
    if plain == name and len(name) <= longest:
        return name
    return f"{plain[: longest - 13]}-{content_hash({'name': name})}"


def _settings(kind: str) -> wandb.Settings:
    """Keep wandb from wrapping the terminal or waiting long for a server or a login.

    It samples the machine (GPU, memory, power) in trainings alone: nothing runs beside a timed
    text.
    """
    import wandb

    limits = {"init_timeout": _INIT_TIMEOUT_S, "login_timeout": _INIT_TIMEOUT_S}
    return wandb.Settings(**limits, silent=True, console="off", x_disable_stats=kind != TRAINING)
