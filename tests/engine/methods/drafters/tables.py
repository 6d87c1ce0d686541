"""N-gram tables for the tiny checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.training.modules.ngrams import estimate
from tests.tiny import END, PAD, VOCABULARY


def ngram_table(checkpoint: Path) -> Path:
    """A table of random text in this checkpoint's vocabulary, beside its folder."""
    path = checkpoint.with_name(f"{checkpoint.name}-table.safetensors")
    if not path.is_file():
        chance = random.Random(0)
        texts = [[PAD, *chance.choices(range(3, VOCABULARY), k=12), END] for _ in range(60)]
        estimate(texts, 2, Checkpoint(str(checkpoint)).vocabulary, "random words").save(path)
    return path
