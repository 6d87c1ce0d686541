"""Reads the results to compare: those in a sweep's folder, or of one commit in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bild_lab.errors import UserError
from bild_lab.lab.config import typed
from bild_lab.lab.results.records import CONFIG, Sweep
from bild_lab.lab.schema.result import Result

if TYPE_CHECKING:
    from bild_lab.lab.data.examples import Example

Key = tuple[str, int]  # of an example: its id and turn


@dataclass(frozen=True)
class SharedTexts:
    """What A and B may be compared by. references: by example; None if they cannot be read, and `why`.

    keys: the examples whose prompt and references are the same in both; None if all of them are.
    """

    references: dict[Key, tuple[str, ...]] | None
    keys: frozenset[Key] | None = None
    why: str = ""


def read_results(name: str) -> list[Result]:
    """Read `FOLDER`, or `FOLDER@COMMIT` for the points whose commit or code hash starts with COMMIT; oldest first.

    Raises UserError for a folder without finished points, and for a commit without points in it.
    """
    path, at, commit = (name, "", "") if Path(name).expanduser().is_dir() else name.rpartition("@")
    results = Sweep(Path(path if at else name).expanduser()).all_results()
    if not results:
        raise UserError(f"{path or name} has no finished points; give the folder of a sweep, outputs/NAME")
    if not at:
        return results
    chosen = [one for one in results if commit and any(version.startswith(commit) for version in _versions(one))]
    if not chosen:
        known = ", ".join(dict.fromkeys(versions[0] for one in results if (versions := _versions(one))))
        raise UserError(f"{path} has no points of commit {commit!r}; its points are of {known or 'unknown commits'}")
    return chosen


def shared_texts(a: Result, b: Result) -> SharedTexts:
    """The examples that both results decoded, with their references.

    Results hold no references: they are read again from the dataset of the configuration, and checked by its hash.
    Of equal data one side's will do. Raises UserError if the data differ, for example in `dataset.limit`, and one
    side's cannot be read: equal ids may then belong to different texts.
    """
    equal = a.setting.data == b.setting.data or None in (a.setting.data, b.setting.data)
    known, why = [], ""
    for result in (a, b):
        examples, reason = _read_again(result)
        why = why or reason
        if examples is not None:
            known.append({(str(one.id), one.turn): one for one in examples})
        if known and equal:
            return SharedTexts({key: tuple(one.references) for key, one in known[0].items()})
    if equal:
        return SharedTexts(None, why=why)
    if len(known) < 2:
        raise UserError(
            f"A and B have different data, and which examples they share cannot be checked: {why}; "
            "measure one of them again with the dataset keys of the other"
        )
    same = {key: one for key, one in known[0].items() if _text(known[1].get(key)) == _text(one)}
    return SharedTexts({key: tuple(one.references) for key, one in same.items()}, frozenset(same))


def _text(example: Example | None) -> tuple | None:
    """What makes two examples the same."""
    return example and (example.prompt, tuple(example.references), example.continues)


def _read_again(result: Result) -> tuple[Sequence[Example] | None, str]:
    """The examples that a result was measured on; None and the reason if they cannot be had."""
    from bild_lab.lab.data.examples import DatasetSpec, load_examples
    from bild_lab.lab.hashing import data_hash

    try:
        config = OmegaConf.load(result.folder / CONFIG)
        examples = load_examples(typed(DatasetSpec, config.dataset, "dataset"), unanswered=True)
    except (UserError, OSError, TypeError, OmegaConfBaseException) as error:
        return None, str(error)
    if result.setting.data not in (None, data_hash(examples)):
        return None, f"dataset {config.dataset.name} has changed since"
    return examples, ""


def _versions(result: Result) -> list[str]:
    """The commit and the code hash, as far as they are known."""
    return [version for version in (result.environment.git, result.environment.code) if version]
