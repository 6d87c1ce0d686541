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
from bild_lab.lab.store.groups import by_setting, pair_title
from bild_lab.lab.store.hashing import content_hash
from bild_lab.lab.store.inputs import examples_of, stored_config
from bild_lab.lab.store.records import Sweep
from bild_lab.report.wandb.panels import front_lines, panels, standing, sweep_panels, title

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
_RECORD = Path("wandb", "logged.jsonl")  # in the folder of a sweep
# aliases, and the points of quality that may be lost
_BEST = {"best": 0.0, "best-within-one-point": 1.0}
_REPORT_FILES = ("report.html", "pareto.png", "sweep.csv")
# what identifies a point; everything else in a result was measured
_NOT_METRICS = (
    *("schema", "name", "point", "policy", "knobs", "composition"),
    *("setting", "facts", "environment", "stored_at"),
)


@dataclass(frozen=True)
class Logged:
    """One run. measured: when its point was measured, None for a run that is no point. mode:
    "online" or "offline".

    on_front: whether the point was on the front of its sweep's points then.
    """

    run: str
    measured: str | None
    mode: str
    project: str
    entity: str | None
    on_front: bool | None = None


class NoLogger:
    """Log nowhere: the outputs folder holds everything."""

    def log_point(self, result: Result, config: dict) -> None:
        """Do nothing."""

    def log_sweep(self, sweep: Sweep) -> None:
        """Do nothing."""

    def closing(self) -> list[str]:
        """There is nothing to say."""
        return []


class WandbLogger:
    """Log every point as its own Weights & Biases run, with its files under `directory`.

    The run's id is made of the group, which is the sweep's name, and the point's hash. If the
    server cannot be reached, this point and all later ones are written offline, to be sent later
    with `wandb sync`.
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

    def log_point(self, result: Result, config: dict, again: bool = False) -> None:
        """Write one result as a finished run: `config` as its configuration, the numbers as its
        summary.

        Its row, its curves and its examples become tables and charts, its files an artifact. A
        measurement that is in the project already is left out unless `again` is set, or it joined
        or left its sweep's front since.
        """
        if self._mode == DISABLED:
            return
        others = Sweep(result.folder.parents[1]).results() if result.folder else []
        groups = by_setting([*(other for other in others if other.point != result.point), result])
        place = standing(
            result, next(group for group in groups if any(one is result for one in group.results))
        )
        logged = self._logged(result.point, result.environment.started, place["on_front"])
        if again or logged not in noted(self._directory):
            self._write_point(result, config, place)

    def _write_point(self, result: Result, config: dict, place: Mapping[str, Any]) -> None:
        examples = read_examples(result.folder)
        dataset, why = examples_of([result]) if examples else (None, "")
        if why and not self._warned:
            self._warned = True
            log.warning(
                "examples are logged without references, as the dataset cannot be read again: %s",
                why,
            )
        shown = panels(result, examples, dataset or {})
        about = described(result, config)
        tags = [
            pair_title(result.setting)[:_LONGEST_TAG],
            str(result.setting.dataset)[:_LONGEST_TAG],
        ]
        run = self.begin(result.point, title(result), about, POINT, tags=tags)
        run.log(shown)
        run.summary.update({**flat_metrics(result), **place})
        if result.folder:
            run.log_artifact(self._files(result), aliases=[result.point])
        self._end(run, self._logged(result.point, result.environment.started, place["on_front"]))

    def log_sweep(self, sweep: Sweep) -> None:
        """Write a run for the sweep as a whole: its points with the Pareto fronts, the picture, the
        headline.

        Report, picture and table are attached as an artifact, and the artifact of the best point
        gets an alias. Points that joined or left the front since they were logged are logged again.
        A sweep without a finished point is left out.
        """
        import wandb

        from bild_lab.report.headline import headline, leading

        results = sweep.results()
        if not results or self._mode == DISABLED:
            return
        groups = by_setting(results)
        last = {one.run: one for one in noted(self._directory)}
        for result, place in (
            (result, standing(result, group)) for group in groups for result in group.results
        ):
            before = last.get(self._id(result.point))
            if before is not None and before.on_front != place["on_front"]:
                self._write_point(result, stored_config(result), place)
        found = headline(results)
        first, *others = (dict(result.setting) for result in results)
        shared = {
            key: value
            for key, value in first.items()
            if all(one.get(key) == value for one in others)
        }
        about = {
            "sweep": sweep.name,
            "policies": sorted({one.policy for one in results}),
            "setting": shared,
        }
        run = self.begin(SWEEP, self._group, about, SWEEP, found)
        run.log(sweep_panels(results, sweep.folder / "pareto.png", self._group))
        shown = {"panels": list(front_lines(results, self._group)), "points": len(results)}
        run.summary.update({"headline": found, "failed": len(sweep.failures()), **shown})
        artifact = wandb.Artifact(f"sweep-{_plain(self._group, 100)}", "sweep", description=found)
        for name in _REPORT_FILES:
            if (sweep.folder / name).is_file():
                artifact.add_file(str(sweep.folder / name))
        run.log_artifact(artifact)
        leader = leading(groups)
        # of the setting that the headline is about
        for alias, loss in _BEST.items() if leader.has_enough_examples else ():
            if (best := leader.best(loss)) is not None and best.folder:
                # the same files: one more alias for that version
                run.log_artifact(self._files(best), aliases=[alias])
        self._end(run, self._logged(SWEEP))

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

    def _files(self, result: Result) -> wandb.Artifact:
        """A point's folder: a version of the artifact that all points of the sweep share."""
        import wandb

        artifact = wandb.Artifact(
            f"points-{_plain(self._group, 100)}", POINT, description=title(result)
        )
        for file in sorted(result.folder.iterdir()):  # add_dir would print
            artifact.add_file(str(file))
        return artifact

    def _logged(
        self, identity: str, measured: str | None = None, on_front: bool | None = None
    ) -> Logged:
        return Logged(
            self._id(identity), measured, self._mode, self._project, self._entity, on_front
        )

    def _end(self, run: wandb.Run, logged: Logged) -> None:
        run.finish()
        note(self._directory, logged)


def private_mode(mode: str, environment: str | None) -> str:
    """The more private of the logger's mode and WANDB_MODE: disabled, offline, online.

    Raises UserError for another.
    """
    asked = _MODES.get(environment or mode, environment or mode)
    if asked not in _PRIVATE:
        raise UserError(
            f"WANDB_MODE must be one of {', '.join(_PRIVATE)}, got {environment}; correct or"
            " unset it"
        )
    return max(mode, asked, key=_PRIVATE.index)


def note(folder: Path, logged: Logged) -> None:
    """Add a run to the record of a sweep's folder."""
    file = folder / _RECORD
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(logged)) + "\n")


def noted(folder: Path) -> list[Logged]:
    """The record of a sweep's folder, oldest first; empty if nothing was logged."""
    file, found = folder / _RECORD, []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        with suppress(ValueError, TypeError):  # a line that a killed process left half written
            found.append(Logged(**json.loads(line)))
    return found


def sync_command(folder: Path) -> str:
    """The command line that sends a folder's offline runs; those that were sent before are left out
    by wandb.
    """
    return f"wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"


def described(result: Result, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a point's run has as its configuration: the point's own and how it was measured."""
    own = {key: value for key, value in config.items() if key != "logger"}
    # its name in conf/pair says nothing of models that were given by pair.target=PATH
    if pair := own.get("pair"):
        own["pair"] = {**pair, "name": pair_title(result.setting)}
    measured = {"composition": result.composition, "environment": dict(result.environment)}
    return {**own, "sweep": result.name, "point": result.point, **measured}


def _plain(name: str, longest: int) -> str:
    """The name where it may be part of an address; else the part of it that may be, with a hash of
    all.
    """
    plain = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)
    return (
        name
        if plain == name and len(name) <= longest
        else f"{plain[: longest - 13]}-{content_hash({'name': name})}"
    )


def flat_metrics(result: Result) -> dict[str, float | str | list]:
    """Return the numbers of a result under names like `speedup/value`, without those that do not
    exist.

    Counts of the rounds have no group, for example `acceptance_rate`. Further metrics are groups,
    such as `chrf/value`.
    """
    metrics: dict[str, float | str | list] = {}
    if result.relative_latency is not None:
        metrics["relative_latency"] = result.relative_latency
    content = {key: value for key, value in result.to_json().items() if key not in _NOT_METRICS}
    counts, further = content.pop("counts"), content.pop("further_qualities")
    for key, value in {**content, **counts, **further}.items():
        parts = (
            {f"{key}/{name}": part for name, part in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
        metrics |= {name: part for name, part in parts.items() if part is not None and part != {}}
    return metrics


def _settings(kind: str) -> wandb.Settings:
    """Keep wandb from wrapping the terminal or waiting long for a server or a login.

    It samples the machine (GPU, memory, power) in trainings alone: nothing runs beside a timed
    text.
    """
    import wandb

    limits = {"init_timeout": _INIT_TIMEOUT_S, "login_timeout": _INIT_TIMEOUT_S}
    return wandb.Settings(**limits, silent=True, console="off", x_disable_stats=kind != TRAINING)
