"""`runtime.allow_pickles=true` is known to every command that loads a model, and reaches the model:
one without safetensors is read with it, and refused without.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose, initialize_config_dir

import run
from bild_lab.lab.config.compose import HYDRA_VERSION, config_dir
from bild_lab.lab.point.read_model import load_model
from scripts import (
    align,
    finetune,
    fit_tree,
    generate_calibration,
    match_rates,
    screen,
    train_bita,
    train_lm_heads,
    train_module,
)
from tests.checkpoints import write_data
from tests.loopback_hub import contents, pickled
from tests.tiny import relative_of, save, tiny_llama
from tests.training.targets import ending

Command = Callable[..., tuple[int, str]]
SWITCH = "runtime.allow_pickles=true"
READ_NO_WEIGHTS = {"compare", "sweeps", "wandb_report"}
TRAINING = [
    "train.max_steps=1",
    "train.batch_size=4",
    "train.accumulate=1",
    "train.warmup_steps=0",
    "train.evaluate_every=null",
    "train.log_every=1",
    "train.device=cpu",
    "train.precision=float32",
]
BESIDE = [*TRAINING, "held_out=2", "calibration=outputs/calib"]
DATA = ["dataset=multi30k", "dataset.path={data}", "dataset.split=test"]
PAIR = ["pair.target={target}", "pair.draft={draft}", "policy.window=2"]
MEASURING = ["measure.warmup=0", "measure.repeats=1", "decoding.max_new_tokens=4"]
SCREENING = ["screen.timed_s=0", "screen.confirmations=0"]
# of each command that loads a model, in an order in which each has what it reads
COMMANDS: dict[str, tuple[ModuleType, list[str]]] = {
    "calibration": (
        generate_calibration,
        ["name=calib", "decoding.max_new_tokens=20", "model.path={target}", *DATA],
    ),
    "align": (align, ["model.path={draft}", *BESIDE]),
    "train_bita": (train_bita, ["model.path={target}", *BESIDE]),
    "train_module": (
        train_module,
        ["name=heads", "module=medusa", "module.heads=1", "model.path={target}", *BESIDE],
    ),
    "train_lm_heads": (
        train_lm_heads,
        ["name=layers", "layers=[1]", "heads.labels=self", "model.path={target}", *BESIDE],
    ),
    "match_rates": (
        match_rates,
        ["model.path={target}", "layers=[1]", "decoding.max_new_tokens=4", *DATA],
    ),
    "finetune": (
        finetune,
        ["model.path={draft}", *TRAINING, "validation.split=null", "validation.limit=2", *DATA],
    ),
    "fit_tree": (
        fit_tree,
        ["pair.target={target}", "policy.heads=outputs/heads/heads", *MEASURING, *DATA],
    ),
    "screen": (
        screen,
        [*SCREENING, "policy=speculative", *PAIR, *MEASURING, *DATA[:2]],
    ),
    "config": (run, ["policy=speculative", *PAIR, *MEASURING, *DATA]),
}


def test_no_command_is_left_out() -> None:
    applications = {file.stem for file in config_dir().glob("*.yaml")}
    assert applications == COMMANDS.keys() | READ_NO_WEIGHTS


@pytest.mark.fast("align", "finetune")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_loads_a_model_has_the_switch(name: str) -> None:
    with initialize_config_dir(str(config_dir()), **HYDRA_VERSION):
        assert compose(name, [SWITCH]).runtime.allow_pickles is True


@pytest.mark.slow
def test_the_switch_reaches_the_model_of_every_command(command: Command, no_picture: None) -> None:
    target = ending(tiny_llama(1), 2)
    models = {"target": target, "draft": relative_of(target, 2, noise=0.2)}
    rows = write_data(Path("rows").absolute(), 24)
    shutil.copy(rows / "test.jsonl", rows / "validation.jsonl")  # on which points are screened
    places = {"data": str(rows)}
    for role, model in models.items():
        checkpoint = pickled(contents(save(model, Path("made", role))))
        folder = Path(role).absolute()
        folder.mkdir()
        for file, content in checkpoint.items():
            (folder / file).write_bytes(content)
        places[role] = str(folder)
    for name, (script, words) in COMMANDS.items():
        line = [word.format(**places) for word in words]
        load_model.cache_clear()
        code, printed = command(script, *line, config=name)
        assert code == 2 and SWITCH in printed, (name, printed)
        code, printed = command(script, *line, SWITCH, config=name)
        assert code == 0, (name, printed)
        for told in printed.splitlines():
            if "python " in told and any(places[role] in told for role in models):
                assert SWITCH in told, (name, told)
