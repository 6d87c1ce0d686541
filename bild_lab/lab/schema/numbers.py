"""The groups of a result's numbers: quality, speed, counts, change, certificate, cost and
predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bild_lab.lab.schema.columns import (
    NATS,
    OF_METRIC,
    SHARE,
    TIMES,
    column,
    count,
    end,
    group,
    ratio,
    required,
    share,
)
from bild_lab.lab.schema.formatting import MINUS, number

FIRST_PIECE = "from the request to the first piece of a text"
LATER_TOKEN = "a token after the first piece, of a text: servers call it TPOT"
NON_INFERIORITY_LEVEL = 0.05  # one-sided
SIGNIFICANT = 0.05  # two-sided: a smaller p-value is called beyond chance
PIECES_APART = "between two pieces of a text, of one or several tokens: servers call it ITL"


def percentile(name: str, percent: int, meaning: str) -> Any:
    """A field with a percentile of seconds."""
    return column(
        f"Seconds {meaning}; {percent} % are shorter.",
        name=f"{name}_s_p{percent}",
        unit="s",
        digits=4,
    )


@dataclass(frozen=True, kw_only=True)
class NonInferiority:
    """Whether the quality is no worse than the baseline's by a margin, one-sided at 5 %.

    test: "score" for a metric that is right or wrong for each example, "betting" for another one
    from 0 to 100, else "bootstrap". lower_bound: None where the bootstrap has too few examples that
    differ to know one.
    """

    margin: float = required(
        "How much of the quality a point may lose and still count as no worse (`measure.margin`).",
        unit=OF_METRIC,
    )
    lower_bound: float | None = required(
        "The one-sided lower 95 % bound of the quality minus the baseline’s. Above minus the margin"
        " the point is no worse.",
        unit=OF_METRIC,
    )
    p_value: float = required(
        "How often a difference at least this good would come by chance if the point lost the whole"
        " margin. At most 0.05 it is no worse.",
        digits=3,
    )
    test: str

    @property
    def shown(self) -> bool:
        """Whether the data show that no more than the margin is lost."""
        return self.p_value <= NON_INFERIORITY_LEVEL

    def to_columns(self) -> dict[str, float | None]:
        """Its columns, as `sweep.csv` has them, for other tables."""
        names = ("margin", "lower_bound", "p_value")
        return {f"non_inferiority_{name}": getattr(self, name) for name in names}


@dataclass(frozen=True)
class MetricScale:
    """How a metric's values are written.

    digits: after the decimal point. small_loss: the loss that reports allow beside none, in the
    metric's unit. loss_words: the same in words. loss_line: what a figure calls the baseline's
    quality less that. unit: of the metric's values.
    """

    digits: int
    small_loss: float
    loss_words: str
    loss_line: str
    unit: str = "points"

    def amount(self, value: float) -> str:
        """A margin: `5`, as points are what is meant where nothing is said, but `0.01 nats`."""
        if self.unit == "points":
            return f"{value:g}"
        return f"{value:g} {self.unit.removesuffix('s') if value == 1 else self.unit}"


POINTS_SCALE = MetricScale(2, 1.0, "one point", f"{MINUS}1 point")
LOG_PROBABILITY_NAME, LENGTH_NAME = "log-probability", "length"  # of metrics that have no points
_OTHER_SCALES = {
    # as one point of `screen.guarantee.loss`: a token's probability falls by 1 %
    LOG_PROBABILITY_NAME: MetricScale(4, 0.01, "0.01 nats", f"{MINUS}0.01 nats", "nats"),
    LENGTH_NAME: MetricScale(2, 1.0, "one token", f"{MINUS}1 token", "tokens"),
}


def scale_of(metric: str) -> MetricScale:
    """The scale of a metric, given by the name that tables show."""
    return _OTHER_SCALES.get(metric, POINTS_SCALE)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The quality of the outputs, on the metric's scale (`MetricScale`), with its 95 % interval over
    examples.

    signature: how it was computed. What compares with the baseline is None without one.
    non_inferiority: None without `measure.margin`, and for further metrics.
    """

    metric: str = required(
        "The quality metric: up to 100, a log-probability in nats a token, a length in tokens.",
        name="quality_metric",
    )
    value: float | None = required(
        "The metric of the point’s outputs, with its 95 % interval.", name="quality", unit=OF_METRIC
    )
    low: float | None = end("lower", "the quality", OF_METRIC)
    high: float | None = end("upper", "the quality", OF_METRIC)
    signature: str | None = None
    baseline: float | None = column("The baseline’s quality on the same examples.", unit=OF_METRIC)
    difference: float | None = column(
        "The point’s quality minus the baseline’s on the same examples, with its paired 95 %"
        " interval.",
        label="difference from the baseline",
        heading="difference",
        short="diff.",
        unit=OF_METRIC,
    )
    difference_low: float | None = end("lower", "the difference", OF_METRIC)
    difference_high: float | None = end("upper", "the difference", OF_METRIC)
    p_value: float | None = column(
        "How often a quality difference at least this large would come by chance if the two systems"
        " were equally good.",
        name="p_value",
        label="p-value",
        digits=3,
        in_table=False,
    )
    non_inferiority: NonInferiority | None = group("non_inferiority_", None)

    @property
    def scale(self) -> MetricScale:
        """How its values are written."""
        return scale_of(self.metric)

    @property
    def beyond_chance(self) -> bool:
        """Whether systems that are equally good differ so much in fewer than 5 of 100 samples.

        The p-value alone decides, everywhere. Of right and wrong answers it is exact, and their
        interval is not: it may leave out 0 where the test does not.
        """
        return self.p_value is not None and self.p_value < SIGNIFICANT

    @property
    def words(self) -> str:
        """The value by its metric: `BLEU 82.40`."""
        return f"{self.metric} {number(self.value, self.scale.digits)}"


@dataclass(frozen=True)
class Latency:
    """Seconds per example; the median of an example's repeats counts. total: of all examples.

    In a batch an example's seconds are those from its place to its end, so they overlap with those
    of others.
    """

    median: float = required(
        "Seconds from an example’s token ids to those of its output, in a batch with its waits for"
        " others. Half of the examples took less than the median, 95 % less than p95.",
        label="median latency per example",
        heading="latency",
        short="ms",
        unit="s",
    )
    p95: float = required("95 % of the examples took less.", label="latency, p95", unit="s")
    mean: float = required("The mean over the examples.", label="latency, mean", unit="s")
    total: float


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """When the pieces of texts came that another engine streamed, over all texts and repeats.

    Percentiles of seconds. A piece is one or several tokens.
    """

    errors: int = required(
        "Texts that never came from the server, to the point or to its baseline. They count as empty in"
        " the quality, and are left out of speeds, changes and certificates.",
        name="request_errors",
        label="requests without an answer",
        digits=0,
    )
    retries: int = required(
        "Requests that were sent again after a failure; the seconds of failures do not count.",
        name="request_retries",
        label="requests sent again",
        digits=0,
    )
    first_token_p50: float | None = percentile("first_token", 50, FIRST_PIECE)
    first_token_p95: float | None = percentile("first_token", 95, FIRST_PIECE)
    first_token_p99: float | None = percentile("first_token", 99, FIRST_PIECE)
    token_p50: float | None = percentile("token", 50, LATER_TOKEN)
    token_p95: float | None = percentile("token", 95, LATER_TOKEN)
    token_p99: float | None = percentile("token", 99, LATER_TOKEN)
    gap_p50: float | None = percentile("gap", 50, PIECES_APART)
    gap_p95: float | None = percentile("gap", 95, PIECES_APART)
    gap_p99: float | None = percentile("gap", 99, PIECES_APART)


@dataclass(frozen=True)
class Speedup:
    """Baseline time over method time, with a 95 % interval over examples.

    All None without a baseline.
    """

    value: float | None = column(
        "The baseline’s total time divided by the point’s, over the same examples, at the same"
        " batch, with its 95 % interval. 1.5× means two thirds of the time. “Relative latency” is"
        " one over it.",
        name="speedup",
        unit=TIMES,
    )
    low: float | None = end("lower", "the speedup", TIMES)
    high: float | None = end("upper", "the speedup", TIMES)
    median: float | None = ratio("The median of the speedups of single examples.")
    noise: float | None = share(
        "How far the speedup may be off, on these texts, by the clock alone: half its 95 % interval"
        " over the repeats, which are passes over all texts. More repeats lower it; only more texts"
        " narrow the speedup’s own interval.",
        label="speedup, error of the clock",
    )
    repeats: int | None = count("How often each text was timed.", name="repeats")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Totals over the rounds of all examples. All None for a method without rounds, such as
    Transformers' own.

    acceptance_by_position: the share of drafts accepted at a position, among those accepted at all
    positions before.
    judged_by_position: how many drafts had a token accepted at each position, rejected, and dropped
    unobserved after a rejection.
    """

    tokens_per_target_call: float | None = column(
        "Emitted tokens per forward pass of the target: 1 for plain decoding; more is better."
        " Spec-Bench calls it mean accepted tokens, SPEED-Bench acceptance length.",
        heading="tokens/call",
        short="tok/call",
    )
    acceptance_rate: float | None = share(
        "The probability that a drafted token is accepted, given that those before it are: accepted"
        " tokens, divided by accepted tokens plus rejections. Tokens after a rejected token are"
        " dropped and count as neither.",
        heading="acceptance",
        short="acc.",
    )
    expected_acceptance: float | None = share(
        "The mean of Σ min(p, q), how likely a drafted token is accepted, where a rule records it;"
        " with policy=alpha over all of the target’s own tokens, which is the α of speculative"
        " decoding’s Table 3."
    )
    nothing_accepted: float | None = share(
        "The share of rounds with a draft in which the target accepted none of its tokens.",
        label="rounds with nothing accepted",
        heading="none accepted",
    )
    drafted: int | None = count("Tokens that were proposed.")
    accepted: int | None = count("Drafted tokens that the target accepted.")
    accepted_share: float | None = share(
        "Accepted tokens over drafted ones, which vLLM, SGLang and llama.cpp print as acceptance. It"
        " is at most the acceptance rate, as tokens after a rejection count too."
    )
    draft_calls: int | None = count("Forward passes of the drafter.")
    target_calls: int | None = count("Forward passes of the target.")
    fallbacks: int | None = count(
        "How often the drafter handed over to the target early, its confidence too low."
    )
    rollbacks: int | None = count("How often the target replaced a drafted token.")
    exit_layer_mean: float | None = column(
        "After how many layers a token was predicted, on average; for methods that exit early.",
        unit="layers",
    )
    acceptance_by_position: list[float | None] | None = None
    judged_by_position: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Category:
    """The numbers of one category of the dataset; the fields have the same meaning as in
    `Result`.
    """

    n_examples: int
    independent_texts: int | None = None
    tokens: int
    tokens_per_s: float
    baseline_tokens_per_s: float | None
    tokens_per_s_ratio: float | None
    speedup: Speedup
    tokens_per_target_call: float | None
    acceptance_rate: float | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """What differs from the baseline's texts, and how likely the target itself finds the texts.

    The first two are None when sampling, where texts differ anyway. Every low and high is an end of a
    95 % interval over examples. What needs a baseline is None without one, and the
    log-probabilities where they were not asked for.
    """

    changed: float | None = share(
        "The share of texts whose tokens are not all the baseline’s.",
        label="texts changed",
        heading="changed",
    )
    first_difference: float | None = column(
        "How many tokens a changed text shares with the baseline’s before the first that differs;"
        " the median.",
        label="tokens before the first difference",
        heading="first difference",
        unit="tokens",
        digits=1,
    )
    length_ratio: float | None = ratio(
        "Tokens emitted, divided by the baseline’s, with its paired 95 % interval.",
        label="length, relative",
        heading="length",
    )
    length_ratio_low: float | None = end("lower", "the relative length", TIMES)
    length_ratio_high: float | None = end("upper", "the relative length", TIMES)
    log_probability: float | None = column(
        "The log-probability that the target itself gives to the emitted tokens at temperature 1,"
        " in nats per token, with its 95 % interval: a quality that needs no reference. Greedy"
        " texts are not the most likely.",
        label="log-probability by the target",
        heading="log-probability",
        unit=NATS,
        digits=3,
    )
    log_probability_low: float | None = end("lower", "the log-probability", NATS)
    log_probability_high: float | None = end("upper", "the log-probability", NATS)
    log_probability_baseline: float | None = column(
        "The same of the baseline’s texts.", unit=NATS, digits=3
    )
    log_probability_difference: float | None = column(
        "The point’s log-probability minus the baseline’s on the same examples, with its paired 95"
        " % interval.",
        label="log-probability, difference from the baseline’s",
        heading="difference",
        unit=NATS,
        digits=3,
    )
    log_probability_difference_low: float | None = end("lower", "the difference", NATS)
    log_probability_difference_high: float | None = end("upper", "the difference", NATS)


@dataclass(frozen=True, kw_only=True)
class CertificateCounts:
    """How many examples are the target's own, differ by rounding, or differ by more.

    output: the largest total variation between what the rule emits and the target's distribution.
    rounding: by the number of rows in a forward, the largest total variation between the target's
    distribution in it and one row after another. The last three are None for greedy texts. claimed:
    whether the method says that it is lossless; None in older results.
    """

    equal: int = required(
        "Examples whose text is the target’s own; when sampling, whose tokens have its distribution"
        " to 1e-6 of total variation.",
        digits=0,
    )
    ties: int = required(
        "Examples that differ from it by a numerical tie; when sampling, by rounding.", digits=0
    )
    defects: int = required("Examples that differ from it by more.", digits=0)
    unjudged: int | None = count(
        "Sampled examples of a rule whose output distribution has no closed form, and texts that"
        " another engine failed to give."
    )
    output: float | None = column(
        "The largest total variation between what the rule emits and the target’s distribution, in"
        " any context."
    )
    rounding: Mapping[str, float] | None = None
    claimed: bool | None = None


@dataclass(frozen=True, kw_only=True)
class DecodingCosts:
    """Operations and memory traffic of all forwards, and their ratios to the baseline's (None
    without a baseline).
    """

    flops_per_token: float = required(
        "Arithmetic operations per emitted token (GFLOP: billions of them).",
        label="operations per token",
        heading="GFLOP/token",
        unit="FLOP",
        digits=3,
        scale=1e9,
    )
    bytes_per_token: float = required(
        "Memory traffic per emitted token (MB: millions of bytes).",
        label="memory traffic per token",
        heading="MB/token",
        unit="bytes",
        digits=1,
        scale=1e6,
    )
    flops_per_byte: float | None = required(
        "Arithmetic intensity: operations per byte of memory traffic.",
        label="intensity",
        heading="FLOP/byte",
        unit="FLOP/byte",
    )
    flops_ratio: float | None = ratio(
        "Operations over the baseline’s, of all texts together, as the speedup is of all seconds.",
        label="operations, relative",
        heading="operations",
    )
    bytes_ratio: float | None = ratio(
        "Memory traffic over the baseline’s, of all texts together.",
        label="memory traffic, relative",
        heading="traffic",
    )
    intensity_ratio: float | None = ratio(
        "Intensity over the baseline’s.", label="intensity, relative", heading="intensity"
    )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Speedups over the target alone, from theory to measured time; each step adds one cost that
    theory leaves out.
    """

    cost_ratio: float = required(
        "The cost ratio: seconds of a drafter step over seconds of a token by the target alone.",
        label="cost ratio",
        heading="c",
        digits=3,
    )
    window: int | None = required(
        "Tokens per draft, if all drafts have the same length.",
        label="fixed window",
        heading="window",
        unit="tokens",
        digits=0,
    )
    theorem: float | None = required(
        "The speedup over the target alone that Theorem 3.8 of speculative decoding gives for the"
        " acceptance rate α, the window and the cost ratio c. Each of the next columns adds one"
        " thing that it leaves out.",
        label="Theorem 3.8",
        heading="Thm 3.8",
        unit=TIMES,
    )
    rounds: float = required(
        "The same speedup with the measured numbers of tokens and drafter steps per target call.",
        label="with real rounds",
        heading="rounds",
        unit=TIMES,
    )
    host: float = required(
        "The one before, with the measured time of verification, including the acceptance rule and"
        " the host code between the stages, which a token of the target has too.",
        label="with real verification and host code",
        heading="+ verify, host",
        unit=TIMES,
    )
    prefill: float = required(
        "The one before, with the encoder and prompt, and the actual lengths of the texts: the"
        " timed speedup of the traced examples.",
        label="with prefill",
        heading="+ prefill",
        unit=TIMES,
    )


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Measurements of predictive pipelined decoding, and Theorem 4.1 with the measured match rate.

    layers: of the target. exit_layer: after how many layers the next token is started. match_rate:
    over the tokens that have a successor; None if no text has two tokens. The theorem assumes
    candidates for every token. The executor has none for the last token before the length limit, so
    its compute may be smaller. The speedups over the target alone go from theory to measured time.
    They are None if nothing was traced, or if the baseline is not the target alone.
    """

    layers: int
    exit_layer: int
    match_rate: float | None = required("The share of correct predictions.", unit=SHARE)
    latency_units: float = required("Layer times per token.", unit="layers")
    compute_units: float = required("Layers that ran per token.", unit="layers")
    predicted_latency_units: float = required(
        "Layer times per token by Theorem 4.1 of predictive pipelined decoding.", unit="layers"
    )
    predicted_compute_units: float = required(
        "Layers that run per token by Theorem 4.1.", unit="layers"
    )
    theorem: float | None = ratio("The speedup by Theorem 4.1.")
    exit: float | None = ratio(
        "The one before, with the measured time up to the exit, the head and the choice of"
        " candidates included."
    )
    concurrent: float | None = ratio(
        "The one before, with the measured time of running token and candidates in parallel, which"
        " compete for memory."
    )
    host: float | None = ratio("The one before, with the time of host code.")
    prefill: float | None = ratio("The one before, with the encoder or prompt.")
