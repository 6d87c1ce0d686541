"""The history of later turns: the target's own answers to the earlier turns, the same for method and baseline.

The answers are made before timing starts, and all points of a sweep share them. So if two policies decode a token
differently, the prompts of later turns do not change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.data.examples import Example, with_answers, with_earlier_turns
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.hashing import content_hash

# the keys of a point's setting that determine the target's own greedy answers
DECIDING = (
    *("weights", "data", "engine", "dtype", "compile", "device", "hardware", "code", "max_source_tokens"),
    *("processors", "source_language", "target_language"),
)


def with_history(
    examples: tuple[Example, ...], vanilla: Decoder, setting: dict[str, Any], max_new_tokens: int, folder: Path
) -> tuple[Example, ...]:
    """The examples with complete prompts: later turns continue the greedy answers of `vanilla`.

    The answers are made once and stored in `folder`, under a hash of everything that determines them.
    """
    if not any(example.continues for example in examples):
        return examples
    deciding = {name: setting[name] for name in (*DECIDING, "weight_bits") if name in setting}
    key = content_hash({**deciding, "max_new_tokens": max_new_tokens})
    file = folder / f"{key}.json"
    if not file.is_file():
        answers = greedy_history(examples, vanilla, max_new_tokens, setting["max_source_tokens"])
        content = json.dumps({"target": setting["target"], "answers": answers}, indent=2, ensure_ascii=False)
        write_atomically(file, content.encode() + b"\n")
    try:
        answers = json.loads(file.read_text())["answers"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the conversations' history in {file}: {error}; remove this file") from error
    return with_answers(examples, answers)


def greedy_history(
    examples: Sequence[Example], vanilla: Decoder, max_new_tokens: int, max_source_tokens: int | None = None
) -> dict[str, str]:
    """The decoder's greedy answer to every turn that a later turn continues, by the turn's id.

    max_source_tokens: prompts are cut to so many tokens, as those of the measured turns are.
    """
    wanted = {example.continues.id for example in examples if example.continues}
    whole: dict[str, Example] = {}
    answers: dict[str, str] = {}
    turns = sorted({example.turn for example in examples})
    for turn in turns:  # of all conversations at once, as each continues its own earlier turns only
        these = [example for example in examples if example.turn == turn]
        whole |= {example.id: with_earlier_turns(example, whole, answers) for example in these}
        asked = [example.id for example in these if example.id in wanted]
        if not asked:
            continue
        prompts = [whole[each].prompt for each in asked]
        found = vanilla.generate(prompts, max_new_tokens, max_source_tokens=max_source_tokens, batch=None)
        answers |= {each: answer.text.strip() for each, answer in zip(asked, found, strict=True)}
    return answers
