"""Decoding many points over one record: texts and counts of each, at the cost of the contexts that are new."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bild_lab.engine.batch import Batch
from bild_lab.engine.batch_room import QUIET_BATCH, quiet_batch
from bild_lab.engine.batched import apart
from bild_lab.engine.protocols import External
from bild_lab.engine.record import RecordedModel, Store
from bild_lab.engine.record.model import text_name
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.analysis.cost import Machine, kinds_of
from bild_lab.lab.code import code_hash
from bild_lab.lab.config import PairSpec, RuntimeSpec, typed
from bild_lab.lab.decoding.history import with_history
from bild_lab.lab.decoding.load import Decoder
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.measure.cost_model import features_of
from bild_lab.lab.measure.scores import require_no_nan
from bild_lab.lab.point import Point, decoder_of
from bild_lab.lab.schema.timed import METHOD
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
    """What a point decoded of one example.

    drafted_flags: of each token, whether the drafter wrote it. features: for the cost model.
    """

    token_ids: tuple[int, ...]
    drafted_flags: tuple[bool, ...]
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


class Replay:
    """Decodes candidates over the record of a point's models and examples.

    point: any point with these models and examples. history: the folder of conversations' answers. batch: how many
    examples at once, where the models decode batches and that many fit. machine: whose seconds the features hold too,
    under SECONDS.
    Raises UserError for sampled decoding and for a policy that opens no sessions.
    """

    def __init__(self, point: Point, records: Records, history: Path, batch: int = QUIET_BATCH) -> None:
        if not point.sampling.greedy:
            raise UserError(
                f"a record replays greedy decoding, got decoding.temperature={point.decoding.temperature}; "
                "set decoding=greedy, or measure sampled points with run.py"
            )
        self.point, self.records, self._history, self._batch = point, records, history, batch
        self._requests: list[Request] | None = None
        self.machine: Machine | None = None
        self.seconds: Counter[str] = Counter()

    @property
    def requests(self) -> list[Request]:
        """Of the examples, with the history of conversations. Loads the weights."""
        if self._requests is None:
            point, decoder = self.point, self.point.decoders[METHOD]
            torch.set_num_threads(point.setting["threads"])
            for each in point.decoders.values():
                each.load_weights()
            limit, longest = point.decoding.max_new_tokens, point.max_source_tokens
            examples = with_history(point.examples, point.vanilla, point.setting, limit, self._history)
            self._requests = [
                decoder.request(one.prompt, limit, point.sampling, point.seed, longest) for one in examples
            ]
            require_no_nan(decoder.running, self._requests[0])
        return self._requests

    def recorded_forwards(self) -> dict[str, int]:
        """How many forwards the record of these examples took: of the target, and of what drafts.

        Forwards of a part of the target's layers draft.
        """
        target = self.point.decoders[METHOD].target
        sources = [one.source for one in self.requests]
        calls = {"target": 0, "draft": 0}
        for model in self.records.models.values():
            forwards = model.forwards(sources)
            whole, part = forwards.get("whole", 0), forwards.get("part", 0)
            calls["target" if model.model is target else "draft"] += whole
            calls["draft"] += part
        return calls

    def decoder(self, candidate: Candidate, pair: PairSpec, runtime: RuntimeSpec) -> Decoder:
        """The candidate's decoder over the record."""
        decoder = decoder_of(candidate.policy, pair, self.point.decoding, runtime, self.records)
        method = decoder.method
        if isinstance(method, External) or method.feeds is None:
            raise UserError(
                f"policy {candidate.name} runs a loop of its own, which asks no record; "
                "leave it out here and measure it with run.py under the same name"
            )
        return decoder

    def run(
        self,
        candidates: Sequence[Candidate],
        cfg: Any,
        advance: Callable[[], None] = lambda: None,
    ) -> list[Screened]:
        """Decode every example with every candidate, several examples at once where the models can.

        Rows are saved after each example. advance: called after each.
        """
        pair, runtime = typed(PairSpec, cfg.pair, "pair"), typed(RuntimeSpec, cfg.runtime, "runtime")
        started = time.perf_counter()
        decoders = [self.decoder(one, pair, runtime) for one in candidates]
        requests = self.requests
        for decoder in {type(one.method): one for one in decoders}.values():
            decoder.load_weights()
        self.seconds["load"] += time.perf_counter() - started
        started = time.perf_counter()
        texts: list[list[Text]] = [[] for _ in requests]
        copies: dict[int, list[Decoder]] = {}
        alike: dict[str, list[int]] = {}  # examples of one prompt share its record, so they run one after the other
        for index, request in enumerate(requests):
            alike.setdefault(text_name(request.source), []).append(index)

        def loop_over(indices: Sequence[int]) -> Callable[[int], None]:
            def loop(slot: int) -> None:
                if slot not in copies:
                    copies[slot] = [replace(one, method=apart(one.method)) for one in decoders]
                for index in indices:
                    pairs = zip(candidates, copies[slot], strict=True)
                    texts[index] = [decoded(one.name, decoder, requests[index], self.machine) for one, decoder in pairs]
                    self.records.save()
                    advance()

            return loop

        size = min(quiet_batch(one.method, one.models, requests, self._batch) for one in decoders)
        Batch(size).run([loop_over(indices) for indices in alike.values()])
        self.seconds["replay"] += time.perf_counter() - started
        return [Screened(one, list(own)) for one, own in zip(candidates, zip(*texts, strict=True), strict=True)]


def decoded(policy: str, decoder: Decoder, request: Request, machine: Machine | None = None) -> Text:
    """One example over the record."""
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
    return Text(tuple(tokens), drafted_flags(trace, len(tokens)), counts_of(trace, len(tokens)), features)


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


def drafted_flags(trace: Trace, tokens: int) -> tuple[bool, ...]:
    """Of each emitted token, whether it was drafted; the others are the target's."""
    flags: list[bool] = []
    for one in trace.rounds:
        flags += [True] * one.accepted + [False] * (one.next_token is not None)
    return tuple(flags[:tokens])
