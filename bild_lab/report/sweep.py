"""The report of a sweep: its files, and the summary in the terminal."""

from __future__ import annotations

from bild_lab.lab.cli import escape, output
from bild_lab.lab.results.records import Sweep
from bild_lab.report.book.after import update


def report_sweep(sweep: Sweep) -> None:
    """Write a sweep's table, figure and report, and print a summary."""
    # drawing libraries take seconds to import: bad input is refused before that
    from bild_lab.lab.results.groups import by_setting
    from bild_lab.lab.results.table import write_table
    from bild_lab.report.categories import terminal_table
    from bild_lab.report.headline import headline, leading
    from bild_lab.report.page.html import write_html
    from bild_lab.report.page.plane import screened_policies
    from bild_lab.report.pareto_figure import draw_pareto
    from bild_lab.report.provenance import notes
    from bild_lab.report.reasons import reason_lines
    from bild_lab.report.terminal import sweep_table

    with sweep.report_lock():
        results, failures, older = sweep.results(), sweep.failures(), sweep.older()
        if results:
            write_table(results, sweep.folder / "sweep.csv")
            draw_pareto(results, sweep.folder / "pareto.png")
        if results or failures or screened_policies(sweep.folder):
            write_html(sweep.name, results, failures, sweep.folder / "report.html", older)
        if results or failures:
            output.print(sweep_table(results, failures))
        if (categories := terminal_table(results)) is not None:
            output.print(categories)
    output.print(escape(headline(results)))
    group = leading(by_setting(results))
    for label, why in [] if group is None else reason_lines(group):
        output.print(f"[bold]{escape(label)}[/bold]: {escape(why)}")
    for remark in notes(results, older):
        output.print(escape(remark))
    output.print(f"{sweep.folder}/report.html, pareto.png and sweep.csv hold the rest")
    update(sweep.folder.parent)
