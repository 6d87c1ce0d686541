"""One side of a comparison: a sweep's folder, or what of it one commit measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bild_lab.errors import UserError
from bild_lab.lab.config import typed
from bild_lab.lab.results.records import Measurement, Sweep


@dataclass(frozen=True)
class Side:
    """The measurements that one side of a comparison consists of, oldest first. name: as the user gave it."""

    name: str
    measurements: list[Measurement]

    @property
    def results(self) -> list[dict[str, Any]]:
        """Each result with its `folder`, the path that its examples lie in."""
        return [{**one.result, "folder": str(one.folder)} for one in self.measurements]


def read_side(name: str) -> Side:
    """Read `FOLDER`, or `FOLDER@COMMIT` for the points whose commit (or code hash) begins so.

    Raises UserError for a folder without finished points, and a commit that measured none of them.
    """
    path, at, commit = (name, "", "") if Path(name).expanduser().is_dir() else name.rpartition("@")
    measurements = Sweep(Path(path if at else name).expanduser()).measurements()
    if not measurements:
        raise UserError(f"{path or name} has no finished points; give the folder of a sweep, outputs/NAME")
    if not at:
        return Side(name, measurements)
    chosen = [one for one in measurements if commit and any(told.startswith(commit) for told in _commits(one.result))]
    if not chosen:
        known = ", ".join(dict.fromkeys(commits[0] for one in measurements if (commits := _commits(one.result))))
        raise UserError(f"{path} has no points of commit {commit!r}; its points are of {known or 'unknown commits'}")
    return Side(name, chosen)


def stored_examples(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The examples that lie beside a side's result."""
    text = (Path(result["folder"]) / "examples.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def references_of(results: Sequence[Mapping[str, Any]]) -> tuple[dict[tuple[str, int], tuple[str, ...]] | None, str]:
    """The references by example, from the first of these results whose dataset can be read and is still the same.

    Results hold no references: their configuration says where they are. Returns None and why where none can be read.
    """
    from bild_lab.lab.data.examples import DatasetSpec, load_examples
    from bild_lab.lab.hashing import data_hash

    why = ""
    for result in results:
        try:
            config = OmegaConf.load(Path(result["folder"]) / "config.yaml")
            examples = load_examples(typed(DatasetSpec, config.dataset, "dataset"), unanswered=True)
        except (UserError, OSError, TypeError, OmegaConfBaseException) as error:
            why = why or str(error)
            continue
        if result["setting"].get("data") in (None, data_hash(examples)):
            return {(str(one.id), one.turn): tuple(one.references) for one in examples}, ""
        why = why or f"dataset {config.dataset.name} has changed since"
    return None, why


def _commits(result: Mapping[str, Any]) -> list[str]:
    return [str(told) for key in ("git", "code") if (told := result["environment"].get(key))]
