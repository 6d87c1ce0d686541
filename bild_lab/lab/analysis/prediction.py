"""Predicted and measured speedup of speculative decoding, and the costs that explain the gap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from bild_lab.engine.speculative_theory import walltime_improvement
from bild_lab.lab.analysis.statistics import acceptance_rate
from bild_lab.lab.schema.numbers import Prediction
from bild_lab.lab.schema.timed import Timed

FIXED_WINDOW_SHARE = 0.9  # a window is fixed if at least this share of drafts has one length


def predict(
    method: Sequence[Timed],
    baseline: Sequence[Timed],
    stages_s: Mapping[str, float],
    end_tokens: frozenset[int] = frozenset(),
) -> Prediction | None:
    """Predict the speedup in steps, from theory to measured time, on the examples that `stages_s` was traced on.

    method, baseline: the timings of these examples. stages_s: seconds by stage. end_tokens: for `fixed_window`. None
    if nothing was drafted, or if the baseline is not the target alone.
    """
    traces = [one.trace for one in method]
    calls, drafted = sum(trace.target_calls for trace in traces), sum(trace.drafted for trace in traces)
    alone = sum(one.trace.target_calls for one in baseline)
    if not calls or not drafted or not alone or any(one.trace.drafted for one in baseline):
        return None
    emitted = sum(len(one.token_ids) for one in method)
    baseline_s, method_s = total_s(baseline), total_s(method)
    step_s = (baseline_s - stages_s["prefill"]) / alone  # one token by the target alone
    if step_s <= 0:  # the machine was so busy that the traced prefill took longer than whole timed texts
        return None
    steps = sum(trace.draft_calls for trace in traces) or drafted  # a table drafts without forwards
    cost_ratio = stages_s["draft"] / steps / step_s
    alpha = acceptance_rate([(len(each.drafted), each.accepted) for trace in traces for each in trace.rounds])
    window = fixed_window(method, end_tokens)
    drafting = steps / calls * cost_ratio  # of a round, in steps of the target
    verifying, host = (stages_s[name] / calls / step_s for name in ("verify", "host"))
    per_round = emitted / calls
    return Prediction(
        acceptance_rate=alpha,
        window=window,
        cost_ratio=cost_ratio,
        theorem=None if window is None or alpha is None else walltime_improvement(alpha, window, cost_ratio),
        rounds=per_round / (drafting + 1),
        verify=per_round / (drafting + verifying),
        host=per_round / (drafting + verifying + host),
        prefill=baseline_s / sum(stages_s.values()),
        measured=baseline_s / method_s,
    )


def total_s(timed: Sequence[Timed]) -> float:
    """Seconds of all examples together; the median of an example's repeats counts."""
    return float(sum(np.median(one.latency_s) for one in timed))


def fixed_window(timed: Sequence[Timed], end_tokens: frozenset[int] = frozenset()) -> int | None:
    """The length of all drafts; None if drafts differ in length.

    Drafts that the end of a text may cut short do not count: the last of each text, and those with an end token.
    """
    drafts = [each.drafted for one in timed for each in one.trace.rounds[:-1]]
    lengths = Counter(len(draft) for draft in drafts if not draft or draft[-1] not in end_tokens)
    if not lengths:
        return None
    length, count = lengths.most_common(1)[0]
    return length if length and count >= FIXED_WINDOW_SHARE * lengths.total() else None
