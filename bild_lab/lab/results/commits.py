"""Reads the results to compare: those in a sweep's folder, or of one commit in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bild_lab.errors import UserError
from bild_lab.lab.config import typed
from bild_lab.lab.data.examples import DatasetSpec, Example, load_examples
from bild_lab.lab.hashing import data_hash
from bild_lab.lab.results.records import CONFIG, Sweep
from bild_lab.lab.schema.result import Result


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


def references_of(results: Sequence[Result]) -> tuple[dict[tuple[str, int], tuple[str, ...]] | None, str]:
    """The references by example, as `examples_of` finds them, or None and the reason."""
    known, why = examples_of(results)
    return None if known is None else {key: tuple(one.references) for key, one in known.items()}, why


def examples_of(results: Sequence[Result]) -> tuple[dict[tuple[str, int], Example] | None, str]:
    """The dataset's examples by id and turn, from the first of these results whose dataset can be read as it was.

    Results hold no references, and few prompts: they are read again from the dataset of the configuration. If that
    fails, returns None and the reason.
    """
    why = ""
    for result in results:
        try:
            config = OmegaConf.load(result.folder / CONFIG)
            examples = _examples(typed(DatasetSpec, config.dataset, "dataset"))
        except (UserError, OSError, TypeError, OmegaConfBaseException) as error:
            why = why or str(error)
            continue
        if result.setting.data in (None, data_hash(examples)):
            return {(str(one.id), one.turn): one for one in examples}, ""
        why = why or f"dataset {config.dataset.name} has changed since"
    return None, why


@lru_cache(maxsize=4)
def _examples(spec: DatasetSpec) -> tuple[Example, ...]:
    """Read once for all points of a sweep."""
    return load_examples(spec, unanswered=True)


def _versions(result: Result) -> list[str]:
    """The commit and the code hash, as far as they are known."""
    return [version for version in (result.environment.git, result.environment.code) if version]
