"""What a reader can do on the pages: open a point, walk through texts and rounds, sort and filter a
table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bild_lab.lab.store.records import Sweep
from bild_lab.report.comparison import write_comparison
from bild_lab.report.page.html import write_html
from bild_lab.report.page.index import write_index
from tests.report.sample import sample_example, sample_result, sample_sweep
from tests.report.test_comparison import compared

Dom = Callable[[Path, str], str]
TARGET = "a man in a red hat"
ERRORS = "const faults = []; addEventListener('error', (event) => faults.push(event.message));"
WORDS = {
    "1": "</s>",
    "10": " a",
    "11": " red",
    "12": " car",
    "13": " bus",
    "14": "<script>alert(1)</script>",
}
ROUNDS = [
    {
        "drafted": [10, 13],
        "accepted": 1,
        "next_token": 11,
        "confidence": [0.9, 0.7],
        "distance": [0.1, 2.5],
    },
    {"drafted": [14], "accepted": 1, "next_token": 12, "confidence": [0.8, 0.3], "fallback": True},
]
TRACED = {
    "token_ids": [10, 11, 14, 12],
    "rounds": ROUNDS,
    "pieces": WORDS,
    "prompt": "ein rotes Auto",
    "spans": [["prefill", 0, 0.001], ["draft", 0.001, 0.002], ["verify", 0.002, 0.004]],
}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The report of a sweep whose points are stored with two traced texts each."""
    sweep = Sweep(tmp_path / "first")
    for result in sample_sweep():
        word = "<b>blue</b>" if result.policy == "bild" else "red"
        own = {
            "baseline_prediction": TARGET,
            "baseline_token_ids": [1],
            "baseline_latency_s": [2.0],
            **TRACED,
        }
        texts = [
            sample_example(f"test-{at}", prediction=f"a man in a {word} hat", **own)
            for at in (0, 1)
        ]
        sweep.write_point(result.point, "", result, texts)
    report = sweep.folder / "report.html"
    write_html("first", sweep.results(), [], report)
    report.write_text(report.read_text().replace("<head>", f"<head><script>{ERRORS}</script>"))
    return report


def between(dom: str, begin: str, end: str) -> str:
    return dom.split(begin, 1)[1].split(end, 1)[0]


@pytest.mark.slow
def test_a_button_opens_everything_about_its_point_until_it_is_closed(
    dom_of: Dom, page: Path
) -> None:
    script = """
document.querySelector('ol.front a').click();
const opened = location.hash.slice(0, 7), dialog_ = document.getElementById('point'), shown = dialog_.cloneNode(true);
dialog_.close();
setTimeout(() => { document.title = `${opened} then ${location.hash || 'nothing'} ${faults.join()}.`; }, 9);
document.body.append(shown);
"""
    dom = dom_of(page, script)
    assert "<title>#point- then nothing .</title>" in dom
    dialog = dom.split('<dialog id="point"')[2]
    assert dialog.startswith(' aria-labelledby="point-title" open')
    assert "bild (fallback 0.3, rollback 5, window 10, verify_tail on)" in dialog
    assert ">speedup</dt><dd>1.83× [1.78, 1.88]</dd>" in dialog
    assert (
        '<a href="#texts">Examples' in dialog
        and '<a href="#viewer">' in dialog
        and "config.yaml</a>" in dialog
    )


@pytest.mark.slow
def test_a_mark_of_a_figure_opens_its_point(dom_of: Dom, page: Path) -> None:
    point = next(result.point for result in sample_sweep() if result.policy == "hf_assisted")
    click = (
        "document.querySelector('.figure').emit('plotly_click', {points: [{customdata:"
        f" '{point}'}}]}});"
    )
    dom = dom_of(page, click)
    assert 'id="point-title">hf_assisted (window 5)<' in dom
    assert dom.count('class="figure js-plotly-plot"') == 5  # points, two maps, stages, acceptance


@pytest.mark.slow
def test_texts_have_their_differences_marked_and_rounds_their_authors(
    dom_of: Dom, page: Path
) -> None:
    dom = dom_of(page, "")
    texts = between(dom, '<div class="list"', "</article>")
    assert "17 % of the words differ" in texts
    assert "<dd>a man in a <del>red</del> hat </dd>" in texts
    assert "<dd>a man in a <ins>&lt;b&gt;blue&lt;/b&gt;</ins> hat </dd>" in texts
    viewer = between(dom, '<p class="prompt">', "</section>")  # of the whole text at first
    assert '<span class="accepted"> a</span><span class="replacement"> red</span>' in viewer
    assert '<span class="accepted now">&lt;script&gt;alert(1)&lt;/script&gt;</span>' in viewer
    assert '<span class="fallback now"> car</span>' in viewer


@pytest.mark.slow
def test_a_title_sorts_its_table(dom_of: Dom, page: Path) -> None:
    script = (
        "[...document.querySelectorAll('.tall th button')].find((each) => each.textContent ==="
        " 'speedup').click();"
    )
    rows = re.findall(r'<tr class="[^"]*" id="point-\w+" data-point="(\w+)"', dom_of(page, script))
    slowest = sorted(sample_sweep(), key=lambda result: result.speedup.value)
    assert rows[:3] == [result.point for result in slowest[:3]]


@pytest.mark.slow
def test_words_filter_the_list_of_runs(dom_of: Dom, page: Path) -> None:
    outputs = page.parents[1]
    (outputs / "second" / "points").mkdir(parents=True)
    write_index(outputs)
    script = "const box = document.querySelector('[data-filter]'); box.value = 'SECO';"
    script += "box.dispatchEvent(new Event('input'));"
    dom = dom_of(outputs / "index.html", script)
    rows = re.findall(r'<tr( hidden="")?><td><a href="[^"]*">(\w+)</a>', dom)
    assert sorted(rows) == [("", "second"), (' hidden=""', "first")]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 500])  # a window is not narrower
def test_a_table_that_is_cut_names_the_columns_out_of_sight(
    dom_of: Dom, page: Path, width: int
) -> None:
    dom = dom_of(page, "", width)
    hints = re.findall(r'<p class="note cut">([^<]*)</p><div class="scroll tall', dom)
    (hint,) = hints
    assert hint.startswith("→ scroll sideways for ") and ("acceptance" in hint or "more" in hint)
    assert "speedup" not in hint  # it is in sight, on a narrow screen too


@pytest.mark.slow
def test_the_menu_of_a_high_map_lies_below_its_title(dom_of: Dom, tmp_path: Path) -> None:
    knobs = [
        {"fallback": fallback, "rollback": rollback, "window": window}
        for fallback in range(19)
        for rollback in (1, 2)
        for window in (4, 8)
    ]
    points = [sample_result("bild", each, 1.5, -0.1) for each in knobs]
    write_html("first", points, [], tmp_path / "report.html")
    script = """
const menu = document.querySelector('.updatemenu-header');
const title = menu.closest('.figure').querySelector('.gtitle');
document.title = title.getBoundingClientRect().bottom <= menu.getBoundingClientRect().top;
"""
    dom = dom_of(tmp_path / "report.html", script)
    assert between(dom, "<title>", "</title>") == "true"


@pytest.mark.slow
def test_a_long_name_of_a_point_does_not_cover_what_is_said_of_it(
    dom_of: Dom, tmp_path: Path
) -> None:
    long = [replace(point, policy=f"{point.policy}_{'long' * 9}") for point in sample_sweep()]
    write_html("first", long, [], tmp_path / "report.html")
    script = "const fits = (name) => name.scrollWidth <= name.clientWidth;"
    script += "document.title = [...document.querySelectorAll('dt')].every(fits);"
    dom = dom_of(tmp_path / "report.html", script)
    assert between(dom, "<title>", "</title>") == "true"


@pytest.mark.slow
def test_on_a_narrow_screen_the_marks_of_a_comparison_have_room(
    dom_of: Dom, tmp_path: Path
) -> None:
    one = compared()
    long = replace(one.pair, distinct={"a long name of a key": "and its value"})
    write_comparison(
        tmp_path, ("a", "b"), [replace(one, pair=long, latency_ratio=one.speedups[0])] * 2, []
    )
    script = "document.title = document.querySelector('.figure')._fullLayout._size.w"
    wide = float(between(dom_of(tmp_path / "compare.html", script, 500), "<title>", "</title>"))
    assert wide > 350
