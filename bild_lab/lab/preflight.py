"""Refuses a sweep with a point that cannot be measured, before anything is written."""

from __future__ import annotations

import itertools
import math
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from bild_lab.engine.models.device import visible_gpus
from bild_lab.errors import UserError
from bild_lab.lab.config.command_line import key_of
from bild_lab.lab.config.compose import (
    PLUGIN,
    alternatives,
    compose_config,
    override_words,
    require_own_files,
    without_hydra,
)
from bild_lab.lab.config.console import console, status_line
from bild_lab.lab.config.entrypoint import (
    FAILED_POINTS,
    plain_message,
    refuse,
    require_effect,
    require_same_folder,
)
from bild_lab.lab.config.schemas import SCHEMAS, ReportSpec, typed
from bild_lab.lab.point.build import build
from bild_lab.lab.point.history import requests_of
from bild_lab.lab.point.identity import Specs, sweep_folder
from bild_lab.lab.point.load import replays, resolve_auto, runs_in_graphs
from bild_lab.lab.point.prepare import Point, prepare, require_decoder
from bild_lab.lab.store.records import Sweep

T = TypeVar("T")
MOST_CHECKED = 64  # a sweep of at most so many points is checked point by point
# overrides that change no data
KEEPS_DATA = (
    "policy.",
    "runtime.seed=",
    "decoding.temperature=",
    "decoding.top_k=",
    "decoding.top_p=",
)
# overrides that change no prompt
KEEPS_PROMPTS = re.compile(
    r"(policy|runtime|measure|report|logger)\.|(name|resume|logger|measure)="
)
NO_GRAPHS = "runtime.compile=false"


def logger(cfg: DictConfig) -> Any:
    """The run's logger.

    The process has only one, as it remembers whether its server can be reached.
    """
    return _logger(OmegaConf.to_yaml(cfg.logger, resolve=True))


@lru_cache(maxsize=1)
def _logger(config_yaml: str) -> Any:
    return build(OmegaConf.to_container(OmegaConf.create(config_yaml)), {})


def swept_values(config: DictConfig) -> list[list[str]] | None:
    """The overrides of a sweep, each with all its values; None for a sweeper that decides on the
    way.
    """
    if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
        return None
    sweeper_overrides = [
        f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()
    ]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    task = override_words(config.hydra)
    # where a key is given twice, the last override counts
    last_override = {
        override.get_key_element(): override
        for override in parser.parse_overrides([*sweeper_overrides, *task])
    }
    return [alternatives(override) for override in last_override.values()]


def check_points(
    jobs: list[list[str]], config_name: str, hydra_words: Sequence[str] = ()
) -> list[DictConfig]:
    """Exit with a message unless the points of a sweep can be measured, as far as that is known
    without weights.

    hydra_words: the command's overrides of Hydra itself. Returns the configurations that were
    looked at: of all points, or in a large sweep those of `points_to_check`.
    """
    configs: list[DictConfig] = []
    # of the points that were checked as a whole, the overrides that may change their data
    checked_data: set[tuple[str, ...]] = set()
    for words in points_to_check(jobs):
        changed = [word for word, values in zip(words, jobs, strict=True) if word != values[0]]
        try:
            config = compose_config(list(words), config_name)
        except (UserError, HydraException, OmegaConfBaseException) as error:
            refuse(_error_of_point(changed, error))
        if hydra_words:
            config.hydra.overrides.hydra = list(hydra_words)
        refusing_points(partial(require_own_files, config), changed)
        data_words = tuple(word for word in words if not word.startswith(KEEPS_DATA))
        if data_words in checked_data and not replays(config.policy):
            refusing_points(partial(require_decoder, config), changed)
        else:
            check_point(config, changed, words)
            checked_data.add(data_words)
        configs.append(config)
    return configs


def points_to_check(jobs: list[list[str]]) -> list[tuple[str, ...]]:
    """The points of a sweep to be checked before it starts, the first one first.

    All of them if they are few. Of many, each value of each key beside the first values of the
    others, and all combinations of the groups' files.
    """
    first_point = tuple(values[0] for values in jobs)
    if math.prod(map(len, jobs)) <= MOST_CHECKED:
        return list(itertools.product(*jobs))
    groups = [values if "." not in key_of(values[0]) else values[:1] for values in jobs]
    single = [
        (*first_point[:index], value, *first_point[index + 1 :])
        for index, values in enumerate(jobs)
        for value in values[1:]
    ]
    return list(
        dict.fromkeys(
            [first_point, *single, *itertools.islice(itertools.product(*groups), MOST_CHECKED)]
        )
    )


def _error_of_point(changed: Sequence[str], error: BaseException) -> BaseException:
    """The error with what tells a point from the sweep's first one."""
    return UserError(f"{' '.join(changed)}: {plain_message(error)}") if changed else error


def check_point(
    config: DictConfig, changed: Sequence[str] = (), words: Sequence[str] = ()
) -> Point:
    """Exit with a message unless the point can be measured. changed: its overrides that the first
    point has not. words: all of its overrides; none: those that its configuration has.
    """

    def check() -> Point:
        Sweep(sweep_folder(config)).all_results()  # raises for results of a newer version
        logger(config)
        require_files(config)
        require_own_files(config)
        if "hydra" in config:
            require_same_folder(config.hydra)
            require_effect(words or override_words(config.hydra), config, config.hydra)
        typed(ReportSpec, config.report, "report")
        point = prepare(without_hydra(config))
        # the prompts are those of the first point
        unchanged = changed and all(map(KEEPS_PROMPTS.match, changed))
        if not unchanged or replays(config.policy):  # a file that answers them may be another one
            # raises for what does not fit
            requests_of(point, [example for example in point.examples if example.continues is None])
        return point

    return refusing_points(check, changed)


def require_files(config: DictConfig) -> None:
    """Raise UserError where a command line leaves a group without a file, as ~measure does: its
    schema would fill in the values, and say so nowhere.
    """
    if "hydra" not in config:  # composed in Python, with every group
        return
    for group in SCHEMAS:
        if group not in config.hydra.runtime.choices:
            raise UserError(
                f"{group} has no file, as ~{group} leaves it out; choose one of its files:"
                f" {group}=NAME"
            )


def refusing_points(check: Callable[[], T], changed: Sequence[str] = ()) -> T:
    """What the check returns. Exits with a message if it finds that a point cannot be measured."""
    status_line.enter("checking texts and checkpoints")
    try:
        return check()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        refuse(_error_of_point(changed, error))
    except Exception:  # a bug of ours: Hydra would only warn and continue
        status_line.leave()
        traceback.print_exc()
        sys.exit(FAILED_POINTS)


def require_one_folder(config: DictConfig, points: Sequence[DictConfig]) -> None:
    """Raise UserError for points of a sweep whose results would not be in the folder that it
    reports.
    """
    folder = sweep_folder(config)
    for point in points:
        OmegaConf.copy_cache(config, point)  # ${now:…} is one time for all points, as in Hydra
        if sweep_folder(point) != folder:
            raise UserError(
                f"all points of a sweep go to one folder and one report, got name={point.name}"
                f" beside {folder}; give one name=NAME, or a command for each"
            )


def require_own_values(config: DictConfig, points: Sequence[DictConfig]) -> None:
    """Raise UserError for a file, such as an experiment, that is one of several to sweep over and has
    lists of values itself: Hydra sweeps over those of a file that all points have, and drops others.
    Lists whose keys the command line gives, too, are meant to be dropped.
    """
    params, words = config.hydra.sweeper.get("params") or {}, override_words(config.hydra)
    kept_keys = {*params, *(key_of(word).lstrip("+") for word in words)}
    common_words = [*words, *(f"{key}={value}" for key, value in params.items())]
    for point in points:
        if set(point.hydra.sweeper.get("params") or ()) <= kept_keys:
            continue
        # an experiment also chooses the files of other groups, of which the command says nothing
        files = [
            word
            for word in override_words(point.hydra)
            if word not in common_words and key_of(word).lstrip("+") in point.hydra.runtime.choices
        ]
        groups = [key_of(word).lstrip("+") for word in files]
        raise UserError(
            f"{' '.join(files)} has lists of values of its own, which a sweep over several files"
            f" drops; give a command for each {' and '.join(groups)}, with one name=NAME for one"
            " report"
        )


def require_hydras_folder(config: DictConfig, mode: str) -> None:
    """Raise UserError where Hydra's own folder is not that of the results: only its own files, such
    as `multirun.yaml`, would be there, and folders without any. mode: "run" or "sweep".
    """
    values = OmegaConf.to_container(config.hydra[mode], resolve=False)
    folder = sweep_folder(config)
    if Path(config.hydra[mode].dir).absolute() != folder.absolute():
        key = "dir"
    elif values.get("subdir", ".") != ".":  # only sweeps have one
        key = "subdir"
    else:
        return
    raise UserError(
        f"hydra.{mode}.{key}={values[key]} would hold no result: they go to {folder}; leave it out,"
        " name=NAME says where they go"
    )


def require_gpus(config: DictConfig, points: Sequence[DictConfig]) -> None:
    """Raise UserError where `hydra/launcher=gpus` cannot give these points a GPU each."""
    if not config.hydra.launcher._target_.startswith(PLUGIN):
        return
    if not visible_gpus():
        raise UserError(
            "hydra/launcher=gpus gives each point a GPU, and none is visible; leave it out, or"
            " name some in CUDA_VISIBLE_DEVICES"
        )
    for point in points:
        if point.runtime.device_map is not None:
            raise UserError(
                f"runtime.device_map={point.runtime.device_map} spreads a target over all GPUs, and"
                " hydra/launcher=gpus shows each point one; leave one of them out"
            )


def share_graph_regime(config: DictConfig, points: Sequence[DictConfig]) -> None:
    """Run all points of a sweep without CUDA graphs if one of its policies has to, by an override
    of every point.

    Else points with graphs and points without would stand side by side, whose speeds cannot be
    compared. Where `runtime.compile` is given or swept over, it stays.
    """
    if any(str(point.runtime.compile) != "auto" for point in points):
        return
    without = list(
        dict.fromkeys(point.policy.name for point in points if not runs_in_graphs(point.policy))
    )
    if not without or not any(_decodes_in_graphs(point) for point in points):
        return
    with read_write(config.hydra.overrides):
        config.hydra.overrides.task.append(NO_GRAPHS)
    console.print(
        f"CUDA graphs are off for all points of this sweep, as {', '.join(without)} runs without: "
        f"speeds are compared in one regime ({NO_GRAPHS})"
    )


def _decodes_in_graphs(config: DictConfig) -> bool:
    specs = Specs.of(config)
    return resolve_auto(specs.runtime, config.policy, specs.pair).compile == "graphs"
