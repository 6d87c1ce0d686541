"""Weights that are cut short or no numbers: their point fails alone, and is measured once they are mended."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.faults.conftest import Ground
from tests.faults.trials import trials

WEIGHTS = "model.safetensors"
Note = Callable[..., None]


def cut_short(weights: Path, trial: int) -> None:
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) * (trial + 1) // (trial + 2)])


def no_numbers(weights: Path, trial: int) -> None:
    tensors = load_file(weights)
    for name in sorted(tensors)[trial % 2 :: 2]:
        tensors[name][:] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("trial", trials())
@pytest.mark.parametrize(
    ("fault", "damage", "said"),
    [("checkpoint cut short", cut_short, "cannot read the weights"), ("NaN weights", no_numbers, "NaN")],
)
def test_a_damaged_drafter_fails_its_point_alone(
    ground: Ground,
    checkpoints: Path,
    note: Note,
    fault: str,
    damage: Callable[[Path, int], None],
    said: str,
    trial: int,
) -> None:
    copy = ground.folder / "copy"
    shutil.copytree(checkpoints / "t5-draft", copy)
    damage(copy / WEIGHTS, trial)
    drafters = f"pair.draft={copy},{checkpoints / 't5-draft'}"
    words = ("-m", "policy=bild", "policy.fallback=0.2,0.6", drafters)
    broken = ground.start(*words)
    assert broken.ended() == 1, broken.printed
    kept = ground.finished()
    assert len(kept) == 2
    assert [said in failure.error.message for failure in ground.sweep.failures()] == [True, True]
    shutil.copy(checkpoints / "t5-draft" / WEIGHTS, copy / WEIGHTS)
    mended = ground.start(*words)  # now a copy of the other: the same weights make the same points
    assert mended.ended() == 0, mended.printed
    ground.require_whole(2, kept)
    note(fault, "status 1, its points recorded as failed, the others measured; resumed once mended", len(kept))
