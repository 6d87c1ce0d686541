"""One run or a sweep: check before anything is written, measure, report, and exit with a status code."""

from __future__ import annotations

import gc
import itertools
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError
from bild_lab.lab.build import build, policy_label
from bild_lab.lab.cli import console, escape, plain_message, refuse, stages
from bild_lab.lab.config import knob_values
from bild_lab.lab.formatting import times
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.load import load_model
from bild_lab.lab.point import Point, prepare, sweep_folder
from bild_lab.lab.point_progress import PointProgress, remaining, title_of
from bild_lab.lab.results.commands import record_command
from bild_lab.lab.results.course import RunningCourse
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.runner import run_point
from bild_lab.lab.schema.result import Failure, FailureCause, Result
from bild_lab.lab.stop_signals import Stopped, StopSignals
from bild_lab.lab.torchrun import require_basic_launcher

FAILED_POINTS = 1
MOST_CHECKED_BEFORE = 64  # points prepared before a sweep, until one can run


@dataclass
class Run:
    """The state of the run in this process. Only the process that the user started has jobs, report and live.

    jobs: every job's configuration. report: writes the sweep's table, figure and report. live: writes the report
    between points. failed: points that failed in this process, stored or not. measured_s: seconds of each point that
    it measured. ended_s: when its last point ended, on the clock of `process_age_s`. course: how far the run is, for
    who looks from outside. news: whether a point was stored since `live` was last called.
    """

    jobs: list[DictConfig] = field(default_factory=list)
    report: Callable[[Sweep], None] = lambda sweep: None
    live: Callable[[Sweep, str], None] = lambda sweep, progress: None
    failed: set[str] = field(default_factory=set)
    measured_s: list[float] = field(default_factory=list)
    news: bool = False
    ended_s: float = 0.0
    course: RunningCourse | None = None


_run = Run()
_signals = StopSignals()
_imported_s = time.perf_counter()
_age_at_import_s = max(0.0, time.time() - psutil.Process().create_time())


def measure_point(cfg: DictConfig) -> float:
    """The task function: measure one configuration, or reuse its finished result.

    Returns the speedup. A point that fails is recorded and does not end the sweep. A signal does.
    """
    try:
        with _signals.measuring():
            if _run.course is None and _run.jobs and launched().first:  # a single point, or one of a search
                _begin(sweep_folder(cfg), None)
            _report_between(cfg)
            speedup, crashed = _measure_or_reuse(cfg)
        if crashed and launched().count > 1:  # the other processes may wait for this one inside a forward
            _finish(cfg, FAILED_POINTS)
        if crashed:
            _release_models()
        if _run.course is not None:
            _run.course.advance()
        return float("nan") if speedup is None else speedup
    except Stopped as stop:
        _finish(cfg, stop.code)
    finally:
        _run.ended_s = process_age_s()
    raise AssertionError("unreachable: a stopped run exits")


def _begin(folder: Path, total: int | None, counts: bool = True) -> None:
    """What a run writes before its first point: its command line, and how far it is. A search, which checks more than
    `SweepCallback` does, has its turn with its first point.
    """
    record_command(folder)
    _run.course = RunningCourse(folder, total, counts)


def _report_between(cfg: DictConfig) -> None:
    """Write the report of the points so far. What it takes counts as setup of the next point."""
    if _run.news and _run.course is not None:
        _run.news = False
        _run.live(Sweep(sweep_folder(cfg)), _run.course.told)


def _measure_or_reuse(cfg: DictConfig) -> tuple[float | None, bool]:
    """The point's speedup, and whether an error may have left a device's memory full."""
    sweep, ranks = Sweep(sweep_folder(cfg)), launched()
    if _run.jobs:  # not one of several workers
        stages.enter("checking the point")
    try:
        point = ranks.run(lambda: _prepare_everywhere(cfg))
        result = ranks.broadcast(sweep.newest(point.id) if cfg.resume else None)
        failure = failure_hash(point.config_yaml)
        if result is not None:
            console.print(f"[dim]{escape(_title(point))}: finished before[/dim]")
        else:
            result = _measure_with_progress(point, sweep)
            _run.news = True
        if ranks.first:
            _log_point(cfg, sweep, result)
        if ranks.first and failure not in _run.failed:
            sweep.forget_failure(failure)
        return result.speedup.value, False
    except Exception as error:  # any error of one point: the others still run, and the exit code shows it
        _record_failure(cfg, sweep, error)
        return None, not isinstance(error, UserError)


class SweepCallback(Callback):
    """Refuses a run that cannot work before any file is written, and reports when all points are done.

    report: writes the sweep's table, figure and report. live: writes the report between points.
    """

    def __init__(self, report: Callable[[Sweep], None], live: Callable[[Sweep, str], None]) -> None:
        self._report, self._live = report, live

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self._start(config, [config])

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self._start(config, _job_configs(config, _job_overrides(config)))

    def on_run_end(self, config: DictConfig, **_: Any) -> None:
        _finish(config)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        _finish(config)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Drop the two configurations of a finished job: Hydra would keep those of all jobs until the sweep ends."""
        job_return.cfg = job_return.hydra_cfg = None

    def _start(self, config: DictConfig, jobs: list[DictConfig]) -> None:
        _run.jobs, _run.failed, _run.measured_s, _run.course, _run.news = jobs, set(), [], None, False
        _run.report, _run.live = self._report, self._live
        stages.enter(f"checking {len(jobs)} point{'s' * (len(jobs) != 1)}")
        _check(jobs[:MOST_CHECKED_BEFORE])
        if launched().first and config.hydra.mode == RunMode.MULTIRUN:
            measures_here = config.hydra.launcher._target_.endswith(".BasicLauncher")
            _begin(sweep_folder(config), len(jobs), measures_here)
        _signals.install(lambda code: _finish(config, code))


def _check(configs: list[DictConfig]) -> None:
    """Exit with the first error unless one of the configurations can run."""
    complaint: BaseException = UserError("the sweep has no points: one of its lists of values is empty")
    for number, config in enumerate(configs):
        try:
            require_basic_launcher(config.hydra.launcher._target_)
            logger(config)
            Sweep(sweep_folder(config)).all_results()  # raises for results of a newer version
            _prepare_everywhere(config)  # last: it may train the toy pair
            return
        except (UserError, HydraException, OmegaConfBaseException) as error:
            complaint = error if number == 0 else complaint
        except Exception:  # a bug of ours: Hydra would only warn and continue
            stages.leave()
            traceback.print_exc()
            sys.exit(FAILED_POINTS)
    refuse(complaint)


def _prepare_everywhere(cfg: DictConfig) -> Point:
    """Prepare a point. Raises UserError if torchrun started several processes and its target does not use them."""
    point = prepare(cfg)
    if point.vanilla.ranks != launched():
        raise UserError(
            f"{launched().count} processes would measure the same point and write it to {sweep_folder(cfg)}; "
            "run without torchrun, or set runtime.tensor_parallel=true"
        )
    return point


def _job_overrides(config: DictConfig) -> list[list[str]]:
    """The overrides of every job that the basic sweeper will launch."""
    given = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*given, *config.hydra.overrides.task])
    return list(itertools.chain(*BasicSweeper.split_arguments(overrides, None)))


def _job_configs(config: DictConfig, jobs: list[list[str]]) -> list[DictConfig]:
    """Every job's configuration. Exits if one cannot be composed."""
    loader = GlobalHydra.instance().config_loader()
    try:
        return [loader.load_sweep_config(config, job) for job in jobs]
    except (HydraException, OmegaConfBaseException) as error:
        refuse(error)


@lru_cache(maxsize=1)
def _logger(config_yaml: str) -> Any:
    return build(OmegaConf.to_container(OmegaConf.create(config_yaml)), {})


def logger(cfg: DictConfig) -> Any:
    """The run's logger. The process has only one, as it remembers whether its server can be reached."""
    return _logger(OmegaConf.to_yaml(cfg.logger, resolve=True))


def _measure_with_progress(point: Point, sweep: Sweep) -> Result:
    place, points = _place()
    title, measured_s = _title(point), _run.measured_s
    typical_s = sum(measured_s) / len(measured_s) if measured_s else None
    with PointProgress(title, len(point.examples), place, points, typical_s) as shown:
        result = run_point(point, sweep, since_last_point_s(), shown.advance, shown.stage)
    measured_s.append(result.seconds["total"] - result.seconds["setup"])  # the first point's has the imports
    speedup, quality = result.speedup.value, result.quality
    faster = "" if speedup is None else f", {times(speedup)}"
    left = "" if place >= points else f"; {remaining((points - place) * sum(measured_s) / len(measured_s))}"
    scored = ", ".join(f"{one.metric} {one.value:.2f}" for one in (quality, *result.further_qualities.values()))
    console.print(f"{escape(title)}: {escape(scored)}{faster}{left}")
    if result.environment.busy:
        busy = result.environment.busy_elsewhere_percent
        console.print(f"[bold red]{busy:.0f} % of the machine was busy with something else[/bold red]: timings suffer")
    return result


def since_last_point_s() -> float:
    """Seconds since the last point ended, or since the process started: imports, configuration, checks, data."""
    return process_age_s() - _run.ended_s


def process_age_s() -> float:
    """Seconds since the process started, on a clock that is never set back."""
    return _age_at_import_s + time.perf_counter() - _imported_s


def _place() -> tuple[int, int]:
    """The point's place in the sweep, from 1, and how many there are; a launcher's worker knows its place alone."""
    number = HydraConfig.get().job.get("num") if HydraConfig.get().mode == RunMode.MULTIRUN else None
    return (1, 1) if number is None else (number + 1, len(_run.jobs) or number + 1)


def _title(point: Point) -> str:
    return title_of(point, *_place(), HydraConfig.get().overrides.task)


def _log_point(cfg: DictConfig, sweep: Sweep, result: Result) -> None:
    """Log a stored point unless it was logged. If that fails, the point is kept, and the exit code shows it."""
    try:
        logger(cfg).log_point(result, OmegaConf.to_container(cfg, resolve=True))
    except Exception as error:  # whatever a logging service raises
        _record_failure(cfg, sweep, error, "not logged")


def _logged_sweep(cfg: DictConfig, sweep: Sweep, stopped: bool) -> bool:
    """Log the sweep as a whole unless it was stopped, and say where its runs are. False if that failed."""
    try:
        if not stopped:
            logger(cfg).log_sweep(sweep)
        for line in logger(cfg).closing():
            console.print(escape(line))
    except Exception as error:  # whatever a logging service raises
        console.print(f"[bold red]the sweep was not logged[/bold red]: {escape(plain_message(error))}")
        return False
    return True


def _record_failure(cfg: DictConfig, sweep: Sweep, error: Exception, what: str = "failed") -> None:
    """Store and print what went wrong. If a launcher's worker cannot store it, the launcher gets the error."""
    config_yaml = OmegaConf.to_yaml(cfg, resolve=False)
    message = plain_message(error) if what == "failed" else f"{what}: {plain_message(error)}"
    cause = FailureCause(type(error).__name__, message, "".join(traceback.format_exception(error)))
    knobs = knob_values(OmegaConf.to_container(cfg.policy))
    failure = Failure(failure_hash(config_yaml), policy_label(cfg.policy), knobs, cause)
    try:
        folder = sweep.write_failure(failure, config_yaml) if launched().first else sweep.folder
    except OSError as fault:
        if not _run.jobs:
            raise
        folder = Path(f"not written ({fault})")
    _run.failed.add(failure.point)
    _run.news = True
    console.print(f"[bold red]{what}[/bold red] {failure.policy} {knobs}: {escape(plain_message(error))}")
    if not isinstance(error, UserError):
        trace = f"traceback in {folder / 'failed.json'}" if launched().first else cause.traceback
        console.print(f"[dim]{escape(trace)}[/dim]")


def failure_hash(config_yaml: str) -> str:
    """The name that a failed point is stored under: a hash of its configuration, as nothing else may be known."""
    return content_hash({"failed": config_yaml})


def _release_models() -> None:
    """Free the process's models, as memory may have run out. The next point loads them again."""
    load_model.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _finish(config: DictConfig, code: int = 0) -> None:
    """Write the table, the figure and the report. Exit non-zero if a point failed or the run was stopped."""
    _signals.restore()
    sweep = Sweep(sweep_folder(config))
    if _run.course is not None:
        _run.course.stop(ended=code == 0)
        _run.course = None
    if code:
        console.print("[bold]stopped[/bold]; finished points are kept, the same command runs the rest")
    try:
        if launched().first:
            stages.enter("writing the report")
            _run.report(sweep)
    except Exception as error:  # Hydra turns exceptions of callbacks into warnings
        stages.leave()
        traceback.print_exc()
        console.print(f"[bold red]the report could not be written[/bold red]: {escape(str(error))}")
        sys.exit(code or FAILED_POINTS)
    if launched().first and not _logged_sweep(config, sweep, stopped=bool(code)):
        sys.exit(code or FAILED_POINTS)
    if failed := _run.failed | _failed_elsewhere(sweep):
        console.print(f"[bold red]{len(failed)} point(s) failed[/bold red]")
        sys.exit(code or FAILED_POINTS)
    if code:
        sys.exit(code)


def _failed_elsewhere(sweep: Sweep) -> set[str]:
    """The jobs of this run that a launcher's workers stored as failed."""
    stored = {failure.point for failure in sweep.failures()} - _run.failed
    if not stored:
        return set()
    jobs = (OmegaConf.masked_copy(job, [key for key in job if key != "hydra"]) for job in _run.jobs)
    return stored & {failure_hash(OmegaConf.to_yaml(job, resolve=False)) for job in jobs}
