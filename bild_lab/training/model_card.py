"""The model card (`README.md`) of a trained checkpoint, or of a small module trained beside a frozen model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from bild_lab.lab.data.examples import DatasetSpec
from bild_lab.training.dataset_words import dataset_words

_TEMPLATE = Path(__file__).with_name("model_card.md.j2")
_LEFT_OUT = ("name", "device", "threads", "log_every")  # of the recipe: they do not change the weights


def checkpoint_card(metrics: Mapping[str, Any], folder: Path) -> ModelCard:
    """Data, recipe, scores, and the commands that decode with the checkpoint. folder: the training's."""
    checkpoint, dataset = folder / "checkpoint", _dataset_words(metrics)
    best, name = metrics["best"], metrics["metric"]
    evaluation, scores = _not_evaluated(metrics), {}
    if best is not None:
        evaluation = (
            f"Greedy decoding of {metrics['validation_examples']:,} validation examples at step {best['step']:,}, "
            f"the best of {metrics['evaluations']} evaluations; losses in nats a token."
        )
        interval = f"95 %: {best[f'{name}_low']:.2f} to {best[f'{name}_high']:.2f}"
        scores[f"validation {name}"] = f"{best[name]:.2f} ({interval})"
        scores |= {key.replace("_", " "): f"{best[key]:.3f}" for key in best if key.startswith("loss")}
    usage = _commands(
        "As the target, or as the drafter of a target that has the same tokenizer:",
        f"python run.py policy=vanilla pair.target={checkpoint} pair.draft=null {dataset}",
        f"python run.py -m policy=bild pair.target=LARGE pair.draft={checkpoint} "
        f"policy.fallback=0.3,0.5,0.8 policy.rollback=1,2,5 {dataset}",
    )
    return _card(
        metrics,
        ModelCardData(library_name="transformers"),
        title=folder.name,
        summary=f"A {metrics['architecture']} with {metrics['parameters']:,} parameters, trained by bild_lab "
        f"{metrics['environment']['bild_lab']} from {metrics['start']}.",
        data=metrics["data"],
        evaluation=evaluation,
        scores=scores,
        usage=f"{usage}\n\n`metrics.json` has every number.\n",
    )


def module_card(metrics: Mapping[str, Any], command: str) -> ModelCard:
    """Data, recipe and scores of a small module. command: decodes with it."""
    best, evaluation, scores = metrics["best"], _not_evaluated(metrics), {}
    if best is not None:
        evaluation = (
            f"On {metrics['held_out_examples']:,} held-out answers, at the best of {metrics['evaluations']} "
            "evaluations; the loss in nats a label, `top_K_NAME` the share of labels among the first K choices of NAME."
        )
        scores = {key: f"{value:.3f}" for key, value in best.items() if key not in ("step", "seconds")}
    return _card(
        metrics,
        ModelCardData(library_name="bild_lab"),
        title=f"{metrics['noun']} for {metrics['start']}",
        summary=f"{metrics['parameters']:,} parameters beside a frozen {metrics['architecture']} model, whose weights "
        f"are not in this folder; trained by bild_lab {metrics['environment']['bild_lab']}.",
        data=f"{metrics['data']}; {metrics['dropped_examples']:,} answers were too short.",
        evaluation=evaluation,
        scores=scores,
        usage=f"{_commands('', command)}\n\n`metrics.json` has every number.\n",
    )


def _card(metrics: Mapping[str, Any], header: ModelCardData, **parts: Any) -> ModelCard:
    environment = metrics["environment"]
    course = (
        f"{metrics['steps']:,} steps, {metrics['passes']:.1f} passes over the data, "
        f"in {metrics['training_s']:,.0f} s on {environment['gpu'] or environment['cpu']}."
    )
    recipe = {key: value for key, value in metrics["recipe"].items() if key not in _LEFT_OUT}
    names = {"recipe_name": metrics["recipe"]["name"], "recipe": recipe, "course": course}
    return ModelCard.from_template(header, template_path=str(_TEMPLATE), **names, **parts)


def _not_evaluated(metrics: Mapping[str, Any]) -> str:
    return f"Not evaluated. The training loss of the last steps is {metrics['loss']:.3f} nats a token."


def _commands(sentence: str, *commands: str) -> str:
    return "\n".join([*([sentence, ""] if sentence else []), "```", *commands, "```"])


def _dataset_words(metrics: Mapping[str, Any]) -> str:
    """The overrides that choose the dataset of the training; placeholders if the metrics name none."""
    data = metrics.get("dataset")
    return "dataset=NAME dataset.path=DIR" if data is None else shlex.join(dataset_words(DatasetSpec(**data)))
