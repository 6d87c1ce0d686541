"""The configuration: where it lies, its typed groups, and policies composed by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bild_lab.errors import UserError, require_flag

T = TypeVar("T")


def config_dir() -> Path:
    """The folder of config groups: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@dataclass(frozen=True)
class PairSpec:
    """Checkpoints: a folder, a hub id, or toy:large and toy:small. second_draft: drafts for the draft model."""

    name: str
    target: str
    draft: str | None = None
    second_draft: str | None = None
    target_revision: str | None = None
    draft_revision: str | None = None
    second_draft_revision: str | None = None

    def __post_init__(self) -> None:
        for key in ("target", "draft", "second_draft"):
            value = getattr(self, key)
            if value is not None and not (isinstance(value, str) and value):
                raise UserError(f"pair.{key} must be a folder or a hub id, got {value!r}")
        if self.target is None:
            raise UserError("pair.target must be a folder or a hub id, got null")


@dataclass(frozen=True)
class DecodingSpec:
    """How long to decode and how to choose tokens (checked by `Sampling`)."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None

    def __post_init__(self) -> None:
        require_whole("decoding.max_new_tokens", self.max_new_tokens, 1)


@dataclass(frozen=True)
class RuntimeSpec:
    """Where and in which precision models run. threads: null leaves PyTorch's choice."""

    device: str
    engine: str
    compile: bool
    dtype: str
    threads: int | None
    seed: int

    def __post_init__(self) -> None:
        require_flag("runtime.compile", self.compile)
        require_whole("runtime.seed", self.seed, 0)
        if self.threads is not None:
            require_whole("runtime.threads", self.threads, 1)


@dataclass(frozen=True)
class MeasureSpec:
    """How often to time. baseline: the policy every example is paired with, or null. certify: judge differences."""

    warmup: int
    repeats: int
    baseline: str | None
    traced_examples: int
    certify: bool

    def __post_init__(self) -> None:
        require_flag("measure.certify", self.certify)
        require_whole("measure.warmup", self.warmup, 0)
        require_whole("measure.repeats", self.repeats, 1)
        require_whole("measure.traced_examples", self.traced_examples, 0)


def require_whole(key: str, value: Any, least: int) -> None:
    """Raise UserError unless the value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{key} must be a whole number >= {least}, got {value!r}")


def typed(cls: type[T], node: DictConfig, group: str) -> T:
    """A config group as its dataclass. Raises UserError for a missing, unknown or unresolvable key."""
    try:
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{group}: {str(error).splitlines()[0]}") from error
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        raise UserError(f"{group} has no key {unknown[0]!r}; it has {', '.join(sorted(known))}")
    return cls(**values)


def compose_config(overrides: list[str]) -> DictConfig:
    """The whole configuration with these overrides, inside a Hydra application or outside one."""
    if GlobalHydra.instance().is_initialized():  # its search path may hold the user's own folders
        loader = GlobalHydra.instance().config_loader()
        return loader.load_configuration("config", overrides, run_mode=RunMode.RUN)
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", overrides=overrides)


def compose_policy(name: str, knobs: dict[str, Any] | None = None) -> DictConfig:
    """The policy `conf/policy/NAME.yaml` with these knobs. Raises UserError for an unknown policy or knob."""
    try:
        policy = compose_config([f"policy={name}"]).policy
    except HydraException as error:
        raise UserError(f"policy must be one of {', '.join(policy_names())}, got {name!r}") from error
    for knob, value in (knobs or {}).items():
        if knob not in policy or knob in ("name", "decoder"):
            raise UserError(f"policy {name} has no knob {knob!r}; it has {', '.join(knob_values(policy)) or 'none'}")
        policy[knob] = value
    return policy


def policy_names() -> list[str]:
    return sorted(file.stem for file in (config_dir() / "policy").glob("*.yaml"))


def knob_values(policy: Mapping[str, Any]) -> dict[str, Any]:
    """What a user may turn on a policy: everything in its file but its name and its parts."""
    return {key: policy[key] for key in policy if key not in ("name", "decoder")}
