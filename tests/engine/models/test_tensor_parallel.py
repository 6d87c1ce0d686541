"""One target in shards over the processes of torchrun: the texts of one process, written once, said once."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

import run
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.placement import ShardedModel
from bild_lab.engine.models.ranks import ONE_PROCESS, Ranks, launched
from bild_lab.engine.session import Prefix
from bild_lab.errors import UserError
from bild_lab.lab import cli as processes
from bild_lab.lab.cli import only_first_prints, run_application
from bild_lab.lab.config import compose_config
from bild_lab.lab.decoding.load import load_model
from bild_lab.lab.measure.environment import OtherLoad, cpu_name
from bild_lab.lab.point import prepare
from tests.engine.heads.tiny import random_adapter

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_model.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process one of several, as torchrun tells it."""

    def become(rank: int, count: int) -> None:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}.items():
            monkeypatch.setenv(name, str(value))

    return become


@pytest.fixture
def base(checkpoints: Path, data: Path) -> list[str]:
    pair = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    measured = ["dataset=multi30k", f"dataset.path={data}", "measure.repeats=1", "measure.warmup=1"]
    return [*pair, *measured, "decoding.max_new_tokens=12"]


def refused(words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """What a command that leaves no file says."""
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit) as ended:
        run_application(run.main)
    assert ended.value.code == 2
    assert [file for file in Path().rglob("*") if file.is_file()] == []
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "2 processes would measure the same point and write it to outputs/default; run without torchrun, or set"),
        (
            ["-m", "runtime.tensor_parallel=true", "hydra/launcher=joblib"],
            "under torchrun every process runs every point",
        ),
    ],
)
def test_processes_that_would_get_in_each_others_way_are_refused(
    words: list[str],
    message: str,
    base: list[str],
    process: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    process(0, 2)
    assert message in refused([*words, *base], monkeypatch, capfd)


@pytest.mark.parametrize(
    ("family", "count", "message"),
    [
        ("t5", 2, "Transformers has no plan of how to split a t5; use runtime.device_map=auto"),
        ("llama", 3, "its 4 attention heads are no multiple of 3 processes"),
        ("llama", 4, "its 2 attention heads are no multiple of 4 processes"),  # of keys and values
    ],
)
def test_an_architecture_that_cannot_be_split_is_refused(
    family: str, count: int, message: str, base: list[str], checkpoints: Path, process: Callable[[int, int], None]
) -> None:
    process(0, count)
    words = [*base, f"pair.target={checkpoints / family}", "policy=vanilla", "runtime.tensor_parallel=true"]
    with pytest.raises(UserError, match=message):
        prepare(compose_config(words))


def test_the_number_of_processes_is_part_of_a_points_setting(
    base: list[str], process: Callable[[int, int], None]
) -> None:
    process(1, 2)
    point = prepare(compose_config([*base, "runtime.tensor_parallel=true"]))
    assert point.setting["tensor_parallel"] == 2
    assert point.setting["hardware"] == f"2 x {cpu_name()}"
    assert {decoder.target.ranks for decoder in point.decoders.values()} == {Ranks(1, 2)}
    assert [model.ranks for model in point.decoders["method"].models[1:]] == [ONE_PROCESS]  # drafters are whole


def test_a_process_takes_its_own_heads_of_a_prefix(checkpoints: Path) -> None:
    checkpoint = Checkpoint(str(checkpoints / "llama"))
    heads = torch.arange(2.0)[None, :, None, None].expand(2, 2, 3, 8)
    sharded = [ShardedModel(checkpoint, CPU, torch.float32, Ranks(rank, 2)) for rank in (0, 1)]
    own = [model._shard_of(Prefix(heads, -heads)) for model in sharded]
    assert [prefix.keys.unique().tolist() for prefix in own] == [[0.0], [1.0]]
    assert [prefix.values.unique().tolist() for prefix in own] == [[0.0], [-1.0]]
    assert sharded[1]._shard_of(own[1]).keys.shape == (2, 1, 3, 8)  # made by the layers themselves


@dataclass(frozen=True)
class Pretended(Ranks):
    """Two processes, of which the other gives this."""

    count: int = 2
    other: object = None

    def gather(self, value: object) -> list[object]:
        return [value, self.other]


def test_what_fails_in_one_process_fails_in_all() -> None:
    assert Pretended().run(lambda: 3) == 3
    with pytest.raises(RuntimeError, match="process 1: OSError: no room"):
        Pretended(other="OSError: no room").run(lambda: 3)
    for ranks in (ONE_PROCESS, Pretended(other="OSError: no room")):
        with pytest.raises(KeyError, match="own"):
            ranks.run(lambda: {}["own"])


def test_processes_that_decoded_different_tokens_are_noticed() -> None:
    Pretended(other=[1, 2]).require_equal("tokens", [1, 2])
    with pytest.raises(RuntimeError, match="2 processes do not have the same tokens"):
        Pretended(other=[1, 2]).require_equal("tokens", [1, 3])


def test_other_load_leaves_out_the_processes_of_the_same_run_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([(0.0, 0.0, 0.0), (10.0, 8.0 * (os.cpu_count() or 1), 3.0)] * 3)  # wall, busy, own
    monkeypatch.setattr(OtherLoad, "_seconds", lambda self: next(seconds))
    two = [Pretended(other=(host, 2.0)) for host in (platform.node(), "elsewhere")]
    found = [OtherLoad(ranks).percent() for ranks in (ONE_PROCESS, *two)]
    share = 10.0 / (os.cpu_count() or 1)  # percent, of a second
    assert found == pytest.approx([80 - 3 * share, 80 - 5 * share, 80 - 3 * share])


@pytest.mark.parametrize(
    ("rank", "code", "heard"),
    [(0, 0, "said\n"), (0, 1, "said\n"), (1, 0, ""), (1, 1, "process 1:\nsaid\n"), (1, 143, "")],
)
def test_the_others_are_heard_only_where_they_fail(
    rank: int,
    code: int,
    heard: str,
    process: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    process(rank, 2)
    monkeypatch.setattr(processes, "GRACE_S", 0)
    monkeypatch.setattr(processes, "console", Console(stderr=True))
    monkeypatch.setattr(processes, "output", Console())
    with pytest.raises(SystemExit), only_first_prints():
        processes.console.print("said")
        processes.output.print("found")
        sys.exit(code)
    assert capfd.readouterr() == (("found\n" if rank == 0 else ""), heard)


def test_without_torchrun_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched() == ONE_PROCESS and ONE_PROCESS.first


def torchrun(words: list[str], **environment: str) -> subprocess.CompletedProcess:
    """Two processes on the CPU."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = Path(run.__file__)
    path = os.pathsep.join([str(script.parent), str(Path.cwd())])
    told = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [*launcher, str(script), *words, "runtime.tensor_parallel=true"]
    return subprocess.run(command, env=told, capture_output=True, text=True, timeout=600, check=False)


def alone(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "runtime.engine=hf"])
    with pytest.raises(SystemExit) as ended:
        run_application(run.main)
    assert not ended.value.code


def texts(name: str) -> dict[str, list[list[int]]]:
    """The tokens of every example, by what was measured."""
    found = {}
    for file in sorted(Path("outputs", name, "points").glob("*/result.json")):
        result = json.loads(file.read_text())
        rows = [json.loads(line) for line in file.with_name("examples.jsonl").read_text().splitlines()]
        found[f"{result['policy']} {result['setting']['decoding']}"] = [row["token_ids"] for row in rows]
    return found


@pytest.mark.slow
def test_two_processes_decode_what_one_does_and_write_and_say_it_once(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-m", *base, "policy=bild,speculative", "decoding.temperature=0,1", "resume=false"]  # none is overwritten
    done = torchrun([*words, "name=two"])
    assert done.returncode == 0, done.stderr
    assert len(list(Path("outputs/two/points").iterdir())) == 4
    assert [done.stderr.count(f"{number}/4 ") for number in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert done.stdout.count("outputs/two/report.html") == 1
    alone([*words, "name=one"], monkeypatch)
    assert len(texts("two")) == 4 and texts("two") == texts("one")


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["deep", "shallow"])
def test_two_processes_share_the_heads_of_an_adapters_prompt(
    prompt: str, base: list[str], checkpoints: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_adapter(Checkpoint(str(checkpoints / "llama")).config, prompt).save(folder / "adapter")
    words = [*base, "policy=bita", f"policy.adapter={folder / 'adapter'}"]
    done = torchrun([*words, "name=two"])
    assert done.returncode == 0, done.stderr
    alone([*words, "name=one"], monkeypatch)
    assert texts("two") == texts("one") != {}
    results = [json.loads(next(Path("outputs", name).rglob("result.json")).read_text()) for name in ("one", "two")]
    assert results[0]["counts"]["acceptance_rate"] == results[1]["counts"]["acceptance_rate"]


FAULTY = """
import os
from bild_lab.engine.drafters import NoDraft

class Faulty(NoDraft):
    def propose(self, tokens):
        if os.environ["RANK"] == "1" and len(tokens) > 12:
            raise ValueError("broken on purpose")
        return super().propose(tokens)
"""


@pytest.mark.slow
def test_a_fault_of_one_process_ends_the_run_instead_of_hanging(base: list[str], folder: Path) -> None:
    (folder / "faulty.py").write_text(FAULTY)
    done = torchrun([*base, "policy=vanilla", "policy.decoder.drafter._target_=faulty.Faulty"])
    assert done.returncode != 0
    assert "process 1:" in done.stderr and "broken on purpose" in done.stderr
    assert list(Path("outputs").rglob("result.json")) == []
