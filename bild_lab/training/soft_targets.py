"""What a teacher finds likely at every token of an answer: soft targets of word-level distillation.

Hinton et al. (2015), §2, and Kim and Rush (2016), §3.1. Over a target's own greedy answers, as in
an alignment, it is both of that paper's levels at once (§3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.files import write_atomically
from bild_lab.ranks import launched
from bild_lab.training.batches import Collator, SoftTargets, TokenizedExample
from bild_lab.training.distillation import answer_log_probs, decoder_start, pieces_of
from bild_lab.training.folder import writing
from bild_lab.training.train_spec import TrainSpec


def add_soft_targets(
    examples: Sequence[TokenizedExample],
    teacher: Checkpoint,
    collate: Collator,
    recipe: TrainSpec,
    file: Path,
    device: torch.device,
) -> list[TokenizedExample]:
    """The examples with the teacher's `recipe.soft_targets` most likely tokens at each token of
    their answers.

    They are read from `file`, or found and written there. The teacher's weights are in bfloat16 if
    the training runs in it.
    """
    if not file.is_file():
        model = HuggingFaceModel(teacher, device, recipe.dtype)
        batch_size = max(1, recipe.evaluation_batch_size // launched().count)
        targets = soft_targets(model, examples, collate, recipe.soft_targets, batch_size)
        tensors = {
            name: np.concatenate([getattr(target, name) for target in targets])
            for name in ("ids", "probs")
        }
        with writing(file, "the soft targets"):
            write_atomically(file, save(tensors))
    stored = load_file(file)
    ends = np.cumsum([len(example.answer) for example in examples])[:-1]
    split_rows = zip(*(np.split(stored[name], ends) for name in ("ids", "probs")), strict=True)
    return [
        replace(example, soft=SoftTargets(*soft))
        for example, soft in zip(examples, split_rows, strict=True)
    ]


@torch.inference_mode()
def soft_targets(
    teacher: HuggingFaceModel,
    examples: Sequence[TokenizedExample],
    collate: Collator,
    count: int,
    batch_size: int,
) -> list[SoftTargets]:
    """The teacher's `count` most likely tokens, the most likely first, at each token of every
    answer, and their shares.

    Shares are of these tokens alone: what the teacher gives to others is left out.
    """
    checkpoint = teacher.checkpoint
    begins, pieces = decoder_start(checkpoint), pieces_of(checkpoint)
    targets: list[SoftTargets] = [None] * len(examples)  # type: ignore[list-item]
    order = sorted(range(len(examples)), key=lambda index: -examples[index].length)
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = {
            name: rows.to(teacher.device)
            for name, rows in collate([examples[i] for i in indices]).items()
        }
        likely = answer_log_probs(teacher.module, batch, begins, pieces).topk(min(count, pieces))
        both = (likely.indices.to(torch.int32), likely.values.softmax(-1).to(torch.float16))
        lengths = [len(examples[index].answer) for index in indices]
        for index, *soft in zip(indices, *(rows.split(lengths) for rows in both), strict=True):
            targets[index] = SoftTargets(*(row.numpy(force=True) for row in soft))
    return targets
