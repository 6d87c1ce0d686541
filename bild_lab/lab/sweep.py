"""One run or a sweep: check it, measure its points, report, exit with a status code."""

from __future__ import annotations

import gc
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from threading import current_thread, main_thread
from typing import Any, NoReturn

import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.markup import escape

from bild_lab.errors import UserError, raised_at
from bild_lab.lab.config.command_line import key_of
from bild_lab.lab.config.compose import keep_search_path, knob_values, override_words, plain_values
from bild_lab.lab.config.console import console, status_line
from bild_lab.lab.config.entrypoint import (
    FAILED_POINTS,
    POINTS_KEPT,
    Stopped,
    plain_message,
    refuse,
    require_no_launcher,
    require_same_folder,
)
from bild_lab.lab.config.policies import changed_knobs, policy_label
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.decoder import METHOD
from bild_lab.lab.point.environment import BUSY_REMEDY
from bild_lab.lab.point.identity import sweep_folder
from bild_lab.lab.point.prepare import Point, prepare
from bild_lab.lab.point.read_model import load_model
from bild_lab.lab.preflight import (
    check_point,
    check_points,
    logger,
    refusing_points,
    require_gpus,
    require_hydras_folder,
    require_one_folder,
    require_own_values,
    share_graph_regime,
    swept_values,
)
from bild_lab.lab.schema.formatting import knob_label, percent, short_name, times
from bild_lab.lab.schema.result import Failure, FailureCause, Result
from bild_lab.lab.store.commands import record_command
from bild_lab.lab.store.hashing import content_hash
from bild_lab.lab.store.progress import PointProgress, begin_progress, command_progress, roughly
from bild_lab.lab.store.records import Sweep

# how the targets of Hydra's launchers end
IN_PROCESS_LAUNCHER, SLURM_LAUNCHER = ".BasicLauncher", ".SlurmLauncher"
LOCAL_JOB = "submitit.local._local"  # the module that a job of the launcher submitit_local runs
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LIVE_S = 30.0  # the least time between two reports between points
LIVE_SHARE = 0.02  # the largest share of the time that these reports take
# keys that say what becomes of a point, not which it is
ABOUT_THE_COMMAND = ("resume", "logger", "report")


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
            # the setup of the first point in this process includes the imports
            in_process = launched_by(HydraConfig.get(), IN_PROCESS_LAUNCHER)
            setup_from_s = status_line.began_s if _place() == 1 and in_process else begun_s
            result = _measure(point, sweep, time.perf_counter() - setup_from_s)
        else:
            result = sweep.show(result, command_progress().reported)
            console.print(f"[dim]{escape(_title(point))}: finished before[/dim]")
        command_progress().reported.add(point.id)
        sweep.forget_failure(failure_hash(cfg))
        _log(cfg, result)
    except Exception as error:  # the other points still run, and the exit code shows it
        record_failure(cfg, error)
        if not isinstance(error, UserError):
            _free_memory()
    measured_s = time.perf_counter() - begun_s if measured and result is not None else None
    command_progress().advance(measured_s)
    return math.nan if result is None or result.speedup.value is None else result.speedup.value


def _free_memory() -> None:
    """Drop the models, as memory may have run out; the next point loads its own again."""
    load_model.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _measure(point: Point, sweep: Sweep, setup_s: float) -> Result:
    """Measure a point, showing how far it is, and print its numbers."""
    place, title, progress = _place(), _title(point), command_progress()
    bars = PointProgress(
        title, len(point.examples), place, progress.total or place, progress.typical_s
    )
    with bars as shown:
        result = run_point(point, sweep, setup_s=setup_s, advance=shown.advance, stage=shown.stage)
    speedup = ""
    if result.speedup.value is not None:
        noise = describe_timing_noise(result, point.measure.precision)
        speedup = f", {times(result.speedup.value)}{noise}"
    points_left = (progress.total or 0) - place
    time_left = ""
    if points_left > 0:
        point_s = progress.typical_s or result.total_s - result.seconds["setup"]
        time_left = f"; {roughly(points_left * point_s)} left"
    qualities = [result.quality, *result.further_qualities.values()]
    scores = ", ".join(quality.words for quality in qualities)
    console.print(f"{escape(title)}: {escape(scores)}{speedup}{time_left}")
    if result.doubt:
        console.print(f"[bold red]{escape(result.doubt)}[/bold red]: its quality says little")
    if result.environment.busy:
        busy = result.environment.busy_elsewhere_percent
        console.print(
            f"[bold red]{busy:.0f} % of the machine was busy with something else[/bold red]:"
            f" {BUSY_REMEDY}"
        )
    return result


def describe_timing_noise(result: Result, precision: float | None) -> str:
    """What it took to know the speedup to `measure.precision`, and the wait for other programs."""
    noise, waited_s = result.speedup.noise, result.environment.waited_s
    waited = "" if waited_s is None else f", {roughly(waited_s)} waited for other programs"
    if precision is None or noise is None:
        return waited
    too_wide = "" if noise <= precision else ", not the precision that was asked for"
    return (
        f" ± {percent(noise, 1)} by the clock, {result.speedup.repeats} repeats{too_wide}{waited}"
    )


def _place() -> int:
    """The point's place in the sweep, from 1."""
    return (HydraConfig.get().job.get("num") or 0) + 1


def _title(point: Point) -> str:
    return title_of(
        point, _place(), command_progress().total or _place(), override_words(HydraConfig.get())
    )


def title_of(point: Point, place: int, points: int, overrides: Sequence[str]) -> str:
    """The point's place, policy and drafter, and the knobs that were given or differ from the
    policy's file.
    """
    overridden_keys = {key_of(word).lstrip("+") for word in overrides}
    changed = changed_knobs(point.policy, point.knobs)
    knobs = [knob for knob in point.knobs if f"policy.{knob}" in overridden_keys or knob in changed]
    drafters = [
        f"drafter {short_name(model.checkpoint.path)}"
        for model in point.decoders[METHOD].models[1:]
    ]
    number = f"{place}/{points} " if points > 1 else ""
    return number + ", ".join(
        filter(None, [point.policy, *drafters, knob_label(point, knobs, " ")])
    )


def _log(cfg: DictConfig, result: Result) -> None:
    """Log a stored point unless it was logged.

    If that fails, the point is kept, and the exit code shows it.
    """
    try:
        logger(cfg).log_point(result, plain_values(cfg))
    except Exception as error:  # whatever a logging service raises
        record_failure(cfg, error, "not logged")


def failure_hash(cfg: DictConfig) -> str:
    """The name that a failed point is stored under: a hash of its configuration, as nothing else
    may be known. It is forgotten when the point succeeds, also by `resume=false` or without the
    tracker that failed.
    """
    point = OmegaConf.masked_copy(cfg, [key for key in cfg if key not in ABOUT_THE_COMMAND])
    return content_hash({"failed": OmegaConf.to_yaml(point, resolve=False)})


def record_failure(cfg: DictConfig, error: Exception, what: str = "failed") -> None:
    """Store and print what went wrong at a point with this configuration.

    Ends the process if it cannot be stored: no result could be either.
    """
    sweep = Sweep(sweep_folder(cfg))
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
    command_progress().failed.add(failure.point)
    if not isinstance(error, UserError):
        where = f"{raised_at(error)}; traceback in {folder / 'failed.json'}"
        console.print(f"[dim]{escape(where)}[/dim]")


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
        self._error_before: BaseException | None = None  # that a caller of ours handles
        self._due_s = -math.inf

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        keep_search_path(config.hydra.searchpath)
        refusing_points(lambda: require_no_launcher(config.hydra, "leave it out, or add -m"))
        refusing_points(lambda: require_hydras_folder(config, "run"))
        check_point(config)
        self._start(config, None)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check the points, and decide what they share, before the first is measured."""
        keep_search_path(config.hydra.searchpath)
        refusing_points(lambda: require_same_folder(config.hydra))
        refusing_points(lambda: require_hydras_folder(config, "sweep"))
        jobs = refusing_points(lambda: swept_values(config))
        total = None if jobs is None else math.prod(map(len, jobs))
        if total == 0:
            refuse(UserError("the sweep has no points: one of its lists of values is empty"))
        if jobs is not None:
            hydra = config.hydra
            hydra_words = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
            points = check_points(jobs, hydra.job.config_name, hydra_words)
            refusing_points(lambda: require_own_values(config, points))
            refusing_points(lambda: require_one_folder(config, points))
            refusing_points(lambda: require_gpus(config, points))
            share_graph_regime(config, points)
        self._start(config, total)
        if not launched_by(config.hydra, IN_PROCESS_LAUNCHER):
            command_progress().report_lost = partial(self._report_lost, config)
        record_command(sweep_folder(config))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Report between points; drop the finished job's configurations, which Hydra would keep
        until the end.
        """
        job_return.cfg = job_return.hydra_cfg = None
        began_s, progress = time.perf_counter(), command_progress()
        points_left = progress.total is not None and progress.done != progress.total
        if points_left and began_s >= self._due_s:
            self._live(Sweep(sweep_folder(config)), str(progress))
            ended_s = time.perf_counter()
            self._due_s = ended_s + max(LIVE_S, (ended_s - began_s) / LIVE_SHARE)

    def on_run_end(self, config: DictConfig, **_: Any) -> None:
        """Finish what began and was not stopped: Hydra 1.4 comes here after a refusal, a signal and
        an error of a launcher, too, which `report_lost` reports.
        """
        fails = sys.exc_info()[1] is not self._error_before
        if self._going and not (fails and command_progress().report_lost is not None):
            self._finish(config)

    on_multirun_end = on_run_end

    def _start(self, config: DictConfig, total: int | None) -> None:
        """Begin the progress of so many points, take the stop signals, and note the failures of
        earlier commands.
        """
        folder = sweep_folder(config)
        self._error_before = sys.exc_info()[1]
        begin_progress(total, folder)
        self._failed_before = _failures(Sweep(folder))
        if current_thread() is main_thread():  # Python allows handlers there alone
            self._handlers = {
                number: signal.signal(number, self._stop(config)) for number in SIGNALS
            }
        self._going = True

    def _stop(self, config: DictConfig) -> Callable[[int, Any], None]:
        """The handler of a stop signal: the point that is measured is dropped, finished ones are
        reported.
        """

        def finish(code: int) -> None:
            end_local_jobs()
            self._finish(config, code, f"[bold]stopped[/bold]; {what_is_left(config)}")

        def stop(number: int, _: Any) -> None:
            self._restore()
            raise Stopped(128 + number, finish)

        return stop

    def _report_lost(self, config: DictConfig, error: Exception) -> NoReturn:
        """Report what is finished when a launcher has lost a job: its other local jobs first end."""
        status_line.leave()
        cause = escape(f"{type(error).__name__}: {error}")
        console.print(f"[bold red]the launcher failed[/bold red]: {cause}")
        psutil.wait_procs(local_jobs())
        self._finish(config, FAILED_POINTS, what_is_left(config))
        raise AssertionError("unreachable: a code ends the process")

    def _restore(self) -> None:
        """From now on a signal ends the process, and an error is not the launcher's."""
        self._going = False
        command_progress().report_lost = None
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _finish(self, config: DictConfig, code: int = 0, notice: str = "") -> None:
        """Write the table, the figure and the report.

        Exits non-zero if a point failed or the command was stopped. code: the exit status of a
        command that was stopped or has lost points. notice: what is printed before the report.
        """
        self._restore()
        sweep = Sweep(sweep_folder(config))
        if notice:
            console.print(notice)
        try:
            status_line.enter("writing the report")
            self._report(sweep)
        except Exception as error:  # Hydra turns exceptions of callbacks into warnings
            status_line.leave()
            # bad input or a full disk needs no traceback
            if not isinstance(error, UserError | OSError):
                traceback.print_exc()
            console.print(
                f"[bold red]the report could not be written[/bold red]: {escape(str(error))}; "
                "finished points are kept, and the same command reports them"
            )
            sys.exit(code or FAILED_POINTS)
        logged = _log_sweep(config, sweep, stopped=bool(code))
        failed = _failures(sweep) - self._failed_before
        if launched_by(config.hydra, IN_PROCESS_LAUNCHER):
            # another command may have measured into the same folder
            failed = {failure for failure in failed if failure[0] in command_progress().failed}
        if failed:
            console.print(f"[bold red]{len(failed)} point(s) failed[/bold red]")
        if code or failed or not logged:
            sys.exit(code or FAILED_POINTS)


def launched_by(hydra: DictConfig, launcher: str) -> bool:
    """Whether points are measured by the launcher whose target ends so. hydra: Hydra's part of the
    configuration.
    """
    return hydra.launcher._target_.endswith(launcher)


def local_jobs() -> list[psutil.Process]:
    """The jobs of `hydra/launcher=submitit_local` that this process has started and that still run."""
    jobs = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if LOCAL_JOB in child.cmdline():
                jobs.append(child)
    return jobs


def end_local_jobs() -> None:
    """Kill them and all that they have started: they would outlive the command, and measure on beside
    its next start. What was stored stays, as a point is stored whole or not at all.
    """
    jobs = local_jobs()
    for process in [*jobs, *(descendant for job in jobs for descendant in _descendants(job))]:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(jobs)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []  # it has ended meanwhile


def what_is_left(config: DictConfig) -> str:
    """What is left of a sweep that did not end by itself, and what to do."""
    if launched_by(config.hydra, SLURM_LAUNCHER):
        return (
            f"{POINTS_KEPT}, once the jobs that Slurm still has are over: squeue --me lists them,"
            " scancel ends them"
        )
    return POINTS_KEPT


def _failures(sweep: Sweep) -> set[tuple[str, str]]:
    return {(failure.point, failure.stored_at) for failure in sweep.failures() if failure.stored_at}


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
