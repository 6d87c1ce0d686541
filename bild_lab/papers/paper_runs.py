"""What the papers' runs need before they start: downloads, memory by closed forms, and an estimate of the time."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.config import compose_config, config_dir
from bild_lab.lab.screening.space import read_lists
from bild_lab.papers.published import load_published, published_names

HUB = Path(__file__).parent / "hub.yaml"
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
PROMPT = 512  # tokens, where nothing else is known
CONTEXT_GB = 1.0  # what CUDA, its libraries and activations take
GPUS = {  # memory in GB, and how fast it is read, in GB/s, as their makers say
    "t4": (16, 320),
    "l4": (24, 300),
    "a10": (24, 600),
    "a100": (80, 2039),
    "h100": (80, 3350),
    "h200": (141, 4800),
}
READ_SHARE = 0.6  # of that speed that decoding reaches
LAUNCHES_S = 100e-6  # of the host, for each layer of a forward, eager
SAVED = 1.5  # a policy's time is about the baseline's over this
WARMUP = 3
DECODES = {"run.py": "config", "scripts/match_rates.py": "match_rates", "scripts/screen.py": "screen"}  # by these files
CHOICES = ("experiment", "scale", "match")  # groups that decide what is swept
MODELS_AND_DATA = ("pair", "dataset", "model", "template")
COLUMN_KEYS = ("source_column", "input_column", "reference_column", "id_column", "category_column")


@dataclass(frozen=True)
class Setting:
    """What the points of a run have in common: models, data, precision and lengths. points: how many there are."""

    target: str
    drafts: tuple[str, ...]
    dataset: Mapping[str, Any]
    dtype: str
    max_new_tokens: int
    repeats: int
    points: int


@dataclass(frozen=True)
class Needs:
    """Of one setting. download_gb: by hub id. hours: on this GPU, None where it is not known how long it takes."""

    setting: Setting
    download_gb: Mapping[str, float]
    weights_gb: float
    cache_gb: float
    examples: int
    hours: float | None

    @property
    def memory_gb(self) -> float:
        return self.weights_gb + self.cache_gb + CONTEXT_GB


@cache
def hub() -> dict[str, Any]:
    """The models, outlines and data sets of hub.yaml."""
    return OmegaConf.to_container(OmegaConf.load(HUB))


def commands(figure: str) -> list[str]:
    """What is run for a figure at the paper's scale, in order; for any other experiment, its own command."""
    if figure not in published_names():
        return [f"python run.py experiment={figure}"]
    return load_published(figure).commands["paper"]


def figures(name: str) -> list[str]:
    """The figures that a word names: one, or all; or one experiment. Raises UserError for others."""
    if name == "all":
        return published_names()
    if not (config_dir() / "experiment" / f"{name}.yaml").is_file():
        load_published(name)
    return [name]


def settings_of(command: str) -> list[Setting]:
    """The settings that a command measures. Commands that train or count have none.

    Raises UserError for an experiment on checkpoints of your own.
    """
    _, script, *words = shlex.split(command)
    if script not in DECODES:
        return []
    application, given = DECODES[script], [word for word in words if "=" in word]
    chosen = [word for word in given if word.partition("=")[0] in CHOICES]
    lists = read_lists([*_swept(application, chosen), *(word for word in given if word not in chosen)])
    several = [values for key, values in lists.items() if key.split(".")[0] in MODELS_AND_DATA]
    points = math.prod(len(values) for values in lists.values() if values not in several)
    fixed = [values[0] for values in lists.values() if values not in several]
    return [
        _setting(compose_config([*chosen, *fixed, *models_and_data], application), points)
        for models_and_data in product(*several)
    ]


def _swept(application: str, chosen: Sequence[str]) -> list[str]:
    """The lists that an experiment sweeps over."""
    if not GlobalHydra.instance().is_initialized():
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            return _swept(application, chosen)
    hydra = compose(application, list(chosen), return_hydra_config=True).hydra
    return [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]


def _setting(cfg: DictConfig, points: int) -> Setting:
    pair = cfg.get("pair")
    models = [cfg.model.path] if pair is None else [pair.target, pair.draft, pair.get("second_draft")]
    if models[0] is None:
        raise UserError("this experiment takes checkpoints of your own, so what it needs is not known; see its file")
    screened = {"split": cfg.screen.select} if "screen" in cfg else {}
    return Setting(
        target=models[0],
        drafts=tuple(each for each in models[1:] if each is not None),
        dataset={**OmegaConf.to_container(cfg.dataset), **screened},
        dtype=cfg.runtime.dtype,
        max_new_tokens=cfg.decoding.max_new_tokens,
        repeats=cfg.measure.repeats if "measure" in cfg else 1,
        points=points,
    )


def misspelt(setting: Setting) -> list[str]:
    """What the cards of the hub do not have, in sentences: ids, configurations, splits and columns."""
    found = [f"no checkpoint {one} is known" for one in _on_hub(setting) if one not in hub()["models"]]
    data = setting.dataset
    if data["hub_id"] is None:
        return found
    card = hub()["datasets"].get(data["hub_id"])
    if card is None:
        return [*found, f"no data set {data['hub_id']} is known"]
    named = data["hub_config"] or data["hub_data_dir"]
    if (named is None) == bool(card["configs"]) or (named is not None and named not in card["configs"]):
        found.append(f"{data['hub_id']} has the configurations {', '.join(card['configs']) or 'none'}, got {named}")
    if data["split"] not in card["splits"]:
        found.append(f"{data['hub_id']} has the splits {', '.join(card['splits'])}, got {data['split']}")
    for key in COLUMN_KEYS:
        value = data.get(key)
        columns = [] if value is None else [value] if isinstance(value, str) else value
        if columns and not set(columns) & set(card["columns"]):
            found.append(f"{data['hub_id']} has the columns {', '.join(card['columns'])}, got {key} {columns[0]}")
    return found


def _on_hub(setting: Setting) -> Iterable[str]:
    """Its checkpoints, but for folders that another command writes from nothing."""
    several = (setting.target, *setting.drafts)
    return (one for one in several if one in hub()["models"] or not one.startswith(("outputs/", "toy:")))


def unverified() -> list[str]:
    """Ids that were seen nowhere."""
    return [name for kind in ("models", "datasets") for name, card in hub()[kind].items() if card["seen"] is None]


def needs(setting: Setting, gpu: str) -> Needs:
    """What the setting takes, on this GPU. Raises UserError for an unknown one."""
    if gpu not in GPUS:
        raise UserError(f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}")
    models = {one: hub()["models"][one] for one in _on_hub(setting)}
    width = BYTES[setting.dtype]
    download = {name: _numbers(card) * card["stored"] / 1e9 for name, card in models.items() if card["stored"]}
    card = hub()["datasets"].get(setting.dataset["hub_id"])
    if card is not None:
        download[setting.dataset["hub_id"]] = card["mb"] / 1e3
    rows = math.inf if card is None else card["splits"][setting.dataset["split"]]
    examples = int(min(rows, setting.dataset["limit"] or math.inf, 10**9))
    known = setting.target in models
    return Needs(
        setting=setting,
        download_gb=download,
        weights_gb=sum(_numbers(card) for card in models.values()) * width / 1e9,
        cache_gb=sum(_cache_bytes(card, setting, width) for card in models.values()) / 1e9,
        examples=examples,
        hours=_hours(models[setting.target], setting, gpu, examples) if known and card is not None else None,
    )


def _hours(card: Mapping[str, Any], setting: Setting, gpu: str, examples: int) -> float:
    """Method and baseline decode every example in turn; warm-up is decoded too."""
    read_s = _decoder_numbers(card) * BYTES[setting.dtype] / (READ_SHARE * GPUS[gpu][1] * 1e9)
    launch_s = 0.0 if card["outline"] is None else LAUNCHES_S * _config(card["outline"]).num_hidden_layers
    tokens = min(hub()["datasets"][setting.dataset["hub_id"]]["tokens"], setting.max_new_tokens)
    texts = setting.points * (setting.repeats * examples + WARMUP) * (1 + 1 / SAVED)
    return texts * tokens * max(read_s, launch_s) / 3600


@cache
def _config(outline: str) -> Any:
    from transformers import AutoConfig  # late: it takes a second to load

    values = dict(hub()["outlines"][outline])
    return AutoConfig.for_model(values.pop("model_type"), **values)


@cache
def _dimensions(outline: str) -> Any:
    from bild_lab.lab.analysis.cost import dimensions

    return dimensions(_config(outline))


def _numbers(card: Mapping[str, Any]) -> int:
    """Weights, with the embedding; T5 v1.0 has one matrix for embedding and head."""
    if card["outline"] is None:
        return card["weights"] * 10**6
    sizes, config = _dimensions(card["outline"]), _config(card["outline"])
    tied = config.model_type == "t5"
    return sizes.weights + (0 if tied else sizes.dim * config.vocab_size)


def _decoder_numbers(card: Mapping[str, Any]) -> int:
    """What a token reads."""
    if card["outline"] is None:
        return card["weights"] * 10**6
    sizes = _dimensions(card["outline"])
    return sizes.layers.values + sizes.head.values


def _cache_bytes(card: Mapping[str, Any], setting: Setting, width: int) -> int:
    if card["outline"] is None:
        return 0
    sizes, depth = _dimensions(card["outline"]), _config(card["outline"]).num_hidden_layers
    prompt = setting.dataset["max_source_tokens"] or PROMPT
    tokens = prompt + setting.max_new_tokens
    return depth * sizes.cache_width * tokens * width


def sentence(needed: Needs, gpu: str) -> str:
    """One line on a setting."""
    setting, room = needed.setting, GPUS[gpu][0]
    fits = (
        "fits"
        if needed.memory_gb <= room
        else f"does not fit: runtime.device_map=auto over {math.ceil(needed.memory_gb / room)} GPUs"
    )
    time = "time unknown" if needed.hours is None else f"about {needed.hours:.1f} h"
    models = " + ".join([setting.target, *setting.drafts])
    return (
        f"{models} on {setting.dataset['name']}, {setting.dtype}: {setting.points} points of {needed.examples} texts, "
        f"{needed.memory_gb:.1f} GB of memory ({fits} in {room} GB), {time}"
    )


def downloads(several: Sequence[Needs]) -> dict[str, float]:
    """GB to download, each id once."""
    return {name: size for each in several for name, size in each.download_gb.items()}
