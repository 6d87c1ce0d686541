"""From the texts that a point decoded to its result: traced, certified, and scored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from bild_lab.engine.models.device import DTYPES
from bild_lab.engine.protocols import External, Method, Replays
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Round, Span, StageTrace
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.measure.certificate import NO_TEXT, Certificate, count_verdicts
from bild_lab.lab.measure.greedy_certificate import certify, certify_replayed
from bild_lab.lab.measure.likelihood import log_probabilities
from bild_lab.lab.measure.prediction import pipeline_summary, predict
from bild_lab.lab.measure.sampled_certificate import certify_sampled, judge_together
from bild_lab.lab.measure.summary import (
    agreement,
    answered_indices,
    change_of,
    decoding_costs,
    score_all,
    summarize,
    texts_at,
)
from bild_lab.lab.measure.text_faults import text_faults
from bild_lab.lab.measure.timing import (
    LONG_ROUND_S,
    Stopwatch,
    Timed,
    TimedTexts,
    TimingOptions,
    loop_share,
    token_count,
    total_s,
    traced_pass,
)
from bild_lab.lab.point.decoder import BASELINE, METHOD, Decoder
from bild_lab.lab.point.environment import peak_memory_mb
from bild_lab.lab.point.prepare import Point
from bild_lab.lab.schema.examples import MeasuredExample, MeasuredRound
from bild_lab.lab.schema.numbers import CertificateCounts, DecodingCosts
from bild_lab.lab.schema.questions import questions_of, source_ids
from bild_lab.lab.schema.result import Environment, Result, Setting
from bild_lab.lab.schema.statistics import conversations_of


def baseline_is_target(point: Point) -> bool:
    """Whether the baseline's outputs are the target's own greedy decoding."""
    return point.measure.baseline == "vanilla" and point.sampling.greedy


def _certifies(point: Point) -> bool:
    """Whether every text is compared with the target's own: as `measure.certify` says, and replayed
    texts always.

    Without the target's own texts, from the baseline, replayed ones are scored alone.
    """
    replays = isinstance(point.decoders[METHOD].method, Replays)
    return point.measure.certify or (replays and point.measure.baseline == "vanilla")


def result_of(
    point: Point,
    examples: Sequence[Example],
    requests: list[Request],
    timed: TimedTexts,
    environment_facts: Mapping[str, Any],
    stopwatch: Stopwatch,
) -> tuple[Result, list[MeasuredExample]]:
    """Trace, certify and score a point: its numbers, and those of each example.

    stopwatch: of the measurement so far.
    """
    decoder = point.decoders[METHOD]
    with stopwatch.phase("trace"):
        stages_s, traces = _traced(point, requests, timed)
        baseline_loop_share = _baseline_loop_share(point, requests, timed)
    with stopwatch.phase("certify"):
        certificates = _certified(point, requests, timed) if _certifies(point) else None
    likelihoods = None
    with stopwatch.phase("likelihood"):
        if point.measure.target_log_probability:
            likelihoods = log_probabilities(decoder.running[0], requests, timed)
    with stopwatch.phase("metrics"):
        texts = {
            name: [decoder.scored_text(text.token_ids) for text in timed_texts]
            for name, timed_texts in timed.items()
        }
        summary = summarize(examples, timed)
        quality_fields, scores_by_example = _scored(point, examples, timed, texts, likelihoods)
        result = Result(
            point=point.id,
            name=point.name,
            policy=point.policy,
            knobs=point.knobs,
            composition=point.composition,
            setting=Setting(point.setting),
            facts={**point.facts, "parameters": parameters_of(decoder)},
            same_as_baseline=point.same_as_baseline,
            **quality_fields,
            **summary,
            certificate=_counted_verdicts(point, certificates),
            **text_faults(timed, texts, requests),
            **_engine_facts(point),
            baseline_loop_share=baseline_loop_share,
            stages_s=stages_s,
            cost=_cost(point, timed),
            **_stage_findings(point, timed, stages_s, traces, summary),
            environment=Environment({**environment_facts, "code": point.code}),
            seconds={},
        )
    seconds = {**stopwatch.seconds, "total": sum(stopwatch.seconds.values())}
    rows = measured_examples(
        examples, timed, texts, certificates or (), scores_by_example, likelihoods
    )
    return replace(result, seconds=seconds), _with_traces(point, examples, rows, traces)


def _with_traces(
    point: Point,
    examples: Sequence[Example],
    rows: Sequence[MeasuredExample],
    traces: Sequence[StageTrace],
) -> list[MeasuredExample]:
    """The rows; the first ones have what the trace viewer shows. traces: of the first examples, none
    where stages were not traced.
    """
    pieces, shown_rows = point.decoders[METHOD].pieces, list(rows)
    for index, example in enumerate(examples[: point.measure.traced_examples]):
        spans = traces[index].spans if index < len(traces) else ()
        shown_rows[index] = with_trace(rows[index], example.prompt, spans, pieces)
    return shown_rows


def _counted_verdicts(
    point: Point, certificates: Sequence[Certificate] | None
) -> CertificateCounts | None:
    if certificates is None:
        return None
    claimed = point.decoders[METHOD].method.lossless(point.sampling)
    return count_verdicts(certificates, claimed)


def _cost(point: Point, timed: TimedTexts) -> DecodingCosts | None:
    """None in a batch, whose texts share what a forward reads."""
    if point.batch > 1:
        return None
    return decoding_costs(timed, DTYPES[point.setting["dtype"]].itemsize)


def _scored(
    point: Point,
    examples: Sequence[Example],
    timed: TimedTexts,
    texts: Mapping[str, Sequence[str]],
    likelihoods: Mapping[str, Sequence[float]] | None,
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Fields of a Result: the quality by every metric, and how far texts are the baseline's and the
    target's. Beside them the scores of each example.
    """
    scores, scores_by_example = score_all(
        point.scoring,
        examples,
        texts,
        point.seed,
        tuple(
            token_stats(timed.get(name), (likelihoods or {}).get(name))
            for name in (METHOD, BASELINE)
        ),
    )
    questions = questions_of(source_ids(examples))
    answered_questions = [questions[index] for index in answered_indices(timed)]
    answered_timed, answered_likelihoods = _answered(timed, likelihoods)
    fields = {
        "quality": scores.pop(point.scoring.lead),
        "further_qualities": scores,
        "change": change_of(
            answered_timed,
            answered_likelihoods,
            point.sampling.greedy,
            point.seed,
            conversations_of(answered_questions),
        ),
        "agreement_with_target": agreement(answered_timed) if baseline_is_target(point) else None,
    }
    return fields, scores_by_example


def _answered(
    timed: TimedTexts, likelihoods: Mapping[str, Sequence[float]] | None
) -> tuple[TimedTexts, Mapping[str, Sequence[float]] | None]:
    """The texts that no engine failed to give, and their log-probabilities if they are known."""
    indices = answered_indices(timed)
    texts = texts_at(timed, indices)
    if likelihoods is None:
        return texts, None
    return texts, {name: [nats[index] for index in indices] for name, nats in likelihoods.items()}


def _engine_facts(point: Point) -> dict[str, Any]:
    """Fields of a Result: what decoded the texts; None where a file of answers gave them."""
    decoder = point.decoders[METHOD]
    if isinstance(decoder.method, Replays):
        return {"engine": None, "precision": None, "peak_memory_mb": None}
    drafting = decoder.running[1:]
    runs_here = decoder.method.engine in {model.engine for model in decoder.running}
    draft_engines = ", ".join(dict.fromkeys(model.engine for model in drafting))
    return {
        "engine": decoder.method.engine,
        "draft_engine": draft_engines if drafting and runs_here else None,
        "precision": precision_of(decoder.method, decoder.target, point.setting["dtype"]),
        "peak_memory_mb": peak_memory_mb(decoder.target.device, point.specs.runtime.device_map),
    }


def token_stats(
    timed: Sequence[Timed] | None, nats: Sequence[float] | None
) -> list[tuple[int, float | None]] | None:
    """How many tokens each text has, and what the target gives them if known; None without
    texts.
    """
    if timed is None:
        return None
    lengths = [len(text.token_ids) for text in timed]
    return list(zip(lengths, nats or [None] * len(lengths), strict=True))


def parameters_of(decoder: Decoder) -> dict[str, int]:
    """How many parameters each model has, by its role: target, draft.

    Left out: models that are not in files.
    """
    roles = ("target", "draft", "second_draft")
    counts = {}
    for role, model in zip(roles, decoder.models, strict=False):
        files = model.checkpoint.weight_files
        if files is not None:
            counts[role] = sum(math.prod(shape) for shape in files.shapes.values())
    return counts


# seconds of each stage, None if unknown; the trace of each traced example
Stages = tuple[dict[str, float] | None, list[StageTrace]]


def precision_of(method: Method, target: LoadedModel, dtype: str) -> str:
    """The precision of the weights that a method decodes with: PyTorch's name, int8, int4, or a
    GGUF file's own such as q4_k_m.
    """
    if isinstance(method, External):
        return method.precision
    if target.bits is None:
        return dtype
    return target.checkpoint.precision if target.bits == "gguf" else f"int{target.bits}"


def _traced(point: Point, requests: list[Request], timed: TimedTexts) -> Stages:
    """The time of the first examples by stage; none without rounds, and in a batch, where stages
    overlap.

    Where no clocks ran in the timed repeats, as they would slow these down, some examples are
    decoded once more.
    """
    decoder, count = point.decoders[METHOD], point.measure.traced_examples
    first_texts = timed[METHOD][:count]
    if not first_texts or point.batch > 1 or not first_texts[0].trace.rounds:
        return None, []
    if isinstance(first_texts[0].trace, StageTrace):
        traces = [(text.trace, text.latency_s[0]) for text in first_texts]
    else:
        options = TimingOptions(point.seed, decoder.synchronize)
        traces = traced_pass(decoder.method, requests[:count], options)
    return stages_of(traces, not decoder.target.checkpoint.encoder_decoder)


def _baseline_loop_share(
    point: Point, requests: Sequence[Request], timed: TimedTexts
) -> float | None:
    """As `loop_share`, of the baseline on the first example.

    None without a timed baseline, where its forwards are so long that the share is small, and in a
    batch, whose texts share the forwards.
    """
    baseline = timed.get(BASELINE, timed[METHOD])
    if point.measure.baseline != "vanilla" or point.batch > 1 or not baseline[0].latency_s:
        return None
    if total_s(baseline) > LONG_ROUND_S * token_count(baseline):
        return None
    method = point.decoders.get(BASELINE, point.decoders[METHOD]).method
    return loop_share(method, requests[0])


def stages_of(
    timed_traces: Iterable[tuple[StageTrace, float]], reads_prompt_in_rounds: bool = False
) -> Stages:
    """The seconds in prefill, draft, verify and host over all examples, and the trace of each
    example.

    timed_traces: each with the seconds of its whole example. reads_prompt_in_rounds: the models are
    decoder-only, so that prefill is also the part of drafting and verification that reads the
    prompt. Host code is the time between the stages.
    """
    stages_s = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "host": 0.0}
    traces = []
    for trace, example_s in timed_traces:
        for stage, seconds in trace.stages_s.items():
            stages_s[stage] += seconds
        stages_s["host"] += example_s - sum(trace.stages_s.values())
        traces.append(trace)
        for stage, seconds in prompt_s(trace).items() if reads_prompt_in_rounds else ():
            stages_s[stage] -= seconds
            stages_s["prefill"] += seconds
    return stages_s, traces


def prompt_s(trace: StageTrace) -> dict[str, float]:
    """The seconds in which the drafter and the target read a decoder-only prompt, which runs with
    the first rows of each: how much longer that took than such rows do in the other rounds.

    Nothing where no stage drafts: CALM reads the prompt before its first token.
    """
    drafts_s, verifications_s = (
        [end - start for name, start, end in trace.spans if name == stage]
        for stage in ("draft", "verify")
    )
    if not drafts_s:
        return {}
    reading_s = {}
    if len(verifications_s) > 1:
        first_s, *later_s = verifications_s
        usual_s = median(later_s)
        if trace.target_calls > len(verifications_s):  # a program decodes several tokens
            usual_s = sum(later_s) / (trace.target_calls - 1)
        reading_s["verify"] = max(0.0, first_s - usual_s)
    forwards = [decoding_round.draft_calls for decoding_round in trace.rounds]
    if not any(forwards):  # tables draft without them
        forwards = [1] * len(forwards)
    # programs draft nothing, so the rounds that have a draft come first
    drafts = [(s, count) for s, count in zip(drafts_s, forwards, strict=False) if count]
    if len(drafts) > 1:
        (first_s, count), *later = drafts  # a drafter may begin in a later round
        forward_s = median(s / later_count for s, later_count in later)
        reading_s["draft"] = max(0.0, first_s - count * forward_s)
    return reading_s


def drafter_prompt_s(trace: StageTrace, part_of_target: bool) -> float:
    """How long the drafter alone read a decoder-only prompt. part_of_target: it is no model of its
    own. Layers of the target that draft let it read the prompt for both, in the first draft, and
    modules read less than it.
    """
    reading_s = prompt_s(trace)
    drafter_s = reading_s.get("draft", 0.0)
    return min(drafter_s, reading_s.get("verify", 0.0)) if part_of_target else drafter_s


def _certified(point: Point, requests: list[Request], timed: TimedTexts) -> list[Certificate]:
    """Each example's text compared with the target's own, or when sampling its distributions."""
    decoder = point.decoders[METHOD]
    target, method = decoder.target, decoder.method
    texts = [text.token_ids for text in timed[METHOD]]
    if not point.sampling.greedy:
        return judge_together(
            [
                certify_sampled(method, target, request.seeded(point.seed, index), text)
                for index, (request, text) in enumerate(zip(requests, texts, strict=True))
            ]
        )
    target_texts = [text.token_ids for text in timed[BASELINE]]
    cases = zip(requests, texts, target_texts, strict=True)
    if method.engine != target.engine or isinstance(method, Replays):
        return [
            Certificate(NO_TEXT) if text.failed else certify_replayed(target, *case)
            for text, case in zip(timed[METHOD], cases, strict=True)
        ]
    return [certify(target, *case, method) for case in cases]


def _stage_findings(
    point: Point,
    timed: TimedTexts,
    stages_s: dict[str, float] | None,
    traces: Sequence[StageTrace],
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """Fields of a Result: what follows from seconds by stage, such as the predictions of theory,
    and when first tokens came.

    summary: fields of the Result that are known.
    """
    prediction = None
    if stages_s is not None and BASELINE in timed:
        checkpoint = point.decoders[METHOD].target.checkpoint
        prediction = predict(
            timed[METHOD][: len(traces)],
            timed[BASELINE][: len(traces)],
            stages_s,
            summary["counts"].acceptance_rate,
            checkpoint.end_tokens,
            _drafter_prompts_s(point.decoders[METHOD], traces),
        )
    first_token_s = _median_first_verification_s(traces)
    if (streamed := summary.get("streamed")) is not None:
        first_token_s = streamed.first_token_p50
    return {
        "first_token_s": first_token_s,
        "prediction": prediction,
        "pipeline": pipeline_summary(timed, stages_s, len(traces)),
    }


def _drafter_prompts_s(decoder: Decoder, traces: Sequence[StageTrace]) -> float:
    """How long the drafter alone read the prompts of these texts; 0.0 with an encoder, which reads
    them for the target alone.
    """
    if decoder.target.checkpoint.encoder_decoder:
        return 0.0
    part_of_target = len(decoder.models) == 1
    return sum(drafter_prompt_s(trace, part_of_target) for trace in traces)


def _median_first_verification_s(traces: Sequence[StageTrace]) -> float | None:
    """When the first verification ended, the median of these texts; None if nothing was verified."""
    first_ends = []
    for trace in traces:
        verify_ends = (end for stage, _, end in trace.spans if stage == "verify")
        first_ends += itertools.islice(verify_ends, 1)
    return median(first_ends) if first_ends else None


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
    likelihoods = log_probabilities or {}
    rows = []
    for index, (example, text) in enumerate(zip(examples, timed[METHOD], strict=True)):
        row = MeasuredExample(
            id=example.id,
            category=example.category,
            turn=example.turn,
            same_source=example.same_source,
            prediction=texts[METHOD][index],
            token_ids=text.token_ids,
            latency_s=text.latency_s,
            rounds=[measured_round(decoding_round) for decoding_round in text.trace.rounds],
            certificate=asdict(certificates[index]) if certificates else None,
            scores=scores[index] or None if scores else None,
            log_probability=_at(likelihoods.get(METHOD), index),
            baseline_log_probability=_at(likelihoods.get(BASELINE), index),
            reports=stored_reports(text),
        )
        if BASELINE in timed:
            baseline_text = timed[BASELINE][index]
            row = replace(
                row,
                baseline_prediction=texts[BASELINE][index],
                baseline_token_ids=baseline_text.token_ids,
                baseline_latency_s=baseline_text.latency_s,
                baseline_reports=stored_reports(baseline_text),
            )
        rows.append(row)
    return rows


def stored_reports(text: Timed) -> tuple[dict[str, Any], ...]:
    """What another engine reported in each repeat, for a row: seconds to microseconds, steps by
    "drafted/accepted".
    """
    reports = []
    for report in text.reports:
        values = asdict(report)
        values["pieces_s"] = [round(second, 6) for second in report.pieces_s]
        if report.rounds is not None and report.rounds.steps is not None:
            steps = report.rounds.steps.items()
            values["rounds"]["steps"] = {
                f"{drafted}/{accepted}": count for (drafted, accepted), count in steps
            }
        reports.append(values)
    return tuple(reports)


def _at(numbers: Sequence[float] | None, index: int) -> float | None:
    return numbers[index] if numbers else None


def with_trace(
    example: MeasuredExample,
    prompt: str,
    spans: Sequence[Span],
    pieces: Callable[[Iterable[int]], Mapping[int, str]],
) -> MeasuredExample:
    """The example with additional data for the trace viewer: the prompt, each stage's times, each
    token's text.
    """
    drafted = {token for example_round in example.rounds for token in example_round.drafted}
    tokens = {*example.token_ids, *drafted}
    # to microseconds
    timeline = tuple((stage, round(start, 6), round(end, 6)) for stage, start, end in spans)
    return replace(
        example,
        prompt=prompt,
        spans=timeline,
        pieces={str(token): piece for token, piece in pieces(sorted(tokens)).items()},
    )


def measured_round(decoding_round: Round) -> MeasuredRound:
    """The stored form of a round. Empty statistics are left out."""
    stats = decoding_round.stats
    return MeasuredRound(
        drafted=decoding_round.drafted,
        accepted=decoding_round.accepted,
        next_token=decoding_round.next_token,
        fallback=bool(stats.get("fallback", False)),
        draft_calls=decoding_round.draft_calls,
        statistics={
            name: _rounded(value)
            for name, value in stats.items()
            if name != "fallback" and value is not None and value != ()
        },
    )


def _rounded(value: Any) -> Any:
    """Floats rounded to four significant digits, also in lists."""
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
