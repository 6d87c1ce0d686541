"""What a point is known by: its folder, its setting, a hash of everything that affects its numbers,
and facts that do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bild_lab.engine.methods import bita, medusa
from bild_lab.engine.methods.eagle import module as eagle
from bild_lab.engine.methods.early_exit import layer_heads
from bild_lab.engine.models.checkpoint.chat import ChatSettings
from bild_lab.engine.models.checkpoint.hub import commits_read
from bild_lab.engine.models.device import default_threads, resolve_device
from bild_lab.engine.protocols import External
from bild_lab.engine.sampling import Sampling
from bild_lab.errors import UserError
from bild_lab.files import hub_key, pin_of
from bild_lab.lab.config.schemas import (
    SCHEMAS,
    DecodingSpec,
    MeasureSpec,
    PairSpec,
    RuntimeSpec,
    typed,
)
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.metrics.external_metrics import EVALUATE, script_of, user_function
from bild_lab.lab.metrics.quality import Scoring
from bild_lab.lab.metrics.writing import splitter_name
from bild_lab.lab.point.decoder import BASELINE, METHOD, Decoder, sampling_of
from bild_lab.lab.point.environment import PACKAGES, hardware, package_version
from bild_lab.lab.point.load import decoder_of
from bild_lab.lab.store.code import own_code_hash
from bild_lab.lab.store.groups import pair_title
from bild_lab.lab.store.hashing import (
    content_hash,
    content_of,
    data_hash,
    file_hash,
    named_files,
    parts_code_hash,
)

# bytes; file systems allow 255, and our temporary names are longer than the folder's
LONGEST_NAME = 200
DEFAULT_THREADS = default_threads()
# the keys of a pair that are part of a setting
PAIR_KEYS = ("target", "draft", "second_draft", "source_language", "target_language")
# drafters' revisions: a setting has them, as it does not have the content of drafters
REVISIONS = ("draft_revision", "second_draft_revision")
# the keys that say where models are: a point is known by their content
PLACES = ("target", "draft", "second_draft", *REVISIONS)
# the files with the settings of small trained modules
MODULE_CONFIGS = sorted(
    {module_file.KIND.config for module_file in (bita, eagle, layer_heads, medusa)}
)


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


def contents_of(policies: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The policies' parts and knobs, with the content of the files that they name.

    Two policies with the same parts and knobs are equal, whatever their names are.
    """
    return {
        role: {key: value for key, value in content_of(policy).items() if key != "name"}
        for role, policy in policies.items()
    }


def code_of(policy: Mapping[str, Any] | None, specs: Specs) -> str:
    """A hash of the code that a policy and the logits processors reach."""
    return parts_code_hash([specs.decoding.processors, policy and policy["decoder"]])


def setting_of(
    specs: Specs,
    examples: tuple[Example, ...],
    decoders: Mapping[str, Decoder],
    policies: Mapping[str, dict[str, Any]],
    chat: ChatSettings,
) -> dict[str, Any]:
    """Everything that two points must share to be compared. chat: what the model's own chat template
    gets.
    """
    pair, dataset, runtime, measure = specs.pair, specs.dataset, specs.runtime, specs.measure
    device, decoding = resolve_device(runtime.device), asdict(specs.decoding)
    packages = [f"{package} {package_version(package)}" for package in PACKAGES]
    target = decoders.get(BASELINE, decoders[METHOD]).target
    continues = any(example.continues for example in examples)
    processors = decoding.pop("processors")
    del decoding["stop"]  # it is left out where there is none
    return {
        **{key: getattr(pair, key) for key in PAIR_KEYS},
        "dataset": dataset.name,
        **{
            key: getattr(dataset, key)
            for key in ("split", "prompt_template", "max_source_tokens", "metric")
        },
        "chat_template": [template.first_turn for template in dataset.templates],
        "dtype": runtime.dtype,
        "compile": runtime.compile,
        **_unusual_values(specs, chat if continues else None),
        "device": str(device),
        "hardware": hardware(runtime.device_map, device),
        "threads": runtime.threads or DEFAULT_THREADS,
        "processors": content_of(processors),
        "decoding": decoding,
        "seed": runtime.seed,
        **{key: getattr(measure, key) for key in ("repeats", "warmup", "baseline")},
        "n_examples": len(examples),
        "data": data_hash(examples),
        "weights": target.checkpoint.fingerprint,
        "engine": target.engine,
        "code": " ".join([code_of(policies.get(BASELINE), specs), *packages]),
    }


def _unusual_values(specs: Specs, chat: ChatSettings | None) -> dict[str, Any]:
    """The keys of a setting that most settings do not have: those whose value is not the usual one.

    chat: what the model's own chat template gets; None where no turn follows another: then its texts
    say it.
    """
    pair, dataset, runtime, measure = specs.pair, specs.dataset, specs.runtime, specs.measure
    values_and_usual = {
        "stop": (sorted(specs.decoding.stop), []),
        "tokenize": (dataset.tokenize, None),
        "language": (dataset.language, None),
        # to other texts of the same words the tokenizer adds its special tokens
        "complete_prompts": (dataset.has_own_template, False),
        # what the template gets is in its texts, but not what it keeps of answers
        "chat_template_kwargs": ({} if chat is None else dict(chat.values), {}),
        "compile_drafter": (runtime.compile_drafter, "auto"),
        "batch": (runtime.batch, 1),
        "precision": (measure.precision, None),
        "most_repeats": (None if measure.precision is None else measure.most_repeats, None),
        "device_map": (runtime.device_map, None),
        "weight_bits": (runtime.weights, None),
        "draft_weight_bits": (pair.draft_weights, None),
        **{key: (getattr(pair, key), None) for key in REVISIONS},
        "metric_code": (_metric_code(dataset.scored), {}),
    }
    return {key: value for key, (value, usual) in values_and_usual.items() if value != usual}


def point_id(
    specs: Specs,
    scoring: Scoring,
    examples: tuple[Example, ...],
    decoders: Mapping[str, Decoder],
    contents: Mapping[str, Any],
    setting: Mapping[str, Any],
    code: str,
) -> str:
    """The hash of everything that affects the numbers of a point.

    Paths do not, but the files that are there.
    """
    setting_without_paths = {key: value for key, value in setting.items() if key not in PLACES}
    fingerprints = [
        model.checkpoint.fingerprint for decoder in decoders.values() for model in decoder.models
    ]
    external_versions = [
        decoder.method.versions
        for decoder in decoders.values()
        if isinstance(decoder.method, External)
    ]
    margin = {} if scoring.margin is None else {"margin": scoring.margin}
    return content_hash(
        {
            **margin,
            "policies": dict(contents),
            "setting": setting_without_paths,
            "traced_examples": specs.measure.traced_examples,
            "certify": specs.measure.certify,
            "target_log_probability": specs.measure.target_log_probability,
            "metrics": _metric_versions(scoring),
            "categories": [example.category for example in examples],
            "weights": fingerprints,
            "external": external_versions,
            "code": code,
        }
    )


def _metric_code(metrics: Sequence[str]) -> dict[str, str]:
    """The hash of the code of each metric that is a function of the user's own.

    The module that names the function counts as well, as it may be a partial of another one.
    """
    codes = {
        metric: own_code_hash(metric.rpartition(".")[0], user_function(metric).__module__)
        for metric in metrics
        if "." in metric and not metric.startswith(EVALUATE)
    }
    return {metric: code for metric, code in codes.items() if code is not None}


def _metric_versions(scoring: Scoring) -> dict[str, str]:
    """What else decides about the scores: further metrics, and what ROUGE-Lsum and those of
    `evaluate` depend on. The code of a user's own metric is in the setting.
    """
    versions = dict.fromkeys(scoring.metrics[1:], "")
    for metric in scoring.metrics:
        if metric == "rougeLsum":
            versions[metric] = f"{splitter_name()} {package_version('nltk')}"
        if metric.startswith(EVALUATE):
            script = script_of(metric)
            script_hash = "" if script is None else file_hash(str(script.parent))
            versions[metric] = f"{package_version('evaluate')} {script_hash}"
    return versions


def facts_of(specs: Specs, policy: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """What does not affect the numbers of a point, and figures use to place it, in place of names
    or paths.

    pair: its name, or its models' where they took the place of the toy pair's. aligned: whether its
    draft model was aligned with the target. acceptance: the class of the acceptance rule, None for
    a policy without one. trained: by knob, the settings of a small trained module in the folder
    that the knob names; of a fitted tree its file. contents: a hash of each drafter and
    of each file and folder that a knob names, by its path. versions: of the packages of a peer with
    its own environment. vocabularies: of each draft model with another vocabulary than the
    target's, how many pieces they share, and how it drafts. pins: the commit and date of each
    repository of the hub that is pinned (`pins.yaml`). commits: what was read of each repository of
    the hub, pinned or not.
    """
    dataset = specs.dataset
    pins = {model.checkpoint.path: model.checkpoint.pin for model in decoder.models}
    if not dataset.path:
        pins[dataset.hub_id] = pin_of("datasets", dataset.hub_id, dataset.hub_revision)
    pins = {name: dict(pin) for name, pin in pins.items() if pin is not None}
    rule = (policy["decoder"].get("acceptance") or {}).get("_target_")
    trained = {}
    for knob, path in named_files(policy).items():
        settings = _settings_in(Path(path).expanduser())
        if settings is not None:
            trained[knob] = settings
    facts = {
        "pair": pair_title(specs.pair) if specs.pair.takes_the_toys_place else specs.pair.name,
        "aligned": specs.pair.aligned,
        "acceptance": None if rule is None else rule.rpartition(".")[2],
        "trained": trained,
    }
    if contents := _content_hashes(policy, decoder):
        facts["contents"] = contents
    if isinstance(decoder.method, External):
        facts["versions"] = dict(decoder.method.versions)
    if decoder.vocabularies:
        facts["vocabularies"] = decoder.vocabularies
    if pins:
        facts["pins"] = pins
    if commits := _commits_of(decoder, dataset):
        facts["commits"] = commits
    return facts


def _content_hashes(policy: Mapping[str, Any], decoder: Decoder) -> dict[str, str]:
    """A hash of what drafts, and of what the policy's knobs name, by path, with the revision where
    one is given.
    """
    contents = {}
    for model in decoder.models[1:]:
        checkpoint = model.checkpoint
        name = (
            checkpoint.path
            if checkpoint.revision is None
            else f"{checkpoint.path}@{checkpoint.revision}"
        )
        contents[name] = checkpoint.fingerprint
    for path in named_files(policy).values():
        if content := file_hash(path):
            contents[path] = content
    return contents


def _commits_of(decoder: Decoder, dataset: DatasetSpec) -> dict[str, str]:
    """The commit of each repository of the hub that a point reads, as `commits_read` has them."""
    revisions = {model.checkpoint.path: model.checkpoint.revision for model in decoder.models}
    if not dataset.path:
        revisions[dataset.hub_id] = dataset.hub_revision
    keys = {hub_key(name, revision) for name, revision in revisions.items()}
    return {key: commit for key, commit in commits_read().items() if key in keys}


def _settings_in(path: Path) -> dict[str, Any] | None:
    """The settings of heads or an adapter in this folder, or in a JSON file, without their base
    model; None for others, such as a file that holds a list.
    """
    configs = [path / name for name in MODULE_CONFIGS if (path / name).is_file()]
    file = configs[0] if configs else path
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # such as JSON lines: who reads the file says what is wrong with it
        return None
    if not isinstance(settings, dict):
        return None
    return {key: value for key, value in settings.items() if key != "base"}
