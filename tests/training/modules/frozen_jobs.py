"""Jobs that train a small module beside a frozen tiny model in a second."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.training.answers import END, Calibration, TargetAnswer
from bild_lab.training.modules.bita import BitaSpec
from bild_lab.training.modules.frozen import FrozenJob
from bild_lab.training.train_spec import TrainSpec
from tests.tiny import END as END_TOKEN
from tests.tiny import WORDS
from tests.training import jobs

MICRO = replace(
    jobs.MICRO,
    optimizer="adamw",
    learning_rate=0.03,
    scale_parameter=False,
    schedule="cosine",
    max_target_tokens=20,
)
BITA = BitaSpec(prompt="deep", prompt_tokens=2, mask_tokens=3, splits=2, consecutive=False)


def answers(count: int, shortest: int = 4) -> tuple[TargetAnswer, ...]:
    """Words that go up by one: what follows can be learned."""
    chance = random.Random(0)
    found = []
    for index in range(count):
        start = chance.randrange(3, 12)
        tokens = [*range(start, start + chance.randrange(shortest, 12) - 1), END_TOKEN]
        prompt = " ".join(chance.choices(WORDS, k=chance.randint(2, 5)))
        found.append(TargetAnswer(f"train-{index}", prompt, "", tokens, END))
    return tuple(found)


def calibration(base: Checkpoint, rows: tuple[TargetAnswer, ...]) -> Calibration:
    """Answers as if the model had given them."""
    spec = DatasetSpec(
        name="words", split="train", source_column="de", metric="agreement", path="words"
    )
    model = {"path": base.path, "revision": None, "fingerprint": base.fingerprint}
    return Calibration(
        Path("words"), {"model": model, "dataset": asdict(spec), "hash": f"{len(rows)} rows"}, rows
    )


def frozen_job(folder: Path, base: Path, **changes: Any) -> FrozenJob:
    """A BiTA adapter of three masks; keywords change the job, or the recipe where it has that
    field.
    """
    checkpoint = Checkpoint(str(base))
    recipe = {
        key: changes.pop(key) for key in list(changes) if key in TrainSpec.__dataclass_fields__
    }
    values = {
        "base": checkpoint,
        "spec": BITA,
        "calibration": calibration(checkpoint, answers(18)),
        "held_out": 4,
        "folder": folder,
        **changes,
    }
    return FrozenJob(recipe=replace(MICRO, **recipe), **values)
