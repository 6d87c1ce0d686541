"""Texts decoded side by side are those decoded one by one, for every policy, and planted faults are noticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch

from bild_lab.engine.batch import Batch, current_batch
from bild_lab.engine.batched import BatchedText, apart, decode_batch, why_not_in_batches
from bild_lab.engine.drafters import AdaptiveWindow, ModelDrafter
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native import layers as native_layers
from bild_lab.engine.models.native import passes
from bild_lab.engine.models.native.cpu import Behind
from bild_lab.engine.models.native.layers import NativeLayers
from bild_lab.engine.models.native.side_by_side import SideBySide, side_by_side
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from tests.checkpoints import tiny_checkpoints
from tests.policies import GREEDY_ONLY, RUNNABLE, is_lossless, is_peer, load
from tests.sessions import needs_kernels
from tests.tiny import WORDS

ENGINES = ["native", pytest.param("kernels", marks=needs_kernels)]
POLICIES = [(policy, family) for policy, family in RUNNABLE if not is_peer(policy)]
SAMPLED = [(policy, family) for policy, family in POLICIES if policy not in GREEDY_ONLY]
STOCHASTIC = 0.8  # a temperature
FAST = {
    ("bild", "t5"),
    ("speculative_tree", "llama"),
    ("early_exit_speculative", "t5"),
    ("bita", "llama"),
}
SOUND = {("speculative", "t5"), ("ngram", "llama")}  # of those that sample


def some(cases: Sequence[tuple[str, str]], fast: set[tuple[str, str]]) -> list:
    """These as fast tests, the others as slow ones."""
    return [pytest.param(*case, marks=[] if case in fast else pytest.mark.slow) for case in cases]


@dataclass(frozen=True)
class Case:
    """Some texts: prompts and limits of every length, in an order that lets them join and leave anyhow."""

    policy: str
    family: str
    engine: str
    temperature: float = 0.0
    count: int = 9
    dtype: str = "float32"
    longest: int = 24

    @property
    def decoder(self):
        return _decoder(self.policy, self.family, self.engine, self.dtype)

    @property
    def may_differ(self) -> set[str]:
        """Beams that lose in the end may be others where scores round in another way, as in PyTorch."""
        return {"forwards"} if "beam" in self.policy and self.engine == "native" else set()

    def requests(self) -> list[Request]:
        chance = random.Random(self.count)
        made = []
        for seed in range(self.count):
            prompt = " ".join(chance.choices(WORDS, k=chance.randint(1, self.longest)))
            sampling = Sampling(self.temperature)
            made.append(self.decoder.request(prompt, chance.randint(1, self.longest), sampling, seed))
        return made

    def alone(self) -> list[tuple[list[int], Trace]]:
        found = []
        for request in self.requests():
            trace = Trace()
            found.append((self.decoder.method.decode(request, trace)[request.limits.prompt_length :], trace))
        return found

    def together(self, size: int) -> list[BatchedText]:
        return decode_batch(self.decoder.method, self.requests(), Batch(size))


@lru_cache(maxsize=4)
def _decoder(policy: str, family: str, engine: str, dtype: str):
    return load(tiny_checkpoints(), family, policy, engine=engine, dtype=dtype)


def differences(alone: Sequence[tuple[list[int], Trace]], together: Sequence[BatchedText]) -> set[str]:
    """What differs: texts, tokens that were drafted or accepted, or the forwards that were counted."""
    found = set()
    for (tokens, trace), one in zip(alone, together, strict=True):
        if one.token_ids != tokens:
            found.add("texts")
        if [(each.drafted, each.accepted) for each in one.trace.rounds] != [
            (each.drafted, each.accepted) for each in trace.rounds
        ]:
            found.add("drafts")
        if [vars(each) for each in one.trace.forwards] != [vars(each) for each in trace.forwards]:
            found.add("forwards")
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("policy", "family"), some(POLICIES, FAST))
def test_greedy_texts_and_drafts_are_those_of_batch_1(policy: str, family: str, engine: str) -> None:
    case = Case(policy, family, engine)
    assert differences(case.alone(), case.together(4)) <= case.may_differ


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("policy", "family"), some(SAMPLED, SOUND))
def test_sampled_texts_and_drafts_are_those_of_batch_1(policy: str, family: str, engine: str) -> None:
    """Random numbers belong to the text, whoever is beside it."""
    case = Case(policy, family, engine, STOCHASTIC)
    assert differences(case.alone(), case.together(3)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, STOCHASTIC])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("policy", "family"), POLICIES)
def test_many_texts_in_batches_of_2_to_32_are_those_of_batch_1(
    policy: str, family: str, engine: str, temperature: float
) -> None:
    if temperature and policy in GREEDY_ONLY:
        pytest.skip("it refuses to sample")
    case = Case(policy, family, engine, temperature, count=40)
    alone = case.alone()
    for size in (2, 5, 8, 32):
        assert differences(alone, case.together(size)) <= case.may_differ, size


@needs_kernels
@pytest.mark.parametrize(("policy", "family"), some(POLICIES, {("bild", "t5")}))
def test_the_kernels_are_exact_in_bfloat16_too(policy: str, family: str) -> None:
    case = Case(policy, family, "kernels", dtype="bfloat16")
    assert differences(case.alone(), case.together(5)) == set()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_windowed_layers_are_exact(family: str, engine: str) -> None:
    case = Case("speculative", family, engine)
    assert differences(case.alone(), case.together(4)) == set()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_long_prompts_run_by_themselves(family: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_layers, "KERNEL_ROWS", 6)
    case = Case("speculative", family, engine)
    assert differences(case.alone(), case.together(4)) == set()


def by_kernels(change: Callable[[NativeLayers, Behind], Behind]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in where the kernels find a text's rows."""
    behind = NativeLayers.behind

    def plant(patch: pytest.MonkeyPatch) -> None:
        def wrong(self: NativeLayers, *arguments: object) -> Behind:
            found = behind(self, *arguments)
            return found if current_batch() is None else change(self, found)

        patch.setattr(NativeLayers, "behind", wrong)

    return plant


def by_torch(change: Callable[[SideBySide], SideBySide]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(passes, "side_by_side", lambda *arguments: change(side_by_side(*arguments)))

    return plant


def shifted(rows: SideBySide) -> SideBySide:
    """Positions count from the end of the longest text."""
    late = (rows.positions.amax(1, keepdim=True) < rows.positions.max()).long()
    positions = rows.positions + late
    return replace(rows, positions=positions, each_position=positions.flatten()[rows.packing.row])


def seeing(rows: SideBySide) -> SideBySide:
    """Slots behind a text's own count, although nothing is in them."""
    return replace(rows, visible=torch.ones_like(rows.visible))


def exchanged(rows: SideBySide) -> SideBySide:
    """Rows read and write the cache of the next text."""
    places = rows.packing.places.roll(1)
    return replace(rows, packing=replace(rows.packing, places=places))


FAULTS = {
    "another text's cache": by_torch(exchanged),
    "wrong positions": by_torch(shifted),
    "zeroed keys that weigh in the softmax": by_torch(seeing),
}


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_change_texts(fault: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("vanilla", family, "native")
    alone = case.alone()
    assert differences(alone, case.together(4)) == set()
    FAULTS[fault](monkeypatch)
    assert "texts" in differences(alone, case.together(4))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stale_length_of_the_drafter_keeps_the_texts_and_is_noticed(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache keeps the rows of rejected tokens: the target corrects the drafts, which are accepted less often."""
    case = Case("speculative", "llama", engine)
    alone, drafter = case.alone(), case.decoder.models[1]
    rollback = CachedSession.rollback

    def stale(self: CachedSession, length: int) -> None:
        kept = self._cached
        rollback(self, length)
        if current_batch() is not None and self.layers.decoder is drafter.decoder and kept > self._cached:
            rows = [0, *range(kept - self._cached - 1)]  # what was rejected stays where the next rows would be
            self.layers.gather(self._cached - 1, rows)

    monkeypatch.setattr(CachedSession, "rollback", stale)
    assert differences(alone, case.together(4)) == {"drafts", "forwards"}


@needs_kernels
@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("fault", ["another text's cache", "wrong positions", "zeroed keys that weigh in the softmax"])
def test_planted_faults_in_the_kernels_change_texts(fault: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("vanilla", family, "kernels")
    alone = case.alone()
    seen: list[Behind] = []
    run = native_layers.run_packed

    def wrong(works: Sequence) -> list:
        if len(works) == 1:
            return run(works)
        texts = [layers.behind(work.start, work.count, work.logits) for layers, work in works]
        longest = max(text.start for text in texts)

        def changed(self: NativeLayers, start: int, count: int, scored: int = 1, placed: object = None) -> Behind:
            own = Behind(count, start, self.cache, self._cross(), scored, placed, self.reserved)
            seen.append(own)
            if fault == "another text's cache":
                return replace(own, cache=texts[(seen.index(own) + 1) % len(texts)].cache)
            if fault == "wrong positions":
                return replace(own, reserved=own.reserved - (longest - start))
            return replace(own, start=min(longest, self.cache.capacity - count))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NativeLayers, "behind", changed)
            return run(works)

    monkeypatch.setattr(native_layers, "run_packed", wrong)
    assert "texts" in differences(alone, case.together(4))


def test_every_text_has_a_state_of_its_own_and_shares_models() -> None:
    method = load(tiny_checkpoints(), "llama", "speculative_adaptive").method
    other = apart(method)
    assert other.drafter is not method.drafter and other.drafter._window is not method.drafter._window
    assert isinstance(other.drafter, ModelDrafter) and isinstance(other.drafter._window, AdaptiveWindow)
    assert other.target is method.target and other.drafter._model is method.drafter._model


def test_what_runs_one_text_at_a_time_says_why() -> None:
    def reason(policy: str, **options: object) -> str | None:
        decoder = load(tiny_checkpoints(), "llama", policy, **options)
        return why_not_in_batches(decoder.method, decoder.models)

    assert reason("speculative") is None
    assert reason("hf_generate") is None
    assert "engine hf" in reason("speculative", engine="hf")
    assert "loop of its own" in reason("hf_assisted")
    assert "compiled" in reason("vanilla", engine="native", compile=True)


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_generate_in_batches_gives_the_texts_of_vanilla(family: str) -> None:
    case, peer = Case("vanilla", family, "native"), Case("hf_generate", family, "auto")
    assert [one.token_ids for one in peer.together(4)] == [tokens for tokens, _ in case.alone()]


def test_policies_stay_lossless_in_batches() -> None:
    vanilla = [one.token_ids for one in Case("vanilla", "llama", "native").together(4)]
    assert is_lossless("speculative_tree")
    assert [one.token_ids for one in Case("speculative_tree", "llama", "native").together(4)] == vanilla
