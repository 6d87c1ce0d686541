"""Small modules learn beside a frozen model that is spread over devices or cut among processes as
beside a whole.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.integrations import accelerate

from bild_lab.engine.models.hf.model import SpreadModel
from bild_lab.errors import UserError
from bild_lab.training.answers import read_calibration
from bild_lab.training.calibration import CalibrationJob, generate_calibration
from bild_lab.training.modules.bita import PromptRows, attend_with_prompt
from bild_lab.training.modules.eagle import EagleSpec
from bild_lab.training.modules.frozen import train_beside_frozen
from bild_lab.training.modules.layer_heads import LayerHeadsSpec
from bild_lab.training.modules.medusa import MedusaSpec
from bild_lab.training.modules.predictors import PredictionEvaluator, PredictionLoss
from bild_lab.training.modules.states import (
    BasePlacement,
    OneRowCheckpoint,
    decoder_states,
    own_matrices,
)
from scripts import generate_calibration as calibration_command
from scripts import train_bita
from tests.training.jobs import losses
from tests.training.modules.frozen_jobs import BITA, frozen_job

CPU = torch.device("cpu")
AROUND = {
    "model.embed_tokens": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
ON_DISK = {**AROUND, "model.layers": "disk"}  # where layers' weights are but while they run
SPECS = {
    "bita": BITA,
    "medusa": MedusaSpec(heads=2, layers=1, shared=True),
    "eagle3": EagleSpec(variant="eagle3", steps=2, noise=0.0),
    "heads": LayerHeadsSpec(layers=[1], rank=None, labels="self"),
}


def checkpoint(checkpoints: Path) -> OneRowCheckpoint:
    return OneRowCheckpoint(str(checkpoints / "llama"))


def learned(spec: Any, base: nn.Module) -> list[torch.Tensor]:
    """The loss of a batch beside this model, and its gradients."""
    module = spec.build(base, {}, seed=0).train()
    tokens = torch.randint(3, 30, (2, 12), generator=torch.Generator().manual_seed(3))
    contexts, count = torch.tensor([[3, 6], [4, 7]]), len(spec.predictors.names)
    labels = torch.randint(3, 30, (2, 2, count), generator=torch.Generator().manual_seed(4))
    wanted = {"target_tokens": labels} if module.reads_labels else {}
    loss = PredictionLoss(spec.predictors.weights)(
        module(input_ids=tokens, contexts=contexts, **wanted), labels
    )
    loss.backward()
    return [
        loss.detach(),
        *(weight.grad for weight in module.parameters() if weight.grad is not None),
    ]


@pytest.mark.parametrize("name", SPECS)
def test_a_module_learns_the_same_beside_layers_on_disk(name: str, checkpoints: Path) -> None:
    base = SpreadModel(checkpoint(checkpoints), CPU, torch.float32, ON_DISK).module.requires_grad_(
        False
    )
    assert all(weight.is_meta for weight in base.model.layers.parameters())
    whole = BasePlacement().load(checkpoint(checkpoints), CPU, torch.float32)
    both = (learned(SPECS[name], one) for one in (base, whole))
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


def test_matrices_that_are_elsewhere_until_they_run_are_refused(checkpoints: Path) -> None:
    base = SpreadModel(checkpoint(checkpoints), CPU, torch.float32, {"": "disk"}).module
    BITA.build(base, {}, seed=0)  # which needs none of them
    for name in ("medusa", "eagle3", "heads"):
        with pytest.raises(
            UserError, match="reads the model's vocabulary matrices, which found no room"
        ):
            SPECS[name].build(base, {}, seed=0)


def test_a_prompt_goes_to_the_device_of_each_layer() -> None:
    rows = PromptRows(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4))
    layer = SimpleNamespace(layer_idx=1, is_causal=True, num_key_value_groups=1, training=False)
    states = [
        torch.ones(2, 1, count, 4, device="meta", dtype=torch.bfloat16) for count in (5, 7, 7)
    ]
    out, _ = attend_with_prompt(layer, *states, None, bita_prompt=rows)
    assert (out.device.type, out.dtype, out.shape[1]) == ("meta", torch.bfloat16, 5)


def test_states_of_layers_elsewhere_come_to_the_tokens() -> None:
    """The tokens are on another device than the layers; only those that are asked for are moved."""
    states = [torch.ones(1, 4, 2, device=device) for device in ("cpu", "cpu", "meta")]
    head = torch.nn.Identity()

    class Base:
        config = SimpleNamespace(is_encoder_decoder=False)

        def get_output_embeddings(self) -> torch.nn.Module:
            return head

        def forward(self, **_: Any) -> dict[str, Any]:
            head(states[1])
            return {"hidden_states": [*states[:2], None]}

    found = decoder_states(Base(), torch.ones(1, 4, device="meta"), torch.tensor([[2]]), layers=[1])
    assert (set(found.hidden), found.hidden[1].device.type, found.final.device.type) == (
        {1},
        "meta",
        "meta",
    )


@pytest.mark.slow
def test_a_training_beside_a_model_that_does_not_fit_is_that_beside_a_whole_one(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_beside_frozen(frozen_job(tmp_path / "whole", checkpoints / "llama"))
    monkeypatch.setattr(accelerate, "accelerate_max_memory", lambda limits: {"cpu": 80_000})
    job = frozen_job(tmp_path / "spread", checkpoints / "llama", placed=BasePlacement("auto"))
    assert job.spread and losses(train_beside_frozen(job)) == losses(whole)


def test_answers_of_a_spread_model_are_its_own(checkpoints: Path, tmp_path: Path) -> None:
    job = frozen_job(tmp_path, checkpoints / "llama")
    examples = tuple(SimpleNamespace(id=f"train-{i}", prompt=f"w{i} w6 w7") for i in range(3, 8))
    answers = []
    for name, where in {"spread": ON_DISK, "whole": {"": "cpu"}}.items():
        model, folder = SpreadModel(job.base, CPU, torch.float32, where), tmp_path / name
        generate_calibration(
            CalibrationJob(model, job.calibration.dataset, examples, 8, 2, 4, folder)
        )
        answers.append(
            [tuple(answer.answer_token_ids) for answer in read_calibration(folder).answers]
        )
    assert answers[0] == answers[1] and len({*answers[0]}) > 1


REFUSED = {
    "an unknown map": (
        [],
        ["runtime.device_map=wide"],
        "runtime.device_map must be one of null, auto, balanced",
    ),
    "a map for several": (
        ["2"],
        ["runtime.device_map=auto"],
        "the devices of one process, got 2 processes; start one",
    ),
    "shards for one": ([], ["model.sharded=true"], "start several: accelerate launch --multi_gpu"),
    "no flag": ([], ["model.sharded=often"], "model.sharded must be true or false, got 'often'"),
    "answers": (["2"], ["model.sharded=true"], "does not answer here; make its answers first with"),
}


@pytest.mark.fast("an unknown map")
@pytest.mark.parametrize("case", REFUSED)
def test_a_placement_that_cannot_be_is_refused_before_weights_are_read(
    case: str,
    command: Callable[..., tuple[int, str]],
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes, words, message = REFUSED[case]
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes[0])
    monkeypatch.setattr(OneRowCheckpoint, "weights", lambda *_: pytest.fail("weights were read"))
    code, printed = command(
        train_bita, f"model.path={checkpoints / 'llama'}", "train.device=cpu", *words
    )
    assert code == 2 and message in printed, printed
    if case == "an unknown map":
        code, printed = command(calibration_command, f"model.path={checkpoints / 'llama'}", *words)
        assert code == 2 and message in printed, printed


def learn_beside_a_part(rank: int, port: int, folder: Path, base: Path) -> None:
    """As one of two launched processes, which holds half of every layer and all of the rest.

    A training has five held-out answers, two at a time: the first process has two batches of them,
    the second one.
    """
    here = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in here.items()}, ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    placed, model = BasePlacement(sharded=True), OneRowCheckpoint(str(base))
    part, whole = (one.load(model, CPU, torch.float32) for one in (placed, BasePlacement()))
    held = sum(weight.to_local().numel() for weight in part.model.layers.parameters())
    assert 2 * held == sum(weight.numel() for weight in whole.model.layers.parameters())
    assert all(
        torch.equal(*pair) for pair in zip(own_matrices(part), own_matrices(whole), strict=True)
    )
    for spec in reversed(SPECS.values()):  # BiTA, which changes the attention, comes last
        assert all(
            torch.equal(*pair)
            for pair in zip(learned(spec, part), learned(spec, whole), strict=True)
        )
    train_beside_frozen(frozen_job(folder, base, placed=placed, held_out=5, accumulate=2))


@pytest.mark.slow
def test_modules_learn_the_same_beside_parts_of_layers(checkpoints: Path, tmp_path: Path) -> None:
    """Where the processes wait for each other for ever, they are ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        values = (free.getsockname()[1], tmp_path / "parts", checkpoints / "llama")
    context = multiprocessing.get_context("forkserver")  # of a process without threads
    context.set_forkserver_preload([__name__])
    both = [context.Process(target=learn_beside_a_part, args=(rank, *values)) for rank in (0, 1)]
    for one in both:
        one.start()
    for one in both:
        one.join(300)
        one.kill()
        one.join()
    assert [one.exitcode for one in both] == [0, 0]
    train_beside_frozen(
        frozen_job(tmp_path / "whole", checkpoints / "llama", held_out=5, accumulate=2)
    )
    parts, whole = (
        load_file(tmp_path / name / "adapter" / "adapter.safetensors")
        for name in ("parts", "whole")
    )
    assert all(torch.allclose(parts[name], whole[name], rtol=1e-3, atol=1e-5) for name in whole)


def test_a_process_without_a_batch_runs_the_model_and_counts_nothing(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sharded model runs only if all its processes run it."""
    job = frozen_job(tmp_path, checkpoints / "llama")
    module = BITA.build(BasePlacement().load(job.base, CPU, torch.float32), {}, seed=0)
    runs: list[int] = []
    module.register_forward_hook(lambda *_: runs.append(1))
    loss, sums = PredictionLoss((1.0,) * 3), []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        sums.append(PredictionEvaluator(job.rows[:5], BITA.predictors, 2)._sums(module, loss))
    assert len(runs) == 4  # of two batches each
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    whole = PredictionEvaluator(job.rows[:5], BITA.predictors, 2)._sums(module, loss)
    torch.testing.assert_close(sum(sums), whole, rtol=1e-5, atol=1e-5)
