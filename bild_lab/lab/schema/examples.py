"""The stored data of every example: the lines of `examples.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError

EXAMPLES = "examples.jsonl"
# the keys of every line; others may be absent
_ALWAYS = ("id", "prediction", "token_ids", "latency_s", "rounds")

Span = tuple[str, float, float]  # a stage, its start and its end, in seconds since decoding began


@dataclass(frozen=True, kw_only=True)
class MeasuredRound:
    """One draft and its verification.

    drafted: token ids. accepted: how many of them were accepted. next_token: the target's own token
    after them; None if the draft was not verified. statistics: numbers specific to the method, by
    name, such as the drafter's "confidence" and the target's "distance" of each drafted token. In
    the file they are keys like the others.
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
        """The inverse of `to_json`: a key that is not a field is a statistic.

        Raises TypeError for a missing field.
        """
        names = ("drafted", "accepted", "next_token", "fallback", "draft_calls")
        fields = {name: content[name] for name in names if name in content}
        return cls(
            **fields,
            statistics={name: value for name, value in content.items() if name not in fields},
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredExample:
    """The outputs and timings of method and baseline for one example.

    turn: of its conversation, from 1. same_source: the id of the first example whose source it has
    too; None: no earlier one has it. latency_s: seconds of each repeat. The baseline's fields are
    None if none was timed. certificate: the comparison with the target's own text, with
    `measure.certify`. Only traced examples have the last three fields. spans: every stage in order.
    pieces: the text of each token, by its id. scores: of the metrics that are means over examples,
    by their names in the configuration. log_probability: the target's of the whole text, in nats.
    reports: what another engine reported in each repeat (`EngineReport`), with the seconds of pieces.
    """

    id: str
    category: str | None = None
    turn: int = 1
    same_source: str | None = None
    prediction: str
    token_ids: Sequence[int]
    latency_s: Sequence[float]
    rounds: Sequence[MeasuredRound] = ()
    baseline_prediction: str | None = None
    baseline_token_ids: Sequence[int] | None = None
    baseline_latency_s: Sequence[float] | None = None
    certificate: Mapping[str, Any] | None = None
    scores: Mapping[str, float] | None = None
    log_probability: float | None = None
    baseline_log_probability: float | None = None
    reports: Sequence[Mapping[str, Any]] = ()
    baseline_reports: Sequence[Mapping[str, Any]] = ()
    spans: Sequence[Span] = ()
    prompt: str | None = None
    pieces: Mapping[str, str] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Its identity within a dataset."""
        return self.id, self.turn

    @property
    def failed(self) -> bool:
        """Whether another engine gave no text in one of the repeats, to the method or to the
        baseline. Its seconds say nothing.
        """
        reports = (*self.reports, *self.baseline_reports)
        return any(report.get("error") is not None for report in reports)

    def to_json(self) -> dict[str, Any]:
        """Its line of the file, without absent fields."""
        line = {
            **vars(self),
            "rounds": [measured_round.to_json() for measured_round in self.rounds],
        }
        left_out = {
            name
            for name, value in line.items()
            if name not in _ALWAYS and (value is None or value == ())
        }
        return {
            name: value
            for name, value in line.items()
            if name not in left_out and (name, value) != ("turn", 1)
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MeasuredExample:
        """The inverse of `to_json`. Raises KeyError or TypeError if something is missing."""
        known_fields = {
            name: value for name, value in content.items() if name in cls.__dataclass_fields__
        }
        return cls(
            **{
                **known_fields,
                "rounds": [
                    MeasuredRound.from_json(round_content) for round_content in content["rounds"]
                ],
            }
        )


def read_examples(folder: Path | None) -> list[MeasuredExample]:
    """The examples in a point's folder, in order; none if the result has no folder.

    Raises UserError if they cannot be read.
    """
    if folder is None:
        return []
    file = folder / EXAMPLES
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        return [MeasuredExample.from_json(json.loads(line)) for line in lines if line]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(file, error) from error


def read_certificates(folder: Path | None) -> list[Mapping[str, Any]]:
    """The certificates in a point's folder, as `MeasuredExample` has them, of those texts that have
    one.

    A fifth of the time of `read_examples`, and little memory: reports read those of every point.
    Raises UserError as it does.
    """
    if folder is None:
        return []
    file = folder / EXAMPLES
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        certificates = [json.loads(line).get("certificate") for line in lines if line]
    except (OSError, ValueError, AttributeError) as error:
        raise _unreadable(file, error) from error
    return [certificate for certificate in certificates if certificate is not None]


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(f"{file} cannot be read: {error}; measure the point again with resume=false")
