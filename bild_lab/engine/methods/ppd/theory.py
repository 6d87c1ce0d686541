"""Predicted gain of predictive pipelined decoding: the closed forms of Yang et al. (2023), section
4.

A target with d layers (`layers`) predicts the next token after layer d̄ (`exit_layer`). It starts
on the k (`top_k`) most likely candidates while it finishes the current token. One of them is
correct with probability p (`match_rate`), independently for every token. Time is counted in layers
run one after another, compute in layers run by any process. Every function raises UserError for
values out of range.
"""

from __future__ import annotations

import math

from bild_lab.errors import require_number, require_whole


def expected_latency(tokens: int, layers: int, exit_layer: int, match_rate: float) -> float:
    """Layer-time units that a text takes: dℓ − (d − d̄)(ℓ − 1)p (Theorem 4.1).

    tokens: ℓ, the length of the text.
    """
    require_exit(layers, exit_layer)
    require_number("a match rate", match_rate, 0, 1, remedy="give matches / predictions")
    require_whole("tokens", tokens, 1)
    return layers * tokens - (layers - exit_layer) * (tokens - 1) * match_rate


def expected_compute(
    tokens: int, layers: int, exit_layer: int, match_rate: float, top_k: int
) -> float:
    """Layers that all processes run for a text: the latency plus k(d − d̄)ℓ (Theorem 4.1)."""
    require_whole("top_k", top_k, 1)
    return (
        expected_latency(tokens, layers, exit_layer, match_rate)
        + top_k * (layers - exit_layer) * tokens
    )


def latency_per_token(layers: int, exit_layer: int, match_rate: float) -> float:
    """Layer-time units per token of a long text: d − (d − d̄)p, which is Eq. 2 at d̄ = d/2."""
    require_exit(layers, exit_layer)
    require_number("a match rate", match_rate, 0, 1, remedy="give matches / predictions")
    return layers - (layers - exit_layer) * match_rate


def compute_per_token(layers: int, exit_layer: int, match_rate: float, top_k: int) -> float:
    """Layers that all processes run per token of a long text: k(d − d̄) and the latency.

    Divided by d, at d̄ = d/2, it is Eq. 6.
    """
    require_whole("top_k", top_k, 1)
    return latency_per_token(layers, exit_layer, match_rate) + top_k * (layers - exit_layer)


def compute_per_time_unit(layers: int, exit_layer: int, match_rate: float, top_k: int) -> float:
    """How many processes run on average during a long text, which is Eq. 4 at d̄ = d/2."""
    compute = compute_per_token(layers, exit_layer, match_rate, top_k)
    return compute / latency_per_token(layers, exit_layer, match_rate)


def require_exit(layers: int, exit_layer: int) -> None:
    """Raise UserError unless d/2 <= d̄ <= d: with an earlier exit the candidates would not finish
    in time.
    """
    require_whole("layers", layers, 1)
    remedy = (
        f"half of the {layers} layers or more: candidates run the others while the current token"
        " finishes"
    )
    require_whole("exit_layer", exit_layer, math.ceil(layers / 2), layers, remedy)
