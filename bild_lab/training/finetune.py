"""Fine-tune a checkpoint, or train a fresh model: `scripts/finetune.py`."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint, decoder_depth
from bild_lab.engine.models.checkpoint.loaded_checkpoint import evaluation_mode
from bild_lab.engine.models.hf.generation import reads_padding
from bild_lab.engine.models.hf.positions import max_session_positions
from bild_lab.engine.stop import before_stop
from bild_lab.errors import UserError
from bild_lab.lab.config.console import status_line
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.metrics.external_metrics import TRIED_EXAMPLES
from bild_lab.lab.metrics.quality import require_metric_works, score
from bild_lab.lab.metrics.text_metrics import LOG_PROBABILITY, metric_named
from bild_lab.lab.metrics.writing import BY_SCRIPT, Writing
from bild_lab.lab.store.hashing import content_hash, data_hash
from bild_lab.lab.store.records import require_writable
from bild_lab.ranks import launched
from bild_lab.training.batches import (
    IGNORED,
    AnsweredExample,
    BatchOrder,
    Collator,
    TokenizedExample,
    evaluation_batches,
    longest_example,
    tokenize,
)
from bild_lab.training.distillation import Distillation, DistillationSpec, on_engine
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.losses import LayerLoss, layer_weights
from bild_lab.training.run import TrainingJob, TrainingRun
from bild_lab.training.soft_targets import add_soft_targets
from bild_lab.training.start import StartingPoint, require_references, require_room
from bild_lab.training.trainer import Objective

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FinetuningJob(TrainingJob):
    """One training from examples to `folder/checkpoint`.

    The answer to learn is an example's first reference, of an `AnsweredExample` its tokens;
    validation scores against all references. Without validation examples the last weights are kept.
    Raises UserError for soft targets without a teacher, for a teacher without them, and for a metric
    that judges no texts.
    """

    start: StartingPoint
    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    # bleu, rouge or agreement; or LOG_PROBABILITY of the validation answers, which decodes no texts:
    # the metric of unconditional generation
    metric: str
    teacher: Checkpoint | None = None  # gives soft targets, as many as the recipe says, or teaches
    distillation_spec: DistillationSpec = DistillationSpec()
    max_source_tokens: int | None = None  # longer prompts are cut
    title: str = "training"
    writing: Writing = BY_SCRIPT  # of the references
    # stop strings: what is scored of a validation text ends before the first of them
    cut: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.metric != LOG_PROBABILITY and metric_named(self.metric).of_tokens is not None:
            raise UserError(
                f"validation compares texts with references, which dataset.metric={self.metric}"
                " does not; set dataset.metric=bleu or another metric with references"
            )
        recipe, distils = self.recipe, self.distillation_spec.loss is not None
        has_own_loss = recipe.loss != "last" or recipe.soft_targets or recipe.label_smoothing
        if distils and has_own_loss:
            raise UserError(
                "align.loss takes the place of the training's own loss; set train.loss=last,"
                " train.soft_targets=0 and train.label_smoothing=0"
            )
        if distils and launched().count > 1:
            raise UserError(f"align.loss trains in one process, got {launched().count}")
        needs_teacher = bool(recipe.soft_targets) or distils
        if needs_teacher != (self.teacher is not None):
            raise UserError(
                "train.soft_targets are those of a target that answered, or that teaches: use"
                " scripts/align.py, or set train.soft_targets=0 and give no teacher"
            )

    @property
    def fitting(self) -> Writing:
        """How the references that validation scores against are written."""
        return self.writing.of([example.references for example in self.validation])


def finetune(job: FinetuningJob) -> dict[str, Any]:
    """Train, and leave the best weights in `job.folder/checkpoint`; returns its metrics.json.

    Resumes an interrupted training, and returns a finished one (`TrainingRun`). Raises UserError
    for a job that cannot be trained; what small files can show is checked before weights are read.
    """
    require_writable(job.folder)
    if not job.train:
        raise UserError(
            "there are no examples to train on; check dataset.path, dataset.split and dataset.limit"
        )
    require_references([*job.train, *job.validation])
    if job.validation and job.metric != LOG_PROBABILITY:
        require_metric_works(
            job.metric,
            tuple(example.references for example in job.validation[:TRIED_EXAMPLES]),
            job.fitting,
        )
    layer_weights(job.recipe.loss, decoder_depth(job.start.config))
    folder = TrainingFolder(job.folder)
    run = TrainingRun(
        job=job,
        folder=folder,
        title=job.title,
        start=job.start.name,
        identity=job_identity(job),
        metric=job.metric if job.validation else None,
        examples=len(job.train),
        prepare=lambda arguments: _prepare(job, folder, arguments),
    )
    return run.train()


def finetune_best(job: FinetuningJob, rates: Sequence[float]) -> dict[str, Any]:
    """Train with each of these learning rates, and leave the best by its validation score in
    `job.folder/checkpoint`.

    With `train.stop_at_score` the best is the nearest to that score. The trainings are in
    `outputs/NAME_rate_RATE`, and resume like others. Raises UserError without evaluations, and as
    `finetune` does.
    """
    if not job.validation or job.recipe.evaluate_every is None:
        raise UserError(
            "several learning rates are compared by evaluations; set train.evaluate_every, or one"
            " train.learning_rate"
        )
    root, jobs = job.folder, []
    for rate in rates:
        folder_of_rate = root.with_name(f"{root.name}_rate_{rate:g}")
        jobs.append(
            replace(
                job,
                recipe=replace(job.recipe, learning_rate=rate),
                folder=folder_of_rate,
                title=folder_of_rate.name,
            )
        )
    folder = TrainingFolder(root)
    identity = {**job_identity(jobs[0]), "train.learning_rate": list(rates)}
    folder.require_same(identity)
    if (finished := folder.finished()) is not None:
        return finished
    metrics_by_rate = [finetune(job_of_rate) for job_of_rate in jobs]
    scores = [rate_metrics["best"][job.metric] for rate_metrics in metrics_by_rate]
    stop_at_score = job.recipe.stop_at_score
    best = max(
        range(len(jobs)),
        key=lambda at: scores[at] if stop_at_score is None else -abs(scores[at] - stop_at_score),
    )
    scored = {f"{rate:g}": score for rate, score in zip(rates, scores, strict=True)}
    metrics = {**metrics_by_rate[best], "identity": identity, "learning_rates": scored}
    best_result = TrainingFolder(jobs[best].folder).result
    return folder.publish(
        lambda place: shutil.copytree(best_result, place, dirs_exist_ok=True), metrics
    )


def best_score(path: Path, metric: str, validation: Sequence[Example]) -> float:
    """The best validation score of a finished training, to stop another one at it.

    Raises UserError if there is none, or it was scored on other examples or by another metric.
    """
    finished = TrainingFolder(path).finished() or {}
    if finished.get("best") is None:
        raise UserError(
            f"train.stop_at_score: {path} holds no finished training with scores; run it first, or"
            " give a number"
        )
    if finished["metric"] != metric or finished["identity"]["validation examples"] != data_hash(
        validation
    ):
        raise UserError(
            f"train.stop_at_score: {path} was scored by {finished['metric']} on other examples; give"
            " the same data set and validation to both, or a number"
        )
    return finished["best"][metric]


def job_identity(job: FinetuningJob) -> dict[str, Any]:
    """What decides a training's result."""
    emitted = [
        example.answer_token_ids
        for example in (*job.train, *job.validation)
        if isinstance(example, AnsweredExample)
    ]
    return {
        **job.recipe.identity,
        **job.start.identity,
        "dataset.max_source_tokens": job.max_source_tokens,
        "metric": job.metric,
        "training examples": data_hash(job.train),
        "validation examples": data_hash(job.validation),
        **({"answer tokens": content_hash({"emitted": emitted})} if emitted else {}),
        **({} if job.fitting.reads_like_english(job.metric) else {"writing": asdict(job.fitting)}),
        **({"dataset.cut": sorted(job.cut)} if job.cut else {}),
        **({} if job.teacher is None else {"teacher": job.teacher.fingerprint}),
        **job.distillation_spec.identity,
    }


@dataclass(frozen=True)
class Evaluator:
    """Scores a model on validation examples. Each process scores its share, and each gets the whole
    result.

    references: of every example. settings: greedy decoding, as `greedy_settings` gives it. cut:
    stop strings, before which a text ends. dtype: the training's precision, in which texts are
    decoded, in batches, with Transformers' `generate`, at most to the last position that sessions
    of the model have; one by one where its modules read the padding.
    """

    references: Sequence[Sequence[str]]
    examples: Sequence[TokenizedExample]
    metric: str
    tokenizer: PreTrainedTokenizerBase
    collate: Collator
    batch_size: int
    settings: GenerationConfig
    writing: Writing = BY_SCRIPT
    cut: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    def __call__(self, model: PreTrainedModel, loss: LayerLoss) -> dict[str, float]:
        """`METRIC` with `METRIC_low` and `METRIC_high` (95 %), `loss` in nats a token, and seconds.

        LOG_PROBABILITY has no interval. A loss over several layers adds `loss_layer_N` for each.
        """
        started = time.perf_counter()
        with _evaluating(model, self.settings), torch.no_grad():
            losses = self._losses(model, loss)
            scores = (
                {LOG_PROBABILITY: -losses["loss"]}
                if self.metric == LOG_PROBABILITY
                else self._scores(model)
            )
        return {**scores, **losses, "seconds": time.perf_counter() - started}

    def _scores(self, model: PreTrainedModel) -> dict[str, float]:
        quality = score(self.metric, self._texts(model), self.references, writing=self.writing)
        return {
            self.metric: quality.value,
            f"{self.metric}_low": quality.low,
            f"{self.metric}_high": quality.high,
        }

    def _losses(self, model: PreTrainedModel, loss: LayerLoss) -> dict[str, float]:
        sums, count = {}, 0
        for indices in self._batches(self.batch_size):
            batch = send_to_device(
                self.collate([self.examples[index] for index in indices]), model.device
            )
            labels = batch.pop("labels")
            outputs = model(**batch, output_hidden_states=loss.inner, use_cache=False)
            for layer, total in loss.sums(outputs, labels).items():
                sums[layer] = sums.get(layer, 0.0) + float(total)
            count += int((labels != IGNORED).sum())
        shares = launched().gather((sums, count))
        tokens = sum(count for _, count in shares)
        layers = sorted({layer for sums, _ in shares for layer in sums})
        means = {
            layer: math.fsum(sums.get(layer, 0.0) for sums, _ in shares) / tokens
            for layer in layers
        }
        inner = {f"loss_layer_{layer}": mean for layer, mean in means.items()} if loss.inner else {}
        return {"loss": means[layers[-1]], **inner}

    def _texts(self, model: PreTrainedModel) -> list[str]:
        texts: list[tuple[int, str]] = []
        positions = max_session_positions(model) or math.inf
        for indices in self._batches(1 if reads_padding(model, self.dtype) else self.batch_size):
            prompts = send_to_device(
                self.collate.prompts([self.examples[index] for index in indices]), model.device
            )
            prompt_length = 1 if model.config.is_encoder_decoder else prompts["input_ids"].shape[1]
            longest = min(self.settings.max_new_tokens, positions - prompt_length)
            out = model.generate(**prompts, max_new_tokens=longest)
            decoded = self.tokenizer.batch_decode(out[:, prompt_length:], skip_special_tokens=True)
            texts += zip(
                indices, (before_stop(text, self.cut).strip() for text in decoded), strict=True
            )
        return [text for _, text in sorted(chain.from_iterable(launched().gather(texts)))]

    def _batches(self, batch_size: int) -> Iterator[list[int]]:
        batches = evaluation_batches([example.length for example in self.examples], batch_size)
        return (batch for batch in batches if batch)


def greedy_settings(
    max_new_tokens: int, end_tokens: Collection[int], pad: int, decoder_start: int | None
) -> GenerationConfig:
    """Greedy decoding alone, without the beams, penalties or forced tokens of a checkpoint."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(end_tokens),
        pad_token_id=pad,
        decoder_start_token_id=decoder_start,
        use_cache=True,
    )


@contextmanager
def _evaluating(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """The model without dropout and with these settings alone, inside the block.

    Half precision casts a weight once a block: each forward of the Trainer's model has an autocast
    of its own, and only the outermost forgets its casts as it ends.
    """
    generation_config = model.generation_config
    model.generation_config = settings  # `generate` takes missing settings from here
    try:
        with evaluation_mode([model]), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        model.generation_config = generation_config


def _saver(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[[Path], None]:
    """What writes the checkpoint, with the setting of its cache as it is now: the Trainer turns it
    off, also where only a part of the configuration has one, as of a model that reads images too.
    """
    own_setting = {key: value for key, value in vars(model.config).items() if key == "use_cache"}

    def save(place: Path) -> None:
        vars(model.config).pop("use_cache", None)
        vars(model.config).update(own_setting)
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)

    return save


def _prepare(job: FinetuningJob, folder: TrainingFolder, arguments: TrainingArguments) -> Objective:
    """What the job trains, with its data."""
    recipe = job.recipe
    with arguments.main_process_first(local=False):
        tokenizer = _tokenizer(job, folder)
    train, validation = _tokenized(job, tokenizer)
    cut_answers = sum(not example.complete for example in train)
    if cut_answers and launched().is_main:
        _warn_of_cut_answers(job, cut_answers, len(train))
    model = job.start.model(tokenizer)
    if arguments.device.type == "cpu":
        # the fused kernel's backward pass is slower for short sentences
        model.set_attn_implementation("eager")
    special = job.start.special_tokens(tokenizer)
    collate = Collator(special.pad, special.start)
    if recipe.soft_targets:
        status_line.enter("asking the target for soft targets")
        with arguments.main_process_first(local=False):
            train = add_soft_targets(
                train, job.teacher, collate, recipe, folder.soft_targets, arguments.device
            )
    weights = layer_weights(recipe.loss, decoder_depth(job.start.config))
    loss = LayerLoss(model, weights, recipe.label_smoothing, recipe.in_bfloat16)
    # a target may end its answers with tokens that its drafter does not know as ends
    ends = {*special.end, *(int(example.answer[-1]) for example in train if example.complete)}
    settings = greedy_settings(recipe.max_target_tokens, ends, special.pad, special.start)
    return Objective(
        model=model,
        examples=train,
        longest=longest_example(train, bool(job.start.config.is_encoder_decoder)),
        order=BatchOrder(
            [example.length for example in train], recipe.batch_size, recipe.max_steps, recipe.seed
        ),
        collate=collate,
        loss=loss,
        evaluate=_evaluator(job, validation, tokenizer, collate, settings),
        model_options={"output_hidden_states": loss.inner, "use_cache": False},
        facts={
            "architecture": type(model).__name__,
            "parameters": model.num_parameters(),
            "train_examples": len(job.train),
            "validation_examples": len(job.validation),
            "cut_by_length": cut_answers,
        },
        save=_saver(model, tokenizer),
        distillation=_distillation(job, collate, frozenset(ends), arguments.device),
    )


def _tokenized(
    job: FinetuningJob, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[TokenizedExample], list[TokenizedExample]]:
    """The examples to train on and those to validate with. Raises UserError for one that is longer
    than the model's positions.
    """
    train, validation = (
        tokenize(
            examples,
            tokenizer,
            bool(job.start.config.is_encoder_decoder),
            job.max_source_tokens,
            job.recipe.max_target_tokens,
        )
        for examples in (job.train, job.validation)
    )
    lengths = [example.length for example in (*train, *validation)]
    require_room(lengths, job.start.outline(tokenizer))
    return train, validation


def _evaluator(
    job: FinetuningJob,
    validation: Sequence[TokenizedExample],
    tokenizer: PreTrainedTokenizerBase,
    collate: Collator,
    settings: GenerationConfig,
) -> Evaluator | None:
    """What scores the model on the job's validation examples; None without them."""
    if not validation:
        return None
    return Evaluator(
        references=[example.references for example in job.validation],
        examples=validation,
        metric=job.metric,
        tokenizer=tokenizer,
        collate=collate,
        batch_size=job.recipe.evaluation_batch_size,
        settings=settings,
        writing=job.fitting,
        cut=job.cut,
        dtype=job.recipe.dtype,
    )


def _warn_of_cut_answers(job: FinetuningJob, cut: int, answers: int) -> None:
    log.warning(
        "%s: %d of %d answers have more tokens than train.max_target_tokens=%d; they are cut and"
        " have no end token, so raise it to learn where they end",
        job.title,
        cut,
        answers,
        job.recipe.max_target_tokens,
    )


def _distillation(
    job: FinetuningJob, collate: Collator, end_tokens: frozenset[int], device: torch.device
) -> Distillation | None:
    """How the teacher takes part in the loss; None if it does not."""
    recipe, spec = job.recipe, job.distillation_spec
    if spec.loss is None:
        return None
    distillation = Distillation(
        distillation_spec=spec,
        teacher=on_engine(job.teacher, device, recipe.dtype),
        collate=collate,
        end_tokens=end_tokens,
        longest=recipe.max_target_tokens,
        seed=recipe.seed,
    )
    if spec.data != "answers":
        # first, as on a GPU the module of Transformers then shares its weights
        distillation.teacher.load()
    return distillation


def _tokenizer(job: FinetuningJob, folder: TrainingFolder) -> PreTrainedTokenizerBase:
    """The starting point's tokenizer; one that is trained is kept for other processes and for a
    resumed training.
    """
    if folder.tokenizer.exists():
        return AutoTokenizer.from_pretrained(folder.tokenizer)
    texts = (text for example in job.train for text in (example.prompt, *example.references[:1]))
    tokenizer = job.start.tokenizer(texts)
    if job.start.trains_tokenizer:
        with folder.published(folder.tokenizer, "the tokenizer") as draft:
            tokenizer.save_pretrained(draft)
    return tokenizer
