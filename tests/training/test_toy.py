"""The toy pair trains once, resumes after a kill, loads like any checkpoint, and equals what finetune.py makes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from filelock import FileLock
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import bild_lab
from bild_lab.errors import UserError
from bild_lab.lab import toy_pair
from bild_lab.lab.config import config_dir
from bild_lab.lab.data.toy import toy_corpus
from bild_lab.training import toy
from bild_lab.training.finetune import job_identity, starting_point
from bild_lab.training.run import TrainingRun
from scripts import finetune
from tests.training import toy_child

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"d_model": 16, "d_ff": 32, "num_heads": 2, "d_kv": 8}
DEEP, SHALLOW = ({**SHAPE, "num_layers": layers, "num_decoder_layers": layers} for layers in (2, 1))
MICRO = {
    "model/toy_large": {"vocabulary": 300, "config": DEEP},
    "model/toy_small": {"vocabulary": 300, "config": SHALLOW},
    "dataset/toy": {"limit": 200},
    "train/toy": {
        **{"max_steps": 4, "batch_size": 4, "warmup_steps": 1, "evaluate_every": 2, "log_every": 1},
        **{"threads": 1, "precision": "float32"},
    },
}


def write_configuration(folder: Path, **recipe: Any) -> Path:
    """The project's own files, changed to a pair that trains in a second."""
    for name, values in MICRO.items():
        own = OmegaConf.load(config_dir() / f"{name}.yaml")
        changed = OmegaConf.merge(own, values, recipe if name == "train/toy" else {})
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(changed, folder / f"{name}.yaml")
    return folder


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A pair that trains in a second, and a cache of its own; a training's own process is `toy_child`."""
    folder = write_configuration(tmp_path_factory.mktemp("conf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_pair, "config_dir", lambda: folder)
        patch.setattr(toy_pair, "TRAIN", toy_child.__name__)
        patch.setenv("TOY_CONF", str(folder))
        patch.setenv("BILD_LAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture(scope="module")
def pair(micro: Path) -> tuple[Path, Path]:
    return toy.train_member("toy:large"), toy.train_member("toy:small")


@pytest.fixture
def empty_cache(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))
    return tmp_path


def must_not_run(*arguments: Any, **named: Any) -> None:
    raise AssertionError("trained although it should not")


def test_both_models_load_through_the_auto_classes_in_any_dtype(pair: tuple[Path, Path]) -> None:
    for folder, layers in zip(pair, (2, 1), strict=True):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype)
            assert model.dtype == dtype
            assert len(model.decoder.block) == layers
            assert torch.isfinite(model.shared.weight).all()
        assert model.config.decoder_start_token_id == 0
        assert model.generation_config.eos_token_id == 1


def test_the_pair_decodes_by_its_names(pair: tuple[Path, Path]) -> None:
    decoder = bild_lab.load("toy:large", "toy:small", policy="speculative")
    assert 1 <= len(decoder.generate("Der Hund schläft.", max_new_tokens=4).token_ids) <= 4


def test_the_tokenizer_gives_text_back_and_ends_it_with_eos(pair: tuple[Path, Path]) -> None:
    target, draft = map(AutoTokenizer.from_pretrained, pair)
    assert target.get_vocab() == draft.get_vocab()
    for example in toy_corpus("test")[:50]:
        for text in example.values():
            ids = target(text)["input_ids"]
            assert ids[-1] == target.eos_token_id == 1
            assert target.decode(ids, skip_special_tokens=True) == text


def test_a_second_use_does_not_train_again(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingRun, "_train", must_not_run)
    monkeypatch.setattr(subprocess, "run", must_not_run)
    for find in (toy.train_member, toy_pair.toy_checkpoint):
        assert (find("toy:large"), find("toy:small")) == pair


def test_another_recipe_gets_another_folder(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = toy.toy_job("toy:small").folder
    monkeypatch.setattr(toy_pair, "config_dir", lambda: write_configuration(tmp_path, seed=1))
    after = toy.toy_job("toy:small").folder
    assert before == pair[1].parent
    assert after.parent == before.parent and after.name.startswith("toy-small-") and after != before


def test_other_libraries_get_another_folder(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_pair, "version", lambda library: "0.0")
    assert toy.toy_job("toy:small").folder != pair[1].parent


def test_an_interrupted_training_is_not_used_and_resumes(
    pair: tuple[Path, Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def record(self, args, state, control, **kwargs) -> None:
        steps.append(state.global_step)
        if steps == [1, 2, 3]:
            raise KeyboardInterrupt

    monkeypatch.setattr(toy.OneThreadAfterStalls, "on_step_end", record)
    assert toy.main("toy:small") == 130
    assert not (toy.toy_job("toy:small").folder / "checkpoint").exists()
    small = toy.train_member("toy:small")
    assert steps == [1, 2, 3, 3, 4]
    assert (small / "model.safetensors").read_bytes() == (pair[1] / "model.safetensors").read_bytes()


def test_a_process_waits_for_another_that_trains_and_takes_its_result(
    pair: tuple[Path, Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, found = threading.Event(), []
    messages: list[str] = []
    monkeypatch.setattr(toy.console, "print", lambda message: (messages.append(message), printed.set()))
    monkeypatch.setattr(TrainingRun, "_train", must_not_run)
    folder = toy.toy_job("toy:small").folder
    folder.mkdir()
    with FileLock(folder / "lock"):
        waiting = threading.Thread(target=lambda: found.append(toy.train_member("toy:small")))
        waiting.start()
        assert printed.wait(60)
        assert found == []
        shutil.copytree(pair[1], folder / "checkpoint")
    waiting.join(60)
    assert found == [folder / "checkpoint"]
    assert messages == ["another process is training toy:small; waiting for it"]


def test_a_training_ends_with_the_process_that_waits_for_it(micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = toy.StopWithParent()
    watch.on_step_end(None, None, None)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        watch.on_step_end(None, None, None)


def test_a_training_uses_one_thread_only_after_repeated_stalls() -> None:
    threads = torch.get_num_threads()
    watch = toy.OneThreadAfterStalls()
    try:
        torch.set_num_threads(2)
        for stall in range(1, 4):
            watch.on_step_begin(None, None, None)
            watch.on_step_end(None, None, None)  # an ordinary step does not count
            watch.on_step_begin(None, None, None)
            watch.started_s -= 2
            watch.on_step_end(None, None, None)
            assert torch.get_num_threads() == (1 if stall == 3 else 2)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("find", [toy.train_member, toy_pair.toy_checkpoint])
def test_a_name_that_is_no_member_is_refused(find: Any) -> None:
    with pytest.raises(UserError, match="the toy pair has the members toy:large and toy:small, got 'toy:tiny'"):
        find("toy:tiny")


def test_a_cache_that_cannot_be_used_is_refused(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path / "file"))
    assert toy.main("toy:small") == 2
    printed = capsys.readouterr().out
    assert printed.startswith(f"toy:small is kept in the cache {tmp_path / 'file'}, which cannot be used: ")
    assert "set BILD_LAB_CACHE to a folder on a local disk that can be written" in printed


def test_a_training_that_fails_says_why(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any) -> None:
        raise UserError("cannot write the checkpoint: No space left on device")

    monkeypatch.setattr(TrainingRun, "_train", full)
    assert toy.main("toy:small") == 2
    assert capsys.readouterr().out == "cannot write the checkpoint: No space left on device\n"


def test_the_processes_of_a_launcher_need_it_trained_before(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"toy:large is not trained yet, .* one of 2 .*: python run.py pair=toy"):
        toy_pair.toy_checkpoint("toy:large")
    assert list(empty_cache.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", toy_pair.MEMBERS)
def test_finetune_makes_the_same_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy_pair, "config_dir", config_dir)  # the project's own pair
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        written = compose("finetune", ["name=same", f"model={toy_pair.MEMBERS[name]}", "dataset=toy", "train=toy"])
        by_model = compose("finetune", ["name=same", f"model={toy_pair.MEMBERS[name]}"])
    assert written == by_model
    theirs, ours = finetune.finetuning_job(written), toy.toy_job(name)
    deciding = [job_identity(job, starting_point(job)) for job in (theirs, ours)]
    assert deciding[0].pop("validation examples") != deciding[1].pop("validation examples")
    assert deciding[0] == deciding[1]
    assert theirs.data == ours.data and theirs.recipe == ours.recipe


@pytest.mark.slow
def test_the_first_use_trains_in_a_process_of_its_own(
    pair: tuple[Path, Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY_CHILD", "train")
    monkeypatch.chdir(empty_cache)
    (empty_cache / "torch.py").write_text("raise ImportError('of the working folder')")
    small = toy_pair.toy_checkpoint("toy:small")
    assert (small / "model.safetensors").read_bytes() == (pair[1] / "model.safetensors").read_bytes()
    shown = capfd.readouterr()
    assert shown.out == ""
    assert f"training toy:small, once; the cache {empty_cache} keeps it" in shown.err and "step 4: loss" in shown.err


FAILURES = {
    "refuse": "^the cache is full; make room$",
    "fail": "the training of toy:small failed; the message above says why. The same command resumes it",
    "killed": "the training of toy:small was ended by SIGKILL, perhaps because memory ran out; the same",
}


@pytest.mark.parametrize("behaviour", FAILURES)
def test_a_training_that_fails_in_its_process_gives_one_message(
    behaviour: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_CHILD", behaviour)
    with pytest.raises(UserError, match=FAILURES[behaviour]):
        toy_pair.toy_checkpoint("toy:small")


@pytest.mark.parametrize("behaviour", ["interrupted", "interrupted_at_the_start"])
def test_a_training_that_is_interrupted_interrupts_what_waits(
    behaviour: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_CHILD", behaviour)
    with pytest.raises(KeyboardInterrupt):
        toy_pair.toy_checkpoint("toy:small")


PARENT = """
from pathlib import Path
import os
from bild_lab.lab import toy_pair
toy_pair.TRAIN = "tests.training.toy_child"
toy_pair.config_dir = lambda: Path(os.environ["TOY_CONF"])
print(toy_pair.toy_checkpoint("toy:small"))
"""


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts processes that need toy:small, each in a session as in a terminal; the training takes a while."""
    conf = write_configuration(tmp_path / "conf", max_steps=200, evaluate_every=20, log_every=20)
    cache = str(tmp_path / "cache")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOY_CHILD": "train", "TOY_CONF": str(conf)}

    def started() -> subprocess.Popen:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen([sys.executable, "-c", PARENT], env={**environment, "BILD_LAB_CACHE": cache}, **streams)

    return started


def child_in_training(process: subprocess.Popen, cache: Path) -> psutil.Process:
    """The process that trains, once it has a checkpoint to resume from."""
    while not list(cache.glob("toy-small-*/training/checkpoint-*/complete")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    (child,) = psutil.Process(process.pid).children()
    return child


@pytest.mark.slow
@pytest.mark.parametrize("struck", ["parent", "child", "both by Ctrl-C"])
def test_a_training_that_was_stopped_leaves_no_process_and_resumes(struck: str, start: Any, tmp_path: Path) -> None:
    first = start()
    child = child_in_training(first, tmp_path / "cache")
    if struck == "both by Ctrl-C":
        os.killpg(first.pid, signal.SIGINT)
    else:
        os.kill(first.pid if struck == "parent" else child.pid, signal.SIGKILL)
    printed, shown = first.communicate(timeout=100)  # its streams close when the training ends too
    assert printed == "" and first.returncode != 0
    assert ("was ended by SIGKILL" in shown) == (struck == "child")
    assert not child.is_running()
    again = start()
    printed, shown = again.communicate(timeout=500)
    assert again.returncode == 0, shown
    assert "resuming from step" in shown
    assert (Path(printed.strip()) / "model.safetensors").is_file()


@pytest.mark.slow
def test_of_two_processes_the_second_resumes_where_the_first_was_killed(start: Any, tmp_path: Path) -> None:
    first = start()
    child = child_in_training(first, tmp_path / "cache")
    child.suspend()  # still training, and holding its lock, when the second comes
    second = start()
    lines = [second.stderr.readline(), second.stderr.readline()]
    assert "another process is training toy:small" in lines[1]
    child.kill()
    first.communicate()
    printed, shown = second.communicate(timeout=500)
    assert second.returncode == 0, shown
    assert "resuming from step" in shown
    assert (Path(printed.strip()) / "model.safetensors").is_file()
