"""The seconds of decoding on a declared machine: a roofline over the forwards that ran (BiLD §7.3.1, Figure 8).

A forward takes as long as its memory traffic or its operations, whichever is longer, at the machine's declared figures.
So rows are free as long as weights and cache take longer to read than the rows to multiply. Counts and traffic are
those of `cost.py`. With peak figures the seconds are what no implementation can beat, not what one will reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.config import config_dir, typed
from bild_lab.lab.schema.numbers import ForwardKind, Work

FOLDER = "machine"  # in conf


@dataclass(frozen=True)
class Machine:
    """A machine's declared figures.

    name: what tables call it. bytes_per_s: of memory. flops_per_s: by precision. forward_s, round_s: seconds that every
    forward and every round take besides.
    """

    name: str
    bytes_per_s: float
    flops_per_s: dict[str, float]
    forward_s: float = 0.0
    round_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.flops_per_s, Mapping):
            raise UserError(f"machine.flops_per_s must be numbers by precision, got {self.flops_per_s!r}")
        rates = {"bytes_per_s": self.bytes_per_s, **{f"flops_per_s.{one}": n for one, n in self.flops_per_s.items()}}
        for key, value in rates.items():
            _require_number(f"machine.{key}", value, 0.0, exclusive=True)
        for key in ("forward_s", "round_s"):
            _require_number(f"machine.{key}", getattr(self, key), 0.0)

    def seconds(self, kinds: Iterable[ForwardKind], rounds: int, dtype: str) -> float:
        """Of these forwards and rounds. Raises UserError for a precision whose speed is not declared."""
        if dtype not in self.flops_per_s:
            raise UserError(
                f"{self.name} declares the operations of {', '.join(self.flops_per_s)}, got {dtype}; "
                f"add machine.flops_per_s.{dtype} to its file"
            )
        peak = self.flops_per_s[dtype]
        # forwards of a kind differ in their context alone, and as good as never cross from one limit to the other
        busy = (max(one.bytes_moved / self.bytes_per_s, one.flops / peak) + one.count * self.forward_s for one in kinds)
        return sum(busy) + rounds * self.round_s

    def speedup(self, work: Work, dtype: str) -> float | None:
        """Of a method over its baseline; None without one."""
        if not work.baseline:
            return None
        alone = self.seconds(work.baseline, work.baseline_rounds, dtype)
        return alone / self.seconds(work.method, work.rounds, dtype)


def _require_number(key: str, value: object, least: float, exclusive: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value < float("inf") or (exclusive and value == least):
        raise UserError(f"{key} must be a number {'>' if exclusive else '>='} {least:g}, got {value!r}")


def read_machine(name: str) -> Machine:
    """The machine of a file, or of a file of conf/machine by its name. Raises UserError for anything else."""
    shipped = config_dir() / FOLDER / f"{name}.yaml"
    file = shipped if shipped.is_file() else Path(name).expanduser()
    if not file.is_file():
        known = ", ".join(sorted(one.stem for one in (config_dir() / FOLDER).glob("*.yaml")))
        raise UserError(f"machine must be one of {known}, or a YAML file with such keys, got {name!r}")
    return typed(Machine, OmegaConf.load(file), "machine")
