"""The conditions of a measurement: setting and environment, two mappings with arbitrary keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

BUSY_PERCENT = 10  # of all cores' time; more than this used by others changes the timings


@dataclass(frozen=True, eq=False)
class Record(Mapping[str, Any]):
    """A mapping with arbitrary keys. Keys that the code reads are also properties."""

    entries: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


LACKING = {"batch": 1}  # keys that a setting may lack, and their values then


class Setting(Record):
    """Everything that two points must share to be compared. Older results lack some keys."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, LACKING.get(key, default))

    @property
    def target(self) -> str:
        return self["target"]

    @property
    def draft(self) -> str | None:
        return self.get("draft")

    @property
    def dataset(self) -> str:
        return self["dataset"]

    @property
    def split(self) -> str:
        return self["split"]

    @property
    def n_examples(self) -> int:
        return self["n_examples"]

    @property
    def metric(self) -> str:
        """The metric's name in the configuration, such as "bleu"."""
        return self["metric"]

    @property
    def data(self) -> str | None:
        """A hash of the examples."""
        return self.get("data")

    @property
    def dtype(self) -> str:
        return self["dtype"]

    @property
    def device(self) -> str:
        return self["device"]

    @property
    def batch(self) -> int:
        """How many texts decoded at once."""
        return self.get("batch")

    @property
    def hardware(self) -> str | None:
        """The processors that timings depend on."""
        return self.get("hardware")

    @property
    def baseline(self) -> str | None:
        """The policy that the point was timed against."""
        return self["baseline"]

    @property
    def temperature(self) -> float:
        """0 for greedy decoding."""
        return self["decoding"]["temperature"]


class Environment(Record):
    """The environment of a point's measurement: versions, hardware, other load."""

    @property
    def git(self) -> str | None:
        """The commit, with a + if there were uncommitted changes."""
        return self.get("git")

    @property
    def code(self) -> str | None:
        """A hash of the code that can change a number."""
        return self.get("code")

    @property
    def cpu(self) -> str | None:
        return self.get("cpu")

    @property
    def gpu(self) -> str | None:
        return self.get("gpu")

    @property
    def started(self) -> str:
        """ISO date and time."""
        return self.get("started", "")

    @property
    def shared_device(self) -> bool | None:
        """Whether another process of bild_lab used the device at the same time."""
        return self.get("shared_device")

    @property
    def busy_elsewhere_percent(self) -> float | None:
        """Percent of all cores' time that other processes used while the point was timed; None in older results."""
        return self.get("busy_elsewhere_percent")

    @property
    def side_by_side(self) -> int | None:
        """How many points were timed together, text by text in turn; None for one by itself."""
        return self.get("side_by_side")

    @property
    def busy(self) -> bool:
        """Whether other processes used more than `BUSY_PERCENT` of the machine while the point was timed."""
        return (self.busy_elsewhere_percent or 0.0) > BUSY_PERCENT
