"""What decoding an example gave, before it is summarized."""

from __future__ import annotations

from dataclasses import dataclass, field

from bild_lab.engine.trace import Trace

METHOD, BASELINE = "method", "baseline"  # the measured policy, and the policy that it is compared with


@dataclass(frozen=True)
class Timed:
    """One method's output on one example: the emitted tokens, the seconds of every repeat, and the trace.

    latency_s: in a batch, its share of the batch's seconds. waited_s: in a batch, from its place to its end.
    """

    token_ids: list[int]
    latency_s: list[float]
    trace: Trace
    waited_s: list[float] = field(default_factory=list)
