"""Tests of the HTML report: complete, escaped, and independent of any network."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from bild_lab.lab.schema.numbers import CertificateCounts
from bild_lab.lab.schema.result import Failure, Result
from bild_lab.report.page.html import write_html
from tests.report.sample import ENVIRONMENT, sample_baseline, sample_failure, sample_result, sample_sweep

ATTACK = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>"


class Page(HTMLParser):
    """Collects the tags with their attributes, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.tables: list[list[str]] = []  # the lower-case titles of each one's columns
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


def test_the_report_opens_with_the_finding(page):
    assert "No loss of BLEU measured: bild (fallback 0.3, rollback 1) decodes 1.55\u00d7 [1.50, 1.60]" in page.text
    assert "20 points measured in 23.6 min, 1 failed" in page.text


def test_the_report_holds_every_point(page):
    assert len([1 for tag, attrs in page.tags if attrs.get("href", "").startswith("points/")]) == 20


def test_the_report_names_failed_points_with_their_message(page):
    assert "UserError: rollback threshold must be > 0 nats, got -1; use .inf to switch it off" in page.text


@pytest.mark.parametrize(
    "heading",
    [
        "Quality against latency",
        "Fastest where no loss was measured, and within one point of loss",
        "Why this speed",
        "Every point",
        "Where an example\u2019s time goes",
        "Acceptance by draft position",
        "Where the sweep\u2019s time went",
        "How it was measured",
        "What the words mean",
        "The environment",
    ],
)
def test_the_report_has_the_section(page, heading):
    assert heading in page.text


def test_the_contents_lead_to_every_heading(page):
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    headings = [attrs["id"] for tag, attrs in page.tags if tag in ("h2", "h3") and attrs.get("id") != "point-title"]
    listed = [attrs["href"][1:] for tag, attrs in page.tags if tag == "a" and "class" not in attrs]
    assert [one for one in listed if one in headings][: len(headings)] == headings


def test_every_figure_and_scrolling_table_says_what_it_is(page):
    for _, attrs in page.tags:
        kinds = attrs.get("class", "").split()
        if {"figure", "scroll"} & set(kinds):
            assert attrs["aria-label"] and attrs["role"] in ("img", "region"), attrs
        if "scroll" in kinds:
            assert attrs["tabindex"] == "0"


def test_the_front_is_listed_with_its_knobs(page):
    words = page.text.split("Quality against latency")[2].split("Best speedup")[0]
    assert "bild (fallback 0.3, rollback 5) 1.83\u00d7, BLEU 39.69, \u22121.31 [\u22121.76, \u22120.81]" in words
    opened = [attrs["data-open"] for _, attrs in page.tags if "data-open" in attrs]
    rows = {attrs["data-point"] for _, attrs in page.tags if "data-point" in attrs}
    assert len(opened) == 20 + 6 and set(opened) == rows


def test_a_baseline_that_is_no_point_has_a_row_of_what_was_timed_beside(tmp_path):
    sweep = sample_sweep(baseline_tokens_per_s=150.0)
    page = report(tmp_path, [one for one in sweep if not one.is_baseline], [])
    assert [1 for tag, attrs in page.tags if tag == "tr" and "baseline" in attrs.get("class", "")] == [1]
    assert "vanilla timed beside 19 points 1.00\u00d7 41.00" in page.text
    assert len([1 for tag, attrs in page.tags if attrs.get("data-point")]) == 19


def test_shares_of_time_cover_the_whole(page):
    table = page.text.split("Where the sweep\u2019s time went")[2].split("How it was measured")[0]
    assert sum(map(float, re.findall(r"([\d.]+) %", table))) == pytest.approx(100, abs=0.3)


def test_the_report_loads_nothing_from_anywhere(page):
    loads = [attrs[key] for _, attrs in page.tags for key in ("src", "srcset", "data", "poster") if key in attrs]
    styles = [attrs for tag, attrs in page.tags if tag in ("link", "iframe", "object", "embed", "base")]
    assert (loads, styles) == ([], [])


def test_the_report_forbids_the_browser_to_load_anything(page):
    (policy,) = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy


def test_styles_import_nothing(tmp_path):
    write_html("first", sample_sweep(), [], tmp_path / "report.html")
    style = re.search(r"<style>(.*?)</style>", (tmp_path / "report.html").read_text(), re.DOTALL).group(1)
    assert "url(" not in style
    assert "@import" not in style


def test_plotly_is_inlined_once(tmp_path):
    write_html("first", sample_sweep(), [], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("plotly.js (basic") == 1


def test_markup_in_names_outputs_and_paths_stays_text(tmp_path):
    hostile = sample_result(
        ATTACK, {ATTACK: ATTACK}, 1.5, setting={"target": ATTACK, "dataset": ATTACK}, point=ATTACK,
        environment={ATTACK: ATTACK}, acceptance_by_position=[0.5],
    )  # fmt: skip
    failure = sample_failure(f"the prediction was {ATTACK}")
    page = report(tmp_path, [hostile], [failure], name=ATTACK)
    assert [attrs for tag, attrs in page.tags if tag == "script"] == [{}, {}]  # plotly and ours
    assert "img" not in {tag for tag, _ in page.tags}
    assert f"the prediction was {ATTACK}" in page.text
    assert f"Sweep \u201c{ATTACK}\u201d" in page.text


def test_settings_that_differ_are_told_apart(tmp_path):
    page = report(tmp_path, sample_sweep() + sample_sweep(setting={"dataset": "iwslt"}), [])
    assert "The settings differ" in page.text
    assert "dataset multi30k iwslt" in page.text
    assert {attrs["id"] for _, attrs in page.tags if "id" in attrs} >= {
        "pareto-0",
        "pareto-1",
        "setting-1",
        "setting-2",
    }


def test_a_sweep_without_a_single_result_still_reports(tmp_path):
    page = report(tmp_path, [], [sample_failure()])
    assert "No point finished, so there is nothing to report." in page.text
    assert "1 failed" in page.text


def test_a_report_that_cannot_be_put_in_place_leaves_no_rubbish(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_html("first", [], [], tmp_path / "report.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_predictions_stand_beside_what_was_measured(page):
    assert "Thm 3.8 rounds + verify + host + prefill measured" in page.text
    assert "speculative window 4 0.170 74.0 % 4 1.81\u00d7 1.71\u00d7" in page.text
    assert "bild fallback 0.3, rollback 1 0.170 75.0 % \u2013 \u2013 1.92\u00d7" in page.text  # no fixed window


def test_operations_and_traffic_are_told_beside_the_baselines(page):
    assert "0.076 33.6 2.24 1.40\u00d7 0.60\u00d7 2.33\u00d7" in page.text


def test_results_without_predictions_and_costs_get_no_such_tables(tmp_path):
    results = [replace(result, prediction=None, cost=None) for result in sample_sweep()]
    text = report(tmp_path, results, []).text
    assert "Predicted beside measured" not in text
    assert "Operations and memory traffic" not in text


def test_certificates_are_told_where_there_are_any(tmp_path):
    results = sample_sweep()
    assert "ties" not in report(tmp_path, results, []).text.split("What the words mean")[0]
    results[3] = replace(results[3], certificate=CertificateCounts(equal=97, ties=2, defects=1))
    assert "97 equal 2 ties, 1 defects" in report(tmp_path, results, []).text


def test_each_policys_hypervolume_is_told_with_its_reference_point(tmp_path):
    results = [
        sample_baseline(),
        sample_result("bild", {"rollback": 1}, 2.0, 0.0),
        sample_result("bild", {"rollback": 5}, 4.0, -0.6),
        sample_result("speculative", {"window": 5}, 1.25, 0.0),
        sample_result("hf_generate", {}, 0.5, 0.0),
    ]
    text = report(tmp_path, results, []).text
    assert (
        "relative latency 1 and 1.0 points of BLEU below vanilla" in text or "1.0 point of BLEU below vanilla" in text
    )
    assert "bild 2 0.600 speculative 1 0.200 hf_generate 1 0.000" in text  # 0.5 · 1 + 0.25 · 0.4; 0.2 · 1
    frame = pd.read_csv(tmp_path / "hypervolume.csv")
    assert frame["policy"].tolist() == ["bild", "speculative", "hf_generate"]
    assert frame["hypervolume"].tolist() == pytest.approx([0.6, 0.2, 0.0])
    assert (frame["reference_latency"] == 1).all() and (frame["reference_quality"] == 40).all()


def test_without_a_baseline_there_is_no_hypervolume(tmp_path):
    page = report(tmp_path, [sample_result("bild", {}, None, setting={"baseline": None})], [])
    assert "Hypervolume of each policy" not in page.text
    assert not (tmp_path / "hypervolume.csv").exists()


def test_the_legend_explains_every_column_and_stage(page):
    legend = page.text.split("What the words mean", 2)[2].split("The environment")[0].lower()
    knobs = {"lenience", "decoder_mask", "verify_tail"}  # of single policies, explained in conf/policy
    titles = {title for table in page.tables for title in table} - knobs
    assert {"speedup", "tokens/call", "none accepted", "gflop/token", "+ prefill", "hypervolume"} <= titles
    assert [title for title in sorted(titles) if title.strip("+ ") not in legend] == []


def test_a_speedup_of_a_busy_machine_is_told_with_it_in_every_table(tmp_path):
    own = {"environment": {**ENVIRONMENT, "busy_elsewhere_percent": 74.4}}
    category = {
        "n_examples": 9,
        "tokens": 9,
        "tokens_per_s": 5.0,
        "baseline_tokens_per_s": 2.0,
        "tokens_per_s_ratio": 2.5,
    }
    category |= {
        "tokens_per_target_call": 2.0,
        "acceptance_rate": 0.5,
        "speedup": {"value": 1.4, "low": 1.3, "high": 1.5},
    }
    busy = sample_result("bild", {}, 1.5, categories={"news": category}, **own)
    text = report(tmp_path, [busy], []).text
    # the fastest at no loss and at one point of loss, every point, the category overall
    assert text.count("1.50\u00d7 [1.45, 1.55], machine 74 % busy") == 4
    assert "1.40\u00d7 [1.30, 1.50], machine 74 % busy" in text
    assert "1 of 1 point was timed while other programs used 74 % of the machine" in text
    assert "do not rely on it: machine 74 % busy" in (tmp_path / "report.html").read_text()


def test_few_examples_have_no_fastest_points(tmp_path):
    text = report(tmp_path, sample_sweep(setting={"n_examples": 19}), []).text
    assert "19 examples are too few" in text and "Fastest where no loss was measured" not in text


def test_every_policy_that_was_traced_is_explained(page):
    assert "speculative (window 4), 1.38\u00d7 3.37 tokens a call (\u03b1 74 %); a drafter step costs" in page.text
    assert page.text.count("Most would help: ") == 2
