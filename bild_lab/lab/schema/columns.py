"""The numbers of a result, each with its name in tables, its unit and its meaning.

`sweep.csv`, the tables of the report and the terminal, the panels of Weights & Biases, the glossary and
docs/outputs.md take names, headings and explanations from here, and from `analysis_columns.py`.
"""

from __future__ import annotations

from bild_lab.lab.schema.analysis_columns import CERTIFICATE, CHANGE, COSTS, PIPELINE, PREDICTION, TRACED
from bild_lab.lab.schema.column import SHARE, TIMES, Column


def _interval(name: str, path: str, of_what: str, unit: str) -> tuple[Column, Column]:
    """The columns of a 95 % interval, whose attributes begin with `path`."""
    return (
        Column(f"{name}_low", f"{path}low", f"The lower end of the 95 % interval of {of_what}.", unit=unit),
        Column(f"{name}_high", f"{path}high", f"The upper end of the 95 % interval of {of_what}.", unit=unit),
    )


IDENTITY = (
    Column("point", "point", "The folder of the point: a hash of everything that affects its numbers."),
    Column("policy", "policy", "How tokens were decoded: by which target, drafter and acceptance rule."),
)
# the columns of the knobs come here
SETTING = (
    Column("target", "setting.target", "The large model, whose output is wanted."),
    Column("draft", "setting.draft", "The small model that drafts, if the pair has one."),
    Column("dataset", "setting.dataset", "The dataset."),
    Column("split", "setting.split", "The part of the dataset."),
    Column(
        "n_examples",
        "setting.n_examples",
        "How many examples were decoded. Each turn of a conversation is an example.",
        label="examples",
        digits=0,
    ),
    Column("dtype", "setting.dtype", "The precision of the weights."),
    Column("device", "setting.device", "The device that decoded."),
    Column("batch", "setting.batch", "How many texts decoded at once.", digits=0),
    Column("temperature", "setting.temperature", "The temperature of sampling; 0: the likeliest token.", digits=1),
)
CIRCUMSTANCES = (
    Column(
        "engine",
        "engine",
        "What ran the target: kernels (our C++), native (our modules), hf (those of Transformers), or a peer's own.",
    ),
    Column(
        "shared_device",
        "environment.shared_device",
        "Whether another process of bild_lab used the device meanwhile. Do not rely on the timings then.",
    ),
    Column(
        "busy_elsewhere_percent",
        "environment.busy_elsewhere_percent",
        "How much of all cores’ time other processes used while the point was timed. Above 10 % do not rely on the "
        "timings.",
        label="machine busy elsewhere",
        unit="%",
        digits=0,
    ),
    Column(
        "side_by_side",
        "environment.side_by_side",
        "How many points were timed together, text by text in turn beside one baseline; empty for a point by itself.",
        digits=0,
    ),
)
QUALITY = (
    Column("quality_metric", "quality.metric", "The quality metric, on a scale of 0 to 100."),
    Column("quality", "quality.value", "The metric of the point’s outputs, with its 95 % interval.", unit="points"),
    *_interval("quality", "quality.", "the quality", "points"),
    Column("quality_baseline", "quality.baseline", "The baseline’s quality on the same examples.", unit="points"),
    Column(
        "quality_difference",
        "quality.difference",
        "The point’s quality minus the baseline’s on the same examples, with its paired 95 % interval.",
        label="difference from the baseline",
        heading="difference",
        short="diff.",
        unit="points",
    ),
    *_interval("quality_difference", "quality.difference_", "the difference", "points"),
)
SPEED = (
    Column(
        "latency_s_median",
        "latency_s.median",
        "Seconds from an example’s token ids to those of its output, in a batch with its waits for others. Half of the "
        "examples took less than the median, 95 % less than p95.",
        label="median latency per example",
        heading="latency",
        short="ms",
        unit="s",
    ),
    Column("latency_s_p95", "latency_s.p95", "95 % of the examples took less.", label="latency, p95", unit="s"),
    Column("latency_s_mean", "latency_s.mean", "The mean over the examples.", label="latency, mean", unit="s"),
    Column(
        "speedup",
        "speedup.value",
        "The baseline’s total time divided by the point’s, over the same examples, at the same batch, with its 95 % "
        "interval. 1.5× means two thirds of the time. “Relative latency” is one over it.",
        unit=TIMES,
    ),
    *_interval("speedup", "speedup.", "the speedup", TIMES),
    Column("speedup_median", "speedup.median", "The median of the speedups of single examples.", unit=TIMES),
    Column("tokens", "tokens", "Tokens emitted, after every cut at an end token or the length limit.", digits=0),
    Column(
        "tokens_per_s",
        "tokens_per_s",
        "Emitted tokens per second.",
        label="tokens per second",
        heading="tokens/s",
        unit="1/s",
        digits=1,
    ),
    Column("baseline_tokens_per_s", "baseline_tokens_per_s", "The baseline’s tokens per second.", unit="1/s", digits=1),
    Column("tokens_per_s_ratio", "tokens_per_s_ratio", "Tokens per second over the baseline’s.", unit=TIMES),
)
COUNTS = (
    Column(
        "tokens_per_target_call",
        "counts.tokens_per_target_call",
        "Emitted tokens per forward pass of the target: 1 for plain decoding; more is better. Spec-Bench calls it mean "
        "accepted tokens, SPEED-Bench acceptance length.",
        heading="tokens/call",
        short="tok/call",
    ),
    Column(
        "acceptance_rate",
        "counts.acceptance_rate",
        "The probability that a drafted token is accepted, given that those before it are: accepted tokens, divided by "
        "accepted tokens plus rejections. Tokens after a rejected token are dropped and count as neither.",
        heading="acceptance",
        short="acc.",
        unit=SHARE,
        digits=1,
    ),
    Column(
        "nothing_accepted",
        "counts.nothing_accepted",
        "The share of rounds with a draft in which the target accepted none of its tokens.",
        label="rounds with nothing accepted",
        heading="none accepted",
        unit=SHARE,
        digits=1,
    ),
    Column("drafted", "counts.drafted", "Tokens that were proposed.", digits=0),
    Column("accepted", "counts.accepted", "Drafted tokens that the target accepted.", digits=0),
    Column("draft_calls", "counts.draft_calls", "Forward passes of the drafter.", digits=0),
    Column("target_calls", "counts.target_calls", "Forward passes of the target.", digits=0),
    Column(
        "fallbacks",
        "counts.fallbacks",
        "How often the drafter handed over to the target early, as its confidence was too low.",
        digits=0,
    ),
    Column("rollbacks", "counts.rollbacks", "How often the target replaced a drafted token.", digits=0),
    Column(
        "exit_layer_mean",
        "counts.exit_layer_mean",
        "After how many layers a token was predicted, on average; for methods that exit early.",
        unit="layers",
    ),
    Column(
        "agreement_with_target",
        "agreement_with_target",
        "The share of examples whose token ids all equal the target’s own greedy output. It does not say how good the "
        "other outputs are. In bfloat16 even a lossless method may differ at positions where two tokens are nearly "
        "tied.",
        label="same output as the target alone",
        heading="same output",
        short="same",
        unit=SHARE,
        digits=1,
    ),
    Column(
        "peak_memory_mb",
        "peak_memory_mb",
        "Peak memory of the process, method and baseline together; empty where several points were timed side by side.",
        label="peak memory",
        heading="memory, MB",
        unit="MB",
        digits=0,
    ),
)
OTHER_NAMES = (
    Column("greedy_speedup", "greedy_speedup", "BiTA’s name for tokens_per_s_ratio under greedy decoding.", unit=TIMES),
    Column("mean_accepted_tokens", "counts.tokens_per_target_call", "Spec-Bench’s name for tokens_per_target_call."),
    Column("acceptance_length", "counts.tokens_per_target_call", "SPEED-Bench’s name for tokens_per_target_call."),
)
# the columns of `sweep.csv`, in order; those of the knobs come after the identity
TABLE = (
    *IDENTITY,
    *SETTING,
    *CIRCUMSTANCES,
    *QUALITY,
    *SPEED,
    *COUNTS,
    *OTHER_NAMES,
    *CHANGE,
    *CERTIFICATE,
    *COSTS,
    *PREDICTION,
    *PIPELINE,
)
# shown in the report, but not in `sweep.csv`
_SHOWN = (
    Column(
        "p_value",
        "quality.p_value",
        "How often a quality difference at least this large would come by chance if the two systems were equally good.",
        label="p-value",
        digits=3,
    ),
    *TRACED,
)
COLUMNS = {column.name: column for column in (*TABLE, *_SHOWN)}
