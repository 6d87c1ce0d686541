"""A search of knobs on validation with Optuna; the chosen points are then measured on test (BiLD §7.1.2).

Trials are decoded over a record of the models' scores, and their speed is predicted, unless `tune.live` is set.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError, require_flag, require_whole
from bild_lab.files import write_atomically
from bild_lab.lab.analysis.pareto import best_at_loss
from bild_lab.lab.cli import stages
from bild_lab.lab.config import compose_config
from bild_lab.lab.data.rows import canonical_split
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.point import prepare, sweep_folder
from bild_lab.lab.results.groups import by_setting
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import Result
from bild_lab.lab.screening.rows import Row, with_front
from bild_lab.lab.screening.screen import RecordSpec
from bild_lab.lab.screening.space import Space, Values
from bild_lab.lab.tuning.trials import RecordedTrials

STUDY, CHOSEN = "study.sqlite", "tuned.json"
STARTUP_TRIALS = 10  # random trials, before Optuna's model suggests points

Measure = Callable[[DictConfig], Any]
Found = Result | Row  # measured live, or decoded over a record with its speed predicted


@dataclass(frozen=True)
class TuneSpec:
    """How to search: `conf/tune.yaml`. loss: points of quality that may be lost; None searches the whole front.

    live: measure every trial, for what a record cannot replay.
    """

    trials: int
    loss: float | None
    validation: str
    test: str
    space: list[str]
    live: bool = False

    def __post_init__(self) -> None:
        require_flag("tune.live", self.live)
        require_whole("tune.trials", self.trials, 1)
        number = isinstance(self.loss, int | float) and not isinstance(self.loss, bool)
        if self.loss is not None and not (number and 0 <= self.loss < math.inf):
            raise UserError(f"tune.loss must be points of quality >= 0, or null for the whole front, got {self.loss!r}")
        if canonical_split(str(self.validation)) == canonical_split(str(self.test)):
            raise UserError(
                f"tune.validation and tune.test must be two splits, got {self.validation!r} twice; change one of them"
            )


@dataclass(frozen=True)
class Tuning:
    """A search on validation and its confirmation on test, in one sweep's folder.

    overrides: from the command line, without the lists. measure: measures a configuration and stores its point.
    record: of the trials.
    """

    spec: TuneSpec
    space: Space
    overrides: tuple[str, ...]
    measure: Measure
    record: RecordSpec

    def config(self, values: Values, split: str) -> DictConfig:
        """One point's configuration, composed as `python run.py` does."""
        words = [*self.overrides, *self.space.fixed, *values, f"dataset.split={split}"]
        composed = compose_config(words)
        return OmegaConf.masked_copy(composed, [key for key in composed if key not in ("hydra", "tune")])

    def check(self) -> None:
        """Raise UserError unless the first and last values of all lists can be measured, on two different splits."""
        corners = self.space.corners()
        found = [prepare(self.config(values, self.spec.validation)) for values in corners]
        held_out = prepare(self.config(corners[0], self.spec.test))
        if {one.prompt for one in found[0].examples} == {one.prompt for one in held_out.examples}:
            raise UserError(
                f"{self.spec.validation} and {self.spec.test} are the same examples; give dataset.path a folder with "
                "a file for each split"
            )
        if self.spec.loss is not None and found[0].measure.baseline is None:
            raise UserError("tune.loss is a loss against a baseline, which is null; set measure.baseline=vanilla")
        if self.trials is not None:
            try:
                self.trials.check()
            except UserError as error:
                raise UserError(f"{error}. tune.live=true measures every trial live instead") from error

    @cached_property
    def key(self) -> str:
        """A hash of everything that must be unchanged to continue a study: a point's inputs, the lists and the loss."""
        point = prepare(self.config(self.space.corners()[0], self.spec.validation)).id
        return content_hash({"point": point, "space": self.space.lists, "loss": self.spec.loss})

    @cached_property
    def sweep(self) -> Sweep:
        return Sweep(sweep_folder(self.config(self.space.corners()[0], self.spec.validation)))

    @cached_property
    def trials(self) -> RecordedTrials | None:
        """Trials over a record; None if they are measured live."""
        return None if self.spec.live else RecordedTrials(self.space, self.overrides, self.spec.validation, self.record)

    def result(self, values: Values, split: str) -> Found | None:
        """Measure a point unless it is finished, and return its result; None if it failed, which is recorded.

        On validation, decode it over the record.
        """
        if split == self.spec.validation and self.trials is not None:
            return self.trials.row(values)
        self.measure(self.config(values, split))
        return self.finished(values, split)

    def finished(self, values: Values, split: str) -> Found | None:
        """A point's newest result in the sweep's folder, or of the record."""
        if split == self.spec.validation and self.trials is not None:
            return self.trials.row(values)
        return self.sweep.newest(prepare(self.config(values, split)).id)

    def objectives(self, found: Found) -> list[float]:
        """The values for Optuna: quality and latency. With a loss: the latency, made longer if the loss is exceeded.

        The latency is relative to the baseline's. Without a baseline it is in seconds.
        """
        if isinstance(found, Row):
            quality, latency, lost = found.quality, 1 / found.predicted_speedup, -found.quality_difference
        else:
            speedup, quality = found.speedup.value, found.quality.value
            latency = found.latency_s.mean if speedup is None else 1 / speedup
            lost = 0.0 if found.quality.baseline is None else found.quality.baseline - quality
        if self.spec.loss is None:
            return [quality, latency]
        excess = lost - self.spec.loss
        return [latency if excess <= 0 else max(latency, 1.0) + excess]

    def chosen(self, found: list[Found]) -> list[Found]:
        """The undominated points, fastest first. With a loss: the fastest point within it, if there is one."""
        if found and isinstance(found[0], Row):
            if self.spec.loss is None:
                return sorted(
                    (row for row in with_front(found) if row.on_front), key=lambda row: -row.predicted_speedup
                )
            within = [row for row in found if -row.quality_difference <= self.spec.loss + 1e-9]
            return sorted(within, key=lambda row: (-row.predicted_speedup, -row.quality))[:1]
        if self.spec.loss is not None:
            best = best_at_loss(found, self.spec.loss)
            return [] if best is None else [best]
        return [result for group in by_setting(found) for result in group.front()]


@dataclass(frozen=True)
class Tuned:
    """What was chosen on validation, with its result there and on test; None if the test failed."""

    overrides: list[str]
    validation: Found
    test: Result | None


def sqlite_storage(file: Path) -> Any:
    """Optuna's storage in one file that survives a kill and a power cut."""
    from optuna.storages import RDBStorage
    from sqlalchemy import URL, event

    address = URL.create("sqlite", database=str(file.absolute()))
    storage = RDBStorage(address.render_as_string(hide_password=False))

    def write_ahead(connection: Any, _: Any) -> None:  # else every step of a trial waits several times for the disk
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    event.listen(storage.engine, "connect", write_ahead)
    storage.engine.dispose()  # earlier connections do not have these settings
    return storage


class Study:
    """Optuna's record of a search, on disk after every trial.

    A killed process leaves an unfinished trial. The next process repeats it first.
    """

    def __init__(self, tuning: Tuning, seed: int, resume: bool) -> None:
        import optuna  # an optional dependency; its import takes a second

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._optuna, self._tuning = optuna, tuning
        tuning.sweep.folder.mkdir(parents=True, exist_ok=True)
        storage = sqlite_storage(tuning.sweep.folder / STUDY)
        before = [name for name in optuna.get_all_study_names(storage) if name.partition(".")[0] == tuning.key]
        number = max(1, len(before) + (not resume))
        self._study = optuna.create_study(
            storage=storage,
            study_name=f"{tuning.key}.{number}",
            directions=["maximize", "minimize"] if tuning.spec.loss is None else ["minimize"],
            load_if_exists=True,
        )
        seed += len(self._study.trials)  # else every process starts with the same random points
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        self._chance = random.Random(seed)
        for trial in self._study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if trial.params:  # empty if the process was killed before they were chosen
                self._study.enqueue_trial(trial.params)

    def finished_trials(self) -> dict[tuple[int, ...], list[float]]:
        """The finished trials, by the indices of their values in the lists."""
        done = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        return {self._places(trial): trial.values for trial in done}

    def search(self) -> dict[Values, Found]:
        """Measure until there are enough trials. Returns the results of all trials, with those of earlier processes."""
        tuning, space = self._tuning, self._tuning.space
        failed: dict[tuple[int, ...], None] = {}  # in this process; the next process tries them again
        most = min(tuning.spec.trials, space.size)
        while len(seen := {**self.finished_trials(), **failed}) < most:
            stages.enter(f"trial {len(seen) + 1} of {most}")
            trial = self._study.ask()
            for number, values in enumerate(space.lists):
                trial.suggest_int(self._name(number), 0, len(values) - 1)
            places = self._places(trial)
            if new := places not in seen:
                result = tuning.result(space.at(places), tuning.spec.validation)
                seen[places] = None if result is None else tuning.objectives(result)
            if seen[places] is None:
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                failed[places] = None
            else:
                self._study.tell(trial, seen[places])
            if not new or places in failed:  # the sampler learned nothing, and may suggest it forever
                self._enqueue_unseen(seen)
        found = {
            values: tuning.finished(values, tuning.spec.validation) for values in map(space.at, self.finished_trials())
        }
        return {values: result for values, result in found.items() if result is not None}

    def _enqueue_unseen(self, seen: dict[tuple[int, ...], Any]) -> None:
        """Choose a random point that was not tried yet, if there is one, as the next trial."""
        counts = [len(values) for values in self._tuning.space.lists]
        if len(seen) == self._tuning.space.size:
            return
        while (places := tuple(self._chance.randrange(count) for count in counts)) in seen:
            pass
        self._study.enqueue_trial({self._name(number): place for number, place in enumerate(places)})

    def _name(self, number: int) -> str:
        return self._tuning.space.lists[number][0].partition("=")[0]

    def _places(self, trial: Any) -> tuple[int, ...]:
        return tuple(trial.params[self._name(number)] for number in range(len(self._tuning.space.lists)))


def tune(tuning: Tuning, seed: int, resume: bool) -> list[Tuned]:
    """Search on validation, choose points, and measure them on test.

    Returns the chosen points and stores them in `tuned.json`. Raises UserError if another process searches under the
    same name.
    """
    with tuning.sweep.search_lock():
        found = Study(tuning, seed, resume).search()
        tuned = []
        for result in tuning.chosen(list(found.values())):
            values = next(values for values, one in found.items() if same_point(one, result))
            tuned.append(Tuned(list(values), result, tuning.result(values, tuning.spec.test)))
        write_tuned(tuning.sweep.folder / CHOSEN, tuned)
    return tuned


def same_point(one: Found, other: Found) -> bool:
    """Whether two results are of one point. A row on the front is a new object."""
    if isinstance(one, Row):
        return (one.policy, one.knobs) == (other.policy, other.knobs)
    return one is other


def write_tuned(file: Path, tuned: list[Tuned]) -> None:
    """Store the chosen points with their main numbers on validation and on test."""
    rows = [
        {"overrides": one.overrides, "validation": key_numbers(one.validation), "test": key_numbers(one.test)}
        for one in tuned
    ]
    write_atomically(file, (json.dumps(rows, indent=2) + "\n").encode())


def key_numbers(result: Found | None) -> dict[str, Any] | None:
    """A result's quality and speed, and the name of its point. A row of the record has a predicted speedup."""
    if result is None:
        return None
    if isinstance(result, Row):
        return {
            "metric": result.quality_metric,
            "quality": result.quality,
            "difference": result.quality_difference,
            "predicted_speedup": result.predicted_speedup,
        }
    return {
        "point": result.point,
        "metric": result.quality.metric,
        "quality": result.quality.value,
        "difference": result.quality.difference,
        "speedup": result.speedup.value,
        "speedup_low": result.speedup.low,
        "speedup_high": result.speedup.high,
        "latency_s": result.latency_s.mean,
    }
