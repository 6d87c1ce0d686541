"""The points of a sweep as a table for a page and for a paper."""

from __future__ import annotations

from bild_lab.lab.store.groups import by_setting
from bild_lab.report.tables import TableCell, plain_table
from bild_lab.report.terminal import latex_table, points_text
from tests.report.sample import ENVIRONMENT, sample_baseline, sample_result

BUSY = {**ENVIRONMENT, "busy_elsewhere_percent": 74.4}


def test_a_results_table_has_the_reports_columns_and_order_and_keeps_the_caution_of_a_busy_machine() -> (
    None
):
    slow, fast = (
        sample_result("bild", {"fallback": 0.9}, 1.2),
        sample_result("bild", {"fallback": 0.5}, 1.5, 0.25),
    )
    (group,) = by_setting(
        [sample_baseline(), slow, sample_result("hf_generate", {}, 0.9, environment=BUSY), fast]
    )
    head, _, *rows = points_text(group, latex=False).splitlines()
    assert head.startswith(
        "| policy | speedup | BLEU | difference | latency | tokens/s | tokens/call |"
    )
    assert [row.split(" | ")[0] for row in rows] == [
        *("| bild fallback 0.5", "| bild fallback 0.9", "| vanilla baseline", "| hf_generate")
    ]
    assert (
        "1.50× [1.45, 1.55] | 41.25" in rows[0]
        and "0.90× [0.85, 0.95], machine 74 % busy" in rows[3]
    )
    latex = points_text(group, latex=True)
    assert (
        r"bild {\scriptsize fallback 0.5} & 1.50$\times$ {\scriptsize [1.45, 1.55]} & 41.25"
        in latex
    )
    assert r"hf\_generate" in latex and r"74 \% of the machine" in latex.split(r"\bottomrule")[1]


def test_what_latex_would_read_as_commands_is_written_as_it_is() -> None:
    table = plain_table([{"a_b": TableCell(r"50 % of $x_1$ & {y} \z #~^", "<α>"), "c": "−1 – ∞…"}])
    begin, _, head, _, row, *_ = latex_table(table, ["a_b", "c"]).splitlines()
    assert begin.startswith(r"\begin{tabular}{@{}lr@{}}") and head == r"a\_b & c \\"
    words = r"50 \% of \$x\_1\$ \& \{y\} \textbackslash{}z \#\textasciitilde{}\textasciicircum{}"
    assert row == words + r" {\scriptsize $<$α$>$} & $-$1 -- $\infty$\ldots{} \\"
