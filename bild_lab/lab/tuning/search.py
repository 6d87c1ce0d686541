"""A search of knobs on validation with Optuna; the chosen points are then measured on test (BiLD §7.1.2)."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError, require_whole
from bild_lab.files import write_atomically
from bild_lab.lab.analysis.pareto import best_at_loss
from bild_lab.lab.config import compose_config
from bild_lab.lab.data.local_files import canonical_split
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.point import prepare, sweep_folder
from bild_lab.lab.results.groups import by_setting
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import Result
from bild_lab.lab.tuning.space import Space, Values

STUDY, CHOSEN = "study.sqlite", "tuned.json"
STARTUP_TRIALS = 10  # random trials, before Optuna's model suggests points

Measure = Callable[[DictConfig], Any]


@dataclass(frozen=True)
class TuneSpec:
    """How to search: `conf/tune.yaml`. loss: points of quality that may be lost; None searches the whole front."""

    trials: int
    loss: float | None
    validation: str
    test: str
    space: Sequence[str]

    def __post_init__(self) -> None:
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
    """

    spec: TuneSpec
    space: Space
    overrides: tuple[str, ...]
    measure: Measure

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

    @cached_property
    def key(self) -> str:
        """A hash of everything that must be unchanged to continue a study: a point's inputs, the lists and the loss."""
        point = prepare(self.config(self.space.corners()[0], self.spec.validation)).id
        return content_hash({"point": point, "space": self.space.lists, "loss": self.spec.loss})

    @cached_property
    def sweep(self) -> Sweep:
        return Sweep(sweep_folder(self.config(self.space.corners()[0], self.spec.validation)))

    def result(self, values: Values, split: str) -> Result | None:
        """Measure a point unless it is finished, and return its result; None if it failed, which is recorded."""
        self.measure(self.config(values, split))
        return self.finished(values, split)

    def finished(self, values: Values, split: str) -> Result | None:
        """A point's newest result in the sweep's folder."""
        return self.sweep.newest(prepare(self.config(values, split)).id)

    def objectives(self, result: Result) -> list[float]:
        """The values for Optuna: quality and latency. With a loss: the latency, made longer if the loss is exceeded.

        The latency is relative to the baseline's. Without a baseline it is in seconds.
        """
        speedup, quality = result.speedup.value, result.quality
        latency = result.latency_s.mean if speedup is None else 1 / speedup
        if self.spec.loss is None:
            return [quality.value, latency]
        excess = quality.baseline - quality.value - self.spec.loss
        return [latency if excess <= 0 else max(latency, 1.0) + excess]

    def chosen(self, results: list[Result]) -> list[Result]:
        """The undominated points, fastest first. With a loss: the fastest point within it, if there is one."""
        if self.spec.loss is not None:
            best = best_at_loss(results, self.spec.loss)
            return [] if best is None else [best]
        return [result for group in by_setting(results) for result in group.front()]


@dataclass(frozen=True)
class Tuned:
    """What was chosen on validation, with its result there and on test; None if the test failed."""

    overrides: list[str]
    validation: Result
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

    def search(self) -> dict[Values, Result]:
        """Measure until there are enough trials. Returns the results of all trials, with those of earlier processes."""
        tuning, space = self._tuning, self._tuning.space
        failed: dict[tuple[int, ...], None] = {}  # in this process; the next process tries them again
        while len(seen := {**self.finished_trials(), **failed}) < min(tuning.spec.trials, space.size):
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
            values = next(values for values, one in found.items() if one is result)
            tuned.append(Tuned(list(values), result, tuning.result(values, tuning.spec.test)))
        write_tuned(tuning.sweep.folder / CHOSEN, tuned)
    return tuned


def write_tuned(file: Path, tuned: list[Tuned]) -> None:
    """Store the chosen points with their main numbers on validation and on test."""
    rows = [
        {"overrides": one.overrides, "validation": key_numbers(one.validation), "test": key_numbers(one.test)}
        for one in tuned
    ]
    write_atomically(file, (json.dumps(rows, indent=2) + "\n").encode())


def key_numbers(result: Result | None) -> dict[str, Any] | None:
    """A result's quality and speed, and the name of its point."""
    if result is None:
        return None
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
