"""`python scripts/generate_calibration.py`: the target's greedy answers, each once, also after
kills and full disks.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.config.entrypoint import run_application
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.training import calibration as generate
from bild_lab.training.answers import SCHEMA, TargetAnswer, contents_hash, read_calibration
from scripts import generate_calibration
from tests.checkpoints import write_data
from tests.tiny import END
from tests.training.processes import TWO, finished, killed_when, started

Command = Callable[..., tuple[int, str]]
FOLDER = Path("outputs/calib")
LIMIT = 9  # tokens; long enough for some answers to end, short enough to cut others


@pytest.fixture
def command(command: Command) -> Command:
    """Runs the application in an empty folder; returns its exit code and everything it printed."""
    return partial(command, generate_calibration, config="calibration")


@pytest.fixture(scope="session")
def made(targets: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command's results, for tests that need them finished."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "argv", ["generate_calibration.py", *words_for(targets / "t5", data)])
        with pytest.raises(SystemExit) as ended:
            run_application(generate_calibration.main, "calibration")
    assert not ended.value.code
    return folder / FOLDER


@pytest.fixture
def there(made: Path, command: Command) -> None:
    """The command has ended in this folder."""
    shutil.copytree(made, FOLDER)


@pytest.fixture
def base(targets: Path, data: Path) -> list[str]:
    return words_for(targets / "t5", data)


def words_for(model: Path, data: Path) -> list[str]:
    return [
        "name=calib",
        f"model.path={model}",
        "dataset=multi30k",
        f"dataset.path={data}",
        "dataset.split=test",
        f"decoding.max_new_tokens={LIMIT}",
        "batch_size=4",
        "part_size=2",
    ]


def parts() -> list[str]:
    return sorted(file.name for file in FOLDER.glob("*.parquet"))


def test_the_command_writes_answers_manifest_and_metrics(
    command: Command, base: list[str], data: Path
) -> None:
    code, printed = command(*base)
    assert code == 0, printed
    assert parts() == [f"test-0000000{start}-0000000{start + 2}.parquet" for start in (0, 2, 4)]
    rows = [row for name in parts() for row in pq.read_table(FOLDER / name).to_pylist()]
    sources = [json.loads(line)["de"] for line in (data / "test.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"test-{index}" for index in range(6)]
    assert [row["prompt"] for row in rows] == sources
    for row in rows:
        ended = row["answer_token_ids"][-1] == END
        assert row["finish_reason"] == ("end" if ended else "length")
        assert ended or len(row["answer_token_ids"]) == LIMIT
        words = [f"w{token}" for token in row["answer_token_ids"] if token > 2]
        assert row["answer"].split() == words
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    assert manifest["count"] == 6 and manifest["parts"] == parts()
    assert manifest["decoding"] == {"method": "greedy", "max_new_tokens": LIMIT, "dtype": "float32"}
    assert manifest["model"]["fingerprint"] == Checkpoint(manifest["model"]["path"]).fingerprint
    assert manifest["hash"] == contents_hash([TargetAnswer(**row) for row in rows])
    metrics = json.loads((FOLDER / "metrics.json").read_text())
    assert metrics["answer_tokens"] == sum(len(row["answer_token_ids"]) for row in rows)
    cut = [row["id"] for row in rows if row["finish_reason"] == "length"]
    assert metrics["cut_by_length"] == len(cut)
    assert metrics["tokens_per_s"] == pytest.approx(
        metrics["answer_tokens"] / metrics["generation_s"]
    )
    assert metrics["environment"]["transformers"]
    assert f"6 answers of {manifest['model']['path']} to multi30k test" in printed
    assert (
        "python scripts/align.py name=aligned model.path=SMALL calibration=outputs/calib" in printed
    )


@pytest.mark.usefixtures("there")
def test_the_folder_is_a_dataset_itself() -> None:
    spec = DatasetSpec(
        name="calib",
        path=str(FOLDER),
        source_column="prompt",
        reference_column="answer",
        metric="bleu",
        id_column="id",
    )
    answers = read_calibration(FOLDER).answers
    assert [(one.prompt, one.references) for one in load_examples(spec)] == [
        (answer.prompt, (answer.answer,)) for answer in answers
    ]


@pytest.mark.usefixtures("there")
def test_the_same_command_again_generates_nothing(command: Command, base: list[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in FOLDER.iterdir()}
    code, printed = command(*base, "batch_size=1")  # it does not change the answers
    assert code == 0
    assert "all answers were there already" in printed
    assert {file: file.stat().st_mtime_ns for file in FOLDER.iterdir()} == before


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("part_size=3", "part_size=2, but this command has part_size=3;"),
        ("dataset.limit=4", "dataset.limit=None, but this command has dataset.limit=4;"),
        (
            "runtime.dtype=bfloat16",
            "decoding.dtype=float32, but this command has decoding.dtype=bfloat16;",
        ),
    ],
)
def test_other_answers_under_the_same_name_are_refused(
    command: Command, base: list[str], word: str, message: str
) -> None:
    before = {file.name: file.read_bytes() for file in FOLDER.iterdir()}
    code, printed = command(*base, word)
    assert code == 2
    assert message in printed and "choose another name=NAME" in printed
    assert {file.name: file.read_bytes() for file in FOLDER.iterdir()} == before


@pytest.mark.usefixtures("there")
def test_a_full_disk_leaves_earlier_parts_intact_and_the_same_command_does_the_rest(
    command: Command, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {file.name: file.read_bytes() for file in FOLDER.glob("*.parquet")}
    digest = json.loads((FOLDER / "manifest.json").read_text())["hash"]

    def full(path: Path, content: bytes) -> None:
        if path.name.startswith("test-00000002"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomically(path, content)

    again = ["name=full", *base[1:]]
    with monkeypatch.context() as patched:
        patched.setattr(generate, "write_atomically", full)
        code, printed = command(*again)
    assert code == 2
    assert "No space left on device" in printed and "run the same command again" in printed
    left = Path("outputs/full")
    assert sorted(file.name for file in left.iterdir()) == [
        "plan.json",
        "test-00000000-00000002.parquet",
    ]
    first = left / "test-00000000-00000002.parquet"
    assert pq.read_table(first).equals(pq.read_table(FOLDER / first.name))
    written = first.stat().st_mtime_ns
    assert command(*again)[0] == 0
    assert first.stat().st_mtime_ns == written
    assert json.loads((left / "manifest.json").read_text())["hash"] == digest
    assert sorted(whole) == sorted(file.name for file in left.glob("*.parquet"))


@pytest.mark.usefixtures("there")
def test_a_model_and_data_at_another_place_are_the_same(
    command: Command, targets: Path, data: Path
) -> None:
    shutil.copytree(targets / "t5", "moved")
    shutil.copytree(data, "data")
    code, printed = command(*words_for(Path("moved"), Path("data")))
    assert code == 0 and "all answers were there already" in printed


@pytest.mark.usefixtures("there")
def test_no_manifest_says_that_all_parts_are_there_while_one_is_missing(
    command: Command, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (FOLDER / parts()[0]).unlink()
    monkeypatch.setattr(generate, "write_atomically", full)
    assert command(*base)[0] == 2
    assert not (FOLDER / "manifest.json").exists()


def rewritten(change: Callable[[list[dict]], list[dict]]) -> None:
    """The first part with other rows."""
    file = FOLDER / parts()[0]
    rows = change(pq.read_table(file).to_pylist())
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file)


@pytest.mark.usefixtures("there")
def test_damaged_parts_are_made_again_and_the_others_kept(
    command: Command, base: list[str]
) -> None:
    digest = json.loads((FOLDER / "manifest.json").read_text())["hash"]
    first, second, third = (FOLDER / name for name in parts())
    rewritten(lambda rows: rows[:1])
    third.write_bytes(third.read_bytes()[:100])
    changed, kept = first.stat().st_mtime_ns, second.stat().st_mtime_ns
    code, printed = command(*base)
    assert code == 0, printed
    assert second.stat().st_mtime_ns == kept and first.stat().st_mtime_ns != changed
    assert json.loads((FOLDER / "manifest.json").read_text())["hash"] == digest
    assert len(read_calibration(FOLDER).answers) == 6


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: shutil.rmtree(FOLDER), "no calibration data in outputs/calib"),
        (
            lambda: (FOLDER / "manifest.json").unlink(),
            "is not finished (3 parts, no manifest.json)",
        ),
        (lambda: (FOLDER / parts()[1]).write_bytes(b"PAR1"), "cannot read the calibration data"),
        (lambda: rewritten(lambda rows: rows[:1]), "has changed since it was made: wanted 6 rows"),
        (
            lambda: rewritten(lambda rows: [{**row, "answer": "w5"} for row in rows]),
            "has changed since it was made",
        ),
    ],
)
def test_data_that_is_missing_unfinished_or_changed_is_refused(
    damage: Callable[[], object], message: str
) -> None:
    damage()
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        read_calibration(FOLDER)
    assert "python scripts/generate_calibration.py name=calib" in str(refused.value)


BAD_INPUT = {
    "no model": (["model.path=null"], "model.path must be a folder or a hub id, got null"),
    "no tokens": (
        ["decoding.max_new_tokens=0"],
        "decoding.max_new_tokens must be a whole number >= 1",
    ),
    "empty parts": (["part_size=0"], "part_size must be a whole number >= 1, got 0"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_message_and_leaves_nothing(
    case: str, command: Command, base: list[str]
) -> None:
    words, message = BAD_INPUT[case]
    code, printed = command(*base, *words)
    assert code == 2, printed
    (line,) = printed.strip().splitlines()
    assert message in line
    assert list(Path().iterdir()) == []


@pytest.fixture
def many(targets: Path, tmp_path: Path) -> list[str]:
    """A run of 120 parts, long enough to be killed in between."""
    data = write_data(tmp_path / "many", rows=120)
    return [*words_for(targets / "t5", data), "part_size=1"]


def killed_after(count: int, words: list[str], folder: Path, *launcher: str) -> None:
    """Kill a run once `count` parts are there, before it ends."""
    made = partial((folder / FOLDER).glob, "*.parquet")
    killed_when(
        lambda: len(list(made())) >= count, started(generate_calibration, folder, words, *launcher)
    )
    assert len(list(made())) < 120


@pytest.mark.slow
def test_a_run_killed_twice_loses_and_doubles_nothing(many: list[str], tmp_path: Path) -> None:
    finished(started(generate_calibration, tmp_path, ["name=whole", *many[1:]]))
    killed_after(20, many, tmp_path)
    killed_after(60, many, tmp_path)
    with pytest.raises(UserError, match="is not finished"):
        read_calibration(tmp_path / "outputs" / "calib")
    finished(started(generate_calibration, tmp_path, many))
    resumed, whole = (read_calibration(tmp_path / "outputs" / name) for name in ("calib", "whole"))
    assert resumed.answers == whole.answers
    assert resumed.manifest["hash"] == whole.manifest["hash"]
    assert [answer.id for answer in resumed.answers] == [f"test-{index}" for index in range(120)]


@pytest.mark.slow
def test_two_processes_share_the_work_and_a_kill_of_both_costs_nothing(
    many: list[str], tmp_path: Path
) -> None:
    killed_after(20, many, tmp_path, *TWO)
    finished(started(generate_calibration, tmp_path, many, *TWO))
    finished(started(generate_calibration, tmp_path, ["name=whole", *many[1:]]))
    shared, whole = (read_calibration(tmp_path / "outputs" / name) for name in ("calib", "whole"))
    assert shared.answers == whole.answers
    assert shared.manifest["hash"] == whole.manifest["hash"]
    writers = {
        pq.read_schema(file).metadata[b"process"]
        for file in (tmp_path / "outputs" / "calib").glob("*.parquet")
    }
    assert writers == {b"0", b"1"}
