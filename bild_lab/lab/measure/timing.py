"""Decoding with the clock running: every text by every method in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from bild_lab.engine.batch_decoding import BatchedText, decode_batch, shares_of
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.decode import PROGRAM_TOKENS, DraftThenVerify
from bild_lab.engine.protocols import Method, Prepares, Streams, require_text
from bild_lab.engine.request import Request
from bild_lab.engine.trace import EngineReport, StageTrace, Trace, no_wait
from bild_lab.lab.measure.blocks import blocks, timed_blocks
from bild_lab.lab.point.environment import no_garbage_collection
from bild_lab.lab.store.progress import DECODING

PHASES = {  # the phases of a measurement, by their names in a result's `seconds`: their titles
    "load": "loading models",
    "history": "preparing texts",
    "check": "checking",
    "warmup": "warming up",
    "wait": "waiting for a quiet machine",
    "decode": DECODING,
    "trace": "tracing",
    "certify": "certifying",
    "likelihood": "scoring by the target",
    "metrics": "scoring",
}
# new tokens that each method decodes before timing: memory is touched, shapes are compiled, threads
# are awake
WARM_TOKENS = 32
# how often a block is decoded at most until no step is compiled meanwhile: a batch whose steps have
# more shapes than are kept compiles some each time
MOST_DECODINGS = 4
# a clock and a pause for scores change less than a thousandth of a round so long, and the loop's
# share of it is small
LONG_ROUND_S = 0.01
# on a busy machine most runs are interrupted, each for as long as such a text takes: of 3 the shortest
# often is too, and the share then is anything from 0 to 0.9 where it is a third; of 10 it hardly is
LOOP_SHARE_REPEATS = 10
# longer runs, as of long prompts, end after so many seconds: an interruption is a smaller part of each
LOOP_SHARE_ENOUGH_S = 2.0
LOOP_SHARE_MIN_REPEATS = 3
TRACED_TOKENS = 2048  # how many new tokens a pass with clocks of its own decodes


class Stopwatch:
    """Wall-clock seconds of each phase of a measurement. stage: called with a phase's title.
    setup_s: seconds before the first phase.
    """

    def __init__(self, stage: Callable[[str], None], setup_s: float) -> None:
        self.stage = stage
        self.seconds = {"setup": setup_s}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is this one of `PHASES`."""
        self.stage(PHASES[name])
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


@dataclass(frozen=True)
class Timed:
    """One method's output on one example: the emitted tokens, the seconds of every repeat, and the
    trace.

    Of the lists, `latency_s`, `waited_s` and `joules` are empty if nothing was timed.
    """

    token_ids: list[int]
    latency_s: list[float]  # in a batch, its share of the batch's seconds
    trace: Trace
    waited_s: list[float] = field(default_factory=list)  # in a batch, from its place to its end
    # as latency_s; empty where no counter can be read
    joules: list[float] = field(default_factory=list)
    # in a batch, the number of the block of texts that it was timed with
    block: int | None = None
    # of each repeat, whether its seconds include compiling
    compiled: list[bool] = field(default_factory=list)
    # of each repeat, how many rounds verified something
    target_calls: list[int] = field(default_factory=list)
    # what another engine reported in every repeat; empty for our own
    reports: list[EngineReport] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether another engine gave no text in one of the repeats, whose seconds say nothing."""
        return any(report.error is not None for report in self.reports)


TimedTexts = dict[str, list[Timed]]  # each method's texts, in the order of the examples


def no_steps() -> int:
    """Count no compiled steps: nothing compiles."""
    return 0


def no_joules() -> None:
    """Read no energy: there is no counter."""


def no_reading() -> None:
    """Read nothing: there is no clock of a GPU."""


def no_progress(texts: float) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class TimingOptions:
    """How texts are decoded while the clock runs."""

    seed: int = 0  # of sampled texts
    synchronize: Callable[[], None] = no_wait  # waits until the device has finished its work
    batch: int = 1  # how many texts are decoded at a time
    compiled_steps: Callable[[], int] = no_steps  # how many steps were compiled so far
    # makes the trace of a text's first repeat outside of batches; the seconds in which it is paused
    # do not count
    first_trace: Callable[[], Trace] = Trace
    # the energy since it was asked last, None if unknown
    joules: Callable[[], float | None] = no_joules
    after_block: Callable[[], None] = no_reading  # called after every timed block
    # before a block is timed for the first time, decode the first token of each of its texts, so
    # that libraries have met the shapes of its prompts; on a GPU they look for kernels, and load
    # them, at each new shape
    rehearses: bool = False
    # called after every decoding with its share of the work, in texts
    advance: Callable[[float], None] = no_progress


def time_methods(
    methods: Mapping[str, Method],
    requests: Sequence[Request],
    repeats: int,
    options: TimingOptions,
    earlier: TimedTexts | None = None,
) -> TimedTexts:
    """Decode every example with every method in turn, in `repeats` passes over all examples. So the
    repeats of an example lie apart, and differ where the machine's speed changes within minutes.

    The methods take turns at being first (`order`). The time
    covers a whole example including encoder and prefill, the device synchronized before and after,
    without a method's preparation (`Prepares`). An example is decoded again if a step was compiled
    meanwhile, at most `MOST_DECODINGS` times in all; `Timed.compiled` says where that was not
    enough. In batches methods take turns with blocks of examples, whose seconds are shared out
    among the texts: see `Timed`.

    earlier: the texts of earlier repeats, to which these repeats are added. Raises RuntimeError,
    naming the example, if a method fails.
    """
    timed = {name: [] for name in methods} if earlier is None else earlier
    first_repeat = 0 if earlier is None else repeats_of(earlier)
    passes = range(first_repeat, first_repeat + repeats)
    share = 1 / (repeats * len(methods))  # one decoding is so much of a text's work
    with no_garbage_collection():
        for repeat, number, block, name in _turns(methods, passes, len(requests), options.batch):
            texts, joules, compiled = _decode_block(
                methods[name], requests, block, options, share, is_first=repeat == 0
            )
            if repeat == 0:
                block_number = number if options.batch > 1 else None
                timed[name] += [
                    Timed(text.token_ids, [], text.trace, block=block_number) for text in texts
                ]
            block_joules = _shared_out(joules, texts)
            for index, text, text_joules in zip(block, texts, block_joules, strict=True):
                _add_repeat(timed[name][index], text, text_joules, compiled)
                if options.batch > 1:
                    timed[name][index].waited_s.append(text.latency_s)
            if options.batch == 1:
                options.advance(share)
    return timed


def _turns(
    methods: Mapping[str, Method], passes: range, texts: int, batch: int
) -> Iterator[tuple[int, int, range, str]]:
    """What is decoded next: in which pass, the number of the block and its places, by which method."""
    for repeat in passes:
        for number, block in enumerate(timed_blocks(texts, batch)):
            for name in order(list(methods), number, repeat):
                yield repeat, number, block, name


def _add_repeat(timed: Timed, text: BatchedText, joules: float | None, compiled: bool) -> None:
    """Note what a further decoding of a text took."""
    timed.latency_s.append(text.share_s)
    timed.compiled.append(compiled)
    timed.target_calls.append(text.trace.target_calls)
    if joules is not None:
        timed.joules.append(joules)
    if text.trace.report is not None:
        timed.reports.append(text.trace.report)


def _decode_block(
    method: Method,
    requests: Sequence[Request],
    block: range,
    options: TimingOptions,
    share: float,
    is_first: bool,
) -> tuple[list[BatchedText], float | None, bool]:
    """Decode a block of examples, and again if a step was compiled meanwhile, as the time would
    include compilation.

    Returns the texts, their joules, and whether a step was compiled in the last decoding too.
    """
    first_trace = options.first_trace if is_first else Trace
    if is_first and options.rehearses:
        _rehearse(method, requests, block, options)
    for _ in range(MOST_DECODINGS):
        steps = options.compiled_steps()
        seeded_requests = _seeded(requests, block, options)
        if options.batch > 1:
            texts = _decode_batch(method, seeded_requests, options, share)
        else:
            texts = [_decode_text(method, seeded_requests[0], options, first_trace, block[0])]
        joules = options.joules()
        options.after_block()
        if steps == options.compiled_steps():
            return texts, joules, False
    return texts, joules, True


def _seeded(requests: Sequence[Request], block: range, options: TimingOptions) -> list[Request]:
    return [requests[index].seeded(options.seed, index) for index in block]


def _shared_out(joules: float | None, texts: Sequence[BatchedText]) -> list[float | None]:
    """A block's joules for each of its texts, as its seconds are shared out; None stays."""
    if joules is None:
        return [None] * len(texts)
    return shares_of(joules, [text.share_s for text in texts])


def _rehearse(
    method: Method, requests: Sequence[Request], block: range, options: TimingOptions
) -> None:
    """Decode the first token of each text of a block, together if they are timed together."""
    untimed = replace(options, synchronize=no_wait, joules=no_joules, advance=no_progress)
    block_requests = _seeded(requests, block, options)
    if options.batch > 1:
        first_tokens = [request.shorter(1) for request in block_requests]
        _decode_batch(method, first_tokens, untimed, share=0.0)
    elif isinstance(method, Streams):  # with the memory of the whole text
        _warm_up_stream(method, block_requests[0], tokens=1)
    else:
        _decode_text(method, block_requests[0].shorter(1), untimed, Trace, block[0])
    options.synchronize()


def _decode_batch(
    method: Method, requests: Sequence[Request], options: TimingOptions, share: float
) -> list[BatchedText]:
    prepare_method(method, requests, options.synchronize)
    options.joules()  # counts from here on, as the clock does
    batch = Batch(options.batch, options.synchronize)
    return decode_batch(method, requests, batch, lambda _: options.advance(share))


def _decode_text(
    method: Method,
    request: Request,
    options: TimingOptions,
    new_trace: Callable[[], Trace],
    index: int,
) -> BatchedText:
    """index: the example's place, for the message of an error."""
    try:
        prepare_method(method, [request], options.synchronize)
        options.joules()  # counts from here on, as the clock does
        trace = new_trace()
        started = time.perf_counter()
        tokens = method.decode(request, trace)
    except Exception as error:
        raise RuntimeError(f"example {index}: {error}") from error
    options.synchronize()
    seconds = time.perf_counter() - started - trace.paused_s
    require_text(method, request, tokens)
    return BatchedText(tokens[request.limits.prompt_length :], trace, seconds, seconds)


def warm_up(
    methods: Mapping[str, Method],
    requests: Sequence[Request],
    count: int,
    options: TimingOptions,
) -> float:
    """Decode the beginnings of the first `count` examples with every method, in batches the first
    that fit.

    The examples of a method share `WARM_TOKENS`. Outside of batches each has the memory of its
    whole text, so that the same steps are compiled. What drafters learned is dropped. Returns the
    seconds of the shortest verification, 0.0 if there was none.
    """
    batch = options.batch
    untimed = replace(options, synchronize=no_wait, advance=no_progress)
    verify_s: list[float] = []
    count = min(len(requests), batch if batch > 1 and count else count)
    tokens_each = WARM_TOKENS if batch > 1 else -(-WARM_TOKENS // max(1, count))
    for block in blocks(count, batch):
        for method in methods.values():
            seeded_requests = _seeded(requests, block, options)
            if batch == 1 and isinstance(method, Streams):
                verify_s += _warm_up_stream(method, seeded_requests[0], tokens_each)
                continue
            short_requests = [request.shorter(tokens_each) for request in seeded_requests]
            if batch > 1:
                _decode_batch(method, short_requests, untimed, share=0.0)
            else:
                _decode_text(method, short_requests[0], untimed, Trace, index=0)
    for method in methods.values():
        if isinstance(method, DraftThenVerify):
            method.drafter.forget()
    return min(verify_s, default=0.0)


def _warm_up_stream(method: Streams, request: Request, tokens: int) -> list[float]:
    """Decode so many new tokens. Returns the seconds of every verification."""
    prepare_method(method, [request], no_wait)
    trace, emitted = StageTrace(), 0
    for new_tokens in method.stream(request, trace):
        emitted += len(new_tokens)
        if emitted >= tokens:
            break
    return [end - start for stage, start, end in trace.spans if stage == "verify"]


def traced_pass(
    method: Method,
    requests: Sequence[Request],
    options: TimingOptions,
    tokens: int = TRACED_TOKENS,
) -> Iterator[tuple[StageTrace, float]]:
    """Decode examples with a clock in each stage, until they have so many tokens.

    Yields each example's trace and seconds.
    """
    for index, request in enumerate(requests):
        if tokens <= 0:
            return
        prepare_method(method, [request], options.synchronize)
        trace = StageTrace(synchronize=options.synchronize)
        text = method.decode(request.seeded(options.seed, index), trace)
        options.synchronize()
        yield trace, time.perf_counter() - trace.started
        tokens -= len(text) - request.limits.prompt_length


def loop_share(method: Method, request: Request) -> float | None:
    """The share of a text's time that the loop takes between forwards, given `vanilla` on a CPU:
    the target decodes the same tokens by programs without it.

    None without programs.
    """
    if (
        not isinstance(method, DraftThenVerify)
        or method.target.device.type != "cpu"
        or not method.decodes_by_programs(request)
    ):
        return None
    short_request = request.shorter(1 + PROGRAM_TOKENS)
    loop_s, program_s = [], []
    for repeat in range(LOOP_SHARE_REPEATS):
        if repeat >= LOOP_SHARE_MIN_REPEATS and sum(loop_s) + sum(program_s) >= LOOP_SHARE_ENOUGH_S:
            break
        seconds, rounds = timed_rounds(method.rounds(short_request, Trace()))
        loop_s.append(seconds)
        seconds, programs = timed_rounds(method.rounds(short_request, Trace(), by_programs=True))
        program_s.append(seconds)
        if len(programs) == len(rounds):
            return None
    return max(0.0, 1 - min(program_s) / min(loop_s))


@torch.inference_mode()
def timed_rounds(rounds: Iterator[list[int]]) -> tuple[float, list[list[int]]]:
    """The seconds until a text has ended, and the tokens of each round."""
    started = time.perf_counter()
    tokens_by_round = list(rounds)
    return time.perf_counter() - started, tokens_by_round


def prepare_method(
    method: Method, requests: Sequence[Request], synchronize: Callable[[], None]
) -> None:
    """What a method does before each text, and is not timed (`Prepares`)."""
    for request in requests if isinstance(method, Prepares) else []:
        method.prepare(request)
    synchronize()


def differing_repeats(timed: Sequence[Timed]) -> int:
    """How many texts took other numbers of rounds in one repeat than in another."""
    return sum(len(set(text.target_calls)) > 1 for text in timed)


def token_count(timed: Sequence[Timed]) -> int:
    """The new tokens of all texts."""
    return sum(len(text.token_ids) for text in timed)


def total_s(timed: Sequence[Timed]) -> float:
    """Seconds of all texts together; the median of a text's repeats counts."""
    return float(sum(median(text.latency_s) for text in timed))


def repeats_of(timed: Mapping[str, Sequence[Timed]]) -> int:
    """How often every text was timed."""
    return len(next(iter(timed.values()))[0].latency_s)


def order(names: Sequence[str], index: int, repeat: int) -> list[str]:
    """The order in which methods decode an example, or a block of examples: two alternate; more
    rotate every second time, and come in reverse between.
    """
    turn = index + repeat
    start = turn // 2 % len(names) if len(names) > 2 else 0
    rotated = [*names[start:], *names[:start]]
    return rotated if turn % 2 == 0 else rotated[::-1]
