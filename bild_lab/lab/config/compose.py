"""Composes configurations and policies from the folder `conf`, by Hydra."""

from __future__ import annotations

import inspect
import math
import os
import pickle
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, wraps
from pathlib import Path
from threading import RLock
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from bild_lab.errors import UserError, first_line, suggestion
from bild_lab.lab.config.schemas import SCHEMAS, ReportSpec

# Hydra 1.4 and its OmegaConf
HYDRA_1_4 = "execution_whitelist" in inspect.signature(hydra.main).parameters
# Hydra 1.3 wants its version base, and 1.4 deprecates it
HYDRA_VERSION = {} if HYDRA_1_4 else {"version_base": "1.3"}
# singletons in which Hydra keeps the application that runs
APPLICATION = (GlobalHydra, HydraConfig, JobRuntime, VersionBase)
HYDRA_LOCK = RLock()  # Hydra has one application in a process
# the callback; all other parts are built by ourselves
BUILT_BY_HYDRA = ["bild_lab.report.sweep.reported_sweep"]
# by which Hydra, which takes plugins of its own package alone, knows bild_lab/lab/launcher.py
PLUGIN = "hydra_plugins.bild_lab"
MOST_DIGITS = 14  # more digits than anybody types
SIGNIFICANT_DIGITS = 12  # of a step of a range
STEP_ERROR = 1e-13  # the most by which adding steps changes a number of about 1


def hydra_main(config_name: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Make a function of the configuration `conf/NAME.yaml` a command, by `hydra.main`.

    This is called with the command, as it changes the version that Hydra behaves as, also for a
    caller of our library.
    """
    options = {"execution_whitelist": BUILT_BY_HYDRA} if HYDRA_1_4 else HYDRA_VERSION

    def decorate(function: Callable[[DictConfig], Any]) -> Callable[[], Any]:
        @wraps(function)
        def command(*configurations: DictConfig) -> Any:  # a worker process gives the configuration
            with help_that_is_no_text():
                return hydra.main(
                    config_path=str(config_dir()), config_name=config_name, **options
                )(function)(*configurations)

        return command

    return decorate


@contextmanager
def help_that_is_no_text() -> Iterator[None]:
    """Let Hydra 1.3 start on Python 3.14, which looks at each help text as a parser takes it: one of
    Hydra's is no text until it is shown.
    """
    if HYDRA_1_4 or not hasattr(ArgumentParser, "_check_help"):
        yield
        return
    # of a command that runs this one; else none
    earlier_check = vars(ArgumentParser).get("_check_help")
    ArgumentParser._check_help = lambda parser, action: None
    try:
        yield
    finally:
        if earlier_check is None:
            del ArgumentParser._check_help  # the inherited one is back
        else:
            ArgumentParser._check_help = earlier_check


def config_dir() -> Path:
    """The folder `conf`: next to the package in a checkout, inside the package in an installed
    wheel.
    """
    package = Path(__file__).resolve().parents[2]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


for group, schema in (SCHEMAS | {"report": ReportSpec}).items():  # as `- schema@pair: pair`
    ConfigStore.instance().store(group="schema", name=group, node=schema)


def compose_config(overrides: list[str], name: str = "config") -> DictConfig:
    """The whole configuration `conf/NAME.yaml` with these overrides.

    It works inside our commands, whose search path may include the user's own folders, inside
    another Hydra application, which stays as it is, outside of both, and in several threads.
    """
    with HYDRA_LOCK:
        if in_our_application():
            return _composed(overrides, name, GlobalHydra.instance().config_loader())
        with without_other_applications():
            return _composed(overrides, name, None)


def _composed(overrides: list[str], name: str, loader: ConfigLoader | None) -> DictConfig:
    """The configuration as Hydra composes it, in a tenth of the time where only values differ from
    one that was composed before.

    Hydra sets values after it has merged the files of all groups, so the merged files are kept.
    loader: the running command's, which reads its files once; None outside of our commands.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        # outside of our commands, Hydra's own keys may add folders whose files are not watched
        if not any(
            override.is_sweep_override() or (loader is None and override.is_hydra_override())
            for override in parsed
        ):
            values = [override for override in parsed if _sets_a_value(override, loader)]
            groups = tuple(override.input_line for override in parsed if override not in values)
            files = _state_of_files() if loader is None else ()
            cfg = pickle.loads(_merged_files(name, groups, loader, files))
            for override in values:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
            return cfg
    except (HydraException, OmegaConfBaseException):
        # Hydra would name the override in another way
        pass
    return _composed_by_hydra(name, overrides, loader)


@lru_cache(maxsize=64)
def _merged_files(
    name: str, groups: tuple[str, ...], loader: ConfigLoader | None, files: tuple[Any, ...]
) -> bytes:
    """The pickled configuration with these groups: a pickle is copied sooner than an object.

    files: the state of all files, so that a changed one is read anew.
    """
    return pickle.dumps(_composed_by_hydra(name, list(groups), loader))


def _composed_by_hydra(name: str, overrides: list[str], loader: ConfigLoader | None) -> DictConfig:
    if loader is not None:
        return loader.load_configuration(name, overrides, run_mode=RunMode.RUN)
    with initialize_config_dir(str(config_dir()), **HYDRA_VERSION):
        return compose(name, overrides=overrides)


def _sets_a_value(override: Override, loader: ConfigLoader | None) -> bool:
    """Whether an override sets a key that there is, and neither chooses a file of a group nor
    concerns Hydra itself.
    """
    plain = override.package is None and not (
        override.is_add()
        or override.is_force_add()
        or override.is_delete()
        or override.is_hydra_override()
    )
    if loader is None:
        return plain and not (config_dir() / override.key_or_group).is_dir()
    return plain and not _is_group(override.key_or_group, loader)


@lru_cache(maxsize=1024)
def _is_group(key: str, loader: ConfigLoader) -> bool:
    """Whether the running command's folders have files for a key. To look takes 10 ms, and each
    point of a long list of values has the same keys.
    """
    return bool(loader.get_group_options(key, results_filter=None))


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


_own_folder: ContextVar[Path | None] = ContextVar("own_folder", default=None)


@contextmanager
def policies_of(folder: Path | None) -> Iterator[None]:
    """Inside the block `compose_policy` also finds the policies of this folder, as --config-dir names
    it, and those that they are composed of. Raises UserError for a folder that there is not.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"config_dir must be a folder with policy/NAME.yaml, got {folder}")
    token = _own_folder.set(folder)
    try:
        yield
    finally:
        _own_folder.reset(token)


def searching(folder: Path) -> str:
    """The override that adds a folder of the user's own files, as --config-dir does."""
    quoted_folder = str(folder.absolute()).replace("'", r"\'")
    return f"hydra.searchpath=['file://{quoted_folder}']"


def compose_policy(name: str, knobs: Mapping[str, Any] | None = None) -> DictConfig:
    """The policy `conf/policy/NAME.yaml` with these knobs, inside the whole configuration that it
    may refer to.

    Raises UserError for an unknown policy or knob.
    """
    folder = _own_folder.get()
    if folder is not None:
        require_not_hidden(folder, "policy", name)
    overrides = [f"policy={name}"]
    if folder is not None:
        overrides.insert(0, searching(folder))
    try:
        policy = without_hydra(compose_config(overrides)).policy
    except (HydraException, ValueError) as error:  # a ValueError for a number, such as 3
        folders = [*_search_path(), *([] if folder is None else [folder])]
        files = (file for place in folders for file in Path(place, "policy").glob("*.yaml"))
        names = sorted({file.stem for file in files})
        raise UserError(
            f"policy must be one of {', '.join(names)}, got {name!r}{suggestion(name, names)}"
        ) from error
    for knob, value in (knobs or {}).items():
        if knob not in policy or knob in ("name", "decoder"):
            knob_names = list(knob_values(policy))
            meant = suggestion(knob, knob_names)
            raise UserError(
                f"policy {name} has no knob {knob!r}; it has"
                f" {', '.join(knob_names) or 'none'}{meant}"
            )
        policy[knob] = value
    return policy


def drafter_of(name: str, knobs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The drafter of a policy with these knobs, for a policy that is composed of others:
    `${drafter_of:NAME,KNOBS}`.

    Raises UserError for a policy whose drafter cannot draft for another policy's target, and for
    what names no policy or is no mapping of knobs.
    """
    if not isinstance(name, str):
        raise UserError(f"a drafter comes from a policy's name, such as suffix, got {name!r}")
    if knobs is not None and not isinstance(knobs, Mapping):
        raise UserError(
            f"the knobs of policy {name} are a mapping, such as {{window: 3}}, or null, got {knobs!r}"
        )
    decoder = resolved_policy(compose_policy(name, knobs))["decoder"]
    if "drafter" not in decoder or "target" in decoder:
        raise UserError(
            f"policy {name} has no drafter that drafts for a plain target; choose another, such as"
            " suffix"
        )
    return decoder["drafter"]


register = OmegaConf.register_resolver if HYDRA_1_4 else OmegaConf.register_new_resolver
register("drafter_of", drafter_of, replace=True)


def resolved_policy(policy: DictConfig) -> dict[str, Any]:
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
        refusal = _refusal_behind(error)  # of a policy that this one is composed of
        reason = first_line(error) if refusal is None else refusal
        raise UserError(f"policy {policy.get('name')}: {reason}") from error
    return values


def _refusal_behind(error: BaseException | None) -> UserError | None:
    """The UserError that a resolver raised, which is no more than the context of OmegaConf 2.3's
    error; None where another error was its reason.
    """
    while isinstance(error, InterpolationResolutionError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, UserError) else None


def override_words(hydra: DictConfig) -> list[str]:
    """The overrides of a command, given Hydra's own configuration. Interpolations stay, as they have
    their values in the places of their keys alone.
    """
    return OmegaConf.to_container(hydra.overrides.task, resolve=False)


def alternatives(override: Override) -> list[str]:
    """An override with each of its values: those that a sweep takes one after the other.

    Raises UserError for values that cannot be listed.
    """
    if not override.is_sweep_override():
        return [override.input_line]
    try:
        values = list(override.sweep_string_iterator())
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(
            f"the values of {override.input_line} cannot be listed; a sweep takes values with"
            " commas, choice(…), glob(…) or range(START,STOP,STEP), one of them for a key"
        ) from error
    return [f"{override.get_key_element()}={value}" for value in values]


def without_step_error(overrides: Sequence[str]) -> list[str]:
    """The overrides with numbers as they are typed: 0.3 for the 0.30000000000000004 to which a range
    adds its steps.
    """
    return [_without_step_error(word) for word in overrides]


def _without_step_error(override: str) -> str:
    key, _, value = override.partition("=")
    if len(value) <= MOST_DIGITS or "." not in value:
        return override
    with suppress(ValueError):
        number = float(value)
        if abs(number) < STEP_ERROR:  # steps that meet at 0
            return f"{key}=0.0"
        typed = float(f"{number:.{SIGNIFICANT_DIGITS}g}")
        if math.isclose(number, typed, rel_tol=STEP_ERROR):  # if not, the digits are meant
            return f"{key}={typed}"
    return override


def update_numbers(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration of these overrides, without the error of a range's steps
    (`without_step_error`). It is changed in place.
    """
    for override, typed_override in zip(overrides, without_step_error(overrides), strict=True):
        if override != typed_override:
            key, _, value = typed_override.partition("=")
            OmegaConf.update(cfg, key.lstrip("+"), float(value))
    return cfg


def without_hydra(cfg: DictConfig) -> DictConfig:
    """The configuration of a point, without what Hydra added about the command."""
    return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])


def plain_values(cfg: DictConfig) -> dict[str, Any]:
    """The values of a configuration, resolved; without `protocol`, which only its other keys
    read.
    """
    return {
        key: (
            OmegaConf.to_container(cfg[key], resolve=True)
            if OmegaConf.is_config(cfg[key])
            else cfg[key]
        )
        for key in cfg
        if key not in ("hydra", "protocol")
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


def keep_search_path(folders: Sequence[str]) -> None:
    """Let every later composition inside our command look into these folders too: Hydra takes
    `hydra.searchpath` for the one alone whose overrides name it.
    """
    loader = GlobalHydra.instance().config_loader()
    search_path = loader.get_search_path()
    known = {known_path.path for known_path in search_path.get_path()}
    for folder in folders:
        if folder not in known:
            # where --config-dir puts its folder; Hydra wants the schema to be the last
            schema = SearchPathQuery(provider="schema")
            search_path.prepend("hydra.searchpath", folder, anchor=schema)
    loader.repository.initialize_sources(search_path)


def require_own_files(cfg: DictConfig) -> None:
    """Raise UserError where a chosen file of the user's own folder has the name of a shipped one
    with other content: Hydra takes the shipped one.

    cfg: with what Hydra says of the command; without it nothing is known.
    """
    if "hydra" not in cfg:
        return
    folders = [Path(folder) for folder in _search_path() if folder != str(config_dir())]
    for group, name in cfg.hydra.runtime.choices.items():
        for folder in folders:
            require_not_hidden(folder, group, name)


def require_not_hidden(folder: Path, group: str, name: str | None) -> None:
    """Raise UserError where this folder has a file with the name of a shipped one and other
    content.
    """
    own_file, shipped = (place / group / f"{name}.yaml" for place in (folder, config_dir()))
    if not own_file.is_file() or not shipped.is_file():
        return
    if own_file.read_bytes() != shipped.read_bytes():
        raise UserError(
            f"{own_file} has the name of a file that is shipped, and {group}={name} is that one; give"
            " yours another name"
        )


def require_keys(cfg: DictConfig, required_keys: Sequence[str]) -> None:
    """Raise UserError if the configuration lacks a key.

    Users may add their own keys, for interpolation.
    """
    if missing := [key for key in required_keys if key not in cfg]:
        raise UserError(
            f"the configuration lacks {missing[0]!r}; it needs {', '.join(required_keys)}"
        )


def policy_names() -> list[str]:
    return sorted(file.stem for file in (config_dir() / "policy").glob("*.yaml"))


def knob_values(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a policy: everything in its file except its name and its parts."""
    return {key: policy[key] for key in policy if key not in ("name", "decoder")}
