"""Tests of the headline and the table in the terminal."""

import io

from rich.console import Console

from bild_lab.report.terminal import headline, sweep_table
from tests.report.sample import sample_baseline, sample_failure, sample_result, sample_sweep


def rendered(results, failures, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(sweep_table(results, failures))
    return console.file.getvalue().splitlines()


def test_headline_tells_the_best_at_no_loss_and_at_one_point():
    assert headline(sample_sweep()) == (
        "At no loss of BLEU, bild (fallback 0.3, rollback 1) decodes 1.55\u00d7 as fast as vanilla "
        "(95 % interval 1.50 to 1.60; BLEU 41.05 against 41.00). Within one point of loss, "
        "bild (fallback 0.5, rollback 5) decodes 1.70\u00d7 as fast (95 % interval 1.65 to 1.75; BLEU 40.26)."
    )


def test_headline_says_so_when_loss_buys_nothing():
    assert headline([sample_result("bild", {}, 1.5)]).endswith("Allowing one point of loss finds nothing faster.")


def test_headline_does_not_sell_a_slowdown():
    assert ": nothing was faster than the baseline." in headline([sample_result("bild", {}, 0.9)])


def test_headline_does_not_sell_what_may_be_chance():
    assert ": not clearly faster, as the interval holds 1." in headline([sample_result("bild", {}, 1.04)])


def test_headline_says_when_no_point_kept_the_quality():
    assert headline([sample_result("bild", {}, 2.0, -0.5)]).startswith(
        "No point kept the BLEU of vanilla (41.00). Within"
    )
    assert (
        headline([sample_result("bild", {}, 2.0, -3)])
        == "No point came within one point of the BLEU of vanilla (41.00)."
    )


def test_headline_without_a_comparison_gives_the_latency():
    assert headline([sample_baseline()]).startswith("Only the baseline was measured, so there is no speedup to report.")
    alone = sample_result("bild", {}, None, setting={"baseline": None})
    assert headline([alone]) == (
        "No baseline was measured, so there is no speedup to report. "
        "Fastest: bild, 102.3 ms an example (median), BLEU 41.00."
    )


def test_headline_of_nothing():
    assert headline([]) == "No point finished, so there is nothing to report."


def test_headline_names_the_setting_when_there_are_several():
    both = sample_sweep(setting={"dataset": "iwslt"})[:4] + sample_sweep()
    assert headline(both).startswith("Best of 2 settings (dataset multi30k): At no loss of BLEU, bild")


def test_table_has_a_row_per_point_within_eighty_columns():
    lines = rendered(sample_sweep(), [sample_failure()])
    assert max(map(len, lines)) <= 80
    assert (
        len([line for line in lines if " 41.00 " in line or " 40." in line or " 39." in line or " 41." in line]) == 20
    )


def test_table_rows_read_from_the_fastest():
    first, rest = rendered(sample_sweep(), [])[4:6]
    assert " ".join(first.split()) == "\u25cf bild fallback 0.3 39.69 \u22121.31 1.83 [1.78, 1.88] 55.9 3.92 91% 49%"
    assert rest.strip() == "rollback 5"


def test_table_shows_markup_in_names_as_text():
    text = "\n".join(rendered([sample_result("[red]", {"[/]": "[bold]"}, 1.5)], [sample_failure("[/nope]")]))
    assert "[red]" in text
    assert "[/] [bold]" in text
    assert "UserError: [/nope]" in text


def test_table_separates_settings():
    lines = rendered(sample_sweep() + sample_sweep(setting={"dataset": "iwslt"}), [])
    assert [line.split()[-1] for line in lines if line.strip().startswith("setting")] == ["multi30k", "iwslt"]


def test_table_of_only_failures_renders():
    assert any("failed" in line for line in rendered([], [sample_failure()]))
