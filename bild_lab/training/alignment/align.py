"""Model prediction alignment: a small model learns the target's own answers (BiLD §3.5.1), before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from bild_lab.engine.models.checkpoint import Checkpoint, resolve_device, resolve_dtype
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.config import MeasureSpec, RuntimeSpec
from bild_lab.lab.data.tasks import Example
from bild_lab.lab.metrics import score
from bild_lab.lab.point import cached_examples, prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.training.alignment.agreement import agreement
from bild_lab.training.alignment.calibration import END, Answer, Calibration, vocabulary_hash
from bild_lab.training.alignment.draft_gain import Comparison, gains, measured_points, point_configs
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.job import Recipe, TrainingJob
from bild_lab.training.trainer import train

if TYPE_CHECKING:
    from bild_lab.training.tracking import WandbRun


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What to train on what, and what to measure.

    small: the checkpoint that training starts from, pretrained in the paper's fair setting. unaligned:
    the draft model to compare with. comparison: None measures agreement alone, on the answers held out,
    whose prompts a fine-tuned model has seen; with a comparison agreement is that on its examples.
    """

    calibration: Calibration
    small: Checkpoint
    unaligned: Checkpoint
    held_out: int  # answers that are not trained on but choose the best weights
    recipe: Recipe
    folder: Path
    runtime: RuntimeSpec  # of what is measured
    measure: MeasureSpec
    comparison: Comparison | None
    logger: WandbRun | None = None

    @property
    def aligned(self) -> Checkpoint:
        return Checkpoint(str(self.folder / "checkpoint"))

    def points(self, draft: Checkpoint) -> list[DictConfig]:
        """What is measured with a draft model."""
        surroundings = {"name": self.folder.name, "runtime": asdict(self.runtime), "measure": asdict(self.measure)}
        aligned = draft.path == self.aligned.path
        return point_configs(self.comparison, self.calibration, draft, aligned, surroundings)

    def check(self) -> None:
        """Raise UserError for what could not be trained or measured; reads no weights."""
        require_whole("held_out", self.held_out, 1)
        for small in (self.small, self.unaligned):
            small.check()
            require_fits(self.calibration, small)
        trained_on, _ = split_answers(self.calibration, self.held_out)
        longest = max(len(answer.answer_token_ids) for answer in trained_on)
        if longest > self.recipe.max_target_tokens:
            raise UserError(
                f"train.max_target_tokens={self.recipe.max_target_tokens} would cut the target's longest answer of "
                f"{longest} tokens; set train.max_target_tokens={longest}"
            )
        if self.comparison is None:
            return
        if self.measure.baseline != "vanilla":
            raise UserError(
                "what is compared is relative to the target's own decoding: measure.baseline must be vanilla, "
                f"got {self.measure.baseline}"
            )
        target = self.calibration.target
        target.check()
        if target.fingerprint != self.calibration.manifest["model"]["fingerprint"]:
            raise UserError(
                f"the checkpoint {target.path} is not the one that answered: it has changed since; "
                "make the calibration data anew, or set sweep=false"
            )
        for config in self.points(self.unaligned):
            prepare(config)


def require_fits(calibration: Calibration, small: Checkpoint) -> None:
    """Raise UserError unless the small model is of the target's kind and has its vocabulary."""
    model = calibration.manifest["model"]
    if small.encoder_decoder != model["encoder_decoder"]:
        kinds = {True: "an encoder–decoder", False: "decoder-only"}
        raise UserError(
            f"{small.path} is {kinds[small.encoder_decoder]} ({small.config.model_type}), but {model['path']}, whose "
            f"answers are in {calibration.folder}, is {kinds[model['encoder_decoder']]} ({model['type']}); "
            "choose model.path of the same kind"
        )
    if vocabulary_hash(small) != model["vocabulary"]:
        raise UserError(
            f"{small.path} ({len(small.vocabulary)} pieces) has not the vocabulary of {model['path']}, whose answers "
            f"are in {calibration.folder}; choose model.path with the target's tokenizer"
        )


def split_answers(calibration: Calibration, held_out: int) -> tuple[list[Answer], list[Answer]]:
    """Answers to train on and answers held out, evenly spread over the data.

    Answers that were cut at the length limit are left out: they would teach to end where the target did not.
    Raises UserError where nothing is left to train on.
    """
    whole = [answer for answer in calibration.answers if answer.finish_reason == END]
    if len(whole) < held_out + 1:
        raise UserError(
            f"{calibration.folder} has {len(whole)} answers that reach their end, of {len(calibration.answers)}; "
            f"held_out={held_out} leaves none to train on: lower it, or make calibration data with more "
            "(dataset.limit) or longer (decoding.max_new_tokens) answers"
        )
    chosen = {index * len(whole) // held_out for index in range(held_out)}
    return (
        [answer for index, answer in enumerate(whole) if index not in chosen],
        [answer for index, answer in enumerate(whole) if index in chosen],
    )


def align(job: Alignment, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any] | None:
    """Train `folder/checkpoint`, then compare it with the unaligned model; finished parts are not done again.

    Returns the metrics of training with what was compared under "alignment", which metrics.json holds
    too; None on any but the main process. tell: called with a line for every point. Raises UserError
    for what does not fit together, before anything is written.
    """
    job.check()
    trained_on, held_out = split_answers(job.calibration, job.held_out)
    manifest = job.calibration.manifest
    source = {"folder": str(job.calibration.folder), "hash": manifest["hash"], "target": manifest["model"]["path"]}
    metrics = train(
        TrainingJob(
            train=examples(trained_on),
            validation=examples(held_out),
            metric=job.calibration.dataset.metric,
            recipe=job.recipe,
            folder=job.folder,
            model_path=job.small.path,
            model_revision=job.small.revision,
            max_source_tokens=job.calibration.dataset.max_source_tokens,
            data=f"{len(trained_on):,} greedy answers of {source['target']} to {job.calibration.dataset.name} "
            f"({job.calibration.dataset.split})",
            title=f"aligning {job.small.path}",
            logger=job.logger,
            provenance={"calibration": source, "dataset": asdict(job.calibration.dataset)},
        )
    )
    if not launched().first:  # one process measures; Accelerate's own state ended with the training
        return None
    before, after = (_measured(job, draft, held_out, tell) for draft in (job.unaligned, job.aligned))
    compared = {key: {"before": before[key], "after": after[key]} for key in before}
    counts = {"trained_on": len(trained_on), "held_out": len(held_out), "unaligned": job.unaligned.path}
    counts["retokenized"] = retokenized(job.small, trained_on)
    metrics |= {"alignment": {**source, **counts, "compared": compared}}
    TrainingFolder(job.folder).write_metrics(metrics)
    return metrics


def examples(answers: Sequence[Answer]) -> tuple[Example, ...]:
    """Answers as examples whose reference is what the target said."""
    return tuple(Example(answer.id, answer.prompt, answer.prompt, (answer.answer,)) for answer in answers)


def retokenized(small: Checkpoint, answers: Sequence[Answer]) -> float:
    """The share of answers whose text, which training sees, does not give back the tokens that the target emitted."""
    texts = [answer.answer for answer in answers]
    ids = small.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return sum(again != one.answer_token_ids[:-1] for again, one in zip(ids, answers, strict=True)) / len(answers)


def _measured(
    job: Alignment, draft: Checkpoint, held_out: Sequence[Answer], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Agreement of a draft model with the target, and, if a comparison is wanted, what decoding gains from it."""
    model = HuggingFaceModel(draft, resolve_device(job.runtime.device), resolve_dtype(job.runtime.dtype))
    longest, limit = job.calibration.dataset.max_source_tokens, job.calibration.manifest["decoding"]["max_new_tokens"]
    if job.comparison is None:
        said = [(answer.prompt, answer.answer_token_ids) for answer in held_out]
        return agreement(model, said, longest, limit)[0]
    sweep = Sweep(job.folder)
    results = measured_points(job.points(draft), sweep, job.logger, tell)
    dataset = job.comparison.dataset(job.calibration)
    compared = cached_examples(dataset)
    rows = sweep.examples(results[0]["point"])
    said = [(one.prompt, row["baseline_token_ids"]) for one, row in zip(compared, rows, strict=True)]
    shares, texts = agreement(model, said, longest, limit)
    quality = None
    if dataset.metric != "agreement":  # which has no references
        quality = score(dataset.metric, texts, [one.references for one in compared]).value
    return {**shares, "own_quality": quality, **gains(results)}
