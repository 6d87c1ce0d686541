"""A sweep from Python: what the command does, its points as a frame, and exceptions in place of
exit codes.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import re
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import bild_lab
from bild_lab.errors import UserError
from bild_lab.lab import application
from bild_lab.lab import sweep as sweeps
from bild_lab.lab.application import main
from bild_lab.lab.config.compose import without_other_applications
from bild_lab.lab.config.console import tolerate_streams
from bild_lab.lab.config.entrypoint import Stopped, run_application
from bild_lab.lab.launcher import GpuLauncher
from bild_lab.lab.measure import runner
from bild_lab.lab.point.prepare import Point
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.result import Failure, FailureCause, Result
from bild_lab.lab.store.commands import read_commands
from bild_lab.lab.store.progress import SweepProgress, command_progress
from bild_lab.lab.store.records import Sweep
from tests.policies import load
from tests.tiny import save, tiny_llama


@pytest.fixture
def base(
    checkpoints: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.chdir(tmp_path)
    words = [
        f"pair.target={checkpoints / 't5'}",
        f"pair.draft={checkpoints / 't5-draft'}",
        "dataset=multi30k",
    ]
    words += [
        f"dataset.path={data}",
        "dataset.limit=2",
        "decoding.max_new_tokens=4",
        "measure.repeats=1",
    ]
    return [*words, "measure.warmup=0", "name=mine", "report.figures=png"]


@pytest.mark.usefixtures("no_picture")
def test_a_sweep_from_python_gives_its_points_with_a_metric_of_ones_own(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_words.py").write_text(
        "def words(text, references):\n    return min(100, len(text.split()))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = [*base, "policy=speculative,vanilla", "dataset.metrics=[own_words.words,bleu]"]
    before, begun_s = list(sys.argv), time.perf_counter()
    found = bild_lab.run(words)
    assert found["policy"].tolist() == ["speculative", "vanilla"] and set(found["sweep"]) == {
        "mine"
    }
    assert (
        set(found["quality_metric"]) == {"words"}
        and (found["repeats"] == 1).all()
        and sys.argv == before
    )
    (given,) = read_commands(Path("outputs/mine"))
    assert given.line.startswith("python run.py -m pair.target=")
    first, _ = Sweep(Path("outputs/mine")).results()
    # of this sweep, not of the process that tests
    assert first.seconds["setup"] < first.total_s < time.perf_counter() - begun_s
    monkeypatch.setattr(runner, "time_methods", None)  # whatever is measured now, fails
    (tmp_path / "own_words.py").write_text("def words(text, references):\n    return 7\n")
    del sys.modules["own_words"]
    # other code is another point
    with pytest.raises(RuntimeError, match="the sweep ended with status 1"):
        bild_lab.run([*words, "policy=vanilla"])


@pytest.mark.usefixtures("no_picture")
def test_a_launcher_that_loses_a_job_ends_in_a_report_of_what_is_finished(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault: its error passed the callback that reports, and came out as it was."""

    def losing(self: GpuLauncher, *_: object, **__: object) -> None:
        raise OSError("job 3 has not produced any output\n[killed: out of memory]")

    monkeypatch.setattr(GpuLauncher, "launch", losing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("COLUMNS", "200")
    bild_lab.run([*base, "policy=vanilla"])
    table, waited = Path("outputs/mine/sweep.csv"), []
    table.unlink()
    # jobs that still run may store a point
    monkeypatch.setattr(sweeps.psutil, "wait_procs", lambda _: waited.append(table.is_file()))
    with pytest.raises(RuntimeError, match="the sweep ended with status 1"):
        bild_lab.run([*base, "policy=vanilla,speculative", "hydra/launcher=gpus"])
    printed = "".join(capfd.readouterr())
    assert waited == [False]
    assert "the launcher failed: OSError: job 3 has not" in printed and "[killed: out" in printed
    assert "finished points are kept, the same command runs the rest" in printed
    assert table.is_file() and "vanilla" in table.read_text()
    assert printed.count("the rest is in outputs/mine") == 2  # one a command
    # planted: an error of a later command was told as this launcher's
    assert command_progress().report_lost is None
    monkeypatch.setattr(GpuLauncher, "launch", lambda *_, **__: [])
    table.unlink()
    try:
        raise KeyError("of a caller, who goes on")
    except KeyError:  # which is no error of the launcher's
        bild_lab.run([*base, "policy=vanilla,speculative", "hydra/launcher=gpus"])
    assert table.is_file()


@pytest.mark.parametrize("words", [[], ["-m"]], ids=["single", "sweep"])
def test_an_error_in_this_process_is_not_the_launchers(
    words: list[str], base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: it was told as the launcher's, though a single run has none."""
    monkeypatch.setattr(sweeps, "SIGNALS", ())  # those of the tests stay
    monkeypatch.setattr(application, "update_numbers", lambda *_: {}["our own"])
    monkeypatch.setattr(sys, "argv", ["run.py", *base, "policy=vanilla", *words])
    with pytest.raises(KeyError, match="our own"):
        run_application(application.measure_and_report)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (UserError("refused"), False),
        (HydraException("no such key"), False),
        (OmegaConfBaseException("no such value"), False),
        (BrokenPipeError(), False),  # nobody reads on
        (OSError("a job died"), True),
    ],
    ids=repr,
)
def test_what_a_command_refuses_is_not_told_as_the_launchers_error(
    error: Exception, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> None:
        raise error

    told: list[Exception] = []
    monkeypatch.setattr(application, "main", failing)
    monkeypatch.setattr(command_progress(), "report_lost", told.append)
    with nullcontext() if is_lost else pytest.raises(type(error)):
        application.measure_and_report()
    assert told == [error] * is_lost


class Started:
    """In place of a process. words: of its command line. gone: it has ended meanwhile."""

    def __init__(
        self,
        words: list[str],
        killed: list[Started],
        below: Sequence[Started] = (),
        gone: bool = False,
    ) -> None:
        self.words, self.killed, self.below, self.gone = words, killed, below, gone

    def cmdline(self) -> list[str]:
        return self.words

    def children(self, recursive: bool = False) -> list[Started]:
        if self.gone:
            raise psutil.NoSuchProcess(1)
        if not recursive:
            return [*self.below]
        return [*self.below, *(each for child in self.below for each in child.children(True))]

    def kill(self) -> None:
        if self.gone:
            raise psutil.NoSuchProcess(1)
        self.killed.append(self)


def test_of_what_a_command_has_started_the_jobs_end_with_all_that_they_have_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[Started] = []
    waited: list[Started] = []
    words = ["python", "-u", "-m", "submitit.local._local", "outputs/mine"]
    lowest = Started(["g++"], killed)
    measuring = Started(["python"], killed, [lowest])
    job, ended = Started(words, killed, [measuring]), Started(words, killed, gone=True)
    other = Started(["tensorboard", "--logdir=outputs"], killed)
    command = Started(["python", "run.py"], killed, [other, ended, job])
    monkeypatch.setattr(sweeps.psutil, "Process", lambda: command)
    monkeypatch.setattr(sweeps.psutil, "wait_procs", waited.extend)
    assert sweeps.local_jobs() == [ended, job]
    sweeps.end_local_jobs()
    assert set(killed) == {job, measuring, lowest} and job in waited


def test_a_signal_ends_jobs_before_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    monkeypatch.setattr(sweeps, "end_local_jobs", lambda: order.append("jobs"))
    monkeypatch.setattr(sweeps.SweepCallback, "_finish", lambda *given: order.append(given[2]))
    config = OmegaConf.create({"hydra": {"launcher": {"_target_": "hydra.BasicLauncher"}}})
    with pytest.raises(Stopped) as stopped:
        sweeps.SweepCallback(None, None)._stop(config)(signal.SIGTERM, None)
    stopped.value.finish(stopped.value.code)
    assert order == ["jobs", 143]


def test_a_sweep_that_ends_early_says_that_jobs_of_slurm_go_on() -> None:
    target = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.{}"
    for launcher, goes_on in (("SlurmLauncher", True), ("LocalLauncher", False)):
        config = {"hydra": {"launcher": {"_target_": target.format(launcher)}}}
        said = sweeps.what_is_left(OmegaConf.create(config))
        assert ("scancel" in said) is goes_on and "the same command runs the rest" in said


RULE = """
from bild_lab.engine.acceptance import ExactMatch
class Rule(ExactMatch):
    def __call__(self, draft, logits, request):
        verdict = super().__call__(draft, logits, request)
        return type(verdict)(verdict.path, {token})
"""
POLICY = """
name: of_my_folder
decoder:
  _target_: bild_lab.engine.decode.DraftThenVerify
  drafter:
    _target_: bild_lab.engine.methods.vanilla.NoDraft
  acceptance:
    _target_: own_rule.Rule
"""


@pytest.mark.usefixtures("no_picture")
def test_a_sweep_from_python_takes_the_policies_of_a_folder_and_their_code_as_it_is_now(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own/policy").mkdir(parents=True)
    (tmp_path / "own/policy/of_my_folder.yaml").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    words = [*base, f"hydra.searchpath=[file://{tmp_path / 'own'}]", "policy=of_my_folder"]
    for token in (10, 9):
        (tmp_path / "own_rule.py").write_text(RULE.format(token=token))
        found = bild_lab.run(words)
        assert found["policy"].tolist() == ["of_my_folder"]
        newest = Sweep(Path("outputs/mine")).results()[-1]
        assert {*read_examples(newest.folder)[0].token_ids} == {token}


@pytest.mark.usefixtures("no_picture")
def test_a_sweep_from_python_takes_every_list_of_values(base: list[str]) -> None:
    found = bild_lab.run([*base, "policy=glob(vanil*)", "runtime.seed=range(0,2)"])
    assert found["policy"].tolist() == ["vanilla"] * 2


@pytest.mark.usefixtures("no_picture")
def test_a_failure_is_forgotten_when_the_point_succeeds_in_another_kind_of_command(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: measured with resume=false, or with another logger, it stays in every report."""
    words = [*base, "policy=vanilla"]
    with monkeypatch.context() as broken, pytest.raises(RuntimeError):
        broken.setattr(runner, "time_methods", None)
        bild_lab.run([*words, "report.figures=svg"])
    (failure,) = Sweep(Path("outputs/mine")).failures()
    assert failure.policy == "vanilla"
    assert len(bild_lab.run([*words, "resume=false"])) == 1
    assert Sweep(Path("outputs/mine")).failures() == []


@pytest.mark.usefixtures("no_picture")
def test_a_point_that_fails_in_another_command_at_once_is_no_failure_of_this_one(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: of several commands in one folder all end with status 1 for a point of one."""
    run_point = sweeps.run_point

    def beside_another(point: Point, sweep: Sweep, **options: Any) -> Result:
        failure = Failure("other", "bild", {}, FailureCause("UserError", "no"), "2026-11-30T07:00")
        sweep.write_failure(failure, "")
        return run_point(point, sweep, **options)

    monkeypatch.setattr(sweeps, "run_point", beside_another)
    assert len(bild_lab.run([*base, "policy=vanilla"])) == 1
    assert "point(s) failed" not in capsys.readouterr().err
    assert [failure.point for failure in Sweep(Path("outputs/mine")).failures()] == ["other"]


@pytest.mark.usefixtures("no_picture")
def test_the_steps_of_a_range_are_the_numbers_that_one_types(base: list[str]) -> None:
    words = [*base, "policy=bild", "policy.rollback=2"]
    found = bild_lab.run([*words, "policy.fallback=range(0.1,0.35,0.1)"])
    assert sorted(found["fallback"]) == [0.1, 0.2, 0.3]
    again = bild_lab.run([*words, "policy.fallback=0.3"])
    assert len(again) == 3  # it was measured before


@pytest.mark.usefixtures("no_picture")
def test_the_line_of_a_point_has_the_digits_of_its_metrics(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bild_lab.run([*base, "policy=vanilla", "dataset.metrics=[log_probability,bleu]"])
    assert re.search(r"log-probability −?\d\.\d{4}, BLEU \d\.\d\d,", capsys.readouterr().err)


@pytest.mark.usefixtures("no_picture")
def test_a_knob_may_be_the_one_beside_it(base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*base, "policy=bild", "policy.fallback=0.5", "policy.rollback=${.fallback}"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with without_other_applications(), pytest.raises(SystemExit):
        run_application(main)
    (found,) = Sweep(Path("outputs/mine")).results()
    assert found.knobs["rollback"] == 0.5


@pytest.mark.usefixtures("no_picture")
def test_a_sweep_from_python_is_read_from_the_folder_that_it_was_measured_in(
    base: list[str],
) -> None:
    found = bild_lab.run([*base, "name=at_${now:%H-%M-%S-%f}", "policy=vanilla"])
    (folder,) = Path("outputs").glob("at_*")
    assert found["sweep"].tolist() == [folder.name]


def test_what_the_command_refuses_is_an_exception_and_nothing_is_written(base: list[str]) -> None:
    for words, message in (
        ([*base, "policy.fallbck=1"], "did you mean policy.fallback"),
        ([*base, "policy.fallback=3"], "must lie in"),
        ("policy=bild", "a list of KEY=VALUE, got 'policy=bild'"),
        (["-m", "policy=bild"], "a list of KEY=VALUE"),
        ([5], "a list of KEY=VALUE"),
        ("", "a list of KEY=VALUE"),
    ):
        with pytest.raises(UserError, match=message):
            bild_lab.run(words)
    assert not Path("outputs").exists()


@pytest.mark.usefixtures("no_picture")
def test_a_sweep_from_python_leaves_the_process_as_it_was(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # those of pytest keep a command from adding its own
    monkeypatch.setattr(root, "level", logging.ERROR)

    def state() -> list[object]:
        threads, streams = torch.get_num_threads(), [sys.stdout.errors, sys.stderr.errors]
        logs = [*root.handlers, root.level, warnings.showwarning, *warnings.filters]
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        random_numbers = [torch.get_rng_state().tolist(), repr(np.random.get_state())]
        variables, folder = dict(os.environ), os.getcwd()
        return [threads, streams, logs, signals, random_numbers, variables, folder, sys.argv]

    before = state()
    threads = torch.get_num_threads() + 1
    for words in (
        [*base, "policy=vanilla", f"runtime.threads={threads}"],
        [*base, "policy=abacus"],
    ):
        with suppress(UserError):
            bild_lab.run(words)
        assert state() == before
    (measured,) = Sweep(Path("outputs/mine")).results()
    assert measured.setting.threads == threads


def test_warnings_that_a_caller_logs_are_logged_after_a_command_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging, "_warnings_showwarning", None)  # as in a new process
    shows = warnings.showwarning
    logging.captureWarnings(True)
    try:
        captured = warnings.showwarning
        with application.as_the_command([]):
            logging.captureWarnings(True)
        assert warnings.showwarning is captured is not shows
    finally:
        logging.captureWarnings(False)


def test_a_stream_that_stops_at_a_strange_character_does_so_after_a_command_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    with application.as_the_command([]):
        tolerate_streams()
        assert stream.errors == "replace"
    assert stream.errors == "strict"


def test_models_that_nobody_has_leave_the_memory_with_a_command(checkpoints: Path) -> None:
    model = weakref.ref(load(checkpoints, "llama", "vanilla").target)
    assert model() is not None  # it stays for a next decoder
    with application.as_the_command([]):
        pass
    gc.collect()
    assert model() is None


def test_of_two_threads_each_measures_its_own_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], list[str]]] = []

    def measured(*_: object, **__: object) -> None:
        first = list(sys.argv)
        time.sleep(0.05)  # meanwhile the other thread begins
        seen.append((first, list(sys.argv)))

    monkeypatch.setattr(application, "run_application", measured)
    progress = SweepProgress(folder=Path())
    monkeypatch.setattr("bild_lab.lab.store.progress.command_progress", lambda: progress)
    monkeypatch.setattr("bild_lab.lab.store.table.load_results", lambda folder: folder)
    before = sys.argv
    threads = [Thread(target=bild_lab.run, args=([f"name={name}"],)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(first == last for first, last in seen) and sys.argv is before
    assert sorted(first[-1] for first, _ in seen) == ["name=a", "name=b"]


@pytest.mark.usefixtures("no_picture")
def test_a_sweep_from_python_measures_the_weights_that_are_there_now(
    base: list[str], tmp_path: Path
) -> None:
    folder = save(tiny_llama(1), tmp_path / "model")
    words = [*base, f"pair.target={folder}", f"pair.draft={folder}", "policy=vanilla"]
    texts = []
    for seed in (1, 7):
        save(tiny_llama(seed), folder)
        bild_lab.run(words)
        newest = Sweep(Path("outputs/mine")).results()[-1]
        texts.append([example.token_ids for example in read_examples(newest.folder)])
    assert len(list(Path("outputs/mine/points").iterdir())) == 2 and texts[0] != texts[1]


def test_a_command_remembers_nothing_of_files_and_functions_that_may_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remembered = (
        "config.policies.shipped_knobs",
        "data.examples.cached_examples",
        "metrics.external_metrics.evaluate_module",
        "metrics.quality.require_metric_works",
    )
    order: list[str] = []
    for name in remembered:
        function = SimpleNamespace(cache_clear=lambda name=name: order.append(name))
        monkeypatch.setattr(f"bild_lab.lab.{name}", function)
    monkeypatch.setattr(application, "run_application", lambda *_, **__: order.append("run"))
    monkeypatch.setattr("bild_lab.lab.store.table.load_results", lambda _: None)
    bild_lab.run(["name=mine"])
    assert sorted(order[:-1]) == sorted(remembered) and order[-1] == "run"


@pytest.mark.usefixtures("no_picture")
def test_a_sweep_from_python_reads_the_data_that_are_there_now(
    base: list[str], data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "test.jsonl"
    rows = (data / file.name).read_text().splitlines(keepends=True)
    seen = []
    for chosen in (rows[:1], rows[1:2]):
        file.write_text("".join(chosen))
        bild_lab.run([*base, f"dataset.path={file}", "policy=vanilla"])
        seen.append(Sweep(Path("outputs/mine")).results()[-1].setting.data)
    assert seen[0] != seen[1]


CELL = """
from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.methods.vanilla import NoDraft
TOKEN = {token}
class Rule(ExactMatch):
    def __call__(self, draft, logits, request):
        verdict = super().__call__(draft, logits, request)
        return type(verdict)(verdict.path, TOKEN)
def words(text, references):
    return {score}
words.scale = 1
"""


@pytest.mark.usefixtures("no_picture")
def test_each_command_measures_the_classes_and_metrics_of_a_notebook_as_they_are_now(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = ModuleType("of_a_notebook")
    monkeypatch.setitem(sys.modules, "of_a_notebook", notebook)
    (tmp_path / "own/policy").mkdir(parents=True)
    policy = POLICY.replace("own_rule", "of_a_notebook")
    (tmp_path / "own/policy/of_my_folder.yaml").write_text(policy)
    words = [*base, f"hydra.searchpath=[file://{tmp_path / 'own'}]", "policy=of_my_folder"]
    words += ["dataset.metric=of_a_notebook.words"]
    seen = []
    for token, score in ((10, 0.5), (9, 0.5), (9, 0.25), (9, 0.25)):
        exec(CELL.format(token=token, score=score), vars(notebook))
        bild_lab.run(words)
        newest = Sweep(Path("outputs/mine")).results()[-1]
        assert {*read_examples(newest.folder)[0].token_ids} == {token}
        assert newest.quality.value == 100 * score
        seen.append(len(list(Path("outputs/mine/points").iterdir())))
    assert seen == [1, 2, 3, 4]  # the last too: nothing tells that it is the same code


@pytest.mark.usefixtures("no_picture")
def test_a_sweep_from_python_knows_no_default_device(base: list[str]) -> None:
    torch.set_default_device("meta")
    try:
        found = bild_lab.run([*base, "policy=speculative", "decoding=sample"])
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert found["policy"].tolist() == ["speculative"]
