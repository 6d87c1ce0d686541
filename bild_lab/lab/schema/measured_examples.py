"""What is stored of every example: the lines of `examples.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError

EXAMPLES = "examples.jsonl"
_ALWAYS = ("id", "prediction", "token_ids", "latency_s", "rounds")  # the keys of every line; others may be absent

Span = tuple[str, float, float]  # a stage, its start and its end, in seconds since the decoding began


@dataclass(frozen=True, kw_only=True)
class MeasuredRound:
    """One draft and its verification.

    drafted: token ids. accepted: how many of them stand. next_token: the target's own after them; None where the
    draft was not verified. statistics: the method's own numbers, by name, such as the drafter's "confidence" and the
    target's "distance" of each drafted token. In the file they are keys beside the others.
    """

    drafted: Sequence[int]
    accepted: int
    next_token: int | None
    fallback: bool = False
    draft_calls: int = 0
    statistics: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The round's object in `examples.jsonl`."""
        return {
            "drafted": list(self.drafted),
            "accepted": self.accepted,
            "fallback": self.fallback,
            "draft_calls": self.draft_calls,
            "next_token": self.next_token,
            **self.statistics,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MeasuredRound:
        """The inverse of `to_json`: a key that is no field's is a statistic. Raises TypeError where one is missing."""
        names = ("drafted", "accepted", "next_token", "fallback", "draft_calls")
        own = {name: content[name] for name in names if name in content}
        return cls(**own, statistics={name: value for name, value in content.items() if name not in own})


@dataclass(frozen=True, kw_only=True)
class MeasuredExample:
    """What method and baseline did with one example.

    turn: of its conversation, from 1. latency_s: of each repeat. The baseline's are None where none was timed.
    certificate: the comparison with the target's own text, where `measure.certify` asked for it. The last three
    belong to traced examples alone. spans: every stage in turn. pieces: the text of each token, by its id.
    """

    id: str
    category: str | None = None
    turn: int = 1
    prediction: str
    token_ids: Sequence[int]
    latency_s: Sequence[float]
    rounds: Sequence[MeasuredRound] = ()
    baseline_prediction: str | None = None
    baseline_token_ids: Sequence[int] | None = None
    baseline_latency_s: Sequence[float] | None = None
    certificate: Mapping[str, Any] | None = None
    spans: Sequence[Span] = ()
    prompt: str | None = None
    pieces: Mapping[str, str] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What names it within a dataset."""
        return self.id, self.turn

    def to_json(self) -> dict[str, Any]:
        """Its line of the file, without what it does not have."""
        line = {**vars(self), "rounds": [one.to_json() for one in self.rounds]}
        left_out = {name for name, value in line.items() if name not in _ALWAYS and (value is None or value == ())}
        return {name: value for name, value in line.items() if name not in left_out and (name, value) != ("turn", 1)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MeasuredExample:
        """The inverse of `to_json`. Raises KeyError or TypeError where something is missing."""
        known = {name: value for name, value in content.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, "rounds": [MeasuredRound.from_json(one) for one in content["rounds"]]})


def read_examples(folder: Path | None) -> list[MeasuredExample]:
    """The examples in a point's folder, in order; none where the result has no folder.

    Raises UserError where they cannot be read.
    """
    if folder is None:
        return []
    file = folder / EXAMPLES
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        return [MeasuredExample.from_json(json.loads(line)) for line in lines if line]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read: {error}; measure the point again with resume=false") from error
