"""Words that tell the settings of a sweep apart."""

from __future__ import annotations

from bild_lab.lab.store.groups import by_setting
from bild_lab.report.pareto_layout import heading_lines, setting_names
from bild_lab.report.phrases import front_in_words, reason_lines, setting_titles
from tests.report.sample import sample_result


def test_a_line_break_in_a_setting_ends_no_title() -> None:
    """Fault: what followed it was a line of its own in LaTeX and Markdown."""
    results = [
        sample_result("bild", {}, 1.5, setting={"prompt_template": f"{word}\n{{source}}"})
        for word in ("Say", "Sing")
    ]
    titles = setting_titles(by_setting(results))
    assert [title.rpartition(", ")[2] for title in titles] == [
        "prompt_template Say {source}",
        "prompt_template Sing {source}",
    ]


def test_values_that_agree_as_far_as_they_are_shown_are_numbered() -> None:
    results = [
        sample_result("bild", {}, 1.5, setting={"prompt_template": "Translate " * 9 + word})
        for word in ("{source}", "it: {source}")
    ]
    first, second = setting_titles(by_setting(results))
    assert (first[-9:], second[-9:]) == ("setting 1", "setting 2")


def test_a_heading_keeps_the_letters_of_names() -> None:
    """Fault: all letters but the first were small."""
    machines = [
        sample_result("bild", {}, 1.5, setting={"hardware": f"NVIDIA {name}"})
        for name in ("H100", "A100")
    ]
    groups = by_setting(machines)
    name, _ = setting_names(groups)
    assert " ".join(heading_lines(groups[0], name)[1]).startswith(
        "Setting 1, hardware NVIDIA H100:"
    )


def test_without_a_baseline_the_front_has_the_mean_seconds_by_which_it_is_drawn() -> None:
    (group,) = by_setting([sample_result("bild", {}, None, setting={"baseline": None})])
    ((_, _, words),) = front_in_words(group)
    assert words.startswith("110.0 ms, BLEU ")


def test_stages_of_half_a_percent_and_more_are_told() -> None:
    stages = {"prefill": 0.03, "draft": 0.2, "verify": 0.767, "host": 0.003}
    (group,) = by_setting([sample_result("bild", {}, 1.5, stages_s=stages)])
    ((_, words),) = reason_lines(group)
    assert words == "time: prefill 3 %, draft 20 %, verify 77 %."
