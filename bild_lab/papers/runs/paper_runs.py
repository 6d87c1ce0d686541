"""What the papers' commands consist of: their configurations, models, data and trainings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import require_choice
from bild_lab.lab.config.command_line import key_of
from bild_lab.lab.config.compose import (
    HYDRA_VERSION,
    config_dir,
    in_our_application,
    without_other_applications,
)
from bild_lab.papers.published import load_published, published_names
from bild_lab.papers.runs.training_needs import BITA, FINE_TUNING, LAYER_HEADS, Training
from bild_lab.screening.candidates import read_lists

HUB = Path(__file__).parent / "hub.yaml"
ALL = "all"
SHARED = "shared"  # the model's own head, in conf/match_rates.yaml
CHOICES = ("experiment", "scale")  # groups that decide what is swept
# groups of which each choice is a setting of its own
SETTINGS = ("pair", "dataset", "model", "template")
# others bear their script's name
APPLICATIONS = {"run.py": "config", "scripts/generate_calibration.py": "calibration"}
MEASURES = ("config", "match_rates")  # configurations whose points are decoded one by one
RECORDS = ("screen",)  # those whose points are decoded over a record
COUNTING = "module=ngram"  # of a training that counts with a tokenizer
DEVICE_MAPS = ("runtime.device_map", "train.device_map", "model.device_map")
# of alignment
NO_DATA = {"hub_id": None, "limit": None, "max_source_tokens": None, "name": "answers"}

Words = tuple[str, ...]  # of a command line


@dataclass(frozen=True)
class RunSetting:
    """What the points of a run have in common: models, data, precision and lengths.

    points: how many there are, 0 for a command that answers or trains. at_once: texts that a
    command that answers or records decodes together, else 0. templates: in how many each is asked.
    heads: of inner layers that are read beside the target's. training: None for a command that does
    not train. outline: the configuration of a model with random weights, else None. spread: over
    all GPUs.
    """

    target: str | None
    drafts: tuple[str, ...]
    dataset: Mapping[str, Any]
    dtype: str
    max_new_tokens: int
    repeats: int
    points: int
    at_once: int = 0
    templates: int = 1
    heads: int = 0
    training: Training | None = None
    outline: Mapping[str, Any] | None = None
    spread: bool = False


@cache
def hub() -> dict[str, Any]:
    """The models, outlines and data sets of hub.yaml."""
    return OmegaConf.to_container(OmegaConf.load(HUB))


def items_of(name: str) -> list[str]:
    """The items that `bild/fig4`, `bild_fig4` or `all` names, or the experiment of that name that
    is no item.

    Raises UserError for others.
    """
    if name == ALL:
        return published_names()
    if (item := name.replace("/", "_")) in published_names():
        return [item]
    if not (config_dir() / "experiment" / f"{name}.yaml").is_file():
        folder = config_dir() / "experiment"
        experiments = [
            file.relative_to(folder).with_suffix("").as_posix()
            for file in sorted(folder.rglob("*.yaml"))
        ]
        require_choice("item", name, dict.fromkeys([ALL, *published_names(), *experiments]))
    return [name]


def commands(item: str, scale: str) -> list[str]:
    """What an item's own file lists for a scale; for any other experiment, its own command."""
    if item in published_names():
        return load_published(item).commands[scale]
    return [f"python run.py experiment={item}" + ("" if scale == "paper" else f" scale={scale}")]


@contextmanager
def found_configuration() -> Iterator[None]:
    """Hydra knows the project's configuration, once for many compositions."""
    if in_our_application():
        yield
        return
    with without_other_applications(), initialize_config_dir(str(config_dir()), **HYDRA_VERSION):
        yield


def application_of(script: str) -> str | None:
    """The configuration of a script; None for one that takes no KEY=VALUE of a configuration."""
    name = APPLICATIONS.get(script, Path(script).stem)
    return name if (config_dir() / f"{name}.yaml").is_file() else None


def configurations(words: Words) -> list[DictConfig]:
    """The configurations of a command, one for each of its settings, with the first value of every
    other list.

    Empty for a script without a configuration.
    """
    if (application := application_of(words[1])) is None:
        return []
    lists = lists_of(words)
    choices = [
        values if key.split(".")[0] in SETTINGS else values[:1] for key, values in lists.items()
    ]
    return [composed(application, choice) for choice in product(*choices)]


@cache
def lists_of(words: Words) -> dict[str, Words]:
    """The values of each key of a command, as overrides, those that its experiment sweeps over
    included.
    """
    if (application := application_of(words[1])) is None:
        return {}
    overrides = [word for word in words[2:] if "=" in word]
    group_choices = tuple(word for word in overrides if key_of(word) in CHOICES)
    swept = composed(application, group_choices).hydra.sweeper.get("params") or {}
    return read_lists(
        [*group_choices, *(f"{key}={value}" for key, value in swept.items()), *overrides]
    )


def replaced_words(words: Words, changes: Sequence[str]) -> Words:
    """The command line with these KEY=VALUE in place of those with the keys that it has."""
    keys = set(map(key_of, changes))
    unchanged = (word for word in words if "=" not in word or key_of(word) not in keys)
    return (*unchanged, *changes)


@cache
def composed(application: str, words: Words) -> DictConfig:
    """The configuration `conf/APPLICATION.yaml` with these overrides, Hydra's own part included."""
    with found_configuration():
        return compose(application, list(words), return_hydra_config=True)


def settings_of(words: Words) -> list[RunSetting]:
    """The settings that a command measures, answers or trains in.

    A command that counts with a tokenizer or draws has none.
    """
    if COUNTING in words:
        return []
    knobs = (values for key, values in lists_of(words).items() if key.split(".")[0] not in SETTINGS)
    has_points = application_of(words[1]) in (*MEASURES, *RECORDS)
    points = math.prod(map(len, knobs)) if has_points else 0
    return [setting_of(cfg, points) for cfg in configurations(words)]


def setting_of(cfg: DictConfig, points: int) -> RunSetting:
    """What a configuration's models, data and lengths are."""
    trained = cfg.get("train")
    outline = None
    if "config" in cfg.get("model", {}):  # of random weights
        outline = {**OmegaConf.to_container(cfg.model.config), "vocab_size": cfg.model.vocabulary}
    target, *drafts = _models_of(cfg)
    chat_templates = cfg.dataset.get("chat_template") if "dataset" in cfg else None
    return RunSetting(
        target=target,
        drafts=tuple(draft for draft in drafts if draft is not None),
        dataset=OmegaConf.to_container(cfg.dataset) if "dataset" in cfg else NO_DATA,
        dtype=_dtype_of(cfg),
        max_new_tokens=cfg.decoding.max_new_tokens
        if "decoding" in cfg
        else trained.max_target_tokens,
        repeats=cfg.measure.repeats if "measure" in cfg else 1,
        points=points,
        # of conf/calibration.yaml, or of conf/screen.yaml
        at_once=cfg.screen.batch if "screen" in cfg else cfg.get("batch_size", 0),
        templates=1 if isinstance(chat_templates, str | None) else len(chat_templates),
        heads=len(cfg.layers or ())
        if cfg.get("heads", SHARED) != SHARED and trained is None
        else 0,
        training=None if trained is None else training_of(cfg),
        outline=outline,
        spread=any(OmegaConf.select(cfg, key) for key in DEVICE_MAPS),
    )


def _models_of(cfg: DictConfig) -> list[str | None]:
    """The target, then what drafts beside it: small models, and released heads."""
    if "config" in cfg.get("model", {}):  # of random weights
        models = [f"outputs/{cfg.name}/checkpoint"]
    elif OmegaConf.select(cfg, "model.path") or cfg.get("pair") is None:
        models = [OmegaConf.select(cfg, "model.path")]
    else:
        models = [cfg.pair.target, cfg.pair.draft, cfg.pair.get("second_draft")]
    heads = OmegaConf.select(cfg, "policy.heads")
    return [*models, heads] if heads in hub()["models"] else models


def _dtype_of(cfg: DictConfig) -> str:
    """The precision of the weights that run, or stay frozen beside what is trained."""
    if cfg.get("train") is None:
        return cfg.runtime.dtype
    return "bfloat16" if "answers" in cfg else "float32"  # answers: of conf/shared/frozen.yaml


def training_of(cfg: DictConfig) -> Training:
    """How a configuration with `train` trains."""
    recipe, module = cfg.train, {}
    if "bita" in cfg:
        kind, module = BITA, OmegaConf.to_container(cfg.bita)
    elif "module" in cfg:
        kind, module = cfg.module.name, OmegaConf.to_container(cfg.module)
    elif "layers" in cfg:
        kind, module = LAYER_HEADS, {"layers": list(cfg.layers or ()), "rank": cfg.heads.rank}
    else:
        kind = FINE_TUNING if OmegaConf.select(cfg, "align.loss") is None else "distillation"
    rates = recipe.learning_rate
    return Training(
        kind=kind,
        steps=recipe.max_steps,
        passes=cfg.get("passes", 1),
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        optimizer=recipe.optimizer,
        target_tokens=recipe.max_target_tokens,
        all_tokens=recipe.get("max_tokens"),
        trainings=len(rates) if OmegaConf.is_list(rates) else 1,
        evaluate_every=recipe.evaluate_every,
        evaluated=OmegaConf.select(cfg, "validation.limit", default=0) or 0,
        loss=recipe.get("loss", "last"),
        module=module,
    )


def unverified() -> list[str]:
    """Ids that were seen nowhere."""
    return [
        name
        for kind in ("models", "datasets")
        for name, card in hub()[kind].items()
        if card["seen"] is None
    ]
