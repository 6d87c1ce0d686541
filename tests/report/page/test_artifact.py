"""An artifact holds what an evaluation asks for, and its check notices a file or a number that was
changed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.files import file_digest
from bild_lab.lab.measure.blocks import block_numbers
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.result import Environment, Setting
from bild_lab.lab.schema.statistics import conversations_of, paired_speedup
from bild_lab.lab.store.commands import record_command
from bild_lab.lab.store.records import Sweep
from bild_lab.report.page.artifact import faults, write_artifact
from bild_lab.report.screened_points import screened_on
from bild_lab.screening.rows import write_rows
from scripts import artifact as script
from tests.report.page.test_grid import row
from tests.report.sample import ENVIRONMENT, sample_example, sample_result, with_speedup

CARD = "---\nlicense: cc-by-4.0\n---\n# small\n\n```\n@article{small,\n  title = {Small},\n}\n```\n"
# what is known of a text that a server failed to give
FAILED = {"pieces_s": [], "rounds": None, "attempts": 3, "error": "it has died"}


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """One point of two texts, whose numbers follow from them."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "README.md").write_text(CARD)
    rounds = [{"drafted": [1, 5], "accepted": 1}]
    theirs = {"baseline_token_ids": [1], "baseline_prediction": "x", "rounds": rounds}
    timed = [
        sample_example(name, baseline_latency_s=[base], **theirs)
        for name, base in (("a", 1.5), ("b", 2.0))
    ]
    speedup = paired_speedup(np.array([[1.5], [2.0]]), np.array([[1.0], [1.0]]))
    environment = {**ENVIRONMENT, "host": "secret-machine"}
    given = {"tokens": 2, "environment": environment, "drafted": 4, "accepted": 2}
    setting = {
        "n_examples": 2,
        "draft": str(tmp_path / "small"),
        "weights": "abc123",
        "data": "def456",
    }
    result = with_speedup(
        sample_result("bild", {"fallback": 0.5}, 1.75, setting=setting, **given), **vars(speedup)
    )
    written = Sweep(tmp_path / "first")
    written.write_point(result.point, f"dataset: {{path: {tmp_path}/none}}\n", result, timed)
    record_command(written.folder)
    return written


def test_the_appendix_has_versions_hashes_licences_commands_times_and_both_ways_to_repeat(
    sweep: Sweep,
) -> None:
    text = (write_artifact(sweep) / "README.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert [
        "## Verify on a clone without a GPU",
        "## Regenerate on a GPU",
        "## Expected results",
    ] == headings[-4:-1]
    for words in (
        "| Algorithms | `bild`: Big Little Decoder (Kim et al., 2023, Algorithm 1) |",
        "| t5-large | `abc123` | not stated in its folder",
        (
            f"| {sweep.folder.parent}/small |"
            f" `{Checkpoint(str(sweep.folder.parent / 'small')).fingerprint}` | cc-by-4.0 |"
        ),
        "| multi30k test, 2 examples | `def456` |",
        "| torch | 2.13.0 |",
        "git checkout abc1234",
        f"python scripts/compare.py ARTIFACT outputs/{sweep.name}",
        "1.75× [0.28, 10.75]",
        "@article{small,",
        "**On which hardware?** AMD EPYC 7B13",
    ):
        assert words in text, words
    everything = "".join(
        file.read_text() for file in (sweep.folder / "artifact").rglob("*") if file.is_file()
    )
    assert "secret-machine" not in everything


def test_where_no_commit_is_known_none_is_checked_out(sweep: Sweep) -> None:
    (result,) = sweep.results()
    environment = Environment({**result.environment, "git": None})
    timed = read_examples(result.folder)
    installed = Sweep(sweep.folder.parent / "installed")
    result = replace(result, environment=environment, folder=None)
    installed.write_point(result.point, "{dataset: {path: none}}\n", result, timed)
    record_command(installed.folder)
    text = (write_artifact(installed) / "README.md").read_text()
    assert "git clone ADDRESS bild_lab && cd bild_lab\nmake setup" in text
    assert "| Program | bild_lab 0.1.0, installed as a package, whose commit is not known |" in text


def test_of_a_policy_of_ones_own_the_appendix_says_that_its_files_are_missing(sweep: Sweep) -> None:
    (result,) = sweep.results()
    own = Sweep(sweep.folder.parent / "own")
    for policy in ("mine", "bild (changed: drafter.window)"):
        point = replace(result, policy=policy, point=policy[:4], folder=None)
        own.write_point(
            point.point, "{dataset: {path: none}}\n", point, read_examples(result.folder)
        )
    record_command(own.folder)
    text = (write_artifact(own) / "README.md").read_text()
    assert "`mine`: not in the repository: its files are to be added here |" in text
    assert "`bild (changed: drafter.window)`: Big Little Decoder" in text


def test_the_check_passes_as_packed_and_names_what_was_changed(sweep: Sweep) -> None:
    folder = write_artifact(sweep)
    assert list(faults(folder)) == []
    (file,) = folder.glob("points/*/result.json")
    content = json.loads(file.read_text())
    content["speedup"]["value"] = 2.5  # and its hash corrected: the texts and times still tell
    content["counts"] |= {"drafted": 30, "accepted": 29}
    file.write_text(json.dumps(content))
    sums = folder / "SHA256SUMS"
    lines = [line for line in sums.read_text().splitlines() if "result.json" not in line]
    sums.write_text("\n".join([*lines, f"{file_digest(file)}  {file.relative_to(folder)}"]) + "\n")
    wrong = list(faults(folder))
    assert [one.partition(": ")[2] for one in wrong[:-1]] == [
        "drafted is 30, its examples give 4",
        "accepted is 29, its examples give 2",
        "speedup value is 2.5, its examples give 1.75",
    ]
    assert wrong[-1] == "sweep.csv does not hold the numbers of the points"
    (folder / "commands.jsonl").unlink()
    assert next(iter(faults(folder))) == "commands.jsonl is missing or was changed"


@pytest.mark.parametrize(
    ("measured", "named"), [("abc1234", True), ("def5678", False), (None, False)]
)
def test_an_interval_of_another_version_is_told_to_be_checked_with_that_one(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, measured: str, named: bool
) -> None:
    """Fault: intervals of a former version, by the bootstrap, looked as if they had been changed."""
    (result,) = sweep.results()
    monkeypatch.setattr("bild_lab.report.page.artifact.git_commit", lambda: "def5678")
    result = replace(
        with_speedup(result, value=2.0, low=1.5, high=2.0),
        environment=Environment({**result.environment, "git": measured}),
        folder=None,
    )
    former = Sweep(sweep.folder.parent / "former")
    timed = read_examples(next(sweep.folder.glob("points/*")))
    former.write_point(result.point, "{dataset: {path: none}}\n", result, timed)
    value, low, high = faults(write_artifact(former))
    remedy = f"check it with {measured}, which measured it"
    assert "speedup value is 2.0" in value and remedy not in value  # which has no other formula
    assert "speedup low is 1.5" in low and (remedy in low) == (remedy in high) == named


def test_the_table_of_a_screening_is_packed_as_it_says_where_points_were_chosen(
    sweep: Sweep,
) -> None:
    """Fault: the appendix told who had screened to choose with scripts/screen.py."""
    (result,) = sweep.results()
    write_rows(sweep.folder, [replace(row(fallback=0.5), confirmed=result.point)])
    folder = write_artifact(sweep)
    assert screened_on(Sweep(folder).results()[0]) == "validation"
    assert list(faults(folder)) == []


@pytest.mark.parametrize(
    ("ids", "batch", "shares_source"),
    [
        ([f"{number}" for number in range(40)], 2, False),
        (["1", "1/2", "2", "2/2"], 1, False),
        (["1", "2", "3", "4"], 1, True),
    ],
)
def test_the_interval_of_batches_and_of_conversations_is_computed_again_as_it_was(
    sweep: Sweep, ids: list[str], batch: int, shares_source: bool
) -> None:
    (result,) = sweep.results()
    seconds = np.random.default_rng(0).uniform(1, 2, (2, len(ids), 3))
    conversations = [0, 1, 0, 1] if shares_source else conversations_of(ids)
    blocks = block_numbers(len(ids) + 1, batch)
    speedup = paired_speedup(*seconds, conversations, blocks and blocks[:-1])
    timed = [
        sample_example(
            name,
            same_source=ids[index % 2] if shares_source else None,
            latency_s=method_s.tolist(),
            baseline_latency_s=baseline_s.tolist(),
            baseline_token_ids=[1],
        )
        for index, (name, baseline_s, method_s) in enumerate(zip(ids, *seconds, strict=True))
    ]
    timed.append(sample_example("no text", token_ids=[], reports=[FAILED]))
    result = replace(
        with_speedup(result, **vars(speedup)),
        setting=Setting({**result.setting, "n_examples": len(timed), "batch": batch}),
        tokens=len(ids),
        folder=None,
    )
    other = Sweep(sweep.folder.parent / "other")
    other.write_point(result.point, "{dataset: {path: none}}\n", result, timed)
    assert list(faults(write_artifact(other))) == []


def test_a_table_of_an_earlier_version_has_fewer_columns(sweep: Sweep) -> None:
    folder = write_artifact(sweep)
    table = pd.read_csv(folder / "sweep.csv", dtype=str, keep_default_na=False)
    table.drop(columns="speedup_low").to_csv(folder / "sweep.csv", index=False)
    assert list(faults(folder)) == ["sweep.csv is missing or was changed"]


def test_texts_that_a_server_failed_to_give_are_no_fault_of_the_numbers(sweep: Sweep) -> None:
    """They count neither in the tokens nor in the speedup."""
    (result,) = sweep.results()
    timed = read_examples(result.folder)
    failed = sample_example(
        f"{timed[0].id}/2",  # the others are no turns of one conversation without it
        token_ids=[],
        latency_s=[0.001],
        baseline_latency_s=[2.0],
        baseline_token_ids=[1],
        reports=[FAILED],
    )
    result = replace(result, setting=Setting({**result.setting, "n_examples": 3}), folder=None)
    of_server = Sweep(sweep.folder.parent / "server")
    of_server.write_point(result.point, "{dataset: {path: none}}\n", result, [*timed, failed])
    record_command(of_server.folder)
    assert list(faults(write_artifact(of_server))) == []


def test_the_script_packs_and_checks(sweep: Sweep, command) -> None:
    code, printed = command(script, str(sweep.folder), "zip=true", config=None)
    assert code == 0 and (sweep.folder / "artifact.zip").is_file(), printed
    assert command(script, "check", str(sweep.folder / "artifact"), config=None)[0] == 0
    (sweep.folder / "artifact" / "sweep.csv").write_text("point\n")
    for folder in (sweep.folder / "artifact", sweep.folder):
        code, printed = command(script, "check", str(folder), config=None)
        assert code == 1 and "sweep.csv is missing or was changed" in printed
    for words in ((), ("check",), (str(sweep.folder), "more")):
        code, printed = command(script, *words, config=None)
        assert code == 2 and "give the folder of a sweep" in printed


def test_what_is_no_sweep_or_no_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished points"):
        write_artifact(Sweep(tmp_path))
    with pytest.raises(UserError, match="has no SHA256SUMS"):
        list(faults(tmp_path))
