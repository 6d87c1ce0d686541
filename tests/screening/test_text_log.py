"""The texts of a screening on disk: written, read again, cut short, and of other points."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bild_lab.screening.replay import ReplayedText
from bild_lab.screening.text_log import LoggedExample, TextLog, texts_of_points

KEY = {"points": [{"policy": "vanilla", "knobs": {}}, {"policy": "bild", "knobs": {"rollback": 2}}]}
SOURCES = ["first", "second", "third"]


def example(place: int) -> LoggedExample:
    texts = [
        ReplayedText(tokens, Counter(tokens=len(tokens)), {"rounds of bild": 2.0, "texts": 1.0})
        for tokens in ((place, 7, 1), (place, 7, 1), (place, 8))
    ]
    return LoggedExample(place, SOURCES[place], texts, {"target": place, "draft": 2})


@pytest.fixture
def log(tmp_path: Path) -> TextLog:
    """With the last example before the first."""
    made = TextLog(tmp_path, KEY)
    for place in (2, 0):
        made.append(example(place))
    return made


def test_what_was_logged_is_read_again(log: TextLog, tmp_path: Path) -> None:
    assert TextLog(tmp_path, KEY).read(SOURCES) == {2: example(2), 0: example(0)}
    assert dict(texts_of_points(log.file, 2)) == {0: [(0, 7, 1), (0, 7, 1), (0, 8)]}


def test_a_log_that_was_cut_short_keeps_its_whole_examples_and_goes_on(
    log: TextLog, tmp_path: Path
) -> None:
    log.file.write_bytes(log.file.read_bytes()[:-5])
    again = TextLog(tmp_path, KEY)
    assert list(again.read(SOURCES)) == [2]
    again.append(example(1))
    assert TextLog(tmp_path, KEY).read(SOURCES) == {2: example(2), 1: example(1)}


def test_texts_of_other_points_or_prompts_are_not_taken(log: TextLog, tmp_path: Path) -> None:
    assert TextLog(tmp_path, {**KEY, "code": ["changed"]}).read(SOURCES) == {}
    for others in (["first", "second", "another"], SOURCES[:2]):  # one changed, one gone
        assert TextLog(tmp_path, KEY).read(others) == {0: example(0)}
    assert TextLog(tmp_path, KEY).read(["another", "second", "third"]) == {2: example(2)}


def test_examples_behind_the_last_of_a_command_with_fewer_stay_logged(
    log: TextLog, tmp_path: Path
) -> None:
    """Fault: they were removed, and decoded anew by the next command with all examples."""
    assert TextLog(tmp_path, KEY).read(SOURCES[:1]) == {0: example(0)}
    assert TextLog(tmp_path, KEY).read(SOURCES) == {2: example(2), 0: example(0)}


def test_a_log_whose_beginning_is_damaged_begins_anew(log: TextLog, tmp_path: Path) -> None:
    log.file.write_bytes(log.file.read_bytes()[1:])
    again = TextLog(tmp_path, KEY)
    assert again.read(SOURCES) == {}
    again.append(example(1))
    assert TextLog(tmp_path, KEY).read(SOURCES) == {1: example(1)}
