"""What is timed, in which order and with which seeds, alone and in batches; and the traced pass."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from bild_lab.engine.batch_decoding import BatchedText
from bild_lab.engine.batch_scheduler import PendingOp, current_batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.lookup.suffix import SuffixDrafter
from bild_lab.engine.methods.lookup.token_recycling import TokenRecycling
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.vanilla import NoDraft, target_alone
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import Session
from bild_lab.engine.trace import EngineReport, Round, Span, StageTrace, Trace
from bild_lab.errors import UserError, warn_once
from bild_lab.lab.config.schemas import MeasureSpec
from bild_lab.lab.measure import timing
from bild_lab.lab.measure.blocks import BLOCK, block_numbers
from bild_lab.lab.measure.runner import warn_of_changed_texts, warn_of_learned_texts
from bild_lab.lab.measure.score import drafter_prompt_s, prompt_s, stages_of
from bild_lab.lab.measure.summary import is_too_noisy
from bild_lab.lab.measure.timing import (
    Timed,
    TimingOptions,
    differing_repeats,
    loop_share,
    order,
    repeats_of,
    time_methods,
    traced_pass,
    warm_up,
)
from bild_lab.lab.point.decoder import METHOD
from bild_lab.lab.point.environment import no_garbage_collection
from tests.report.sample import sample_result
from tests.stubs import StubModel


def next_number() -> StubModel:
    """Always says the number after the last one."""
    return StubModel(
        lambda tokens: torch.nn.functional.one_hot(torch.tensor(tokens[-1] + 1), 10).double()
    )


def test_the_spans_of_an_example_are_its_rounds_in_turn_and_add_up_to_the_stages() -> None:
    method = DraftThenVerify(next_number(), ModelDrafter(next_number(), 3), ExactMatch())
    lengths = (8, 4)
    requests = [Request(Source((0,)), Limits(1, length)) for length in lengths]
    seconds, traces = stages_of(traced_pass(method, requests, TimingOptions()))
    # a round emits four tokens: three that were drafted and the target's own
    assert [[stage for stage, _, _ in trace.spans] for trace in traces] == [
        ["prefill", *["draft", "verify"] * (length // 4)] for length in lengths
    ]
    for trace in traces:
        moments = [moment for _, start, end in trace.spans for moment in (start, end)]
        assert 0 < moments[0] and moments == sorted(moments)
    for stage in ("prefill", "draft", "verify"):
        parts = [
            end - start for trace in traces for name, start, end in trace.spans if name == stage
        ]
        assert seconds[stage] == pytest.approx(sum(parts))
    assert seconds["host"] > 0


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting all of a test process's garbage takes half a second."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@dataclass
class Noted:
    """A method that notes its name, the example and its seed, and emits the number of notes so
    far.
    """

    name: str
    notes: list[tuple[str, int, int | None]]
    collecting: list[bool] = field(default_factory=list)

    def decode(self, request: Request, trace: Trace) -> list[int]:
        assert type(trace) is Trace  # without clocks
        trace.stats["call"] = len(self.notes) + 1
        seed = None if request.generator is None else request.generator.initial_seed()
        self.notes.append((self.name, request.source.prompt[0], seed))
        self.collecting.append(gc.isenabled())
        return [*request.source.prompt, len(self.notes)]


def noted(
    temperature: float = 0.0, examples: int = 3
) -> tuple[dict[str, Noted], list[tuple], list[Request]]:
    notes: list[tuple[str, int, int | None]] = []
    methods = {name: Noted(name, notes) for name in ("method", "baseline")}
    return (
        methods,
        notes,
        [Request(Source((7 + i,)), Limits(1, 4), Sampling(temperature)) for i in range(examples)],
    )


class Learning(NoDraft):
    """Drafts a whole text when it comes again."""

    def __init__(self, model: StubModel) -> None:
        super().__init__(model)
        self._came: set[tuple[int, ...]] = set()

    def begin(self, request: Request, target: Session) -> None:
        self._knows = request.source.prompt in self._came
        self._came.add(request.source.prompt)

    def propose(self, tokens: list[int]) -> Draft:
        drafted = [tokens[-1] + 1, tokens[-1] + 2] if self._knows else []
        return Draft(torch.tensor(drafted, dtype=torch.long))


@pytest.mark.parametrize(("drafter", "differing"), [(NoDraft, 0), (Learning, 2)])
def test_texts_that_were_learned_when_they_came_again_are_told(
    drafter: type[NoDraft], differing: int, caplog: pytest.LogCaptureFixture
) -> None:
    method = DraftThenVerify(next_number(), drafter(next_number()), ExactMatch())
    requests = [Request(Source((start,)), Limits(1, 6)) for start in (0, 1)]
    timed = time_methods({"method": method}, requests, 2, TimingOptions())["method"]
    assert [text.target_calls[0] for text in timed] == [6, 6]
    assert differing_repeats(timed) == differing
    warn_once.cache_clear()
    warn_of_learned_texts("mine", timed)
    assert bool(caplog.messages) == bool(differing)


@pytest.mark.parametrize(
    ("rule", "dtype", "same", "certify", "told"),
    [
        (ExactMatch(), "float32", 0.995, False, True),
        (ExactMatch(), "float32", 1.0, False, False),
        (ExactMatch(), "bfloat16", 0.75, False, False),  # of which some are ties
        (ExactMatch(), "float32", 0.75, True, False),
        (SpeculativeSampling(0.5), "float32", 0.75, False, False),
    ],
)
def test_changed_texts_of_what_says_that_it_is_lossless_are_told(
    rule: Acceptance,
    dtype: str,
    same: float,
    certify: bool,
    told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fault: a rule of one's own said so, and nobody noticed that it was not."""
    method = DraftThenVerify(next_number(), NoDraft(next_number()), rule)
    point = SimpleNamespace(
        policy="mine",
        sampling=Sampling(),
        measure=SimpleNamespace(certify=certify),
        decoders={METHOD: SimpleNamespace(method=method)},
    )
    setting = {"dtype": dtype, "n_examples": 200}
    result = sample_result("mine", {}, 1.5, setting=setting, agreement_with_target=same)
    warn_once.cache_clear()
    warn_of_changed_texts(point, result)
    assert ["changed 1 of 200 texts" in message for message in caplog.messages] == [True] * told


def test_method_and_baseline_take_turns_at_being_first() -> None:
    methods, notes, requests = noted(examples=2)
    calls = []
    timed = time_methods(
        methods,
        requests,
        3,
        TimingOptions(advance=lambda texts: calls.append((len(notes), texts))),
    )
    turns, others = ["method", "baseline"], ["baseline", "method"]
    assert [name for name, _, _ in notes] == [*turns, *others, *others, *turns, *turns, *others]
    # in passes over all of them, so that repeats are minutes apart
    assert [example for _, example, _ in notes] == [7, 7, 8, 8] * 3
    # after each, by shares of a text
    assert calls == [(count, pytest.approx(1 / 6)) for count in range(1, 13)]
    # the tokens are the first repeat's, without the prompt
    assert {name: [one.token_ids for one in several] for name, several in timed.items()} == {
        "method": [[1], [4]],
        "baseline": [[2], [3]],
    }
    traces = [one.trace.stats["call"] for one in timed["method"]]
    assert traces == [1, 4]  # of the same decoding as the tokens
    assert {len(one.latency_s) for several in timed.values() for one in several} == {3}


def test_every_method_is_warmed_up_on_the_first_examples() -> None:
    methods, notes, requests = noted(temperature=1.0)
    warm_up(methods, requests, 2, TimingOptions(seed=5))
    assert notes == [
        (name, 7 + i, 5 * 1_000_003 + i) for i in range(2) for name in ("method", "baseline")
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafter", ["suffix", "token_recycling"])
def test_warm_ups_and_rehearsals_leave_nothing_to_learn_from(
    drafter: str, temperature: float
) -> None:
    table = torch.randn(10, 10, generator=torch.Generator().manual_seed(1)).double()
    target = StubModel(lambda tokens: table[(tokens[-1] + 3 * (len(tokens) % 3)) % 10])
    limits, sampling = Limits(1, 30), Sampling(temperature)
    requests = [Request(Source((prompt,)), limits, sampling) for prompt in range(5)]

    def rounds(options: TimingOptions, warm_ups: int) -> list[list[tuple[int, ...]]]:
        kept = {
            "suffix": lambda: SuffixDrafter(target, 8, 4, 0.0, keep=True),
            "token_recycling": lambda: TokenRecycling(target, 6, 2, keep=True),
        }
        method = DraftThenVerify(target, kept[drafter](), SpeculativeSampling())
        warm_up({"method": method}, requests, warm_ups, options)
        timed = time_methods({"method": method}, requests, 2, options)["method"]
        return [[each.drafted for each in text.trace.rounds] for text in timed]

    alone = rounds(TimingOptions(), 0)
    assert rounds(TimingOptions(), 3) == alone
    assert rounds(TimingOptions(rehearses=True), 3) == alone


def test_a_warm_up_stops_after_some_tokens_in_the_memory_of_the_whole_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list = []

    class Streaming(Noted):
        def stream(self, request: Request, trace: Trace) -> Iterator[list[int]]:
            for token in range(request.limits.max_new_tokens):
                notes.append(
                    (self.name, request.source.prompt[0], request.limits.max_new_tokens, token)
                )
                yield [token, token]

    class Whole(Noted):
        def decode(self, request: Request, trace: Trace) -> list[int]:
            notes.append(
                (self.name, request.source.prompt[0], request.limits.max_new_tokens, "all")
            )
            return list(request.source.prompt)

    monkeypatch.setattr(timing, "WARM_TOKENS", 6)
    methods = {"method": Streaming("method", []), "baseline": Whole("baseline", [])}
    requests = [Request(Source((at,)), Limits(1, 100)) for at in range(3)]
    warm_up(methods, requests, 2, TimingOptions())  # three tokens of each text: two rounds
    rounds = [[("method", at, 100, token) for token in range(2)] for at in range(2)]
    assert notes == [*rounds[0], ("baseline", 0, 3, "all"), *rounds[1], ("baseline", 1, 3, "all")]
    for batch in (1, 2):
        assert warm_up(methods, requests, 0, TimingOptions(batch=batch)) == 0.0
    assert len(notes) == 6
    assert (
        warm_up(methods, requests, 1, TimingOptions(batch=2)) == 0.0
    )  # a batch whose texts are short
    assert {one[2] for one in notes[6:] if one[0] == "baseline"} == {6}


def test_clocks_run_in_the_first_repeat_alone_and_stand_still_while_tokens_are_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, traces = [0.0], []

    class Staged:
        def decode(self, request: Request, trace: Trace) -> list[int]:
            traces.append(type(trace))
            for _ in range(2):
                with trace.span("verify"):
                    now[0] += 1
                trace.emitted([5, 6], torch.zeros(3, 4), [0, 2, 1])
            return [*request.source.prompt, 5, 6, 5, 6]

    def score(rows: torch.Tensor, tokens: Sequence[int]) -> float:
        assert (rows.shape, tokens) == ((2, 4), [5, 6])
        now[0] += 100
        return -0.5

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    first = lambda: StageTrace(score=score, started=now[0])  # noqa: E731
    requests = noted(examples=1)[2]
    options = TimingOptions(first_trace=first)
    (timed,) = time_methods({"method": Staged()}, requests, 3, options)["method"]
    assert timed.latency_s == [2, 2, 2] and traces == [StageTrace, Trace, Trace]
    assert timed.trace.spans == [("verify", 0, 1), ("verify", 1, 2)]
    assert (timed.trace.log_probability, timed.trace.scored) == (-1.0, 4)


def test_a_pass_with_clocks_ends_after_some_tokens() -> None:
    method = DraftThenVerify(next_number(), ModelDrafter(next_number(), 3), ExactMatch())
    requests = [Request(Source((0,)), Limits(1, 4)) for _ in range(5)]
    assert len(list(traced_pass(method, requests, TimingOptions(), tokens=9))) == 3


def test_each_example_has_a_seed_of_its_own_that_repeats_and_methods_share() -> None:
    methods, notes, requests = noted(temperature=1.0)
    time_methods(methods, requests, 2, TimingOptions(seed=5))
    assert {(example, seed) for _, example, seed in notes} == {
        (7 + i, 5 * 1_000_003 + i) for i in range(3)
    }
    assert (
        requests[0].seeded(0, 1).generator.initial_seed()
        != requests[0].seeded(1, 0).generator.initial_seed()
    )


def test_no_garbage_is_collected_while_a_text_is_timed() -> None:
    methods, _, requests = noted(examples=1)
    assert gc.isenabled()
    time_methods(methods, requests, 1, TimingOptions())
    assert [one.collecting for one in methods.values()] == [[False], [False]] and gc.isenabled()
    gc.disable()
    with no_garbage_collection():
        pass
    assert not gc.isenabled()  # as it was
    gc.enable()


def test_the_clock_stops_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    @dataclass
    class Slow:
        def prepare(self, request: Request) -> None:
            assert request.source.prompt == (7,)
            now[0] += 100

        def decode(self, request: Request, trace: Trace) -> list[int]:
            now[0] += 1
            return [*request.source.prompt, 5]

    def wait() -> None:
        now[0] += 10

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    requests = [Request(Source((7,)), Limits(1, 4))]
    timed = time_methods({"method": Slow()}, requests, 2, TimingOptions(synchronize=wait))
    assert timed["method"][0].latency_s == [11, 11]


def test_a_text_during_which_a_step_was_compiled_is_timed_again() -> None:
    methods, notes, requests = noted(examples=1)
    (timed,) = time_methods(
        {"method": methods["method"]},
        requests,
        2,
        TimingOptions(compiled_steps=lambda: min(len(notes), 2)),
    )["method"]
    # earlier
    time_methods(
        {"method": methods["method"]}, requests, 1, TimingOptions(compiled_steps=lambda: 1)
    )
    notes.pop()
    assert len(notes) == 4  # three times for the first repeat, in two of which a step was compiled
    assert timed.token_ids == [3] and len(timed.latency_s) == 2
    assert timed.compiled == [False, False]


def test_a_text_that_compiles_each_time_is_timed_so_and_told() -> None:
    """As a batch does that has more shapes than graphs are kept."""
    methods, notes, requests = noted(examples=1)
    options = TimingOptions(compiled_steps=lambda: len(notes))
    (timed,) = time_methods({"method": methods["method"]}, requests, 2, options)["method"]
    assert len(notes) == 2 * timing.MOST_DECODINGS
    assert timed.compiled == [True, True] and len(timed.latency_s) == 2


def test_a_method_that_fails_says_at_which_example() -> None:
    class Broken:
        def decode(self, request: Request, trace: Trace) -> list[int]:
            if request.source.prompt == (8,):
                raise ValueError("no room")
            return [*request.source.prompt, 5]

    with pytest.raises(RuntimeError, match="example 1: no room"):
        time_methods({"method": Broken()}, noted()[2], 1, TimingOptions())
    assert gc.isenabled()


def test_a_text_without_its_prompt_is_refused_and_not_cut() -> None:
    class Headless(Noted):
        def decode(self, request: Request, trace: Trace) -> list[int]:
            return super().decode(request, trace)[1:]

    with pytest.raises(UserError, match="decode of Headless must return the list of the prompt's"):
        time_methods({"method": Headless("method", [])}, noted()[2], 1, TimingOptions())


def test_the_stages_of_all_examples_add_up_and_the_rest_is_host_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, seen = [0.0], []

    class Staged:
        def prepare(self, request: Request) -> None:
            seen.append(request.source.prompt)
            now[0] += 100

        def decode(self, request: Request, trace: Trace) -> list[int]:
            seen.append(request.generator.initial_seed())
            for stage, seconds in (("prefill", 1), ("draft", 2), ("verify", 4), ("draft", 2)):
                now[0] += 8  # host code
                with trace.span(stage):
                    now[0] += seconds
            return []

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        timing,
        "StageTrace",
        lambda synchronize: StageTrace(synchronize=synchronize, started=now[0]),
    )
    requests = noted(temperature=1.0, examples=2)[2]
    seconds, traces = stages_of(traced_pass(Staged(), requests, TimingOptions(seed=5)))
    assert seconds == {"prefill": 2, "draft": 8, "verify": 8, "host": 64}
    assert seen == [(7,), 5 * 1_000_003, (8,), 5 * 1_000_003 + 1]  # prepared, then decoded
    assert [trace.spans[0] for trace in traces] == [("prefill", 8, 9)] * 2


def of_seconds(*stages: tuple[str, float]) -> list[Span]:
    """Spans one after the other."""
    ends = list(accumulate(seconds for _, seconds in stages))
    return [(name, end - seconds, end) for (name, seconds), end in zip(stages, ends, strict=True)]


def traced(*stages: tuple[str, float], draft_calls: Sequence[int] = ()) -> StageTrace:
    """A trace of these spans, and a round for each of these numbers of drafter forwards."""
    rounds = [Round(next_token=7, draft_calls=calls) for calls in draft_calls]
    return StageTrace(spans=of_seconds(*stages), rounds=rounds)


def test_a_prompt_that_runs_with_the_first_rows_is_prefill() -> None:
    rounds = [("draft", 3.0), ("verify", 9.0), *[("draft", 1.0), ("verify", 2.0)] * 3]
    trace = traced(("prefill", 0.5), *rounds, draft_calls=[0] * 4)
    assert prompt_s(trace) == {"draft": 2.0, "verify": 7.0}
    assert drafter_prompt_s(trace, part_of_target=True) == 2.0
    decoder_only, _ = stages_of([(trace, 22.0)], reads_prompt_in_rounds=True)
    assert decoder_only == {"prefill": 9.5, "draft": 4.0, "verify": 8.0, "host": 0.5}
    encoded, _ = stages_of([(trace, 22.0)])
    assert encoded == {"prefill": 0.5, "draft": 6.0, "verify": 15.0, "host": 0.5}
    # a drafter that begins in the second round; its last draft is short
    late = [("draft", 0.0), ("draft", 5.0), ("draft", 1.0), ("draft", 1.0), ("draft", 0.5)]
    assert prompt_s(traced(*late, draft_calls=[0, 2, 2, 2, 1])) == {"draft": 4.0}
    assert prompt_s(traced(("prefill", 1.0), ("draft", 3.0), draft_calls=[3])) == {}


def test_a_first_draft_that_is_longer_or_shorter_reads_no_more_of_the_prompt() -> None:
    calls = [7, 2, 1, 9, 2]
    drafts = [("draft", 0.5 * count) for count in calls]
    assert prompt_s(traced(*drafts, draft_calls=calls)) == {"draft": 0.0}
    drafts = [("draft", 4.0 + 0.5), *drafts[:-1]]
    assert prompt_s(traced(*drafts, draft_calls=[1, *calls[:-1]])) == {"draft": 4.0}


def test_a_later_verification_that_is_longer_reads_no_prompt() -> None:
    rounds = [("draft", 0.0), ("verify", 1.0), ("draft", 0.0), ("verify", 3.0)]
    assert prompt_s(traced(*rounds, draft_calls=[0, 0]))["verify"] == 0.0


def test_a_program_of_several_tokens_is_no_prompt() -> None:
    programs = [("verify", 32.0), ("verify", 8.0)]
    trace = traced(("draft", 0.0), ("verify", 6.0), *programs, draft_calls=[0] * 41)
    assert prompt_s(trace) == {"verify": 5.0}


def test_a_prompt_that_was_read_before_the_first_token_is_not_counted_again() -> None:
    trace = traced(("prefill", 9.0), ("verify", 2.0), ("verify", 1.0), draft_calls=[0, 0])
    assert prompt_s(trace) == {}


def test_a_draft_models_own_reading_is_its_own_where_the_target_reads_faster() -> None:
    rounds = [("draft", 9.0), ("verify", 4.0), *[("draft", 1.0), ("verify", 2.0)] * 2]
    trace = traced(*rounds, draft_calls=[2, 2, 2])
    assert drafter_prompt_s(trace, part_of_target=False) == 8.0
    assert drafter_prompt_s(trace, part_of_target=True) == 2.0


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_of_several_methods_each_has_every_place_equally_often(repeats: int) -> None:
    names = ["a", "b", "c"]
    turns = [order(names, index, repeat) for repeat in range(repeats) for index in range(6)]
    assert turns[:3] == [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]]
    assert all(sorted(turn) == names for turn in turns)
    assert all(
        [turn[place] for turn in turns].count(name) == 2 * repeats
        for place in range(3)
        for name in names
    )


@dataclass
class Slow(Noted):
    """One that takes a millisecond for a text, and emits its number."""

    def decode(self, request: Request, trace: Trace) -> list[int]:
        super().decode(request, trace)
        time.sleep(0.001)
        return [*request.source.prompt, request.source.prompt[0] + 1]


def in_batches(
    *methods: Noted, count: int, batch: int = 2, repeats: int = 1, **calls: object
) -> dict[str, list]:
    """Timed on texts 0, 1, … with seed 5."""
    requests = [Request(Source((at,)), Limits(1, 4), Sampling(1.0)) for at in range(count)]
    options = TimingOptions(seed=5, batch=batch, **calls)
    return time_methods({one.name: one for one in methods}, requests, repeats, options)


def test_in_batches_methods_take_turns_with_blocks_and_each_text_has_its_own_seed() -> None:
    notes, advanced = [], []
    size, rest = 2 * BLOCK, BLOCK
    methods = (Slow("method", notes), Slow("baseline", notes))
    found = in_batches(*methods, count=size + rest, repeats=2, advance=advanced.append)
    first, second = list(range(size)), list(range(size, size + rest))
    turns = [("method", first), ("baseline", first), ("baseline", second), ("method", second)]
    turns += [("baseline", first), ("method", first), ("method", second), ("baseline", second)]
    assert [(name, at) for name, at, _ in notes] == [
        (name, at) for name, some in turns for at in some
    ]
    assert all(seed == 5 * 1_000_003 + at for _, at, seed in notes)
    assert advanced == [1 / 4] * 4 * (size + rest)  # with each text, not when a block is over
    assert [one.token_ids for one in found["method"]] == [[at + 1] for at in range(size + rest)]
    assert all(
        len(one.latency_s) == len(one.waited_s) == 2
        for several in found.values()
        for one in several
    )
    numbers = [[one.block for one in several] for several in found.values()]
    assert numbers == [[0] * size + [1] * rest] * 2 == [block_numbers(size + rest, batch=2)] * 2


def test_a_method_with_batches_of_its_own_gets_so_many_texts_at_a_time() -> None:
    @dataclass
    class Together(Noted):
        def decode_batch(self, requests: Sequence[Request]) -> list[list[int]]:
            self.notes.append((self.name, len(requests), None))
            time.sleep(0.004)
            return [[*one.source.prompt, 7] for one in requests]

    notes: list = []
    found = in_batches(Together("method", notes), count=5)["method"]
    assert [count for _, count, _ in notes] == [2, 2, 1]
    assert [one.token_ids for one in found] == [[7]] * 5
    first, last = found[0], found[-1]
    assert (
        first.waited_s[0] == pytest.approx(2 * first.latency_s[0])
        and last.waited_s == last.latency_s
    )


def test_a_batch_is_prepared_and_waited_for_before_and_after_its_work() -> None:
    notes: list = []

    class Prepared(Noted):
        def prepare(self, request: Request) -> None:
            self.notes.append(("prepare", request.source.prompt[0]))

        def decode(self, request: Request, trace: Trace) -> list[int]:
            work = PendingOp(
                "step", 1, lambda several: self.notes.append(("run", len(several))) or several, None
            )
            current_batch().wait(work)
            trace.stats["text"] = request.source.prompt[0]
            return [*request.source.prompt, 1]

    found = in_batches(
        Prepared("method", notes), count=3, synchronize=lambda: notes.append("waited")
    )
    prepared = [("prepare", 0), ("prepare", 1), ("prepare", 2)]
    assert notes == [*prepared, "waited", ("run", 2), "waited", ("run", 1), "waited"]
    assert [one.trace.stats for one in found["method"]] == [{"text": at} for at in range(3)]


def test_further_repeats_are_added_to_the_earlier_ones_and_go_on_taking_turns() -> None:
    methods, notes, requests = noted(examples=2)
    timed = time_methods(methods, requests, 1, TimingOptions())
    texts = [one.token_ids for one in timed["method"]]
    assert time_methods(methods, requests, 1, TimingOptions(), timed) is timed
    # as a second repeat
    assert [name for name, _, _ in notes[4:]] == ["baseline", "method", "method", "baseline"]
    assert [one.token_ids for one in timed["method"]] == texts
    assert repeats_of(timed) == 2 and {len(one.latency_s) for one in timed["method"]} == {2}


def test_repeats_end_when_the_speedup_is_known_or_their_number_is_reached() -> None:
    def too_noisy(most: int = 9, **seconds: list[float]) -> bool:
        timed = {name: [Timed([1], each, Trace())] for name, each in seconds.items()}
        return is_too_noisy(timed, MeasureSpec(precision=0.1, repeats=2, most_repeats=most))

    steady, shaken = [1.0, 1.0, 1.0], [1.0, 1.5, 1.0]
    assert not too_noisy(method=steady, baseline=steady)
    assert too_noisy(method=shaken, baseline=steady) and not too_noisy(
        method=shaken, baseline=shaken
    )
    assert not too_noisy(most=3, method=shaken, baseline=steady)
    assert too_noisy(method=[1.0], baseline=[1.0])  # of one repeat nothing is known
    assert not is_too_noisy({"method": [Timed([1], shaken, Trace())]}, MeasureSpec())


def test_texts_that_never_came_ask_for_no_repeats() -> None:
    spec = MeasureSpec(precision=0.1, repeats=2, most_repeats=9)
    steady, failed = Timed([1], [1.0, 1.0, 1.0], Trace()), Timed([], [9.0, 0.0, 5.0], Trace())
    failed.reports.append(EngineReport(error="it has died"))
    baseline = [steady, steady]
    assert not is_too_noisy({"method": [steady, failed], "baseline": baseline}, spec)
    assert not is_too_noisy({"method": [failed, failed], "baseline": baseline}, spec)
    begun = replace(failed, latency_s=[9.0])  # after one repeat, too
    assert not is_too_noisy({"method": [begun], "baseline": [Timed([1], [1.0], Trace())]}, spec)


@pytest.mark.parametrize("batch", [1, 2])
def test_joules_of_what_is_prepared_do_not_count_as_its_seconds_do_not(batch: int) -> None:
    methods, _, requests = noted(examples=2)
    meter = [0.0]

    def joules() -> float:
        used, meter[0] = meter[0], 0.0
        return used

    class Preparing:
        def __init__(self, method: object) -> None:
            self.method = method

        def prepare(self, request: Request) -> None:
            meter[0] += 1000.0

        def decode(self, request: Request, trace: Trace) -> list[int]:
            meter[0] += 2.0
            return self.method.decode(request, trace)

    preparing = {name: Preparing(method) for name, method in methods.items()}
    timed = time_methods(preparing, requests, 2, TimingOptions(joules=joules, batch=batch))
    for texts in timed.values():  # 2 joules for each text of each repeat
        assert sum(sum(text.joules) for text in texts) == pytest.approx(2 * 2 * 2.0)
    unmoved = TimingOptions(joules=lambda: 0.0, batch=batch)  # of a counter of coarse steps
    (text, _) = time_methods({"method": methods["method"]}, requests, 2, unmoved)["method"]
    assert text.joules == [0.0, 0.0]


def test_joules_of_a_batch_are_shared_out_as_its_seconds_are() -> None:
    """A text that never came takes none with it."""
    texts = [BatchedText([1], Trace(), seconds, seconds) for seconds in (1.0, 0.0, 3.0)]
    assert timing._shared_out(8.0, texts) == [2.0, 0.0, 6.0]
    assert timing._shared_out(None, texts) == [None] * 3


class Clocked(DraftThenVerify):
    """Rounds and programs that take so many seconds of a pretended clock."""

    program_s, runs = 0.75 / 128, 0

    def rounds(
        self, request: Request, trace: Trace, by_programs: bool = False
    ) -> Iterator[list[int]]:
        self.runs += 1
        rounds, seconds = (1, self.program_s) if by_programs else (LOOP_TOKENS, 0.5 / 128)
        for _ in range(rounds):
            CLOCK[0] += seconds
            yield [5] * (LOOP_TOKENS // rounds)


class SlowPrograms(Clocked):
    program_s = 9.0 / 128


class LongPrompt(Clocked):
    """The prompt takes most of a second."""

    def rounds(
        self, request: Request, trace: Trace, by_programs: bool = False
    ) -> Iterator[list[int]]:
        CLOCK[0] += 0.75
        yield from super().rounds(request, trace, by_programs)


class Interrupted(Clocked):
    """Another process runs meanwhile, but in each seventh run."""

    def rounds(
        self, request: Request, trace: Trace, by_programs: bool = False
    ) -> Iterator[list[int]]:
        CLOCK[0] += 4.0 / 128 if (self.runs + 1) % 7 else 0.0
        yield from super().rounds(request, trace, by_programs)


LOOP_TOKENS, CLOCK = 6, [0.0]


def test_the_loops_share_is_what_programs_of_the_same_tokens_do_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing.time, "perf_counter", lambda: CLOCK[0])
    target = next_number()
    request = Request(Source((0,)), Limits(1, LOOP_TOKENS))
    vanilla = Clocked(target, NoDraft(target), ExactMatch())
    assert loop_share(vanilla, request) == 1 - 0.75 / (0.5 * LOOP_TOKENS)
    drafting = Clocked(target, ModelDrafter(target, 3), ExactMatch())
    sampled = replace(request, sampling=Sampling(1.0))
    assert loop_share(drafting, request) is loop_share(vanilla, sampled) is None
    without_programs = target_alone(target)
    assert loop_share(without_programs, request) is None
    slow_programs = SlowPrograms(target, NoDraft(target), ExactMatch())
    assert loop_share(slow_programs, request) == 0.0
    busy = Interrupted(target, NoDraft(target), ExactMatch())
    assert loop_share(busy, request) == loop_share(vanilla, request)
    long_prompt = LongPrompt(target, NoDraft(target), ExactMatch())
    assert 0 < loop_share(long_prompt, request) < loop_share(vanilla, request)
    assert (long_prompt.runs, busy.runs) == (2 * 3, 2 * 10)


def test_a_warm_up_tells_the_shortest_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spanned(Noted):
        def stream(self, request: Request, trace: Trace) -> Iterator[list[int]]:
            for verify_s in (0.75, 0.5, 2.0):
                for stage, seconds in (("draft", 0.25), ("verify", verify_s)):
                    with trace.span(stage):
                        CLOCK[0] += seconds
                yield [5]

    monkeypatch.setattr(timing.time, "perf_counter", lambda: CLOCK[0])
    requests = [Request(Source((7,)), Limits(1, 9))]
    found = warm_up({"method": Spanned("method", [])}, requests, 1, TimingOptions())
    assert found == pytest.approx(0.5)


@dataclass
class Noting:
    """A method that notes how many tokens it may decode of each text, streamed or not."""

    calls: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    def decode(self, request: Request, trace: Trace) -> list[int]:
        self.calls.append(("decode", request.source.prompt, request.limits.max_new_tokens))
        return [*request.source.prompt, 5]


class NotingStream(Noting):
    def stream(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        self.calls.append(("stream", request.source.prompt, request.limits.max_new_tokens))
        yield [5]
        raise AssertionError("one token is enough")


def test_a_rehearsal_meets_each_texts_shapes_before_they_are_timed_for_the_first_time() -> None:
    requests = [Request(Source((start,)), Limits(1, 9)) for start in range(3)]
    methods = {"peer": Noting(), "ours": NotingStream()}
    read: list[int] = []
    options = TimingOptions(rehearses=True, after_block=lambda: read.append(1))
    timed = time_methods(methods, requests, 2, options)
    second_pass = [("decode", (start,), 9) for start in range(3)]
    assert methods["peer"].calls == [
        *[("decode", (start,), tokens) for start in range(3) for tokens in (1, 9)],
        *second_pass,
    ]
    assert methods["ours"].calls == [
        *[(kind, (start,), 9) for start in range(3) for kind in ("stream", "decode")],
        *second_pass,
    ]
    assert len(read) == 2 * 2 * len(requests)
    time_methods(methods, requests, 1, options, timed)  # of texts that were met
    assert len(methods["peer"].calls) == 3 * len(requests) + len(requests)
    cold = Noting()
    time_methods({"peer": cold}, requests, 1, TimingOptions())
    assert len(cold.calls) == len(requests)
