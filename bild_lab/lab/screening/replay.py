"""Decoding over a record, and whether a text so decoded differs from the live one by rounding alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.record import RecordedModel, Store
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import ALONE, EVERYTHING, LoadedModel, Opening, Rows, Scores, Session, Want
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.analysis.cost import Machine, kinds_of
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.hashing import code_hash, content_hash
from bild_lab.lab.measure.certificate import DEFECT, TIE, most_noise
from bild_lab.lab.measure.cost_model import features_of
from bild_lab.lab.measure.recorder import difference
from bild_lab.lab.screening.candidates import Candidate

FOLDER = "record"  # in the folder of a sweep
SECONDS = "seconds of a declared machine"


@dataclass
class Records:
    """The records of all models of a pair, by what their rows depend on.

    folder: outputs/NAME/record. memory_bytes: of each model's rows that stay in memory once they are on disk.
    """

    folder: Path
    memory_bytes: float
    versions: Mapping[str, str]
    models: dict[int, RecordedModel] = field(default_factory=dict)

    def __call__(self, model: LoadedModel) -> RecordedModel:
        """The model with its record. The same model has one."""
        if id(model) not in self.models:
            self.models[id(model)] = RecordedModel(model, self._store(model), self.memory_bytes)
        return self.models[id(model)]

    def save(self) -> None:
        for model in self.models.values():
            model.save()

    @property
    def bytes(self) -> int:
        """The size of all rows."""
        return sum(model.store.bytes for model in self.models.values())

    def _store(self, model: LoadedModel) -> Store:
        key = {
            "weights": model.checkpoint.fingerprint,
            "precision": str(model.dtype).removeprefix("torch."),
            **({} if model.bits is None else {"bits": model.bits}),
            "engine": model.engine,
            "compiled": model.compiled,
            "device": model.device.type,
            **self.versions,
        }
        return Store(self.folder / f"{Path(model.checkpoint.path).name}-{content_hash(key)}", key)


def versions() -> dict[str, str]:
    """Of the code that scores."""
    import transformers

    return {"code": code_hash(), "torch": torch.__version__, "transformers": transformers.__version__}


@dataclass(frozen=True)
class Text:
    """What a point decoded of one example. features: for the cost model."""

    token_ids: tuple[int, ...]
    counts: Counter[str]
    features: dict[str, float]


@dataclass
class Screened:
    """A point's texts, in the order of the examples."""

    candidate: Candidate
    texts: list[Text] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Over all texts."""
        return sum((one.counts for one in self.texts), Counter())

    @property
    def features(self) -> Counter[str]:
        return sum((Counter(one.features) for one in self.texts), Counter())


def decoded(policy: str, decoder: Decoder, request: Request, machine: Machine | None = None) -> Text:
    """One example over the record. machine: whose seconds the features hold too, under SECONDS."""
    trace = Trace()
    try:
        tokens = decoder.method.decode(request, trace)[request.limits.prompt_length :]
    except UserError as error:
        raise UserError(f"policy {policy}: {error}") from error
    names = {id(model.checkpoint.config): f"drafter {place}" for place, model in enumerate(decoder.models)}
    names[id(decoder.target.checkpoint.config)] = "target"
    features = features_of(policy, trace, names, decoder.target.depth)
    if machine is not None:
        kinds = kinds_of(trace.forwards, decoder.target.dtype.itemsize)
        dtype = str(decoder.target.dtype).removeprefix("torch.")
        features[SECONDS] = machine.seconds(kinds, len(trace.rounds), dtype)
    return Text(tuple(tokens), counts_of(trace, len(tokens)), features)


def counts_of(trace: Trace, tokens: int) -> Counter[str]:
    rounds = trace.rounds
    return Counter(
        tokens=tokens,
        target_calls=trace.target_calls,
        draft_calls=trace.draft_calls,
        drafted=trace.drafted,
        accepted=trace.accepted,
        judged=trace.accepted + sum(one.accepted < one.depth for one in rounds),
        fallbacks=trace.fallbacks,
        rollbacks=trace.rollbacks,
    )


Wrap = Callable[[LoadedModel], LoadedModel]


@dataclass(frozen=True)
class Judged:
    """The verdict on a replayed text that differs from the live one.

    largest: of the differences between rows that the replay was given and the model's own for the same calls, relative
    to the largest score; inf if decoding once more gave yet another text.
    """

    verdict: str
    largest: float


def judge(decoder_over: Callable[[Wrap], Decoder], records: Wrap, request: Request, tokens: Sequence[int]) -> Judged:
    """Decode a replayed text again with the models themselves beside the record.

    A policy is the same program over both, so a difference is a tie if no row that it was given is further from the
    model's own than rounding explains: then a choice or a threshold lay within the rounding. Otherwise the record or
    its sessions have a defect.

    decoder_over: gives the policy's decoder over wrapped models. records: gives a model with its record.
    """
    compared: dict[int, ComparedModel] = {}
    decoder = decoder_over(lambda model: compared.setdefault(id(model), ComparedModel(records(model))))
    again = decoder.method.decode(request, Trace())[request.limits.prompt_length :]
    largest = max(model.largest for model in compared.values())
    if list(again) != list(tokens):
        return Judged(DEFECT, float("inf"))
    rounding = all(model.largest <= most_noise(model.dtype, model.depth) for model in compared.values())
    return Judged(TIE if rounding else DEFECT, largest)


class ComparedModel:
    """A recorded model whose sessions run the model itself beside. largest: of a row so far."""

    def __init__(self, recorded: RecordedModel) -> None:
        self.recorded, self.largest = recorded, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorded, name)

    def start(self, source: Any, room: int, opening: Opening = ALONE) -> ComparedSession:
        target = opening.target
        served, own = (target.served, target.own) if isinstance(target, ComparedSession) else (target, target)
        return ComparedSession(
            self,
            self.recorded.start(source, room, replace(opening, target=served)),
            self.recorded.model.start(source, room, replace(opening, forwards=None, target=own)),
        )


class ComparedSession:
    """Passes every call to a recorded session and to the model's own, and answers as the recorded one does."""

    def __init__(self, model: ComparedModel, served: Session, own: Session) -> None:
        self._model, self.served, self.own, self.forwards = model, served, own, served.forwards

    @property
    def length(self) -> int:
        return self.served.length

    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        want = replace(want, vocabulary=None)  # whole rows are compared
        served, own = self.served.extend(rows, want), self.own.extend(rows, want)
        for one, other in ((served.logits, own.logits), (served.head_input, own.head_input)):
            if one is not None:
                self._model.largest = max(self._model.largest, difference(precise(one), precise(other)))
        return served

    def draft(self, rows: Sequence[int], chain: Any) -> None:
        """Row by row, so that each can be compared."""

    def grow(self, rows: Sequence[int], growth: Any) -> None:
        """Level by level."""

    def keep(self, path: Sequence[int]) -> None:
        self.served.keep(path)
        self.own.keep(path)

    def rollback(self, length: int) -> None:
        self.served.rollback(length)
        self.own.rollback(length)

    def prefill(self) -> None:
        self.served.prefill()
        self.own.prefill()
