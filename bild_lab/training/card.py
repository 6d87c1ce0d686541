"""The model card beside a trained checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LEFT_OUT = ("name", "device", "threads", "log_every")  # of the recipe: they do not tell how a model was trained


def model_card(metrics: Mapping[str, Any], folder: Path) -> str:
    """A README.md: data, recipe, scores, and how to use the checkpoint in a sweep. folder: the training's."""
    checkpoint = folder / "checkpoint"
    recipe = {key: value for key, value in metrics["recipe"].items() if key not in _LEFT_OUT}
    environment = metrics["environment"]
    lines = [
        "---",
        "library_name: transformers",
        "---",
        f"# {folder.name}",
        "",
        f"A {metrics['architecture']} with {metrics['parameters']:,} parameters, trained by bild_lab "
        f"{environment['bild_lab']} from {metrics['start']}.",
        "",
        "## Data",
        "",
        metrics["data"],
        "",
        "## Recipe",
        "",
        f"`{metrics['recipe']['name']}`: {metrics['steps']:,} steps, {metrics['passes']:.1f} passes over the data, "
        f"in {metrics['training_s']:,.0f} s on {environment['gpu'] or environment['cpu']}.",
        "",
        *_table(("setting", "value"), recipe.items()),
        "",
        "## Scores",
        "",
        *_scores(metrics),
        "",
        "## Use it in a sweep",
        "",
        "As the target, or as the drafter of a target that has the same tokenizer:",
        "",
        "```",
        f"python run.py policy=vanilla pair.target={checkpoint}",
        f"python run.py -m policy=bild pair.target=LARGE pair.draft={checkpoint} "
        "policy.fallback=0.3,0.5,0.8 policy.rollback=1,2,5",
        "```",
        "",
        "Both take `dataset=NAME` and `dataset.path=DIR`, as the training did; `metrics.json` has every number.",
        "",
    ]
    return "\n".join(lines)


def _scores(metrics: Mapping[str, Any]) -> list[str]:
    best = metrics["best"]
    if best is None:
        return [f"Not evaluated. The training loss of the last steps is {metrics['loss']:.3f} nats a token."]
    name = metrics["metric"]
    rows = [
        (f"validation {name}", f"{best[name]:.2f} (95 %: {best[f'{name}_low']:.2f} to {best[f'{name}_high']:.2f})"),
        *((key.replace("_", " "), f"{value:.3f}") for key, value in best.items() if key.startswith("loss")),
    ]
    return [
        f"Greedy decoding of {metrics['validation_examples']:,} validation examples at step {best['step']:,}, "
        f"the best of {metrics['evaluations']} evaluations; losses in nats a token.",
        "",
        *_table(("score", "value"), rows),
    ]


def _table(titles: tuple[str, str], rows: Any) -> list[str]:
    return [f"| {titles[0]} | {titles[1]} |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
