"""The configuration: its folder, its groups as dataclasses, and policies by name.

The dataclasses are Hydra's structured configs: they say which keys a group has, of which types and
with which defaults. The files of `conf` state only what differs.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_object
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from bild_lab.errors import (
    UserError,
    require_choice,
    require_finite,
    require_model_path,
    require_number,
    require_whole,
    suggestion,
)
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.schema.formatting import knob_value

T = TypeVar("T")

MOST_WHOLE = 2**63 - 1
MOST_THREADS = MOST_BATCH = 4096
MOST_TOKENS = 2**20
TOY, TOY_MODELS = "toy", "toy:"  # the default pair, and how its models' names begin
WEIGHTS = (8, 4, "gguf", None)  # their bits; a GGUF file's own blocks; as in the precision
PICTURE_KINDS = ("png", "pdf")  # the files of a picture, unless a command names others
# of conf/config.yaml
TOP_LEVEL = "name resume pair dataset policy decoding runtime measure logger".split()

# Hydra 1.4 and its OmegaConf
NEWER = "execution_whitelist" in inspect.signature(hydra.main).parameters
BASE = {} if NEWER else {"version_base": "1.3"}  # which Hydra 1.4 deprecates, and 1.3 wants
# what Hydra keeps of the application that runs
APPLICATION = (GlobalHydra, HydraConfig, JobRuntime, VersionBase)
HYDRA_LOCK = RLock()  # Hydra has one application in a process
# the callback; all other parts are built by ourselves
BUILT_BY_HYDRA = ["bild_lab.report.sweep.reported_sweep"]


def hydra_main(config_name: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Make a function of the configuration `conf/NAME.yaml` a command, by `hydra.main`.

    This is called with the command, as it changes the version that Hydra behaves as, also for a
    caller of our library.
    """
    options = {"execution_whitelist": BUILT_BY_HYDRA} if NEWER else BASE

    def decorate(function: Callable[[DictConfig], Any]) -> Callable[[], Any]:
        @wraps(function)
        def command(*configurations: DictConfig) -> Any:  # a worker process gives the configuration
            return hydra.main(config_path=str(config_dir()), config_name=config_name, **options)(
                function
            )(*configurations)

        return command

    return decorate


def config_dir() -> Path:
    """The folder `conf`: next to the package in a checkout, inside the package in an installed
    wheel.
    """
    package = Path(__file__).resolve().parents[2]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def whole(minimum: int, maximum: int = MOST_WHOLE, default: Any = dataclasses.MISSING) -> Any:
    """A field for a whole number in this range."""
    return dataclasses.field(default=default, metadata={"range": (minimum, maximum)})


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Stop strings as a tuple, none for None.

    Raises UserError for anything but texts that are not empty.
    """
    if stop is None:
        return ()
    strings = (
        (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (None,)
    )
    if not all(isinstance(string, str) and string for string in strings):
        raise UserError(
            f"decoding.stop must be a text or a list of texts, none of them empty, got {stop!r};"
            " null switches it off"
        )
    return tuple(dict.fromkeys(strings))


@dataclass
class PairSpec:
    """Checkpoints: the keys of `pair`. `Languages` checks the languages."""

    name: str  # what tables and logs call the pair
    target: str | None  # the large model: a folder, a hub id, a GGUF file, toy:large or toy:small
    draft: str | None = None  # the small model, likewise, or target: the same; null: none
    second_draft: str | None = None  # drafts for the draft model, likewise
    target_revision: str | None = None  # branch, tag or commit of the hub
    draft_revision: str | None = None  # branch, tag or commit of the hub
    second_draft_revision: str | None = None  # branch, tag or commit of the hub
    # whether the draft model was aligned with the target (BiLD §3.5.1); BiLD's figures need it
    aligned: bool = False
    source_language: str | None = None  # of mBART, mBART-50, M2M-100 or NLLB: the tokenizer's code
    # to translate into: the tokenizer's code, such as de_DE, de or deu_Latn
    target_language: str | None = None
    # of the draft models, as runtime.weights; null: the same
    draft_weights: int | str | None = None

    def __post_init__(self) -> None:
        require_choice("pair.draft_weights", self.draft_weights, WEIGHTS)
        if self.draft == "target":
            self.draft, self.draft_revision = self.target, self.target_revision
        for key in ("target", "draft", "second_draft"):
            value = getattr(self, key)
            if key == "target" or value is not None:
                require_model_path(f"pair.{key}", value)

    @property
    def takes_the_toys_place(self) -> bool:
        """Whether the name is the toy pair's, which is the default, but a model is not."""
        models = (self.target, self.draft, self.second_draft)
        return self.name == TOY and any(
            model is not None and not model.startswith(TOY_MODELS) for model in models
        )


@dataclass
class DecodingSpec:
    """How long to decode and how to choose tokens.

    `Sampling` checks temperature, top_k and top_p, `processors_of` the processors.
    """

    max_new_tokens: int = whole(1, MOST_TOKENS)
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: Any = None  # one or several stop strings: a text ends before the first of them
    processors: Any = "none"  # none, checkpoint, or a list of Transformers' logits processors

    def __post_init__(self) -> None:
        self.stop = stop_strings(self.stop)


@dataclass
class RuntimeSpec:
    """Where models run, and in which precision.

    The engine checks device, engine, precision and placement.
    """

    device: str = "auto"  # cpu, cuda, cuda:1 …; auto: the GPU if there is one
    engine: str = "auto"  # kernels, native, hf, or the first of these that can run the model
    # native steps: graphs, CUDA graphs of PyTorch's kernels; true, through torch.compile; false
    compile: str = "auto"
    # draft a window as one program: auto (where there is one), true (or refuse), false
    compile_drafter: str = "auto"
    # float32, bfloat16, float16, float64; auto: float32 on a CPU, on a GPU as stored
    dtype: str = "auto"
    batch: int = whole(1, MOST_BATCH, default=1)  # texts that decode at once
    threads: int | None = whole(1, MOST_THREADS, default=None)  # of the CPU; null: PyTorch chooses
    seed: int = whole(0, default=0)
    trust_remote_code: bool = False  # run Python code that comes with a checkpoint
    allow_pickles: bool = False  # read tensors from pickles where a checkpoint has no safetensors
    device_map: str | None = None  # how the target is spread over devices
    # 8 or 4 bits; gguf: a GGUF file's blocks, on the CPU kernels; null: as dtype
    weights: int | str | None = None

    def __post_init__(self) -> None:
        require_choice("runtime.weights", self.weights, WEIGHTS)
        self.compile, self.compile_drafter = (
            str(self.compile).lower(),
            str(self.compile_drafter).lower(),
        )
        require_choice("runtime.compile", self.compile, ("auto", "graphs", "true", "false"))
        require_choice("runtime.compile_drafter", self.compile_drafter, ("auto", "true", "false"))


@dataclass
class MeasureSpec:
    """How often to time, and what else to look at."""

    warmup: int = whole(0, default=3)  # examples whose beginnings are decoded before timing starts
    repeats: int = whole(1, default=3)  # how often policy and baseline decode each example, in turn
    # repeat until the speedup's error by the clock is at most this share
    precision: float | None = None
    most_repeats: int = whole(1, default=30)  # with precision
    # seconds to wait, at most, until the machine is not busy with something else
    quiet: float = 0.0
    baseline: str | None = "vanilla"  # the policy to compare with; null: none
    traced_examples: int = whole(0, default=20)  # examples with a clock in every stage
    certify: bool = False  # compare every output with the target's own
    target_log_probability: bool = True  # score every text by the target
    run_code: bool = False  # let dataset.metric=pass_at_1 run programs

    def __post_init__(self) -> None:
        require_finite("measure.quiet", self.quiet, 0)
        if self.precision is None:
            return
        require_number(
            "measure.precision",
            self.precision,
            0,
            1,
            above=True,
            remedy="0.05 means ± 5 %, null: off",
        )
        if self.baseline is None or self.most_repeats < max(2, self.repeats):
            raise UserError(
                "measure.precision needs a baseline, and measure.most_repeats of at least 2 and"
                f" measure.repeats, got measure.baseline={self.baseline}"
                f" measure.most_repeats={self.most_repeats}"
            )


@dataclass
class ReportSpec:
    """What a sweep's report draws: the keys of `report`."""

    # pictures of quality against latency: png for a screen; pdf, svg for a paper, 8 cm wide
    figures: Any = PICTURE_KINDS  # a word or a list of them

    def __post_init__(self) -> None:
        self.figures = picture_kinds(self.figures)


def picture_kinds(figures: Any) -> list[str]:
    """The kinds of files of `report.figures`:

    `png`, `png,pdf` or a list of such words. Raises UserError for others.
    """
    kinds = ("png", "pdf", "svg")
    figure_words = figures.split(",") if isinstance(figures, str) else figures
    chosen_kinds = (
        [str(word).strip() for word in figure_words] if isinstance(figure_words, Iterable) else []
    )
    if not chosen_kinds or set(chosen_kinds) - set(kinds):
        raise UserError(f"figures are {', '.join(kinds)}, one or more of them, got {figures}")
    return chosen_kinds


SCHEMAS = {
    "pair": PairSpec,
    "dataset": DatasetSpec,
    "decoding": DecodingSpec,
    "runtime": RuntimeSpec,
    "measure": MeasureSpec,
}
for group, schema in (SCHEMAS | {"report": ReportSpec}).items():  # as `- schema@pair: pair`
    ConfigStore.instance().store(group="schema", name=group, node=schema)


def typed(cls: type[T], node: Any, group: str) -> T:
    """Convert a config group, or a mapping, to its dataclass.

    Raises UserError for a missing key, an unknown key, a key that cannot be resolved, a value of a
    wrong type, and a whole number out of its range.
    """
    if not OmegaConf.is_dict(node) and not isinstance(node, dict):
        raise UserError(
            f"{group} must be a group of keys, got {node!r}; choose one of its files: {group}=NAME"
        )
    names = [schema_field.name for schema_field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    try:
        values = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_dict(node) else node
        spec = OmegaConf.to_object(OmegaConf.merge(pickle.loads(_schema_of(cls)), values))
    except MissingMandatoryValue as error:
        key = error.full_key or error.key
        raise UserError(f"{group} lacks the key {str(key)!r}; it has {', '.join(names)}") from error
    except ConfigKeyError as error:
        raise UserError(
            f"{group} has no key {str(error.key)!r}; it has {', '.join(sorted(names))}"
        ) from error
    except OmegaConfBaseException as error:
        raise UserError(f"{group}.{error.full_key or ''}: {str(error).splitlines()[0]}") from error
    for schema_field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if (
            "range" in schema_field.metadata
            and (value := getattr(spec, schema_field.name)) is not None
        ):
            require_whole(f"{group}.{schema_field.name}", value, *schema_field.metadata["range"])
    return spec


@lru_cache
def _schema_of(cls: type) -> bytes:
    """The structured configuration of a dataclass, pickled."""
    schema = OmegaConf.structured(cls)
    OmegaConf.set_readonly(schema, False)  # those of frozen dataclasses are
    return pickle.dumps(schema)


def compose_config(overrides: list[str], name: str = "config") -> DictConfig:
    """The whole configuration `conf/NAME.yaml` with these overrides.

    Works inside our commands, whose search path may include the user's own folders, inside another
    Hydra application, which stays as it is, outside of both, and in several threads.
    """
    with HYDRA_LOCK:
        if in_our_application():
            loader = GlobalHydra.instance().config_loader()
            return loader.load_configuration(name, overrides, run_mode=RunMode.RUN)
        with without_other_applications():
            return _composed(overrides, name)


def _composed(overrides: list[str], name: str) -> DictConfig:
    """As Hydra composes it, in a tenth of the time where only values differ from a configuration
    composed before.

    Hydra sets values after it has merged the files of all groups, so the merged files are kept.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        if not any(
            override.is_sweep_override() or override.is_hydra_override() for override in parsed
        ):
            values = [override for override in parsed if _sets_a_value(override)]
            groups = tuple(override.input_line for override in parsed if override not in values)
            cfg = pickle.loads(_merged_files(name, groups, _state_of_files()))
            for override in values:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
            return cfg
    except (HydraException, OmegaConfBaseException):
        # in which Hydra would name the override another way
        pass
    with initialize_config_dir(str(config_dir()), **BASE):
        return compose(name, overrides=overrides)


@lru_cache(maxsize=64)
def _merged_files(name: str, groups: tuple[str, ...], state: tuple[Any, ...]) -> bytes:
    """The pickled configuration with these groups, which is copied sooner than an object. state: of
    all files.
    """
    with initialize_config_dir(str(config_dir()), **BASE):
        return pickle.dumps(compose(name, overrides=list(groups)))


def _sets_a_value(override: Override) -> bool:
    """Whether an override sets a key that there is, and chooses no file of a group."""
    plain = override.package is None and not (
        override.is_add() or override.is_force_add() or override.is_delete()
    )
    return plain and not (config_dir() / override.key_or_group).is_dir()


def _state_of_files() -> tuple[Any, ...]:
    """What changes when a file of the configuration does."""
    entries = [entry for folder, _, _ in os.walk(config_dir()) for entry in os.scandir(folder)]
    stats = {entry.path: entry.stat() for entry in entries}
    return tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats.items())


def in_our_application() -> bool:
    """Whether Hydra runs, and composes from `conf`."""
    if not GlobalHydra.instance().is_initialized():
        return False
    paths = GlobalHydra.instance().config_loader().get_search_path().get_path()
    config_path = str(config_dir())
    return any(
        search_path.provider == "main" and search_path.path.removeprefix("file://") == config_path
        for search_path in paths
    )


@contextmanager
def without_other_applications() -> Iterator[None]:
    """Inside the block no Hydra application runs; after it that of the user is as it was."""
    with HYDRA_LOCK:
        outer_instances = {kind: Singleton._instances.pop(kind, None) for kind in APPLICATION}
        try:
            yield
        finally:
            for kind, instance in outer_instances.items():
                Singleton._instances.pop(kind, None)
                if instance is not None:
                    Singleton._instances[kind] = instance


def compose_policy(name: str, knobs: Mapping[str, Any] | None = None) -> DictConfig:
    """The policy `conf/policy/NAME.yaml` with these knobs, inside the whole configuration that it
    may refer to.

    Raises UserError for an unknown policy or knob.
    """
    try:
        policy = pickle.loads(_with_policy(name, tuple(_search_path()))).policy
    except (HydraException, ValueError) as error:  # a ValueError for a number, such as 3
        known = policy_names()
        meant = suggestion(name, known)
        raise UserError(f"policy must be one of {', '.join(known)}, got {name!r}{meant}") from error
    for knob, value in (knobs or {}).items():
        if knob not in policy or knob in ("name", "decoder"):
            known = list(knob_values(policy))
            meant = suggestion(knob, known)
            raise UserError(
                f"policy {name} has no knob {knob!r}; it has {', '.join(known) or 'none'}{meant}"
            )
        policy[knob] = value
    return policy


def drafter_of(name: str, knobs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The drafter of a policy with these knobs, for a policy that is composed of others:
    `${drafter_of:NAME,KNOBS}`.

    Raises UserError for a policy whose drafter cannot draft for another policy's target.
    """
    decoder = resolved(compose_policy(name, knobs))["decoder"]
    if "drafter" not in decoder or "target" in decoder:
        raise UserError(
            f"policy {name} has no drafter that drafts for a plain target; choose another, such as"
            " suffix"
        )
    return decoder["drafter"]


register = OmegaConf.register_resolver if NEWER else OmegaConf.register_new_resolver
register("drafter_of", drafter_of, replace=True)


def resolved(policy: DictConfig) -> dict[str, Any]:
    """A policy's name, knobs and parts with every interpolation resolved. Raises UserError where
    one cannot be.

    Interpolations start at the root of the configuration that the policy belongs to, with this
    policy in it.
    """
    root = policy._get_root()
    if root is policy or root._get_node("policy") is not policy:
        root_values = {} if root is policy else OmegaConf.to_container(root)
        policy = OmegaConf.create({**root_values, "policy": OmegaConf.to_container(policy)}).policy
    try:
        values = OmegaConf.to_container(policy, resolve=True)
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, UserError):  # of a policy that this one is composed of
            raise error.__cause__ from error
        raise UserError(f"policy {policy.get('name')}: {str(error).splitlines()[0]}") from error
    return values


@lru_cache
def _with_policy(name: str, places: tuple[str, ...]) -> bytes:
    """The whole configuration with a policy of these folders, pickled.

    Composing takes a fifth of a second.
    """
    return pickle.dumps(without_hydra(compose_config([f"policy={name}"])))


def without_hydra(cfg: DictConfig) -> DictConfig:
    """The configuration of a point, without what Hydra added about the command."""
    return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])


def plain_values(cfg: DictConfig) -> dict[str, Any]:
    """The values of a configuration, resolved; without `recipes` and `protocol`, of which commands
    are made.
    """
    return {
        key: (
            OmegaConf.to_container(cfg[key], resolve=True)
            if OmegaConf.is_config(cfg[key])
            else cfg[key]
        )
        for key in cfg
        if key not in ("hydra", "protocol", "recipes")
    }


def _search_path() -> list[str]:
    """The folders where Hydra looks for configurations, in this order."""
    if not in_our_application():
        return [str(config_dir())]
    paths = GlobalHydra.instance().config_loader().get_search_path().get_path()
    return [
        search_path.path.removeprefix("file://")
        for search_path in paths
        if "pkg://" not in search_path.path
    ]


def require_keys(cfg: DictConfig, required_keys: Sequence[str]) -> None:
    """Raise UserError if the configuration lacks a key.

    Users may add their own keys, for interpolation.
    """
    if missing := [key for key in required_keys if key not in cfg]:
        raise UserError(
            f"the configuration lacks {missing[0]!r}; it needs {', '.join(required_keys)}"
        )


def require_policy(policy: Any) -> None:
    """Raise UserError unless a policy has a name, a decoder, and the knobs of its file with values
    of the right type.

    The parts themselves check ranges. A name without a file is the user's own policy.
    """
    if not OmegaConf.is_dict(policy) or not isinstance(policy.get("name"), str):
        raise UserError(
            f"policy must be one of {', '.join(policy_names())}, with a name, got {policy!r}"
        )
    if not OmegaConf.is_dict(policy.get("decoder")) or not isinstance(
        policy.decoder.get("_target_"), str
    ):
        raise UserError(
            f"policy.decoder must name its class in _target_, got {policy.get('decoder')!r}"
        )
    if (shipped := shipped_knobs(policy.name)) is None:
        return
    values = knob_values(OmegaConf.to_container(policy, resolve=False))
    if differing := set(values) ^ set(shipped):
        known = ", ".join(shipped) or "none"
        raise UserError(
            f"policy {policy.name} has the knobs {known}, not {sorted(differing)[0]!r} or"
            " without it"
        )
    for knob, value in values.items():
        default = shipped[knob]
        wrong = isinstance(value, dict) or (
            isinstance(value, bool) and isinstance(default, int | float | str)
        )
        if wrong and not isinstance(default, bool | dict | None):
            raise UserError(f"policy.{knob} must be a value such as {default!r}, got {value!r}")


@lru_cache
def shipped_knobs(name: str) -> dict[str, Any] | None:
    """The knobs in a policy's file with their values; None if there is no such file."""
    if name not in policy_names():
        return None
    return knob_values(OmegaConf.to_container(compose_policy(name), resolve=False))


def changed_knobs(policy: str, knobs: Mapping[str, Any]) -> list[str]:
    """The knobs whose values differ from those of the policy's file; all of them without such a
    file.

    policy: a name, or a label of `policy_label`.
    """
    shipped = shipped_knobs(policy.partition(" (changed")[0])
    if shipped is None:
        return list(knobs)
    usual = {knob: knob_value(value) for knob, value in shipped.items()}
    return [knob for knob, value in knobs.items() if knob_value(value) != usual.get(knob)]


def policy_names() -> list[str]:
    return sorted(file.stem for file in (config_dir() / "policy").glob("*.yaml"))


def knob_values(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a policy: everything in its file except its name and its parts."""
    return {key: policy[key] for key in policy if key not in ("name", "decoder")}


def find_part(path: Any) -> Callable[..., Any]:
    """The class or function of a dotted path.

    Raises UserError for anything else, and for Python's own functions.
    """
    if not isinstance(path, str):
        raise UserError(f"cannot find {path}: give the dotted path of a class")
    if path.partition(".")[0] in sys.stdlib_module_names:  # a configuration must not run commands
        raise UserError(
            f"{path} belongs to Python itself, not to a decoder; give the dotted path of your own"
            " class"
        )
    try:
        class_or_function = get_object(path)
    except Exception as error:  # Hydra raises errors of its own as well as ImportError
        raise UserError(f"cannot find {path}: give the dotted path of a class") from error
    if not callable(class_or_function):
        raise UserError(
            f"{path} is a {type(class_or_function).__name__}: give the dotted path of a class"
        )
    return class_or_function


def describe_decoder(node: Any) -> str:
    """A decoder's parts and values in one line, such as `ModelDrafter(window=10) +
    Rollback(threshold=2.0)`.

    A value that is null is left out, and a part with no other.
    """
    if not isinstance(node, dict):
        return str(node)
    name = node["_target_"].rsplit(".", 1)[-1] if "_target_" in node else ""
    parts = []
    for value in (child for child in node.values() if isinstance(child, dict)):
        part_values = [value[key] for key in value if key != "_target_"]
        if not part_values or any(part_value is not None for part_value in part_values):
            parts.append(describe_decoder(value))
    plain_values_of_node = {
        key: child
        for key, child in node.items()
        if key != "_target_" and not isinstance(child, dict | None)
    }
    values = [f"{key}={value}" for key, value in plain_values_of_node.items()]
    if name == "DraftThenVerify":
        return " + ".join(parts) + "".join(
            f", {value}" for value in values if value != "verify_tail=True"
        )
    return f"{name}({', '.join([*values, *parts])})"


def policy_label(policy: DictConfig) -> str:
    """The policy's name, with the parts or values that differ from its file."""
    try:
        shipped = compose_policy(policy.name).decoder
    except UserError:  # the user's own policy
        return policy.name
    decoder_values, shipped_values = (
        flatten(OmegaConf.to_container(node)) for node in (policy.decoder, shipped)
    )
    changed = [
        key
        for key in {**shipped_values, **decoder_values}
        if decoder_values.get(key) != shipped_values.get(key)
    ]
    return f"{policy.name} (changed: {', '.join(changed)})" if changed else policy.name


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys."""
    if not isinstance(node, dict):
        return {prefix: node}
    start = f"{prefix}." if prefix else ""
    return {
        key: value
        for name, item in node.items()
        for key, value in flatten(item, f"{start}{name}").items()
    }
