"""The numbers that the papers print, one YAML of `bild_lab/papers/published` for each figure and table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bild_lab.errors import UserError

FOLDER = Path(__file__).parent / "published"
SCALES = ("paper", "small")

Key = tuple[str, str, str]  # panel, row, quantity


@dataclass(frozen=True)
class Block:
    """One quantity of a table: a value for each row and panel, None if the paper has none.

    tolerance: how far, in the quantity's own unit, a value may be from the paper's to agree with it.
    """

    quantity: str
    tolerance: float
    panels: list[str]
    rows: dict[str, list[float | None]]

    def __post_init__(self) -> None:
        if not _number(self.tolerance) or self.tolerance <= 0:
            raise UserError(f"{self.quantity}: tolerance must be a number > 0, got {self.tolerance!r}")
        for row, values in self.rows.items():
            if len(values) != len(self.panels):
                raise UserError(f"{self.quantity}, {row}: {len(self.panels)} values are wanted, got {len(values)}")
            if wrong := [value for value in values if value is not None and not _number(value)]:
                raise UserError(f"{self.quantity}, {row}: values must be numbers or null, got {wrong[0]!r}")


@dataclass(frozen=True)
class Order:
    """An order that the paper claims: no row has less of the quantity than the next one."""

    claim: str
    quantity: str
    rows: list[str]


@dataclass(frozen=True)
class StandsFor:
    """What a run at small scale is compared with: a panel of the paper, and the paper's names of its rows."""

    panel: str
    rows: dict[str, str]


@dataclass(frozen=True)
class Published:
    """A figure or table of a paper.

    given: which of its numbers the paper's text prints, and what was left out. folders: where in `outputs` its points
    are, by scale. commands: those that produce the points, by scale.
    """

    paper: str
    item: str
    hardware: str
    given: str
    folders: dict[str, list[str]]
    commands: dict[str, list[str]]
    stands_for: StandsFor
    values: list[Block]
    orders: list[Order]

    def __post_init__(self) -> None:
        for what, given in (("folders", self.folders), ("commands", self.commands)):
            if sorted(given) != sorted(SCALES):
                raise UserError(f"{what} must be given for {' and '.join(SCALES)}, got {', '.join(given)}")

    @cached_property
    def printed(self) -> dict[Key, float]:
        """Every number, by panel, row and quantity."""
        return {
            (panel, row, block.quantity): float(value)
            for block in self.values
            for row, values in block.rows.items()
            for panel, value in zip(block.panels, values, strict=True)
            if value is not None
        }

    @cached_property
    def tolerances(self) -> dict[str, float]:
        """The tolerances, by quantity."""
        return {block.quantity: block.tolerance for block in self.values}


def published_names() -> list[str]:
    """Every figure and table there is, in alphabetical order."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load_published(name: str, folder: Path = FOLDER) -> Published:
    """The printed numbers of a figure. Raises UserError for an unknown figure, or a malformed file."""
    file = folder / f"{name}.yaml"
    if not file.is_file():
        raise UserError(f"figure must be one of {', '.join(published_names())}, got {name!r}")
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
        return _build(
            Published,
            content
            | {
                "stands_for": _build(StandsFor, content["stands_for"]),
                "values": [_build(Block, one) for one in content["values"]],
                "orders": [_build(Order, one) for one in content["orders"]],
            },
        )
    except (YAMLError, OmegaConfBaseException, KeyError, TypeError, UserError) as error:
        raise UserError(f"{file} is no record of published numbers: {error}") from error


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(cls)}
    if known != set(values):
        raise UserError(f"{cls.__name__} has the keys {', '.join(sorted(known))}, got {', '.join(sorted(values))}")
    return cls(**values)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
