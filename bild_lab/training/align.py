"""Model prediction alignment: a drafter learns its target's answers, and is judged before and after
(BiLD §3.5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bild_lab.engine.methods.lookup.ngram import vocabulary_hash
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.device import resolve_device
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.schema.questions import questions_of
from bild_lab.ranks import launched
from bild_lab.training.answers import END, Calibration, TargetAnswer
from bild_lab.training.batches import (
    AnsweredExample,
    Collator,
    TokenizedExample,
    spread_over_questions,
)
from bild_lab.training.distillation import (
    DistillationSpec,
    answer_log_probs,
    decoder_start,
    pieces_of,
    tv,
)
from bild_lab.training.finetune import FinetuningJob, finetune
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.start import FromCheckpoint
from bild_lab.training.train_spec import TrainSpec

_BATCH_SIZE = 4  # texts; whole distributions of both models are in memory


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What is trained on which answers.

    small: the checkpoint that training starts from, pretrained in the paper's fair setting.
    unaligned: the drafter to compare with. acceptance: whether the acceptance rate is compared too,
    which needs the target's weights.
    """

    calibration: Calibration
    small: Checkpoint
    unaligned: Checkpoint
    held_out: int  # answers that are not learned but choose the best weights
    recipe: TrainSpec
    folder: Path
    acceptance: bool
    logger: Any  # of `conf/logger`; None: none
    distillation_spec: DistillationSpec

    @property
    def target(self) -> Checkpoint:
        """The model that answered, which may be read from pickles if the drafter may."""
        return replace(self.calibration.target, allow_pickles=self.small.allow_pickles)

    def check(self) -> None:
        """Raise UserError if training or comparing is not possible; reads no weights."""
        require_whole("held_out", self.held_out, 1)
        for small in (self.small, self.unaligned):
            small.check()
            require_fits(self.calibration, small)
        trained_on, _ = split_answers(self.calibration, self.held_out)
        longest = max(len(answer.answer_token_ids) for answer in trained_on)
        if longest > self.recipe.max_target_tokens:
            raise UserError(
                f"train.max_target_tokens={self.recipe.max_target_tokens} would cut the target's"
                f" longest answer of {longest} tokens; set train.max_target_tokens={longest}"
            )
        if self.recipe.soft_targets or self.distillation_spec.loss is not None or self.acceptance:
            target = self.target
            target.check()
            if target.fingerprint != self.calibration.manifest["model"]["fingerprint"]:
                raise UserError(
                    f"the checkpoint {target.path} has changed since it answered; make the"
                    " calibration data again, or set acceptance=false, train.soft_targets=0 and"
                    " align.loss=null"
                )


def require_fits(calibration: Calibration, small: Checkpoint) -> None:
    """Raise UserError unless the small model is of the target's kind and has its vocabulary."""
    model = calibration.manifest["model"]
    if small.encoder_decoder != model["encoder_decoder"]:
        kinds = {True: "an encoder–decoder", False: "decoder-only"}
        raise UserError(
            f"{small.path} is {kinds[small.encoder_decoder]} ({small.config.model_type}), but"
            f" {model['path']}, whose answers are in {calibration.folder}, is"
            f" {kinds[model['encoder_decoder']]} ({model['type']}); choose model.path of the same"
            " kind"
        )
    if vocabulary_hash(small.vocabulary) != model["vocabulary"]:
        raise UserError(
            f"{small.path} ({len(small.vocabulary)} pieces) has another vocabulary than"
            f" {model['path']}, whose answers are in {calibration.folder}; choose model.path with"
            " the target's tokenizer"
        )


def split_answers(
    calibration: Calibration, held_out: int
) -> tuple[list[TargetAnswer], list[TargetAnswer]]:
    """Answers to train on and held-out answers, which are spread evenly over the questions.

    Answers that a length limit or a stop string cut are left out: the drafter would learn to end
    where the target does not. Raises UserError if no answers are left to train on.
    """
    complete = [answer for answer in calibration.answers if answer.finish_reason == END]
    if len(complete) < held_out + 1:
        raise UserError(
            f"{calibration.folder} has {len(complete)} answers that reach their end, of"
            f" {len(calibration.answers)}; held_out={held_out} leaves none to train on: lower it,"
            " or make calibration data with more (dataset.limit) or longer"
            " (decoding.max_new_tokens) answers"
        )
    ids = [answer.id for answer in calibration.answers]
    questions = dict(zip(ids, questions_of(ids), strict=True))
    held_out_indices = dict.fromkeys(
        spread_over_questions(held_out, [questions[answer.id] for answer in complete])
    )
    return [answer for at, answer in enumerate(complete) if at not in held_out_indices], [
        complete[at] for at in held_out_indices
    ]


def align(job: Alignment) -> dict[str, Any] | None:
    """Train `folder/checkpoint`, then compare it with the unaligned model on the held-out answers.

    A finished training is not repeated. Returns its metrics with the comparison under "alignment",
    as metrics.json has them; None on any but the first process. Raises UserError for parts that do
    not fit together, before anything is written.
    """
    job.check()
    learned, held_out = split_answers(job.calibration, job.held_out)
    dataset, manifest = job.calibration.dataset, job.calibration.manifest
    source = {
        "folder": str(job.calibration.folder),
        "hash": manifest["hash"],
        "target": manifest["model"]["path"],
    }
    metrics = finetune(
        FinetuningJob(
            train=examples(learned),
            validation=examples(held_out),
            metric=dataset.metric,
            recipe=job.recipe,
            folder=job.folder,
            start=FromCheckpoint(job.small),
            teacher=(job.target if job.recipe.soft_targets or job.distillation_spec.loss else None),
            distillation_spec=job.distillation_spec,
            max_source_tokens=dataset.max_source_tokens,
            title=f"aligning {job.small.path}",
            writing=dataset.writing(None),
            cut=tuple(manifest["decoding"].get("stop", ())),
            logger=job.logger,
            provenance={"calibration": source, "dataset": asdict(dataset)},
        )
    )
    if not launched().is_main:  # one process compares
        return None
    unaligned, aligned = _compared(job, held_out)
    compared = {key: {"before": unaligned[key], "after": aligned[key]} for key in unaligned}
    counts = {
        "trained_on": len(learned),
        "held_out": len(held_out),
        "unaligned": job.unaligned.path,
    }
    metrics |= {"alignment": {**source, **counts, "compared": compared}}
    TrainingFolder(job.folder).write_metrics(metrics)
    return metrics


def examples(answers: Sequence[TargetAnswer]) -> tuple[AnsweredExample, ...]:
    """Answers as examples: the target's tokens are learned, and its text is the reference."""
    return tuple(
        AnsweredExample(
            answer.id,
            answer.prompt,
            answer.prompt,
            (answer.answer,),
            answer_token_ids=tuple(answer.answer_token_ids),
        )
        for answer in answers
    )


def _compared(job: Alignment, held_out: Sequence[TargetAnswer]) -> list[dict[str, float]]:
    """The unaligned and the aligned drafter's agreement with the target."""
    device = torch.device("cpu") if job.recipe.on_cpu else resolve_device("auto")
    dtype = job.recipe.dtype
    aligned = Checkpoint(str(job.folder / "checkpoint"))
    target = HuggingFaceModel(job.target, device, dtype) if job.acceptance else None
    drafts = [HuggingFaceModel(draft, device, dtype) for draft in (job.unaligned, aligned)]
    return [
        agreement(draft, target, held_out, job.calibration.dataset.max_source_tokens)
        for draft in drafts
    ]


@torch.inference_mode()
def agreement(
    draft: HuggingFaceModel,
    target: HuggingFaceModel | None,
    answers: Sequence[TargetAnswer],
    max_source_tokens: int | None,
) -> dict[str, float]:
    """Means over the tokens of the target's answers, each after the target's own text before it.

    token_agreement: the share that the drafter ranks first. acceptance_rate: Σ min(p, q), at which
    speculative sampling accepts at temperature 1 (Leviathan et al., 2023, Corollary 3.6); left out
    without the target.
    """
    checkpoint, examples = draft.checkpoint, []
    for answer in answers:
        source = checkpoint.source(answer.prompt, max_source_tokens)
        ids = source.prompt if source.encoder_ids is None else source.encoder_ids[0]
        examples.append(TokenizedExample(np.array(ids), np.array(answer.answer_token_ids)))
    begins, pieces = decoder_start(checkpoint), pieces_of(checkpoint)
    collate = Collator(0, begins)
    sums = (
        {"token_agreement": 0.0}
        if target is None
        else {"token_agreement": 0.0, "acceptance_rate": 0.0}
    )
    for start in range(0, len(examples), _BATCH_SIZE):
        batch_examples = examples[start : start + _BATCH_SIZE]
        batch = {name: rows.to(draft.device) for name, rows in collate(batch_examples).items()}
        log_q = answer_log_probs(draft.module, batch, begins, pieces)
        target_tokens = torch.from_numpy(
            np.concatenate([example.answer for example in batch_examples])
        ).to(draft.device)
        sums["token_agreement"] += int((log_q.argmax(-1) == target_tokens).sum())
        if target is not None:
            log_p = answer_log_probs(target.module, batch, decoder_start(target.checkpoint), pieces)
            sums["acceptance_rate"] += float((1 - tv(log_p, log_q)).sum())
    count = sum(len(example.answer) for example in examples)
    return {name: total / count for name, total in sums.items()}
