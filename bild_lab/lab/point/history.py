"""The texts of a point: its requests, with the history of conversations, which is what the target
itself answered to the turns before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bild_lab.engine.models.checkpoint.chat import CompleteText, answer_in_history
from bild_lab.engine.request import Request
from bild_lab.errors import UserError
from bild_lab.files import write_json
from bild_lab.lab.config.compose import compose_policy, resolved_policy
from bild_lab.lab.data.prompts import Example, with_answers, with_earlier_turns
from bild_lab.lab.point.decoder import METHOD, Decoder
from bild_lab.lab.point.prepare import Point
from bild_lab.lab.store.hashing import content_hash, parts_code_hash

# the keys of a point's setting that determine the target's own greedy answers, if it has them
ANSWER_KEYS = (
    "weights",
    "data",
    "engine",
    "dtype",
    "compile",
    "device",
    "hardware",
    "code",
    "max_source_tokens",
    "processors",
    "stop",
    "complete_prompts",
    "chat_template_kwargs",
    "source_language",
    "target_language",
    "weight_bits",
    "device_map",
)


def prepare_texts(point: Point, folder: Path) -> tuple[tuple[Example, ...], list[Request]]:
    """The examples with the history of their conversations, and the point's requests for them.

    folder: of the sweep, where histories are kept.
    """
    examples = with_history(
        point.examples,
        point.vanilla,
        point.setting,
        point.decoding.max_new_tokens,
        folder / "history",
    )
    return examples, requests_of(point, examples)


def requests_of(point: Point, examples: Iterable[Example]) -> list[Request]:
    """These examples as the point decodes them."""
    decoder, limit = point.decoders[METHOD], point.decoding.max_new_tokens
    prompts = [example.prompt for example in examples]
    return decoder.requests(prompts, limit, point.sampling, point.seed)


def with_history(
    examples: tuple[Example, ...],
    vanilla: Decoder,
    setting: dict[str, Any],
    max_new_tokens: int,
    folder: Path,
) -> tuple[Example, ...]:
    """The examples with complete prompts: later turns continue the greedy answers of `vanilla`.

    The answers are made once, before timing starts, and stored in `folder` under a hash of
    everything that determines them. All points of a sweep share them: if two policies decode a
    token differently, no prompt changes. Raises UserError for a stored file that cannot be read.
    """
    if not any(example.continues for example in examples):
        return examples
    inputs = {key: setting[key] for key in ANSWER_KEYS if key in setting}
    own_code = parts_code_hash(resolved_policy(compose_policy("vanilla"))["decoder"])
    name = content_hash({**inputs, "own_code": own_code, "max_new_tokens": max_new_tokens})
    file = folder / f"{name}.json"
    if not file.is_file():
        answers = greedy_history(examples, vanilla, max_new_tokens, setting["max_source_tokens"])
        write_json(file, {"target": setting["target"], "answers": answers})
    try:
        answers = json.loads(file.read_text(encoding="utf-8"))["answers"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot read the conversations' history in {file}: {error}; remove this file"
        ) from error
    return with_answers(examples, answers)


def greedy_history(
    examples: Sequence[Example],
    vanilla: Decoder,
    max_new_tokens: int,
    max_source_tokens: int | None = None,
) -> dict[str, str]:
    """The decoder's greedy answer to every turn that a later turn continues, by the turn's id, as
    the target's chat template keeps it where that writes the prompts.

    All conversations decode a turn at once, as each continues its own earlier turns only.
    max_source_tokens: prompts are cut to so many tokens, as those of the measured turns are.
    """
    continued_ids = {example.continues.id for example in examples if example.continues}
    complete: dict[str, Example] = {}  # by id, with the history in the prompt
    answers: dict[str, str] = {}
    checkpoint = vanilla.target.checkpoint
    for turn in sorted({example.turn for example in examples}):
        for example in examples:
            if example.turn == turn:
                complete[example.id] = with_earlier_turns(example, complete, answers)
        ids = [
            example.id
            for example in examples
            if example.turn == turn and example.id in continued_ids
        ]
        if not ids:
            continue
        generations = vanilla.generate(
            [complete[example_id].prompt for example_id in ids],
            max_new_tokens,
            max_source_tokens=max_source_tokens,
            batch=None,
        )
        for example_id, generation in zip(ids, generations, strict=True):
            answer = generation.text.strip()
            if isinstance(complete[example_id].prompt, CompleteText):  # in its own chat template
                answer = answer_in_history(
                    checkpoint.tokenizer, checkpoint.path, answer, vanilla.chat
                )
            answers[example_id] = answer
    return answers
