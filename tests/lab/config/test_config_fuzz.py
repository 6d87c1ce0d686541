"""Hundreds of malformed command lines: each is refused with one message and leaves no file.

And the page of keys.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

import run
from bild_lab.lab.config.compose import compose_config, config_dir, knob_values, policy_names
from bild_lab.lab.config.entrypoint import run_application
from bild_lab.lab.config.schemas import TOP_LEVEL
from tests.policies import shipped

HANG_S = 60  # where the machine is busy too
GROUPS = ("pair", "dataset", "policy", "decoding", "runtime", "measure", "logger")
NOT_TEXT, NOT_A_NUMBER, NOT_A_FLAG = (
    ("[a]", "{a:1}"),
    ("zebra", "{a:1}", "[[x]]", "true"),
    ("maybe", "null"),
)
BAD_VALUES = {
    "name": ["", "null", "[a]", "{a:1}", "..", "a/b", "x" * 300],
    "resume": NOT_A_FLAG,
    "pair.name": NOT_TEXT,
    "pair.target": ["", "null", "3", "[a]", "/nowhere/at/all", "a b", "toy:", "-x"],
    "pair.draft": ["toy:medium", "{a:1}"],
    "pair.target_revision": NOT_TEXT,
    "pair.aligned": NOT_A_FLAG,
    "dataset.name": NOT_TEXT,
    "dataset.limit": ["0", "-1", "1.5", "99999999999999999999", *NOT_A_NUMBER],
    "dataset.split": ["", "3", "nowhere", *NOT_TEXT],
    "dataset.path": ["/nowhere", "3", *NOT_TEXT],
    "dataset.source_column": ["zebra", "3", "[]", "null"],
    "dataset.reference_column": ["zebra", "3"],
    "dataset.metric": [
        "blue",
        "null",
        "evaluate:",
        "evaluate:nowhere/at-all",
        "pass_at_1",
        *NOT_TEXT,
    ],
    "dataset.metrics": ["[]", "[bleu,bleu]", "[bleu,blue]", "3", "[3]", "{a:1}"],
    "dataset.prompt_template": ["hello", "3", "null"],
    "dataset.max_source_tokens": ["0", *NOT_A_NUMBER],
    "dataset.hub_revision": NOT_TEXT,
    "dataset.skip": ["-1", "1.5", "null", "99999999999999999999", *NOT_A_NUMBER],
    "dataset.shots": ["-1", "1.5", "null", "99999999999999999999", *NOT_A_NUMBER],
    "dataset.turns": ["0", "1.5", "99999999999999999999", *NOT_A_NUMBER],
    "dataset.categories": ["3", "[3]", "{a:1}", "zebra"],
    "dataset.history": ["/nowhere", "3", *NOT_TEXT],
    "dataset.language": ["3", "martian", *NOT_TEXT],
    "dataset.tokenize": ["3", "zebra", *NOT_TEXT],
    "dataset.shot_split": NOT_TEXT,
    "decoding.max_new_tokens": ["0", "1.5", "null", "99999999999999", *NOT_A_NUMBER],
    "decoding.temperature": ["-1", "nan", "inf", "null", *NOT_A_NUMBER],
    "decoding.top_k": ["0", "1.5", *NOT_A_NUMBER],
    "decoding.processors": ["all", "null", "3", "[]", "[none]", "{a:1}"],
    "pair.target_language": ["de", "[a]"],
    "decoding.top_p": ["0", "1.1", "nan", *NOT_A_NUMBER],
    "runtime.device": ["", "3", "null", "abacus", "cuda:99", *NOT_TEXT],
    "runtime.dtype": ["int3", "null", *NOT_TEXT],
    "runtime.engine": ["fast", "null", *NOT_TEXT],
    "runtime.compile": NOT_A_FLAG,
    "runtime.compile_drafter": ["maybe", "null", "3", "{a:1}"],
    "runtime.allow_pickles": NOT_A_FLAG,
    "runtime.batch": ["0", "1.5", "null", "99999999999999999999", *NOT_A_NUMBER],
    "runtime.trust_remote_code": NOT_A_FLAG,
    "runtime.device_map": ["cuda:0", "3", *NOT_TEXT],
    "runtime.weights": ["3", "16", *NOT_A_NUMBER],
    "pair.draft_weights": ["0", "16", *NOT_A_NUMBER],
    "runtime.threads": ["0", "-1", "1.5", "100000000", *NOT_A_NUMBER],
    "runtime.seed": ["-1", "1.5", "null", "99999999999999999999", *NOT_A_NUMBER],
    "measure.warmup": ["-1", "1.5", "null", *NOT_A_NUMBER],
    "measure.repeats": ["0", "1.5", "null", *NOT_A_NUMBER],
    "measure.baseline": ["3", "best", "../x", *NOT_TEXT],
    "measure.most_repeats": ["0", "1.5", "null", *NOT_A_NUMBER],
    "measure.margin": ["0", "-1", "nan", "inf", *NOT_A_NUMBER],
    "report.figures": ["3", "null", "[gif]", "[3]", "{a:1}"],
    "measure.precision": ["0", "2", "nan", *NOT_A_NUMBER],
    "measure.quiet": ["-1", "inf", *NOT_A_NUMBER],
    "measure.traced_examples": ["-1", "1.5", *NOT_A_NUMBER],
    "measure.certify": NOT_A_FLAG,
    "measure.target_log_probability": NOT_A_FLAG,
    "measure.run_code": NOT_A_FLAG,
    "policy.name": ["null", "3", *NOT_TEXT],
    "policy.decoder": ["3", "null", "zebra"],
    "policy.decoder._target_": ["null", "3", "os.system", "builtins.eval", "bild_lab.nothing"],
    "policy.decoder.drafter": ["null", "3"],
    "policy.decoder.acceptance": ["null", "3"],
    "logger._target_": ["null", "3", "subprocess.Popen"],
}
BROKEN = ["=", "=x", "x", "+", "~", "-x", "--nope", "a..b=1"]
BROKEN += [
    f"policy.window={value}"
    for value in ("${", "[1", "{a", "'3", "???", "${policy.window}", "${oc.env:NO_SUCH}")
]
BROKEN += [
    "policy.window=3,4",
    "policy.window=range(1,3)",
    "policy@x=bild",
    "policy=../pair/toy",
    "policy=bild/",
]
BROKEN += [
    "hydra.mode=FAST",
    "hydra/sweeper=best",
    "hydra/launcher=3",
    "hydra/luncher=basic",
    "hydra.nothing=3",
]
BROKEN += [
    "hydra.run.dir=[a]",
    "hydra.callbacks=null",
    "hydra.job.num=x",
    "experiment=bild/fg4",
    "template=none",
]
BROKEN += [
    "experiment=/etc/passwd",
    "--config-name=nope",
    "--config-dir=/nowhere",
    "--cfg=jobs",
    "--resolve",
    "~hydra",
]
SWEPT = [
    "",
    "3,",
    "range(3,1)",
    "interval(1,3)",
    "glob(*)",
    "choice()",
    "choice(",
    "shuffle(3)",
    "0,-1",
    "a,b",
]


def malformed() -> list[tuple[str, ...]]:
    """Every command line, in an order that mixes the kinds."""
    found = list(dict.fromkeys([*_values(), *_knobs(), *_names(), *((word,) for word in BROKEN)]))
    random.Random(0).shuffle(found)
    return found


def _values() -> Iterator[tuple[str, ...]]:
    """Values that a key cannot have, groups that are none, keys that are gone."""
    for key, values in BAD_VALUES.items():
        yield from ((f"{key}={value}",) for value in values)
    for group in GROUPS:
        yield from ((f"{group}={value}",) for value in ("3", "null", "{a:1}", "[zebra,zebra]"))
    yield from ((f"~{key}",) for key in TOP_LEVEL)
    yield from (
        (f"~{key}",)
        for key in ("dataset.metric", "dataset.name", "runtime.seed", "pair.target", "policy.name")
    )
    yield from ((f"+{group}.extra=3",) for group in GROUPS)
    yield from (("-m", f"policy.window={values}") for values in SWEPT)


def _knobs() -> Iterator[tuple[str, ...]]:
    """Every knob of every policy, with a value of another kind."""
    for policy in policy_names():
        for knob, value in knob_values(shipped(policy)).items():
            word_is_wrong = value is None or isinstance(value, int | float)
            bad = ("zebra", "{a:1}") if word_is_wrong else ("{a:1}",)
            yield from ((f"policy={policy}", f"policy.{knob}={one}") for one in bad)


def _names() -> Iterator[tuple[str, ...]]:
    """Keys and files with a letter missing."""
    for key in _leaves(compose_config([])):
        group, dot, last = key.rpartition(".")
        yield (f"{group}{dot}{last[1:] or 'x'}{last[:1]}x=1",)
    for group in GROUPS:
        for file in sorted((config_dir() / group).glob("*.yaml"))[:6]:
            yield (f"{group}={file.stem[:-1]}_",)


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in node:
        key = f"{prefix}{name}"
        if OmegaConf.is_dict(node._get_node(name)):
            yield from _leaves(node._get_node(name), f"{key}.")
        else:
            yield key


MALFORMED = malformed()
SAMPLE = [*MALFORMED[:5], ("~measure",)]
REST = pytest.param(MALFORMED[5:], id="rest", marks=pytest.mark.slow)


@pytest.fixture
def base(checkpoints: Path, data: Path) -> list[str]:
    words = [
        f"pair.target={checkpoints / 't5'}",
        f"pair.draft={checkpoints / 't5-draft'}",
        "dataset=multi30k",
    ]
    return [*words, f"dataset.path={data}", "name=tested"]


def refused(
    words: tuple[str, ...],
    base: list[str],
    patched: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> str | None:
    """What is wrong with how a command line was refused; None where nothing is."""
    ours = [
        word
        for word in base
        if word.partition("=")[0] not in {given.partition("=")[0] for given in words}
    ]
    ours = [word for word in ours if f"~{word.partition('=')[0]}" not in words]
    patched.setattr(sys, "argv", ["run.py", *ours, *words])
    began = time.perf_counter()
    try:
        run_application(run.main)
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        return f"{words}: {error!r}"
    printed = "".join(capfd.readouterr())
    left = [str(file) for file in Path().rglob("*") if file.is_file()]
    shutil.rmtree("outputs", ignore_errors=True)  # the next is judged by what it leaves itself
    took = time.perf_counter() - began
    if code != 2 or "Traceback" in printed or left or took > HANG_S:
        return f"{words}: status {code} after {took:.0f} s, files {left}, {printed[-300:]}"
    return None


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # closed


def test_there_are_hundreds_of_malformed_command_lines() -> None:
    assert len(MALFORMED) >= 300


@pytest.mark.parametrize("part", [pytest.param(SAMPLE, id="sample"), REST])
def test_malformed_command_lines_are_refused_and_leave_nothing(
    part: list[tuple[str, ...]],
    base: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    complaints = [refused(words, base, monkeypatch, capfd) for words in part]
    wrong = [complaint for complaint in complaints if complaint is not None]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)  # an assertion would cut them
