"""What a reader can do in the lab book: filter, order, put two sweeps side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bild_lab.report.book.book import PAGE, write_book
from tests.report.book.folders import write_outputs, write_sweep
from tests.report.sample import sample_result

Dom = Callable[[Path, str], str]
ERRORS = "const faults = []; addEventListener('error', (event) => faults.push(event.message));"
TICK = "const tick = (name) => picks.find((one) => one.value === name).click();"
DONE = "document.title = faults.join() || 'no faults, focus ' + document.activeElement.id;"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    write_outputs(tmp_path)
    points = [sample_result("bild", {"fallback": at, "window": 10}, 1.2 + at, -0.5) for at in (0.2, 0.4, 0.7)]
    write_sweep(tmp_path / "before", points)
    write_sweep(tmp_path / "after's", [*points[:2], sample_result("<b>new</b>", {}, 9.0)])
    write_sweep(
        tmp_path / "other data", [sample_result("bild", {"fallback": 0.2, "window": 10}, 1.5, setting={"split": "dev"})]
    )
    write_book(tmp_path)
    file = tmp_path / PAGE
    file.write_text(file.read_text().replace("<head>", f"<head><script>{ERRORS}</script>"))
    return file


def panel(dom: str) -> str:
    return dom.split('<section id="beside"', 1)[1].split("</section>", 1)[0]


@pytest.mark.slow
def test_two_ticks_put_two_sweeps_side_by_side(dom_of: Dom, page: Path) -> None:
    dom = dom_of(page, f"{TICK} tick('before'); tick(\"after's\"); {DONE}")
    shown = panel(dom)
    assert "<title>no faults, focus compared</title>" in dom and not shown.startswith(" hidden")
    assert "A: before" in shown and "B: after's" in shown
    assert re.findall(r"<tr><td>(.*?)</td>", shown) == ["bild (fallback 0.4)", "bild (fallback 0.2)"]
    assert ">1.60×<small>[1.55, 1.65]</small>" in shown and "−0.50 [−0.95, 0.00]" in shown
    assert shown.count('class="a"') == 3 and shown.count('class="b"') == 3 and shown.count('class="join"') == 2
    assert "python scripts/compare.py" in shown and "'\\''s'" in shown.replace("&#39;", "'")
    assert "<b>new" not in shown  # names are text


@pytest.mark.slow
def test_other_data_share_no_plane(dom_of: Dom, page: Path) -> None:
    shown = panel(dom_of(page, f"{TICK} tick('before'); tick('other data');"))
    assert "They differ in split (A test, B dev)." in shown and "do not share one plane" in shown
    assert "<svg" not in shown and re.findall(r"<tr><td>(.*?)</td>", shown) == ["bild (fallback 0.2, window 10)"]


@pytest.mark.slow
def test_a_third_tick_replaces_the_first_and_escape_closes(dom_of: Dom, page: Path) -> None:
    ticked = "picks.filter((one) => one.checked).map((one) => one.value).sort().join() + ' ' + panel.hidden"
    escape = "panel.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));"
    three = f"tick('before'); tick('first'); tick('stopped'); const three = {ticked}; {escape}"
    dom = dom_of(
        page, f"{TICK} {three} document.title = three + ' then' + {ticked} + ' ' + document.activeElement.value;"
    )
    assert "<title>first,stopped false then true stopped</title>" in dom


@pytest.mark.slow
def test_words_and_states_filter_and_the_order_changes(dom_of: Dom, page: Path) -> None:
    shown = ".kind:not([hidden]) .entry:not([hidden])"
    names = f"[...document.querySelectorAll('{shown}')].map((one) => one.dataset.name).join()"
    change = "const change = (one, value) => { one.value = value; for (const kind of ['input', 'change']) "
    change += "one.dispatchEvent(new Event(kind)); };"
    steps = [("words", "INTERRUPTED training"), ("words", ""), ("state", "interrupted"), ("order", "name")]
    acts = "".join(f"change({what}, '{value}'); said.push({names});" for what, value in steps)
    dom = dom_of(page, f"{change} const said = []; {acts} document.title = said.join(' | ');")
    title = dom.split("<title>", 1)[1].split("</title>", 1)[0].split(" | ")
    assert title[0] == "half" and len(title[1].split(",")) == 16
    assert sorted(title[2].split(",")) == ["answers", "half", "stopped"] and title[3] == "stopped,half,answers"
    assert "3 of 16 shown" in dom
