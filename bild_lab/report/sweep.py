"""The report of a sweep: its files, the summary in the terminal, and Hydra's callback that asks for
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hydra.experimental.callback import Callback
from rich.markup import escape

from bild_lab.lab.config.console import console, output, status_line
from bild_lab.lab.config.schemas import ALL_PICTURE_KINDS, PICTURE_KINDS
from bild_lab.lab.store.records import Sweep


def report_sweep(sweep: Sweep, figures: Sequence[str] = PICTURE_KINDS) -> None:
    """Write a sweep's table, figure and report and the list of all runs, and print a summary.

    figures: the kinds of the figure's files. Those of earlier commands are drawn anew, too.
    """
    # drawing libraries take seconds to import: bad input is refused before that
    from bild_lab.lab.store.groups import by_setting
    from bild_lab.lab.store.table import write_table
    from bild_lab.report.headline import best_group, headline
    from bild_lab.report.page.html import write_html
    from bild_lab.report.page.index import update_index
    from bild_lab.report.pareto_figure import draw_pareto
    from bild_lab.report.phrases import reason_lines
    from bild_lab.report.provenance import notes
    from bild_lab.report.screened_points import was_screened
    from bild_lab.report.terminal import category_table, sweep_table

    earlier_kinds = [
        kind for kind in ALL_PICTURE_KINDS if (sweep.folder / f"pareto.{kind}").is_file()
    ]
    figures = list(dict.fromkeys([*figures, *earlier_kinds]))
    with sweep.report_lock():
        results, failures, older = sweep.results(), sweep.failures(), sweep.older()
        groups = by_setting(results)
        unreadable: list[str] = []  # a sentence for each point whose texts cannot be read
        if results:
            write_table(results, sweep.folder / "sweep.csv")
        if any(group.position(result) for group in groups for result in group.results):
            draw_pareto(results, sweep.folder / "pareto", figures)
        if results or failures or was_screened(sweep.folder):
            page = sweep.folder / "report.html"
            unreadable = write_html(sweep.name, results, failures, page, older)
        if results or failures:
            output.print(sweep_table(results, failures))
        categories = category_table(results)
        if categories is not None:
            output.print(categories)
    output.print(escape(headline(results)))
    best = best_group(groups)
    if best is not None:
        for label, reason in reason_lines(best):
            output.print(f"[bold]{escape(label)}[/bold]: {escape(reason)}")
    for remark in [*notes(results, older), *unreadable]:
        output.print(escape(remark))
    names = ("report.html", *(f"pareto.{kind}" for kind in figures), "sweep.csv")
    written = [name for name in names if (sweep.folder / name).is_file()]
    if written:
        output.print(f"the rest is in {sweep.folder}: {', '.join(written)}")
    update_index(sweep.folder.parent)


def live_report(sweep: Sweep, progress: str) -> None:
    """Write the page, with how far the sweep is.

    A fault is printed and does not end the sweep: the last report is still to come.
    """
    # late: drawing libraries take seconds to import
    from bild_lab.report.page.html import write_html

    try:
        with sweep.report_lock():
            results, path = sweep.results(), sweep.folder / "report.html"
            write_html(
                sweep.name, results, sweep.failures(), path, sweep.older(), progress=progress
            )
    except Exception as error:  # whatever a damaged result or a full disk raises
        console.print(f"the report between points could not be written: {escape(str(error))}")


def reported_sweep(figures: str | Sequence[str]) -> Callback:
    """A callback that writes the table, figure and report of a sweep when it ends, however it
    ends.
    """
    # `report.figures` is checked with the command
    kinds = figures.split(",") if isinstance(figures, str) else figures
    status_line.enter("loading PyTorch")
    from bild_lab.lab.sweep import SweepCallback

    return SweepCallback(partial(report_sweep, figures=kinds), live_report)
