"""From the texts that a point decoded to its result: traced, certified, and scored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import repeat
from statistics import median
from typing import Any

import torch

from bild_lab.engine.models.device import DTYPES
from bild_lab.engine.protocols import External, Method, Prepares, Replays
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Round, Span, StageTrace
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.measure.certificate import (
    Certificate,
    certify,
    certify_replayed,
    certify_sampled,
    count_verdicts,
)
from bild_lab.lab.measure.prediction import pipeline_summary, predict
from bild_lab.lab.measure.summary import (
    agreement,
    change_of,
    decoding_costs,
    log_probabilities,
    qualities,
    summarize,
)
from bild_lab.lab.point.decoder import BASELINE, METHOD, Decoder, Timed
from bild_lab.lab.point.environment import peak_memory_mb
from bild_lab.lab.point.prepare import Point
from bild_lab.lab.schema.examples import MeasuredExample, MeasuredRound
from bild_lab.lab.schema.result import Environment, Result, Setting
from bild_lab.lab.store.progress import DECODING

PARTS = {  # of a measurement: their names in a result's `seconds`, and on the screen
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
TRACED_TOKENS = 2048  # that a pass with clocks of its own decodes


class Clock:
    """Wall-clock seconds of each part of a measurement. stage: called with a part's name. setup_s:
    those before it.
    """

    def __init__(self, stage: Callable[[str], None], setup_s: float) -> None:
        self.stage = stage
        self.laps = {"setup": setup_s}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block is this one of `PARTS`."""
        self.stage(PARTS[name])
        since = time.perf_counter()
        yield
        self.laps[name] = time.perf_counter() - since


def requests_of(point: Point, examples: Iterable[Example]) -> list[Request]:
    """These examples as the point decodes them."""
    decoder, limit = point.decoders[METHOD], point.decoding.max_new_tokens
    return decoder.requests([one.prompt for one in examples], limit, point.sampling, point.seed)


def baseline_is_target(point: Point) -> bool:
    """Whether the baseline's outputs are the target's own greedy decoding."""
    return point.measure.baseline == "vanilla" and point.sampling.greedy


def result_of(
    point: Point,
    examples: Sequence[Example],
    requests: list[Request],
    timed: dict[str, list[Timed]],
    surroundings: Mapping[str, Any],
    clock: Clock,
) -> tuple[Result, list[MeasuredExample]]:
    """Trace, certify and score a point: its numbers, and those of each example. clock: of the
    measurement so far.
    """
    decoder = point.decoders[METHOD]
    replayed = isinstance(decoder.method, Replays)
    with clock.part("trace"):
        _, spans = stages = _traced(point, requests, timed)
    with clock.part("certify"):
        certificates = _certified(point, requests, timed) if point.certifies else None
    with clock.part("likelihood"):
        wanted = point.measure.target_log_probability
        likelihoods = log_probabilities(decoder.running[0], requests, timed) if wanted else None
    with clock.part("metrics"):
        # what a program begins with counts; a space at its end does not
        texts = {
            name: [decoder.text(one.token_ids).rstrip() for one in several]
            for name, several in timed.items()
        }
        ours, theirs = (
            tokens_of(timed.get(name), (likelihoods or {}).get(name)) for name in (METHOD, BASELINE)
        )
        summary = summarize(examples, timed, point.seed)
        judged, scores = qualities(point.scoring, examples, texts, point.seed, (ours, theirs))
        result = Result(
            point=point.id,
            name=point.name,
            policy=point.policy,
            knobs=point.knobs,
            composition=point.composition,
            engine=None if replayed else decoder.method.engine,
            precision=None
            if replayed
            else precision_of(decoder.method, decoder.target, point.setting["dtype"]),
            setting=Setting(point.setting),
            facts={**point.facts, "parameters": parameters_of(decoder)},
            same_as_baseline=point.same_as_baseline,
            quality=judged.pop(point.scoring.lead),
            further_qualities=judged,
            change=change_of(timed, likelihoods, point.sampling.greedy, point.seed),
            **summary,
            agreement_with_target=agreement(timed) if baseline_is_target(point) else None,
            certificate=None if certificates is None else count_verdicts(certificates),
            **(ends_of(timed[BASELINE], texts[BASELINE], requests) if BASELINE in timed else {}),
            peak_memory_mb=None if replayed else peak_memory_mb(decoder.target.device),
            **_stages_and_costs(point, timed, stages, summary["counts"].acceptance_rate),
            environment=Environment({**surroundings, "code": point.code}),
            seconds={},
        )
    result = replace(result, seconds={**clock.laps, "total": sum(clock.laps.values())})
    rows = measured_examples(examples, timed, texts, certificates or (), scores, likelihoods)
    for index, example in enumerate(examples[: point.measure.traced_examples]):
        own = spans[index] if index < len(spans) else ()
        rows[index] = with_trace(rows[index], example.prompt, own, decoder.pieces)
    return result, rows


def tokens_of(
    timed: Sequence[Timed] | None, nats: Sequence[float] | None
) -> list[tuple[int, float | None]] | None:
    """How many tokens each text has, and what the target gives them if known; None without
    texts.
    """
    return (
        None
        if timed is None
        else [*zip((len(one.token_ids) for one in timed), nats or repeat(None), strict=False)]
    )


def ends_of(
    timed: Sequence[Timed], texts: Sequence[str], requests: Sequence[Request]
) -> dict[str, float]:
    """Fields of a Result: the shares of the baseline's texts that are empty, and that the length
    limit cut.
    """
    pairs = [
        ([*request.source.prompt, *one.token_ids], request)
        for one, request in zip(timed, requests, strict=True)
    ]
    cut = [one.limits.room(tokens) <= 0 and not one.limits.ended(tokens) for tokens, one in pairs]
    empty = [not text.strip() for text in texts]
    return {"baseline_empty": sum(empty) / len(empty), "baseline_cut": sum(cut) / len(cut)}


def parameters_of(decoder: Decoder) -> dict[str, int]:
    """How many parameters each model has, by its role: target, draft.

    Left out: models that are not in files.
    """
    stored = dict(
        zip(
            ("target", "draft", "second_draft"),
            (one.checkpoint for one in decoder.models),
            strict=False,
        )
    )
    files = {role: checkpoint.weight_files for role, checkpoint in stored.items()}
    return {
        role: sum(map(math.prod, one.shapes.values()))
        for role, one in files.items()
        if one is not None
    }


# seconds of each stage; each traced example's, in order
Stages = tuple[dict[str, float] | None, list[list[Span]]]


def precision_of(method: Method, target: LoadedModel, dtype: str) -> str:
    """Of the weights that a method decodes with:

    PyTorch's, int8, int4, or a GGUF file's own such as q4_k_m.
    """
    if isinstance(method, External):
        return method.precision
    if target.bits is None:
        return dtype
    return target.checkpoint.precision if target.bits == "gguf" else f"int{target.bits}"


def _traced(point: Point, requests: list[Request], timed: dict[str, list[Timed]]) -> Stages:
    """The time of the first examples by stage; none without rounds, and in a batch, where stages
    overlap.

    Where no clocks ran in the timed repeats, as they would slow these down, some examples are
    decoded once more.
    """
    decoder, count = point.decoders[METHOD], point.measure.traced_examples
    traced = timed[METHOD][:count]
    if not traced or point.batch > 1 or not traced[0].trace.rounds:
        return None, []
    if isinstance(traced[0].trace, StageTrace):
        return stages_of([(one.trace, one.latency_s[0]) for one in traced])
    return stages_of(traced_pass(decoder.method, requests[:count], point.seed, decoder.synchronize))


def stages_of(traces: Iterable[tuple[StageTrace, float]]) -> Stages:
    """The seconds in prefill, draft, verify and host over all examples, and the stages of each
    example.

    traces: each with the seconds of its whole example. Host code is the time between the stages.
    """
    seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "host": 0.0}
    spans = []
    for trace, whole_s in traces:
        for stage, part in trace.stages_s.items():
            seconds[stage] += part
        seconds["host"] += whole_s - sum(trace.stages_s.values())
        spans.append(trace.spans)
    return seconds, spans


def traced_pass(
    method: Method,
    requests: Sequence[Request],
    seed: int,
    synchronize: Callable[[], None],
    tokens: int = TRACED_TOKENS,
) -> Iterator[tuple[StageTrace, float]]:
    """Decode examples with a clock in each stage, until they have so many tokens.

    Yields the seconds of each, too.
    """
    for index, request in enumerate(requests):
        if tokens <= 0:
            return
        prepare_method(method, [request], synchronize)
        trace = StageTrace(synchronize=synchronize)
        text = method.decode(seeded(request, seed, index), trace)
        synchronize()
        yield trace, time.perf_counter() - trace.started
        tokens -= len(text) - request.limits.prompt_length


def seeded(request: Request, seed: int, index: int) -> Request:
    """The request with its own generator, so that the same seed and example give the same
    tokens.
    """
    if request.sampling.greedy:
        return request
    device = request.source.device
    return replace(request, generator=torch.Generator(device).manual_seed(seed * 1_000_003 + index))


def prepare_method(
    method: Method, requests: Sequence[Request], synchronize: Callable[[], None]
) -> None:
    """What a method does before each text, and is not timed (`Prepares`)."""
    for request in requests if isinstance(method, Prepares) else []:
        method.prepare(request)
    synchronize()


def _certified(
    point: Point, requests: list[Request], timed: dict[str, list[Timed]]
) -> list[Certificate]:
    """Each example's text compared with the target's own, or when sampling its distributions."""
    decoder = point.decoders[METHOD]
    target, method = decoder.target, decoder.method
    texts = [one.token_ids for one in timed[METHOD]]
    if not point.sampling.greedy:
        again = [seeded(request, point.seed, index) for index, request in enumerate(requests)]
        return [certify_sampled(method, target, *pair) for pair in zip(again, texts, strict=True)]
    trios = zip(requests, texts, timed[BASELINE], strict=True)
    if isinstance(method, Replays):
        return [
            certify_replayed(target, request, text, own.token_ids) for request, text, own in trios
        ]
    return [certify(target, request, text, own.token_ids, method) for request, text, own in trios]


def _stages_and_costs(
    point: Point, timed: dict[str, list[Timed]], stages: Stages, alpha: float | None
) -> dict[str, Any]:
    """Fields of a Result: seconds by stage, the cost of all forwards, and the predictions of
    theory.
    """
    (stages_s, spans), prediction = stages, None
    if stages_s is not None and BASELINE in timed:
        traced = {name: several[: len(spans)] for name, several in timed.items()}
        end_tokens = point.decoders[METHOD].target.checkpoint.end_tokens
        prediction = predict(**traced, stages_s=stages_s, alpha=alpha, end_tokens=end_tokens)
    first_s = [next((end for stage, _, end in text if stage == "verify"), None) for text in spans]
    return {
        "first_token_s": median(known)
        if (known := [one for one in first_s if one is not None])
        else None,
        "stages_s": stages_s,
        "prediction": prediction,
        "pipeline": pipeline_summary(timed, stages_s, len(spans)),
        # in a batch several texts share what a forward reads
        "cost": decoding_costs(timed, DTYPES[point.setting["dtype"]].itemsize)
        if point.batch == 1
        else None,
    }


def measured_examples(
    examples: Sequence[Example],
    timed: Mapping[str, Sequence[Timed]],
    texts: Mapping[str, Sequence[str]],
    certificates: Sequence[Certificate] = (),
    scores: Sequence[Mapping[str, float]] = (),
    log_probabilities: Mapping[str, Sequence[float]] | None = None,
) -> list[MeasuredExample]:
    """Each example's texts, tokens, latencies and rounds; its certificate, scores and
    log-probabilities if known.
    """
    likely = log_probabilities or {}
    found = []
    for index, (example, one) in enumerate(zip(examples, timed[METHOD], strict=True)):
        other = timed[BASELINE][index] if BASELINE in timed else None
        found.append(
            MeasuredExample(
                id=example.id,
                category=example.category,
                turn=example.turn,
                prediction=texts[METHOD][index],
                token_ids=one.token_ids,
                latency_s=one.latency_s,
                rounds=[measured_round(each) for each in one.trace.rounds],
                certificate=asdict(certificates[index]) if certificates else None,
                scores=scores[index] or None if scores else None,
                log_probability=likely[METHOD][index] if likely.get(METHOD) else None,
                baseline_prediction=other and texts[BASELINE][index],
                baseline_token_ids=other and other.token_ids,
                baseline_latency_s=other and other.latency_s,
                baseline_log_probability=likely[BASELINE][index] if likely.get(BASELINE) else None,
            )
        )
    return found


def with_trace(
    example: MeasuredExample,
    prompt: str,
    spans: Sequence[Span],
    pieces: Callable[[Iterable[int]], Mapping[int, str]],
) -> MeasuredExample:
    """The example with additional data for the trace viewer: the prompt, each stage's times, each
    token's text.
    """
    tokens = {*example.token_ids, *(token for one in example.rounds for token in one.drafted)}
    # to microseconds
    timeline = tuple((stage, round(start, 6), round(end, 6)) for stage, start, end in spans)
    return replace(
        example,
        prompt=prompt,
        spans=timeline,
        pieces={str(token): piece for token, piece in pieces(sorted(tokens)).items()},
    )


def measured_round(one: Round) -> MeasuredRound:
    """The stored form of a round. Empty statistics are left out."""
    return MeasuredRound(
        drafted=one.drafted,
        accepted=one.accepted,
        next_token=one.next_token,
        fallback=bool(one.stats.get("fallback", False)),
        draft_calls=one.draft_calls,
        statistics={
            name: _rounded(value)
            for name, value in one.stats.items()
            if name != "fallback" and value is not None and value != ()
        },
    )


def _rounded(value: Any) -> Any:
    """Floats rounded to four significant digits, also in lists."""
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
