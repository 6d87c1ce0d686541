"""What a teacher says beside an answer's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.errors import UserError
from bild_lab.training.batches import Collator, TokenizedExample
from bild_lab.training.finetune import finetune
from bild_lab.training.soft_targets import add_soft_targets, soft_targets
from bild_lab.training.start import FromCheckpoint
from tests.tiny import PAD, VOCABULARY
from tests.training.jobs import MICRO, Kill, job, losses

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8], [9, 4], [3, 4, 5, 6, 7], [10]]
ANSWERS = [[8, 1], [10, 11, 12, 1], [1], [7, 7, 1]]
EXAMPLES = [
    TokenizedExample(np.array(one), np.array(two))
    for one, two in zip(PROMPTS, ANSWERS, strict=True)
]


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_they_are_the_teachers_own_distribution_before_each_token(
    name: str, checkpoints: Path
) -> None:
    """In batches of any size: one forward for every example alone gives the same."""
    teacher = HuggingFaceModel(Checkpoint(str(checkpoints / name)), CPU, torch.float32)
    start = PAD if name == "t5" else None
    for batch_size in (1, 3):
        found = soft_targets(teacher, EXAMPLES, Collator(PAD, start), 4, batch_size)
        for one, soft in zip(EXAMPLES, found, strict=True):
            prompt, answer = torch.tensor([one.prompt.tolist()]), one.answer.tolist()
            if name == "t5":
                logits = teacher.module(
                    input_ids=prompt, decoder_input_ids=torch.tensor([[PAD, *answer[:-1]]])
                ).logits
            else:
                whole = torch.cat([prompt, torch.tensor([answer])], 1)
                logits = teacher.module(input_ids=whole).logits[:, len(one.prompt) - 1 : -1]
            likely = logits[0].detach().topk(4)
            assert soft.ids.tolist() == likely.indices.tolist()
            assert soft.ids.dtype == np.int32 and soft.probs.dtype == np.float16
            np.testing.assert_allclose(soft.probs, likely.values.softmax(-1).numpy(), atol=1e-3)


def test_a_head_with_more_rows_than_pieces_teaches_pieces_alone(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = HuggingFaceModel(Checkpoint(str(checkpoints / "t5")), CPU, torch.float32)
    # with a gap, as added tokens leave
    pieces = {f"w{index}": index for index in range(5) if index != 2}
    monkeypatch.setattr(Checkpoint, "vocabulary", pieces)
    found = soft_targets(teacher, EXAMPLES, Collator(PAD, PAD), VOCABULARY, 2)
    assert {one.ids.shape[1] for one in found} == {5} and max(one.ids.max() for one in found) == 4


def test_a_teacher_begins_as_its_own_checkpoint_says(checkpoints: Path) -> None:
    teacher = HuggingFaceModel(Checkpoint(str(checkpoints / "t5")), CPU, torch.float32)
    own, other = (soft_targets(teacher, EXAMPLES, Collator(PAD, start), 4, 4) for start in (PAD, 2))
    assert all(np.array_equal(one.ids, two.ids) for one, two in zip(own, other, strict=True))


def test_they_are_found_once_and_kept_for_a_resumed_training(
    checkpoints: Path, tmp_path: Path
) -> None:
    teacher, file = Checkpoint(str(checkpoints / "llama")), tmp_path / "work" / "soft.safetensors"
    recipe = type(MICRO)(**{**MICRO.__dict__, "soft_targets": 3})
    first = add_soft_targets(EXAMPLES, teacher, Collator(PAD, None), recipe, file, CPU)
    written = file.stat().st_mtime_ns
    again = add_soft_targets(
        EXAMPLES, Checkpoint("nowhere"), Collator(PAD, None), recipe, file, CPU
    )
    assert file.stat().st_mtime_ns == written
    for one, other, plain in zip(first, again, EXAMPLES, strict=True):
        assert one.soft.ids.shape == (len(plain.answer), 3)
        assert np.array_equal(one.soft.ids, other.soft.ids) and np.array_equal(
            one.soft.probs, other.soft.probs
        )
        assert np.array_equal(one.answer, plain.answer) and plain.soft is None


@pytest.mark.slow
def test_a_training_that_was_killed_resumes_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finetune(job(tmp_path / "teacher", max_steps=2))
    teacher = Checkpoint(str(tmp_path / "teacher" / "checkpoint"))
    words = {"start": FromCheckpoint(teacher), "teacher": teacher, "soft_targets": 90}
    whole = finetune(job(tmp_path / "whole", **words))
    with pytest.raises(KeyboardInterrupt):
        finetune(job(tmp_path / "killed", callbacks=(Kill(3),), **words))
    assert (tmp_path / "killed" / "training" / "soft_targets.safetensors").is_file()
    monkeypatch.setattr("bild_lab.training.soft_targets.soft_targets", None)  # nobody asks again
    assert losses(finetune(job(tmp_path / "killed", **words))) == losses(whole)
    hard = finetune(job(tmp_path / "hard", start=FromCheckpoint(teacher)))
    assert losses(hard) != losses(whole) and hard["identity"] != whole["identity"]
    assert whole["identity"]["teacher"] == teacher.fingerprint and "teacher" not in hard["identity"]


def test_they_need_a_teacher_and_whole_labels(tmp_path: Path, checkpoints: Path) -> None:
    for wrong in ({"soft_targets": 2}, {"teacher": Checkpoint(str(checkpoints / "t5"))}):
        with pytest.raises(
            UserError, match=r"train\.soft_targets are those of a target .* use scripts/align\.py"
        ):
            job(tmp_path, **wrong)
    with pytest.raises(UserError, match=r"set train\.label_smoothing=0"):
        job(tmp_path, soft_targets=2, label_smoothing=0.1)
