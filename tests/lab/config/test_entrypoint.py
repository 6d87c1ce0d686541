"""`python run.py` as a user meets it: its files, its messages, its exit codes."""

from __future__ import annotations

import errno
import html
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from rich.console import Console
from safetensors.torch import load_file, save_file

import run
from bild_lab.errors import UserError
from bild_lab.lab import application
from bild_lab.lab.config import console as console_module
from bild_lab.lab.config import entrypoint
from bild_lab.lab.config.command_line import options_first, quote_free_text, require_overrides
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.config.schemas import typed
from bild_lab.lab.measure import runner
from bild_lab.lab.point.environment import DeviceUse
from bild_lab.lab.store.commands import read_commands
from bild_lab.lab.store.records import Sweep
from bild_lab.report.page.index import read_runs
from tests.checkpoints import POINT_FILES

Command = Callable[..., tuple[int, str]]

PROMISED_COLUMNS = (
    "point policy fallback rollback window n_examples quality_metric quality quality_low"
    " quality_high latency_s_median latency_s_p95 speedup speedup_low speedup_high tokens_per_s"
    " tokens_per_target_call acceptance_rate fallbacks rollbacks agreement_with_target"
).split()


@pytest.fixture
def command(command: Command) -> Command:
    """Runs run.py in an empty folder; returns its exit code and everything it printed."""
    return partial(command, run)


@pytest.fixture
def base(checkpoints: Path, data: Path) -> list[str]:
    return [
        f"pair.target={checkpoints / 't5'}",
        f"pair.draft={checkpoints / 't5-draft'}",
        "dataset=multi30k",
        f"dataset.path={data}",
        "decoding.max_new_tokens=12",
        "measure.repeats=2",
        "measure.warmup=1",
        "name=tested",
        "report.figures=png",
    ]


def files() -> list[str]:
    return sorted(str(file) for file in Path().rglob("*") if file.is_file())


def points() -> list[Path]:
    return sorted(Path("outputs/tested/points").iterdir())


def test_a_sweep_leaves_everything_it_promises(command: Command, base: list[str]) -> None:
    code, printed = command(
        "-m", *base, "policy=bild", "policy.fallback=0.2,0.6", "policy.rollback=1,5"
    )
    assert code == 0, printed
    assert "6 examples are too few to say which point is faster or better" in printed
    lines = [line for line in printed.splitlines() if ": BLEU " in line]
    assert [re.sub(r": BLEU.*", "", line) for line in lines] == [
        f"{place}/4 bild, drafter t5-draft, fallback {fallback} rollback {rollback}"
        for place, (fallback, rollback) in enumerate(product((0.2, 0.6), (1, 5)), 1)
    ]
    assert [line.endswith(" left") for line in lines] == [True, True, True, False]
    assert "6 examples are too few to say which point is faster or better" in printed
    frame = pd.read_csv("outputs/tested/sweep.csv")
    assert set(PROMISED_COLUMNS) <= set(frame.columns)
    assert sorted(zip(frame["fallback"], frame["rollback"], strict=True)) == [
        (0.2, 1),
        (0.2, 5),
        (0.6, 1),
        (0.6, 5),
    ]
    assert (frame["n_examples"] == 6).all()
    assert (frame["speedup_low"] <= frame["speedup"]).all() and (
        frame["speedup"] <= frame["speedup_high"]
    ).all()
    assert Path("outputs/tested/pareto.png").stat().st_size > 10_000
    assert Path("outputs/tested/report.html").stat().st_size > 1_000_000  # plotly travels inside
    (listed,) = read_runs(Path("outputs"))
    assert (listed.points, listed.without_loss) == (4, "too few examples")
    assert listed.link in Path("outputs/index.html").read_text()
    assert {folder.name for folder in points()} == set(frame["point"])
    for folder in points():
        assert sorted(file.name for file in folder.iterdir()) == POINT_FILES
        rows = [json.loads(line) for line in (folder / "examples.jsonl").read_text().splitlines()]
        assert [row["id"] for row in rows] == [f"test-{index}" for index in range(6)]
        assert all(len(row["latency_s"]) == len(row["baseline_latency_s"]) == 2 for row in rows)
        assert all(0 < len(row["token_ids"]) <= 12 for row in rows)
        result = json.loads((folder / "result.json").read_text())
        assert result["tokens"] == sum(len(row["token_ids"]) for row in rows)
        same = [row["token_ids"] == row["baseline_token_ids"] for row in rows]
        assert result["agreement_with_target"] == sum(same) / 6


@pytest.mark.slow
def test_the_report_is_written_between_points_and_never_while_one_is_timed(
    command: Command, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, timing, real = [], [], runner.time_methods

    def timed(*arguments: Any, **named: Any) -> Any:
        timing.append(True)
        try:
            return real(*arguments, **named)
        finally:
            timing.pop()

    def live(sweep: Sweep, progress: str) -> None:
        assert not timing
        seen.append((progress, len(sweep.results())))

    monkeypatch.setattr(runner, "time_methods", timed)
    monkeypatch.setattr("bild_lab.report.sweep.live_report", live)
    words = ["-m", *base, "policy=bild", "policy.fallback=0.2,0.6,0.8", "dataset.limit=2"]
    assert command(*words, "name=soon")[0] == 0
    assert seen == [("1 of 3 points", 1)]  # the others follow at once
    seen.clear()
    monkeypatch.setattr("bild_lab.lab.sweep.LIVE_S", 0.0)
    assert command(*words)[0] == 0
    assert seen == [("1 of 3 points", 1), ("2 of 3 points", 2)]  # the last report follows the third
    assert command(*words)[0] == 0
    (given,) = read_commands(Path("outputs/tested"))
    assert given.line.startswith("python run.py -m pair.target=")


@pytest.mark.usefixtures("no_picture")
def test_a_finished_point_is_not_measured_again(
    command: Command, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(*base)
    (folder,) = points()
    before = (folder / "result.json").stat().st_mtime_ns
    code, printed = command(*base)
    assert code == 0
    assert "finished before" in printed
    assert (folder / "result.json").stat().st_mtime_ns == before

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("bild_lab.report.sweep.report_sweep", full)
        code, printed = command(*base)
    assert code == 1 and "Traceback" not in printed
    assert (
        "the report could not be written: [Errno 28] No space left on device; finished points are"
        " kept" in printed
    )
    code, printed = command(*base, "runtime.seed=1")
    assert len(points()) == 2, printed


@pytest.mark.usefixtures("no_picture")
def test_a_failing_point_does_not_end_a_sweep(
    command: Command, base: list[str], checkpoints: Path, tmp_path: Path
) -> None:
    """Of weights that cannot be read nothing is known before they are."""
    damaged = shutil.copytree(checkpoints / "t5-draft", tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    code, printed = command(
        "-m", *base, f"pair.draft={checkpoints / 't5-draft'},{damaged},{checkpoints / 't5'}"
    )
    assert code == 1
    assert "1 point(s) failed" in printed
    assert len(pd.read_csv("outputs/tested/sweep.csv")) == 2
    (failure,) = Path("outputs/tested/points").glob("*/failed.json")
    message = json.loads(failure.read_text())["error"]["message"]
    assert "damaged" in message and message in html.unescape(
        Path("outputs/tested/report.html").read_text()
    )
    assert [one.points for one in read_runs(Path("outputs"))] == [2]


def test_a_missing_checkpoint_of_a_later_point_is_found_before_the_first(
    command: Command, base: list[str], checkpoints: Path
) -> None:
    code, printed = command(
        "-m", *base, f"pair.draft={checkpoints / 't5-draft'},{checkpoints / 'missing'}"
    )
    assert (
        code == 2
        and "no checkpoint folder" in printed
        and not list(Path().glob("outputs/tested/points/*"))
    )


@pytest.mark.slow
def test_a_failure_is_forgotten_once_its_point_succeeds(
    command: Command, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        Fraction("the device caught fire")  # what Python's own code raises leaves the caller's

    with monkeypatch.context() as patched:
        patched.setattr("bild_lab.lab.measure.runner.time_methods", broken)
        code, printed = command(*base)
        assert code == 1
        assert "caught fire" in printed and "Traceback" not in printed
        assert "test_entrypoint.py, line" in printed and "in broken; traceback in" in printed
    assert len(list(Path("outputs/tested/points").glob("*/failed.json"))) == 1
    code, printed = command(*base)
    assert code == 0, printed
    assert [sorted(file.name for file in folder.iterdir()) for folder in points()] == [POINT_FILES]


@pytest.mark.slow
def test_a_certified_run_judges_the_distributions_of_sampled_texts(command: Command) -> None:
    sweep = [
        "-m",
        "policy=speculative,typical_acceptance,cactus",
        "decoding=sample",
        "measure.baseline=null",
    ]
    code, printed = command(
        *sweep, "name=tested", "dataset.limit=6", "policy.window=3", "measure.certify=true"
    )
    assert code == 0, printed
    table = pd.read_csv("outputs/tested/sweep.csv").set_index("policy")
    columns = [f"certificate_{name}" for name in ("equal", "ties", "defects", "unjudged")]
    assert table.loc["speculative", columns[:2]].sum() == 6
    assert table.loc["typical_acceptance", columns].tolist() == [0, 0, 6, 0]
    assert table.loc["cactus", columns].tolist() == [0, 0, 0, 6]
    assert (
        table.loc["speculative", "certificate_output"]
        < 1e-6
        < table.loc["typical_acceptance", "certificate_output"]
    )
    assert "Distributions when sampling" in Path("outputs/tested/report.html").read_text()


@pytest.mark.slow
def test_a_sweep_begun_anew_keeps_what_was_measured_before(
    command: Command, base: list[str]
) -> None:
    command(*base)
    (first,) = points()
    before = (first / "result.json").read_bytes()
    code, printed = command(*base, "resume=false")
    assert code == 0, printed
    assert "1 older measurement of these points is kept" in printed
    assert [folder.name for folder in points()] == [first.name, f"{first.name}.2"]
    assert (first / "result.json").read_bytes() == before
    assert len(pd.read_csv("outputs/tested/sweep.csv")) == 1
    assert f'href="points/{first.name}.2/"' in Path("outputs/tested/report.html").read_text()
    code, printed = command(*base)
    assert "finished before" in printed and len(points()) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [("nan", "scores a text with NaN in float32"), ("truncated", "cannot read the weights of")],
)
@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_others_are_measured(
    damage: str, message: str, command: Command, base: list[str], checkpoints: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints / "t5-draft", broken)
    weights = broken / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        tensors = {
            name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(weights).items()
        }
        save_file(tensors, weights, metadata={"format": "pt"})
    code, printed = command("-m", *base, f"pair.draft={broken},{checkpoints / 't5-draft'}")
    assert code == 1
    assert f"{broken}" in printed and message in printed and "Traceback" not in printed
    assert len(pd.read_csv("outputs/tested/sweep.csv")) == 1
    assert message in Path("outputs/tested/report.html").read_text()


@pytest.mark.usefixtures("no_picture")
def test_a_point_says_where_and_how_it_was_measured(command: Command, base: list[str]) -> None:
    lock = Path("locks")
    lock.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tempfile.tempdir", str(lock))
        command(*base)
        beside = DeviceUse(torch.device("cpu"))
        code, printed = command(*base, "policy.rollback=1")
        beside.close()
    assert code == 0, printed
    results = [json.loads(file.read_text()) for file in Path().rglob("result.json")]
    assert {result["environment"]["shared_device"] for result in results} == {True, False}
    assert {result["environment"]["host"] for result in results} == {platform.node()}
    assert "1 of 2 points was timed beside other jobs on the same device" in printed
    assert pd.read_csv("outputs/tested/sweep.csv")["shared_device"].tolist() == [False, True]


@pytest.mark.slow
def test_a_logger_that_fails_costs_no_point(
    command: Command, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr("bild_lab.report.trackers.loggers.NoLogger.log_point", refuse)
    code, printed = command(*base)
    assert code == 1
    assert "not logged" in printed and "the server is gone" in printed
    assert len(pd.read_csv("outputs/tested/sweep.csv")) == 1
    monkeypatch.setattr("bild_lab.report.trackers.loggers.NoLogger.log_sweep", refuse)
    code, printed = command(*base)
    assert code == 1
    # it is offered to the logger all the same
    assert "finished before" in printed and "not logged bild" in printed
    assert "the sweep was not logged: the server is gone" in printed


@pytest.mark.slow
def test_points_that_were_finished_are_logged_once_when_the_logger_is_switched_on(
    command: Command, base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    command(*base)
    (folder,) = points()
    switched_on = [*base, "logger=wandb", "logger.mode=offline"]
    code, printed = command(*switched_on)
    assert code == 0, printed
    assert "finished before" in printed
    sent = "Send with: wandb sync outputs/tested/wandb/offline-run-*"
    assert printed.rstrip().endswith(f"logged offline: 2 runs. {sent}")
    record = Path("outputs/tested/wandb/logged.jsonl")
    command(*switched_on)  # the point was logged, the sweep may have changed
    logged = [json.loads(line)["run"] for line in record.read_text().splitlines()]
    assert logged == [f"tested-{folder.name}", "tested-sweep", "tested-sweep"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dataset.prompt_template={source}", "dataset.prompt_template='{source}'"),
        ("dataset.prompt_template='{source}'", "dataset.prompt_template='{source}'"),
        ("dataset.prompt_template=it's {source}", r"dataset.prompt_template='it\'s {source}'"),
        ("dataset.path=/a=b/c d", "dataset.path='/a=b/c d'"),
        ("pair.draft=a/b,c/d", "pair.draft=a/b,c/d"),
        ("comparison.path=/a b", "comparison.path='/a b'"),
        ("unaligned.path=/a=b", "unaligned.path='/a=b'"),
        ("policy.fallback=0.5,0.6", "policy.fallback=0.5,0.6"),
        (r"dataset.prompt_template=\frac {source}", r"dataset.prompt_template='\frac {source}'"),
        ("dataset.prompt_template={source}\\", r"dataset.prompt_template='{source}\\'"),
        # files of a group to sweep over
        ("template=chat,translation", "template=chat,translation"),
        ("pair.target=~/models/t5", "pair.target='~/models/t5'"),
        ("dataset.path=/home/jürgen/faq.tsv", "dataset.path='/home/jürgen/faq.tsv'"),
        ("pair.draft=~/a,/modèle,b", "pair.draft='~/a','/modèle',b"),
        ("name=2026_11_29", "name='2026_11_29'"),
        ("name=0.70", "name='0.70'"),
        ("++name=2026_11_29", "++name='2026_11_29'"),
        ("dataset.path=2026_11_29", "dataset.path='2026_11_29'"),
        ("pair.target=2026_11_29", "pair.target='2026_11_29'"),
        ("pair.second_draft=2026_11_29", "pair.second_draft='2026_11_29'"),
        (
            "pair.draft=2026_11_28,toy:small,2026_11_29",
            "pair.draft='2026_11_28',toy:small,'2026_11_29'",
        ),
        ("model.tokenizer=2026_11_29", "model.tokenizer='2026_11_29'"),
        ("pair.draft_revision=1.10", "pair.draft_revision='1.10'"),
        ("dataset.source_column=0", "dataset.source_column='0'"),
        ("dataset.categories=3", "dataset.categories='3'"),
        ("dataset.hub_config=2024_01", "dataset.hub_config='2024_01'"),
        ("logger.group=2026_11_29", "logger.group='2026_11_29'"),
        ("policy.heads=2026_11_29", "policy.heads='2026_11_29'"),
        ("policy.adapter=2026_11_29", "policy.adapter='2026_11_29'"),
        ("policy.table=2026_11_29", "policy.table='2026_11_29'"),
        ("policy.file=2026_11_29", "policy.file='2026_11_29'"),
        ("policy.corpus=2026_11_28,2026_11_29", "policy.corpus='2026_11_28','2026_11_29'"),
        ("policy.tree=2026_11_29", "policy.tree='2026_11_29'"),
        ("policy.draft_vocabulary_from=2026_11_29", "policy.draft_vocabulary_from='2026_11_29'"),
        ("calibration=2026_11_29", "calibration='2026_11_29'"),
        ("heads=2026_11_29", "heads='2026_11_29'"),
        ("outputs=2026_11_29", "outputs='2026_11_29'"),
        ("module.heads=3", "module.heads=3"),
        ("model.config.num_heads=8", "model.config.num_heads=8"),
        ("policy.draft_vocabulary=8000", "policy.draft_vocabulary=8000"),
        ("dataset.split=2026_11", "dataset.split='2026_11'"),
        ("hydra.run.dir=2026_11_29", "hydra.run.dir='2026_11_29'"),
        ("project=2026_11", "project='2026_11'"),
        ("entity=1_000", "entity='1_000'"),
        ("pair.draft=null", "pair.draft=null"),
        ("name=2026-11-29", "name=2026-11-29"),
        ("policy.fallback=1e-3", "policy.fallback=1e-3"),
    ],
)
def test_free_text_gets_the_quotes_a_shell_took_away(word: str, expected: str) -> None:
    assert quote_free_text(word) == expected
    key, _, value = word.partition("=")
    (override,) = OverridesParser.create().parse_overrides([expected])
    if key in ("name", "++name", "pair.target", "dataset.path"):
        assert override.value() == value


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        (r'dataset.cut="\n"', "\n"),
        (r"dataset.cut=\n", "\n"),  # what a shell leaves of it
        (r"decoding.stop=[\n\n,Question:]", ["\n\n", "Question:"]),
        (r"""decoding.stop=['\t',"it's\n"]""", ["\t", "it's\n"]),
        (r"decoding.stop=['a\\nb']", [r"a\nb"]),  # a backslash and a letter, as code may have
        (r"dataset.prompt_template=Q: {source}\nA, b:", "Q: {source}\nA, b:"),
        (r"dataset.chat_template=['a\n{question}','{question}']", ["a\n{question}", "{question}"]),
        (r"dataset.path=a\nb", r"a\nb"),  # no text of a prompt
    ],
)
def test_line_breaks_of_the_command_line_are_line_breaks(word: str, wanted: object) -> None:
    group, key = word.partition("=")[0].split(".")
    cfg = compose_config(["dataset=local", quote_free_text(word)])
    assert cfg[group][key] == wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["policy", "=", "bild"], "'policy' is no KEY=VALUE, such as policy=bild"),
        (["name=a", "b"], "a value with spaces needs quotes: 'name=a b'"),
        (["\u2014m", "policy=bild"], "'\u2014m' is no KEY=VALUE"),
        (
            ["policy.window=sort(range(1,6,2),reverse=true)"],  # Hydra would take 4, 2 and 0
            "write the range in its order, such as policy.window=range(5,0,-2) for 5, 3, 1",
        ),
        (
            ["policy.window=tag(few,sort(range(1,6,2),reverse=true))"],
            "write the range in its order",
        ),
        (
            ["policy.window=sort(tag(few,range(1,6,2)),reverse=true)"],
            "write the range in its order",
        ),
        (["policy.window=sort(sweep=range(1,6,2),reverse=true)"], "write the range in its order"),
        (["bild"], "'bild' is no KEY=VALUE, such as policy=bild"),
        (["bild", "name=a"], "'bild' is no KEY=VALUE, such as policy=bild"),
    ],
)
def test_a_word_that_is_no_override_is_refused_with_what_to_write(
    words: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        require_overrides(words)


def test_what_hydra_takes_and_free_text_is_no_wrong_word() -> None:
    require_overrides(
        [
            "policy=bild",
            "+a=b",
            "~policy",
            "a={b:1}",
            "c=",
            "--resolve",
            "e=",
            "f=1",
            "dataset.prompt_template=\u201cx,",
        ]
    )
    require_overrides(["-sc", "install=bash"])
    assert options_first(["a=b", "--config-dir", "/x", "c=d", "-cn=e"]) == (
        ["--config-dir", "/x", "-cn=e"],
        ["a=b", "c=d"],
    )


@dataclass
class Listed:
    """A group with a list."""

    layers: list[int]


def test_one_number_in_the_place_of_a_list_is_told_how_to_write_it() -> None:
    with pytest.raises(UserError, match=r"heads\.layers: a list is wanted, .* of one value \[4\]"):
        typed(Listed, {"layers": 4}, "heads")


BAD_INPUT = {
    "misspelt key": (
        ["policy.fallbck=0.5"],
        "no configuration key policy.fallbck; did you mean policy.fallback?",
    ),
    "unknown key": (["flavour=sweet"], "no configuration key flavour"),
    "value of a wrong kind": (
        ["runtime.batch=zebra"],
        "runtime.batch=zebra: Value 'zebra' of type 'str' could not be converted to Integer",
    ),
    "values outside of a sweep": (
        ["policy.fallback=0,5"],
        "Ambiguous value for argument 'policy.fallback=0,5' 1. To use it as a list",
    ),
    "a comma at the end": (["policy=bild,"], "policy=bild, cannot be read: mismatched input"),
    "misspelt policy": (["policy=blid"], "no policy 'blid'; did you mean bild?"),
    "unknown experiment": (
        ["experiment=xyz"],
        "there is no experiment 'xyz'. There are first_run, ",
    ),
    "unknown launcher": (
        ["-m", "hydra/launcher=gpu"],
        "there is no hydra/launcher 'gpu'; did you mean gpus? There are basic, gpus, ",
    ),
    "no draft model": (["pair.draft=null"], "policy bild drafts with a small model"),
    "unreachable hub": (
        ["pair.target=google/t5"],
        "wanted the checkpoint google/t5 from the Hugging Face hub",
    ),
    "whole sweep out of range": (["-m", "policy.fallback=2,3"], r"must lie in [0, 1], got 2"),
    "logger mode": (
        ["logger=wandb", "logger.mode=onlin"],
        "logger mode wants online or offline, got onlin",
    ),
    "knob of one policy only": (
        ["-m", "policy=bild,vanilla", "policy.fallback=0.5"],
        "not every chosen configuration has the key policy.fallback",
    ),
    "points of several folders": (
        ["-m", "name=of_${policy.name}", "policy=bild,vanilla"],
        "all points of a sweep go to one folder and one report, got name=of_vanilla",
    ),
    "another working directory of a sweep": (
        ["-m", "policy=bild,vanilla", "hydra.job.chdir=true"],
        "hydra.job.chdir=true would put results where no report and no later command finds them",
    ),
    "another working directory": (
        ["hydra.job.chdir=true"],
        "hydra.job.chdir=true would put results where no report",
    ),
    "misspelt group that is added": (
        ["++runtme.dtype=float32"],
        "adds a key that no value refers to, so it changes nothing; did you mean runtime.dtype?",
    ),
    "key of one's own": (
        ["+mine.window=3", "policy.window=${mine.window}", "policy.fallback=2"],
        "must lie in [0, 1], got 2",  # mine.window has its effect
    ),
    "key of one's own that Hydra's own values read, in a sweep": (
        ["-m", "+mine=3", "hydra.job.name=of_${mine}", "policy.fallback=2,3"],
        "must lie in [0, 1], got 2",
    ),
    "key of one's own that a callback of one's own may read": (
        [
            "+mine=3",
            "+hydra.callbacks.mine._target_=hydra.experimental.callback.Callback",
            "policy.fallback=2",
        ],
        "must lie in [0, 1], got 2",
    ),
    "key of one's own that a callback of one's own may read, in a sweep": (
        [
            "-m",
            "+mine=3",
            "+hydra.callbacks.mine._target_=hydra.experimental.callback.Callback",
            "policy.fallback=2,3",
        ],
        "must lie in [0, 1], got 2",
    ),
    "experiments with lists of values of their own": (
        ["-m", "experiment=quickstart,quickstart_lossless", "pair=toy"],
        "experiment=quickstart has lists of values of its own, which a sweep over several files",
    ),
    "experiments with lists of their own, of which the first has another policy": (
        ["-m", "experiment=quickstart_lossless,quickstart", "pair=toy"],
        "experiment=quickstart_lossless has lists of values of its own, which a sweep over several",
    ),
    "another folder of Hydra's": (
        ["hydra.run.dir=elsewhere"],
        "hydra.run.dir=elsewhere would hold no result: they go to outputs/",
    ),
    "a launcher of one run": (
        ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"],
        "hydra/launcher=submitit_slurm would change nothing, as this command is one run in this"
        " process; leave it out, or add -m",
    ),
    "another folder of a sweep": (
        ["-m", "hydra.sweep.dir=multirun/${now:%H}", "policy=bild,vanilla"],
        "hydra.sweep.dir=multirun/${now:%H} would hold no result: they go to outputs/",
    ),
    "a folder for each point": (
        ["-m", "hydra.sweep.subdir=${hydra.job.num}", "policy=bild,vanilla"],
        "hydra.sweep.subdir=${hydra.job.num} would hold no result: they go to outputs/",
    ),
    "metric that another one leads": (
        ["dataset.metric=chrf", "dataset.metrics=[bleu,chrf]"],
        "dataset.metric=chrf would change nothing beside dataset.metrics=['bleu', 'chrf']",
    ),
    "added metric that another one leads": (
        ["++dataset.metric=chrf", "dataset.metrics=[bleu,chrf]"],
        "++dataset.metric=chrf would change nothing beside dataset.metrics=['bleu', 'chrf']",
    ),
    "metrics to sweep over that another one leads": (
        ["-m", "dataset.metric=bleu,chrf", "dataset.metrics=[bleu,chrf]"],
        "dataset.metric=chrf: dataset.metric=chrf would change nothing",
    ),
    "metric that leads": (
        ["dataset.metric=chrf", "dataset.metrics=[chrf,bleu]", "policy.fallback=2"],
        "must lie in [0, 1], got 2",
    ),
    "margin in points where the metric has nats": (
        ["dataset.metric=log_probability", "measure.margin=5"],
        "measure.margin=5 would be 5 nats a token of log_probability, e^5 times the perplexity",
    ),
    "unknown part": (
        ["policy.decoder.drafter._target_=bild_lab.engine.methods.vanilla.NoDrafts"],
        "did you mean NoDraft?; give the dotted path of a class; PYTHONPATH=DIR says where modules",
    ),
    "part that is no path": (["policy.decoder.drafter._target_=3"], "cannot find 3: "),
}


@pytest.mark.parametrize(
    ("file", "refusal"),
    [
        (
            "name: own\nbudget: 3\ndecoder: {}\n",
            "no configuration key policy.budgt; did you mean policy.budget?",
        ),
        (
            "name: own\ndecoder:\n\t_target_: mine.Own\n",
            r"found character '\t' that cannot start any token",
        ),
    ],
)
def test_what_is_wrong_with_a_file_of_ones_own_is_one_message(
    file: str, refusal: str, command: Command
) -> None:
    Path("my own/policy").mkdir(parents=True)
    Path("my own/policy/own.yaml").write_text(file)
    code, printed = command("policy=own", "--config-dir", "my own", "policy.budgt=1")
    assert code == 2 and refusal in printed and "Traceback" not in printed


def test_the_folder_of_a_refused_command_is_its_own_where_the_command_has_made_it(
    tmp_path: Path,
) -> None:
    """Fault: of several processes one removes it, and the others end with a traceback."""
    folder = tmp_path / "outputs"
    hydra = OmegaConf.create({"runtime": {"output_dir": str(folder), "cwd": str(tmp_path)}})
    assert entrypoint._new_folder(hydra) is None  # another process has removed it
    folder.mkdir()
    assert entrypoint._new_folder(hydra) == folder
    os.utime(folder, (1e9, 1e9))
    assert entrypoint._new_folder(hydra) is None  # it was there long before
    hydra.runtime.output_dir = str(tmp_path)
    assert entrypoint._new_folder(hydra) is None


@pytest.mark.fast(
    "misspelt key",
    "unknown launcher",
    "value of a wrong kind",
    "no draft model",
    "points of several folders",
    "another working directory",
    "misspelt group that is added",
    "key of one's own",
    "key of one's own that a callback of one's own may read",
    "key of one's own that a callback of one's own may read, in a sweep",
    "experiments with lists of values of their own",
    "another folder of a sweep",
    "metric that another one leads",
    "margin in points where the metric has nats",
    "added metric that another one leads",
)
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_message_and_leaves_nothing(
    case: str, command: Command, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # closed
    words, message = BAD_INPUT[case]
    code, printed = command(*base, *words)
    assert code == 2, printed
    assert message in " ".join(printed.split())
    assert "Traceback" not in printed
    assert not Path("outputs").exists()


def test_a_launcher_whose_package_is_missing_is_told_with_what_brings_it() -> None:
    message = entrypoint.unknown_choice("hydra/launcher", "submitit_slurm", ["basic", "gpus"])
    assert message.startswith(
        "there is no hydra/launcher 'submitit_slurm'. There are basic, gpus; "
    )
    assert "pip install 'bild_lab[launchers]'" in message


def test_the_script_runs_as_a_process_and_tells_its_exit_code(
    base: list[str], tmp_path: Path
) -> None:
    script = Path(run.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parent)}
    words = [sys.executable, str(script), *base, "policy.fallbck=1"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "did you mean policy.fallback?" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_word_a_first_experiment_runs_and_ends_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(
        application, "run_application", lambda main, **options: sys.exit(print(sys.argv[1:]))
    )
    with pytest.raises(SystemExit):
        run.run()
    shown = capfd.readouterr()
    assert shown.out == f"{['experiment=first_run']}\n"
    assert shown.err.startswith("no arguments: experiment=first_run\n")
    assert "next: python run.py experiment=quickstart" in shown.err
    for words in (["run.py", "policy=vanilla"], ["run.py", "experiment=first_run"]):
        monkeypatch.setattr(sys, "argv", list(words))
        with pytest.raises(SystemExit):
            run.run()
        assert "next:" not in capfd.readouterr().err and sys.argv == words


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    """The error stream as a terminal that keeps what it was sent."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(console_module, "console", console)
    return console


def test_a_stage_is_shown_at_once_and_goes_before_output(
    terminal: Console, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console_module.status_line.enter("loading libraries")
    assert "loading libraries …" in terminal.file.getvalue()
    before = len(terminal.file.getvalue())
    console_module.output.print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "\x1b[2K" in terminal.file.getvalue()[before:]  # the line is erased
    console_module.status_line.leave()  # nothing is left to leave


def test_several_processes_that_would_measure_the_same_points_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["run.py", "policy=vanilla"])
    with pytest.raises(SystemExit) as ended:
        run.run()
    assert ended.value.code == 2 and "got 2; run it without torchrun" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_bar_in_a_pipe_is_a_line_after_a_minute_without_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: nothing is said until all is done, as on a bar that no terminal shows."""
    clock = iter([0.0, 30.0, 61.0, 61.0, 100.0, 110.0, 165.0, 171.0, 171.0])
    monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with console_module.progress_bar() as bar:
        task = bar.add_task("answers", total=None)
        bar.advance(task)
        bar.update(task, advance=1, total=1500)
        bar.advance(task)
        bar.print_line("a line of another kind")
        bar.advance(task)
        bar.update(task, advance=2, total=None)
    said = [line.strip() for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert said == ["answers: 2 of 1,500", "a line of another kind", "answers: 6 of 1,500"]
