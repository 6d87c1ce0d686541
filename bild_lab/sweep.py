"""One run or a sweep of them: check before anything is written, measure, report, exit honestly."""

from __future__ import annotations

import itertools
import sys
import time
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bild_lab.build import build, policy_label
from bild_lab.cli import console, escape, output, plain_message, refuse
from bild_lab.config import knob_values
from bild_lab.errors import UserError
from bild_lab.results.records import Sweep, point_hash
from bild_lab.runner import Point, prepare, run_point, sweep_folder

FAILED_POINTS = 1
BUSY_PERCENT = 10  # of all cores' time
MOST_CHECKED_BEFORE = 64  # points prepared while looking for one that can run

_failed: list[str] = []
_total: dict[str, int] = {}
_last_end: list[float] = []  # when the point before this one ended, time.time()


def measure_point(cfg: DictConfig) -> float:
    """The task function: measure one configuration, or take its finished result.

    Returns the speedup. A point that fails is recorded and does not end the sweep.
    """
    sweep = Sweep(sweep_folder(cfg))
    try:
        point = prepare(cfg)
        result = sweep.finished(point.id) if cfg.resume else None
        if result is not None:
            console.print(f"[dim]{escape(_title(point))}: finished before[/dim]")
        else:
            result = _measured(point, sweep)
            _log(cfg, result)
        sweep.forget_failure(failure_hash(point.config_yaml))
        speedup = result["speedup"]["value"]
        return float("nan") if speedup is None else speedup
    except Exception as error:  # any fault of one point; the others still run and the exit code tells
        _record_failure(cfg, sweep, error)
        return float("nan")
    finally:
        _last_end.append(time.time())


class SweepCallback(Callback):
    """Refuses a run that cannot work before a file is written; reports when all points are done."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _failed.clear()
        _check([config])

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _failed.clear()
        configs = _composed(config, _jobs(config))
        _total["points"] = len(configs)
        _check(configs[:MOST_CHECKED_BEFORE])

    def on_run_end(self, config: DictConfig, **_: Any) -> None:
        _finish(config)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        _finish(config)


def _check(configs: list[DictConfig]) -> None:
    """Exit with the first complaint unless one of the configurations can run."""
    complaint: BaseException = UserError("the sweep has no points: one of its lists of values is empty")
    for number, config in enumerate(configs):
        try:
            prepare(config)
            logger(config)
            return
        except (UserError, HydraException, OmegaConfBaseException) as error:
            complaint = error if number == 0 else complaint
        except Exception:  # a fault of ours: Hydra would turn it into a warning and go on
            traceback.print_exc()
            sys.exit(FAILED_POINTS)
    refuse(complaint)


def _jobs(config: DictConfig) -> list[list[str]]:
    """The overrides of every job that the basic sweeper will launch."""
    given = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*given, *config.hydra.overrides.task])
    return list(itertools.chain(*BasicSweeper.split_arguments(overrides, None)))


def _composed(config: DictConfig, jobs: list[list[str]]) -> list[DictConfig]:
    """Every job's configuration; exits where one cannot be composed."""
    loader = GlobalHydra.instance().config_loader()
    try:
        return [loader.load_sweep_config(config, job) for job in jobs]
    except (HydraException, OmegaConfBaseException) as error:
        refuse(error)


@lru_cache(maxsize=1)
def _logger(config_yaml: str) -> Any:
    return build(OmegaConf.to_container(OmegaConf.create(config_yaml)), {})


def logger(cfg: DictConfig) -> Any:
    """The run's logger, one for the whole process: it remembers whether its server can be reached."""
    return _logger(OmegaConf.to_yaml(cfg.logger, resolve=True))


def _measured(point: Point, sweep: Sweep) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(escape(_title(point)), total=len(point.examples))
        result = run_point(point, sweep, since_last_point_s(), lambda: progress.advance(task))
    speedup, quality = result["speedup"]["value"], result["quality"]
    told = "" if speedup is None else f", {speedup:.2f}x"
    console.print(f"{escape(_title(point))}: {quality['metric']} {quality['value']:.2f}{told}")
    busy = result["environment"]["busy_elsewhere_percent"]
    if busy > BUSY_PERCENT:
        console.print(f"[bold red]{busy:.0f} % of the machine was busy with something else[/bold red], timings suffer")
    return result


def since_last_point_s() -> float:
    """Seconds since the last point ended, or since the process started: imports, configuration, checks, data."""
    before = _last_end[-1] if _last_end else psutil.Process().create_time()
    return time.time() - before


def _title(point: Point) -> str:
    number = HydraConfig.get().job.get("num") if HydraConfig.get().mode == RunMode.MULTIRUN else None
    place = "" if number is None else f"{number + 1}/{_total.get('points', '?')} "
    return place + " ".join([point.policy, *(f"{knob}={value}" for knob, value in point.knobs.items())])


def _log(cfg: DictConfig, result: dict[str, Any]) -> None:
    """Log a stored point; where that fails the point stands, and the exit code tells."""
    try:
        logger(cfg).log_point(result, OmegaConf.to_container(cfg, resolve=True))
    except Exception as error:  # whatever a logging service raises
        _failed.append(result["point"])
        console.print(f"[bold red]not logged[/bold red] {result['point']}: {escape(plain_message(error))}")


def _record_failure(cfg: DictConfig, sweep: Sweep, error: Exception) -> None:
    knobs = knob_values(OmegaConf.to_container(cfg.policy))
    config_yaml = OmegaConf.to_yaml(cfg, resolve=False)
    point = failure_hash(config_yaml)
    failure = {
        "point": point,
        "policy": policy_label(cfg.policy),
        "knobs": knobs,
        "error": {
            "type": type(error).__name__,
            "message": plain_message(error),
            "traceback": "".join(traceback.format_exception(error)),
        },
    }
    try:
        folder = sweep.write_failure(point, config_yaml, failure)
    except OSError as fault:
        folder = Path(f"not written ({fault})")
    _failed.append(point)
    console.print(f"[bold red]failed[/bold red] {failure['policy']} {knobs}: {escape(plain_message(error))}")
    if not isinstance(error, UserError):
        console.print(f"[dim]traceback in {escape(str(folder / 'failed.json'))}[/dim]")


def failure_hash(config_yaml: str) -> str:
    """What a failed point is stored under: its configuration, as nothing more may be known of it."""
    return point_hash({"failed": config_yaml})


def _finish(config: DictConfig) -> None:
    """Write the table, the figure and the report; exit non-zero if a point of this run failed."""
    try:
        _report(Sweep(sweep_folder(config)))
    except Exception as error:  # Hydra turns exceptions of callbacks into warnings
        traceback.print_exc()
        console.print(f"[bold red]the report could not be written[/bold red]: {escape(str(error))}")
        sys.exit(FAILED_POINTS)
    if _failed:
        console.print(f"[bold red]{len(set(_failed))} point(s) failed[/bold red]")
        sys.exit(FAILED_POINTS)


def _report(sweep: Sweep) -> None:
    # drawing libraries take seconds to import, which bad input should not wait for
    from bild_lab.report.figures import draw_pareto
    from bild_lab.report.html import write_html
    from bild_lab.report.terminal import headline, sweep_table
    from bild_lab.results.table import write_table

    results, failures = sweep.results(), sweep.failures()
    if results:
        write_table(results, sweep.folder / "sweep.csv")
        draw_pareto(results, sweep.folder / "pareto.png")
    if results or failures:
        write_html(sweep.name, results, failures, sweep.folder / "report.html")
        output.print(sweep_table(results, failures))
    output.print(escape(headline(results)))
    output.print(f"{sweep.folder}/report.html, pareto.png and sweep.csv hold the rest")
