"""One run or a sweep: refuse what cannot work before anything is written, measure, report, exit
with a status code.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from threading import current_thread, main_thread
from typing import Any, TypeVar

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from bild_lab.errors import UserError
from bild_lab.lab.config.cli import (
    POINTS_KEPT,
    Stopped,
    console,
    escape,
    plain_message,
    refuse,
    stages,
)
from bild_lab.lab.config.groups import (
    ReportSpec,
    changed_knobs,
    compose_config,
    knob_values,
    plain_values,
    policy_label,
    typed,
    without_hydra,
)
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.decoder import METHOD
from bild_lab.lab.point.environment import BUSY_REMEDY
from bild_lab.lab.point.history import requests_of
from bild_lab.lab.point.identity import Specs, sweep_folder
from bild_lab.lab.point.load import build, load_model, replays, resolve_auto, runs_in_graphs
from bild_lab.lab.point.prepare import Point, prepare, require_decoder
from bild_lab.lab.schema.formatting import knob_label, percent, short_name, times
from bild_lab.lab.schema.result import Failure, FailureCause, Result
from bild_lab.lab.store.hashing import content_hash
from bild_lab.lab.store.progress import PointProgress, Progress, record_command, roughly
from bild_lab.lab.store.records import Sweep

T = TypeVar("T")

FAILED_POINTS = 1
BASIC = ".BasicLauncher"  # measures in this process
SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOST_CHECKED = 64  # points of a sweep that are all checked before it starts; of a larger one some
# change no data
SLIGHT = ("policy.", "runtime.seed=", "decoding.temperature=", "decoding.top_k=", "decoding.top_p=")
# change no prompt
PROMPTLESS = re.compile(r"(policy|runtime|measure|report|logger)\.|(name|resume|logger|measure)=")
PLAIN_KEY = re.compile(r"(?!hydra\.)\w+(\.\w+)+=")  # of an override that only sets a value
NO_GRAPHS = "runtime.compile=false"
# a report between points comes so seldom, and takes so much of the time at most
LIVE_S, LIVE_SHARE = 30.0, 0.02
progress = Progress()  # of this process's command


def measure_point(cfg: DictConfig) -> float:
    """The task function: measure one configuration, or reuse its finished result.

    Returns the speedup. A point that fails is recorded and does not end the sweep. A signal does.
    """
    begun_s, sweep = time.perf_counter(), Sweep(sweep_folder(cfg))
    result, measured = None, False
    try:
        point = prepare(cfg)
        result = sweep.newest(point.id) if cfg.resume else None
        if HydraConfig.get().mode == RunMode.RUN:
            record_command(sweep.folder)
        if result is None:
            measured = True
            # which has the imports
            first = _place() == 1 and HydraConfig.get().launcher._target_.endswith(BASIC)
            result = _measure(
                point, sweep, time.perf_counter() - (stages.began_s if first else begun_s)
            )
        else:
            console.print(f"[dim]{escape(_title(point))}: finished before[/dim]")
        sweep.forget_failure(failure_hash(cfg))
        _log(cfg, sweep, result)
    except (
        Exception
    ) as error:  # any error of one point: the others still run, and the exit code shows it
        _record_failure(cfg, sweep, error)
        if not isinstance(error, UserError):
            # memory may have run out; the next point loads its models again
            load_model.cache_clear()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    progress.advance(time.perf_counter() - begun_s if measured and result is not None else None)
    return math.nan if result is None or result.speedup.value is None else result.speedup.value


def _measure(point: Point, sweep: Sweep, setup_s: float) -> Result:
    """Measure a point, showing how far it is."""
    place, title = _place(), _title(point)
    bars = PointProgress(
        title, len(point.examples), place, progress.total or place, progress.typical_s
    )
    with bars as shown:
        result = run_point(point, sweep, setup_s=setup_s, advance=shown.advance, stage=shown.stage)
    speedup, others = result.speedup.value, result.further_qualities.values()
    faster = "" if speedup is None else f", {times(speedup)}{took(result, point.measure.precision)}"
    point_s, later = result.total_s - result.seconds["setup"], (progress.total or 0) - place
    left = "" if later <= 0 else f"; {roughly(later * (progress.typical_s or point_s))} left"
    scored = ", ".join(f"{one.metric} {one.value:.2f}" for one in (result.quality, *others))
    console.print(f"{escape(title)}: {escape(scored)}{faster}{left}")
    if result.doubt:
        console.print(f"[bold red]{escape(result.doubt)}[/bold red]: its quality says little")
    if result.environment.busy:
        busy = result.environment.busy_elsewhere_percent
        console.print(
            f"[bold red]{busy:.0f} % of the machine was busy with something else[/bold red]:"
            f" {BUSY_REMEDY}"
        )
    return result


def took(result: Result, precision: float | None) -> str:
    """What it took to know the speedup to `measure.precision`, and the wait for other programs."""
    noise, waited_s = result.speedup.noise, result.environment.waited_s
    waited = "" if waited_s is None else f", {roughly(waited_s)} waited for other programs"
    if precision is None or noise is None:
        return waited
    wide = "" if noise <= precision else ", not the precision that was asked for"
    return f" ± {percent(noise, 1)} by the clock, {result.speedup.repeats} repeats{wide}{waited}"


def _place() -> int:
    """The point's place in the sweep, from 1."""
    return (HydraConfig.get().job.get("num") or 0) + 1


def _title(point: Point) -> str:
    return title_of(point, _place(), progress.total or _place(), HydraConfig.get().overrides.task)


def title_of(point: Point, place: int, points: int, overrides: Sequence[str]) -> str:
    """The point's place, policy and drafter, and the knobs that were given or differ from the
    policy's file.
    """
    given = {word.partition("=")[0].lstrip("+") for word in overrides}
    changed = changed_knobs(point.policy, point.knobs)
    knobs = [knob for knob in point.knobs if f"policy.{knob}" in given or knob in changed]
    drafters = [
        f"drafter {short_name(model.checkpoint.path)}"
        for model in point.decoders[METHOD].models[1:]
    ]
    number = f"{place}/{points} " if points > 1 else ""
    return number + ", ".join(
        filter(None, [point.policy, *drafters, knob_label(point, knobs, " ")])
    )


def _log(cfg: DictConfig, sweep: Sweep, result: Result) -> None:
    """Log a stored point unless it was logged.

    If that fails, the point is kept, and the exit code shows it.
    """
    try:
        logger(cfg).log_point(result, plain_values(cfg))
    except Exception as error:  # whatever a logging service raises
        _record_failure(cfg, sweep, error, "not logged")


def logger(cfg: DictConfig) -> Any:
    """The run's logger.

    The process has only one, as it remembers whether its server can be reached.
    """
    return _logger(OmegaConf.to_yaml(cfg.logger, resolve=True))


@lru_cache(maxsize=1)
def _logger(config_yaml: str) -> Any:
    return build(OmegaConf.to_container(OmegaConf.create(config_yaml)), {})


def failure_hash(cfg: DictConfig) -> str:
    """The name that a failed point is stored under: a hash of its configuration, as nothing else
    may be known.
    """
    return content_hash({"failed": OmegaConf.to_yaml(cfg, resolve=False)})


def _record_failure(cfg: DictConfig, sweep: Sweep, error: Exception, what: str = "failed") -> None:
    """Store and print what went wrong.

    Ends the process if it cannot be stored: no result could be either.
    """
    message = plain_message(error) if what == "failed" else f"{what}: {plain_message(error)}"
    cause = FailureCause(type(error).__name__, message, "".join(traceback.format_exception(error)))
    knobs = knob_values(OmegaConf.to_container(cfg.policy))
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    failure = Failure(failure_hash(cfg), policy_label(cfg.policy), knobs, cause, now)
    console.print(
        f"[bold red]{what}[/bold red] {failure.policy} {knobs}: {escape(plain_message(error))}"
    )
    try:
        folder = sweep.write_failure(failure, OmegaConf.to_yaml(cfg, resolve=False))
    except OSError as fault:
        console.print(
            f"[bold red]nothing can be stored in {escape(str(sweep.folder))}[/bold red]: {fault}"
        )
        sys.exit(FAILED_POINTS)
    if not isinstance(error, UserError):
        console.print(f"[dim]traceback in {escape(str(folder / 'failed.json'))}[/dim]")


class SweepCallback(Callback):
    """What Hydra calls around the points of a command, in the process that the user started.

    It refuses a command with a point that cannot be measured, before any file is written, and
    reports at the end, however the command ends. report: writes the sweep's table, figure and
    report. live: writes the report between points, never while one is timed.
    """

    def __init__(self, report: Callable[[Sweep], None], live: Callable[[Sweep, str], None]) -> None:
        self._report, self._live = report, live
        self._failed_before: set[tuple[str, str]] = set()
        self._handlers: dict[int, Any] = {}
        self._going = False
        self._due_s = -math.inf

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _check(config)
        self._start(config)
        progress.begin(None)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check the points, and decide what they share, before the first is measured."""
        jobs = _refusing(lambda: values_of(config))
        total = None if jobs is None else math.prod(map(len, jobs))
        if total == 0:
            refuse(UserError("the sweep has no points: one of its lists of values is empty"))
        if jobs is not None:
            points = _check_points(jobs, config.hydra.job.config_name)
            _refusing(lambda: require_one_folder(config, points))
            _share_a_regime(config, points)
        self._start(config)
        record_command(sweep_folder(config))
        progress.begin(total)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Report between points; drop the finished job's configurations, which Hydra would keep
        until the end.
        """
        job_return.cfg = job_return.hydra_cfg = None
        began_s = time.perf_counter()
        if (
            began_s >= self._due_s
            and progress.total is not None
            and progress.done != progress.total
        ):
            self._live(Sweep(sweep_folder(config)), str(progress))
            ended_s = time.perf_counter()
            self._due_s = ended_s + max(LIVE_S, (ended_s - began_s) / LIVE_SHARE)

    def on_run_end(self, config: DictConfig, **_: Any) -> None:
        """Finish what began and was not stopped:

        Hydra 1.4 comes here after a refusal and a signal, too.
        """
        if self._going:
            self._finish(config)

    on_multirun_end = on_run_end

    def _start(self, config: DictConfig) -> None:
        """Take the stop signals, and note the failures of earlier commands."""
        self._failed_before = _failures(Sweep(sweep_folder(config)))
        if current_thread() is main_thread():  # Python allows handlers there alone
            self._handlers = {
                number: signal.signal(number, self._stop(config)) for number in SIGNALS
            }
        self._going = True

    def _stop(self, config: DictConfig) -> Callable[[int, Any], None]:
        """The handler of a stop signal: the point that is measured is dropped, finished ones are
        reported.
        """

        def stop(number: int, _: Any) -> None:
            self._restore()
            raise Stopped(128 + number, lambda code: self._finish(config, code))

        return stop

    def _restore(self) -> None:
        """From now on a signal ends the process."""
        self._going = False
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _finish(self, config: DictConfig, code: int = 0) -> None:
        """Write the table, the figure and the report.

        Exits non-zero if a point failed or the command was stopped.
        """
        self._restore()
        sweep = Sweep(sweep_folder(config))
        if code:
            console.print(f"[bold]stopped[/bold]; {POINTS_KEPT}")
        try:
            stages.enter("writing the report")
            self._report(sweep)
        except Exception as error:  # Hydra turns exceptions of callbacks into warnings
            stages.leave()
            # of bad input or a full disk, the message says all
            if not isinstance(error, UserError | OSError):
                traceback.print_exc()
            console.print(
                f"[bold red]the report could not be written[/bold red]: {escape(str(error))}; "
                "finished points are kept, and the same command reports them"
            )
            sys.exit(code or FAILED_POINTS)
        logged = _log_sweep(config, sweep, stopped=bool(code))
        if failed := _failures(sweep) - self._failed_before:
            console.print(f"[bold red]{len(failed)} point(s) failed[/bold red]")
        if code or failed or not logged:
            sys.exit(code or FAILED_POINTS)


def _failures(sweep: Sweep) -> set[tuple[str, str]]:
    return {(one.point, one.stored_at) for one in sweep.failures() if one.stored_at}


def values_of(config: DictConfig) -> list[list[str]] | None:
    """The overrides of a sweep, each with all its values; None for a sweeper that decides on the
    way.
    """
    if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
        return None
    given = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    # of a key that is given twice, the last counts
    last = {
        one.get_key_element(): one
        for one in parser.parse_overrides([*given, *config.hydra.overrides.task])
    }
    return [alternatives(one) for one in last.values()]


def alternatives(one: Override) -> list[str]:
    """An override with each of its values: those that a sweep takes one after the other.

    Raises UserError for values that cannot be listed.
    """
    if not one.is_sweep_override():
        return [one.input_line]
    try:
        values = list(one.sweep_string_iterator())
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(
            f"the values of {one.input_line} cannot be listed; a sweep takes values with commas,"
            " choice(…), glob(…) or range(START,STOP,STEP), one of them for a key"
        ) from error
    return [f"{one.get_key_element()}={value}" for value in values]


def _check_points(jobs: list[list[str]], config_name: str) -> list[DictConfig]:
    """Exit with a message unless the points of a sweep can be measured, as far as that is known
    without weights.

    Returns the configurations that were looked at: of all points, or in a large sweep those of
    `checked_points`.
    """
    configs: list[DictConfig] = []
    # of points that were checked as a whole, by all but slight overrides
    known: dict[tuple[str, ...], Specs] = {}
    compose = Composer(config_name)
    for words in checked_points(jobs):
        changed = [word for word, several in zip(words, jobs, strict=True) if word != several[0]]
        try:
            config = compose(words)
        except (UserError, HydraException, OmegaConfBaseException) as error:
            refuse(_of_point(changed, error))
        beside = tuple(word for word in words if not word.startswith(SLIGHT))
        if beside in known and not replays(config.policy):
            _refusing(partial(require_decoder, config, known[beside]), changed)
        else:
            known[beside] = _check(config, changed).specs
        configs.append(config)
    return configs


def checked_points(jobs: list[list[str]]) -> list[tuple[str, ...]]:
    """The points of a sweep to be checked before it starts, the first one first.

    All of them if they are few. Of many, each value of each key beside the first values of the
    others, and all combinations of the groups' files.
    """
    first = tuple(several[0] for several in jobs)
    if math.prod(map(len, jobs)) <= MOST_CHECKED:
        return list(itertools.product(*jobs))
    groups = [
        several if "." not in several[0].partition("=")[0] else several[:1] for several in jobs
    ]
    single = [
        (*first[:place], other, *first[place + 1 :])
        for place, several in enumerate(jobs)
        for other in several[1:]
    ]
    return list(
        dict.fromkeys([first, *single, *itertools.islice(itertools.product(*groups), MOST_CHECKED)])
    )


class Composer:
    """Composes points of one sweep.

    Those with the same groups share a composition, which takes a fifth of a second.
    """

    def __init__(self, config_name: str) -> None:
        self._config_name = config_name
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, words: Sequence[str]) -> DictConfig:
        """A point's configuration. words: its overrides."""
        keys = tuple(word for word in words if PLAIN_KEY.match(word))
        shared = tuple(word for word in words if word not in keys)
        if shared not in self._composed:
            self._composed[shared] = compose_config([*shared, *keys], self._config_name)
            return self._composed[shared]
        config = copy.deepcopy(self._composed[shared])
        for override in OverridesParser.create().parse_overrides(list(keys)):
            OmegaConf.update(config, override.get_key_element(), override.value(), merge=True)
        return config


def _of_point(changed: Sequence[str], error: BaseException) -> BaseException:
    """The error with what tells a point from the sweep's first one."""
    return UserError(f"{' '.join(changed)}: {plain_message(error)}") if changed else error


def _check(config: DictConfig, changed: Sequence[str] = ()) -> Point:
    """Exit with a message unless the point can be measured. changed: its overrides that the first
    point has not.
    """

    def look() -> Point:
        Sweep(sweep_folder(config)).all_results()  # raises for results of a newer version
        logger(config)
        typed(ReportSpec, config.report, "report")
        point = prepare(without_hydra(config))
        # the prompts are those of the first point
        unchanged = changed and all(map(PROMPTLESS.match, changed))
        if not unchanged or replays(config.policy):  # a file that answers them may be another one
            # raises for what does not fit
            requests_of(point, [one for one in point.examples if one.continues is None])
        return point

    return _refusing(look, changed)


def _refusing(look: Callable[[], T], changed: Sequence[str] = ()) -> T:
    """What this returns. Exits with a message if it finds that a point cannot be measured."""
    stages.enter("checking texts and checkpoints")
    try:
        return look()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        refuse(_of_point(changed, error))
    except Exception:  # a bug of ours: Hydra would only warn and continue
        stages.leave()
        traceback.print_exc()
        sys.exit(FAILED_POINTS)


def require_one_folder(config: DictConfig, points: Sequence[DictConfig]) -> None:
    """Raise UserError for points of a sweep whose results would not be in the folder that it
    reports.
    """
    folder = sweep_folder(config)
    for point in points:
        if sweep_folder(point) != folder:
            raise UserError(
                f"all points of a sweep go to one folder and one report, got name={point.name}"
                f" beside {folder}; give one name=NAME, or a command for each"
            )


def _share_a_regime(config: DictConfig, points: Sequence[DictConfig]) -> None:
    """Run all points of a sweep without CUDA graphs if one of its policies has to, by an override
    of every point.

    Else those with graphs and those without would be two planes that cannot be compared. Where
    `runtime.compile` is given or swept over, it stays.
    """
    if any(str(one.runtime.compile) != "auto" for one in points):
        return
    without = list(
        dict.fromkeys(one.policy.name for one in points if not runs_in_graphs(one.policy))
    )
    if not without or not any(_decodes_in_graphs(point) for point in points):
        return
    with read_write(config.hydra.overrides):
        config.hydra.overrides.task.append(NO_GRAPHS)
    console.print(
        f"CUDA graphs are off for all points of this sweep, as {', '.join(without)} runs without: "
        f"speeds are compared in one regime ({NO_GRAPHS})"
    )


def _decodes_in_graphs(config: DictConfig) -> bool:
    specs = Specs.of(config)
    return resolve_auto(specs.runtime, config.policy, specs.pair).compile == "graphs"


def _log_sweep(cfg: DictConfig, sweep: Sweep, stopped: bool) -> bool:
    """Log the sweep as a whole unless it was stopped, and say where its runs are.

    False if that failed.
    """
    try:
        if not stopped:
            logger(cfg).log_sweep(sweep)
        for line in logger(cfg).closing():
            console.print(escape(line))
    except Exception as error:  # whatever a logging service raises
        console.print(
            f"[bold red]the sweep was not logged[/bold red]: {escape(plain_message(error))}"
        )
        return False
    return True
