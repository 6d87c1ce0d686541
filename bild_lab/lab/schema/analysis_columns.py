"""The columns of changed texts, certificates, costs and predictions."""

from __future__ import annotations

from bild_lab.lab.schema.column import SHARE, TIMES, Column

CHANGE = (
    Column(
        "changed",
        "change.changed",
        "The share of texts whose tokens are not all the baseline’s.",
        label="texts changed",
        heading="changed",
        unit=SHARE,
        digits=1,
    ),
    Column(
        "first_difference",
        "change.first_difference",
        "How many tokens a changed text shares with the baseline’s before the first that differs; the median.",
        label="tokens before the first difference",
        heading="first difference",
        unit="tokens",
        digits=1,
    ),
    Column(
        "length_ratio",
        "change.length_ratio",
        "Tokens emitted, divided by the baseline’s, with its paired 95 % interval.",
        label="length, relative",
        heading="length",
        unit=TIMES,
    ),
    Column("length_ratio_low", "change.length_ratio_low", "The lower end of that interval.", unit=TIMES),
    Column("length_ratio_high", "change.length_ratio_high", "The upper end of that interval.", unit=TIMES),
    Column(
        "log_probability",
        "change.log_probability",
        "The log-probability that the target itself gives to the emitted tokens at temperature 1, in nats per token, "
        "with its 95 % interval: a quality that needs no reference. Greedy texts of the target are not the likeliest.",
        label="log-probability by the target",
        heading="log-probability",
        unit="nats/token",
        digits=3,
    ),
    Column("log_probability_low", "change.log_probability_low", "The lower end of that interval.", unit="nats/token"),
    Column("log_probability_high", "change.log_probability_high", "The upper end of that interval.", unit="nats/token"),
    Column(
        "log_probability_baseline",
        "change.log_probability_baseline",
        "The same of the baseline’s texts.",
        unit="nats/token",
        digits=3,
    ),
    Column(
        "log_probability_difference",
        "change.log_probability_difference",
        "The point’s log-probability minus the baseline’s on the same examples, with its paired 95 % interval.",
        label="log-probability, difference from the baseline’s",
        heading="difference",
        unit="nats/token",
        digits=3,
    ),
    Column(
        "log_probability_difference_low",
        "change.log_probability_difference_low",
        "The lower end of that interval.",
        unit="nats/token",
    ),
    Column(
        "log_probability_difference_high",
        "change.log_probability_difference_high",
        "The upper end of that interval.",
        unit="nats/token",
    ),
)
CERTIFICATE = (
    Column(
        "certificate_equal",
        "certificate.equal",
        "Examples whose text is the target’s own; when sampling, whose tokens have its distribution to 1e-6 of total "
        "variation.",
        digits=0,
    ),
    Column(
        "certificate_ties",
        "certificate.ties",
        "Examples that differ from it by a numerical tie; when sampling, by rounding.",
        digits=0,
    ),
    Column("certificate_defects", "certificate.defects", "Examples that differ from it by more.", digits=0),
    Column(
        "certificate_unjudged",
        "certificate.unjudged",
        "Sampled examples of a rule whose output distribution has no closed form.",
        digits=0,
    ),
    Column(
        "certificate_output",
        "certificate.output",
        "The largest total variation between what the rule emits and the target’s distribution, in any context.",
    ),
    Column(
        "certificate_rounding",
        "certificate.most_rounding",
        "The largest total variation between the target’s distribution with many rows in a forward and with one.",
    ),
)
COSTS = (
    Column(
        "flops_per_token",
        "cost.flops_per_token",
        "Arithmetic operations per emitted token (GFLOP: billions of them).",
        label="operations per token",
        heading="GFLOP/token",
        unit="FLOP",
        digits=3,
        scale=1e9,
    ),
    Column(
        "bytes_per_token",
        "cost.bytes_per_token",
        "Memory traffic per emitted token (MB: millions of bytes).",
        label="memory traffic per token",
        heading="MB/token",
        unit="bytes",
        digits=1,
        scale=1e6,
    ),
    Column(
        "flops_per_byte",
        "cost.flops_per_byte",
        "Arithmetic intensity: operations per byte of memory traffic.",
        label="intensity",
        heading="FLOP/byte",
        unit="FLOP/byte",
    ),
    Column(
        "flops_ratio",
        "cost.flops_ratio",
        "Operations per token over the baseline’s.",
        label="operations, relative",
        heading="operations",
        unit=TIMES,
    ),
    Column(
        "bytes_ratio",
        "cost.bytes_ratio",
        "Memory traffic per token over the baseline’s.",
        label="memory traffic, relative",
        heading="traffic",
        unit=TIMES,
    ),
    Column(
        "intensity_ratio",
        "cost.intensity_ratio",
        "Intensity over the baseline’s.",
        label="intensity, relative",
        heading="intensity",
        unit=TIMES,
    ),
)
PREDICTION = (
    Column(
        "predicted_cost_ratio",
        "prediction.cost_ratio",
        "The cost ratio: seconds of a drafter step over seconds of a token by the target alone.",
        label="cost ratio",
        heading="c",
        digits=3,
    ),
    Column(
        "predicted_window",
        "prediction.window",
        "Tokens per draft, if all drafts have the same length.",
        label="fixed window",
        heading="window",
        unit="tokens",
        digits=0,
    ),
    Column(
        "predicted_theorem",
        "prediction.theorem",
        "The speedup over the target alone that Theorem 3.8 of speculative decoding gives for the acceptance rate α, "
        "the window and the cost ratio c. Each of the next columns adds one thing that it leaves out.",
        label="Theorem 3.8",
        heading="Thm 3.8",
        unit=TIMES,
    ),
    Column(
        "predicted_rounds",
        "prediction.rounds",
        "The same speedup with the measured numbers of tokens and drafter steps per target call.",
        label="with real rounds",
        heading="rounds",
        unit=TIMES,
    ),
    Column(
        "predicted_verify",
        "prediction.verify",
        "The one before, with the measured time of verification, including the acceptance rule.",
        label="with real verification",
        heading="+ verify",
        unit=TIMES,
    ),
    Column(
        "predicted_host",
        "prediction.host",
        "The one before, with the time of host code between the stages.",
        label="with host code",
        heading="+ host",
        unit=TIMES,
    ),
    Column(
        "predicted_prefill",
        "prediction.prefill",
        "The one before, with the encoder and prompt, and the actual lengths of the texts.",
        label="with prefill",
        heading="+ prefill",
        unit=TIMES,
    ),
)
PIPELINE = (
    Column("pipeline_match_rate", "pipeline.match_rate", "The share of correct predictions.", unit=SHARE),
    Column("pipeline_latency_units", "pipeline.latency_units", "Layer times per token.", unit="layers"),
    Column("pipeline_compute_units", "pipeline.compute_units", "Layers that ran per token.", unit="layers"),
    Column(
        "pipeline_predicted_latency_units",
        "pipeline.predicted_latency_units",
        "Layer times per token by Theorem 4.1 of predictive pipelined decoding.",
        unit="layers",
    ),
    Column(
        "pipeline_predicted_compute_units",
        "pipeline.predicted_compute_units",
        "Layers that run per token by Theorem 4.1.",
        unit="layers",
    ),
    Column("pipeline_theorem", "pipeline.theorem", "The speedup by Theorem 4.1.", unit=TIMES),
    Column("pipeline_exit", "pipeline.exit", "The one before, with the measured time up to the exit.", unit=TIMES),
    Column(
        "pipeline_concurrent",
        "pipeline.concurrent",
        "The one before, with the measured time of running token and candidates in parallel.",
        unit=TIMES,
    ),
    Column("pipeline_host", "pipeline.host", "The one before, with the time of host code.", unit=TIMES),
    Column("pipeline_prefill", "pipeline.prefill", "The one before, with the encoder.", unit=TIMES),
)
# measured on the traced examples, to compare with the predictions
TRACED = (
    Column(
        "traced_acceptance_rate",
        "prediction.acceptance_rate",
        "The acceptance rate on the traced examples.",
        label="acceptance rate, traced",
        heading="α",
        unit=SHARE,
        digits=1,
    ),
    Column(
        "traced_speedup",
        "prediction.measured",
        "The timed speedup of the traced examples, without the waits of the traced pass.",
        label="speedup, traced",
        heading="measured",
        unit=TIMES,
    ),
)
