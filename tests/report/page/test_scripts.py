"""What a reader can do on a report: open a point, walk through texts, read heat maps, sort a table."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bild_lab.lab.results.records import Sweep
from bild_lab.report.page.html import write_html
from tests.report.sample import sample_example, sample_sweep

Dom = Callable[[Path, str], str]
TARGET = "a man in a red hat"
ERRORS = "const faults = []; addEventListener('error', (event) => faults.push(event.message));"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The report of a sweep whose points are stored with a text each."""
    sweep = Sweep(tmp_path / "first")
    for result in sample_sweep():
        own = {"baseline_prediction": TARGET, "baseline_token_ids": [1], "baseline_latency_s": [2.0]}
        word = "<b>blue</b>" if result.policy == "bild" else "red"
        sweep.write_point(
            result.point, "", result, [sample_example("test-0", prediction=f"a man in a {word} hat", **own)]
        )
    report = sweep.folder / "report.html"
    write_html("first", sweep.results(), [], report)
    report.write_text(report.read_text().replace("<head>", f"<head><script>{ERRORS}</script>"))
    return report


def between(dom: str, begin: str, end: str) -> str:
    return dom.split(begin, 1)[1].split(end, 1)[0]


@pytest.mark.slow
def test_a_button_opens_everything_about_its_point(dom_of: Dom, page: Path) -> None:
    dom = dom_of(page, "document.querySelector('ol.front a').click(); document.title = faults.join() || 'no faults';")
    dialog = between(dom, '<dialog id="point"', "</dialog>")
    assert "<title>no faults</title>" in dom
    assert dialog.startswith(' aria-labelledby="point-title" open')
    assert "bild (fallback 0.3, rollback 5, window 10, verify_tail on)" in dialog
    assert ">speedup</dt><dd>1.83× [1.78, 1.88]</dd>" in dialog
    assert '<a href="#texts">its texts</a>' in dialog and "config.yaml</a>" in dialog


@pytest.mark.slow
def test_an_open_point_is_in_the_address_until_it_is_closed(dom_of: Dom, page: Path) -> None:
    script = """
document.querySelector('ol.front a').click();
const opened = location.hash.slice(0, 7);
document.getElementById('point').close();
setTimeout(() => { document.title = `${opened} then ${location.hash || 'nothing'} ${faults.join()}.`; }, 9);
"""
    assert "<title>#point- then nothing .</title>" in dom_of(page, script)


@pytest.mark.slow
def test_a_mark_of_the_figure_opens_its_point(dom_of: Dom, page: Path) -> None:
    point = next(result.point for result in sample_sweep() if result.policy == "hf_assisted")
    click = f"document.getElementById('pareto-0').emit('plotly_click', {{points: [{{customdata: '{point}'}}]}});"
    dom = dom_of(page, click)
    assert 'id="point-title">hf_assisted (window 5)<' in dom


@pytest.mark.slow
def test_the_browser_of_texts_marks_the_words_that_differ(dom_of: Dom, page: Path) -> None:
    texts = between(dom_of(page, ""), '<div class="texts"', "</section>")
    assert "17 % of the words differ" in texts
    assert "<dd>a man in a <del>red</del> hat </dd>" in texts
    assert "<dd>a man in a <ins>&lt;b&gt;blue&lt;/b&gt;</ins> hat </dd>" in texts
    assert "1 to 1 of 1" in texts


@pytest.mark.slow
def test_a_heat_map_has_a_button_for_every_point(dom_of: Dom, page: Path) -> None:
    heat = between(dom_of(page, ""), '<div class="heat"', "<h3")
    assert heat.count("<button") == 2 * 12
    assert 'aria-label="fallback 0.3, rollback 5: 1.83"' in heat
    assert len(re.findall("<caption>bild: (Speedup|BLEU, difference from vanilla)</caption>", heat)) == 2


@pytest.mark.slow
def test_a_title_sorts_its_table(dom_of: Dom, page: Path) -> None:
    script = "[...document.querySelectorAll('.tall th button')].find((each) => each.textContent === 'speedup').click();"
    rows = re.findall(r'<tr class="[^"]*" id="point-\w+" data-point="(\w+)"', dom_of(page, script))
    slowest = sorted(sample_sweep(), key=lambda result: result.speedup.value)
    assert rows[:3] == [result.point for result in slowest[:3]]
