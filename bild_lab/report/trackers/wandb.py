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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bild_lab.errors import UserError
from bild_lab.files import append_line, holding
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
_PRIVATE = (ONLINE, OFFLINE, DISABLED)  # the more private mode comes later
POINT, SWEEP, TRAINING = "point", "sweep", "training"  # types of jobs
_INIT_TIMEOUT_S = 20
_FINISH_TIMEOUT_S = 120
_LONGEST_TAG = 64  # the service's limit
# characters of a group's name in the id of a run, which the service limits to 128
_LONGEST_GROUP = 60
# characters of a sweep's name in it, where the group has another
_LONGEST_SWEEP = 40
REPLACED = "replaced by a newer point"  # the panel of a point that reports do not show
_RECORD = Path("wandb", "logged.jsonl")  # in the folder of a sweep
# how many small losses of quality (`MetricScale`) are allowed for an alias
_LOSS_OF_ALIAS = {"best": 0.0, "best-within-one-point": 1.0}
_REPORT_FILES = ("report.html", "pareto.png", "sweep.csv")


@dataclass(frozen=True)
class LoggedRun:
    """One run.

    measured: when its point was measured, None for a run that is no point. mode: "online" or
    "offline". on_front: whether the point was on the front of its sweep's points then; None for one
    that a newer point had replaced.
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
        self._tags, self._directory = _checked_tags(tags), Path(directory)
        self._require_names()
        self._mode = private_mode(mode, os.environ.get("WANDB_MODE"))
        # an agent of wandb names the run of this process, and takes no other name
        self._agents_sweep = os.environ.get("WANDB_SWEEP_ID")
        self._begun: Counter[str] = Counter()  # runs by mode
        self._address = ""  # of the last run online
        self._warned = False

    def _require_names(self) -> None:
        """Raise UserError for a project, tag or group that wandb would refuse when the first run
        begins.
        """
        import wandb  # takes seconds

        try:
            wandb.Settings(
                project=str(self._project),
                run_tags=self._tags,
                run_group=self._group,
                run_id=self._id("0" * 12),
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
        measurement that is in the project already is left out unless `force` is set; where it has
        joined or left its sweep's front since, `log_sweep` logs it again. Raises UserError for a
        second point under an agent of wandb, whose process has one run.
        """
        if self._mode == DISABLED:
            return
        if self._agents_sweep and self._begun:
            raise UserError(
                f"a run of the Weights & Biases sweep {self._agents_sweep} is one point, got several"
                " in one command; leave out -m, or unset WANDB_SWEEP_ID"
            )
        # another process may end the same point, and other points do not wait for this one's upload
        lock = self._directory / "wandb" / f".{result.point}.lock"
        with holding(lock, _INIT_TIMEOUT_S + _FINISH_TIMEOUT_S):
            if not (force or self._agents_sweep) and self._is_recorded(result):
                return
            stored = Sweep(result.folder.parents[1]).results() if result.folder else []
            siblings = [sibling for sibling in stored if sibling.point != result.point]
            self._write_point(result, config, _status_among(result, [*siblings, result]))

    def _is_recorded(self, result: Result) -> bool:
        """Whether this measurement is in the project, on the front or not."""
        logged = self._logged_point(result, {"on_front": None})
        return any(replace(run, on_front=None) == logged for run in recorded_runs(self._directory))

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
        A sweep without a finished point is left out, and under an agent of wandb each, as the run
        there is the point's.
        """
        import wandb

        results = sweep.results()
        if not results or self._mode == DISABLED or self._agents_sweep:
            return
        groups = by_setting(results)
        self._update_fronts(sweep, groups)
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

    def _update_fronts(self, sweep: Sweep, groups: Sequence[Group]) -> None:
        """Log the points again that joined or left the front since they were logged, or whose place
        a newer point of the same policy, knobs and setting took.
        """
        latest_runs = {logged.run: logged for logged in recorded_runs(self._directory)}
        statuses = {
            result.point: (result, front_status(result, group))
            for group in groups
            for result in group.results
        }
        replaced = {result.point: result for result in sweep.all_results()}
        for point in set(replaced) - set(statuses):
            result = replaced[point]
            statuses[point] = (
                result,
                {"policy": result.policy, "panel": REPLACED, "on_front": None},
            )
        for result, status in statuses.values():
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
        if self._agents_sweep:
            lines.append(
                f"the point's run is one of the Weights & Biases sweep {self._agents_sweep}; the"
                " sweep here as a whole is logged by python scripts/sweeps.py log"
                f" {shlex.quote(str(self._directory))}, outside of the agent"
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
        run = self._begin_online(about) if self._mode == ONLINE else None
        run = run or wandb.init(**about, mode=self._mode)
        self._begun[self._mode] += 1
        if self._mode == ONLINE:
            self._address = run.url
        return run

    def _begin_online(self, about: Mapping[str, Any]) -> wandb.Run | None:
        """A run at the server, in place of an earlier one of its id; None where the server cannot be
        reached: from then on runs are offline. about: arguments of `wandb.init`.
        """
        import wandb

        try:
            return wandb.init(**about, mode=ONLINE, resume="allow")
        except (wandb.errors.Error, OSError) as error:
            wandb.teardown()  # otherwise its service keeps the run's id
            log.warning(
                "Weights & Biases could not be reached (%s); this and later runs are logged offline",
                error,
            )
            self._mode = OFFLINE
            return None

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
        """Send the rest of a run and record it. Raises TimeoutError where the server is lost; later
        runs are then offline.
        """
        try:
            run.finish()
        except TimeoutError as error:
            self._mode = OFFLINE
            raise TimeoutError(
                f"Weights & Biases did not take the run within {_FINISH_TIMEOUT_S} s; later runs are"
                " logged offline, and the same command logs this one again"
            ) from error
        if not self._agents_sweep:  # where the run has the agent's name
            record_run(self._directory, logged)


def _checked_tags(tags: Sequence[str | float]) -> list[str]:
    """The logger's tags. Raises UserError for a text, whose letters would be the tags, and for a tag
    that is neither a word nor a number.
    """
    listed = tags if isinstance(tags, str) else list(tags)
    if isinstance(listed, str) or not all(isinstance(tag, str | int | float) for tag in listed):
        raise UserError(
            f"logger.tags must be a list of words, got {listed!r}; write logger.tags=[one,two]"
        )
    return [str(tag) for tag in listed]


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
    requested_mode = environment or mode
    if requested_mode not in _PRIVATE:
        raise UserError(
            f"WANDB_MODE must be one of {', '.join(_PRIVATE)}, got {environment}; correct or"
            " unset it"
        )
    return max(mode, requested_mode, key=_PRIVATE.index)


def record_run(folder: Path, logged: LoggedRun) -> None:
    """Add a run to the record of a sweep's folder."""
    append_line(folder / _RECORD, json.dumps(asdict(logged)))


def recorded_runs(folder: Path) -> list[LoggedRun]:
    """The record of a sweep's folder, oldest first; empty if nothing was logged."""
    file, logged_runs = folder / _RECORD, []
    if not file.is_file():
        return []
    for line in file.read_bytes().splitlines():
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

    return wandb.Settings(
        init_timeout=_INIT_TIMEOUT_S,
        login_timeout=_INIT_TIMEOUT_S,
        finish_timeout=_FINISH_TIMEOUT_S,
        finish_timeout_raises=kind != TRAINING,  # which is stored first, sent or not
        silent=True,
        console="off",
        x_disable_stats=kind != TRAINING,
    )
