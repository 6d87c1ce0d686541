"""Decoding over a record, whether a text so decoded differs from the live one by rounding alone,
and what it costs.

What a text costs is fitted to timed texts. Seconds are those of a text's start, of its source
tokens, of the target's forwards, their rows and their rows times context, of the drafter's
forwards, and of the policy's rounds. Forwards of one row have a price of their own, as their
kernels read weights and do little else. No price is negative. Forwards through some layers count as
the share of the layers that ran, those of a drafter with a draft vocabulary as the share of its
weights. A round's price holds host, acceptance rule and the drafter's start, so each policy has its
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Float, Int
from scipy.optimize import nnls
from torch import Tensor

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
from bild_lab.lab.measure.cost import dimensions
from bild_lab.lab.measure.recorder import relative_difference
from bild_lab.lab.point.decoder import Decoder
from bild_lab.lab.store.code import code_hash
from bild_lab.lab.store.hashing import content_hash
from bild_lab.screening.candidates import Candidate
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
            "precision": str(model.dtype).removeprefix("torch."),
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

    def draft(self, rows: Sequence[int], chain: Any) -> None:
        """Row by row, so that each can be compared."""

    def grow(self, rows: Sequence[int], tree_spec: Any) -> None:
        """Level by level."""

    def keep(self, path: Sequence[int]) -> None:
        self.recorded.keep(path)
        self.live.keep(path)

    def rollback(self, length: int) -> None:
        self.recorded.rollback(length)
        self.live.rollback(length)

    def prefill(self) -> None:
        self.recorded.prefill()
        self.live.prefill()


Features = Mapping[str, float]
OUTLIER = 4  # times the median deviation


@dataclass(frozen=True)
class TimedText:
    """A text that was decoded live. system: which point decoded it, the same for all of its
    texts.
    """

    system: str
    features: Features
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """Seconds of each thing that a text has.

    error, worst: of speedups that the model predicts for points it was not fitted to, relative;
    None if it was fitted to fewer than three.
    """

    prices_s: Mapping[str, float]
    error: float | None = None
    worst: float | None = None

    def seconds(self, features: Features) -> float:
        """The seconds of one text, or of several whose features were added up.

        A thing without a price costs nothing.
        """
        return sum(self.prices_s.get(name, 0.0) * count for name, count in features.items())


def features_of(
    policy: str, trace: Trace, models: Mapping[int, str], depth: int
) -> dict[str, float]:
    """What a text's seconds depend on. policy: whose rounds they are.

    models: a name of each model, by the id of its configuration. depth: layers of the target's
    decoder, of which a part may have run.
    """
    counted: Counter[str] = Counter({"texts": 1, f"rounds of {policy}": len(trace.rounds)})
    for forward in trace.forwards:
        model = models[id(forward.config)]
        if forward.encoder:
            counted["source tokens"] += forward.rows
            continue
        share = 1.0 if forward.layers is None else forward.layers / depth
        # a block is half a layer
        share -= (forward.skipped_attention + forward.skipped_feed_forward) / (2 * depth)
        if model == "target":  # one of a drafter has one row, or two
            if forward.rows == 1:
                counted["target forwards of one row"] += share
            else:
                counted["target forwards"] += share
                counted["target rows"] += share * forward.rows
            counted["target rows x context"] += (
                share * forward.rows * (forward.cached + forward.source)
            )
        else:
            if (vocabulary_size := forward.vocabulary) is not None:
                share *= dimensions(forward.config).share_with(vocabulary_size)
            counted[f"{model} forwards"] += share
        if forward.layers is not None:
            counted[f"{model} part forwards"] += 1
    return dict(counted)


def fit_cost_model(texts: Sequence[TimedText], baseline: str) -> CostModel:
    """Prices by non-negative least squares, and their error by leaving out one point after the
    other.

    baseline: the system that speedups are relative to; it is never left out. Seconds are weighted
    by their own size, and texts far from the first fit, which something else disturbed, are left
    out.
    """
    systems = [
        system for system in dict.fromkeys(text.system for text in texts) if system != baseline
    ]
    errors = []
    for system in systems if len(systems) > 2 else []:
        error = _left_out_error(texts, system, baseline)
        if error is not None:
            errors.append(error)
    if not errors:
        return CostModel(_prices(texts))
    return CostModel(_prices(texts), float(np.median(errors)), max(errors))


def _left_out_error(texts: Sequence[TimedText], system: str, baseline: str) -> float | None:
    """The relative error of a system's speedup as predicted from the other systems' texts.

    None for the only point of its policy: its rounds would have no price.
    """
    known = [text for text in texts if text.system != system]
    left_out = [text for text in texts if text.system == system]
    baseline_texts = [text for text in texts if text.system == baseline]
    priced = {name for text in known for name in text.features}
    if any(name not in priced for text in left_out for name in text.features):
        return None
    model = CostModel(_prices(known))
    measured = mean_s(baseline_texts) / mean_s(left_out)
    predicted = predicted_mean_s(model, baseline_texts) / predicted_mean_s(model, left_out)
    return abs(float(predicted / measured) - 1)


def mean_s(texts: Sequence[TimedText]) -> float:
    return np.mean([text.seconds for text in texts])


def predicted_mean_s(model: CostModel, texts: Sequence[TimedText]) -> float:
    return np.mean([model.seconds(text.features) for text in texts])


def _prices(texts: Sequence[TimedText]) -> dict[str, float]:
    names = sorted({name for text in texts for name in text.features})
    table = np.array([[text.features.get(name, 0.0) for name in names] for text in texts])
    seconds = np.array([text.seconds for text in texts])
    undisturbed = np.ones(len(texts), dtype=bool)
    for _ in range(2):
        prices = _solved(table[undisturbed], seconds[undisturbed])
        deviation = np.abs(table @ prices / seconds - 1)
        undisturbed = deviation <= OUTLIER * max(float(np.median(deviation)), 1e-9)
    return dict(zip(names, _solved(table[undisturbed], seconds[undisturbed]).tolist(), strict=True))


def _solved(
    table: Float[np.ndarray, "texts features"], seconds: Float[np.ndarray, " texts"]
) -> np.ndarray:
    """Least squares of relative deviations, with columns of one size."""
    weighted = table / seconds[:, None]
    sizes = np.maximum(np.abs(weighted).max(axis=0), 1e-12)
    return nnls(weighted / sizes, np.ones(len(seconds)))[0] / sizes
