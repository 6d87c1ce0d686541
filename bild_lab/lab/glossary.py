"""The words of the report, the terminal and the command line, explained once."""

from __future__ import annotations

import textwrap
from typing import NamedTuple


class Term(NamedTuple):
    """Words that mean one thing, or belong together, and what they mean."""

    words: str
    meaning: str


TERMS = (
    Term(
        "Sweep, point",
        "A sweep is everything measured under one name; a point of it is one policy with one choice of its knobs.",
    ),
    Term(
        "Policy, knobs",
        "A policy is a way of decoding: a target, a drafter and an acceptance rule. Its knobs are what can be "
        "turned on it, such as thresholds and window.",
    ),
    Term(
        "Setting",
        "All that two points must share to be compared: models, data, precision, hardware, code. Points of "
        "different settings have tables of their own.",
    ),
    Term(
        "Baseline",
        "The policy that each point is timed against, example by example in turn; unless set otherwise vanilla, "
        "the target decoding by itself, one token a forward pass.",
    ),
    Term(
        "Target, drafter",
        "The large model whose output is wanted, and the small, fast one (or a part of the target, or a table) "
        "that proposes tokens for it. The proposal is the draft.",
    ),
    Term(
        "Speedup",
        "The baseline’s total latency divided by the point’s, over the same examples. 1.5× means two thirds of "
        "the time. “Relative latency” is one over it.",
    ),
    Term(
        "Intervals",
        "95 % bootstrap intervals over the examples: measured on other examples of the same kind, the number "
        "would mostly fall in this range. If the interval of a difference holds 0, or that of a speedup holds 1, "
        "the effect may be chance.",
    ),
    Term(
        "BLEU, ROUGE-L, agreement",
        "Quality metrics, from 0 to 100. BLEU counts the runs of one to four words that outputs share with the "
        "references, ROUGE-L the longest common subsequence of words. Agreement is the share of outputs that "
        "equal the baseline’s. A metric’s signature says with which options it was computed.",
    ),
    Term(
        "Difference",
        "The point’s quality minus the baseline’s on the same examples.",
    ),
    Term(
        "Point of loss",
        "One point of the quality metric below the baseline, on its scale of 0 to 100. “No loss” means a score at"
        " least as high as the baseline’s; it need not mean the same text. The best point is the fastest that loses"
        " no more than is allowed.",
    ),
    Term(
        "Pareto front",
        "The points that no other point, nor the baseline, beats in speed without being worse in quality.",
    ),
    Term(
        "Hypervolume",
        "How much of the plane of relative latency and quality a policy’s points dominate, up to a reference "
        "point: the relative latency 1 of the baseline and a quality a stated margin below the baseline’s. Its "
        "unit is quality points times shares of latency; more is better. Points that are slower than the baseline"
        " or lose more than the margin add nothing.",
    ),
    Term(
        "Fallback, fallbacks",
        "The drafter is less confident in its next token than the fallback threshold, and hands over to the "
        "target. A higher threshold hands over more often.",
    ),
    Term(
        "Rollback, rollbacks",
        "The target finds a drafted token too unlikely (its distance, the negative log probability in nats, "
        "exceeds the rollback threshold), replaces it and drops what followed. A higher threshold forgives more. "
        "Under greedy decoding, a threshold below ln 2 (about 0.69) changes nothing in the output.",
    ),
    Term(
        "Confidence, distance",
        "The drafter’s probability of its own token, and minus the logarithm of the target’s probability of it, "
        "in nats (units of the natural logarithm).",
    ),
    Term(
        "Window",
        "The most tokens drafted before the target looks at them.",
    ),
    Term(
        "Round",
        "One draft and the forward pass of the target that checks it.",
    ),
    Term(
        "Drafted, accepted",
        "Tokens that were proposed, and those of them that the target let stand.",
    ),
    Term(
        "Acceptance (rate), α",
        "The chance that a drafted token stands, given that those before it do: accepted tokens, divided by "
        "accepted tokens plus rejections. What follows a rejected token is dropped unjudged and counts as "
        "neither.",
    ),
    Term(
        "None stood",
        "Of the rounds in which something was drafted, the share in which the target kept nothing of it.",
    ),
    Term(
        "Target calls, draft calls",
        "Forward passes of the target and of the drafter.",
    ),
    Term(
        "Tokens per target call (tokens/call)",
        "Emitted tokens per forward pass of the target: 1 for plain decoding; more is better. Spec-Bench calls it"
        " mean accepted tokens, SPEED-Bench acceptance length.",
    ),
    Term(
        "Tokens, tokens/s",
        "Tokens emitted, after every cut at an end token or the length limit, and how many of them a second.",
    ),
    Term(
        "Latency, median and p95",
        "Seconds from an example’s token ids to those of its output. Half of the examples took less than the "
        "median, 95 % less than p95.",
    ),
    Term(
        "Prefill, draft, verify, host",
        "Where an example’s time goes: reading the input, the drafter, the target’s forward passes, and the code "
        "around them.",
    ),
    Term(
        "c, Theorem 3.8 (Thm 3.8), rounds, measured",
        "What speculative decoding’s theorem predicts of the speedup, from the acceptance rate α, the window and "
        "the cost ratio c (a drafter step’s time over a target step’s), and what is left of it as the real "
        "rounds, verifying, the host and the prefill are counted in, down to the speedup measured.",
    ),
    Term(
        "GFLOP/token, MB/token, FLOP/byte",
        "Arithmetic operations (in billions) and memory traffic (in millions of bytes) per emitted token, and "
        "operations per byte, called intensity. The columns operations, traffic and intensity give them as "
        "multiples of the baseline’s.",
    ),
    Term(
        "Memory, MB",
        "Peak memory of the process, method and baseline together.",
    ),
    Term(
        "Category, examples",
        "A dataset’s own division of its examples. Each turn of a conversation is an example.",
    ),
    Term(
        "Certificate",
        "With measure.certify=true, each text is compared with the target’s own. Where they part, the target’s "
        "scores of the two tokens tell whether its own numerical noise explains it (a tie) or not (a defect; a "
        "method that changes outputs on purpose has them too).",
    ),
    Term(
        "Same output",
        "The share of examples whose token ids all equal the target’s own output, that is, what the baseline "
        "produced: its greedy output, unless a temperature is set. It says nothing of how good the other examples"
        " are. In bfloat16 even a lossless method may differ here and there, where two tokens are nearly tied; "
        "with a temperature, outputs are random and need not be equal.",
    ),
    Term(
        "Lossless",
        "Of a method: its output is the target’s own (under greedy decoding), or is distributed as the target’s "
        "(when sampling).",
    ),
    Term(
        "p-value",
        "How often a quality difference at least this large would come by chance if the two systems were equally good.",
    ),
    Term(
        "Warm-up, repeats",
        "Examples decoded before the clock counts, and how often each example is timed; it counts with the median"
        " of its repeats.",
    ),
)


def terms_text(width: int = 100) -> str:
    """The terms as paragraphs for a terminal, `width` columns wide."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False)
    return "\n".join(wrapper.fill(f"{term.words}: {term.meaning}") for term in TERMS)
