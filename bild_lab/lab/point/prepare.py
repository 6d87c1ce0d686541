"""A point: one checked configuration, with everything that measuring it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.protocols import Served
from bild_lab.engine.sampling import Sampling
from bild_lab.errors import UserError, require_flag
from bild_lab.lab.config.compose import compose_policy, knob_values, require_keys, resolved_policy
from bild_lab.lab.config.policies import describe_decoder, policy_label, require_policy
from bild_lab.lab.config.schemas import TOP_LEVEL, DecodingSpec, MeasureSpec
from bild_lab.lab.data.dataset_spec import DatasetSpec, Template, for_model
from bild_lab.lab.data.examples import cached_examples
from bild_lab.lab.data.prompts import Example, cut_sources
from bild_lab.lab.metrics.external_metrics import EVALUATE, script_of
from bild_lab.lab.metrics.programs import require_permission
from bild_lab.lab.metrics.quality import Scoring
from bild_lab.lab.metrics.text_metrics import (
    AGREEMENT,
    LOG_PROBABILITY,
    PASS_AT_1,
    require_margin,
)
from bild_lab.lab.point.decoder import BASELINE, METHOD, Decoder
from bild_lab.lab.point.identity import (
    Specs,
    code_of,
    contents_of,
    facts_of,
    point_id,
    setting_of,
    sweep_folder,
)
from bild_lab.lab.point.load import brought_baseline, resolve_auto
from bild_lab.lab.store.records import require_writable


@dataclass(frozen=True)
class Point:
    """A checked configuration, with everything needed to measure it."""

    id: str
    name: str
    policy: str
    knobs: dict[str, Any]
    composition: str
    code: str  # a hash of the code that this policy reaches
    setting: dict[str, Any]
    facts: dict[str, Any]  # do not affect the numbers; figures use them to place the point
    same_as_baseline: bool  # its parts and knobs are equal, whatever the names are
    config_yaml: str
    decoders: dict[str, Decoder]  # METHOD and, unless switched off, BASELINE
    vanilla: Decoder  # gives the answers in the history of later turns
    examples: tuple[Example, ...]
    scoring: Scoring
    specs: Specs
    resume: bool  # False: measure again even if the point is finished

    @property
    def batch(self) -> int:
        """How many texts decode at once."""
        return self.specs.runtime.batch

    @property
    def measure(self) -> MeasureSpec:
        return self.specs.measure

    @property
    def decoding(self) -> DecodingSpec:
        return self.specs.decoding

    @property
    def sampling(self) -> Sampling:
        return self.specs.sampling

    @property
    def seed(self) -> int:
        return self.specs.runtime.seed


def prepare(cfg: DictConfig) -> Point:
    """Check a whole configuration. Reads the dataset and the checkpoints' small files, but no
    weights; writes nothing.

    Raises UserError for a configuration that cannot be measured.
    """
    require_keys(cfg, TOP_LEVEL)
    require_writable(sweep_folder(cfg))
    require_flag("resume", cfg.resume)
    specs, scoring = _measurable(cfg)
    resolved_policies, decoders = _decoders(cfg, specs)
    method_policy, method_decoder = resolved_policies[METHOD], decoders[METHOD]
    chat = specs.dataset.chat
    specs = replace(specs, dataset=for_model(specs.dataset, method_decoder.target.checkpoint))
    whole_examples = cached_examples(specs.dataset)
    examples = cut_sources(
        whole_examples, specs.dataset.max_source_tokens, method_decoder.prompt_length
    )
    scoring = scoring.fitted([example.references for example in examples])
    contents = contents_of(resolved_policies)
    setting = setting_of(specs, whole_examples, decoders, resolved_policies, chat)
    code = code_of(method_policy, specs)
    return Point(
        id=point_id(specs, scoring, examples, decoders, contents, setting, code),
        name=str(cfg.name),
        policy=policy_label(cfg.policy),
        knobs=knob_values(method_policy),
        composition=describe_decoder(method_policy["decoder"]),
        code=code,
        setting=setting,
        facts=facts_of(specs, method_policy, method_decoder),
        same_as_baseline=contents.get(BASELINE) == contents[METHOD],
        config_yaml=OmegaConf.to_yaml(cfg, resolve=False),
        decoders=decoders,
        vanilla=replace(specs.decoder(compose_policy("vanilla")), chat=chat),
        examples=examples,
        scoring=scoring,
        specs=specs,
        resume=cfg.resume,
    )


def _usual_baseline(specs: Specs) -> tuple[dict[str, Any], Decoder]:
    """The policy of `measure.baseline`, resolved, and its decoder.

    Raises UserError for an unknown one, and one that cannot decode with the knobs of its file.
    """
    name, remedy = specs.measure.baseline, ""
    try:
        policy = compose_policy(name)
        if knob_values(policy):
            remedy = (
                "; a baseline has the knobs of its policy's file: for others name a file of your own"
                " that sets them"
            )
        return resolved_policy(policy), specs.decoder(policy)
    except UserError as error:
        raise UserError(f"measure.baseline={name}: {error}{remedy}") from error


def _for_own_baseline(own_baseline: DictConfig | None, specs: Specs) -> Specs:
    """The groups of a point. Where it brings its own baseline, the target's weights are not read, so
    texts are not scored by the target. Raises UserError where they would have to be.
    """
    if own_baseline is None:
        return specs
    by_target = LOG_PROBABILITY in specs.dataset.scored
    if by_target or (specs.measure.certify and specs.sampling.greedy):
        key = "dataset.metric=log_probability" if by_target else "measure.certify=true"
        raise UserError(
            f"{key} needs the target's weights, which are not read where a policy brings its own"
            " baseline; leave out policy.baseline_url and policy.baseline_body"
        )
    changes = {"baseline": str(own_baseline.name), "target_log_probability": False}
    return replace(specs, measure=replace(specs.measure, **changes))


def require_decoder(cfg: DictConfig) -> None:
    """Check what depends on a point's policy, its seed and its sampling: knobs, parts, and whether
    it and its baseline decode so.

    It is a part of `prepare` that reads no data. Raises UserError.
    """
    specs, _ = _measurable(cfg)
    _decoders(cfg, specs)


def _measurable(cfg: DictConfig) -> tuple[Specs, Scoring]:
    """The groups of a point, and how its texts are scored. Raises UserError for values that cannot
    be, alone or together.
    """
    require_policy(cfg.policy)
    specs = _for_own_baseline(brought_baseline(cfg.policy), Specs.of(cfg))
    writing = specs.dataset.writing(specs.pair.target_language)
    scoring = Scoring(specs.dataset.scored, specs.measure.run_code, writing, specs.measure.margin)
    _require_certifiable(specs)
    _require_scorable(scoring, specs)
    runtime = resolve_auto(specs.runtime, cfg.policy, specs.pair)
    return replace(specs, runtime=runtime), scoring


def _decoders(
    cfg: DictConfig, specs: Specs
) -> tuple[dict[str, dict[str, Any]], dict[str, Decoder]]:
    """The resolved policies of the method and its baseline, and their decoders.

    Raises UserError for those that cannot decode so, or cannot be compared.
    """
    policies = {METHOD: cfg.policy}
    own_baseline = brought_baseline(cfg.policy)
    if own_baseline is not None:
        policies[BASELINE] = own_baseline
    resolved_policies = {role: resolved_policy(policy) for role, policy in policies.items()}
    decoders = {role: specs.decoder(policy) for role, policy in policies.items()}
    if own_baseline is None and specs.measure.baseline is not None:
        resolved_policies[BASELINE], decoders[BASELINE] = _usual_baseline(specs)
    for decoder in decoders.values():
        _require_decodable(decoder, specs)
        _require_one_template(decoder, specs.dataset)
    _require_same_arrivals(decoders)
    return resolved_policies, decoders


def _require_decodable(decoder: Decoder, specs: Specs) -> None:
    """Raise UserError for a policy that does not sample, or decodes no batches, where it is asked
    to, and for requests that arrive at random outside of a batch.
    """
    decoder.require_sampling(specs.sampling)
    if specs.runtime.batch > 1:
        decoder.require_batches(specs.sampling)
    elif _arrival_rate(decoder) is not None:
        raise UserError(
            "policy.arrival_rate is of the requests of a batch, got runtime.batch=1; set"
            " runtime.batch=N, the most that may be on their way at once"
        )


def _require_one_template(decoder: Decoder, dataset: DatasetSpec) -> None:
    """Raise UserError where a server would write its chat template around prompts that have one, or
    around a whole conversation as one question.
    """
    method = decoder.method
    # a server's method of one's own need not know of chats
    if not isinstance(method, Served) or not getattr(method, "chat", False):
        return
    if dataset.chat_template != (Template.first_turn,):
        raise UserError(
            "policy.chat=true has the server write its own chat template around each prompt, which"
            " has one already, of template=NAME or dataset.chat_template; leave that out, or set"
            " policy.chat=false"
        )
    if dataset.turns != 1:
        raise UserError(
            "policy.chat=true sends a prompt as one question, and that of a later turn holds the"
            f" turns before it, got dataset.turns={dataset.turns}; set dataset.turns=1, or"
            " policy.chat=false and a chat template"
        )


def _require_same_arrivals(decoders: Mapping[str, Decoder]) -> None:
    """Raise UserError where the requests of one method arrive at random and the other's do not: a
    server that waits for requests is not slow.
    """
    if len({_arrival_rate(decoder) for decoder in decoders.values()}) > 1:
        raise UserError(
            "policy.arrival_rate lets the server wait for requests, and the baseline here never"
            " waits, so that their speeds do not compare; compare with a server,"
            " policy.baseline_url=URL or policy.baseline_body, or with nothing,"
            " measure.baseline=null"
        )


def _arrival_rate(decoder: Decoder) -> float | None:
    """How many requests a second arrive at a method; None if they do not arrive at random."""
    method = decoder.method
    return method.arrival_rate if isinstance(method, Served) else None


def _require_certifiable(specs: Specs) -> None:
    """Raise UserError where certificates of greedy texts lack the target's own texts."""
    measure = specs.measure
    if measure.certify and measure.baseline != "vanilla" and specs.sampling.greedy:
        raise UserError(
            "measure.certify compares greedy text with the target's own; "
            "set measure.baseline=vanilla, or decoding=sample"
        )


def _require_scorable(scoring: Scoring, specs: Specs) -> None:
    """Raise UserError for metrics that lack a baseline, a permission, or trust in their code, and
    for a margin in another unit than the first one's.
    """
    measure = specs.measure
    if scoring.margin is not None:
        require_margin("measure.margin", scoring.margin, scoring.metrics[0])
    for metric in scoring.metrics:
        if metric == AGREEMENT and measure.baseline is None:
            raise UserError(
                "dataset.metric=agreement compares with a baseline; set measure.baseline=vanilla"
            )
        if metric == LOG_PROBABILITY and not measure.target_log_probability:
            raise UserError(
                "dataset.metric=log_probability needs measure.target_log_probability=true"
            )
        if metric == PASS_AT_1:
            require_permission(scoring.run_code)
        if not metric.startswith(EVALUATE):
            continue
        if "/" in metric and script_of(metric) is None and not specs.runtime.trust_remote_code:
            raise UserError(
                f"{metric} is no local folder, and a community metric is Python code from the hub;"
                " correct the path, or allow it with runtime.trust_remote_code=true"
            )
