"""List, join, log or look into finished sweeps: python scripts/sweeps.py WHAT outputs/first [outputs/second …]

    python scripts/sweeps.py list                        # all runs, the newest first; writes outputs/index.html anew
    python scripts/sweeps.py list multi30k t5-large      # those that contain all these words
    python scripts/sweeps.py list outputs/first          # the points of one in Markdown; latex=true: for a paper
    python scripts/sweeps.py log outputs/first outputs/second
    python scripts/sweeps.py trace outputs/first example=ID output=FILE
    python scripts/sweeps.py merge name=all outputs/first outputs/second
    python scripts/sweeps.py predict outputs/first

merge puts the points of several machines into one sweep, each point once, the newest measurement. Points of different
hardware, code or package versions have different settings, so their timings never share a curve.

predict says by each point's speculation_profile.json which window would have been best here, and how many times as
fast. It writes predicted.csv beside the sweep. Nothing is timed.

log sends every finished point, and the sweep as a whole, to a tracker, as with `python run.py logger=wandb`. A
run that is in the project already is replaced. logger.mode=offline writes files only; the last line says how to send
them.

trace draws when the models ran in one traced example: the one of median length, unless example=ID is given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from bild_lab.errors import UserError, require_flag, suggestion
from bild_lab.lab.config.command_line import words_as_list
from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.console import console, output, status_line
from bild_lab.lab.config.entrypoint import refusing, run_application
from bild_lab.lab.schema.formatting import counted

if TYPE_CHECKING:
    from bild_lab.lab.schema.result import Result
    from bild_lab.lab.store.records import Sweep


def given_sweeps(cfg: DictConfig) -> list[Sweep]:
    """The sweeps of the command line.

    Raises UserError without one, and for one without finished points.
    """
    from bild_lab.lab.store.records import Sweep  # late: torch takes seconds to load

    if not cfg.sweeps:
        raise UserError(
            f"folders of sweeps are needed, got none; python scripts/sweeps.py {cfg.what}"
            " outputs/NAME"
        )
    sweeps = [Sweep(Path(str(folder)).expanduser()) for folder in cfg.sweeps]
    for sweep in sweeps:
        sweep.finished()
    return sweeps


def merge(cfg: DictConfig) -> None:
    """Copy the points, print where they came from, and write the report.

    Raises UserError for bad input.
    """
    sources = given_sweeps(cfg)
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.store.commands import record_command
    from bild_lab.lab.store.records import Sweep, require_writable
    from bild_lab.report.sweep import report_sweep

    merged = Sweep(sweep_folder(cfg))
    require_writable(merged.folder)
    record_command(merged.folder)
    for source in sources:
        # in order: a later result replaces an earlier one
        newest = {result.point: result for result in source.all_results()}
        copied = sum([merged.adopt(result) for result in newest.values()])
        failed = len(source.failures())
        left_out = f"; {failed} failed there and are left out" if failed else ""
        line = (
            f"{source.folder}: {copied} of {len(newest)} points copied, the others were here"
            f" already{left_out}"
        )
        output.print(escape(line))
    report_sweep(merged)


def predict(cfg: DictConfig) -> None:
    """The best window of each sweep's points, by how their drafts were accepted.

    Raises UserError for bad input.
    """
    import pandas as pd

    from bild_lab.lab.schema.formatting import knob_label
    from bild_lab.lab.store.groups import telling_knobs
    from bild_lab.lab.store.table import write_csv

    for sweep in given_sweeps(cfg):
        titles = [
            "policy",
            "knobs",
            "tokens_per_call",
            "acceptance_rate",
            "speedup",
            "best_window",
            "its_gain",
        ]
        rows, table = [], Table(*(title.replace("_", " ") for title in titles))
        results = sweep.results()
        telling = telling_knobs(results)
        for result in results:
            if result.is_baseline:
                continue
            knobs = " ".join(f"{knob} {value}" for knob, value in result.knobs.items())
            numbers = predicted_numbers(result)
            rows.append([result.policy, knobs, *numbers])
            label = knob_label(result, telling(result), " ")
            table.add_row(
                result.policy,
                label,
                *("–" if number is None else f"{number:.2f}" for number in numbers),
            )
        file = sweep.folder / "predicted.csv"
        write_csv(file, pd.DataFrame(rows, columns=titles, dtype=object))  # a window stays whole
        output.print(table)
        output.print(f"{file} contains these rows; predicted, not measured")


def predicted_numbers(result: Result) -> list[float | None]:
    """Tokens per call, acceptance rate and speedup of a point, and its best window with what this
    gains; None for what is not known.
    """
    from bild_lab.lab.measure.profile import best_window, read_profile

    best = None
    profile = read_profile(result.folder)
    if profile is not None and result.prediction is not None:
        best = best_window(profile, result.prediction.cost_ratio)
    return [
        result.counts.tokens_per_target_call,
        result.counts.acceptance_rate,
        result.speedup.value,
        *(best or (None, None)),
    ]


def list_runs(cfg: DictConfig) -> None:
    """Print the runs that contain all words, or the points of one sweep."""
    require_flag("latex", cfg.latex)
    words = [str(word) for word in cfg.sweeps]
    if len(words) == 1 and (Path(words[0]).expanduser() / "points").is_dir():
        print_points(Path(words[0]).expanduser(), cfg.latex)
    else:
        print_runs(Path(str(cfg.outputs)), words)


def print_runs(outputs: Path, words: Sequence[str]) -> None:
    """Print the runs that contain all words, and write the page.

    Raises UserError for a missing folder.
    """
    from bild_lab.report.page.index import PAGE, read_runs, write_index

    if not outputs.is_dir():
        raise UserError(
            f"{outputs} is no folder; run a sweep first, python run.py experiment=quickstart, or"
            " give outputs=DIR"
        )
    try:
        runs = write_index(outputs)
        written = f"{outputs / PAGE} shows them too, with their commands"
    except OSError as error:  # another user's folder, or a full disk
        runs, written = read_runs(outputs), f"{outputs / PAGE} was not written: {error}"
    matching = [run for run in runs if run.contains(words)]
    if words and not matching:
        named = suggestion(words[0], [run.name for run in runs])
        raise UserError(
            f"none of the {counted(len(runs), 'run')} in {outputs} contains"
            f" {' '.join(words)}{named}"
        )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("name, date", "models, data", "points", "no loss", "small loss"):
        table.add_column(title, overflow="fold", justify="right" if title == "points" else "left")
    for run in matching:
        name, about = f"{run.name}\n{run.date[:10]}", f"{run.pair}\n{run.data}"
        table.add_row(
            *map(Text, (name, about, str(run.points), run.without_loss, run.within_small_loss))
        )
    output.print(table)
    if words:
        console.print(f"{len(matching)} of {len(runs)} contain {escape(' '.join(words))}")
    console.print(escape(written))


def print_points(folder: Path, latex: bool) -> None:
    """Print a sweep's points, a table per setting in Markdown or LaTeX.

    Raises UserError without points.
    """
    status_line.enter("loading libraries")
    # late: pandas takes seconds to load
    from bild_lab.lab.store.groups import by_setting
    from bild_lab.lab.store.records import Sweep
    from bild_lab.report.headline import headline
    from bild_lab.report.page.html import fixed_knobs
    from bild_lab.report.phrases import setting_titles
    from bild_lab.report.provenance import notes
    from bild_lab.report.terminal import points_text

    results = Sweep(folder).finished()
    status_line.leave()
    if not latex:
        print("\n\n".join([headline(results), *notes(results)]) + "\n")
    groups = by_setting(results)
    for group, title in zip(groups, setting_titles(groups), strict=True):
        print(f"{'% ' if latex else ''}{title}\n")
        print(points_text(group, latex) + "\n")
        if not latex and (fixed := fixed_knobs(group)):
            print(f"Knobs with a single value: {'; '.join(fixed)}\n")


def log(cfg: DictConfig) -> None:
    """Log every sweep, and print where its runs are.

    Raises UserError for bad input, before anything is logged.
    """
    sweeps = given_sweeps(cfg)
    from bild_lab.lab.point.build import build
    from bild_lab.lab.store.records import require_writable

    for sweep in sweeps:
        require_writable(sweep.folder)
    for sweep in sweeps:
        cfg.name = sweep.name  # which groups and folders of loggers are called after
        log_sweep(
            sweep, build(_placed(OmegaConf.to_container(cfg.logger, resolve=True), sweep), {})
        )


def _placed(logger: dict[str, Any], sweep: Sweep) -> dict[str, Any]:
    """A logger, or several, that write to the folder of the sweep, wherever that is."""
    usual = f"outputs/{sweep.name}"
    values = {
        key: str(sweep.folder) if (key, value) == ("directory", usual) else value
        for key, value in logger.items()
    }
    return {
        key: _placed(value, sweep) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def log_sweep(sweep: Sweep, logger: Any) -> None:
    """Log every point, oldest first, and the sweep as a whole."""
    from bild_lab.lab.store.inputs import stored_config

    results = sweep.results()
    for number, result in enumerate(results, 1):
        console.print(
            f"[dim]{escape(f'{sweep.folder}: logging point {number} of {len(results)}, {result.policy}')}[/dim]"
        )
        logger.log_point(result, stored_config(result), force=True)
    logger.log_sweep(sweep)
    for line in logger.closing():
        console.print(escape(line))


def trace(cfg: DictConfig) -> None:
    """Draw when the models ran in one example, by point."""
    from bild_lab.lab.store.records import Sweep
    from bild_lab.papers.timeline_figure import draw_trace, timelines_of

    if len(cfg.sweeps) != 1:
        raise UserError(
            f"one folder is needed, got {len(cfg.sweeps)}; give the folder of a sweep, outputs/NAME"
        )
    folder = Path(str(cfg.sweeps[0]))
    file = Path(cfg.output or folder / "trace.png")
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"output must end in .png, .pdf or .svg, got {file}")
    timelines = timelines_of(Sweep(folder), None if cfg.example is None else str(cfg.example))
    draw_trace(timelines, file)
    output.print(f"{file} shows example {timelines.example}")


COMMANDS = {
    "list": list_runs,
    "merge": merge,
    "predict": predict,
    "log": log,
    "trace": trace,
}


def as_overrides(words: Sequence[str]) -> list[str]:
    """The command line with its first plain word in `what` and its folders in `sweeps`."""
    what = next((word for word in words if "=" not in word and word[:1] != "-"), None)
    overrides = list(words)
    if what in COMMANDS:
        overrides.remove(what)
        overrides.insert(0, f"what={what}")
    return words_as_list(overrides, "sweeps")


@hydra_main("sweeps")
def main(cfg: DictConfig) -> None:
    """One of the commands."""
    with refusing("sweeps"):
        if cfg.what not in COMMANDS:
            request = cfg.what or (cfg.sweeps[0] if cfg.sweeps else "nothing")
            meant = suggestion(request, COMMANDS)
            raise UserError(
                f"the first word must be one of {', '.join(COMMANDS)}, got {request}{meant}"
            )
        COMMANDS[cfg.what](cfg)


if __name__ == "__main__":
    sys.argv[1:] = as_overrides(sys.argv[1:])
    run_application(main, "sweeps")
