"""What the papers' runs need before they start: downloads, memory by closed forms, and an estimate of the time."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.config import compose_config, config_dir
from bild_lab.lab.screening.candidates import read_lists
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
DECODES = {"run.py": "config", "scripts/match_rates.py": "match_rates"}  # by these files
CHOICES = ("experiment", "scale", "match")  # groups that decide what is swept
SETTINGS = ("pair", "dataset", "model", "template")  # groups of which each choice is a setting of its own


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
    several = [values for key, values in lists.items() if key.split(".")[0] in SETTINGS]
    knobs = [values for values in lists.values() if values not in several]
    fixed, points = [*chosen, *(values[0] for values in knobs)], math.prod(map(len, knobs))
    return [_setting(compose_config([*fixed, *words], application), points) for words in product(*several)]


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
    return Setting(
        target=models[0],
        drafts=tuple(each for each in models[1:] if each is not None),
        dataset=OmegaConf.to_container(cfg.dataset),
        dtype=cfg.runtime.dtype,
        max_new_tokens=cfg.decoding.max_new_tokens,
        repeats=cfg.measure.repeats if "measure" in cfg else 1,
        points=points,
    )


def on_hub(setting: Setting) -> Iterable[str]:
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
    sizes = {one: size_of(one) for one in on_hub(setting)}
    stored = {one: hub()["models"][one]["stored"] for one in sizes}
    download = {one: sizes[one].weights * width / 1e9 for one, width in stored.items() if width}
    examples, hours = setting.dataset["limit"] or 10**9, None
    card = hub()["datasets"].get(setting.dataset["hub_id"])
    if card is not None:
        download[setting.dataset["hub_id"]] = card["mb"] / 1e3
        examples = min(examples, card["splits"][setting.dataset["split"]])
        if setting.target in sizes:
            tokens = min(card["tokens"], setting.max_new_tokens)
            hours = _hours(sizes[setting.target], setting, gpu, examples * tokens, WARMUP * tokens)
    prompt = setting.dataset["max_source_tokens"] or PROMPT
    cached = sum(size.cache for size in sizes.values()) * (prompt + setting.max_new_tokens)
    gigabytes = BYTES[setting.dtype] / 1e9
    weights = sum(size.weights for size in sizes.values())
    return Needs(setting, download, weights * gigabytes, cached * gigabytes, examples, hours)


def _hours(target: Size, setting: Setting, gpu: str, tokens: int, warm_up: int) -> float:
    """Method and baseline decode every example in turn; warm-up is decoded too."""
    read_s = target.read * BYTES[setting.dtype] / (READ_SHARE * GPUS[gpu][1] * 1e9)
    decoded = setting.points * (setting.repeats * tokens + warm_up) * (1 + 1 / SAVED)
    return decoded * max(read_s, LAUNCHES_S * target.layers) / 3600


class Size(NamedTuple):
    """Of a model: its weights, those that a token reads, a token's values in the cache, and decoder layers.

    The last two are 0 where only the number of weights is known.
    """

    weights: int
    read: int
    cache: int
    layers: int


@cache
def size_of(model: str) -> Size:
    """Of a model of the hub."""
    from transformers import AutoConfig  # late: it takes a second to load

    from bild_lab.lab.analysis.cost import dimensions

    card = hub()["models"][model]
    if card["outline"] is None:
        return Size(card["weights"] * 10**6, card["weights"] * 10**6, 0, 0)
    values = dict(hub()["outlines"][card["outline"]])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    sizes, depth = dimensions(config), config.num_hidden_layers
    embedding = 0 if config.model_type == "t5" else sizes.dim * config.vocab_size  # T5 v1.0 has one matrix
    return Size(sizes.weights + embedding, sizes.layers.values + sizes.head.values, depth * sizes.cache_width, depth)


def sentence(needed: Needs, gpu: str) -> str:
    """One line on a setting."""
    setting, room = needed.setting, GPUS[gpu][0]
    gpus = math.ceil(needed.memory_gb / room)
    fits = "fits" if gpus == 1 else f"does not fit: runtime.device_map=auto over {gpus} GPUs"
    time = "time unknown" if needed.hours is None else f"about {needed.hours:.1f} h"
    models = " + ".join([setting.target, *setting.drafts])
    return (
        f"{models} on {setting.dataset['name']}, {setting.dtype}: {setting.points} points of {needed.examples} texts, "
        f"{needed.memory_gb:.1f} GB of memory ({fits} in {room} GB), {time}"
    )


def downloads(several: Sequence[Needs]) -> dict[str, float]:
    """GB to download, each id once."""
    return {name: size for each in several for name, size in each.download_gb.items()}
