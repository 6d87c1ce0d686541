"""Measures a checked point: load, decode in turn with its baseline and the clock running, score,
store.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bild_lab.engine.batch_decoding import require_room
from bild_lab.engine.protocols import External, Method, Replays, Served
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.errors import warn_once
from bild_lab.lab.measure.likelihood import log_probability, require_no_nan
from bild_lab.lab.measure.machine import bandwidth_facts, row_cost_facts
from bild_lab.lab.measure.profile import PROFILE, speculation_profile
from bild_lab.lab.measure.score import result_of
from bild_lab.lab.measure.summary import is_too_noisy
from bild_lab.lab.measure.timing import (
    LONG_ROUND_S,
    PHASES,
    Stopwatch,
    Timed,
    TimedTexts,
    TimingOptions,
    differing_repeats,
    no_joules,
    no_progress,
    repeats_of,
    time_methods,
    warm_up,
)
from bild_lab.lab.point.decoder import BASELINE, METHOD, Decoder
from bild_lab.lab.point.environment import (
    DeviceUse,
    Energy,
    GpuClock,
    OtherLoad,
    environment,
    wait_for_quiet,
)
from bild_lab.lab.point.history import prepare_texts
from bild_lab.lab.point.prepare import Point
from bild_lab.lab.schema.formatting import counted
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep, is_same_result, read_result


def run_point(
    point: Point,
    sweep: Sweep,
    setup_s: float = 0.0,
    advance: Callable[[float], None] = no_progress,
    stage: Callable[[str], None] = lambda title: None,
) -> Result:
    """Measure a point, store its result and return it.

    Every text (in a batch, block of texts) is decoded by policy and baseline in turn. If a policy
    replays texts, nothing is timed. setup_s: seconds spent on the point before this call; they
    become part of its `seconds`. advance: see `TimingOptions`. stage: called with the title of each
    phase of the measurement when it begins.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(point.setting["threads"])
    try:
        return _measured(point, sweep, Stopwatch(stage, setup_s), advance)
    finally:
        torch.set_num_threads(threads)


def _measured(
    point: Point, sweep: Sweep, stopwatch: Stopwatch, advance: Callable[[float], None]
) -> Result:
    """What `run_point` returns, measured with the threads that PyTorch has now."""
    decoder = point.decoders[METHOD]
    with stopwatch.phase("load"):
        # before the peak of the memory is watched
        timed_facts = {} if isinstance(decoder.method, Replays) else bandwidth_facts(decoder)
        device_use = DeviceUse(decoder.target.device, device_map=point.specs.runtime.device_map)
        environment_facts = _load_weights(point, stopwatch.stage) | timed_facts
    with stopwatch.phase("history"):
        examples, requests = prepare_texts(point, sweep.folder)
    with stopwatch.phase("check"):
        _require_decodable(point, requests)
    options = TimingOptions(point.seed, decoder.synchronize, point.batch, advance=advance)
    methods = {name: decoder.method for name, decoder in point.decoders.items()}
    if isinstance(decoder.method, Replays):
        with stopwatch.phase("decode"):
            timed = {
                name: [Timed(text.token_ids, [], text.trace) for text in texts]
                for name, texts in time_methods(methods, requests, 1, options).items()
            }
    else:
        timed, load_facts = _time_quietly(point, methods, requests, stopwatch, options)
        environment_facts |= load_facts
        environment_facts["shared_device"] = device_use.shared()
    device_use.close()
    result, rows = result_of(point, examples, requests, timed, environment_facts, stopwatch)
    warn_of_changed_texts(point, result)
    further_files = {PROFILE: speculation_profile(result, rows, decoder), **_server_logs(methods)}
    folder = sweep.write_point(
        point.id, point.config_yaml, result, rows, not point.resume, **further_files
    )
    stored = read_result(folder)
    if stored is not None and not is_same_result(stored, result):  # another process was first
        return stored
    return replace(result, folder=folder)


def _load_weights(
    point: Point, stage: Callable[[str], None] = lambda title: None
) -> dict[str, Any]:
    """Load the weights. Returns what a result says of the environment."""
    target = point.decoders[METHOD].target
    environment_facts = {**environment(target.device), "host": platform.node()}
    # modules of Transformers last, as they share our decoders' weights
    decoders = point.decoders.values()
    for decoder in sorted(decoders, key=lambda decoder: decoder.method.engine == "hf"):
        decoder.load_weights(stage)
    if (parts := target.transformers.parts) is not None:
        environment_facts["parts"] = parts
    return environment_facts


def _server_logs(methods: Mapping[str, Method]) -> dict[str, str]:
    """The logs of servers that policies started, by the names of their files."""
    served = {name: method for name, method in methods.items() if isinstance(method, Served)}
    logs = {f"{name}_server.log": method.log() for name, method in served.items()}
    return {name: log for name, log in logs.items() if log is not None}


def _require_decodable(point: Point, requests: Sequence[Request]) -> None:
    """Raise UserError for models that score NaN, and for a batch without room in memory."""
    decoders = point.decoders.values()
    running = [model for decoder in decoders for model in decoder.running]
    require_no_nan(running, requests[0])
    if point.batch > 1:
        require_room(_models_of(decoders), requests, point.batch)


def _time_quietly(
    point: Point,
    methods: Mapping[str, Method],
    requests: Sequence[Request],
    stopwatch: Stopwatch,
    options: TimingOptions,
) -> tuple[TimedTexts, dict[str, Any]]:
    """Warm up, wait for a quiet machine, and time all methods.

    Returns the texts, and what else the machine did, for the environment of a result.
    """
    decoders, decoder = point.decoders.values(), point.decoders[METHOD]
    helpers = [method for method in methods.values() if isinstance(method, External)]
    load_facts: dict[str, Any] = {}

    def helpers_s() -> float:
        return sum(helper.cpu_seconds() for helper in helpers)

    with stopwatch.phase("warmup"):
        shortest_verify_s = warm_up(methods, requests, point.measure.warmup, options)
    with stopwatch.phase("wait"):
        if waited_s := wait_for_quiet(point.measure.quiet, helpers_s):
            load_facts["waited_s"] = waited_s
        load_facts |= row_cost_facts(point.decoders.get(BASELINE, decoder), requests[0].source)
    with stopwatch.phase("decode"):
        other_load, clock = OtherLoad(helpers_s), GpuClock(decoder.target.device)
        energy = Energy(decoder.target.device, point.specs.runtime.device_map)
        options = replace(
            options,
            compiled_steps=lambda: compiled_steps(decoders),
            first_trace=_first_trace(point, shortest_verify_s),
            # a server's devices are not known here
            joules=no_joules if isinstance(decoder.method, Served) else energy.since,
            after_block=clock.read,
            rehearses=decoder.target.device.type == "cuda",
        )
        timed = time_methods(methods, requests, point.measure.repeats, options)
        while is_too_noisy(timed, point.measure):
            stopwatch.stage(f"{PHASES['decode']}, repeat {repeats_of(timed) + 1}")
            time_methods(methods, requests, 1, options, timed)
        warn_of_learned_texts(point.policy, timed[METHOD])
        load_facts["busy_elsewhere_percent"] = round(other_load.percent(), 1)
        load_facts |= clock.facts
        if compiling := sum(any(text.compiled) for texts in timed.values() for text in texts):
            load_facts["compiled_texts"] = compiling
        servers = {
            name: method.about() for name, method in methods.items() if isinstance(method, Served)
        }
        load_facts |= {"servers": servers} if servers else {}
    return timed, load_facts


def warn_of_learned_texts(policy: str, timed: Sequence[Timed]) -> None:
    """Log where a text that came again was decoded in other rounds than the first time."""
    if differing := differing_repeats(timed):
        warn_once(
            f"policy {policy} decoded {differing} of {counted(len(timed), 'text')} in other numbers"
            " of rounds when they came again. If it has learned them, its speedup is not one of new"
            " texts: let a text find what it found first, or set measure.repeats=1"
        )


def warn_of_changed_texts(point: Point, result: Result) -> None:
    """Log where a method that says that it is lossless has changed texts in float32, in which hardly
    any is a tie.
    """
    same = result.agreement_with_target
    is_certain = result.setting.dtype == "float32" and not point.measure.certify
    if same in (None, 1) or not is_certain:
        return
    if point.decoders[METHOD].method.lossless(point.sampling):
        n_texts = result.answered_texts
        changed = f"{round((1 - same) * n_texts)} of {counted(n_texts, 'text')}"
        warn_once(
            f"policy {point.policy} says that it is lossless, and changed {changed} of the target's:"
            " measure.certify=true tells ties from defects"
        )


def _first_trace(point: Point, shortest_verify_s: float) -> Callable[[], Trace]:
    """What the first repeat of a text records, given the seconds of the shortest verification.

    It records stages, and what the target's rows give to the text, where that costs the timing
    nothing: in long rounds on a CPU, whose clock can be paused. Logits processors change the rows.
    """
    decoder = point.decoders[METHOD]
    if decoder.target.device.type != "cpu" or shortest_verify_s < LONG_ROUND_S:
        return Trace
    scores = point.measure.target_log_probability and not decoder.processors
    return lambda: StageTrace(score=log_probability if scores else None)


def compiled_steps(decoders: Iterable[Decoder]) -> int:
    """How many shapes the models have compiled."""
    return sum(model.compiled_steps for model in _models_of(decoders))


def _models_of(decoders: Iterable[Decoder]) -> list[LoadedModel]:
    """The models of these decoders; one that several share is there once."""
    models = {id(model): model for decoder in decoders for model in decoder.models}
    return list(models.values())
