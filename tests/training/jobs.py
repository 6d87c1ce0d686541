"""Jobs small enough to train in a second."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from bild_lab.lab.data.prompts import Example
from bild_lab.training.finetune import FinetuningJob
from bild_lab.training.start import FreshModel, FromScratch
from bild_lab.training.train_spec import TrainSpec

WORDS = "Haus Hund Katze Baum Stadt Fluss Berg Kind Brot Wein Lied Buch Tag Nacht Wald Meer".split()
TURNED = {word: word[::-1].lower() for word in WORDS}

MICRO = TrainSpec(
    name="micro",
    max_steps=6,
    batch_size=4,
    learning_rate=0.05,
    scale_parameter=True,
    precision="float32",
    max_target_tokens=12,
    evaluate_every=2,
    log_every=1,
    device="cpu",
)

# dropout, so that a resumed training is the same only if the generators are restored
T5 = {
    "name": "micro t5",
    "vocabulary": 90,
    "config": {
        "model_type": "t5",
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 16,
        "d_ff": 32,
        "num_heads": 2,
        "d_kv": 8,
        "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu",
    },
}
LLAMA = {
    "name": "micro llama",
    "vocabulary": 90,
    "config": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
    },
}


class Kill(TrainerCallback):
    """Ends a training after a step, before anything of the step is written, as a kill would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


def sentences(count: int, seed: int = 0) -> tuple[Example, ...]:
    """Words, and the same words spelt backwards."""
    chance = random.Random(seed)
    found = []
    for index in range(count):
        words = chance.choices(WORDS, k=chance.randint(1, 4))
        source = " ".join(words)
        found.append(
            Example(f"train-{index}", source, source, (" ".join(TURNED[word] for word in words),))
        )
    return tuple(found)


def job(folder: Path, **changes: Any) -> FinetuningJob:
    """A T5 from random weights; keywords change the model, the job, or the recipe where it has that
    field.
    """
    recipe = replace(
        MICRO,
        **{key: changes.pop(key) for key in list(changes) if key in TrainSpec.__dataclass_fields__},
    )
    model = FreshModel(**changes.pop("model", T5))
    values = {
        "train": sentences(22),
        "validation": sentences(5, seed=1),
        "metric": "bleu",
        "folder": folder,
        **changes,
    }
    values.setdefault("start", FromScratch(model, recipe.max_target_tokens))
    return FinetuningJob(recipe=recipe, **values)


def write_dataset(folder: Path, train: int = 30, validation: int = 6) -> Path:
    """Splits train and validation, in the columns of conf/dataset/multi30k.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 0), ("val", validation, 1)):
        rows = [{"de": one.source, "en": one.references[0]} for one in sentences(count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def losses(metrics: dict[str, Any]) -> list[tuple[int, float]]:
    """The logged training and validation losses, by step."""
    return [
        (entry["step"], entry[key])
        for entry in metrics["history"]
        for key in ("loss", "eval_loss")
        if key in entry
    ]
