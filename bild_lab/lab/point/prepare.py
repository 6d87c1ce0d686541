"""A point: one checked configuration. Its name is a hash of everything that affects its numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.methods import bita, medusa
from bild_lab.engine.methods.eagle import module as eagle
from bild_lab.engine.methods.early_exit import layer_heads
from bild_lab.engine.models.device import resolve_device
from bild_lab.engine.protocols import External, Replays
from bild_lab.engine.sampling import Sampling
from bild_lab.errors import UserError, require_flag
from bild_lab.files import pin_of
from bild_lab.lab.config.compose import compose_policy, knob_values, require_keys, resolved_policy
from bild_lab.lab.config.policies import describe_decoder, policy_label, require_policy
from bild_lab.lab.config.schemas import (
    SCHEMAS,
    TOP_LEVEL,
    DecodingSpec,
    MeasureSpec,
    PairSpec,
    RuntimeSpec,
    typed,
)
from bild_lab.lab.data.dataset_spec import DatasetSpec, for_model
from bild_lab.lab.data.examples import cached_examples
from bild_lab.lab.data.prompts import Example, cut_sources
from bild_lab.lab.metrics.external_metrics import EVALUATE, script_of, user_function
from bild_lab.lab.metrics.programs import require_permission
from bild_lab.lab.metrics.quality import Scoring
from bild_lab.lab.metrics.text_metrics import AGREEMENT, LOG_PROBABILITY, PASS_AT_1
from bild_lab.lab.metrics.writing import splitter_name
from bild_lab.lab.point.decoder import BASELINE, METHOD, Decoder, sampling_of
from bild_lab.lab.point.environment import hardware
from bild_lab.lab.point.load import decided, decoder_of
from bild_lab.lab.store.code import code_hash
from bild_lab.lab.store.groups import pair_title
from bild_lab.lab.store.hashing import (
    content_hash,
    content_of,
    data_hash,
    file_hash,
    modules_of,
    named_files,
)
from bild_lab.lab.store.records import require_writable

# whose version can change a number
PACKAGES = ("torch", "transformers", "tokenizers", "sacrebleu", "rouge-score")
# bytes; file systems allow 255, and our temporary names are longer than the folder's
LONGEST_NAME = 200
DEFAULT_THREADS = torch.get_num_threads()
# of a setting
PAIR_KEYS = ("target", "draft", "second_draft", "source_language", "target_language")
HEADS = sorted({one.KIND.config for one in (bita, eagle, layer_heads, medusa)})  # files of settings


@dataclass(frozen=True)
class Specs:
    """The checked groups of a configuration."""

    pair: PairSpec
    dataset: DatasetSpec
    decoding: DecodingSpec
    runtime: RuntimeSpec
    measure: MeasureSpec

    @classmethod
    def of(cls, cfg: DictConfig) -> Specs:
        """Raises UserError for a key or value that cannot be."""
        specs = cls(
            **{group: typed(schema, cfg[group], group) for group, schema in SCHEMAS.items()}
        )
        _ = specs.sampling
        return specs

    @property
    def sampling(self) -> Sampling:
        return sampling_of(self.decoding.temperature, self.decoding.top_k, self.decoding.top_p)

    def decoder(self, policy: DictConfig, **options: Any) -> Decoder:
        """A policy's decoder. options: as in `decoder_of`."""
        return decoder_of(policy, self.pair, self.decoding, self.runtime, **options)


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
    same_as_baseline: bool  # the same parts and knobs, whatever the names are
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
    def certifies(self) -> bool:
        """Whether every text is compared with the target's own: as `measure.certify` says, and
        replayed texts always.

        Without the target's own texts, from the baseline, replayed ones are scored alone.
        """
        replays = isinstance(self.decoders[METHOD].method, Replays)
        return self.measure.certify or (replays and self.measure.baseline == "vanilla")

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
    require_policy(cfg.policy)
    specs = Specs.of(cfg)
    require_writable(sweep_folder(cfg))
    writing = specs.dataset.writing(specs.pair.target_language)
    scoring = Scoring(specs.dataset.scored, specs.measure.run_code, writing)
    _require_certifiable(specs)
    _require_scorable(scoring, specs)
    require_flag("resume", cfg.resume)
    policies = {METHOD: cfg.policy}
    specs = replace(specs, runtime=decided(specs.runtime, cfg.policy, specs.pair))
    if specs.measure.baseline is not None:
        policies[BASELINE] = compose_policy(specs.measure.baseline)
    values = {name: resolved_policy(policy) for name, policy in policies.items()}
    decoders = {name: specs.decoder(policy) for name, policy in policies.items()}
    specs = replace(specs, dataset=for_model(specs.dataset, decoders[METHOD].target.checkpoint))
    whole = cached_examples(specs.dataset)
    examples = cut_sources(whole, specs.dataset.max_source_tokens, decoders[METHOD].prompt_length)
    scoring = scoring.fitted([one.references for one in examples])
    for decoder in decoders.values():
        _require_ways(decoder, specs)
    contents = {name: _without_name(content_of(policy)) for name, policy in values.items()}
    setting = _setting(specs, whole, decoders, values)
    modules = _modules(values[METHOD], specs)
    code = code_hash(tuple(sorted(modules)))
    return Point(
        id=content_hash(
            _inputs(specs, scoring, examples, decoders, contents, setting) | {"code": code}
        ),
        name=str(cfg.name),
        policy=policy_label(cfg.policy),
        knobs=knob_values(values[METHOD]),
        composition=describe_decoder(values[METHOD]["decoder"]),
        code=code,
        setting=setting,
        facts=facts_of(specs, values[METHOD], decoders[METHOD]),
        same_as_baseline=contents.get(BASELINE) == contents[METHOD],
        config_yaml=OmegaConf.to_yaml(cfg, resolve=False),
        decoders=decoders,
        vanilla=specs.decoder(compose_policy("vanilla")),
        examples=examples,
        scoring=scoring,
        specs=specs,
        resume=cfg.resume,
    )


def require_decoder(cfg: DictConfig, checked: Specs) -> None:
    """Check what depends on a point's policy, its seed and its sampling: knobs, parts, and whether
    it decodes so.

    It is a part of `prepare` that reads no data. checked: of a checked point that differs in
    nothing else. Raises UserError.
    """
    require_policy(cfg.policy)
    decoding, runtime = (
        typed(DecodingSpec, cfg.decoding, "decoding"),
        typed(RuntimeSpec, cfg.runtime, "runtime"),
    )
    specs = replace(checked, decoding=decoding, runtime=runtime)
    _require_certifiable(specs)
    _require_ways(specs.decoder(cfg.policy), specs)


def _require_ways(decoder: Decoder, specs: Specs) -> None:
    """Raise UserError for a policy that does not sample, or decodes no batches, where it is asked
    to.
    """
    decoder.require_sampling(specs.sampling)
    if specs.runtime.batch > 1:
        decoder.require_batches(specs.sampling)


def _require_certifiable(specs: Specs) -> None:
    """Raise UserError where certificates of greedy texts lack the target's own texts."""
    measure = specs.measure
    if measure.certify and measure.baseline != "vanilla" and specs.sampling.greedy:
        raise UserError(
            "measure.certify compares greedy text with the target's own; "
            "set measure.baseline=vanilla, or decoding=sample"
        )


def _require_scorable(scoring: Scoring, specs: Specs) -> None:
    """Raise UserError for metrics that need a baseline, a permission, or code of a stranger."""
    measure = specs.measure
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


def sweep_folder(cfg: DictConfig) -> Path:
    """outputs/NAME. Raises UserError if the name cannot be a folder's name."""
    name = str(cfg.name) if isinstance(cfg.name, str | int | float) else ""
    if (
        not name.isprintable()
        or name in ("", ".", "..")
        or set(name) & set("/\\")
        or len(name.encode()) > LONGEST_NAME
    ):
        raise UserError(
            f"name must be a plain folder name, got {cfg.name!r}; results go to outputs/NAME"
        )
    return Path("outputs") / name


@lru_cache
def version(package: str) -> str:
    """Of an installed package. Its metadata are read once."""
    return metadata.version(package)


def _setting(
    specs: Specs,
    examples: tuple[Example, ...],
    decoders: Mapping[str, Decoder],
    policies: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Everything that two points must share to be compared.

    What has its usual value in most settings is left out.
    """
    pair, dataset, runtime, measure = specs.pair, specs.dataset, specs.runtime, specs.measure
    device, decoding = resolve_device(runtime.device), asdict(specs.decoding)
    code = code_hash(tuple(sorted(_modules(policies.get(BASELINE), specs))))
    target = decoders.get(BASELINE, decoders[METHOD]).target
    unusual = {
        "stop": (sorted(decoding.pop("stop")), []),
        "tokenize": (dataset.tokenize, None),
        "language": (dataset.language, None),
        "compile_drafter": (runtime.compile_drafter, "auto"),
        "batch": (runtime.batch, 1),
        "precision": (measure.precision, None),
        "most_repeats": (None if measure.precision is None else measure.most_repeats, None),
        "device_map": (runtime.device_map, None),
        "weight_bits": (runtime.weights, None),
        "draft_weight_bits": (pair.draft_weights, None),
    }
    return {
        **{key: getattr(pair, key) for key in PAIR_KEYS},
        "dataset": dataset.name,
        **{
            key: getattr(dataset, key)
            for key in ("split", "prompt_template", "max_source_tokens", "metric")
        },
        "chat_template": list(dataset.chat_template),
        "dtype": runtime.dtype,
        "compile": runtime.compile,
        **{key: value for key, (value, usual) in unusual.items() if value != usual},
        "device": str(device),
        "hardware": hardware(runtime.device_map, device),
        "threads": runtime.threads or DEFAULT_THREADS,
        "processors": content_of(decoding.pop("processors")),
        "decoding": decoding,
        "seed": runtime.seed,
        **{key: getattr(measure, key) for key in ("repeats", "warmup", "baseline")},
        "n_examples": len(examples),
        "data": data_hash(examples),
        "weights": target.checkpoint.fingerprint,
        "engine": target.engine,
        "code": " ".join([code, *(f"{one} {version(one)}" for one in PACKAGES)]),
    }


def _inputs(
    specs: Specs,
    scoring: Scoring,
    examples: tuple[Example, ...],
    decoders: Mapping[str, Decoder],
    contents: Mapping[str, Any],
    setting: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that affects the numbers of a point.

    Paths do not, but the files that are there.
    """
    external = [
        each.method.versions for each in decoders.values() if isinstance(each.method, External)
    ]
    return {
        "policies": dict(contents),
        "setting": {
            key: value
            for key, value in setting.items()
            if key not in ("target", "draft", "second_draft")
        },
        **{
            key: getattr(specs.measure, key)
            for key in ("traced_examples", "certify", "target_log_probability")
        },
        "metrics": _further_metrics(scoring),
        "categories": [one.category for one in examples],
        "weights": [
            model.checkpoint.fingerprint for each in decoders.values() for model in each.models
        ],
        "external": external,
    }


def _further_metrics(scoring: Scoring) -> dict[str, str]:
    """What else decides about the scores: further metrics, and what ROUGE-Lsum and those of
    `evaluate` depend on.
    """
    found = dict.fromkeys(scoring.metrics[1:], "")
    for metric in scoring.metrics:
        if metric == "rougeLsum":
            found[metric] = splitter_name()
        if metric.startswith(EVALUATE):
            script = script_of(metric)
            found[metric] = (
                f"{version('evaluate')} {'' if script is None else file_hash(str(script.parent))}"
            )
        elif "." in metric:
            found[metric] = code_hash((user_function(metric).__module__,))
    return found


def _modules(policy: Mapping[str, Any] | None, specs: Specs) -> set[str]:
    """Where the parts of a policy and the logits processors are defined."""
    return set(modules_of([specs.decoding.processors, policy and policy["decoder"]]))


def _without_name(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Two policies with the same parts and knobs are the same, whatever their names are."""
    return {key: value for key, value in policy.items() if key != "name"}


def facts_of(specs: Specs, policy: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """What does not affect the numbers of a point, and figures use to place it, in place of names
    or paths.

    pair: its name, or its models' where they took the place of the toy pair's. aligned: whether its
    draft model was aligned with the target. acceptance: the class of the acceptance rule, None for
    a policy without one. trained: by knob, the settings of a small trained module in the folder
    that the knob names; of a fitted tree its file. versions: of the packages of a peer with its own
    environment. vocabularies: of each draft model with another vocabulary than the target's, how
    many pieces they share, and how it drafts. pins: the commit and date of each repository of the
    hub that is pinned (`pins.yaml`).
    """
    dataset, pins = (
        specs.dataset,
        {model.checkpoint.path: model.checkpoint.pin for model in decoder.models},
    )
    if not dataset.path:
        pins[dataset.hub_id] = pin_of("datasets", dataset.hub_id, dataset.hub_revision)
    pins = {name: dict(pin) for name, pin in pins.items() if pin is not None}
    rule = (policy["decoder"].get("acceptance") or {}).get("_target_")
    trained = {
        knob: _settings_in(Path(path).expanduser()) for knob, path in named_files(policy).items()
    }
    return {
        "pair": pair_title(specs.pair) if specs.pair.takes_the_toys_place else specs.pair.name,
        "aligned": specs.pair.aligned,
        "acceptance": None if rule is None else rule.rpartition(".")[2],
        "trained": {knob: settings for knob, settings in trained.items() if settings is not None},
        **(
            {"versions": dict(decoder.method.versions)}
            if isinstance(decoder.method, External)
            else {}
        ),
        **({"vocabularies": decoder.vocabularies} if decoder.vocabularies else {}),
        **({"pins": pins} if pins else {}),
    }


def _settings_in(path: Path) -> dict[str, Any] | None:
    """The settings of heads or an adapter in this folder, without their base model, or a JSON file;
    None for others.
    """
    file = next((file for name in HEADS if (file := path / name).is_file()), path)
    if file.suffix != ".json" or not file.is_file():
        return None
    return {
        key: value
        for key, value in json.loads(file.read_text(encoding="utf-8")).items()
        if key != "base"
    }
