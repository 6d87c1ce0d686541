"""Measures a checked point, or several side by side: load, decode in turn with the clock running, score, store."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from bild_lab.engine.batch import Batch
from bild_lab.engine.batched import BatchedText, decode_batch, require_room
from bild_lab.engine.protocols import External, Method, Streams
from bild_lab.engine.request import Request
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.errors import UserError
from bild_lab.lab.analysis.prediction import PROFILE, speculation_profile
from bild_lab.lab.analysis.statistics import clock_noise
from bild_lab.lab.config import MeasureSpec
from bild_lab.lab.data.examples import Example
from bild_lab.lab.decoding.decoder import BASELINE, METHOD, Decoder, Timed, with_history
from bild_lab.lab.measure.environment import (
    DeviceUse,
    Energy,
    OtherLoad,
    environment,
    no_garbage_collection,
    wait_for_quiet,
)
from bild_lab.lab.measure.summary import latencies, log_probability, require_no_nan
from bild_lab.lab.point import Point
from bild_lab.lab.progress import DECODING
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.result import Result
from bild_lab.lab.score import Clock, Measured, prepare_method, result_of, seeded
from bild_lab.lab.tree_search import with_fitted_tree

LONGEST_DRAFT = 256  # tokens; texts that end so far before a model's last position are not affected by it
WARM_TOKENS = 32  # of each method before timing: memory is touched, shapes are compiled, threads are awake
LONG_ROUND_S = 0.01  # in which a clock, and a pause for scores, change less than a thousandth
BLOCK = 8  # batches of texts that are decoded by one method before the other: a batch drains at the end of each


def run_point(point: Point, sweep: Sweep, **options: Any) -> Result:
    """Measure a point, store its result and return it. options: as in `run_points`."""
    (result,) = run_points([point], sweep, **options)
    return result


def run_points(
    points: Sequence[Point],
    sweep: Sweep,
    setup_s: float = 0.0,
    advance: Callable[[float], None] = lambda texts: None,
    stage: Callable[[str], None] = lambda name: None,
) -> list[Result]:
    """Measure points side by side, store their results and return them.

    Every text (in a batch, block of texts) is decoded by every point's policy in turn, and once by the baseline that
    they share. Each point's `seconds` has its share of what they had together. All are stored at the end, or none.

    setup_s: seconds spent on the points before this call; they become part of their `seconds`. advance: see
    `time_methods`. stage: called with the name of each part of the measurement when it begins. Raises UserError for
    points whose timings would not be of the same work.
    """
    require_same_work(points)
    clock, first = Clock(stage), points[0]
    decoder = first.decoders[METHOD]
    device = decoder.target.device
    with clock.part("load"):
        torch.set_num_threads(first.setting["threads"])
        use = DeviceUse(device)
        surroundings = _loaded(points, stage)
    with clock.part("fit"):
        points = [with_fitted_tree(point) for point in points]
    with clock.part("history"):
        limit, folder = first.decoding.max_new_tokens, sweep.folder / "history"
        examples = with_history(first.examples, first.vanilla, first.setting, limit, folder)
        requests = _requests(points, examples)
    with clock.part("check"):
        names = [METHOD, *(f"{METHOD} {place}" for place in range(2, len(points) + 1))]
        decoders = dict(zip(names, (point.decoders[METHOD] for point in points), strict=True))
        if BASELINE in first.decoders:
            decoders[BASELINE] = first.decoders[BASELINE]
        methods = {name: each.method for name, each in decoders.items()}
        _require_sound(first, decoders.values(), requests)
    with clock.part("warmup"):
        shortest_s = warm_up(methods, requests, first.measure.warmup, first.seed, first.batch)
    external = [method for method in methods.values() if isinstance(method, External)]
    helpers_s = lambda: sum(each.cpu_seconds() for each in external)  # noqa: E731
    with clock.part("wait"):
        if waited_s := wait_for_quiet(first.measure.quiet, helpers_s):
            surroundings["waited_s"] = waited_s
    with clock.part("decode"):
        others, energy = OtherLoad(helpers_s), Energy(device)
        compiled = lambda: compiled_steps(decoders.values())  # noqa: E731
        options = (first.seed, decoder.synchronize, advance, compiled, first.batch)
        options += (_first_trace(points, shortest_s), energy.since)
        timed = time_methods(methods, requests, first.measure.repeats, *options)
        while is_too_noisy(timed, first.measure):
            stage(f"{DECODING}, repeat {repeats_of(timed) + 1}")
            time_methods(methods, requests, 1, *options, timed)
        surroundings["busy_elsewhere_percent"] = round(others.percent(), 1)
        surroundings["shared_device"] = use.shared()
        use.close()
    seconds = {part: spent / len(points) for part, spent in {"setup": setup_s, **clock.laps}.items()}
    measured = Measured(examples, requests, surroundings, seconds, stage)
    baseline = {BASELINE: timed[BASELINE]} if BASELINE in timed else {}
    found = [
        result_of(point, measured, {METHOD: timed[name], **baseline}) for name, point in zip(names, points, strict=True)
    ]
    return [_stored(sweep, point, *one) for point, one in zip(points, found, strict=True)]


def _loaded(points: Sequence[Point], stage: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Load the weights of all points. Returns what a result says of the environment."""
    decoder = points[0].decoders[METHOD]
    surroundings = {**environment(decoder.target.device), "host": platform.node()}
    if len(points) > 1:
        surroundings["side_by_side"] = len(points)
    decoders = [each for point in points for each in point.decoders.values()]
    for each in sorted(decoders, key=lambda one: one.method.engine == "hf"):  # modules share our decoders' weights
        each.load_weights(stage)
    if (parts := decoder.target.transformers.parts) is not None:
        surroundings["parts"] = parts
    return surroundings


def _requests(points: Sequence[Point], examples: Sequence[Example]) -> list[Request]:
    """The examples as requests, which all points share. Raises UserError where their texts would end differently."""
    requests, *further = [point.requests(examples) for point in points]
    for several in further:
        if any(not _same_room(*pair) for pair in zip(requests, several, strict=True)):
            raise UserError("the points' models end at different positions, near these texts; measure them one by one")
    return requests


def _same_room(one: Request, other: Request) -> bool:
    """Whether two requests end alike: at the same position, or both far from the last that their models have."""
    limits, others = one.limits, other.limits
    if limits.positions == others.positions:
        return True
    end = limits.prompt_length + limits.max_new_tokens
    return all(each.positions is None or each.positions - end >= LONGEST_DRAFT for each in (limits, others))


def _require_sound(point: Point, decoders: Iterable[Decoder], requests: Sequence[Request]) -> None:
    """Raise UserError for models that score with NaN, and for a batch without room."""
    models = {id(one): one for each in decoders for one in each.models}
    require_no_nan([one for each in decoders for one in each.running], requests[0])
    if point.batch > 1:
        require_room(models.values(), requests, point.batch)


def _first_trace(points: Sequence[Point], shortest_s: float) -> Callable[[], Trace]:
    """What the first repeat of a text records, given the seconds of the shortest verification.

    Stages, and what the target's rows give to the text, where that costs the timing nothing: of long rounds on a CPU,
    whose clock can be paused. Logits processors change the rows.
    """
    decoder = points[0].decoders[METHOD]
    if decoder.target.device.type != "cpu" or shortest_s < LONG_ROUND_S:
        return Trace
    wanted = any(one.measure.target_log_probability for one in points) and not decoder.processors
    return lambda: StageTrace(score=log_probability if wanted else None)


def _stored(sweep: Sweep, point: Point, result: Result, examples: list[MeasuredExample]) -> Result:
    """The result, stored with its examples."""
    others = {PROFILE: speculation_profile(result, examples, point.decoders[METHOD])}
    folder = sweep.write_point(point.id, point.config_yaml, result, examples, not point.resume, **others)
    return replace(result, folder=folder)


def require_same_work(points: Sequence[Point]) -> None:
    """Raise UserError unless the points differ in their policies and drafters alone."""
    drafters = ("draft", "second_draft")
    settings = [{key: value for key, value in one.setting.items() if key not in drafters} for one in points]
    for setting, point in zip(settings, points, strict=True):
        setting["categories"] = [one.category for one in point.examples]
    for point, setting in zip(points, settings, strict=True):
        differing = [key for key in {**settings[0], **setting} if settings[0].get(key) != setting.get(key)]
        if differing:
            raise UserError(
                f"points side by side must share everything but policy and drafter; {points[0].policy} and "
                f"{point.policy} differ in {', '.join(differing)}"
            )


def compiled_steps(decoders: Iterable[Decoder]) -> int:
    """How many shapes the models have compiled. A model shared by several decoders counts once."""
    models = {id(model): model for each in decoders for model in each.models}
    return sum(model.compiled_steps for model in models.values())


def warm_up(methods: Mapping[str, Method], requests: Sequence[Request], count: int, seed: int, batch: int = 1) -> float:
    """Decode the beginnings of the first examples with every method, in batches the first that fit.

    `WARM_TOKENS` of each method, shared among its examples. Outside of batches each has the memory of its whole text,
    so that the same steps are compiled. Returns the seconds of the shortest verification, 0.0 if there was none.
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
                verified_s += [end - start for stage, start, end in trace.spans if stage == "verify"]
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

    Of more than two methods another begins every second time, as every method then has every place equally often.
    The time covers a whole example including encoder and prefill. The device is synchronized once before and once
    after. A method's preparation (`Prepares`) is not timed. Repeats use the same seed, so they do the same work. An
    example is decoded again if a step was compiled meanwhile. Raises RuntimeError, naming the example, if a method
    fails.

    batch: how many texts are decoded at a time. In batches methods take turns with blocks of examples, whose seconds
    are shared out among the texts: see `Timed`. first_trace: makes the trace of a text's first repeat outside of
    batches; the seconds in which it is paused do not count. joules: the energy since it was asked
    last. advance: called after every decoding with its share of the work, in texts. before: earlier repeats of the
    same, to which these are added.
    """
    results: dict[str, list[Timed]] = {name: [] for name in methods} if before is None else before
    names, done = list(methods), 0 if before is None else repeats_of(before)
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
                        texts = _decode(methods[name], own, batch, synchronize, block[0], trace)
                        spent = joules()
                    if repeat == 0:
                        results[name] += [Timed(one.token_ids, [], one.trace) for one in texts]
                    for index, one in zip(block, texts, strict=True):
                        results[name][index].latency_s.append(one.share_s)
                        if batch > 1:
                            results[name][index].waited_s.append(one.latency_s)
                        if spent is not None:
                            results[name][index].joules.append(spent / len(block))
                    advance(len(block) / (repeats * len(names)))
    return results


def repeats_of(timed: Mapping[str, Sequence[Timed]]) -> int:
    """How often every text was timed."""
    return len(next(iter(timed.values()))[0].latency_s)


def is_too_noisy(timed: Mapping[str, Sequence[Timed]], measure: MeasureSpec) -> bool:
    """Whether a speedup is known less well than was asked for, and repeats are left that may make it better known."""
    if measure.precision is None or repeats_of(timed) >= measure.most_repeats:
        return False
    slow = latencies(timed[BASELINE])
    noises = [clock_noise(slow, latencies(several)) for name, several in timed.items() if name != BASELINE]
    return any(noise is None or noise > measure.precision for noise in noises)


def order(names: Sequence[str], index: int, repeat: int, repeats: int) -> list[str]:
    """In which order methods decode an example, or block of them: two by turns, more from another one each time."""
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
) -> list[BatchedText]:
    """Decode one text, or several in batches. first: the place of the first among all examples."""
    if batch > 1:
        prepare_method(method, requests, synchronize)
        return decode_batch(method, requests, Batch(batch, synchronize))
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
