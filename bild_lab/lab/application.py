"""Measure decoding policies: python run.py [-m] [KEY=VALUE …] [GROUP=FILE …]

    python run.py                                      a first run, seconds: experiment=first_run
    python run.py experiment=quickstart                a sweep on the toy pair
    python run.py -m name=mine policy=bild policy.fallback=0.3,0.5 policy.rollback=2,5
    python run.py --cfg job --resolve policy=bild      print the whole configuration
    eval "$(python run.py -sc install=bash)"           complete keys with TAB

After -m a list of values is a sweep. Results go to outputs/NAME; a repeated command
skips finished points. docs/commands.md has the other commands.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from bild_lab.errors import UserError
from bild_lab.lab.config.compose import (
    hydra_main,
    override_words,
    update_numbers,
    without_other_applications,
)
from bild_lab.lab.config.console import console, status_line, text_streams
from bild_lab.lab.config.entrypoint import (
    COMMAND_VARIABLES,
    INTERRUPTED,
    POINTS_KEPT,
    Refused,
    require_one_process,
    run_application,
)
from bild_lab.lab.launcher import register_launcher

if TYPE_CHECKING:
    import pandas as pd

FIRST = "experiment=first_run"
NEXT = (
    "next: python run.py experiment=quickstart    a sweep of thresholds, the same pair\n"
    "      python run.py -m name=mine pair.target=DIR pair.draft=DIR dataset=local \\\n"
    "        dataset.path=FILE dataset.source_column=COLUMN policy=bild,speculative\n"
    "      python run.py --help                   every group, and the words of the reports"
)


@hydra_main("config")
def main(cfg: DictConfig) -> float:
    """One point of a sweep."""
    # torch loads only if there is something to measure
    from bild_lab.lab.sweep import measure_point

    return measure_point(update_numbers(cfg, override_words(HydraConfig.get())))


def measure_and_report() -> None:
    """All points of the command line, and their report.

    A launcher that loses a job raises its error here, past Hydra's callback that reports.
    """
    try:
        main()
    except (UserError, HydraException, OmegaConfBaseException, BrokenPipeError):
        raise
    except Exception as error:
        from bild_lab.lab.store.progress import command_progress

        if (report_lost := command_progress().report_lost) is None:
            raise
        report_lost(error)


def command() -> None:
    """Run what the command line says; without a word, a first experiment that ends with a hint."""
    require_one_process()
    register_launcher()
    without_arguments = not sys.argv[1:]
    if without_arguments:
        console.print(f"[dim]no arguments: {FIRST}[/dim]")
        sys.argv.append(FIRST)
    try:
        run_application(measure_and_report, stop_notice=POINTS_KEPT)
    except SystemExit as ended:
        if without_arguments and not ended.code:
            console.print(NEXT)
        raise


def run(overrides: Sequence[str]) -> pd.DataFrame:
    """Measure a sweep, as `python run.py -m OVERRIDES` does; its finished points, as `load_results`
    gives them.

    overrides: `["name=mine", "policy=bild", "policy.fallback=0.3,0.5"]`;
    `hydra.searchpath=[file:///DIR]` adds a folder of configurations. Results go to outputs/NAME of
    the working directory, and finished points are not measured again.

    Raises UserError for what the command would refuse, and RuntimeError if a point failed: the
    others are stored.
    """
    from bild_lab.lab.config.policies import shipped_knobs
    from bild_lab.lab.data.examples import cached_examples
    from bild_lab.lab.metrics.external_metrics import evaluate_module
    from bild_lab.lab.metrics.quality import require_metric_works
    from bild_lab.lab.store.code import reread_sources
    from bild_lab.lab.store.progress import command_progress
    from bild_lab.lab.store.table import load_results

    if isinstance(overrides, str) or not all(
        isinstance(word, str) and "=" in word for word in overrides
    ):
        raise UserError(f"overrides must be a list of KEY=VALUE, got {overrides!r}")
    register_launcher()
    # the caller may run in another application; of several threads one measures at a time
    with without_other_applications(), as_the_command(overrides), tensors_on_the_cpu():
        reread_sources()
        # in a process that goes on, files and functions may have changed
        for remembered in (cached_examples, shipped_knobs, require_metric_works, evaluate_module):
            remembered.cache_clear()
        try:
            run_application(measure_and_report, stop_notice=POINTS_KEPT)
        except Refused as refused:
            raise UserError(refused.message) from None
        except SystemExit as ended:
            if ended.code == INTERRUPTED:
                raise KeyboardInterrupt from None
            if ended.code:
                raise RuntimeError(
                    f"the sweep ended with status {ended.code}; its finished points are stored"
                ) from None
        return load_results(command_progress().folder)


def tensors_on_the_cpu() -> AbstractContextManager[Any]:
    """What `cpu_by_default` gives; nothing where PyTorch is not loaded, as by a refused command."""
    if "torch" not in sys.modules:
        return nullcontext()
    from bild_lab.engine.models.device import cpu_by_default

    return cpu_by_default()


@contextmanager
def as_the_command(overrides: Sequence[str]) -> Iterator[None]:
    """Inside the block the process is the command's; after it what a command sets for its whole process is
    the caller's again: arguments, log handlers, shown warnings, and variables of the environment. Models
    that nobody has leave the memory.
    """
    root, shows_warning = logging.getLogger(), warnings.showwarning
    handlers, level, arguments = root.handlers[:], root.level, sys.argv
    variables = {name: os.environ.get(name) for name in COMMAND_VARIABLES}
    streams = [(stream, stream.errors) for stream in text_streams()]
    sys.argv = ["run.py", "-m", *overrides]
    status_line.began_s = time.perf_counter()
    try:
        yield
    finally:
        sys.argv = arguments
        for stream, errors in streams:
            stream.reconfigure(errors=errors)
        root.handlers[:] = handlers
        root.setLevel(level)
        if warnings.showwarning is not shows_warning:
            logging.captureWarnings(False)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if loading := sys.modules.get("bild_lab.lab.point.read_model"):  # else no model was loaded
            loading.load_model.release()
