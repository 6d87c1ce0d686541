"""Decoding over a record, and whether a text so decoded differs from the live one by rounding
alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.models.device import dtype_name
from bild_lab.engine.request import Request, Source
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import (
    ALL_LOGITS,
    DEFAULT_OPTIONS,
    LoadedModel,
    OutputSpec,
    Rows,
    Scores,
    Session,
    SessionOptions,
)
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.certificate import DEFECT, TIE, most_noise
from bild_lab.lab.measure.recorder import relative_difference
from bild_lab.lab.point.decoder import Decoder
from bild_lab.lab.store.code import code_hash
from bild_lab.lab.store.hashing import content_hash
from bild_lab.screening.candidates import Candidate
from bild_lab.screening.cost_model import features_of
from bild_lab.screening.record_store import RecordStore
from bild_lab.screening.recorded_model import RecordedModel

FOLDER = "record"  # its name in the folder of a sweep


def versions() -> dict[str, str]:
    """The versions of the code that scores and records."""
    return {
        "code": code_hash((RecordedModel.__module__,)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass
class Records:
    """The records of all models of a pair, by what their rows depend on.

    folder: outputs/NAME/record. memory_bytes: of each model's rows in memory. disk_bytes: of each
    model's rows on disk; a text that comes when they are reached is decoded and its rows are
    dropped.
    """

    folder: Path
    memory_bytes: float
    versions: Mapping[str, str] = field(default_factory=versions)
    models: dict[int, RecordedModel] = field(default_factory=dict)
    disk_bytes: float = inf

    def __call__(self, model: LoadedModel) -> RecordedModel:
        """The model with its record, one for each model."""
        if id(model) not in self.models:
            self.models[id(model)] = RecordedModel(model, self._store(model), self.memory_bytes)
        return self.models[id(model)]

    def save(self) -> None:
        for model in self.models.values():
            model.save()

    def has_dropped(self, source: Source) -> bool:
        """Whether a model's rows of this source were recorded, and not saved."""
        return any(model.has_dropped(source) for model in self.models.values())

    @property
    def bytes(self) -> int:
        """The size of all rows."""
        return sum(model.store.bytes for model in self.models.values())

    def _store(self, model: LoadedModel) -> RecordStore:
        key = self.key_of(model)
        folder = self.folder / f"{Path(model.checkpoint.path).name}-{content_hash(key)}"
        return RecordStore(folder, key, self.disk_bytes)

    def key_of(self, model: LoadedModel) -> dict[str, Any]:
        """What a model's rows depend on."""
        return {
            "weights": model.checkpoint.fingerprint,
            "precision": dtype_name(model.dtype),
            **({} if model.bits is None else {"bits": model.bits}),
            "engine": model.engine,
            "compiled": model.compiled,
            "device": model.device.type,
            **self.versions,
        }


@dataclass(frozen=True)
class ReplayedText:
    """What a point decoded of one example. features: for the cost model."""

    token_ids: tuple[int, ...]
    counts: Counter[str]
    features: dict[str, float]


@dataclass
class ReplayedPoint:
    """A point's texts, in the order of the examples."""

    candidate: Candidate
    texts: list[ReplayedText] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Over all texts."""
        return sum((text.counts for text in self.texts), Counter())

    @property
    def features(self) -> Counter[str]:
        return sum((Counter(text.features) for text in self.texts), Counter())


def replay_text(policy: str, decoder: Decoder, request: Request) -> ReplayedText:
    """One example over the record."""
    trace = Trace()
    try:
        tokens = decoder.method.decode(request, trace)[request.limits.prompt_length :]
    except UserError as error:
        raise UserError(f"policy {policy}: {error}") from error
    names = {
        id(model.checkpoint.config): f"drafter {place}"
        for place, model in enumerate(decoder.models)
    }
    names[id(decoder.target.checkpoint.config)] = "target"
    features = features_of(policy, trace, names, decoder.target.depth)
    counts = Counter(
        tokens=len(tokens),
        target_calls=trace.target_calls,
        draft_calls=trace.draft_calls,
        drafted=trace.drafted,
        accepted=trace.accepted,
        judged=trace.accepted
        + sum(decoding_round.accepted < decoding_round.depth for decoding_round in trace.rounds),
        fallbacks=trace.fallbacks,
        rollbacks=trace.rollbacks,
    )
    return ReplayedText(tuple(tokens), counts, features)


Wrap = Callable[[LoadedModel], LoadedModel]


@dataclass(frozen=True)
class ReplayVerdict:
    """The verdict on a replayed text that differs from the live one.

    largest: of the differences between rows that the replay was given and the model's own for the
    same calls, relative to the largest score; inf if decoding once more gave yet another text.
    """

    verdict: str
    largest: float


def judge_replay(
    decoder_over: Callable[[Wrap], Decoder], records: Wrap, request: Request, tokens: Sequence[int]
) -> ReplayVerdict:
    """Decode a replayed text again with the models themselves beside the record.

    A policy is the same program over both, so a difference is a tie if no row that it was given is
    further from the model's own than rounding explains: then a choice or a threshold lay within the
    rounding. Otherwise the record or its sessions have a defect.

    decoder_over: gives the policy's decoder over wrapped models. records: gives a model with its
    record.
    """
    compared: dict[int, ComparedModel] = {}
    decoder = decoder_over(
        lambda model: compared.setdefault(id(model), ComparedModel(records(model)))
    )
    replayed_again = decoder.method.decode(request, Trace())[request.limits.prompt_length :]
    largest = max(model.largest for model in compared.values())
    if list(replayed_again) != list(tokens):
        return ReplayVerdict(DEFECT, float("inf"))
    rounding = all(model.largest <= most_noise(model) for model in compared.values())
    return ReplayVerdict(TIE if rounding else DEFECT, largest)


class ComparedModel:
    """A recorded model whose sessions run the model itself beside. largest: of a row so far."""

    def __init__(self, recorded: RecordedModel) -> None:
        self.recorded, self.largest = recorded, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorded, name)

    def start(
        self, source: Any, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> ComparedSession:
        recorded_target = live_target = session_options.target
        if isinstance(recorded_target, ComparedSession):
            recorded_target, live_target = recorded_target.recorded, recorded_target.live
        recorded_options = replace(session_options, target=recorded_target)
        live_options = replace(session_options, forwards=None, target=live_target)
        return ComparedSession(
            self,
            self.recorded.start(source, room, recorded_options),
            self.recorded.model.start(source, room, live_options),
        )


class ComparedSession:
    """Passes every call to a recorded session and to the model's own, and answers as the recorded
    one does.
    """

    def __init__(self, model: ComparedModel, recorded: Session, live: Session) -> None:
        self._model, self.recorded, self.live = model, recorded, live
        self.forwards = recorded.forwards

    @property
    def length(self) -> int:
        return self.recorded.length

    def extend(
        self, rows: Rows | Sequence[int] | Int[Tensor, " m"], output_spec: OutputSpec = ALL_LOGITS
    ) -> Scores:
        output_spec = replace(output_spec, vocabulary=None)  # whole rows are compared
        recorded = self.recorded.extend(rows, output_spec)
        live = self.live.extend(rows, output_spec)
        self._compare(recorded.logits, live.logits)
        self._compare(recorded.head_input, live.head_input)
        return recorded

    def _compare(self, recorded: Tensor | None, live: Tensor | None) -> None:
        if recorded is not None:
            distance = relative_difference(precise(recorded), precise(live))
            self._model.largest = max(self._model.largest, distance)

    def draft(self, rows: Sequence[int], spec: Any) -> None:
        """Row by row, so that each can be compared."""

    def keep(self, path: Sequence[int]) -> None:
        self.recorded.keep(path)
        self.live.keep(path)

    def rollback(self, length: int) -> None:
        self.recorded.rollback(length)
        self.live.rollback(length)

    def prefill(self) -> None:
        self.recorded.prefill()
        self.live.prefill()
