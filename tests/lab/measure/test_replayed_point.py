"""A point of replayed texts: judged and scored, and without any number of a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bild_lab
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure import runner
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.history import requests_of
from bild_lab.lab.point.prepare import Point, prepare
from bild_lab.lab.preflight import check_points
from bild_lab.lab.schema.examples import MeasuredExample, read_examples
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.lab.store.records import Sweep
from bild_lab.lab.store.table import to_row

NEW = 8
PROMPTS = ["w5 w9 w30 w12", "w7 w8", "w39 w38 w3 w20", "w11 w4 w6"]


@pytest.fixture(scope="module")
def answers(checkpoints: Path) -> list[list[int]]:
    """The target's own tokens after each prompt, with one swapped in the last."""
    decoder = bild_lab.load(str(checkpoints / "llama"), policy="vanilla")
    tokens = [decoder.generate(prompt, NEW).token_ids for prompt in PROMPTS]
    tokens[-1][3] = tokens[-1][3] % 30 + 4
    return tokens


@pytest.fixture(scope="module")
def file(answers: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset and its answers."""
    file = tmp_path_factory.mktemp("data") / "test.jsonl"
    rows = [
        {"prompt": prompt, "answer": tokens, "en": "w7 w8"}
        for prompt, tokens in zip(PROMPTS, answers, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(checkpoints: Path, file: Path, *others: str) -> list[str]:
    found = [
        f"pair.target={checkpoints / 'llama'}",
        "pair.draft=null",
        "policy=answers",
        f"policy.file={file}",
    ]
    found += [
        "dataset=local",
        f"dataset.path={file}",
        "dataset.source_column=prompt",
        "dataset.reference_column=en",
    ]
    found += [
        "dataset.metric=bleu",
        f"decoding.max_new_tokens={NEW}",
        "runtime.threads=1",
        "measure.precision=0.01",
    ]
    return [*found, *others]


def point_of(checkpoints: Path, file: Path, *others: str) -> Point:
    return prepare(compose_config(words(checkpoints, file, *others)))


@pytest.fixture(scope="module")
def measured(
    checkpoints: Path, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Result, list[MeasuredExample]]:
    with pytest.MonkeyPatch.context() as patch:
        for timing in ("warm_up", "wait_for_quiet", "OtherLoad", "Energy"):
            patch.delattr(runner, timing)  # whoever asks for a clock fails
        result = run_point(point_of(checkpoints, file), Sweep(tmp_path_factory.mktemp("sweep")))
    return result, read_examples(result.folder)


def test_its_texts_are_the_answers_beside_the_targets_own(
    measured: tuple[Result, list[MeasuredExample]], answers: list[list[int]]
) -> None:
    result, examples = measured
    assert [one.token_ids for one in examples] == answers
    assert [one.token_ids == one.baseline_token_ids for one in examples] == [
        True,
        True,
        True,
        False,
    ]
    assert result.agreement_with_target == 0.75
    assert result.quality.baseline is not None and result.quality.difference is not None


def test_each_text_has_a_verdict_without_being_asked_for(
    measured: tuple[Result, list[MeasuredExample]],
) -> None:
    result, examples = measured
    counts = result.certificate
    assert (counts.equal, counts.ties, counts.defects) == (3, 0, 1)
    assert (examples[-1].certificate["verdict"], examples[-1].certificate["position"]) == (
        "defect",
        3,
    )


def test_it_has_no_number_of_a_clock(measured: tuple[Result, list[MeasuredExample]]) -> None:
    result, examples = measured
    assert not result.timed and all(
        not one.latency_s and not one.baseline_latency_s for one in examples
    )
    assert result.engine is None and result.precision is None  # what wrote them is not known
    timing = (
        "speed",
        "latency",
        "per_s",
        "joules",
        "flops",
        "bytes",
        "predicted",
        "memory",
        "calls",
        "busy",
        "repeats",
    )
    row = {
        name: value
        for name, value in to_row(result).items()
        if any(word in name for word in timing)
    }
    assert len(row) > 25 and set(row.values()) == {None}
    assert (result.engine, result.precision) == (None, None)  # of an engine that nobody knows
    assert {"warmup", "wait"}.isdisjoint(result.seconds)
    assert COLUMNS["latency_s_median"].text(result) == "–"
    assert Result.from_json(json.loads(json.dumps(result.to_json())), result.folder) == result


def test_without_the_targets_own_texts_it_is_scored_alone(
    checkpoints: Path, file: Path, tmp_path: Path
) -> None:
    point = point_of(checkpoints, file, "measure.baseline=null", "measure.precision=null")
    result = run_point(point, Sweep(tmp_path / "sweep"))
    assert result.certificate is None and result.quality.value is not None and not result.timed


def test_batches_replay_the_same(
    measured: tuple[Result, list[MeasuredExample]], checkpoints: Path, file: Path, tmp_path: Path
) -> None:
    result = run_point(point_of(checkpoints, file, "runtime.batch=2"), Sweep(tmp_path / "sweep"))
    assert [one.token_ids for one in read_examples(result.folder)] == [
        one.token_ids for one in measured[1]
    ]
    assert result.certificate == measured[0].certificate and not result.timed


def test_the_files_content_counts_and_its_place_does_not(
    checkpoints: Path, file: Path, tmp_path: Path
) -> None:
    name = point_of(checkpoints, file).id
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(file.read_bytes())
    other = [f"dataset.path={file}", "dataset.name=test"]
    assert point_of(checkpoints, moved, *other).id == point_of(checkpoints, file, *other).id
    moved.write_text(file.read_text().replace('"answer": [', '"answer": [5, ', 1))
    assert point_of(checkpoints, moved, *other).id not in (
        name,
        point_of(checkpoints, file, *other).id,
    )


def test_a_prompt_without_an_answer_is_refused_before_weights_load(
    checkpoints: Path, file: Path, tmp_path: Path
) -> None:
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    point = point_of(checkpoints, fewer, f"dataset.path={file}")
    with pytest.raises(UserError, match="fewer.jsonl has no answer to the prompt 'w11 w4 w6'"):
        requests_of(point, point.examples)


def test_each_file_of_a_sweep_is_checked(
    checkpoints: Path,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    """Knobs alone change no prompt, but the file that answers it."""
    monkeypatch.chdir(tmp_path)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    shared = [[word] for word in words(checkpoints, file) if not word.startswith("policy.file")]
    with pytest.raises(SystemExit):
        check_points([*shared, [f"policy.file={file}", f"policy.file={fewer}"]], "config")
    assert "has no answer to the prompt 'w11 w4 w6'" in "".join(capfd.readouterr())
