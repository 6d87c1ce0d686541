"""Hugging Face's Trainer with our data order, losses, evaluation and safer checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.optimization import Adafactor
from transformers.trainer_callback import PrinterCallback

from bild_lab.engine.models.device import require_float32
from bild_lab.errors import UserError
from bild_lab.ranks import LONGEST_WAIT, launched
from bild_lab.training.distillation import Distillation
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.train_spec import SCHEDULES, TrainSpec


class Evaluation(Protocol):
    """A frozen dataclass that scores a model. batch_size: examples at once, in each process."""

    batch_size: int

    def __call__(self, model: Any, loss: Any) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A model in memory, with what it learns and what is kept of it."""

    model: torch.nn.Module
    # indexed by what `order` yields, the examples of the whole training one after another
    examples: Any
    # an example for `collate` with the longest prompt and answer that there are, whose memory is
    # counted
    longest: Any
    order: Sampler
    collate: Callable[[Any], dict[str, torch.Tensor]]  # makes a batch
    loss: Callable[..., torch.Tensor]
    evaluate: Evaluation | None  # called with the model and the loss
    model_options: Mapping[str, Any] = field(default_factory=dict)  # besides the batch
    facts: Mapping[str, Any]  # the entries of metrics.json about model and data
    save: Callable[[Path], None]  # writes the trained weights into a folder
    # takes the loss's place in training, and makes its own batches
    distillation: Distillation | None = None

    def evaluated_by(self, fits: int | None) -> Objective:
        """The objective with at most so many examples at once in evaluations; None: as many as before."""
        if self.evaluate is None or fits is None:
            return self
        batch_size = min(self.evaluate.batch_size, fits)
        return replace(self, evaluate=replace(self.evaluate, batch_size=batch_size))


class ResumableTrainer(Trainer):
    """Trains an objective's model, with its checkpoints in `folder.work`.

    Differences from the Trainer: the order of examples is one sequence, so that a resumed training
    sees the same examples; a loss may read inner layers; evaluation is ours; a checkpoint counts
    only when it is complete; a loss that is not a finite number ends the training.
    """

    def __init__(
        self,
        objective: Objective,
        recipe: TrainSpec,
        folder: TrainingFolder,
        arguments: TrainingArguments,
        callbacks: Sequence[TrainerCallback],
    ) -> None:
        self._recipe, self._objective, self._folder = recipe, objective, folder
        self._restart_clock(0)
        super().__init__(
            model=objective.model,
            args=arguments,
            train_dataset=objective.examples,
            # the Trainer asks for one; `evaluate` has its own
            eval_dataset=None if objective.evaluate is None else [],
            data_collator=self._batch,
            compute_loss_func=objective.loss,
            optimizer_cls_and_kwargs=optimizer(recipe),
            callbacks=[_LogLastStep(), _StopAtScore(recipe.stop_at_score), *callbacks],
        )
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader:
        """Batches of the whole training; each process gets its part of every step."""
        loader = DataLoader(
            self._objective.examples,
            batch_size=self._train_batch_size,
            sampler=self._objective.order,
            collate_fn=self._batch,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, *values: Any, **named: Any) -> tuple[list, Any]:
        """The batches of a step's passes, and how many labels they have together."""
        batches, labels = super().get_batch_samples(*values, **named)
        if self._objective.distillation is None:
            return batches, labels
        return self._objective.distillation.passes(self.model, batches, self.state.global_step)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *options: Any, **named: Any) -> Any:
        """Call the model with the objective's options; soft targets are the loss's alone."""
        if self._objective.distillation is not None:
            losses = self._objective.distillation.losses(model, **inputs)
            return losses.sum() / named["num_items_in_batch"]
        soft = {name: inputs[name] for name in ("soft_ids", "soft_probs") if name in inputs}
        self.compute_loss_func = partial(self._objective.loss, **soft)
        fed = {name: tensor for name, tensor in inputs.items() if name not in soft}
        return super().compute_loss(
            model, {**fed, **self._objective.model_options}, *options, **named
        )

    @property
    def _batch(self) -> Callable[[Any], dict[str, Any]]:
        distillation = self._objective.distillation
        return self._objective.collate if distillation is None else distillation.batch

    def evaluate(self, *unused: Any, **named: Any) -> dict[str, float]:
        """The objective's evaluation under the Trainer's names, `eval_…`."""
        scores = self._objective.evaluate(self.model, self._objective.loss)
        metrics = {f"eval_{name}": value for name, value in scores.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        self._restart_clock(self.state.global_step)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the throughput to a log of the loss.

        Raises UserError for a loss that is not a finite number.
        """
        if "loss" in logs:
            step = self.state.global_step
            if not math.isfinite(logs["loss"]):
                raise UserError(
                    f"the loss is {logs['loss']} at step {step}: the training has diverged; lower"
                    f" train.learning_rate (it is {self._recipe.learning_rate:g}) or raise"
                    " train.warmup_steps"
                )
            examples = (step - self._clock_step) * self._recipe.batch_size
            logs["examples_per_s"] = examples / (time.perf_counter() - self._clock_s)
            self._restart_clock(step)
        super().log(logs, start_time)

    def _restart_clock(self, step: int) -> None:
        self._clock_step, self._clock_s = step, time.perf_counter()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._folder.saving(self.state.global_step):
            super()._save_checkpoint(model, trial)
        self._restart_clock(self.state.global_step)

    def _init_training_state(self, *values: Any) -> tuple[int, int]:
        state = super()._init_training_state(*values)
        if self.state.best_global_step:  # the folder may have been moved since
            best = self._folder.checkpoint_of(self.state.best_global_step)
            if not best.is_dir():  # the Trainer would take the last weights
                raise UserError(
                    f"{best}, which holds the best weights so far, is gone; remove"
                    f" {self._folder.root}"
                )
            self.state.best_model_checkpoint = str(best)
        self._restart_clock(self.state.global_step)
        return state


class _LogLastStep(TrainerCallback):
    """Logs the last steps, however few they are."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            control.should_log = True


class _StopAtScore(TrainerCallback):
    """Ends a training after an evaluation with this score, and a resumed one that had it; None
    never does.
    """

    def __init__(self, score: float | None) -> None:
        self._score = math.inf if score is None else score

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics[args.metric_for_best_model] >= self._score:
            control.should_training_stop = True

    def on_step_end(self, args, state, control, **kwargs):
        if state.best_metric is not None and state.best_metric >= self._score:
            control.should_training_stop = True


def optimizer(recipe: TrainSpec) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": recipe.learning_rate}
    fixed = {"relative_step": False, "warmup_init": False}
    return Adafactor, {
        "lr": recipe.learning_rate,
        "scale_parameter": recipe.scale_parameter,
        **fixed,
    }


def _require_divisible(recipe: TrainSpec, processes: int) -> None:
    """Raise UserError for a batch that cannot be divided among the passes of all processes."""
    passes = processes * recipe.accumulate
    if recipe.batch_size % passes:
        raise UserError(
            f"train.batch_size={recipe.batch_size} cannot be divided among {processes} processes"
            f" times train.accumulate={recipe.accumulate}; choose a multiple of {passes}"
        )


def _require_one_gpu(processes: int) -> None:
    """Raise UserError for several GPUs that one process alone would use."""
    if processes == 1 and torch.cuda.device_count() > 1:
        raise UserError(
            f"{torch.cuda.device_count()} GPUs are visible to one process; start one process for"
            " each with `accelerate launch scripts/finetune.py …`, or choose one GPU with"
            " CUDA_VISIBLE_DEVICES=0"
        )


def training_arguments(
    recipe: TrainSpec, folder: TrainingFolder, metric: str | None, spread: bool = False
) -> TrainingArguments:
    """The recipe as the Trainer's arguments. metric: decides which checkpoint is best; None keeps
    the last.

    spread: one process uses all GPUs that it sees. Raises UserError if the batch cannot be divided
    among the processes, or one process sees several GPUs otherwise.
    """
    processes, cpu = launched().count, recipe.on_cpu
    _require_divisible(recipe, processes)
    if not recipe.in_bfloat16:
        require_float32(torch.float32, torch.device("cpu" if cpu else "cuda"))
    if not (cpu or spread):
        _require_one_gpu(processes)
    checkpoints = "no" if recipe.evaluate_every is None else "steps"
    evaluations = checkpoints if metric is not None else "no"
    arguments = TrainingArguments(
        output_dir=str(folder.work),
        per_device_train_batch_size=recipe.batch_size // (processes * recipe.accumulate),
        gradient_accumulation_steps=recipe.accumulate,
        max_steps=recipe.max_steps,
        lr_scheduler_type=SCHEDULES[recipe.schedule],
        warmup_steps=recipe.warmup_steps,
        weight_decay=0.0,
        max_grad_norm=recipe.clip_norm or 0.0,  # the Trainer does not clip at 0
        seed=recipe.seed,
        use_cpu=cpu,
        bf16=recipe.in_bfloat16,
        dataloader_pin_memory=not cpu,
        average_tokens_across_devices=True,
        ddp_timeout=int(LONGEST_WAIT.total_seconds()),
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        eval_strategy=evaluations,
        eval_steps=recipe.evaluate_every,
        save_strategy=checkpoints,
        save_steps=recipe.evaluate_every or 0,
        save_total_limit=2,  # the best and the last
        load_best_model_at_end=evaluations == "steps",
        metric_for_best_model=None if evaluations == "no" else f"eval_{metric}",
        greater_is_better=None if evaluations == "no" else True,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )
    # or that of `accelerate config`, which `accelerate launch` tells by a variable
    arguments.mixed_precision = "bf16" if recipe.in_bfloat16 else "no"
    if spread:  # or the Trainer would copy what it trains to every GPU
        arguments._n_gpu = 1
    return arguments
