"""Answers that are in a dataset's rows, or in a file that others released, in the form of
calibration data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.data.prompts import Example, cut_sources
from bild_lab.lab.metrics.text_metrics import AGREEMENT
from bild_lab.training.answers import END, LENGTH, Calibration, TargetAnswer, contents_hash
from bild_lab.training.batches import tokenize
from bild_lab.training.modules.conversations import tokenize_conversations
from bild_lab.training.start import require_fitting_tokenizer, require_references

# columns of BiTA's released answers (`data/assembled_v2` of its repository): a whole prompt with its
# template and start token, and the greedy answer of the model that the folder is named after
RELEASED_PROMPT, RELEASED_ANSWER = "model_input_texts", "output"
RELEASED_SUFFIXES = (".json", ".jsonl")


def reference_answers(
    base: Checkpoint, dataset: DatasetSpec, examples: Sequence[Example], max_target_tokens: int
) -> Calibration:
    """The dataset's references in the form of calibration data, for `labels=data`.

    Later turns belong to one `Conversation` with the turns before them, of which only answers are
    learned. Raises UserError for an example without a reference, or a tokenizer that does not fit
    the model.
    """
    require_references(examples)
    require_fitting_tokenizer(base.tokenizer, base.config, base.end_tokens, base.path)
    if any(example.continues for example in examples):
        answers = tuple(
            tokenize_conversations(base, dataset.templates[0], examples, max_target_tokens)
        )
    else:
        examples = cut_sources(examples, dataset.max_source_tokens, base.prompt_length)
        tokenized = tokenize(
            examples, base.tokenizer, base.encoder_decoder, None, max_target_tokens
        )
        answers = tuple(
            TargetAnswer(
                example.id,
                example.prompt,
                example.references[0],
                row.answer.tolist(),
                END if row.complete else LENGTH,
            )
            for example, row in zip(examples, tokenized, strict=True)
        )
    manifest = {
        "model": {"path": base.path, "revision": base.revision, "fingerprint": base.fingerprint},
        "dataset": asdict(dataset),
        "hash": contents_hash(answers),
    }
    return Calibration(Path(dataset.path or dataset.hub_id or dataset.name), manifest, answers)


def released_answers(base: Checkpoint, file: Path, max_target_tokens: int) -> Calibration:
    """The answers of a JSON or JSON Lines file in the layout of BiTA's released ones, as those of
    this model, which the file does not name.

    As in the released code (`src/llmtuner/extras/template.py`), an answer is tokenized apart from
    its prompt, and the end token is learned after it. A longer answer than max_target_tokens is
    cut, and has no end token. Raises UserError for a file without these columns.
    """
    columns = {"source_column": RELEASED_PROMPT, "reference_column": RELEASED_ANSWER}
    dataset = DatasetSpec(
        name=f"{file.parent.name}/{file.stem}",
        path=str(file),
        split="train",
        metric=AGREEMENT,
        **columns,
    )
    answers = reference_answers(base, dataset, load_examples(dataset), max_target_tokens)
    words = ["dataset=local", f"dataset.path={file}"]
    words += [f"dataset.{key}={column}" for key, column in columns.items()]
    manifest = {**answers.manifest, "count": len(answers.answers), "dataset_words": words}
    return replace(answers, manifest=manifest)
