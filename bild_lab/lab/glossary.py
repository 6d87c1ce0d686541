"""Explanations of the terms used in the report, the terminal and the command line.

Terms that name a number of a result are explained in `schema/columns.py`.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from bild_lab.lab.schema.result import COLUMNS, COSTS, PREDICTION


class Term(NamedTuple):
    """One or more related words, and what they mean."""

    words: str
    meaning: str


def explained(name: str) -> Term:
    """The term for the column with this name: its label and heading, and its explanation."""
    column = COLUMNS[name]
    heading = "" if column.title == column.words else f" ({column.title})"
    return Term(column.words[0].upper() + column.words[1:] + heading, column.explanation)


TERMS = (
    Term(
        "Sweep, point",
        "A sweep is everything that was measured under one name. A point is one policy with one choice of its knobs.",
    ),
    Term(
        "Policy, knobs",
        "A policy is a way of decoding: a target, a drafter and an acceptance rule. Its knobs are its parameters, "
        "such as thresholds and the window.",
    ),
    Term(
        "Setting",
        "Everything that two points must share to be compared: models, data, precision, hardware, code. Each "
        "setting has a table of its own.",
    ),
    Term(
        "Baseline",
        "The policy that each point is compared with. Both decode each example in turn. By default it is vanilla: "
        "the target decodes alone, one token per forward pass.",
    ),
    Term(
        "Target, drafter",
        "The target is the large model whose output is wanted. The drafter is a small, fast model (or a part of the "
        "target, or a table) that proposes tokens for it. The proposed tokens are the draft.",
    ),
    explained("speedup"),
    Term(
        "Intervals",
        "95 % bootstrap intervals over the examples: on other examples of the same kind, the number would mostly be "
        "in this range. If the interval of a difference contains 0, or that of a speedup contains 1, the effect may "
        "be chance.",
    ),
    Term(
        "BLEU, chrF, ROUGE-L, agreement",
        "Quality metrics, from 0 to 100. BLEU counts the sequences of one to four words that outputs share with the "
        "references, chrF those of one to six characters. ROUGE-L uses the longest common subsequence of words, and "
        "TER the edits that lead to the reference (shown as 100 minus them). Agreement is the share of outputs that "
        "equal the baseline’s. A metric’s signature lists the options that it was computed with.",
    ),
    explained("quality_difference"),
    Term(
        "Point of loss",
        "One point of the quality metric below the baseline, on its scale of 0 to 100. No loss means a score at "
        "least as high as the baseline’s; the texts may differ. The best point is the fastest one that loses no more "
        "than allowed.",
    ),
    Term(
        "No loss measured",
        "A score at least as high as the baseline’s on these examples. If the interval of the difference reaches below "
        "zero, a loss of that size is not excluded.",
    ),
    Term(
        "Pareto front",
        "The points that are not beaten: no other point, and not the baseline, is faster without losing quality.",
    ),
    Term(
        "Hypervolume",
        "The area of relative latency and quality that a policy’s points dominate, up to a reference point: the "
        "baseline’s relative latency of 1, and a quality that is a stated margin below the baseline’s. More is "
        "better. The unit is quality points times relative latency. Points that are slower than the baseline, or "
        "lose more than the margin, add nothing.",
    ),
    Term(
        "Fallback, fallbacks",
        "A fallback: the drafter’s confidence in its next token is below the fallback threshold, so the drafter "
        "stops and the target verifies. A higher threshold makes more fallbacks.",
    ),
    Term(
        "Rollback, rollbacks",
        "A rollback: the target rejects a drafted token, puts its own token there and drops the rest of the draft. "
        "In BiLD it rejects a token if its distance exceeds the rollback threshold. A higher threshold accepts more. "
        "Under greedy decoding, a threshold below ln 2 (about 0.69) does not change the output.",
    ),
    explained("fallbacks"),
    explained("rollbacks"),
    Term(
        "Confidence, distance",
        "Confidence is the drafter’s probability of its own token. Distance is the negative logarithm of the target’s "
        "probability of that token, in nats (units of the natural logarithm).",
    ),
    Term("Window", "The maximum number of tokens drafted before the target verifies them."),
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
        "The parts of an example’s time: reading the input, the drafter, the target’s forward passes, and the code "
        "around them.",
    ),
    Term(
        "Why this speed",
        "What a policy’s speedup is made of: tokens per call, the cost of a drafter step (c) and of checking a draft "
        "in tokens of the target alone, and the parts of the time.",
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
        "With measure.certify=true, each text is compared with the target’s own. At the first token that differs, "
        "the target scores both tokens. If its numerical noise explains the difference, it is a tie, otherwise a "
        "defect. When sampling, what the acceptance rule emits is compared with the target’s distribution in every "
        "context. A method that changes outputs on purpose has defects too.",
    ),
    explained("agreement_with_target"),
    Term(
        "Lossless",
        "A method is lossless if its output is the target’s own under greedy decoding, and has the target’s "
        "distribution when sampling.",
    ),
    explained("p_value"),
    Term(
        "Warm-up, repeats",
        "Warm-up is the number of examples decoded before timing starts. Repeats is how often each example is timed; "
        "the median counts.",
    ),
)


def terms_text(width: int = 100) -> str:
    """The terms as paragraphs for a terminal, `width` columns wide."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False)
    return "\n".join(wrapper.fill(f"{term.words}: {term.meaning}") for term in TERMS)
