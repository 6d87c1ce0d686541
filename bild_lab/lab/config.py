"""The configuration: its folder, its groups as dataclasses, and policies loaded by name."""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bild_lab.errors import UserError, require_flag, require_model_path, require_whole

T = TypeVar("T")

MOST_WHOLE = 2**63 - 1
MOST_THREADS = 4096
MOST_BATCH = 4096
MOST_TOKENS = 2**20
TOP_LEVEL = "name resume pair dataset policy decoding runtime measure logger".split()  # of conf/config.yaml
CHECKED_ELSEWHERE = {"checked": "elsewhere"}  # by the code that uses the value, so Python users get the same message
KINDS = {bool: "true or false", str: "text", int: "a whole number", float: "a number", type(None): "null"}


def config_dir() -> Path:
    """The folder `conf`: next to the package in a checkout, inside the package in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@dataclass(frozen=True)
class PairSpec:
    """Checkpoints: the keys of `pair`. `Languages` checks the languages."""

    name: str  # what tables and logs call the pair
    target: str  # the large model: a folder, a hub id, toy:large or toy:small
    draft: str | None = None  # the small model, likewise; null: the policy drafts without one
    second_draft: str | None = None  # drafts for the draft model, likewise
    target_revision: str | None = None  # branch, tag or commit of the hub
    draft_revision: str | None = None  # branch, tag or commit of the hub
    second_draft_revision: str | None = None  # branch, tag or commit of the hub
    aligned: bool = False  # whether the draft model was aligned with the target (BiLD §3.5.1); BiLD's figures need it
    source_language: str | None = None  # of mBART, mBART-50, M2M-100 or NLLB: the tokenizer's code
    target_language: str | None = None  # to translate into: the tokenizer's code, such as de_DE, de or deu_Latn
    vocabularies: str = "auto"  # a draft model with another vocabulary drafts by intersection, strings, or auto

    def __post_init__(self) -> None:
        for key in ("target", "draft", "second_draft"):
            value = getattr(self, key)
            if value is not None:
                require_model_path(f"pair.{key}", value)
        if self.target is None:
            raise UserError("pair.target must be a folder or a hub id, got null")


@dataclass(frozen=True)
class DecodingSpec:
    """How long to decode and how to choose tokens. `Sampling` and `processors_of` check all but the first."""

    max_new_tokens: int
    temperature: float = field(metadata=CHECKED_ELSEWHERE)
    top_k: int | None = field(metadata=CHECKED_ELSEWHERE)
    top_p: float | None = field(metadata=CHECKED_ELSEWHERE)
    processors: Any = field(default="none", metadata=CHECKED_ELSEWHERE)

    def __post_init__(self) -> None:
        require_whole("decoding.max_new_tokens", self.max_new_tokens, 1, MOST_TOKENS)


@dataclass(frozen=True)
class RuntimeSpec:
    """Where models run, and in which precision.

    compile_drafter: draft a window as one program: auto (where there is one), true (or refuse), false (step by step).
    threads: null keeps PyTorch's choice. trust_remote_code: run Python code that comes with a checkpoint. batch: texts
    that decode at once.
    device_map, tensor_parallel: how the target is spread over devices. `Placement` checks them.
    """

    device: str
    engine: str
    compile: bool
    dtype: str
    threads: int | None
    seed: int
    compile_drafter: bool | str = "auto"
    trust_remote_code: bool = False
    device_map: str | None = None
    tensor_parallel: bool = False
    batch: int = 1

    def __post_init__(self) -> None:
        require_flag("runtime.compile", self.compile)
        require_whole("runtime.batch", self.batch, 1, MOST_BATCH)
        if self.compile_drafter not in (True, False, "auto"):
            raise UserError(f"runtime.compile_drafter must be auto, true or false, got {self.compile_drafter!r}")
        require_flag("runtime.trust_remote_code", self.trust_remote_code)
        require_whole("runtime.seed", self.seed, 0, MOST_WHOLE)
        if self.threads is not None:
            require_whole("runtime.threads", self.threads, 1, MOST_THREADS)


@dataclass(frozen=True)
class MeasureSpec:
    """How often to time. baseline: the policy to compare with, or null. certify: check outputs against the target's.

    target_log_probability: score every text by the target. run_code: let dataset.metric=pass_at_1 run programs.
    """

    warmup: int
    repeats: int
    baseline: str | None
    traced_examples: int
    certify: bool
    target_log_probability: bool = True
    run_code: bool = False

    def __post_init__(self) -> None:
        require_flag("measure.certify", self.certify)
        require_flag("measure.target_log_probability", self.target_log_probability)
        require_flag("measure.run_code", self.run_code)
        require_whole("measure.warmup", self.warmup, 0)
        require_whole("measure.repeats", self.repeats, 1)
        require_whole("measure.traced_examples", self.traced_examples, 0)


def typed(cls: type[T], node: Any, group: str) -> T:
    """Convert a config group to its dataclass.

    Raises UserError for a missing key, an unknown key, a key that cannot be resolved, and a value of a wrong type.
    """
    if not OmegaConf.is_dict(node):
        raise UserError(f"{group} must be a group of keys, got {node!r}; choose one of its files: {group}=NAME")
    try:
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{group}: {str(error).splitlines()[0]}") from error
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(map(str, values)) - set(fields)):
        raise UserError(f"{group} has no key {unknown[0]!r}; it has {', '.join(sorted(fields))}")
    unset = dataclasses.MISSING
    wanted = [name for name, one in fields.items() if one.default is unset and one.default_factory is unset]
    if missing := sorted(set(wanted) - set(values)):
        raise UserError(f"{group} lacks the key {missing[0]!r}; it needs {', '.join(wanted)}")
    spec = cls(**values)
    hints = typing.get_type_hints(cls)  # class variables have hints too, and are not keys
    for name in fields:
        if fields[name].metadata != CHECKED_ELSEWHERE:
            _require_kind(f"{group}.{name}", values.get(name, fields[name].default), hints[name])
    return spec


def _require_kind(key: str, value: Any, hint: Any) -> None:
    """Raise UserError unless the value has one of the annotated types. The dataclass itself checks ranges."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if not set(kinds) <= set(KINDS):
        return  # columns and templates: the dataclass checks them
    allowed = (*kinds, int) if float in kinds else kinds
    if isinstance(value, int) and abs(value) > MOST_WHOLE:
        raise UserError(f"{key} must be a number of at most 64 bits, got {value!r}")
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
        raise UserError(f"{key} must be {' or '.join(KINDS[kind] for kind in kinds)}, got {value!r}")


def compose_config(overrides: list[str], name: str = "config") -> DictConfig:
    """The whole configuration `conf/NAME.yaml` with these overrides. Works inside a Hydra application and outside."""
    if GlobalHydra.instance().is_initialized():  # its search path may include the user's own folders
        loader = GlobalHydra.instance().config_loader()
        return loader.load_configuration(name, overrides, run_mode=RunMode.RUN)
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose(name, overrides=overrides)


def compose_policy(name: str, knobs: dict[str, Any] | None = None) -> DictConfig:
    """The policy `conf/policy/NAME.yaml` with these knobs. Raises UserError for an unknown policy or knob."""
    try:
        policy = copy.deepcopy(_composed_with(name, _state_of_files())).policy
    except HydraException as error:
        raise UserError(f"policy must be one of {', '.join(policy_names())}, got {name!r}") from error
    for knob, value in (knobs or {}).items():
        if knob not in policy or knob in ("name", "decoder"):
            raise UserError(f"policy {name} has no knob {knob!r}; it has {', '.join(knob_values(policy)) or 'none'}")
        policy[knob] = value
    return policy


def drafter_of(name: str, knobs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The drafter of a policy with these knobs, for a policy that is composed of others: `${drafter_of:NAME,KNOBS}`.

    Raises UserError for a policy whose drafter cannot draft for another policy's target.
    """
    policy = compose_policy(name, dict(knobs or {}))
    decoder = OmegaConf.to_container(OmegaConf.create({"policy": policy}).policy.decoder, resolve=True)
    if "drafter" not in decoder or "target" in decoder:
        raise UserError(f"policy {name} has no drafter that drafts for a plain target; choose another, such as suffix")
    return decoder["drafter"]


OmegaConf.register_new_resolver("drafter_of", drafter_of, replace=True)


@lru_cache
def _composed_with(policy: str, state: tuple[str, ...]) -> DictConfig:
    """The whole configuration with a policy, which may refer to other groups.

    state: of the files that it is composed of.
    """
    first = next(folder for folder in _search_path() if folder != "pkg://hydra.conf")  # goes before all others
    file = {file.stem: file for file in _policy_files(first)}.get(policy)
    text = file and file.read_text(encoding="utf-8")
    if text is None or "@package" in text or "defaults" in (node := OmegaConf.create(text)):
        return _composed(f"policy={policy}")  # Hydra knows where it is, and what else it is made of
    whole = copy.deepcopy(_default_config(state))
    whole.policy = node
    return whole


@lru_cache
def _default_config(state: tuple[str, ...]) -> DictConfig:
    """The configuration without overrides. Composing takes a fifth of a second, and it serves every policy."""
    return _composed()


def _composed(*overrides: str) -> DictConfig:
    return OmegaConf.masked_copy(cfg := compose_config([*overrides]), [key for key in cfg if key != "hydra"])


def _state_of_files() -> tuple[str, ...]:
    """The folders that configurations come from, each with the time of the last change of a policy."""
    times = ((one, [file.stat().st_mtime_ns for file in _policy_files(one)]) for one in _search_path())
    return tuple(f"{one} {max(changed, default=0)}" for one, changed in times)


def _search_path() -> list[str]:
    """Where Hydra looks for configurations, in this order."""
    if not GlobalHydra.instance().is_initialized():
        return [str(config_dir())]
    return [one.path for one in GlobalHydra.instance().config_loader().get_search_path().get_path()]


def _policy_files(folder: str) -> list[Path]:
    return sorted((Path(folder.removeprefix("file://")) / "policy").glob("*.yaml"))


def require_keys(cfg: DictConfig, wanted: Sequence[str]) -> None:
    """Raise UserError if the configuration lacks a key. Users may add their own keys, for interpolation."""
    if missing := [key for key in wanted if key not in cfg]:
        raise UserError(f"the configuration lacks {missing[0]!r}; it needs {', '.join(wanted)}")


def require_policy(policy: Any) -> None:
    """Raise UserError unless a policy has a name, a decoder, and the knobs of its file with values of the right type.

    The parts themselves check ranges. A name without a file is the user's own policy.
    """
    if not OmegaConf.is_dict(policy) or not isinstance(policy.get("name"), str):
        raise UserError(f"policy must be one of {', '.join(policy_names())}, with a name, got {policy!r}")
    if not OmegaConf.is_dict(policy.get("decoder")) or not isinstance(policy.decoder.get("_target_"), str):
        raise UserError(f"policy.decoder must name its class in _target_, got {policy.get('decoder')!r}")
    shipped = shipped_knobs(policy.name)
    if shipped is None:
        return
    values = knob_values(OmegaConf.to_container(policy, resolve=False))
    for knob, value in values.items():
        if knob not in shipped:
            raise UserError(f"policy {policy.name} has no knob {knob!r}; it has {', '.join(shipped) or 'none'}")
        default = shipped[knob]
        wrong = isinstance(value, dict) or (isinstance(value, bool) and isinstance(default, int | float | str))
        if wrong and not isinstance(default, bool | dict | None):
            raise UserError(f"policy.{knob} must be a value such as {default!r}, got {value!r}")
    if missing := [knob for knob in shipped if knob not in values]:
        raise UserError(f"policy {policy.name} lacks its knob {missing[0]!r}; keep the knob, null may switch it off")


@lru_cache
def shipped_knobs(name: str) -> dict[str, Any] | None:
    """The knobs in a policy's file with their values; None if there is no such file."""
    if name not in policy_names():
        return None
    return knob_values(OmegaConf.to_container(compose_policy(name), resolve=False))


def policy_names() -> list[str]:
    return sorted(file.stem for file in (config_dir() / "policy").glob("*.yaml"))


def knob_values(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a policy: everything in its file except its name and its parts."""
    return {key: policy[key] for key in policy if key not in ("name", "decoder")}
