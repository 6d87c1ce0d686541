"""Decoding over a record: texts and counts of a point, at the cost of the contexts that are new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bild_lab.engine.record import RecordedModel, Store
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.analysis.cost import Machine, kinds_of
from bild_lab.lab.code import code_hash
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.measure.cost_model import features_of
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
