"""Model prediction alignment: a drafter learns its target's answers, and is measured before and after (BiLD §3.5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bild_lab.engine.drafters.ngram import vocabulary_hash
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.device import resolve_device, resolve_dtype
from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.analysis.statistics import best_at_loss
from bild_lab.lab.config import MeasureSpec, RuntimeSpec
from bild_lab.lab.data.examples import Example
from bild_lab.lab.decoding.load import load_model
from bild_lab.lab.metrics.quality import score
from bild_lab.lab.point import cached_examples, prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.result import Result
from bild_lab.training.answers import END, Answer, Calibration
from bild_lab.training.batches import spread_evenly
from bild_lab.training.comparison import LOSSES, Comparison, Report, agreement, gains, measured_points
from bild_lab.training.distillation import Teaching
from bild_lab.training.finetune import FinetuningJob, finetune
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.recipe import Recipe
from bild_lab.training.start import FromCheckpoint


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What is trained on which answers, and what is measured.

    small: the checkpoint that training starts from, pretrained in the paper's fair setting. unaligned: the drafter
    to compare with. comparison: None measures agreement alone, on the held-out answers, whose prompts a fine-tuned
    model has seen; otherwise agreement is measured on the comparison's examples.
    """

    calibration: Calibration
    small: Checkpoint
    unaligned: Checkpoint
    held_out: int  # answers that are not learned but choose the best weights
    recipe: Recipe
    folder: Path
    runtime: RuntimeSpec  # of the measurements
    measure: MeasureSpec
    comparison: Comparison | None
    logger: Any = None  # of `conf/logger`; None: none
    teaching: Teaching = Teaching()

    @property
    def aligned(self) -> Checkpoint:
        return Checkpoint(str(self.folder / "checkpoint"))

    def points(self, draft: Checkpoint) -> list[DictConfig]:
        """The points that are measured with a drafter."""
        surroundings = {"name": self.folder.name, "runtime": asdict(self.runtime), "measure": asdict(self.measure)}
        aligned = draft.path == self.aligned.path
        return self.comparison.points(self.calibration, draft, aligned, surroundings)

    def check(self) -> None:
        """Raise UserError if training or measuring is not possible; reads no weights."""
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
        if self.recipe.soft_targets or self.teaching.loss is not None or self.comparison is not None:
            self._require_same_target()
        if self.comparison is None:
            return
        if self.measure.baseline != "vanilla":
            raise UserError(
                "the comparison is relative to the target's own decoding: measure.baseline must be vanilla, "
                f"got {self.measure.baseline}"
            )
        configs = self.points(self.unaligned)
        for config in configs:
            prepare(config)
        if self.comparison.select is not None:
            self.comparison.screening(configs)

    def _require_same_target(self) -> None:
        """Raise UserError unless the model that answered is where it was, with the same weights."""
        target = self.calibration.target
        target.check()
        if target.fingerprint != self.calibration.manifest["model"]["fingerprint"]:
            raise UserError(
                f"the checkpoint {target.path} has changed since it answered; "
                "make the calibration data again, or set sweep=false, train.soft_targets=0 and align.loss=null"
            )


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
    if vocabulary_hash(small.vocabulary) != model["vocabulary"]:
        raise UserError(
            f"{small.path} ({len(small.vocabulary)} pieces) has another vocabulary than {model['path']}, whose answers "
            f"are in {calibration.folder}; choose model.path with the target's tokenizer"
        )


def split_answers(calibration: Calibration, held_out: int) -> tuple[list[Answer], list[Answer]]:
    """Answers to train on and held-out answers, which are spread evenly over the data.

    Answers cut at the length limit are left out: the drafter would learn to end where the target does not. Raises
    UserError if no answers are left to train on.
    """
    whole = [answer for answer in calibration.answers if answer.finish_reason == END]
    if len(whole) < held_out + 1:
        raise UserError(
            f"{calibration.folder} has {len(whole)} answers that reach their end, of {len(calibration.answers)}; "
            f"held_out={held_out} leaves none to train on: lower it, or make calibration data with more "
            "(dataset.limit) or longer (decoding.max_new_tokens) answers"
        )
    chosen = set(spread_evenly(held_out, len(whole)))
    return (
        [answer for index, answer in enumerate(whole) if index not in chosen],
        [answer for index, answer in enumerate(whole) if index in chosen],
    )


def align(job: Alignment, report: Report = lambda line: None) -> dict[str, Any] | None:
    """Train `folder/checkpoint`, then compare it with the unaligned model; finished parts are not repeated.

    Returns the training's metrics with the comparison under "alignment", as metrics.json has them; None on any but
    the first process. report: called with a line for every point. Raises UserError for parts that do not fit
    together, before anything is written.
    """
    job.check()
    learned, held_out = split_answers(job.calibration, job.held_out)
    manifest = job.calibration.manifest
    source = {"folder": str(job.calibration.folder), "hash": manifest["hash"], "target": manifest["model"]["path"]}
    metrics = finetune(_training(job, learned, held_out, source))
    if not launched().first:  # one process measures
        return None
    before, after = (_measured(job, draft, held_out, report) for draft in (job.unaligned, job.aligned))
    compared = {key: {"before": before[key], "after": after[key]} for key in before}
    counts = {"trained_on": len(learned), "held_out": len(held_out), "unaligned": job.unaligned.path}
    counts["retokenized"] = retokenized(job.small, learned)
    metrics |= {"alignment": {**source, **counts, "compared": compared}}
    TrainingFolder(job.folder).write_metrics(metrics)
    return metrics


def _training(
    job: Alignment, learned: Sequence[Answer], held_out: Sequence[Answer], source: dict[str, Any]
) -> FinetuningJob:
    dataset = job.calibration.dataset
    return FinetuningJob(
        train=examples(learned),
        validation=examples(held_out),
        metric=dataset.metric,
        recipe=job.recipe,
        folder=job.folder,
        start=FromCheckpoint(job.small),
        teacher=job.calibration.target if job.recipe.soft_targets or job.teaching.loss is not None else None,
        teaching=job.teaching,
        max_source_tokens=dataset.max_source_tokens,
        data=f"{len(learned):,} greedy answers of {source['target']} to {dataset.name} ({dataset.split})",
        title=f"aligning {job.small.path}",
        logger=job.logger,
        provenance={"calibration": source, "dataset": asdict(dataset)},
    )


def examples(answers: Sequence[Answer]) -> tuple[Example, ...]:
    """Answers as examples whose reference is the target's text."""
    return tuple(Example(answer.id, answer.prompt, answer.prompt, (answer.answer,)) for answer in answers)


def retokenized(small: Checkpoint, answers: Sequence[Answer]) -> float:
    """The share of answers whose text, which training tokenizes again, gets other tokens than the target emitted."""
    texts = [answer.answer for answer in answers]
    ids = small.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return sum(again != one.answer_token_ids[:-1] for again, one in zip(ids, answers, strict=True)) / len(answers)


def _measured(job: Alignment, draft: Checkpoint, held_out: Sequence[Answer], report: Report) -> dict[str, Any]:
    """A drafter's agreement with the target and, with a comparison, what decoding gains from it."""
    device, dtype = resolve_device(job.runtime.device), resolve_dtype(job.runtime.dtype)
    model = load_model(draft.path, draft.revision, str(device), dtype, "auto")
    longest, limit = job.calibration.dataset.max_source_tokens, job.calibration.manifest["decoding"]["max_new_tokens"]
    if job.comparison is None:
        answers = [(answer.prompt, answer.answer_token_ids) for answer in held_out]
        return agreement(model, answers, longest, limit)[0]
    results, best = _swept(job, draft, report)
    dataset = job.comparison.dataset(job.calibration)
    compared = cached_examples(dataset)
    decoded = read_examples(results[0].folder)
    answers = [(one.prompt, own.baseline_token_ids) for one, own in zip(compared, decoded, strict=True)]
    shares, texts = agreement(model, answers, longest, limit)
    quality = None
    if dataset.metric != "agreement":  # which has no references
        quality = score(dataset.metric, texts, [one.references for one in compared]).value
    return {**shares, "own_quality": quality, **gains(results[0], results[1:], best)}


def _swept(job: Alignment, draft: Checkpoint, report: Report) -> tuple[list[Result], list[Result | None]]:
    """The measured points of a drafter, and BiLD's at no loss and within one point."""
    speculative, *bild = job.points(draft)
    sweep = Sweep(job.folder)
    if job.comparison.select is None:
        results = measured_points([speculative, *bild], sweep, job.logger, report)
        return results, [best_at_loss(results[1:], loss) for loss in LOSSES]
    places = job.comparison.choose(bild, draft.fingerprint, report)
    distinct = sorted({place for place in places if place is not None})
    results = measured_points([speculative, *(bild[place] for place in distinct)], sweep, job.logger, report)
    chosen = dict(zip(distinct, results[1:], strict=True))
    return results, [chosen.get(place) for place in places]
