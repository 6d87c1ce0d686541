"""The toy pair trains once, goes on after a kill, loads like any checkpoint, and is what finetune.py makes."""

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

import pytest
import torch
from filelock import FileLock
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import bild_lab
from bild_lab.errors import UserError
from bild_lab.lab.config import config_dir
from bild_lab.lab.data.toy import toy_corpus
from bild_lab.training import toy, trainer
from bild_lab.training.stalls import YieldToOthers
from bild_lab.training.trainer import job_identity, starting_point
from scripts import finetune

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
    """The project's own files, of a pair that trains in a second."""
    for name, values in MICRO.items():
        own = OmegaConf.load(config_dir() / f"{name}.yaml")
        changed = OmegaConf.merge(own, values, recipe if name == "train/toy" else {})
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(changed, folder / f"{name}.yaml")
    return folder


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A pair that trains in a second, and a cache of its own."""
    folder = write_configuration(tmp_path_factory.mktemp("conf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "config_dir", lambda: folder)
        patch.setenv("BILD_LAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture(scope="module")
def pair(micro: Path) -> tuple[Path, Path]:
    return toy.toy_checkpoint("toy:large"), toy.toy_checkpoint("toy:small")


def must_not_run(*arguments: Any) -> None:
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


def test_a_second_call_does_not_train_again(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "train", must_not_run)
    assert (toy.toy_checkpoint("toy:large"), toy.toy_checkpoint("toy:small")) == pair


def test_another_recipe_gets_another_folder(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = toy.toy_job("toy:small").folder
    monkeypatch.setattr(toy, "config_dir", lambda: write_configuration(tmp_path, seed=1))
    after = toy.toy_job("toy:small").folder
    assert before == pair[1].parent
    assert after.parent == before.parent and after.name.startswith("toy-small-") and after != before


def test_other_libraries_get_another_folder(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "version", lambda library: "0.0")
    assert toy.toy_job("toy:small").folder != pair[1].parent


def test_an_interrupted_training_leaves_nothing_that_is_used_and_goes_on(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))
    steps = []

    def note(self, args, state, control, **kwargs) -> None:
        steps.append(state.global_step)
        if steps == [1, 2, 3]:
            raise KeyboardInterrupt

    monkeypatch.setattr(YieldToOthers, "on_step_end", note)
    with pytest.raises(KeyboardInterrupt):
        toy.toy_checkpoint("toy:small")
    assert not (toy.toy_job("toy:small").folder / "checkpoint").exists()
    small = toy.toy_checkpoint("toy:small")
    assert steps == [1, 2, 3, 3, 4]
    assert (small / "model.safetensors").read_bytes() == (pair[1] / "model.safetensors").read_bytes()


def test_a_process_waits_for_another_that_trains_and_takes_what_it_made(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))
    said, found = threading.Event(), []
    messages: list[str] = []
    monkeypatch.setattr(toy.console, "print", lambda message: (messages.append(message), said.set()))
    monkeypatch.setattr(trainer, "_train", must_not_run)
    folder = toy.toy_job("toy:small").folder
    folder.mkdir()
    with FileLock(folder / "lock"):
        waiting = threading.Thread(target=lambda: found.append(toy.toy_checkpoint("toy:small")))
        waiting.start()
        assert said.wait(60)
        assert found == []
        shutil.copytree(pair[1], folder / "checkpoint")
    waiting.join(60)
    assert found == [folder / "checkpoint"]
    assert messages == ["another process is training toy:small; waiting for it"]


def test_a_name_that_is_no_member_is_refused() -> None:
    with pytest.raises(UserError, match="the toy pair has the members toy:large and toy:small, got 'toy:tiny'"):
        toy.toy_checkpoint("toy:tiny")


def test_a_cache_that_cannot_be_used_is_refused(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"toy:small is kept in the cache .*file, which cannot be used: .*set BILD_LAB"):
        toy.toy_checkpoint("toy:small")


def test_a_training_that_fails_says_where_it_was(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))

    def full(*arguments: Any) -> None:
        raise UserError("cannot write the checkpoint: No space left on device")

    monkeypatch.setattr(trainer, "_train", full)
    with pytest.raises(UserError, match=rf"toy:small could not be trained into the cache {tmp_path}, .*: cannot write"):
        toy.toy_checkpoint("toy:small")


def test_the_processes_of_a_launcher_want_it_trained_before(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"one process does, and this is one of 2; train it first: python run.py pair"):
        toy.toy_checkpoint("toy:large")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", toy.MEMBERS)
def test_finetune_makes_the_same_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy, "config_dir", config_dir)  # the project's own pair
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        written = compose("finetune", ["name=same", f"model={toy.MEMBERS[name]}", "dataset=toy", "train=toy"])
        by_model = compose("finetune", ["name=same", f"model={toy.MEMBERS[name]}"])
    assert written == by_model
    theirs, ours = finetune.training_job(written), toy.toy_job(name)
    deciding = [job_identity(job, starting_point(job)) for job in (theirs, ours)]
    assert deciding[0].pop("validation examples") != deciding[1].pop("validation examples")
    assert deciding[0] == deciding[1]
    assert theirs.data == ours.data and theirs.recipe == ours.recipe


@pytest.mark.slow
def test_of_two_processes_the_second_goes_on_where_the_first_was_killed(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    patched = f"""
from pathlib import Path
from bild_lab.training import toy
toy.config_dir = lambda: Path({str(write_configuration(tmp_path / "conf", max_steps=100))!r})
print(toy.toy_checkpoint("toy:small"))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BILD_LAB_CACHE": str(tmp_path / "cache")}

    def started() -> subprocess.Popen:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", patched], env=environment, **streams)

    first = started()
    while not list(tmp_path.glob("cache/toy-small-*/training/checkpoint-*/complete")):
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # still training, and holding its lock, when the second comes
    second = started()
    assert "another process is training toy:small" in second.stderr.readline()
    first.kill()
    first.communicate()
    printed, said = second.communicate(timeout=500)
    assert second.returncode == 0, said
    assert "going on from step" in said
    assert (Path(printed.strip()) / "model.safetensors").is_file()
