"""Measures a checked point, or several side by side, and stores their results."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bild_lab.engine.batched import require_room
from bild_lab.engine.models.device import DTYPES
from bild_lab.engine.protocols import External
from bild_lab.engine.request import Request
from bild_lab.errors import UserError
from bild_lab.lab.analysis.prediction import pipeline_summary, predict
from bild_lab.lab.data.examples import Example
from bild_lab.lab.decoding.history import with_history
from bild_lab.lab.measure.certificate import Certificate, certify, certify_sampled, count_verdicts
from bild_lab.lab.measure.environment import DeviceUse, OtherLoad, environment, peak_memory_mb
from bild_lab.lab.measure.scores import log_probabilities, log_probability, require_no_nan
from bild_lab.lab.measure.summary import (
    agreement,
    change_of,
    decoding_costs,
    measured_examples,
    qualities,
    summarize,
    with_trace,
    work_of,
)
from bild_lab.lab.measure.timing import Stages, seeded, time_methods, trace_stages, warm_up
from bild_lab.lab.point import Point
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.result import Environment, Result, Setting
from bild_lab.lab.schema.timed import BASELINE, METHOD, Timed
from bild_lab.lab.tree_search import with_fitted_tree

LONGEST_DRAFT = 256  # tokens; texts that end so far before a model's last position are not affected by it
DECODING = "decoding"  # the part whose examples are counted
PARTS = {  # of a measurement: their names in a result's `seconds`, and on the screen
    "load": "loading models",
    "fit": "fitting the tree",
    "history": "preparing texts",
    "warmup": "warming up",
    "decode": DECODING,
    "trace": "tracing",
    "certify": "certifying",
    "check": "checking",
    "likelihood": "scoring by the target",
    "metrics": "scoring",
}


def run_point(
    point: Point,
    sweep: Sweep,
    setup_s: float = 0.0,
    advance: Callable[[], None] = lambda: None,
    stage: Callable[[str], None] = lambda name: None,
) -> Result:
    """Measure a point, store its result and return it.

    setup_s: seconds spent on the point before this call; they become part of its `seconds`. advance: called after
    every example. stage: called with the name of each part of the measurement when it begins. If several processes
    share the target, the first one stores its result.
    """
    (result,) = run_points([point], sweep, setup_s, advance, stage)
    return result


def run_points(
    points: Sequence[Point],
    sweep: Sweep,
    setup_s: float = 0.0,
    advance: Callable[[], None] = lambda: None,
    stage: Callable[[str], None] = lambda name: None,
) -> list[Result]:
    """Measure points side by side, store their results and return them. See `run_point`.

    Every text (in a batch, block of texts) is decoded by every point's policy in turn, and once by the baseline that
    they share. Each point's `seconds` has its share of what they had together. All are stored at the end, or none.
    Raises UserError for points whose timings would not be of the same work.
    """
    require_same_work(points)
    clock = Clock(stage)
    clock.begin("load")
    torch.set_num_threads(points[0].setting["threads"])
    decoder = points[0].decoders[METHOD]
    device, synchronize, ranks = decoder.target.device, decoder.synchronize, decoder.ranks
    use = DeviceUse(device) if ranks.first or device.type == "cuda" else None  # processes share a CPU
    surroundings = {**environment(device), "host": platform.node()}
    if len(points) > 1:
        surroundings["side_by_side"] = len(points)
    ranks.run(lambda: [each.load_weights() for point in points for each in point.decoders.values()])
    if (parts := decoder.target.transformers.parts) is not None:
        surroundings["parts"] = parts
    clock.begin("fit")
    points = [with_fitted_tree(point) for point in points]
    first = points[0]
    clock.begin("history")
    limit = first.decoding.max_new_tokens
    examples = with_history(first.examples, first.vanilla, first.setting, limit, sweep.folder / "history")
    requests, *further = [[_request(point, example) for example in examples] for point in points]
    for several in further:
        if any(not _same_room(*pair) for pair in zip(requests, several, strict=True)):
            raise UserError("the points' models end at different positions, near these texts; measure them one by one")
    clock.begin("warmup")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for point in points:
        require_no_nan(point.decoders[METHOD].running, requests[0])
    names = [METHOD, *(f"{METHOD} {place}" for place in range(2, len(points) + 1))]
    decoders = dict(zip(names, (point.decoders[METHOD] for point in points), strict=True))
    if BASELINE in first.decoders:
        decoders[BASELINE] = first.decoders[BASELINE]
    methods = {name: each.method for name, each in decoders.items()}
    batch = first.batch
    if batch > 1:
        require_room({id(one): one for each in decoders.values() for one in each.models}.values(), requests, batch)
    warm_up(methods, requests, first.measure.warmup, first.seed, batch)
    clock.begin("decode")
    external = [method for method in methods.values() if isinstance(method, External)]
    others = OtherLoad(ranks, lambda: sum(each.cpu_seconds() for each in external))
    repeats, seed = first.measure.repeats, first.seed
    timed = time_methods(methods, requests, repeats, seed, synchronize, advance, lambda: compiled_steps(points), batch)
    surroundings["busy_elsewhere_percent"] = round(others.percent(), 1)
    surroundings["shared_device"] = any(ranks.gather(use is not None and use.shared()))
    if use is not None:
        use.close()
    ranks.require_equal("tokens", {name: [one.token_ids for one in several] for name, several in timed.items()})
    clock.end()
    seconds = {"setup": setup_s, **clock.laps}
    seconds = {part: spent / len(points) for part, spent in seconds.items()}
    measured = Measured(sweep, examples, requests, surroundings, seconds, stage)
    baseline = {BASELINE: timed[BASELINE]} if BASELINE in timed else {}
    found = [
        measured.result(point, {METHOD: timed[name], **baseline}) for name, point in zip(names, points, strict=True)
    ]
    return [measured.stored(point, *one) for point, one in zip(points, found, strict=True)]


def _same_room(one: Request, other: Request) -> bool:
    """Whether two requests end alike: at the same position, or both far from the last that their models have."""
    limits, others = one.limits, other.limits
    if limits.positions == others.positions:
        return True
    end = limits.prompt_length + limits.max_new_tokens
    return all(each.positions is None or each.positions - end >= LONGEST_DRAFT for each in (limits, others))


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


@dataclass(frozen=True)
class Measured:
    """What points that were timed together share.

    seconds: of every part so far, each point's share. stage: see `run_point`.
    """

    sweep: Sweep
    examples: Sequence[Example]
    requests: list[Request]
    surroundings: Mapping[str, Any]
    seconds: Mapping[str, float]
    stage: Callable[[str], None]

    def result(self, point: Point, timed: dict[str, list[Timed]]) -> tuple[Result, list[MeasuredExample]]:
        """Trace, certify and score a point."""
        requests, examples = self.requests, self.examples
        decoder = point.decoders[METHOD]
        clock = Clock(self.stage)
        clock.begin("trace")
        stages = _trace_stages(point, requests, timed)
        clock.begin("certify")
        certificates = certify_all(point, requests, timed) if point.measure.certify else None
        clock.begin("check")
        likelihoods: dict[str, list[float]] = {METHOD: []}
        for request, one in zip(requests, timed[METHOD], strict=True):
            logits = require_no_nan(decoder.running, request, one.token_ids)  # the target's: its forward serves twice
            if point.measure.target_log_probability:
                likelihoods[METHOD].append(log_probability(logits, one.token_ids))
        clock.begin("likelihood")
        if point.measure.target_log_probability and BASELINE in timed:
            ours, theirs = ([one.token_ids for one in timed[name]] for name in (METHOD, BASELINE))
            target = decoder.running[0]
            likelihoods[BASELINE] = log_probabilities(target, requests, theirs, ours, likelihoods[METHOD])
        clock.begin("metrics")
        # what a program begins with counts; a space at its end does not
        texts = {name: [decoder.text(one.token_ids).rstrip() for one in several] for name, several in timed.items()}
        judged, scores = qualities(point.scoring, examples, texts, point.seed)
        result = Result(
            point=point.id,
            name=point.name,
            policy=point.policy,
            knobs=point.knobs,
            composition=point.composition,
            engine=decoder.method.engine,
            setting=Setting(point.setting),
            facts=point.facts,
            same_as_baseline=point.same_as_baseline,
            quality=judged.pop(point.scoring.lead),
            further_qualities=judged,
            change=change_of(timed, likelihoods if likelihoods[METHOD] else None, point.sampling.greedy, point.seed),
            **summarize(examples, timed, point.seed),
            agreement_with_target=agreement(timed) if point.baseline_is_target else None,
            certificate=None if certificates is None else count_verdicts(certificates),
            peak_memory_mb=None if "side_by_side" in self.surroundings else peak_memory_mb(decoder.target.device),
            **_stages_and_costs(point, timed, stages),
            environment=Environment({**self.surroundings, "code": point.code}),
            seconds={},
        )
        clock.end()
        seconds = {part: self.seconds.get(part, 0.0) + clock.laps.get(part, 0.0) for part in ("setup", *PARTS)}
        result = replace(result, seconds={**seconds, "total": sum(seconds.values())})
        measured = measured_examples(examples, timed, texts, certificates or (), scores, likelihoods)
        spans = iter(() if stages is None else stages.spans)
        for index, example in enumerate(examples[: point.measure.traced_examples]):
            measured[index] = with_trace(measured[index], example.prompt, next(spans, ()), decoder.pieces)
        return result, measured

    def stored(self, point: Point, result: Result, examples: list[MeasuredExample]) -> Result:
        """The result, stored with its examples by the first process."""
        if not point.decoders[METHOD].ranks.first:
            return result
        folder = self.sweep.write_point(point.id, point.config_yaml, result, examples, beside=not point.resume)
        return replace(result, folder=folder)


def _trace_stages(point: Point, requests: list[Request], timed: dict[str, list[Timed]]) -> Stages | None:
    """The time of the first examples by stage; None without rounds, and in a batch, where stages overlap."""
    decoder, count = point.decoders[METHOD], point.measure.traced_examples
    if not count or point.batch > 1 or not timed[METHOD][0].trace.rounds:
        return None
    return trace_stages(decoder.method, requests[:count], point.seed, decoder.synchronize)


def _stages_and_costs(point: Point, timed: dict[str, list[Timed]], stages: Stages | None) -> dict[str, Any]:
    """Fields of a Result: seconds by stage, the cost of all forwards, and the predictions of theory."""
    seconds = None if stages is None else stages.seconds
    count, prediction = point.measure.traced_examples, None
    if seconds is not None and BASELINE in timed:
        traced = {name: several[:count] for name, several in timed.items()}
        end_tokens = point.decoders[METHOD].target.checkpoint.end_tokens
        prediction = predict(**traced, stages_s=seconds, end_tokens=end_tokens)
    return {
        "stages_s": seconds,
        "prediction": prediction,
        "pipeline": pipeline_summary(timed, seconds, count),
        # in a batch several texts share what a forward reads
        "cost": None if point.batch > 1 else decoding_costs(timed, DTYPES[point.setting["dtype"]].itemsize),
        "work": None if point.batch > 1 else work_of(timed, DTYPES[point.setting["dtype"]].itemsize),
    }


def certify_all(point: Point, requests: list[Request], timed: dict[str, list[Timed]]) -> list[Certificate]:
    """Each example's text compared with the target's own, or when sampling its distributions."""
    decoder = point.decoders[METHOD]
    target, method = decoder.target, decoder.method
    texts = [one.token_ids for one in timed[METHOD]]
    if not point.sampling.greedy:
        again = [seeded(request, point.seed, index) for index, request in enumerate(requests)]
        return [certify_sampled(method, target, *pair) for pair in zip(again, texts, strict=True)]
    trios = zip(requests, texts, timed[BASELINE], strict=True)
    return [certify(target, request, text, own.token_ids, method) for request, text, own in trios]


def compiled_steps(points: Sequence[Point]) -> int:
    """How many shapes the points' models have compiled. A model shared by several decoders counts once."""
    models = {id(model): model for point in points for each in point.decoders.values() for model in each.models}
    return sum(model.compiled_steps for model in models.values())


class Clock:
    """Wall-clock seconds of each part of a measurement. stage: called with a part's name on the screen."""

    def __init__(self, stage: Callable[[str], None] = lambda name: None) -> None:
        self._stage, self._part, self._since = stage, "", 0.0
        self.laps: dict[str, float] = {}

    def begin(self, part: str) -> None:
        """End the part before, and begin this one of `PARTS`."""
        self.end()
        self._part, self._since = part, time.perf_counter()
        self._stage(PARTS[part])

    def end(self) -> None:
        """End the part that has begun."""
        if self._part:
            self.laps[self._part] = time.perf_counter() - self._since
        self._part = ""


def _request(point: Point, example: Example) -> Request:
    decoder = point.decoders[METHOD]
    return decoder.request(
        example.prompt, point.decoding.max_new_tokens, point.sampling, point.seed, point.max_source_tokens
    )
