"""A screening that keeps texts: those of one that keeps scores, without its files, and after a kill
it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from bild_lab.screening import screen as screening
from bild_lab.screening.text_log import FOLDER, texts_of_points

Command = Callable[..., tuple[int, str]]
LISTS = ["policy=bild", "policy.fallback=0.2,0.9", "policy.rollback=0.5,3"]
UNTIMED = ["screen.timed_s=0", "screen.confirmations=0"]
COUNTED = ("live_target_calls", "recorded_target_calls", "recorded_draft_calls")


def summary_of(name: str) -> dict:
    return json.loads(Path(f"outputs/{name}/screen.json").read_text())


def logs_of(name: str) -> list[Path]:
    return list(Path(f"outputs/{name}/{FOLDER}").glob("*.jsonl"))


@pytest.mark.slow
def test_texts_are_kept_in_place_of_scores(
    screen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert screen(*LISTS, *UNTIMED, "name=scores")[0] == 0
    monkeypatch.setattr(screening, "JUDGED_BYTES", 1)  # of which the first text takes more
    code, printed = screen(*LISTS, "screen.confirmations=0", "name=texts", "screen.keep=texts")
    assert code == 0, printed
    scores, texts = summary_of("scores"), summary_of("texts")
    assert [texts[key] for key in COUNTED] == [scores[key] for key in COUNTED]
    assert 0 < texts["record_bytes"] < scores["record_bytes"]
    # a text whose scores are there is timed and compared with the live one
    assert texts["replayed_live"] > texts["replayed_differently"] == 0
    frames = [pd.read_csv(f"outputs/{name}/screen.csv") for name in ("scores", "texts")]
    timed = ["predicted_speedup", "on_front"]
    assert frames[0].drop(columns=timed).equals(frames[1].drop(columns=timed))
    (log,) = logs_of("texts")
    assert [len(points) for _, points in texts_of_points(log, 3)] == [1 + 4] * 3
    assert logs_of("scores") == []


_KILLED = """
import os, signal
from bild_lab.screening import text_log
append = text_log.TextLog.append
def once(self, logged):
    append(self, logged)
    os.kill(os.getpid(), signal.SIGKILL)
text_log.TextLog.append = once
"""


@pytest.mark.slow
def test_a_screening_that_was_killed_goes_on_after_the_examples_that_it_logged(
    screen: Command, killed_screen: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [*LISTS, *UNTIMED, "screen.keep=texts"]
    killed_screen(_KILLED, *kept)
    (log,) = logs_of("grid")
    assert log.read_bytes().count(b"\n") == 1 + 1
    decoded: list[str] = []
    replay_text = screening.replay_text
    monkeypatch.setattr(
        screening,
        "replay_text",
        lambda name, *rest: decoded.append(name) or replay_text(name, *rest),
    )
    code, printed = screen(*kept)
    assert code == 0, printed
    assert decoded.count("vanilla") == 2 and len(decoded) == 2 * (1 + 4)
    assert screen(*kept, "name=fresh")[0] == 0
    went_on, fresh = summary_of("grid"), summary_of("fresh")
    assert [went_on[key] for key in COUNTED] == [fresh[key] for key in COUNTED]
    frames = [pd.read_csv(f"outputs/{name}/screen.csv") for name in ("grid", "fresh")]
    assert frames[0].equals(frames[1])


@pytest.mark.slow
def test_drafters_that_learn_from_texts_learn_from_all_of_them_after_a_kill(
    screen: Command, killed_screen: Callable[..., None]
) -> None:
    lists = ["policy=suffix", "policy.keep=true", "policy.factor=1,4", "policy.min_prob=0"]
    kept = [*lists, *UNTIMED, "screen.keep=texts"]
    killed_screen(_KILLED, *kept)
    for name in ("grid", "fresh"):
        code, printed = screen(*kept, f"name={name}")
        assert code == 0, printed
    went_on, fresh = (pd.read_csv(f"outputs/{name}/screen.csv") for name in ("grid", "fresh"))
    assert went_on.equals(fresh) and fresh.accepted.sum() > 0
    (log,) = logs_of("grid")
    assert [place for place, _ in texts_of_points(log, 3)] == [0, 1, 2]
