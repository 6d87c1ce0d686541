"""The numbers of a result from timed examples: speed, counts, costs, and what a method changed in
the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from jaxtyping import Float

from bild_lab.engine.trace import ReportedRounds, Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.schemas import MeasureSpec
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.measure.cost import has_cost_model, total_cost
from bild_lab.lab.measure.recorder import first_difference
from bild_lab.lab.measure.timing import Timed, TimedTexts, repeats_of, token_count, total_s
from bild_lab.lab.metrics.bootstrap import independent
from bild_lab.lab.metrics.quality import NO_REFERENCE, Scoring, Tokens, score_with_baseline
from bild_lab.lab.metrics.text_metrics import LOG_PROBABILITY
from bild_lab.lab.point.decoder import BASELINE, METHOD
from bild_lab.lab.schema.numbers import (
    Category,
    Change,
    Counts,
    DecodingCosts,
    Quality,
    Speedup,
    Streamed,
)
from bild_lab.lab.schema.questions import questions_of, source_ids
from bild_lab.lab.schema.statistics import (
    FEWEST_RUNS,
    acceptance_by_position,
    acceptance_rate,
    clock_noise,
    conversations_of,
    judged_by_position,
    latency_summary,
    nothing_accepted,
    paired_speedup,
    ratio_of_totals,
)

STREAM_PERCENTILES = (50, 95, 99)


def summarize(examples: Sequence[Example], timed: Mapping[str, Sequence[Timed]]) -> dict[str, Any]:
    """Fields of a Result: latency, speed and counts of the method, against the baseline if it was
    timed.

    If nothing was timed, tokens are counted alone. Texts that another engine failed to give, to the
    method or to the baseline, are counted and left out. Raises UserError if there are no others.
    """
    failures = failed_texts(timed)
    if len(failures) == len(examples):
        raise UserError(f"no text came from the server; the last answer was: {failures[-1]}")
    indices = answered_indices(timed)
    # by all ids, as the first turn of a conversation may be what did not come
    questions = questions_of(source_ids(examples))
    examples = [replace(examples[index], id=questions[index]) for index in indices]
    timed = texts_at(timed, indices)
    baseline = timed.get(BASELINE)
    if not all(text.latency_s for text in timed[METHOD]):
        return {
            "independent_texts": independent(len(examples), _conversations(examples)),
            "tokens": token_count(timed[METHOD]),
            "counts": counts(timed[METHOD]),
        }
    return {
        "latency_s": latency_summary(waits(timed[METHOD])),
        "baseline_latency_s": None if baseline is None else latency_summary(waits(baseline)),
        **speed(timed, _conversations(examples)),
        "joules_per_token": joules_per_token(timed[METHOD]),
        "counts": counts(timed[METHOD]),
        "baseline_drafted": None if baseline is None else drafted_by_server(baseline),
        "streamed": stream_summary(timed[METHOD], len(failures)),
        "categories": by_category(examples, timed),
    }


def failed_texts(timed: TimedTexts) -> list[str]:
    """Why another engine failed to give a text, to the method or to the baseline, for each such text."""
    failures = []
    for texts in zip(*timed.values(), strict=True):
        errors = [report.error for text in texts for report in text.reports if report.error]
        failures += errors[:1]
    return failures


def answered_indices(timed: TimedTexts) -> list[int]:
    """The places of the examples whose texts no engine failed to give."""
    count = len(next(iter(timed.values())))
    return [
        index for index in range(count) if not any(texts[index].failed for texts in timed.values())
    ]


def texts_at(timed: Mapping[str, Sequence[Timed]], indices: Sequence[int]) -> TimedTexts:
    """Each method's texts of the examples at these places."""
    return {name: [texts[index] for index in indices] for name, texts in timed.items()}


def drafted_by_server(timed: Sequence[Timed]) -> int | None:
    """How many tokens a server drafted for these texts; None where it does not say, and for our
    own engines.
    """
    reporting = with_reported_rounds(timed)
    return sum(text.trace.report.rounds.drafted for text in reporting) if reporting else None


def with_reported_rounds(timed: Sequence[Timed]) -> list[Timed]:
    """The texts whose rounds another engine reported."""
    return [text for text in timed if text.trace.report and text.trace.report.rounds]


def stream_summary(timed: Sequence[Timed], errors: int) -> Streamed | None:
    """When the pieces of texts came that another engine streamed, over all texts and repeats; None
    for our own.

    errors: how many texts never came.
    """
    if not any(text.reports for text in timed):
        return None
    first_token_s, token_s, gap_s = [], [], []
    attempts = 0
    for text in timed:
        for report in text.reports:
            attempts += report.attempts - 1
            if not report.pieces_s:
                continue
            first_s, last_s = report.pieces_s[0], report.pieces_s[-1]
            first_token_s.append(first_s)
            gap_s += np.diff(report.pieces_s).tolist()
            later_tokens = report.later_tokens
            if later_tokens is None:  # then the first piece is taken for a token
                later_tokens = len(text.token_ids) - 1
            if later_tokens > 0 and len(report.pieces_s) > 1:
                token_s.append((last_s - first_s) / later_tokens)
    fields = {"first_token": first_token_s, "token": token_s, "gap": gap_s}
    percentiles = {
        f"{name}_p{percent}": float(np.quantile(seconds, percent / 100))
        for name, seconds in fields.items()
        for percent in STREAM_PERCENTILES
        if seconds
    }
    return Streamed(errors=errors, retries=attempts, **percentiles)


def latencies(timed: Sequence[Timed]) -> Float[np.ndarray, "examples repeats"]:
    """Seconds of every text; in a batch, its share of the batch's seconds."""
    return np.array([text.latency_s for text in timed])


def waits(timed: Sequence[Timed]) -> Float[np.ndarray, "examples repeats"]:
    """Seconds from the first to the last token of each text, in a batch with its waits for
    others.
    """
    return np.array([text.waited_s or text.latency_s for text in timed])


def _conversations(examples: Sequence[Example]) -> list[int] | None:
    return conversations_of(source_ids(examples))


def speed(
    timed: Mapping[str, Sequence[Timed]], conversations: Sequence[int] | None = None
) -> dict[str, Any]:
    """Texts, tokens per second and speedup: the fields that Result and Category share.

    conversations: of the texts, as in `paired_speedup`.

    tokens_per_s_ratio: the method's rate divided by the baseline's, BiTA's "greedy speedup"
    (§4.1.3) under greedy decoding. It equals the speedup if both emit the same number of tokens, as
    lossless methods do.
    """
    method_rate = token_count(timed[METHOD]) / total_s(timed[METHOD])
    fields = {
        "independent_texts": independent(len(timed[METHOD]), conversations),
        "tokens": token_count(timed[METHOD]),
        "tokens_per_s": method_rate,
    }
    if BASELINE not in timed:
        return {
            **fields,
            "baseline_tokens_per_s": None,
            "tokens_per_s_ratio": None,
            "speedup": Speedup(),
        }
    baseline_rate = token_count(timed[BASELINE]) / total_s(timed[BASELINE])
    pair = latencies(timed[BASELINE]), latencies(timed[METHOD])
    return {
        **fields,
        "baseline_tokens_per_s": baseline_rate,
        "tokens_per_s_ratio": method_rate / baseline_rate if baseline_rate else None,
        "speedup": paired_speedup(*pair, conversations, blocks_of(timed[METHOD])),
    }


def blocks_of(timed: Sequence[Timed]) -> list[int] | None:
    """The block that each text was timed in; None outside of batches."""
    numbers = [text.block for text in timed]
    return None if None in numbers else numbers


def is_too_noisy(timed: Mapping[str, Sequence[Timed]], measure: MeasureSpec) -> bool:
    """Whether the speedup of the texts that came is known less well than was asked for, and repeats
    are left that may make it better known.

    Two repeats may be alike by chance: stopping at them, an error of the clock held in 90 of 100
    cases, from three on in 93 at least.
    """
    if measure.precision is None or repeats_of(timed) >= measure.most_repeats:
        return False
    indices = answered_indices(timed)
    if not indices:
        return False
    if repeats_of(timed) < FEWEST_RUNS:
        return True
    baseline, method = ([timed[name][index] for index in indices] for name in (BASELINE, METHOD))
    noise = clock_noise(latencies(baseline), latencies(method), blocks_of(method))
    return noise is None or noise > measure.precision


def joules_per_token(timed: Sequence[Timed]) -> float | None:
    """Energy of all texts over their tokens, of each text's repeats the median; None where it was
    not read.
    """
    tokens = token_count(timed)
    if not tokens or not all(text.joules for text in timed):
        return None
    return sum(median(text.joules) for text in timed) / tokens


def by_category(
    examples: Sequence[Example], timed: Mapping[str, Sequence[Timed]]
) -> dict[str, Category] | None:
    """Speed and acceptance per category of the dataset, in its order (BiTA Table 7); None without
    categories.
    """
    members: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        if example.category is not None:
            members.setdefault(example.category, []).append(index)
    categories = {}
    for category, indices in members.items():
        timed_members = texts_at(timed, indices)
        member_counts = counts(timed_members[METHOD])
        categories[category] = Category(
            n_examples=len(indices),
            **speed(timed_members, _conversations([examples[index] for index in indices])),
            tokens_per_target_call=member_counts.tokens_per_target_call,
            acceptance_rate=member_counts.acceptance_rate,
        )
    return categories or None


def agreement(timed: Mapping[str, Sequence[Timed]]) -> float:
    """The share of examples whose tokens all equal the baseline's."""
    pairs = zip(timed[METHOD], timed[BASELINE], strict=True)
    equal = [text.token_ids == baseline_text.token_ids for text, baseline_text in pairs]
    return sum(equal) / len(equal)


def score_all(
    scoring: Scoring,
    examples: Sequence[Example],
    texts: Mapping[str, Sequence[str]],
    seed: int,
    tokens: Tokens = (None, None),
) -> tuple[dict[str, Quality], list[dict[str, float]]]:
    """Every metric of the outputs with its interval, and the paired difference from the baseline's.

    Also each example's own values of the metrics that are means over examples.
    """
    references = [example.references for example in examples]
    judgements = scoring.score_outputs(
        texts[METHOD], texts.get(BASELINE), references, seed, tokens, _conversations(examples)
    )
    scores_by_example = [
        {
            metric: judgement.per_example[index]
            for metric, judgement in judgements.items()
            if judgement.per_example is not None
        }
        for index in range(len(examples))
    ]
    return {metric: judgement.score for metric, judgement in judgements.items()}, scores_by_example


def counts(timed: Sequence[Timed]) -> Counts:
    """Totals over all rounds; all None for a method without rounds, such as Transformers' own
    loop.
    """
    traces = [text.trace for text in timed]
    if reporting := with_reported_rounds(timed):
        reported = [text.trace.report.rounds for text in reporting]
        return reported_counts(reported, token_count(reporting))
    rounds = [
        (decoding_round.depth, decoding_round.accepted)
        for trace in traces
        for decoding_round in trace.rounds
    ]
    if not rounds:
        return Counts()
    target_calls = sum(trace.target_calls for trace in traces)
    drafted = sum(trace.drafted for trace in traces)
    accepted = sum(trace.accepted for trace in traces)
    return Counts(
        tokens_per_target_call=token_count(timed) / target_calls if target_calls else None,
        acceptance_rate=acceptance_rate(rounds),
        expected_acceptance=mean_statistic(traces, "expected_acceptance"),
        nothing_accepted=nothing_accepted(rounds),
        drafted=drafted,
        accepted=accepted,
        accepted_share=accepted / drafted if drafted else None,
        draft_calls=sum(trace.draft_calls for trace in traces),
        target_calls=target_calls,
        fallbacks=sum(trace.fallbacks for trace in traces),
        rollbacks=sum(trace.rollbacks for trace in traces),
        exit_layer_mean=mean_statistic(traces, "exit_layer"),
        acceptance_by_position=acceptance_by_position(rounds),
        judged_by_position=judged_by_position(rounds),
    )


def reported_counts(reported: Sequence[ReportedRounds], tokens: int) -> Counts:
    """Totals of what another engine reported of its rounds. What it did not report is None.

    tokens: of the texts that it reported on.
    """
    verifications = sum(rounds.verifications for rounds in reported)
    known = all(rounds.drafted is not None for rounds in reported)
    drafted = sum(rounds.drafted for rounds in reported) if known else None
    accepted = sum(rounds.accepted for rounds in reported) if known else None
    fields: dict[str, Any] = {}
    if all(rounds.steps is not None for rounds in reported):
        steps = [
            step
            for rounds in reported
            for step, count in rounds.steps.items()
            for _ in range(count)
        ]
        fields = {
            "acceptance_rate": acceptance_rate(steps),
            "nothing_accepted": nothing_accepted(steps),
            "acceptance_by_position": acceptance_by_position(steps),
            "judged_by_position": judged_by_position(steps),
        }
    return Counts(
        tokens_per_target_call=tokens / verifications if verifications else None,
        drafted=drafted,
        accepted=accepted,
        accepted_share=accepted / drafted if drafted else None,
        target_calls=verifications,
        **fields,
    )


def mean_statistic(traces: Sequence[Trace], name: str) -> float | None:
    """The mean of one of a method's statistics over the rounds that recorded it; None if none did.

    "exit_layer": after how many layers a token was predicted (CALM; BiLD §7.2). A statistic
    with a number for each drafted token counts the tokens that were judged.
    """
    numbers: list[float] = []
    for trace in traces:
        for decoding_round in trace.rounds:
            value = decoding_round.stats.get(name)
            if isinstance(value, tuple):
                judged = value[: decoding_round.accepted + 1]
                numbers += [number for number in judged if number is not None]
            elif value is not None:
                numbers.append(value)
    return sum(numbers) / len(numbers) if numbers else None


def decoding_costs(
    timed: Mapping[str, Sequence[Timed]], bytes_per_value: int
) -> DecodingCosts | None:
    """Operations and memory traffic of the method's tokens, and their ratios to the baseline's
    (BiLD Figure 8).

    None if forwards were not recorded, or if the cost of a model is unknown.
    """
    forwards = {
        name: [forward for text in texts for forward in text.trace.forwards]
        for name, texts in timed.items()
    }
    known = all(
        has_cost_model(forward.config) for recorded in forwards.values() for forward in recorded
    )
    if not forwards[METHOD] or not known:
        return None
    cost = total_cost(forwards[METHOD], bytes_per_value)
    baseline_cost = total_cost(forwards.get(BASELINE, ()), bytes_per_value)
    ratios = {}
    if baseline_cost.flops:
        flops_ratio = cost.flops / baseline_cost.flops
        bytes_ratio = cost.bytes_moved / baseline_cost.bytes_moved
        ratios = {
            "flops_ratio": flops_ratio,
            "bytes_ratio": bytes_ratio,
            "intensity_ratio": flops_ratio / bytes_ratio,
        }
    tokens = token_count(timed[METHOD])
    return DecodingCosts(
        flops_per_token=cost.flops / tokens,
        bytes_per_token=cost.bytes_moved / tokens,
        flops_per_byte=cost.intensity,
        **ratios,
    )


def change_of(
    timed: Mapping[str, Sequence[Timed]],
    log_probabilities: Mapping[str, Sequence[float]] | None,
    greedy: bool,
    seed: int,
    conversations: Sequence[int] | None = None,
) -> Change:
    """Compare the method's texts with the baseline's, if it was timed.

    log_probabilities: the target's of every text, in nats; None if they were not asked for.
    conversations: of the texts, as in `score_with_baseline`.
    """
    tokens = {name: [text.token_ids for text in texts] for name, texts in timed.items()}
    fields: dict[str, float | None] = {}
    if BASELINE in tokens:
        pairs = list(zip(tokens[METHOD], tokens[BASELINE], strict=True))
        if greedy:
            differences = [first_difference(text, baseline_text) for text, baseline_text in pairs]
            positions = [position for position in differences if position is not None]
            fields["changed"] = len(positions) / len(differences)
            fields["first_difference"] = median(positions) if positions else None
        fields |= _length_ratio(pairs, conversations)
    if log_probabilities is not None:
        fields |= _log_probability_change(tokens, log_probabilities, seed, conversations)
    return Change(**fields)


def _length_ratio(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], conversations: Sequence[int] | None
) -> dict[str, float]:
    """How long the method's texts are relative to the baseline's, with its interval."""
    lengths, baseline_lengths = (
        np.array([len(text) for text in texts], dtype=float) for texts in zip(*pairs, strict=True)
    )
    value, low, high = ratio_of_totals([lengths], [baseline_lengths], conversations)
    return {"length_ratio": value, "length_ratio_low": low, "length_ratio_high": high}


def _log_probability_change(
    tokens: Mapping[str, Sequence[Sequence[int]]],
    log_probabilities: Mapping[str, Sequence[float]],
    seed: int,
    conversations: Sequence[int] | None,
) -> dict[str, float | None]:
    """What the target gives to a token of the texts, with its interval and the difference from the
    baseline's.
    """
    weighted = {
        name: list(zip(log_probabilities[name], map(len, texts), strict=True))
        for name, texts in tokens.items()
    }
    score = score_with_baseline(
        LOG_PROBABILITY,
        weighted[METHOD],
        weighted.get(BASELINE),
        [NO_REFERENCE] * len(weighted[METHOD]),
        seed=seed,
        conversations=conversations,
    ).score
    further = ("low", "high", "baseline", "difference", "difference_low", "difference_high")
    return {
        LOG_PROBABILITY: score.value,
        **{f"{LOG_PROBABILITY}_{name}": getattr(score, name) for name in further},
    }
