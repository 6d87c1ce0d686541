"""The measurements of one point: the content of `result.json`.

Every field says what it is called and means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from bild_lab.errors import UserError
from bild_lab.lab.schema.columns import (
    Column,
    column,
    columns_of,
    count,
    from_json,
    group,
    ratio,
    required,
    share,
    to_json,
)
from bild_lab.lab.schema.numbers import (
    Category,
    CertificateCounts,
    Change,
    Counts,
    DecodingCosts,
    Latency,
    Pipeline,
    Prediction,
    Quality,
    Speedup,
    Streamed,
)

SCHEMA = 3
AS_GOOD_CUT = ("agreement", "log_probability", "length")  # metrics that a text needs no end for
BUSY_PERCENT = 10  # of all cores' time; more than this used by others changes the timings


@dataclass(frozen=True, eq=False)
class AttributeMapping(Mapping[str, Any]):
    """A mapping with arbitrary keys, which are also attributes; None for a key that is not
    there.
    """

    entries: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key == "entries":  # what copying and pickling ask for
            raise AttributeError(key)
        return self.get(key)


class Setting(AttributeMapping):
    """Everything that two points must share to be compared, such as models, data and hardware
    (`lab/point/identity.py`).
    """

    KEYS: ClassVar = (
        Column("The large model, whose output is wanted.", "target"),
        Column("The small model that drafts, if the pair has one.", "draft"),
        Column("The dataset.", "dataset"),
        Column("The part of the dataset.", "split"),
        Column(
            "How many examples were decoded. Each turn of a conversation is an example.",
            "n_examples",
            label="examples",
            digits=0,
        ),
        Column("The precision of the weights.", "dtype"),
        Column("The device that decoded.", "device"),
        Column("How many texts decoded at once.", "batch", digits=0),
        Column("The temperature of sampling; 0: the most likely token.", "temperature", digits=1),
    )

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, 1 if key == "batch" else default)  # only batches store their size

    @property
    def temperature(self) -> float:
        """0 for greedy decoding."""
        return self["decoding"]["temperature"]


class Environment(AttributeMapping):
    """The environment of a point's measurement: versions, hardware, other load
    (`lab/point/environment.py`).
    """

    KEYS: ClassVar = (
        Column(
            "How fast the device reads its memory, 10⁹ bytes a second, with the threads of the run."
            " A token of the target alone waits for its weights: where memory is slow, drafts gain"
            " more.",
            "read_gb_per_s",
            label="read bandwidth",
            heading="GB/s",
            unit="GB/s",
            digits=1,
        ),
        Column(
            "The time of a forward of the target over eight rows, over that of one row: what"
            " checking a draft of seven costs, in tokens. Near 1 drafts are checked for nothing.",
            "eight_rows_cost",
            label="cost of eight rows",
            heading="eight rows",
            unit="tokens",
        ),
        Column(
            "Whether another process of bild_lab used the device meanwhile; empty where that is not"
            " seen. Do not rely on the timings then.",
            "shared_device",
        ),
        Column(
            "How much of all cores’ time other processes used while the point was timed. Above 10 %"
            " do not rely on the timings.",
            "busy_elsewhere_percent",
            label="machine busy elsewhere",
            unit="%",
            digits=0,
        ),
        Column(
            "What held the GPU’s clock down while the point was timed, as NVML says, such as heat."
            " Do not compare its timings with others then.",
            "gpu_slowed_by",
            label="GPU slowed by",
        ),
        Column(
            "How many texts, of the point and of its baseline, were timed while steps were compiled,"
            " each time anew. Do not rely on the timings then; smaller batches have fewer shapes.",
            "compiled_texts",
            label="texts timed while compiling",
            digits=0,
        ),
        Column(
            "Seconds that timing waited for other programs to end.", "waited_s", unit="s", digits=0
        ),
    )

    @property
    def busy(self) -> bool:
        """Whether other processes used more than `BUSY_PERCENT` of the machine while the point was
        timed.
        """
        return (self.busy_elsewhere_percent or 0.0) > BUSY_PERCENT


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one point.

    name: of the sweep. composition: the decoder's parts in one line. facts: what does not affect
    the numbers (`lab/point/identity.py`). same_as_baseline: whether the policy is the baseline's
    with the same knobs. quality: of the metric that leads. further_qualities: of the others, by
    their names in the configuration. categories: by name; None if the dataset has none. stages_s:
    seconds in prefill, draft, verify and host over the traced examples. seconds: of each part of
    measuring the point, with "total". stored_at: ISO date and time. folder: of the files; it is not
    stored in them.
    """

    point: str = required("The folder of the point: a hash of everything that affects its numbers.")
    policy: str = required("How tokens were decoded: by which target, drafter and acceptance rule.")
    name: str
    knobs: Mapping[str, Any]
    composition: str
    setting: Setting = group("")
    engine: str | None = column(
        "What ran the target: kernels (our C++, or Triton on a GPU), native (our modules), hf (those"
        " of Transformers), or a peer’s own."
    )
    draft_engine: str | None = column(
        "What ran the models that draft; empty without them, and for a peer."
    )
    precision: str | None = column(
        "The precision of the policy’s weights: the setting’s, or that of a peer’s own file, such"
        " as q4_k_m. That file is another model than the baseline’s: read its quality beside its"
        " speed."
    )
    environment: Environment = group("")
    facts: Mapping[str, Any] = field(default_factory=dict)
    same_as_baseline: bool = False
    quality: Quality = group("quality_")
    further_qualities: Mapping[str, Quality] = field(default_factory=dict)
    latency_s: Latency | None = group("latency_s_", None)
    baseline_latency_s: Latency | None = None
    speedup: Speedup = group("speedup_", Speedup())
    independent_texts: int | None = column(
        "How many texts the intervals are over: those that came, a conversation’s turns, and"
        " questions on one source, counted once.",
        digits=0,
    )
    tokens: int = required(
        "Tokens emitted, after every cut at an end token or the length limit.", digits=0
    )
    tokens_per_s: float | None = column(
        "Emitted tokens per second.",
        label="tokens per second",
        heading="tokens/s",
        unit="1/s",
        digits=1,
    )
    baseline_tokens_per_s: float | None = column(
        "The baseline’s tokens per second.", unit="1/s", digits=1
    )
    tokens_per_s_ratio: float | None = ratio(
        "Tokens per second over the baseline’s: under greedy decoding BiTA’s “greedy speedup”."
    )
    first_token_s: float | None = column(
        "Seconds from an example’s token ids to its first tokens, the median of the traced"
        " examples; of a server, of all examples and repeats.",
        label="time to first token",
        heading="first token, ms",
        unit="s",
        digits=1,
        scale=0.001,
    )
    streamed: Streamed | None = group("", None)
    counts: Counts = group("", Counts())
    agreement_with_target: float | None = share(
        "The share of examples whose token ids all equal the target’s own greedy output. It does"
        " not say how good the other outputs are. In bfloat16 even a lossless method may differ at"
        " positions where two tokens are nearly tied.",
        label="same output as the target alone",
        heading="same output",
        short="same",
    )
    empty: float | None = share("The share of the texts that came without a word.", label="empty")
    baseline_empty: float | None = share(
        "The share of the baseline’s texts without a word.", label="baseline empty"
    )
    looping: float | None = share(
        "The share of the texts that say one block of tokens over and over at their end. Such text is"
        " drafted easily, so speedups are higher than on others.",
        label="ending in a loop",
    )
    baseline_looping: float | None = share(
        "The share of the baseline’s texts that end in a loop.", label="baseline ending in a loop"
    )
    baseline_cut: float | None = share(
        "The share of the baseline’s texts that the length limit cut.", label="baseline cut"
    )
    baseline_drafted: int | None = count(
        "How many tokens the server that the point is compared with drafted.",
        label="drafted by the baseline’s server",
    )
    baseline_loop_share: float | None = share(
        "The share of the time of `vanilla` that Python takes between forwards on a CPU, on the first"
        " example; empty on other engines than our kernels, where a token takes over 10 ms, when sampling and"
        " in batches. A large share, of a small model, flatters every method with fewer forwards.",
        label="Python’s share of the baseline’s time",
        heading="Python",
    )
    peak_memory_mb: float | None = column(
        "Peak memory of the process, on a GPU of all GPUs that the target runs on, from loading the"
        " models to the last score, method and baseline together.",
        label="peak memory",
        heading="memory, MB",
        unit="MB",
        digits=0,
    )
    joules_per_token: float | None = column(
        "Joules of the GPU, or of the CPU’s packages, while the policy decoded, over its tokens;"
        " empty for a server, and where no counter can be read.",
        label="energy a token",
        heading="energy, J/token",
        unit="J",
        digits=3,
    )
    change: Change | None = group("", None)
    categories: Mapping[str, Category] | None = None
    certificate: CertificateCounts | None = group("certificate_", None)
    cost: DecodingCosts | None = group("", None)
    prediction: Prediction | None = group("predicted_", None)
    pipeline: Pipeline | None = group("pipeline_", None)
    stages_s: Mapping[str, float] | None = None
    seconds: Mapping[str, float]
    stored_at: str | None = None
    folder: Path | None = field(default=None, compare=False, metadata={"stored": False})

    @property
    def own_weights(self) -> str | None:
        """The precision of a peer's own weights where it is not that of the setting, as the
        baseline has it.
        """
        return None if self.precision in (None, self.setting.dtype) else self.precision

    @property
    def total_s(self) -> float:
        """Seconds that the point took in total, including setup."""
        return self.seconds["total"]

    @property
    def timed(self) -> bool:
        """Whether it was decoded with a clock; replayed texts were not."""
        return self.latency_s is not None

    @property
    def in_batches(self) -> bool:
        """Whether several texts were decoded at once, so that they share their clock."""
        return self.setting.get("batch") > 1

    @property
    def clock_is_known(self) -> bool:
        """Whether its timings say how far the clock may be off: of batches only repeats beside a
        baseline do, as what disturbs a batch's clock disturbs all its texts alike.
        """
        return not self.in_batches or self.speedup.noise is not None

    @property
    def is_baseline(self) -> bool:
        """Whether this is the baseline that the others of its setting are compared with."""
        return self.same_as_baseline

    @property
    def failed_texts(self) -> int:
        """How many texts a server failed to give, to the point or to its baseline."""
        return 0 if self.streamed is None else self.streamed.errors

    @property
    def answered_texts(self) -> int:
        """How many texts speeds, changes and agreement are of: all but the failed ones."""
        return self.setting.n_examples - self.failed_texts

    @property
    def counted_texts(self) -> int:
        """How many texts its intervals are over; of older results turns count each."""
        known = self.independent_texts
        return self.answered_texts if known is None else known

    @property
    def doubt(self) -> str:
        """Why its quality says little: texts that a server failed to give, or what is wrong with
        every text, its own or the baseline's; empty if nothing is.
        """
        if self.failed_texts:
            return (
                f"{self.failed_texts} of {self.setting.n_examples} texts never came from the server"
            )
        limit = self.setting["decoding"]["max_new_tokens"]
        if self.baseline_empty == 1:
            return "every text of the baseline is empty"
        if self.wordless:
            return "every text of the point is empty"
        if self.baseline_cut == 1 and self.setting.metric not in AS_GOOD_CUT:
            return f"every text of the baseline was cut at {limit} tokens"
        return f"the baseline’s {self.quality.metric} is 0" if self.quality.baseline == 0 else ""

    @property
    def wordless(self) -> bool:
        """Whether every text is empty, and not the baseline's too, so that no speed is worth
        anything.
        """
        return self.empty == 1 and self.baseline_empty != 1

    @property
    def may_be_best(self) -> bool:
        """Whether it may be the best, or on the front: its speedup is possible, and it has words."""
        return not (self.impossible or self.wordless)

    @property
    def relative_latency(self) -> float | None:
        """1 / speedup, 1 for the baseline; None if no baseline was timed."""
        if self.is_baseline:
            return 1.0
        return None if self.speedup.value is None else 1 / self.speedup.value

    @property
    def impossible(self) -> bool:
        """Whether the timing cannot be right: drafts gave more speed than tokens per call of the
        target.

        A call takes at least as long as a token of `vanilla`. A share of 5 % is left to noise, and
        a method that ends its texts earlier is judged by its tokens per second.
        """
        bound = self.counts.tokens_per_target_call
        if self.setting.baseline != "vanilla" or not self.counts.drafted or bound is None:
            return False
        ratios = (self.speedup.value, self.tokens_per_s_ratio)
        return all(ratio is not None and ratio > 1.05 * bound for ratio in ratios)

    def to_json(self) -> dict[str, Any]:
        """The content of `result.json`."""
        return {"schema": SCHEMA, **to_json(self)}

    @classmethod
    def from_json(cls, content: Any, folder: Path | None = None) -> Result:
        """Read the content of `result.json`.

        Raises UserError for another version than this code knows, ValueError for anything that is
        not a result.
        """
        schema = content.get("schema") if isinstance(content, dict) else None
        if not isinstance(schema, int):
            raise ValueError("the file must hold a result with its schema")
        if schema != SCHEMA:
            raise UserError(
                f"{folder or 'the result'} was written by another version of bild_lab: this one"
                f" reads results of schema {SCHEMA}, got schema {schema}; use that version, or"
                " choose another name=NAME"
            )
        return replace(from_json(cls, content), folder=folder)


@dataclass(frozen=True)
class FailureCause:
    """The error that ended a point. type: the name of the exception."""

    type: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Failure:
    """A point that has no result: the content of `failed.json`. stored_at: ISO date and time; empty
    for damage.
    """

    point: str
    policy: str
    knobs: Mapping[str, Any]
    error: FailureCause
    stored_at: str = ""


_COLUMNS = list(columns_of(Result))
IDENTITY = tuple(column for column in _COLUMNS if column.path in ("point", "policy"))
# the columns of `sweep.csv`, in order; those of the knobs come after the identity
TABLE = tuple(column for column in _COLUMNS if column.in_table)
COLUMNS = {column.name: column for column in _COLUMNS}
COSTS = tuple(column for column in TABLE if column.path.startswith("cost."))
PREDICTION = tuple(column for column in TABLE if column.path.startswith("prediction."))
