"""Rows at once follow from free memory, and whatever they are, a step has the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.native.layers import SPARE_ROWS
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.training import answers, memory
from bild_lab.training.distillation import DistillationSpec
from bild_lab.training.finetune import finetune
from bild_lab.training.modules.frozen import train_beside_frozen
from bild_lab.training.start import FromCheckpoint
from tests.training import allocations
from tests.training.jobs import LLAMA, MICRO, T5, Kill, job, losses
from tests.training.modules.frozen_jobs import frozen_job

PLAIN_T5 = {**T5, "config": {**T5["config"], "dropout_rate": 0.0}}
PLAIN_LLAMA = {**LLAMA, "config": {**LLAMA["config"], "attention_dropout": 0.0}}
STEPS = {"max_steps": 3, "evaluate_every": None, "optimizer": "adamw", "learning_rate": 1e-2}
Limit = Callable[[int], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Gives a CPU so many free bytes, and counts there as on a GPU."""
    monkeypatch.setattr(memory, "peak_bytes", allocations.peak_bytes)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    return lambda size: monkeypatch.setattr(memory, "room_bytes", lambda device: size)


def taught(folder: Path, data: str) -> dict[str, Any]:
    """A drafter that learns a target's distributions."""
    words = {"model": PLAIN_T5, "max_steps": 1, "evaluate_every": None}
    for name, seed in (("teacher", 0), ("start", 5)):
        if not (folder / name).is_dir():
            finetune(job(folder / name, seed=seed, **words))
    teacher, start = (
        Checkpoint(str(folder / name / "checkpoint")) for name in ("teacher", "start")
    )
    bild = {} if data == "answers" else {"temperature": 0.0, "fallback": 0.4, "rollback": 3.0}
    distillation_spec = DistillationSpec(data, "kl", **bild)
    return {
        "start": FromCheckpoint(start),
        "teacher": teacher,
        "distillation_spec": distillation_spec,
    }


def trained(kind: str, folder: Path, checkpoints: Path, name: str) -> tuple[dict, dict]:
    """The metrics and the weights of a training of three steps, of rows with as many labels as they
    happen to have.
    """
    place = folder / name
    if kind == "bita":
        metrics = train_beside_frozen(frozen_job(place, checkpoints / "llama", **STEPS))
        return metrics, load_file(place / "adapter" / "adapter.safetensors")
    words = {"t5": {"model": PLAIN_T5}, "llama": {"model": PLAIN_LLAMA}}.get(kind)
    words = taught(folder, kind) if words is None else words
    metrics = finetune(job(place, clip_norm=0.5, **words, **STEPS))
    return metrics, load_file(place / "checkpoint" / "model.safetensors")


@pytest.mark.fast("t5")
@pytest.mark.parametrize("kind", ["t5", "llama", "bita", "answers", "mixture"])
def test_weights_are_the_same_whatever_the_rows_at_once(
    kind: str, tmp_path: Path, checkpoints: Path, limit: Limit
) -> None:
    """Fault: the mean of the passes' means, of rows with different numbers of labels."""
    whole, whole_weights = trained(kind, tmp_path, checkpoints, "whole")
    limit(1)
    single, single_weights = trained(kind, tmp_path, checkpoints, "single")
    assert (whole["rows_at_once"], whole["passes_a_step"]) == (4, 1)
    assert (single["rows_at_once"], single["passes_a_step"]) == (1, 4)
    assert whole["identity"] == single["identity"]
    assert [loss for _, loss in losses(single)] == pytest.approx(
        [loss for _, loss in losses(whole)], rel=1e-4
    )
    # AdamW makes steps of what rounding leaves where a gradient is zero, so not weight by weight
    expected, weights = (
        torch.cat([each[name].flatten() for name in whole_weights])
        for each in (whole_weights, single_weights)
    )
    assert torch.linalg.norm(weights - expected) < 1e-3 * torch.linalg.norm(expected)


@pytest.mark.slow
def test_counting_leaves_a_training_as_it_was(tmp_path: Path, limit: Limit) -> None:
    """To the bit, with its dropout. Fault: trial passes change a weight."""
    words = {"max_steps": 3}
    plain = finetune(job(tmp_path / "plain", **words))
    limit(10**12)
    counted = finetune(job(tmp_path / "counted", **words))
    assert losses(plain) == losses(counted) and counted["rows_at_once"] == 4


@pytest.mark.parametrize(
    ("fits", "accumulate", "divided"),
    [(5, 1, (4, 3)), (0, 1, (1, 12)), (7, 1, (6, 2)), (99, 1, (12, 1)), (99, 4, (3, 4))],
)
def test_a_step_has_passes_of_equal_size_that_fit(
    fits: int,
    accumulate: int,
    divided: tuple[int, int],
    limit: Limit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And at least as many passes as the recipe says. No trial pass takes more than there is.

    Fault: AdamW's moments, or gradients, are left out.
    """
    device, state, room = torch.device("cpu"), 3 * 25 * 4, 100 * fits + 99
    objective = SimpleNamespace(model=torch.nn.Linear(5, 5, bias=False))
    tried: list[int] = []

    def counted(trial: Callable[[], None], devices: list[torch.device]) -> dict:
        trial()
        assert 100 * tried[-1] <= max(100, room)
        return {device: 100 * tried[-1]}

    monkeypatch.setattr(memory, "trial_pass", lambda objective, half, rows: tried.append(rows))
    monkeypatch.setattr(memory, "peak_bytes", counted)
    limit(state + room)
    recipe = replace(MICRO, batch_size=12, accumulate=accumulate, optimizer="adamw")
    found = memory.rows_at_once(objective, recipe, device, spread=False)
    assert (found.rows, found.passes) == divided and max(tried) <= 12


def test_the_fullest_of_several_gpus_says_how_many_rows_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (torch.device("cuda", index) for index in range(2))
    rooms = {first: 10_000, second: 450}
    tried: list[int] = []

    def counted(trial: Callable[[], None], devices: list[torch.device]) -> dict:
        trial()
        assert devices == [first, second]
        return {first: 50 * tried[-1], second: 100 * tried[-1]}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(memory, "trial_pass", lambda objective, half, rows: tried.append(rows))
    monkeypatch.setattr(memory, "peak_bytes", counted)
    monkeypatch.setattr(memory, "room_bytes", rooms.get)
    objective = SimpleNamespace(model=torch.nn.Linear(5, 5, bias=False))
    recipe = replace(MICRO, batch_size=12, accumulate=1)
    found = memory.rows_at_once(objective, recipe, first, spread=True)
    assert (found.rows, found.passes, found.fits, max(tried)) == (4, 3, 4, 4)
    assert reset == [first, second]  # the trials are no part of what the training takes


@pytest.mark.parametrize(("processes", "exchanged"), [(1, 0), (4, 1)])
def test_what_stays_from_pass_to_pass_is_gradients_moments_and_what_processes_exchange(
    processes: int, exchanged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "launched", lambda: SimpleNamespace(count=processes))
    model = torch.nn.Linear(5, 7)
    model.frozen = torch.nn.Parameter(torch.zeros(99), requires_grad=False)
    cpu = torch.device("cpu")
    for optimizer, moments in (("adamw", 2 * 42), ("adafactor", 7 + 5 + 7)):
        recipe = replace(MICRO, optimizer=optimizer)
        expected = 4 * (moments + (1 + exchanged) * 42)
        assert memory.state_bytes(model, recipe) == {cpu: expected}


def test_a_trial_pass_is_of_as_many_of_the_longest_rows_and_leaves_the_model_as_it_was() -> None:
    model, rows = torch.nn.Linear(3, 1), []

    def collate(examples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        rows.append(len(examples))
        return {"input": torch.stack(examples), "labels": torch.zeros(len(examples), 1)}

    objective = SimpleNamespace(
        model=model,
        longest=torch.ones(3),
        distillation=None,
        collate=collate,
        model_options={},
        loss=torch.nn.functional.mse_loss,
    )
    memory.trial_pass(objective, True, 5)
    assert rows == [5] and "forward" not in vars(model)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_a_killed_training_goes_on_with_the_rows_that_fit_now(tmp_path: Path, limit: Limit) -> None:
    words = {"model": PLAIN_T5, **STEPS, "evaluate_every": 1}
    whole = finetune(job(tmp_path / "whole", **words))
    with pytest.raises(KeyboardInterrupt):
        finetune(job(tmp_path / "killed", callbacks=(Kill(2),), **words))
    limit(1)
    resumed = finetune(job(tmp_path / "killed", **words))
    assert resumed["rows_at_once"] == 1 and resumed["steps"] == 3
    assert [loss for _, loss in losses(resumed)] == pytest.approx(
        [loss for _, loss in losses(whole)], rel=1e-4
    )


def test_a_model_spread_over_gpus_answers_as_many_texts_as_their_caches_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each holds its layers' caches. Fault: a batch of any size, which the GPUs cannot hold."""
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4
    )
    weights = [
        SimpleNamespace(device=torch.device("cuda", index), is_cuda=True) for index in (0, 1)
    ]
    model = SimpleNamespace(
        checkpoint=SimpleNamespace(config=config),
        device=torch.device("cuda", 0),
        dtype=torch.float16,
        load=lambda: None,
        module=SimpleNamespace(parameters=lambda: iter(weights)),
    )
    requests = [Request(Source((1,) * 30), Limits(30, 70))]
    # layers, keys and values, heads, width, bytes, tokens
    text_bytes = 4 * 2 * 2 * 16 * 2 * (100 + SPARE_ROWS)
    monkeypatch.setattr(answers, "free_bytes", lambda device: 10.1 * text_bytes)
    assert answers.texts_that_fit(model, requests) == 18  # 90 % of what both hold
    monkeypatch.setattr(answers, "free_bytes", lambda device: 0)
    assert answers.texts_that_fit(model, requests) == 1
    model.device = torch.device("cpu")
    assert answers.texts_that_fit(model, requests) is None
