"""The numbers of a result from timed examples, what a method changed in the texts, and the rows of
`examples.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.request import Request, Source
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.errors import UserError
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.measure.cost import knows, total
from bild_lab.lab.measure.recorder import first_difference
from bild_lab.lab.metrics.bootstrap import central_interval, resampled_sums
from bild_lab.lab.metrics.quality import NO_REFERENCE, Scoring, Tokens, score_with_baseline
from bild_lab.lab.metrics.text_metrics import LOG_PROBABILITY
from bild_lab.lab.point.decoder import BASELINE, METHOD, Timed
from bild_lab.lab.schema.numbers import (
    Category,
    Change,
    Counts,
    DecodingCosts,
    Quality,
    Speedup,
)
from bild_lab.lab.schema.statistics import (
    acceptance_by_position,
    acceptance_rate,
    clock_noise,
    judged_by_position,
    latency_summary,
    nothing_accepted,
    paired_speedup,
)


def summarize(
    examples: Sequence[Example], timed: Mapping[str, Sequence[Timed]], seed: int
) -> dict[str, Any]:
    """Fields of a Result: latency, speed and counts of the method, against the baseline if it was
    timed.

    Of texts that were not timed, their tokens are counted alone.
    """
    baseline = timed.get(BASELINE)
    if not all(text.latency_s for text in timed[METHOD]):
        return {
            "tokens": sum(len(text.token_ids) for text in timed[METHOD]),
            "counts": counts(timed[METHOD]),
        }
    return {
        "latency_s": latency_summary(waits(timed[METHOD])),
        "baseline_latency_s": None if baseline is None else latency_summary(waits(baseline)),
        **speed(timed, seed),
        "joules_per_token": joules_per_token(timed[METHOD]),
        "counts": counts(timed[METHOD]),
        "categories": by_category(examples, timed, seed),
    }


def latencies(several: Sequence[Timed]) -> Float[np.ndarray, "examples repeats"]:
    return np.array([one.latency_s for one in several])


def waits(several: Sequence[Timed]) -> Float[np.ndarray, "examples repeats"]:
    """Seconds from the first to the last token of each text, in a batch with its waits for
    others.
    """
    return np.array([one.waited_s or one.latency_s for one in several])


def speed(timed: Mapping[str, Sequence[Timed]], seed: int) -> dict[str, Any]:
    """Tokens per second and speedup: the fields that Result and Category share.

    tokens_per_s_ratio: the method's rate divided by the baseline's, BiTA's "greedy speedup"
    (§4.1.3) under greedy decoding. It equals the speedup if both emit the same number of tokens, as
    lossless methods do.
    """
    tokens, rates = {}, {}
    for name, several in timed.items():
        tokens[name] = sum(len(one.token_ids) for one in several)
        rates[name] = tokens[name] / float(np.median(latencies(several), axis=1).sum())
    pair = [latencies(timed[name]) for name in (BASELINE, METHOD) if name in timed]
    own = {"tokens": tokens[METHOD], "tokens_per_s": rates[METHOD]}
    if BASELINE not in timed:
        return {
            **own,
            "baseline_tokens_per_s": None,
            "tokens_per_s_ratio": None,
            "speedup": Speedup(),
        }
    return {
        **own,
        "baseline_tokens_per_s": rates[BASELINE],
        "tokens_per_s_ratio": rates[METHOD] / rates[BASELINE] if rates[BASELINE] else None,
        "speedup": replace(
            paired_speedup(*pair, seed), noise=clock_noise(*pair), repeats=pair[0].shape[1]
        ),
    }


def joules_per_token(several: Sequence[Timed]) -> float | None:
    """Energy of all texts over their tokens, of each text's repeats the median; None where it was
    not read.
    """
    tokens, spent = sum(len(one.token_ids) for one in several), [one.joules for one in several]
    return sum(map(median, spent)) / tokens if tokens and all(spent) else None


def by_category(
    examples: Sequence[Example], timed: Mapping[str, Sequence[Timed]], seed: int
) -> dict[str, Category] | None:
    """Speed and acceptance per category of the dataset, in its order (BiTA Table 7); None without
    categories.
    """
    members: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        if example.category is not None:
            members.setdefault(example.category, []).append(index)
    found = {}
    for category, indices in members.items():
        own = {name: [several[index] for index in indices] for name, several in timed.items()}
        summed = counts(own[METHOD])
        found[category] = Category(
            n_examples=len(indices),
            **speed(own, seed),
            tokens_per_target_call=summed.tokens_per_target_call,
            acceptance_rate=summed.acceptance_rate,
        )
    return found or None


def agreement(timed: Mapping[str, Sequence[Timed]]) -> float:
    """The share of examples whose tokens all equal the baseline's."""
    pairs = zip(timed[METHOD], timed[BASELINE], strict=True)
    same = [one.token_ids == other.token_ids for one, other in pairs]
    return sum(same) / len(same)


def qualities(
    scoring: Scoring,
    examples: Sequence[Example],
    texts: Mapping[str, Sequence[str]],
    seed: int,
    tokens: Tokens = (None, None),
) -> tuple[dict[str, Quality], list[dict[str, float]]]:
    """Every metric of the outputs with its interval, and the paired difference from the baseline's.

    Also each example's own values of the metrics that are means of such.
    """
    references = [one.references for one in examples]
    judged = scoring.score_outputs(texts[METHOD], texts.get(BASELINE), references, seed, tokens)
    known = {
        name: each.per_example for name, each in judged.items() if each.per_example is not None
    }
    values = [
        {name: several[index] for name, several in known.items()} for index in range(len(examples))
    ]
    return {name: each.score for name, each in judged.items()}, values


def counts(method: Sequence[Timed]) -> Counts:
    """Totals over all rounds; all None for a method without rounds, such as Transformers' own
    loop.
    """
    traces = [one.trace for one in method]
    rounds = [(each.depth, each.accepted) for trace in traces for each in trace.rounds]
    if not rounds:
        return Counts()
    target_calls = sum(trace.target_calls for trace in traces)
    tokens = sum(len(one.token_ids) for one in method)
    return Counts(
        tokens_per_target_call=tokens / target_calls if target_calls else None,
        acceptance_rate=acceptance_rate(rounds),
        expected_acceptance=mean_statistic(traces, "expected_acceptance"),
        nothing_accepted=nothing_accepted(rounds),
        drafted=sum(trace.drafted for trace in traces),
        accepted=sum(trace.accepted for trace in traces),
        draft_calls=sum(trace.draft_calls for trace in traces),
        target_calls=target_calls,
        fallbacks=sum(trace.fallbacks for trace in traces),
        rollbacks=sum(trace.rollbacks for trace in traces),
        exit_layer_mean=mean_statistic(traces, "exit_layer"),
        acceptance_by_position=acceptance_by_position(rounds),
        judged_by_position=judged_by_position(rounds),
    )


def mean_statistic(traces: Sequence[Trace], name: str) -> float | None:
    """The mean of one of a method's statistics over the rounds that recorded it; None if none did.

    "exit_layer": after how many layers a token was predicted (CALM; BiLD §7.2). Of one with a
    number for each drafted token, those that were judged count.
    """
    recorded = [
        (each.stats.get(name), each.accepted + 1) for trace in traces for each in trace.rounds
    ]
    each_token = [
        value[:judged] if isinstance(value, tuple) else (value,) for value, judged in recorded
    ]
    known = [value for several in each_token for value in several if value is not None]
    return sum(known) / len(known) if known else None


def decoding_costs(
    timed: Mapping[str, Sequence[Timed]], bytes_per_value: int
) -> DecodingCosts | None:
    """Operations and memory traffic of the method's tokens, and their ratios to the baseline's
    (BiLD Figure 8).

    None if forwards were not recorded, or if the cost of a model is unknown.
    """
    forwards = {
        name: [each for one in several for each in one.trace.forwards]
        for name, several in timed.items()
    }
    if not forwards[METHOD] or not all(
        knows(each.config) for several in forwards.values() for each in several
    ):
        return None
    spent, base = (total(forwards.get(name, ()), bytes_per_value) for name in (METHOD, BASELINE))
    ratios = {}
    if base.flops:
        flops, moved = spent.flops / base.flops, spent.bytes_moved / base.bytes_moved
        ratios = {"flops_ratio": flops, "bytes_ratio": moved, "intensity_ratio": flops / moved}
    tokens = sum(len(one.token_ids) for one in timed[METHOD])
    return DecodingCosts(
        flops_per_token=spent.flops / tokens,
        bytes_per_token=spent.bytes_moved / tokens,
        flops_per_byte=spent.intensity,
        **ratios,
    )


def change_of(
    timed: Mapping[str, Sequence[Timed]],
    log_probabilities: Mapping[str, Sequence[float]] | None,
    greedy: bool,
    seed: int,
) -> Change:
    """Compare the method's texts with the baseline's, if it was timed.

    log_probabilities: the target's of every text, in nats; None if they were not asked for.
    """
    tokens = {name: [one.token_ids for one in several] for name, several in timed.items()}
    found: dict[str, Any] = {}
    if BASELINE in tokens:
        pairs = list(zip(tokens[METHOD], tokens[BASELINE], strict=True))
        if greedy:
            shared = [first_difference(own, base) for own, base in pairs]
            changed = [length for length in shared if length is not None]
            found |= {
                "changed": len(changed) / len(shared),
                "first_difference": median(changed) if changed else None,
            }
        lengths = np.array([[len(own), len(base)] for own, base in pairs], dtype=float)
        ratio, *ratios = (
            sums[..., 0] / sums[..., 1]
            for sums in (lengths.sum(axis=0), resampled_sums(lengths, seed))
        )
        low, high = central_interval(*ratios)
        found |= {"length_ratio": float(ratio), "length_ratio_low": low, "length_ratio_high": high}
    if log_probabilities is not None:
        ours, theirs = (
            (
                [*zip(log_probabilities[name], map(len, tokens[name]), strict=True)]
                if name in tokens
                else None
            )
            for name in (METHOD, BASELINE)
        )
        score = score_with_baseline(
            LOG_PROBABILITY, ours, theirs, [NO_REFERENCE] * len(ours), seed=seed
        ).score
        others = ("low", "high", "baseline", "difference", "difference_low", "difference_high")
        found |= {
            LOG_PROBABILITY: score.value,
            **{f"{LOG_PROBABILITY}_{name}": getattr(score, name) for name in others},
        }
    return Change(**found)


ROWS = 256  # of which the log-softmax is taken at once
_without_nan: set[tuple[str, ...]] = set()  # models of this process that have scored a prompt


def require_no_nan(models: Iterable[LoadedModel], request: Request) -> None:
    """Run every model, such as it decodes, over a prompt, unless it has run over one in this
    process.

    Raises UserError, naming the checkpoint, for scores of NaN: broken weights or overflows.
    """
    for model in models:
        key = (model.checkpoint.fingerprint, model.engine, str(model.dtype), str(model.device))
        if key not in _without_nan:
            _refuse(model, nan=bool(text_logits(model, request, ()).isnan().any()))
            _without_nan.add(key)


def _refuse(model: LoadedModel, nan: bool) -> None:
    if nan:
        dtype = str(model.dtype).removeprefix("torch.")
        raise UserError(
            f"the checkpoint {model.checkpoint.path} scores a text with NaN in {dtype}: its weights"
            " are broken or its numbers overflow; set runtime.dtype=float32 or give another"
            " checkpoint"
        )


@torch.inference_mode()
def text_logits(
    model: LoadedModel, request: Request, emitted: Sequence[int]
) -> Float[Tensor, "m vocab"]:
    """The scores after the prompt and after every emitted token except the last, in one forward."""
    source = request.source
    # a prompt is never compiled
    text = Source((*source.prompt, *emitted[:-1]), source.encoder_ids, source.device)
    # a model of another vocabulary has another number of rows
    return model.text_logits(text)[-max(1, len(emitted)) :]


def log_probability(logits: Float[Tensor, "m vocab"], emitted: Sequence[int]) -> float:
    """How likely a model finds a text: the sum, in nats, of its tokens' log-probabilities at
    temperature 1.

    logits: after the prompt and after every emitted token except the last, as the model gives them:
    logits processors are left out.
    """
    chosen = torch.tensor(list(emitted), dtype=torch.long, device=logits.device)
    total = 0.0
    for rows, own in zip(logits[: len(chosen)].split(ROWS), chosen.split(ROWS), strict=True):
        total += float(rows.float().log_softmax(dim=-1).gather(1, own[:, None]).double().sum())
    return total


def log_probabilities(
    target: LoadedModel, requests: Sequence[Request], timed: Mapping[str, Sequence[Timed]]
) -> dict[str, list[float]]:
    """What the target gives to the texts of each method, in nats.

    A text whose every token was scored by timed rounds has its value from there, and equal texts
    have one. Any other takes a forward. Raises UserError for NaN: such a text is garbage.
    """
    found: dict[str, list[float]] = {name: [] for name in timed}
    for index, request in enumerate(requests):
        known: dict[tuple[int, ...], float] = {}
        for name in sorted(timed):  # the baseline's rounds have the target's own rows
            text, trace = tuple(timed[name][index].token_ids), timed[name][index].trace
            if text not in known:
                scored = isinstance(trace, StageTrace) and trace.scored == len(text)
                known[text] = (
                    trace.log_probability
                    if scored
                    else log_probability(text_logits(target, request, text), text)
                )
            _refuse(target, nan=math.isnan(known[text]))
            found[name].append(known[text])
    return found
