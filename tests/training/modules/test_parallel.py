"""A parallel drafter's training: its blocks are those of decoding, what they learn, and that it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bild_lab.engine.heads.parallel import ParallelHeads
from bild_lab.errors import UserError
from bild_lab.training.modules.frozen import train_beside_frozen
from bild_lab.training.modules.parallel import ParallelModule, ParallelSpec
from bild_lab.training.modules.states import OneRowCheckpoint
from tests.engine.drafters.naive import parallel_behind
from tests.engine.heads.tiny import random_parallel
from tests.engine.models.test_states import ENCODED
from tests.tiny import PAD, tiny_t5
from tests.training.jobs import losses
from tests.training.modules.frozen_jobs import frozen_job

TEXT = [7, 8, 9, 10, 11, 12, 13]
BLOCK = 3


def spec(**changes: Any) -> ParallelSpec:
    return ParallelSpec(**{"layers": 1, "block": BLOCK, "rank": 4, "contexts": 3, "decay": 0.8, **changes})


@pytest.mark.parametrize("rank", [0, 4])
def test_the_blocks_of_training_are_those_of_decoding_and_learn_the_models_own_distribution(rank: int) -> None:
    module = tiny_t5(4, layers=3).eval()
    heads = random_parallel(module.config, 2, BLOCK, rank)
    prompt = [*ENCODED[0].tolist(), PAD]
    rows = torch.tensor([[*prompt, *TEXT], [*prompt, *TEXT[::-1]]])
    first = len(prompt) + 1
    contexts = torch.tensor([[first, first + 2, first + 4], [first, first + 1, 1]])
    found = ParallelModule(module, heads)(rows, contexts)
    found.losses.sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in heads.parameters() if weight.numel())
    for sample, group in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        length, tokens = int(contexts[sample, group]) - len(prompt) + 1, rows[sample, len(prompt) - 1 :].tolist()
        with torch.no_grad():
            behind = parallel_behind(heads, module, tokens[:length])
            own = module(input_ids=ENCODED, decoder_input_ids=torch.tensor([tokens])).logits[0].softmax(-1)
        for step in range(BLOCK):
            expected = behind(tokens[length : length + step])
            torch.testing.assert_close(found.logits[sample, group, step].detach(), expected, rtol=1e-3, atol=1e-3)
            loss = -(own[length - 1 + step] * expected.log_softmax(-1)).sum()
            torch.testing.assert_close(found.losses[sample, group, step].detach(), loss, rtol=1e-3, atol=1e-3)


def test_a_training_leaves_a_drafter_that_learned(tmp_path: Path, checkpoints: Path) -> None:
    base = OneRowCheckpoint(str(checkpoints / "t5"))
    changes = {"spec": spec(), "max_steps": 60, "evaluate_every": 20, "log_every": 5}
    job = frozen_job(tmp_path, Path(base.path), **changes, learning_rate=0.02)
    metrics = train_beside_frozen(replace(job, base=base))
    (_, first), *_, (_, last) = losses(metrics)
    assert last < 0.95 * first
    assert list(metrics["columns"]) == ["token_1", "token_2", "token_3"]
    assert ParallelHeads.load(tmp_path / "heads").config.base["fingerprint"] == base.fingerprint
    assert f"policy=parallel policy.heads={tmp_path}/heads" in job.command


def test_what_cannot_be_trained_is_refused(tmp_path: Path, checkpoints: Path) -> None:
    with pytest.raises(UserError, match="module.block must be a whole number >= 1, got 0"):
        spec(block=0)
    with pytest.raises(UserError, match="module.decay must lie in"):
        spec(decay=0)
    with pytest.raises(UserError, match="needs a T5 or mT5"):
        frozen_job(tmp_path, checkpoints / "llama", spec=spec())
