"""The words of the report, the terminal and the command line, explained once."""

from __future__ import annotations

import textwrap
from typing import NamedTuple


class Term(NamedTuple):
    """One or more related words, and what they mean."""

    words: str
    meaning: str


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
    Term(
        "Speedup",
        "The baseline’s total latency divided by the point’s, over the same examples. 1.5× means two thirds of "
        "the time. Relative latency is 1 divided by the speedup.",
    ),
    Term(
        "Intervals",
        "95 % bootstrap intervals over the examples: on other examples of the same kind, the number would mostly be "
        "in this range. If the interval of a difference contains 0, or that of a speedup contains 1, the effect may "
        "be chance.",
    ),
    Term(
        "BLEU, ROUGE-L, agreement",
        "Quality metrics, from 0 to 100. BLEU counts the sequences of one to four words that outputs share with the "
        "references, ROUGE-L uses the longest common subsequence of words. Agreement is the share of outputs that "
        "equal the baseline’s. A metric’s signature lists the options that it was computed with.",
    ),
    Term(
        "Difference",
        "The point’s quality minus the baseline’s on the same examples.",
    ),
    Term(
        "Point of loss",
        "One point of the quality metric below the baseline, on its scale of 0 to 100. No loss means a score at "
        "least as high as the baseline’s; the texts may differ. The best point is the fastest one that loses no more "
        "than allowed.",
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
    Term(
        "Confidence, distance",
        "Confidence is the drafter’s probability of its own token. Distance is the negative logarithm of the target’s "
        "probability of that token, in nats (units of the natural logarithm).",
    ),
    Term(
        "Window",
        "The largest number of tokens that are drafted before the target verifies them.",
    ),
    Term(
        "Round",
        "One draft, and the forward pass of the target that verifies it.",
    ),
    Term(
        "Drafted, accepted",
        "Drafted tokens are the proposed ones. Accepted tokens are those of them that the target keeps.",
    ),
    Term(
        "Acceptance (rate), α",
        "The probability that a drafted token is accepted if the tokens before it were: accepted tokens, divided by "
        "accepted tokens plus rejections. Tokens after a rejected one are dropped, and do not count.",
    ),
    Term(
        "None stood",
        "The share of rounds with a draft in which the target accepted none of its tokens.",
    ),
    Term(
        "Target calls, draft calls",
        "The number of forward passes of the target and of the drafter.",
    ),
    Term(
        "Tokens per target call (tokens/call)",
        "Emitted tokens per forward pass of the target. Plain decoding has 1, more is better. Spec-Bench calls it "
        "mean accepted tokens, SPEED-Bench acceptance length.",
    ),
    Term(
        "Tokens, tokens/s",
        "The number of emitted tokens, up to an end token or the length limit, and how many per second.",
    ),
    Term(
        "Latency, median and p95",
        "Latency is the time from an example’s token ids to those of its output. Half of the examples took less than "
        "the median, 95 % less than p95.",
    ),
    Term(
        "Prefill, draft, verify, host",
        "The parts of an example’s time: reading the input, the drafter, the target’s forward passes, and the code "
        "around them.",
    ),
    Term(
        "c, Theorem 3.8 (Thm 3.8), rounds, measured",
        "The speedup that the theorem of speculative decoding predicts from the acceptance rate α, the window and "
        "the cost ratio c (time of a drafter step over time of a target step). The next columns add real costs one by "
        "one: the real rounds, verifying, the host and the prefill. The last one is the measured speedup.",
    ),
    Term(
        "GFLOP/token, MB/token, FLOP/byte",
        "Arithmetic operations (in billions) and memory traffic (in millions of bytes) per emitted token, and "
        "operations per byte, which is the intensity. The columns operations, traffic and intensity give multiples "
        "of the baseline’s values.",
    ),
    Term(
        "Memory, MB",
        "The peak memory of the process, which runs both the point and the baseline.",
    ),
    Term(
        "Category, examples",
        "A category is a group of examples that the dataset itself defines. Each turn of a conversation is an example.",
    ),
    Term(
        "Certificate",
        "With measure.certify=true, each text is compared with the target’s own. At the first token that differs, "
        "the target scores both tokens. If its numerical noise explains the difference, it is a tie, otherwise a "
        "defect. A method that changes outputs on purpose has defects too.",
    ),
    Term(
        "Same output",
        "The share of examples whose token ids all equal the target’s own greedy output. It does not say how good "
        "the other examples are. In bfloat16 even a lossless method may differ in a few places where two tokens are "
        "nearly tied. It is empty with a temperature, when outputs are random, and with another baseline than the "
        "target alone.",
    ),
    Term(
        "Lossless",
        "A method is lossless if its output is the target’s own under greedy decoding, and has the target’s "
        "distribution when sampling.",
    ),
    Term(
        "p-value",
        "How often chance alone gives a quality difference at least this large between two equally good systems.",
    ),
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
