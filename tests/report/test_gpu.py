"""`make gpu` tells what passed and what failed, on the pretended GPU and on a CPU too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bild_lab.errors import UserError
from bild_lab.lab.code import code_hash
from bild_lab.lab.measure.bench import gpu as bench
from bild_lab.lab.measure.bench.shapes import Shape, llama
from bild_lab.lab.schema.numbers import CertificateCounts
from bild_lab.report.gpu import FAILED, LEFT_OUT, PASSED, Found, LeftOut, Step, attempt, headline, write
from scripts import gpu
from tests.pretended import Machine, pretended_gpu
from tests.report.sample import sample_drafted

TINY = {
    "llama_1b": (
        Shape(lambda: llama(2, 32, 48, 2, 1000), "d", 6),
        Shape(lambda: llama(1, 32, 48, 2, 1000), None, 6),
    )
}


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A test that patches torch.cuda too must ask for it before monkeypatch, which then ends first."""
    with pytest.MonkeyPatch.context() as patch, pretended_gpu() as machine:
        patch.setattr(bench, "TRIAL", TINY)
        yield machine
    assert not torch.cuda.is_available() or torch.version.cuda


def steps(device: str = "cuda") -> gpu.Steps:
    return gpu.Steps(torch.device(device), small=True)


def test_a_step_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    def wrong() -> Found:
        raise UserError("it broke\nline 1\nline 2")

    def strange() -> Found:
        raise RuntimeError("a kernel <died>")

    def absent() -> Found:
        raise LeftOut("not here")

    found = [attempt(str(work), work) for work in (lambda: Found(["fine"], [{"a": 1.0}]), wrong, strange, absent)]
    assert [step.verdict for step in found] == [PASSED, FAILED, FAILED, LEFT_OUT]
    assert (found[1].lines, found[1].output) == (("it broke",), "line 1\nline 2")
    assert "RuntimeError" in found[2].lines[0] and "Traceback" in found[2].output
    assert headline(found).startswith("1 of 4 steps passed; 1 left out; failed: ")
    page, data = write(tmp_path, {"gpu": None}, found)
    assert "a kernel &lt;died&gt;" in page.read_text()
    assert [step["verdict"] for step in json.loads(data.read_text())["steps"]] == [PASSED, FAILED, FAILED, LEFT_OUT]


def test_a_build_for_cpus_is_told_what_to_install(machine: Machine) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this build is for CUDA")
    (driver,) = gpu.run_steps(["driver", "bench"], steps(), lambda step: None)  # nothing else is tried
    assert driver.verdict == FAILED and "make clean setup" in driver.lines[0]


def test_the_driver_step_computes_on_the_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    launched = machine.launched
    assert attempt("driver", steps().driver).verdict == PASSED
    assert machine.launched > launched
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no GPU" in attempt("driver", steps().driver).lines[0]


@pytest.mark.slow
def test_bench_rows_and_waits_run_on_the_device(machine: Machine) -> None:
    here = steps()
    timed = here.bench()
    arms = {row["arm"]: row for row in timed.rows}
    assert {"hf_generate", "hf_assisted", "native", "native_compiled", "native_compiled_speculative"} <= set(arms)
    assert all(row["same_tokens"] for row in arms.values())
    assert [row["rows"] for row in here.rows().rows][:4] == list(bench.ROWS[:4])
    waits = {(row["policy"], row["arm"]): row["waits_per_round"] for row in here.waits().rows}
    assert waits["vanilla", "eager"] == pytest.approx(1, abs=0.2)
    assert waits["bild", "compiled"] < waits["bild", "eager"]


def test_shapes_that_do_not_fit_are_left_out_and_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 1000))
    fitting, missing = steps()._fitting
    assert fitting == [] and missing[0].startswith("llama_1b is left out")


def test_commands_are_run_and_what_they_print_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def call(words: list[str], **variables: str) -> str:
        calls.append((words, variables))
        return "....\n== 4 passed in 1 s =="

    monkeypatch.setattr(gpu, "call", call)
    monkeypatch.setattr(
        gpu,
        "certificates",
        lambda name, device: [{"policy": "vanilla", "texts": 4, "equal": 4, "ties": 0, "defects": 0}],
    )
    monkeypatch.setattr(gpu, "summaries", lambda name, device: [])
    found = [
        attempt(name, getattr(steps("cpu"), name)) for name in ("driver", "tests", "lossless", "certificate", "sweep")
    ]
    assert [step.verdict for step in found] == [LEFT_OUT, PASSED, PASSED, PASSED, PASSED]
    assert found[1].lines == ("4 passed in 1 s",)
    asked = [(words[3] if len(words) > 3 else "", variables) for words, variables in calls]
    assert asked[1][1] == {"BILD_LAB_TEST_DEVICE": "cpu"}
    precisions = [word for words, _ in calls for word in words if word.startswith("runtime.dtype=")]
    assert precisions == [f"runtime.dtype={one}" for one in ("float16", "bfloat16", "float32", "float32")]
    assert [variables.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") for _, variables in calls[2:6]] == ["0", "0", "0", "1"]


def test_verdicts_are_those_of_the_stored_points(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = replace(
        sample_drafted("bild", {}, 1.5, 0.0, (0.8, 0.5)), certificate=CertificateCounts(equal=3, ties=1, defects=0)
    ).to_json()
    monkeypatch.setattr(gpu, "results", lambda name, device: [stored])
    assert gpu.certificates("any", "cpu") == [
        {"policy": "bild", "engine": stored["engine"], "texts": 4, "equal": 3, "ties": 1, "defects": 0}
    ]


def test_points_of_earlier_code_or_another_device_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    for name, code, device in (
        ("a", "earlier", "cuda"),
        ("b", code_hash(), "cuda"),
        ("c", code_hash(), "cpu"),
    ):
        (tmp_path / "outputs/swept/points" / name).mkdir(parents=True)
        file = tmp_path / "outputs/swept/points" / name / "result.json"
        file.write_text(json.dumps({"point": name, "setting": {"device": device, "code": f"{code} torch 2"}}))
    assert [one["point"] for one in gpu.results("swept", "cuda")] == ["b"]


def test_a_defect_fails_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"policy": "speculative", "texts": 4, "equal": 3, "ties": 0, "defects": 1}
    monkeypatch.setattr(gpu, "call", lambda words, **variables: "")
    monkeypatch.setattr(gpu, "certificates", lambda name, device: [row])
    assert attempt("certificate", steps("cpu").certificate).verdict == FAILED


def test_a_command_that_fails_is_told_with_its_last_lines() -> None:
    with pytest.raises(UserError, match=r"status 3\nhello"):
        gpu.call(["-c", "print('hello'); raise SystemExit(3)"])


@pytest.mark.parametrize(
    ("words", "wanted"), [([], (list(gpu.Steps.ORDER), "cuda")), (["rows", "device=cpu"], (["rows"], "cpu"))]
)
def test_steps_are_chosen_by_name(words: list[str], wanted: tuple) -> None:
    assert gpu.chosen(words) == wanted
    with pytest.raises(UserError, match="the steps are"):
        gpu.chosen([*words, "abacus"])


def test_a_step_knows_its_seconds() -> None:
    assert isinstance(attempt("one", lambda: Found()), Step)
