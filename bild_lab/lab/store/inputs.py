"""What points were measured with, read again: their configuration, the dataset's examples, which two
share, and whether settings are those of what a folder holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bild_lab.errors import UserError
from bild_lab.lab.config.policies import flat_values
from bild_lab.lab.config.schemas import typed
from bild_lab.lab.data.dataset_spec import CHECKPOINT, DatasetSpec, for_model
from bild_lab.lab.data.examples import cached_examples
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.hashing import data_hash
from bild_lab.lab.store.records import CONFIG

Key = tuple[str, int]  # an example's id and turn
POLICY_LINES = re.compile(r"^policy:.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)  # of a point's config


@dataclass(frozen=True)
class SharedTexts:
    """What A and B may be compared by. references: by example; None if they cannot be read, and
    `why`.

    keys: the examples whose prompt and references are the same in both; None if all of them are.
    """

    references: dict[Key, tuple[str, ...]] | None
    keys: frozenset[Key] | None = None
    why: str = ""


def shared_texts(a: Result, b: Result) -> SharedTexts:
    """The examples that both results decoded, with their references.

    Of equal data one side's will do. Raises UserError if the data differ, for example in
    `dataset.limit`, and one side's cannot be read: equal ids may then belong to different texts.
    """
    if a.setting.data == b.setting.data:
        examples, why = examples_of([a, b])
        return SharedTexts(None if examples is None else _references(examples), why=why)
    sides = [examples_of([result]) for result in (a, b)]
    if why := next((why for examples, why in sides if examples is None), ""):
        raise UserError(
            f"A and B have different data, and which examples they share cannot be checked: {why}; "
            "measure one of them again with the dataset keys of the other"
        )
    (examples_a, _), (examples_b, _) = sides
    same = {
        key: example
        for key, example in examples_a.items()
        if key in examples_b and _text(examples_b[key]) == _text(example)
    }
    return SharedTexts(_references(same), frozenset(same))


def _references(examples: Mapping[Key, Example]) -> dict[Key, tuple[str, ...]]:
    return {key: tuple(example.references) for key, example in examples.items()}


def _text(example: Example) -> tuple[Any, ...]:
    """What makes two examples the same: what the hash of the data is over."""
    return example.prompt, tuple(example.references), example.continues


def stored_config(result: Result) -> dict[str, Any]:
    """The configuration that a point was measured with. Raises UserError if it cannot be read."""
    file = result.folder / CONFIG
    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"{file} cannot be read: {error}; measure the point again with resume=false"
        ) from error


def require_same_settings(
    folder: Path,
    what: str,
    stored: Mapping[str, Any],
    current: Mapping[str, Any],
    ignored: Collection[str] = (),
) -> None:
    """Raise UserError, which names the first difference, unless `what` a folder holds was made with
    these settings.

    stored: the settings read back from the folder's JSON. Keys of nested settings are dotted.
    ignored: keys that decide nothing, such as the path of data that has a hash.
    """
    # lists for tuples, as JSON has them
    stored_values, now = flat_values(dict(stored)), flat_values(json.loads(json.dumps(current)))
    for key in dict.fromkeys([*now, *stored_values]):
        if key not in ignored and stored_values.get(key) != now.get(key):
            raise UserError(
                f"{folder} holds {what} with {key}={stored_values.get(key)}, but this command has"
                f" {key}={now.get(key)}; choose another name=NAME, or remove the folder"
            )


def examples_of(results: Sequence[Result]) -> tuple[dict[tuple[str, int], Example] | None, str]:
    """The dataset's examples by id and turn, from the first of these results whose dataset can be
    read as it was.

    Results hold no references, and few prompts: they are read again from the dataset of the
    configuration. If that fails, returns None and the reason. Of points that differ in their policy
    alone, as most of a sweep do, one is tried: the others have the same dataset.
    """
    # late: torch takes seconds to load
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
    from bild_lab.engine.models.checkpoint.gguf_file import recognized

    why, tried = "", set()
    for result in results:
        try:
            file = result.folder / CONFIG
            inputs = (
                result.setting.data,
                re.sub(POLICY_LINES, "", file.read_text(encoding="utf-8")),
            )
            if inputs in tried:
                continue
            tried.add(inputs)
            config = OmegaConf.load(file)
            dataset = typed(DatasetSpec, config.dataset, "dataset")
            if dataset.chat_template == (CHECKPOINT,):
                target = recognized(Checkpoint(config.pair.target, config.pair.target_revision))
                dataset = for_model(dataset, target)
            examples = cached_examples(dataset)
        except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
            why = why or str(error)
            continue
        if result.setting.data == data_hash(examples):
            return {(str(example.id), example.turn): example for example in examples}, ""
        why = why or f"dataset {config.dataset.name} has changed since"
    return None, why
