"""Tests of the HTML report: complete, escaped, and independent of any network."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bild_lab.lab.schema.result import Failure, Result
from bild_lab.report.page.html import environments, write_html
from bild_lab.screening.rows import write_rows
from tests.report.page.test_grid import row
from tests.report.sample import (
    ENVIRONMENT,
    sample_baseline,
    sample_failure,
    sample_replayed,
    sample_result,
    sample_sweep,
)

ATTACK = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>"


class Page(HTMLParser):
    """Collects the tags with their attributes, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.tables: list[list[str]] = []  # the lower-case titles of each one's columns
        self.source = text
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "thead":
            self.tables.append([])

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self._open):
            self.words.append(data)
        if "thead" in self._open and data.strip():
            self.tables[-1].append(data.strip().lower())

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(path: Path, results: list[Result], failures: list[Failure], name: str = "first") -> Page:
    write_html(name, results, failures, path / "report.html")
    return Page((path / "report.html").read_text())


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return report(tmp_path_factory.mktemp("report"), sample_sweep(), [sample_failure()])


@pytest.mark.parametrize(
    "words",
    [
        "No loss of BLEU measured: bild (fallback 0.3, rollback 1) decodes 1.55\u00d7 [1.50, 1.60]",
        "20 points measured in 23.5 min, 1 failed",
        "UserError: rollback threshold must be > 0 nats, got -1; use .inf to switch it off",
        "Quality against latency",
        "Fastest where no loss was measured, and within one point of loss",
        "speculative (window 4), 1.38\u00d7 3.37 tokens a call (\u03b1 74 %); a drafter step costs",
        "Every point",
        "Two knobs at a time",
        "Where an example\u2019s time goes",
        "policy speedup Thm 3.8 rounds + verify, host + prefill",
        "speculative window 4 1.38\u00d7 [1.33, 1.43] 1.81\u00d7 1.71\u00d7",
        # no fixed window
        "bild fallback 0.3, rollback 1 1.55\u00d7 [1.50, 1.60] \u2013 1.92\u00d7",
        "On which hardware? AMD EPYC 7B13, 2 threads of 2 cores; bfloat16, batch 1",
        "0.076 33.6 2.24 1.40\u00d7 0.60\u00d7 2.33\u00d7",  # operations and traffic
        "Acceptance by draft position",
        "Where the sweep\u2019s time went",
        "How it was measured",
        "The environment",
    ],
)
def test_the_page_has_every_section_with_its_numbers(page, words):
    assert words in page.text


def test_every_figure_and_scrolling_table_says_what_it_is(page):
    for _, attrs in page.tags:
        kinds = attrs.get("class", "").split()
        if {"figure", "scroll"} & set(kinds):
            assert attrs["aria-label"] and attrs["role"] in ("img", "region"), attrs
        if "scroll" in kinds:
            assert attrs["tabindex"] == "0"


def test_the_front_is_listed_with_its_knobs_and_every_point_opens(page):
    words = page.text.split("Quality against latency")[2].split("Fastest where")[0]
    assert (
        "bild (fallback 0.3, rollback 5) 1.83\u00d7 [1.78, 1.88], BLEU 39.69, \u22121.31"
        " [\u22121.76, \u22120.81]" in words
    )
    assert len([1 for _, attrs in page.tags if attrs.get("href", "").startswith("points/")]) == 20
    opened = {attrs["data-open"] for _, attrs in page.tags if "data-open" in attrs}
    assert opened == {attrs["data-point"] for _, attrs in page.tags if "data-point" in attrs}


def test_screened_points_are_not_told_to_be_screened(tmp_path: Path) -> None:
    """The best of two within a point of loss, which a screening chose."""
    advice = "Choose thresholds on validation data, for example with scripts/screen.py"
    told = "They were screened on validation: screen.confirmations=1 measures only the point"
    points = [
        replace(one, folder=tmp_path / "points" / one.point)
        for one in (
            sample_result("bild", {"fallback": 0.3}, 1.6, -0.5),
            sample_result("bild", {"fallback": 0.5}, 1.5),
        )
    ]
    plain = report(tmp_path, [sample_baseline(), *points], []).text
    assert advice in plain and told not in plain and "the fastest of 2 points" in plain
    write_rows(tmp_path, [replace(row(fallback=0.3), confirmed=points[0].point)])
    page = report(tmp_path, points, []).text
    assert told in page and advice not in page


def test_settings_of_one_title_say_what_tells_them_apart(tmp_path):
    results = [
        sample_result("bild", {}, 1.5, setting={"batch": batch, "data": f"{batch}a"})
        for batch in (1, 4)
    ]
    text = report(tmp_path, results, []).text
    assert "Setting 2: t5-large drafted by t5-tiny, multi30k test, 100 examples, batch 4" in text
    alone = report(tmp_path, results[:1], []).text
    assert "t5-large drafted by t5-tiny, multi30k test, 100 examples #" in alone


def test_settings_that_nothing_readable_tells_apart_are_numbered(tmp_path):
    """Fault: of a sweep that went on after a change of the code two sections had one title."""
    results = [sample_result("bild", {}, 1.5, setting={"code": code}) for code in ("1a", "2b")]
    text = report(tmp_path, results, []).text
    for number in (1, 2):
        assert f"t5-large drafted by t5-tiny, multi30k test, 100 examples, setting {number}" in text


def test_shares_of_time_cover_the_whole(page):
    table = page.text.split("Where the sweep\u2019s time went")[2].split("How it was measured")[0]
    assert sum(map(float, re.findall(r"([\d.]+) %", table))) == pytest.approx(100, abs=0.3)


def test_what_the_machine_did_is_told_from_the_least_to_the_most() -> None:
    several = [
        sample_result("bild", {}, 1.5, environment={**ENVIRONMENT, "load_average": load})
        for load in (0.5, 0.2, 0.9)
    ]
    assert dict(environments(several))["load_average"] == "0.2 to 0.9"


def test_the_report_loads_nothing_from_anywhere_and_forbids_it(page):
    loads = [
        attrs[key]
        for _, attrs in page.tags
        for key in ("src", "srcset", "data", "poster")
        if key in attrs
    ]
    styles = [
        attrs for tag, attrs in page.tags if tag in ("link", "iframe", "object", "embed", "base")
    ]
    assert (loads, styles) == ([], [])
    style = re.search(r"<style>(.*?)</style>", page.source, re.DOTALL).group(1)
    assert "url(" not in style and "@import" not in style
    assert page.source.count("plotly.js (basic") == 1 and len(page.source) < 1_500_000
    (policy,) = [
        attrs["content"]
        for tag, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';") and "http" not in policy


def test_markup_in_names_outputs_and_paths_stays_text(tmp_path):
    hostile = sample_result(
        ATTACK, {ATTACK: ATTACK}, 1.5, setting={"target": ATTACK, "dataset": ATTACK}, point=ATTACK,
        environment={ATTACK: ATTACK}, acceptance_by_position=[0.5],
    )  # fmt: skip
    failure = sample_failure(f"the prediction was {ATTACK}")
    page = report(tmp_path, [hostile], [failure], name=ATTACK)
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    # plotly's and ours
    assert [attrs for attrs in scripts if attrs != {"type": "application/json"}] == [{}] * 3
    assert "img" not in {tag for tag, _ in page.tags}
    assert f"the prediction was {ATTACK}" in page.text
    assert f"Sweep \u201c{ATTACK}\u201d" in page.text


def test_a_sweep_without_a_single_result_still_reports(tmp_path):
    page = report(tmp_path, [], [sample_failure()])
    assert "No point was measured." in page.text
    assert "1 failed" in page.text


def test_the_legend_explains_every_column_and_stage(page):
    legend = page.text.split("What the words mean", 2)[2].split("The environment")[0].lower()
    # of single policies, explained in conf/policy
    knobs = {"lenience", "decoder_mask", "verify_tail"}
    titles = {title for table in page.tables for title in table} - knobs
    assert {"speedup", "tokens/call", "none accepted", "gflop/token", "+ prefill"} <= titles
    assert [title for title in sorted(titles) if title.strip("+ ") not in legend] == []


def test_replayed_texts_are_in_the_tables_and_not_in_the_pictures(tmp_path: Path) -> None:
    page = report(tmp_path, [*sample_sweep(), sample_replayed()], [])
    assert "97 equal" in page.text and "2 ties, 1 defects" in page.text
    assert "file theirs.jsonl" in page.text and "replayed texts are not timed" in page.text
    # settings that could share a picture
    two = [sample_replayed(), sample_replayed(setting={"draft": "another"})]
    alone = report(tmp_path, two, [])
    assert "97 equal" in alone.text and "Quality against latency" not in alone.text
    assert "Quality against latency" in report(tmp_path, [*two, *sample_sweep()], []).text
