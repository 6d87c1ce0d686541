"""Measures a checked point: load, decode in turn with its baseline and the clock running, score,
store.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from bild_lab.engine.batch_decoding import BatchedText, decode_batch, require_room
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.protocols import External, Method, Replays, Streams
from bild_lab.engine.request import Request
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.lab.config.schemas import MeasureSpec
from bild_lab.lab.measure.prediction import PROFILE, speculation_profile
from bild_lab.lab.measure.score import Clock, prepare_method, requests_of, result_of, seeded
from bild_lab.lab.measure.summary import latencies, log_probability, require_no_nan
from bild_lab.lab.point.decoder import BASELINE, METHOD, Decoder, Timed, with_history
from bild_lab.lab.point.environment import (
    DeviceUse,
    Energy,
    OtherLoad,
    environment,
    no_garbage_collection,
    wait_for_quiet,
)
from bild_lab.lab.point.prepare import Point
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import clock_noise
from bild_lab.lab.store.progress import DECODING
from bild_lab.lab.store.records import Sweep

# of each method before timing: memory is touched, shapes are compiled, threads are awake
WARM_TOKENS = 32
LONG_ROUND_S = 0.01  # in which a clock, and a pause for scores, change less than a thousandth
# batches of texts that are decoded by one method before the other: a batch drains at the end of
# each
BLOCK = 8


def run_point(
    point: Point,
    sweep: Sweep,
    setup_s: float = 0.0,
    advance: Callable[[float], None] = lambda texts: None,
    stage: Callable[[str], None] = lambda name: None,
) -> Result:
    """Measure a point, store its result and return it.

    Every text (in a batch, block of texts) is decoded by policy and baseline in turn. Of a policy
    that replays texts nothing is timed. setup_s: seconds spent on the point before this call; they
    become part of its `seconds`. advance: see `time_methods`. stage: called with the name of each
    part of the measurement when it begins.
    """
    clock, decoder = Clock(stage, setup_s), point.decoders[METHOD]
    with clock.part("load"):
        torch.set_num_threads(point.setting["threads"])
        use = DeviceUse(decoder.target.device)
        surroundings = _loaded(point, stage)
    with clock.part("history"):
        limit, folder = point.decoding.max_new_tokens, sweep.folder / "history"
        examples = with_history(point.examples, point.vanilla, point.setting, limit, folder)
        requests = requests_of(point, examples)
    with clock.part("check"):
        decoders = point.decoders.values()
        methods = {name: each.method for name, each in point.decoders.items()}
        require_no_nan([one for each in decoders for one in each.running], requests[0])
        if point.batch > 1:
            models = {id(one): one for each in decoders for one in each.models}
            require_room(models.values(), requests, point.batch)
    if isinstance(decoder.method, Replays):
        with clock.part("decode"):
            once = time_methods(
                methods, requests, 1, point.seed, decoder.synchronize, advance, batch=point.batch
            )
            timed = {
                name: [text.without_clock() for text in several] for name, several in once.items()
            }
        use.close()
    else:
        timed = _timed(point, methods, requests, clock, use, surroundings, advance)
    result, rows = result_of(point, examples, requests, timed, surroundings, clock)
    profile = {PROFILE: speculation_profile(result, rows, point.decoders[METHOD])}
    folder = sweep.write_point(
        point.id, point.config_yaml, result, rows, not point.resume, **profile
    )
    return replace(result, folder=folder)


def _timed(
    point: Point,
    methods: Mapping[str, Method],
    requests: Sequence[Request],
    clock: Clock,
    use: DeviceUse,
    surroundings: dict[str, Any],
    advance: Callable[[float], None],
) -> dict[str, list[Timed]]:
    """Warm up, wait for a quiet machine, and time all methods. surroundings: gets what else the
    machine did.
    """
    decoders, decoder = point.decoders.values(), point.decoders[METHOD]
    with clock.part("warmup"):
        shortest_s = warm_up(methods, requests, point.measure.warmup, point.seed, point.batch)
    external = [method for method in methods.values() if isinstance(method, External)]
    helpers_s = lambda: sum(each.cpu_seconds() for each in external)  # noqa: E731
    with clock.part("wait"):
        if waited_s := wait_for_quiet(point.measure.quiet, helpers_s):
            surroundings["waited_s"] = waited_s
    with clock.part("decode"):
        others, energy = OtherLoad(helpers_s), Energy(decoder.target.device)
        compiled = lambda: compiled_steps(decoders)  # noqa: E731
        options = (point.seed, decoder.synchronize, advance, compiled, point.batch)
        options += (_first_trace(point, shortest_s), energy.since)
        timed = time_methods(methods, requests, point.measure.repeats, *options)
        while is_too_noisy(timed, point.measure):
            clock.stage(f"{DECODING}, repeat {repeats_of(timed) + 1}")
            time_methods(methods, requests, 1, *options, timed)
        surroundings["busy_elsewhere_percent"] = round(others.percent(), 1)
        surroundings["shared_device"] = use.shared()
        use.close()
    return timed


def _loaded(point: Point, stage: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Load the weights. Returns what a result says of the environment."""
    target = point.decoders[METHOD].target
    surroundings = {**environment(target.device), "host": platform.node()}
    # modules of Transformers last, as they share our decoders' weights
    for each in sorted(point.decoders.values(), key=lambda one: one.method.engine == "hf"):
        each.load_weights(stage)
    if (parts := target.transformers.parts) is not None:
        surroundings["parts"] = parts
    return surroundings


def _first_trace(point: Point, shortest_s: float) -> Callable[[], Trace]:
    """What the first repeat of a text records, given the seconds of the shortest verification.

    Stages, and what the target's rows give to the text, where that costs the timing nothing: of
    long rounds on a CPU, whose clock can be paused. Logits processors change the rows.
    """
    decoder = point.decoders[METHOD]
    if decoder.target.device.type != "cpu" or shortest_s < LONG_ROUND_S:
        return Trace
    wanted = point.measure.target_log_probability and not decoder.processors
    return lambda: StageTrace(score=log_probability if wanted else None)


def compiled_steps(decoders: Iterable[Decoder]) -> int:
    """How many shapes the models have compiled. A model shared by several decoders counts once."""
    models = {id(model): model for each in decoders for model in each.models}
    return sum(model.compiled_steps for model in models.values())


def warm_up(
    methods: Mapping[str, Method],
    requests: Sequence[Request],
    count: int,
    seed: int,
    batch: int = 1,
) -> float:
    """Decode the beginnings of the first examples with every method, in batches the first that fit.

    `WARM_TOKENS` of each method, shared among its examples. Outside of batches each has the memory
    of its whole text, so that the same steps are compiled. Returns the seconds of the shortest
    verification, 0.0 if there was none.
    """
    verified_s: list[float] = []
    count = min(len(requests), batch if batch > 1 and count else count)
    most = WARM_TOKENS if batch > 1 else -(-WARM_TOKENS // max(1, count))
    for block in blocks(count, batch):
        for method in methods.values():
            some = [seeded(requests[index], seed, index) for index in block]
            if batch == 1 and isinstance(method, Streams):
                prepare_method(method, some, lambda: None)
                emitted, trace = 0, StageTrace()
                for new in method.stream(some[0], trace):
                    emitted += len(new)
                    if emitted >= most:
                        break
                verified_s += [
                    end - start for stage, start, end in trace.spans if stage == "verify"
                ]
            else:
                _decode(method, [one.shorter(most) for one in some], batch, lambda: None)
    return min(verified_s, default=0.0)


def time_methods(
    methods: Mapping[str, Method],
    requests: Sequence[Request],
    repeats: int,
    seed: int,
    synchronize: Callable[[], None],
    advance: Callable[[float], None] = lambda texts: None,
    compiled_steps: Callable[[], int] = lambda: 0,
    batch: int = 1,
    first_trace: Callable[[], Trace] = Trace,
    joules: Callable[[], float | None] = lambda: None,
    before: dict[str, list[Timed]] | None = None,
) -> dict[str, list[Timed]]:
    """Decode every example with every method in turn, `repeats` times. The order alternates.

    Of more than two methods another begins every second time. The time covers a whole example
    including encoder and prefill, the device synchronized before and after, without a method's
    preparation (`Prepares`). An example is decoded again if a step was compiled meanwhile. Raises
    RuntimeError, naming the example, if a method fails.

    batch: how many texts are decoded at a time. In batches methods take turns with blocks of
    examples, whose seconds are shared out among the texts: see `Timed`. first_trace: makes the
    trace of a text's first repeat outside of batches; the seconds in which it is paused do not
    count. joules: the energy since it was asked last. advance: called after every decoding with its
    share of the work, in texts. before: earlier repeats of the same, to which these are added.
    """
    results: dict[str, list[Timed]] = {name: [] for name in methods} if before is None else before
    names, done = list(methods), 0 if before is None else repeats_of(before)
    one_done = lambda _: advance(1 / (repeats * len(names)))  # noqa: E731
    with no_garbage_collection():
        for turn, block in enumerate(blocks(len(requests), BLOCK * batch if batch > 1 else 1)):
            for repeat in range(done, done + repeats):
                for name in order(names, turn, repeat, done + repeats):
                    steps = -1
                    while steps != compiled_steps():  # else the time would include compilation
                        steps = compiled_steps()
                        own = [seeded(requests[index], seed, index) for index in block]
                        trace = first_trace if repeat == 0 else Trace
                        joules()
                        texts = _decode(
                            methods[name], own, batch, synchronize, block[0], trace, one_done
                        )
                        spent = joules()
                    if repeat == 0:
                        results[name] += [Timed(one.token_ids, [], one.trace) for one in texts]
                    for index, one in zip(block, texts, strict=True):
                        results[name][index].latency_s.append(one.share_s)
                        if batch > 1:
                            results[name][index].waited_s.append(one.latency_s)
                        if spent is not None:
                            results[name][index].joules.append(spent / len(block))
                    if batch == 1:
                        one_done(block[0])
    return results


def repeats_of(timed: Mapping[str, Sequence[Timed]]) -> int:
    """How often every text was timed."""
    return len(next(iter(timed.values()))[0].latency_s)


def is_too_noisy(timed: Mapping[str, Sequence[Timed]], measure: MeasureSpec) -> bool:
    """Whether a speedup is known less well than was asked for, and repeats are left that may make
    it better known.
    """
    if measure.precision is None or repeats_of(timed) >= measure.most_repeats:
        return False
    noise = clock_noise(latencies(timed[BASELINE]), latencies(timed[METHOD]))
    return noise is None or noise > measure.precision


def order(names: Sequence[str], index: int, repeat: int, repeats: int) -> list[str]:
    """In which order methods decode an example, or block of them: two by turns, more from another
    one each time.
    """
    if len(names) <= 2:
        return list(names) if (index + repeat) % 2 == 0 else list(reversed(names))
    turn = index * repeats + repeat
    start = turn // 2 % len(names)
    turned = [*names[start:], *names[:start]]
    return turned if turn % 2 == 0 else turned[::-1]


def blocks(count: int, size: int) -> Iterator[range]:
    """Ranges of about so many examples. A short rest belongs to the one before it."""
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] < size // 2:
        starts.pop()
    yield from (range(start, stop) for start, stop in pairwise([*starts, count]))


def _decode(
    method: Method,
    requests: Sequence[Request],
    batch: int,
    synchronize: Callable[[], None],
    first: int = 0,
    new_trace: Callable[[], Trace] = Trace,
    ended: Callable[[int], None] = lambda index: None,
) -> list[BatchedText]:
    """Decode one text, or several in batches. first: the place of the first among all. ended: with
    each of a batch.
    """
    if batch > 1:
        prepare_method(method, requests, synchronize)
        return decode_batch(method, requests, Batch(batch, synchronize), ended)
    (request,) = requests
    try:
        prepare_method(method, requests, synchronize)
        trace = new_trace()
        started = time.perf_counter()
        tokens = method.decode(request, trace)
    except Exception as error:
        raise RuntimeError(f"example {first}: {error}") from error
    synchronize()
    seconds = time.perf_counter() - started - trace.paused_s
    return [BatchedText(tokens[request.limits.prompt_length :], trace, seconds, seconds)]
