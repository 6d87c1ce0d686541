"""Model prediction alignment: a small model learns the target's own answers (BiLD §3.5.1), before and after."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf

from bild_lab.analysis.pareto import best_at_loss, pareto_front
from bild_lab.config import MeasureSpec, RuntimeSpec, compose_policy, require_whole
from bild_lab.data.tasks import DatasetSpec, Example
from bild_lab.errors import UserError
from bild_lab.metrics import score
from bild_lab.models.hf import HuggingFaceModel
from bild_lab.models.loading import Checkpoint, resolve_device, resolve_dtype
from bild_lab.results.records import Sweep
from bild_lab.runner import cached_examples, prepare, run_point
from bild_lab.training.calibration import END, Answer, Calibration, greedy_answers, tensors, vocabulary_hash
from bild_lab.training.folder import write_json
from bild_lab.training.job import Recipe, TrainingJob
from bild_lab.training.trainer import train

if TYPE_CHECKING:
    from bild_lab.training.tracking import WandbRun

DECODED_AT_ONCE = 16  # texts; small models only
TOLD = {"speculative": ("window",), "bild": ("fallback", "rollback")}

Said = Sequence[tuple[str, list[int]]]  # prompts, each with the target's tokens


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The points measured with the draft model before and after: the fields of `comparison` in `conf/align.yaml`.

    window: of speculative decoding, whose acceptance rate is compared. fallback, rollback: BiLD's thresholds,
    every pair of which is a point of the Pareto curves. Raises UserError for values that make no points.
    """

    split: str
    path: str | None
    limit: int | None
    window: int
    fallback: Sequence[float]
    rollback: Sequence[float]

    def __post_init__(self) -> None:
        require_whole("comparison.window", self.window, 1)
        for key in ("fallback", "rollback"):
            values = getattr(self, key)
            if not isinstance(values, list | tuple) or not values:
                raise UserError(f"comparison.{key} must be a list of thresholds such as [0.5,0.7], got {values!r}")

    def dataset(self, calibration: Calibration) -> DatasetSpec:
        """The calibration data's dataset, on the split that is measured."""
        spec = calibration.dataset
        return replace(spec, split=self.split, limit=self.limit, path=self.path or spec.path)


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
        for config in point_configs(self, self.unaligned):
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
            provenance={"calibration": source},
        )
    )
    if os.environ.get("RANK", "0") != "0":  # one process measures; Accelerate's own state ended with the training
        return None
    before, after = (_measured(job, draft, held_out, tell) for draft in (job.unaligned, job.aligned))
    compared = {key: {"before": before[key], "after": after[key]} for key in before}
    counts = {"trained_on": len(trained_on), "held_out": len(held_out), "unaligned": job.unaligned.path}
    counts["retokenized"] = retokenized(job.small, trained_on)
    metrics |= {"alignment": {**source, **counts, "compared": compared}}
    write_json(job.folder / "metrics.json", metrics)
    return metrics


def examples(answers: Sequence[Answer]) -> tuple[Example, ...]:
    """Answers as examples whose reference is what the target said."""
    return tuple(Example(answer.id, answer.prompt, answer.prompt, (answer.answer,)) for answer in answers)


def retokenized(small: Checkpoint, answers: Sequence[Answer]) -> float:
    """The share of answers whose text, which training sees, does not give back the tokens that the target emitted."""
    texts = [answer.answer for answer in answers]
    ids = small.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return sum(again != one.answer_token_ids[:-1] for again, one in zip(ids, answers, strict=True)) / len(answers)


@torch.inference_mode()
def token_agreement(model: HuggingFaceModel, said: Said, max_source_tokens: int | None) -> float:
    """The share of the target's tokens that the model would have chosen after the same text."""
    agreed = total = 0
    for start in range(0, len(said), DECODED_AT_ONCE):
        prompts, answers = zip(*said[start : start + DECODED_AT_ONCE], strict=True)
        sources = [model.checkpoint.source(prompt, max_source_tokens) for prompt in prompts]
        fed = [[*source.prompt, *answer[:-1]] for source, answer in zip(sources, answers, strict=True)]
        ids, mask = (tensor.to(model.device) for tensor in tensors(fed, 0, "right"))
        if model.encoder_decoder:
            read = tensors([source.encoder_ids[0].tolist() for source in sources], 0, "right")
            read_ids, read_mask = (tensor.to(model.device) for tensor in read)
            out = model.module(input_ids=read_ids, attention_mask=read_mask, decoder_input_ids=ids)
        else:
            out = model.module(input_ids=ids, attention_mask=mask)
        for chosen, source, answer in zip(out.logits.argmax(-1).tolist(), sources, answers, strict=True):
            first = len(source.prompt) - 1  # the row that predicts the first token of the answer
            agreed += sum(ours == theirs for ours, theirs in zip(chosen[first:], answer, strict=False))
            total += len(answer)
    return agreed / total


def point_configs(job: Alignment, draft: Checkpoint) -> list[DictConfig]:
    """The points of the comparison with this draft model, as `prepare` takes them."""
    comparison, target = job.comparison, job.calibration.target
    speculative, bild = (OmegaConf.to_container(compose_policy(name)) for name in ("speculative", "bild"))
    thresholds = itertools.product(comparison.fallback, comparison.rollback)
    policies = [
        {**speculative, "window": comparison.window},
        *({**bild, "fallback": fallback, "rollback": rollback} for fallback, rollback in thresholds),
    ]
    pair = {"name": "alignment", "target": target.path, "target_revision": target.revision}
    limit = job.calibration.manifest["decoding"]["max_new_tokens"]
    shared = {
        "name": job.folder.name,
        "resume": True,
        "pair": {**pair, "draft": draft.path, "draft_revision": draft.revision},
        "dataset": asdict(comparison.dataset(job.calibration)),
        "decoding": {"max_new_tokens": limit, "temperature": 0.0, "top_k": None, "top_p": None},
        "runtime": asdict(job.runtime),
        "measure": asdict(job.measure),
    }
    return [OmegaConf.create({**shared, "policy": policy}) for policy in policies]


def _measured(
    job: Alignment, draft: Checkpoint, held_out: Sequence[Answer], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Agreement of a draft model with the target, and, if a comparison is wanted, what decoding gains from it."""
    model = HuggingFaceModel(draft, resolve_device(job.runtime.device), resolve_dtype(job.runtime.dtype))
    if job.comparison is None:
        return _agreement(job, model, [(answer.prompt, answer.answer_token_ids) for answer in held_out])[0]
    results = _points(job, draft, tell)
    dataset = job.comparison.dataset(job.calibration)
    compared = cached_examples(dataset)
    rows = (job.folder / "points" / results[0]["point"] / "examples.jsonl").read_text().splitlines()
    tokens = [json.loads(row)["baseline_token_ids"] for row in rows]
    agreement, texts = _agreement(job, model, list(zip([one.prompt for one in compared], tokens, strict=True)))
    quality = None
    if dataset.metric != "agreement":  # which has no references
        quality = score(dataset.metric, texts, [one.references for one in compared]).value
    return {**agreement, "own_quality": quality, **gains(results)}


def _agreement(job: Alignment, model: HuggingFaceModel, said: Said) -> tuple[dict[str, float], list[str]]:
    """How often the model agrees with the target, and its own greedy texts."""
    longest, limit = job.calibration.dataset.max_source_tokens, job.calibration.manifest["decoding"]["max_new_tokens"]
    sources = [model.checkpoint.source(prompt, longest) for prompt, _ in said]
    own = greedy_answers(model, sources, limit, DECODED_AT_ONCE)
    same = sum(tokens == theirs for tokens, (_, theirs) in zip(own, said, strict=True))
    texts = [model.checkpoint.tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in own]
    return {"token_agreement": token_agreement(model, said, longest), "text_agreement": same / len(said)}, texts


def _points(job: Alignment, draft: Checkpoint, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every point's result, measured unless it was before."""
    sweep, results = Sweep(job.folder), []
    for config in point_configs(job, draft):
        point = prepare(config)
        result = sweep.finished(point.id)
        if result is None:
            result = run_point(point, sweep)
            if job.logger is not None:
                job.logger.log_point(result, OmegaConf.to_container(config, resolve=True))
        results.append(result)
        knobs = " ".join(f"{knob}={point.knobs[knob]}" for knob in TOLD[point.policy])
        quality, speedup = result["quality"], result["speedup"]["value"]
        tell(f"{draft.path}, {point.policy} {knobs}: {quality['metric']} {quality['value']:.2f}, {speedup:.2f}x")
    return results


def gains(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the first point, speculative decoding, and the others, BiLD, give."""
    speculative, *bild = results
    free, cheap = best_at_loss(bild, 0.0), best_at_loss(bild, 1.0)
    return {
        "target_quality": speculative["quality"]["baseline"],
        "acceptance_rate": speculative["acceptance_rate"],
        "tokens_per_target_call": speculative["tokens_per_target_call"],
        "speculative_speedup": speculative["speedup"]["value"],
        "bild_speedup_at_no_loss": None if free is None else free["speedup"]["value"],
        "bild_speedup_at_one_point": None if cheap is None else cheap["speedup"]["value"],
        "pareto": pareto(bild),
    }


def pareto(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The undominated points: thresholds, latency relative to the baseline's, quality."""
    rows = [
        {**result["knobs"], "latency": 1 / result["speedup"]["value"], "quality": result["quality"]["value"]}
        for result in results
    ]
    return [rows[index] for index in pareto_front([(row["latency"], row["quality"]) for row in rows])]
