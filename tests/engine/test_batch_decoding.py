"""Texts decoded side by side are those decoded one by one, for every policy, and planted faults are
noticed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import pytest
import torch

from bild_lab.engine.batch_decoding import (
    BatchedText,
    decode_batch,
    require_batches,
    why_not_in_batches,
)
from bild_lab.engine.batch_scheduler import Batch, current_batch
from bild_lab.engine.draft import ROOT
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native import layers as native_layers
from bild_lab.engine.models.native.layers import NativeLayers
from bild_lab.engine.models.native.packed_pass import SequenceSlice
from bild_lab.engine.models.native.side_by_side import SideBySide, side_by_side
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.checkpoints import folder_of_this_process, tiny_checkpoints
from tests.engine.lossless.greedy import Models, table_of
from tests.engine.lossless.random_models import models_of
from tests.policies import FAMILIES, GREEDY_ONLY, RUNNABLE, is_peer, load
from tests.sessions import needs_kernels
from tests.tiny import END, VOCABULARY, source_of

ENGINES = ("native", "kernels")
POLICIES = [(policy, family) for policy, family in RUNNABLE if not is_peer(policy)]
SAMPLED = [(policy, family) for policy, family in POLICIES if policy not in GREEDY_ONLY]
STOCHASTIC = 0.8  # a temperature
LONGEST = 24  # tokens of a source and of an answer
FAST = {
    ("bild", "t5", "kernels"),
    ("bita", "llama", "kernels"),
    ("speculative_tree", "llama", "native"),
    ("early_exit_speculative", "t5", "native"),
    ("early_exit_speculative", "llama", "kernels"),
    ("calm", "t5", "kernels"),
}
SOUND = {("speculative", "t5", "kernels"), ("ngram", "llama", "native")}  # of those that sample


def some(cases: Iterable[tuple], fast: set[tuple]) -> list:
    """These as fast tests, the others as slow ones."""
    marks = {"kernels": [needs_kernels]}
    return [
        pytest.param(
            *case, marks=[*marks.get(case[-1], []), *([] if case in fast else [pytest.mark.slow])]
        )
        for case in cases
    ]


def on(engines: Sequence[str], cases: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    return [(*case, engine) for case in cases for engine in engines]


@lru_cache(maxsize=8)
def models_for(family: str, engine: str, dtype: torch.dtype) -> Models:
    """Models whose texts vary, with a table of n-grams of what the target writes."""
    table = folder_of_this_process() / "table.safetensors"
    models = models_of(family, 0, engine, table, dtype)
    vanilla, texts = models.method("vanilla", 1), []
    for request in requests_for(family, 6, 0.0):
        texts.append(vanilla.decode(request, Trace())[request.limits.prompt_length - 1 :])
    table_of(texts, models.target, models.table)
    return models


def requests_for(family: str, count: int, temperature: float) -> list[Request]:
    """Sources, limits and ends of every kind, in an order that lets texts join and leave anyhow."""
    chance, made = random.Random(count), []
    for seed in range(count):
        words = chance.choices(range(3, VOCABULARY), k=chance.randint(1, LONGEST))
        source = source_of(family, words)
        ends = frozenset([END, *chance.sample(range(3, VOCABULARY), chance.randint(0, 1))])
        limits = Limits(len(source.prompt), chance.randint(1, LONGEST), ends)
        generator = torch.Generator().manual_seed(seed) if temperature else None
        made.append(Request(source, limits, Sampling(temperature), generator))
    return made


@dataclass(frozen=True)
class Case:
    """Some texts to decode with a policy, one by one and together."""

    policy: str
    family: str
    engine: str
    temperature: float = 0.0
    count: int = 8
    dtype: torch.dtype = torch.float32

    @property
    def models(self) -> Models:
        return models_for(self.family, self.engine, self.dtype)

    @cached_property
    def method(self) -> Method:
        return self.models.method(self.policy, 3)

    @property
    def requests(self) -> list[Request]:
        return requests_for(self.family, self.count, self.temperature)

    def alone(self) -> list[tuple[list[int], Trace]]:
        found = []
        for request in self.requests:
            trace = Trace()
            found.append(
                (self.method.decode(request, trace)[request.limits.prompt_length :], trace)
            )
        return found

    def together(self, size: int) -> list[BatchedText]:
        return decode_batch(self.method, self.requests, Batch(size))


def differences(
    alone: Sequence[tuple[list[int], Trace]], together: Sequence[BatchedText]
) -> set[str]:
    """What differs: texts, tokens that were drafted or accepted, or the forwards that were counted,
    in any order.

    Alone, two threads of `ppd` note their forwards as they happen to come.
    """
    found = set()
    for (tokens, trace), one in zip(alone, together, strict=True):
        if one.token_ids != tokens:
            found.add("texts")
        if [(each.drafted, each.accepted) for each in one.trace.rounds] != [
            (each.drafted, each.accepted) for each in trace.rounds
        ]:
            found.add("drafts")
        if counted(one.trace) != counted(trace):
            found.add("forwards")
    return found


def counted(trace: Trace) -> Counter:
    """How often each kind of forward ran."""
    return Counter(
        tuple({**vars(each), "config": id(each.config)}.items()) for each in trace.forwards
    )


@pytest.mark.fast("bild-t5-kernels", "speculative_tree-llama-native")
@pytest.mark.parametrize(("policy", "family", "engine"), some(on(ENGINES, POLICIES), FAST))
def test_greedy_texts_and_drafts_are_those_of_batch_1(
    policy: str, family: str, engine: str
) -> None:
    case = Case(policy, family, engine)
    assert differences(case.alone(), case.together(4)) == set()


@pytest.mark.fast("ngram-llama-native", "speculative-t5-kernels")
@pytest.mark.parametrize(("policy", "family", "engine"), some(on(ENGINES, SAMPLED), SOUND))
def test_sampled_texts_and_drafts_are_those_of_batch_1(
    policy: str, family: str, engine: str
) -> None:
    """Random numbers belong to the text, whoever is beside it."""
    case = Case(policy, family, engine, STOCHASTIC)
    assert differences(case.alone(), case.together(3)) == set()


@pytest.mark.parametrize("temperature", [0.0, STOCHASTIC])
@pytest.mark.parametrize(("policy", "family", "engine"), some(on(ENGINES, POLICIES), set()))
def test_many_texts_in_batches_of_2_to_32_are_those_of_batch_1(
    policy: str, family: str, engine: str, temperature: float
) -> None:
    if temperature and policy in GREEDY_ONLY:
        pytest.skip("it refuses to sample")
    # PyTorch's products round by the number of rows, and among so many float32 texts a draft meets
    # a tie
    dtype = torch.float64 if engine == "native" else torch.float32
    case = Case(policy, family, engine, temperature, count=40, dtype=dtype)
    alone = case.alone()
    for size in (2, 5, 8, 32):
        assert differences(alone, case.together(size)) == set(), size


@pytest.mark.fast("speculative-t5")
@needs_kernels
@pytest.mark.parametrize(("policy", "family"), some(POLICIES, {("speculative", "t5")}))
def test_the_kernels_are_exact_in_bfloat16_too(policy: str, family: str) -> None:
    case = Case(policy, family, "kernels", dtype=torch.bfloat16)
    assert differences(case.alone(), case.together(5)) == set()


@pytest.mark.parametrize(
    ("family", "engine"), some(on(ENGINES, [("qwen3",), ("gemma3",)]), {("gemma3", "native")})
)
def test_windowed_layers_are_exact(family: str, engine: str) -> None:
    case = Case("speculative", family, engine)
    assert differences(case.alone(), case.together(4)) == set()


@pytest.mark.parametrize(
    ("family", "engine"), some(on(ENGINES, [("t5",), ("llama",)]), {("llama", "kernels")})
)
def test_long_prompts_run_by_themselves_or_in_parts(
    family: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_layers, "ALONE_ROWS" if engine == "native" else "LONG_PROMPT", 6)
    case = Case("speculative", family, engine)
    assert differences(case.alone(), case.together(4)) == set()


def by_torch(change: Callable[[SideBySide], SideBySide]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            native_layers, "side_by_side", lambda *arguments: change(side_by_side(*arguments))
        )

    return plant


def shifted(rows: SideBySide) -> SideBySide:
    """Positions count from the end of the longest text."""
    late = (rows.positions.amax(1, keepdim=True) < rows.positions.max()).long()
    positions = rows.positions + late
    return replace(rows, positions=positions, row_positions=positions.flatten()[rows.row])


def seeing(rows: SideBySide) -> SideBySide:
    """Slots behind a text's own count, although nothing is in them."""
    return replace(rows, visible=torch.ones_like(rows.visible))


def exchanged(rows: SideBySide) -> SideBySide:
    """Rows read and write the cache of the next text."""
    return replace(rows, places=rows.places.roll(1))


FAULTS = {
    "another text's cache": by_torch(exchanged),
    "wrong positions": by_torch(shifted),
    "zeroed keys that weigh in the softmax": by_torch(seeing),
}


@pytest.mark.fast(
    "another text's cache-llama",
    "wrong positions-llama",
    "zeroed keys that weigh in the softmax-llama",
)
@pytest.mark.parametrize(
    ("fault", "family"), some(product(FAULTS, FAMILIES), {(one, "llama") for one in FAULTS})
)
def test_planted_faults_change_texts(
    fault: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("vanilla", family, "native")
    alone = case.alone()
    assert differences(alone, case.together(4)) == set()
    FAULTS[fault](monkeypatch)
    assert "texts" in differences(alone, case.together(4))


@pytest.mark.parametrize(
    "engine",
    [pytest.param("native", marks=pytest.mark.slow), pytest.param("kernels", marks=needs_kernels)],
)
def test_a_stale_length_of_the_drafter_keeps_the_texts_and_is_noticed(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache keeps a rejected row: the target corrects the drafts, which are accepted less
    often.
    """
    case = Case("speculative", "llama", engine)
    alone, drafter = case.alone(), case.models.draft
    rollback, length = CachedSession.rollback, CachedSession.length.fget

    def stale(self: CachedSession, to: int) -> None:
        kept, before = vars(self).get("stale", 0), self._cached
        rollback(self, to + kept)
        drafts = current_batch() is not None and self.layers.decoder is drafter.decoder
        if drafts and not kept and self._cached < before:
            self._cached, self.stale = self._cached + 1, 1

    monkeypatch.setattr(CachedSession, "rollback", stale)
    monkeypatch.setattr(
        CachedSession, "length", property(lambda self: length(self) - vars(self).get("stale", 0))
    )
    found = differences(alone, case.together(4))
    assert "drafts" in found and "texts" not in found
    accepted = sum(one.trace.accepted for one in case.together(4))
    assert accepted < sum(trace.accepted for _, trace in alone)


@pytest.mark.fast(
    "another text's cache-t5", "wrong positions-t5", "zeroed keys that weigh in the softmax-t5"
)
@needs_kernels
@pytest.mark.parametrize(
    ("fault", "family"), some(product(FAULTS, FAMILIES), {(one, "t5") for one in FAULTS})
)
def test_planted_faults_in_the_kernels_change_texts(
    fault: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("vanilla", family, "kernels")
    alone = case.alone()
    seen: list[SequenceSlice] = []
    run = native_layers.run_packed

    def wrong(works: Sequence) -> list:
        if len(works) == 1:
            return run(works)
        texts = [layers.text_rows(work.start, work.count, work.logits) for layers, work in works]
        longest = max(text.start for text in texts)

        def changed(
            self: NativeLayers, start: int, count: int, scored: int = 1, tree: object = None
        ) -> SequenceSlice:
            memory = (self.memory[0].keys, self.memory[0].values) if self.memory else None
            own = SequenceSlice(count, start, self.cache, memory, scored, reserved=self.reserved)
            seen.append(own)
            if fault == "another text's cache":
                return own._replace(cache=texts[len(seen) % len(texts)].cache)
            # and it misses the row before it, whose child it should be
            if fault == "wrong positions":
                return (
                    own._replace(parents=torch.full((count + 1,), ROOT))
                    if 0 < start < longest
                    else own
                )
            return own._replace(start=min(longest, self.cache.capacity - count))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NativeLayers, "text_rows", changed)
            return run(works)

    monkeypatch.setattr(native_layers, "run_packed", wrong)
    assert "texts" in differences(alone, case.together(4))


def test_every_text_has_a_state_of_its_own_and_shares_models() -> None:
    method = load(tiny_checkpoints(), "llama", "speculative_adaptive").method
    request = Request(Source((5, 6)), Limits(2, 4))
    session = method.target.start(request.source, 4)
    one, other = (method.drafter.start(request, session) for _ in range(2))
    assert one._session is not other._session and one._window is not other._window
    one._window.observe(4, 4)
    assert (
        other._window.acceptance_rate
        == method.drafter._window.acceptance_rate
        < one._window.acceptance_rate
    )
    assert one._model is other._model is method.drafter._model


def test_what_runs_one_text_at_a_time_says_why() -> None:
    def reason(policy: str, **options: object) -> str | None:
        decoder = load(tiny_checkpoints(), "llama", policy, **options)
        return why_not_in_batches(decoder.method, decoder.models)

    assert reason("speculative") is None
    assert reason("hf_generate") is None
    assert "engine hf" in reason("speculative", engine="hf")
    assert "loop of its own" in reason("hf_assisted")
    assert "compiled" in reason("vanilla", engine="native", compile=True)


@pytest.mark.parametrize(
    ("policy", "options", "remedy"),
    [
        # fault: runtime.engine=auto, which changes nothing for a peer, and nothing of compiled steps
        ("hf_assisted", {}, "runtime.batch=1"),
        (
            "vanilla",
            {"engine": "native", "compile": True},
            "runtime.batch=1, or runtime.compile=auto",
        ),
        (
            "vanilla",
            {"engine": "hf"},
            "runtime.batch=1, or runtime.engine=auto for a model that runs",
        ),
    ],
)
def test_what_runs_one_text_at_a_time_is_refused_with_what_helps(
    policy: str, options: dict[str, object], remedy: str
) -> None:
    decoder = load(tiny_checkpoints(), "llama", policy, **options)
    with pytest.raises(UserError, match=f"; set {remedy}") as told:
        require_batches(policy, decoder.method, decoder.models)
    assert str(told.value).count(", or") == remedy.count(", or")


@pytest.mark.fast("t5")
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_in_batches_gives_the_texts_of_vanilla(family: str) -> None:
    case, peer = Case("vanilla", family, "native"), Case("hf_generate", family, "native")
    requests = [
        replace(one, limits=replace(one.limits, end_tokens=frozenset([END])))
        for one in case.requests
    ]
    found = decode_batch(peer.method, requests, Batch(4))
    vanilla = decode_batch(case.method, requests, Batch(4))
    assert [one.token_ids for one in found] == [one.token_ids for one in vanilla]
