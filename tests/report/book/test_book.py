"""The lab book: what it shows of a folder, whatever is in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from bild_lab.files import holding
from bild_lab.lab.results.progress import Progress, running
from bild_lab.lab.schema.json_values import to_json
from bild_lab.report.book import book
from bild_lab.report.book.book import PAGE, matching, read_entries, write_book
from bild_lab.report.book.entry import Entry
from bild_lab.report.book.folders import WORK
from bild_lab.report.headline import headline
from bild_lab.training.folder import TrainingFolder
from tests.report.book.folders import write_json, write_outputs, write_sweep
from tests.report.sample import sample_failure, sample_result, sample_sweep

KINDS_AND_STATES = {
    "first": ("sweep", "finished, 20 points"),
    "stopped": ("sweep", "interrupted, 3 of 9 points"),
    "plane": ("screening", "finished"),
    "bita": ("training", "finished"),
    "half": ("training", "interrupted, step 120 of 400"),
    "both": ("comparison", "finished"),
    "figures/bild_fig4": ("figure", "finished"),
    "figures/bild_fig5": ("figure", "finished"),
    "answers": ("other", "interrupted, 1,024 of 6,000 answers"),
    "match": ("other", "finished"),
    "bench": ("other", "finished"),
    "notes": ("other", "finished"),
    "nothing": ("other", "finished"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outputs = tmp_path_factory.mktemp("written") / "outputs"
    outputs.mkdir()
    write_outputs(outputs)
    write_book(outputs)
    return outputs


@pytest.fixture
def outputs(tmp_path: Path, written: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "outputs", symlinks=True))


class Page(HTMLParser):
    """The elements of a page, each with its attributes, and the text outside scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.text, self._skipped = "", False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, dict(attrs)))
        self._skipped = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._skipped else data

    def having(self, attribute: str) -> list[str]:
        return [found[attribute] for _, found in self.elements if attribute in found]


def entry(outputs: Path, name: str) -> Entry:
    return next(one for one in read_entries(outputs) if one.name == name)


def page(outputs: Path) -> Page:
    return Page((outputs / PAGE).read_text())


def test_every_folder_is_an_entry_of_its_kind_with_its_state(written: Path) -> None:
    assert {one.name: (one.kind, one.told_state) for one in read_entries(written)} == KINDS_AND_STATES
    shown = page(written)
    assert sorted(shown.having("data-name")) == sorted(KINDS_AND_STATES)
    assert [found["id"] for tag, found in shown.elements if tag == "h2" and found["id"] != "compared"] == [
        "sweep", "screening", "training", "comparison", "figure", "other"
    ]  # fmt: skip


def test_a_sweep_has_the_headline_of_its_report_its_pair_its_data_and_its_front(written: Path) -> None:
    one = entry(written, "first")
    assert one.headline == headline(sample_sweep())
    assert (one.pair, one.data) == ("t5-large drafted by t5-tiny", "multi30k test, 100 examples")
    assert one.size_bytes == sum(file.stat().st_size for file in (written / "first").rglob("*") if file.is_file())
    assert sum(dot.strong for dot in one.picture.dots) == sum(point["front"] for point in one.points) > 2
    assert len(one.picture.dots) == 19 and len(one.points) == 20  # the baseline is a line


def test_other_folders_say_what_is_in_them(written: Path) -> None:
    told = {one.name: one.headline for one in read_entries(written)}
    assert told["plane"] == "380 points screened."
    assert told["bita"] == "BiTA adapter: 400 steps, loss 3.250, accepted 0.50 at step 300."
    assert told["both"] == "2 compared."
    assert told["figures/bild_fig4"] == (
        r"Figure 4. Holds: alignment helps. Does not hold: a \| b is best. 1 more claim."
    )
    assert told["figures/bild_fig5"] == "bild_fig5."
    assert told["match"] == "The next token is in the top 1 of layer 2 in 20 %, of layer 4 in 40 % of 1,655 cases."
    assert told["bench"] == "Benchmark: 2 arms, t5." and told["notes"] == "Contains thoughts.txt."
    assert entry(written, "bita").date == "2026-11-20T10:00:00+00:00"
    assert len(entry(written, "bita").picture.dots) == 1
    assert entry(written, "both").sides == ["outputs/first", "outputs/stopped"]


def test_the_newest_comes_first(written: Path) -> None:
    dates = [one.date for one in read_entries(written)]
    assert dates == sorted(dates, reverse=True) and len(set(dates)) > 1


def test_what_runs_is_told_from_what_was_interrupted(outputs: Path) -> None:
    Progress(25, 1).write(outputs / "first")
    with holding(TrainingFolder(outputs / "half").lock), running(outputs / "first"):
        assert entry(outputs, "first").told_state == "running, 1 of 25 points"
        assert entry(outputs, "half").told_state == "running, step 120 of 400"
    Progress(25, 25, ended=True).write(outputs / "first")
    assert entry(outputs, "first").told_state == "finished, 20 points"
    assert entry(outputs, "half").state == "interrupted"
    assert TrainingFolder(outputs).work.name == WORK


def test_failed_and_damaged_points_are_told(outputs: Path) -> None:
    sweep = write_sweep(outputs / "second", [sample_result("bild", {"fallback": at}, 1.5) for at in (0.2, 0.4)])
    sweep.write_failure(sample_failure(), "")
    assert entry(outputs, "second").told_state == "failed, 1 of 3 points"
    next(iter(sweep.points.glob("*/result.json"))).write_bytes(b"{")
    assert (entry(outputs, "second").state, entry(outputs, "second").told_state) == ("damaged", "1 of 2 points damaged")


def test_a_result_of_a_newer_version_is_told_in_its_place(outputs: Path) -> None:
    file = next(iter((outputs / "stopped/points").glob("*/result.json")))
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema": 99}))
    newer = entry(outputs, "stopped")
    assert newer.state == "damaged" and "another version of bild_lab" in newer.headline
    assert entry(outputs, "first").state == "finished"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "noise": lambda file: file.write_bytes(b"\x00\xff\xfe{[<"),
    "list": lambda file: file.write_text("[]"),
    "null": lambda file: file.write_text("null"),
    "other keys": lambda file: file.write_text('{"points": "many", "names": 3, "history": null, "rows": [1]}'),
    "folder": lambda file: (file.unlink(), file.mkdir()),
    "gone": lambda file: file.unlink(),
    "locked": lambda file: file.chmod(0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_never_break_it(outputs: Path, damage: str) -> None:
    files = [
        file for file in sorted(outputs.rglob("*")) if file.is_file() and not file.is_relative_to(outputs / "first")
    ]
    files += sorted((outputs / "first/points").glob("*/*"))[:3]
    others = {name.partition("/")[0] for name in KINDS_AND_STATES} - {"first"}
    for file in files:
        if file.name != PAGE:
            DAMAGE[damage](file)
    found = {one.name.partition("/")[0]: one for one in write_book(outputs)}
    assert others - {"figures"} <= found.keys() and "first" in found
    assert found["first"].kind == "sweep" and found["notes"].state == "finished"
    if damage in ("cut", "noise"):
        assert {found[name].state for name in ("bita", "half", "match", "bench", "answers", "plane")} == {"damaged"}
        assert found["bench"].headline.startswith("Cannot be read: ")
    assert {unquote(name).partition("/")[0] for name in page(outputs).having("data-name")} == found.keys()


def test_what_came_from_outside_is_escaped(outputs: Path) -> None:
    names = ["<script>alert(1)<", "a\"b'c&d", "50% of #1?", "<li><b>", "ä ö"]
    for name in names:
        write_sweep(outputs / name, [sample_result("<b>bild</b>", {"fallback": "</script><i>"}, 1.5)])
    write_json(outputs / "evil/metrics.json", {"start": "<img src=x onerror=alert(1)>", "history": [], "steps": 1,
               "loss": 1.0, "metric": "bleu", "data": "</script><script>alert(2)</script>"})  # fmt: skip
    write_book(outputs)
    shown = page(outputs)
    assert not [tag for tag, _ in shown.elements if tag in ("b", "i")]
    assert [found.get("id") for tag, found in shown.elements if tag == "script"] == ["sweeps", None]
    assert set(names) <= set(shown.having("data-name")) and "onerror" not in dict.fromkeys(
        key for _, found in shown.elements for key in found
    )


def test_every_link_and_picture_is_there_and_nothing_comes_from_the_network(outputs: Path) -> None:
    for name in ("50% of #1?", "ä ö", "a&b<c"):
        write_sweep(outputs / name, [sample_result("bild", {}, 1.5)])
        (outputs / name / "report.html").write_text("a report")
    write_book(outputs)
    shown = page(outputs)
    targets = [target for name in ("href", "src") for target in shown.having(name) if not target.startswith("#")]
    assert len(targets) > 30 and [one for one in targets if not (outputs / unquote(one)).exists()] == []
    assert "50%25%20of%20%231%3F/report.html" in targets
    ids = shown.having("id")
    assert [one for one in shown.having("href") if one[0] == "#" and one[1:] not in ids] == []
    assert len(ids) == len(set(ids))
    addresses = set(re.findall(r"[a-z]+://[\w./]*", (outputs / PAGE).read_text()))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_pictures_and_controls_have_names(written: Path) -> None:
    shown = page(written)
    for tag, found in shown.elements:
        if tag in ("svg", "img"):
            assert found.get("aria-label") or found.get("alt"), (tag, found)
    picks = [found["aria-label"] for tag, found in shown.elements if found.get("type") == "checkbox"]
    assert picks and picks == [f"compare {name}" for name in picks_of(written)]


def picks_of(outputs: Path) -> list[str]:
    return [one.name for one in read_entries(outputs) if one.points]


def test_the_filter_finds_names_models_data_policies_and_states(written: Path) -> None:
    entries = read_entries(written)
    assert [one.name for one in matching(entries, ["interrupted", "SWEEP"])] == ["stopped"]
    assert [one.name for one in matching(entries, ["hf_assisted"])] == ["first"]
    assert [one.name for one in matching(entries, ["t5-tiny", "20 points"])] == ["first"]
    assert matching(entries, ["nowhere"]) == [] and len(matching(entries, [])) == len(entries)


def test_only_folders_that_changed_are_read_again(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = book._read
    monkeypatch.setattr(book, "_read", lambda folder, listing: (read.append(folder.name), real(folder, listing))[1])
    may_change = ["answers", "half", "stopped"]  # a process may have begun or ended
    before = write_book(outputs)
    first = sorted(read)
    assert {"first", *may_change} <= set(first)  # the copies have times of their own
    read.clear()
    assert to_json(write_book(outputs)) == to_json(before) and sorted(read) == may_change
    read.clear()
    (outputs / "notes/more.txt").write_text("more")
    write_book(outputs)
    assert sorted(read) == sorted([*may_change, "notes"])
    (outputs / ".lab_book.json").write_text('{"code": 1, "folders": "none"}')
    assert [one.name for one in write_book(outputs)] == [one.name for one in read_entries(outputs)]


def test_a_removed_folder_leaves_the_book(outputs: Path) -> None:
    shutil.rmtree(outputs / "first")
    assert "first" not in {one.name for one in write_book(outputs)}
    assert "first" not in page(outputs).having("data-name")


def test_the_page_is_written_whole_or_not_at_all(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (outputs / PAGE).read_bytes()
    files = sorted(file.name for file in outputs.iterdir())
    (outputs / "new").mkdir()

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk is full"):
        write_book(outputs)
    assert (outputs / PAGE).read_bytes() == before
    assert sorted(file.name for file in outputs.iterdir()) == sorted([*files, "new"])


def test_a_folder_that_cannot_be_remembered_is_shown_all_the_same(outputs: Path) -> None:
    (outputs / ".lab_book.json").unlink()
    (outputs / ".lab_book.json").mkdir()
    assert {one.name for one in write_book(outputs)} == set(KINDS_AND_STATES)


def test_a_large_sweep_keeps_its_front_among_the_points_to_compare_by(tmp_path: Path) -> None:
    slow = [sample_result("bild", {"fallback": at / 1000}, 1.2 - at / 1000, -1.0) for at in range(118)]
    best = [sample_result("speculative", {"window": 4}, 1.5, 1.0), sample_result("ngram", {}, 1.4, 2.0)]
    write_sweep(tmp_path / "large", [*slow, *best])
    one = entry(tmp_path, "large")
    assert (len(one.points), one.points_left_out) == (100, 20)
    assert [point["policy"] for point in one.points if point["front"]] == ["speculative", "ngram"]


@pytest.mark.slow
def test_hundreds_of_folders_take_a_second(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep", sample_sweep()[:6])
    for number in range(300):
        shutil.copytree(tmp_path / "sweep", tmp_path / f"sweep{number}")
    write_book(tmp_path)
    started = time.perf_counter()
    (tmp_path / "sweep7/notes.txt").write_text("changed")
    assert len(write_book(tmp_path)) == 301
    assert time.perf_counter() - started < 3
