"""The words of the report, the terminal and the command line, explained once.

Those that name a number of a result are explained in `results/columns.py`.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from bild_lab.lab.results.columns import COLUMNS, COSTS, PREDICTION


class Term(NamedTuple):
    """Words that mean one thing, or belong together, and what they mean."""

    words: str
    meaning: str


def explained(name: str) -> Term:
    """What the column of this name explains, under its label and its heading."""
    column = COLUMNS[name]
    heading = "" if column.title == column.words else f" ({column.title})"
    return Term(column.words[0].upper() + column.words[1:] + heading, column.explanation)


TERMS = (
    Term(
        "Sweep, point",
        "A sweep is everything measured under one name; a point of it is one policy with one choice of its knobs.",
    ),
    Term(
        "Policy, knobs",
        "A policy is a way of decoding: a target, a drafter and an acceptance rule. Its knobs are its values that "
        "can be changed, such as thresholds and window.",
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
    explained("speedup"),
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
    explained("quality_difference"),
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
        "Fallback",
        "The drafter is less confident in its next token than the fallback threshold, and hands over to the "
        "target. A higher threshold hands over more often.",
    ),
    Term(
        "Rollback",
        "The target finds a drafted token too unlikely (its distance, the negative log probability in nats, "
        "exceeds the rollback threshold), replaces it and drops what followed. A higher threshold forgives more. "
        "Under greedy decoding, a threshold below ln 2 (about 0.69) changes nothing in the output.",
    ),
    explained("fallbacks"),
    explained("rollbacks"),
    Term(
        "Confidence, distance",
        "The drafter’s probability of its own token, and minus the logarithm of the target’s probability of it, "
        "in nats (units of the natural logarithm).",
    ),
    Term("Window", "The most tokens drafted before the target looks at them."),
    Term("Round", "One draft and the forward pass of the target that checks it."),
    explained("drafted"),
    explained("accepted"),
    explained("acceptance_rate"),
    explained("nothing_accepted"),
    explained("target_calls"),
    explained("draft_calls"),
    explained("tokens_per_target_call"),
    explained("tokens"),
    explained("tokens_per_s"),
    explained("latency_s_median"),
    Term(
        "Prefill, draft, verify, host",
        "Where an example’s time goes: reading the input, the drafter, the target’s forward passes, and the code "
        "around them.",
    ),
    *(explained(column.name) for column in PREDICTION),
    explained("traced_acceptance_rate"),
    explained("traced_speedup"),
    *(explained(column.name) for column in COSTS),
    explained("peak_memory_mb"),
    Term("Category", "A dataset’s own division of its examples."),
    explained("n_examples"),
    Term(
        "Certificate",
        "With measure.certify=true, each text is compared with the target’s own. Where they part, the target’s "
        "scores of the two tokens tell whether its own numerical noise explains it (a tie) or not (a defect; a "
        "method that changes outputs on purpose has them too).",
    ),
    explained("agreement_with_target"),
    Term(
        "Lossless",
        "Of a method: its output is the target’s own (under greedy decoding), or is distributed as the target’s "
        "(when sampling).",
    ),
    explained("p_value"),
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
