"""A point: one checked configuration. Its name is a hash of everything that affects its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.batch_room import require_batches
from bild_lab.engine.models.device import resolve_device
from bild_lab.engine.models.placement import Placement
from bild_lab.engine.protocols import External
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError, require_flag
from bild_lab.files import cache_folder
from bild_lab.lab.build import describe_decoder, policy_label
from bild_lab.lab.config import (
    TOP_LEVEL,
    DecodingSpec,
    MeasureSpec,
    PairSpec,
    RuntimeSpec,
    compose_policy,
    knob_values,
    require_keys,
    require_policy,
    typed,
)
from bild_lab.lab.data.examples import DatasetSpec, Example, load_examples
from bild_lab.lab.decoder import Decoder
from bild_lab.lab.facts import facts_of, named_paths
from bild_lab.lab.hashing import content_hash, data_hash, file_hash
from bild_lab.lab.load import load, require_engine
from bild_lab.lab.measure.environment import environment, placement_setting
from bild_lab.lab.measure.timing import BASELINE, METHOD
from bild_lab.lab.metrics import AGREEMENT, Scoring
from bild_lab.lab.metrics.programs import require_permission
from bild_lab.lab.metrics.text_metrics import EVALUATE, PASS_AT_1, require_loadable, script_of
from bild_lab.lab.results.records import require_writable
from bild_lab.lab.toy_pair import named_checkpoint, stand_in, untrained

SCORERS = ("sacrebleu", "rouge-score")  # packages whose version can change a quality
LONGEST_NAME = 200  # bytes; file systems allow 255, and our temporary names are longer than the folder's
DEFAULT_THREADS = torch.get_num_threads()


@dataclass(frozen=True)
class Point:
    """A checked configuration, with everything needed to measure it."""

    id: str
    name: str
    policy: str
    knobs: dict[str, Any]
    composition: str
    setting: dict[str, Any]
    facts: dict[str, Any]  # do not affect the numbers; figures use them to place the point
    same_as_baseline: bool  # the same parts and knobs, whatever the names are
    config_yaml: str
    decoders: dict[str, Decoder]  # METHOD and, unless switched off, BASELINE
    vanilla: Decoder  # gives the answers in the history of later turns
    examples: tuple[Example, ...]
    scoring: Scoring
    decoding: DecodingSpec
    measure: MeasureSpec
    seed: int
    max_source_tokens: int | None
    resume: bool  # False: measure again even if the point is finished

    @property
    def batch(self) -> int:
        """How many texts decode at once."""
        return self.setting.get("batch", 1)

    @property
    def baseline_is_target(self) -> bool:
        """Whether the baseline's outputs are the target's own greedy decoding."""
        return self.measure.baseline == "vanilla" and self.sampling.greedy

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.decoding.temperature, self.decoding.top_k, self.decoding.top_p)


def prepare(cfg: DictConfig) -> Point:
    """Check a whole configuration. Reads the dataset and the checkpoints' small files, but no weights; writes nothing.

    Raises UserError for a configuration that cannot be measured.
    """
    require_keys(cfg, TOP_LEVEL)
    require_policy(cfg.policy)
    pair = typed(PairSpec, cfg.pair, "pair")
    decoding = typed(DecodingSpec, cfg.decoding, "decoding")
    runtime = typed(RuntimeSpec, cfg.runtime, "runtime")
    measure = typed(MeasureSpec, cfg.measure, "measure")
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    Sampling(decoding.temperature, decoding.top_k, decoding.top_p)
    require_writable(sweep_folder(cfg))
    scoring = Scoring(dataset.scored, dataset.cut or (), measure.run_code)
    _require_scorable(scoring, measure, runtime)
    if measure.certify and measure.baseline != "vanilla" and decoding.temperature == 0:
        raise UserError(
            "measure.certify compares greedy text with the target's own; "
            "set measure.baseline=vanilla, or decoding=sample"
        )
    require_flag("resume", cfg.resume)
    policies = {METHOD: cfg.policy}
    if measure.baseline is not None:
        policies[BASELINE] = compose_policy(measure.baseline)
    examples = cached_examples(dataset)
    if _needs_training((pair.target, pair.draft, pair.second_draft), cache_folder()):
        for policy in policies.values():
            require_decodable(policy, pair, decoding, runtime)
    decoders = {name: decoder_of(policy, pair, decoding, runtime) for name, policy in policies.items()}
    vanilla = decoder_of(compose_policy("vanilla"), pair, decoding, runtime)
    if runtime.batch > 1:
        for name, policy in policies.items():
            require_batches(policy.name, decoders[name].method, decoders[name].models)
    setting = _setting(pair, dataset, decoding, runtime, measure)
    target = decoders.get(BASELINE, decoders[METHOD]).target
    setting |= {
        "n_examples": len(examples),
        "data": data_hash(examples),
        "weights": target.checkpoint.fingerprint,
        "engine": target.engine,
        "code": _code(environment(target.device)),
    }
    contents = {name: _content_of(policy) for name, policy in policies.items()}
    external = [each.method.versions for each in decoders.values() if isinstance(each.method, External)]
    inputs = {
        "policies": contents,
        "setting": {key: value for key, value in setting.items() if key not in ("target", "draft", "second_draft")},
        "traced_examples": measure.traced_examples,
        "certify": measure.certify,
        "target_log_probability": measure.target_log_probability,
        **({"metrics": further} if (further := _further(scoring)) else {}),
        "categories": [one.category for one in examples],
        "weights": [model.checkpoint.fingerprint for each in decoders.values() for model in each.models],
        **({"external": external} if external else {}),
    }
    return Point(
        id=content_hash(inputs),
        name=str(cfg.name),
        policy=policy_label(cfg.policy),
        knobs=knob_values(OmegaConf.to_container(cfg.policy, resolve=True)),
        composition=describe_decoder(OmegaConf.to_container(cfg.policy.decoder, resolve=True)),
        setting=setting,
        facts=facts_of(pair, OmegaConf.to_container(cfg.policy, resolve=True), decoders[METHOD]),
        same_as_baseline=contents.get(BASELINE) == contents[METHOD],
        config_yaml=OmegaConf.to_yaml(cfg, resolve=False),
        decoders=decoders,
        vanilla=vanilla,
        examples=examples,
        scoring=scoring,
        decoding=decoding,
        measure=measure,
        seed=runtime.seed,
        max_source_tokens=dataset.max_source_tokens,
        resume=cfg.resume,
    )


def _require_scorable(scoring: Scoring, measure: MeasureSpec, runtime: RuntimeSpec) -> None:
    """Raise UserError for metrics that need a baseline, a permission, or code of a stranger."""
    for metric in scoring.metrics:
        if metric == AGREEMENT and measure.baseline is None:
            raise UserError("dataset.metric=agreement compares with a baseline; set measure.baseline=vanilla")
        if metric == PASS_AT_1:
            require_permission(scoring.run_code)
        if (
            metric.startswith(EVALUATE)
            and "/" in metric
            and script_of(metric) is None
            and not runtime.trust_remote_code
        ):
            raise UserError(
                f"{metric} is no local folder, and a community metric is Python code from the hub; correct the path, "
                "or allow it with runtime.trust_remote_code=true"
            )
        if metric.startswith(EVALUATE):
            require_loadable(metric)


def _further(scoring: Scoring) -> dict[str, str]:
    """What else decides about the scores: further metrics, and what those of `evaluate` depend on."""
    found = dict.fromkeys(scoring.metrics[1:], "")
    for metric in scoring.metrics:
        if metric.startswith(EVALUATE):
            script = script_of(metric)
            found[metric] = f"{version('evaluate')} {'' if script is None else file_hash(str(script.parent))}"
    return found


def sweep_folder(cfg: DictConfig) -> Path:
    """outputs/NAME. Raises UserError if the name cannot be a folder's name."""
    name = str(cfg.name) if isinstance(cfg.name, str | int | float) else ""
    if not name.isprintable() or name in ("", ".", "..") or set(name) & set("/\\") or len(name.encode()) > LONGEST_NAME:
        raise UserError(f"name must be a plain folder name, got {cfg.name!r}; results go to outputs/NAME")
    return Path("outputs") / name


@lru_cache(maxsize=4)
def cached_examples(spec: DatasetSpec) -> tuple[Example, ...]:
    """The dataset's examples, read once per process. Later turns may still lack the earlier answers."""
    return load_examples(spec, unanswered=True)


@lru_cache(maxsize=4)
def _needs_training(names: tuple[str | None, ...], cache: Path) -> bool:
    """Whether one of the models belongs to the toy pair and is not in the cache."""
    return bool([name for name in names if untrained(name)])  # a wrong name must not wait for another's training


def require_decodable(policy: DictConfig, pair: PairSpec, decoding: DecodingSpec, runtime: RuntimeSpec) -> None:
    """Raise UserError for a policy that the toy pair cannot decode with, before it is trained, which takes minutes.

    The pair's architecture is enough for that. A policy that reads a file waits for the pair, which the file is of.
    """
    require_engine(runtime.engine)
    models = {"target": pair.target, "draft": pair.draft, "second_draft": pair.second_draft}
    for path in models.values():
        if path is not None and not path.startswith("toy:"):
            named_checkpoint(path, trust_remote_code=runtime.trust_remote_code).check()
    if named_paths(OmegaConf.to_container(policy, resolve=False)):
        return
    load(
        **{name: None if path is None else stand_in(path) for name, path in models.items()},
        policy=policy,
        dtype=runtime.dtype,
        device=runtime.device,
        processors=decoding.processors,
        source_language=pair.source_language,
        target_language=pair.target_language,
        vocabularies=pair.vocabularies,
    )


def decoder_of(
    policy: DictConfig,
    pair: PairSpec,
    decoding: DecodingSpec,
    runtime: RuntimeSpec,
    wrap: Callable[[LoadedModel], LoadedModel] = lambda model: model,
) -> Decoder:
    """A policy's decoder, as the configuration says. wrap: see `load`."""
    return load(
        pair.target,
        pair.draft,
        policy,
        dtype=runtime.dtype,
        device=runtime.device,
        engine=runtime.engine,
        compile=runtime.compile,
        compile_drafter=runtime.compile_drafter,
        trust_remote_code=runtime.trust_remote_code,
        device_map=runtime.device_map,
        tensor_parallel=runtime.tensor_parallel,
        target_revision=pair.target_revision,
        draft_revision=pair.draft_revision,
        second_draft=pair.second_draft,
        second_draft_revision=pair.second_draft_revision,
        processors=decoding.processors,
        source_language=pair.source_language,
        target_language=pair.target_language,
        vocabularies=pair.vocabularies,
        wrap=wrap,
    )


def _setting(
    pair: PairSpec,
    dataset: DatasetSpec,
    decoding: DecodingSpec,
    runtime: RuntimeSpec,
    measure: MeasureSpec,
) -> dict[str, Any]:
    """Everything that two points must share to be compared."""
    device, how = resolve_device(runtime.device), asdict(decoding)
    return {
        "target": pair.target,
        "draft": pair.draft,
        "second_draft": pair.second_draft,
        "source_language": pair.source_language,
        "target_language": pair.target_language,
        **({} if pair.vocabularies == "auto" else {"vocabularies": pair.vocabularies}),
        "dataset": dataset.name,
        "split": dataset.split,
        "prompt_template": dataset.prompt_template,
        "chat_template": list(dataset.chat_template),
        "max_source_tokens": dataset.max_source_tokens,
        "metric": dataset.metric,
        **({"cut": list(dataset.cut)} if dataset.cut else {}),
        "dtype": runtime.dtype,
        "compile": runtime.compile,
        **({} if runtime.compile_drafter == "auto" else {"compile_drafter": runtime.compile_drafter}),
        **({} if runtime.batch == 1 else {"batch": runtime.batch}),
        "device": str(device),
        **placement_setting(Placement(runtime.device_map, runtime.tensor_parallel), device),
        "threads": runtime.threads or DEFAULT_THREADS,
        "processors": how.pop("processors"),
        "decoding": how,
        "seed": runtime.seed,
        "repeats": measure.repeats,
        "warmup": measure.warmup,
        "baseline": measure.baseline,
    }


def _code(surroundings: dict[str, Any]) -> str:
    """The hash of our code and the versions of the packages that can change a number."""
    return " ".join(f"{key} {surroundings[key]}" for key in ("code", "torch", "transformers", "tokenizers", *SCORERS))


def _content_of(policy: DictConfig) -> dict[str, Any]:
    """The policy without its name. Files that it names count with their content, wherever they lie."""
    values = OmegaConf.to_container(policy, resolve=True)
    contents = {path: file_hash(path) or path for path in named_paths(values).values()}
    return _replaced({key: value for key, value in values.items() if key != "name"}, contents)


def _replaced(node: Any, others: Mapping[str, str]) -> Any:
    """The node with other texts in place of these."""
    if isinstance(node, dict):
        return {key: _replaced(value, others) for key, value in node.items()}
    if isinstance(node, list):
        return [_replaced(value, others) for value in node]
    return others.get(node, node) if isinstance(node, str) else node
