"""The measurements of one point: the content of `result.json`. `columns.py` names and explains the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError
from bild_lab.lab.schema import version1
from bild_lab.lab.schema.json_values import NOT_STORED, from_json, to_json
from bild_lab.lab.schema.quality import Change, Quality
from bild_lab.lab.schema.setting import Environment, Setting

SCHEMA = 2


@dataclass(frozen=True)
class Latency:
    """Seconds per example; the median of an example's repeats counts. total: of all examples.

    In a batch an example's seconds are those from its place to its end, so they overlap with those of others.
    """

    median: float
    p95: float
    mean: float
    total: float


@dataclass(frozen=True)
class Speedup:
    """Baseline time divided by method time, with a 95 % bootstrap interval over examples. All None without a baseline.

    value: the ratio of total times, as in the papers. median: of the ratios of single examples.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    median: float | None = None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Totals over the rounds of all examples. All None for a method without rounds, such as Transformers' own.

    acceptance_by_position: the share of drafts accepted at a position, among those accepted at all positions before.
    accepted_by_depth: the share of rounds with at least one accepted token, at least two, and so on.
    judged_by_position: how many drafts had a token accepted at each position, rejected, and dropped unobserved behind a
    rejection; None in older results.
    exit_layer_mean: after how many layers a token was predicted, for methods that exit early.
    """

    tokens_per_target_call: float | None = None
    acceptance_rate: float | None = None
    nothing_accepted: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    draft_calls: int | None = None
    target_calls: int | None = None
    fallbacks: int | None = None
    rollbacks: int | None = None
    exit_layer_mean: float | None = None
    acceptance_by_position: list[float | None] | None = None
    accepted_by_depth: list[float] | None = None
    judged_by_position: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Category:
    """The numbers of one category of the dataset; the fields have the same meaning as in `Result`."""

    n_examples: int
    tokens: int
    tokens_per_s: float
    baseline_tokens_per_s: float | None
    tokens_per_s_ratio: float | None
    speedup: Speedup
    tokens_per_target_call: float | None
    acceptance_rate: float | None


@dataclass(frozen=True, kw_only=True)
class CertificateCounts:
    """How many examples are the target's own, differ by rounding, or differ by more.

    Greedy: equal texts, numerical ties, and defects. Sampled: examples whose distributions are the target's own in
    every context, within 1e-6 of total variation; those that rounding moves; and defects. unjudged: sampled examples
    of a rule whose distribution has no closed form. output: the largest total variation between what the rule emits and
    the target's distribution. rounding: by the number of rows in a forward, the largest total variation between the
    target's distribution in it and one row after another. The last three are None for greedy texts.
    """

    equal: int
    ties: int
    defects: int
    unjudged: int | None = None
    output: float | None = None
    rounding: Mapping[str, float] | None = None

    @property
    def most_rounding(self) -> float | None:
        """Over all numbers of rows."""
        return max(self.rounding.values()) if self.rounding else None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Speedups over the target alone, from theory to measured time; each step adds one cost that theory leaves out.

    window: tokens per draft, None if drafts have different lengths. cost_ratio: c, seconds per drafter
    step divided by seconds per token of the target alone. theorem: Theorem 3.8 with these, None without
    a fixed window. rounds: with the measured tokens and drafter steps per target call. verify: with the
    measured time of verification, including the acceptance rule. host: with the time of host code
    between the stages. prefill: with the encoder, and the actual lengths of both texts. measured: the
    timed speedup on these examples, without the synchronization of the traced pass.
    """

    acceptance_rate: float | None
    window: int | None
    cost_ratio: float
    theorem: float | None
    rounds: float
    verify: float
    host: float
    prefill: float
    measured: float


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Measurements of predictive pipelined decoding, and Theorem 4.1 with the measured match rate.

    layers: of the target. exit_layer: after how many layers the next token is started; both None in older results.
    match_rate: over the tokens that have a successor; None if no text has two tokens. Units are layer times per
    token, as executed and as predicted. The theorem assumes candidates for every token. The executor has none for the
    last token before the length limit, so its compute may be smaller.

    The other fields are speedups over the target alone, from theory to measured time; each step adds one cost that
    theory leaves out. theorem: Theorem 4.1. exit: with the measured time up to the exit, including the head and the
    choice of candidates. concurrent: with the measured time of running current token and candidates in parallel,
    which compete for memory and for Python's GIL. host: with the time of host code. prefill: with the encoder. They
    are None if nothing was traced, or if the baseline is not the target alone.
    """

    layers: int | None = None
    exit_layer: int | None = None
    match_rate: float | None
    latency_units: float
    compute_units: float
    predicted_latency_units: float
    predicted_compute_units: float
    theorem: float | None = None
    exit: float | None = None
    concurrent: float | None = None
    host: float | None = None
    prefill: float | None = None


@dataclass(frozen=True, kw_only=True)
class DecodingCosts:
    """Operations and memory traffic of all forwards, and their ratios to the baseline's (None without a baseline).

    Intensity is operations per byte.
    """

    flops_per_token: float
    bytes_per_token: float
    flops_per_byte: float | None
    flops_ratio: float | None = None
    bytes_ratio: float | None = None
    intensity_ratio: float | None = None


@dataclass(frozen=True)
class ForwardKind:
    """Forwards of one model that had as many rows. model: 0 has most weights. flops, bytes_moved: of all of them."""

    model: int
    rows: int
    count: int
    flops: int
    bytes_moved: int


@dataclass(frozen=True)
class Work:
    """All forwards and rounds of the method, and of the baseline: what a declared machine's speed is predicted from."""

    method: Sequence[ForwardKind]
    baseline: Sequence[ForwardKind]
    rounds: int
    baseline_rounds: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one point.

    point: the hash that names it. name: of the sweep. composition: the decoder's parts in one line. engine: what ran
    the target, "kernels", "native" or "hf". facts: facts that do not affect the numbers (`lab/facts.py`); None in older
    results. same_as_baseline: whether the policy is the baseline's with the same knobs; None in older results, where
    the policy's name decides. quality: of the metric that leads. further_qualities: of the others, by their names in
    the configuration. change: None in older results. tokens_per_s_ratio: to the baseline's. agreement_with_target: the
    share of examples whose tokens all equal the target's own greedy text. categories: by name; None if the dataset has
    none. peak_memory_mb: of method and baseline together; None beside other points. work: None in older results,
    and where forwards were not recorded. stages_s: seconds in prefill, draft, verify and host over the traced
    examples. seconds: of each part of measuring the point, with "total". stored_at: ISO date and time. folder: of
    the files; it is not stored in them.
    """

    point: str
    name: str
    policy: str
    knobs: Mapping[str, Any]
    composition: str
    engine: str | None = None
    setting: Setting
    facts: Mapping[str, Any] | None = None
    same_as_baseline: bool | None = None
    quality: Quality
    further_qualities: Mapping[str, Quality] = field(default_factory=dict)
    change: Change | None = None
    latency_s: Latency
    baseline_latency_s: Latency | None = None
    speedup: Speedup = Speedup()
    tokens: int
    tokens_per_s: float
    baseline_tokens_per_s: float | None = None
    tokens_per_s_ratio: float | None = None
    counts: Counts = Counts()
    agreement_with_target: float | None = None
    categories: Mapping[str, Category] | None = None
    certificate: CertificateCounts | None = None
    peak_memory_mb: float | None = None
    stages_s: Mapping[str, float] | None = None
    prediction: Prediction | None = None
    pipeline: Pipeline | None = None
    cost: DecodingCosts | None = None
    work: Work | None = None
    environment: Environment
    seconds: Mapping[str, float]
    stored_at: str | None = None
    folder: Path | None = field(default=None, compare=False, metadata=NOT_STORED)

    @property
    def total_s(self) -> float:
        """Seconds that the point took in total, including setup."""
        return self.seconds["total"]

    @property
    def is_baseline(self) -> bool:
        """Whether this is the baseline that the others of its setting are compared with."""
        if self.same_as_baseline is None:
            return self.policy == self.setting.baseline
        return self.same_as_baseline

    @property
    def relative_latency(self) -> float | None:
        """1 / speedup, 1 for the baseline; None if no baseline was timed."""
        if self.is_baseline:
            return 1.0
        return None if self.speedup.value is None else 1 / self.speedup.value

    @property
    def greedy_speedup(self) -> float | None:
        """BiTA's name for the ratio of tokens per second; None if tokens were sampled."""
        return None if self.setting.temperature else self.tokens_per_s_ratio

    def to_json(self) -> dict[str, Any]:
        """The content of `result.json`."""
        return {"schema": SCHEMA, **to_json(self)}

    @classmethod
    def from_json(cls, content: Any, folder: Path | None = None) -> Result:
        """Read the content of `result.json`, also of version 1.

        Raises UserError for a newer version than this code knows, ValueError for anything that is not a result.
        """
        schema = content.get("schema") if isinstance(content, dict) else None
        if not isinstance(schema, int):
            raise ValueError("the file must hold a result with its schema")
        if schema > SCHEMA:
            raise UserError(
                f"{folder or 'the result'} was written by a newer version of bild_lab: this one reads results up to "
                f"schema {SCHEMA}, got schema {schema}; update bild_lab, or choose another name=NAME"
            )
        current = content if schema == SCHEMA else version1.upgraded(content)
        return replace(from_json(cls, current), folder=folder)


@dataclass(frozen=True)
class FailureCause:
    """The error that ended a point. type: the name of the exception."""

    type: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Failure:
    """A point that has no result: the content of `failed.json`."""

    point: str
    policy: str
    knobs: Mapping[str, Any]
    error: FailureCause
