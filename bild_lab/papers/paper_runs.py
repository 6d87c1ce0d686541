"""What the papers' commands consist of and need: downloads, memory by closed forms, and an estimate
of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import require_choice
from bild_lab.lab.config.compose import (
    HYDRA_VERSION,
    config_dir,
    in_our_application,
    without_other_applications,
)
from bild_lab.papers.published import load_published, published_names
from bild_lab.screening.candidates import read_lists

HUB = Path(__file__).parent / "hub.yaml"
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "auto": 4}  # of auto the most
PROMPT = 512  # tokens, where nothing else is known
CONTEXT_GB = 1.0  # what CUDA, its libraries and activations take
GPUS = {  # memory in GB, and how fast it is read, in GB/s, as their makers say
    "t4": (16, 320),
    "l4": (24, 300),
    "a10": (24, 600),
    "a10g": (24, 600),
    "a40": (48, 696),
    "l40s": (48, 864),
    "v100": (16, 900),
    "rtx3090": (24, 936),
    "rtx4090": (24, 1008),
    "a100": (80, 2039),
    "h100": (80, 3350),
    "h200": (141, 4800),
}
READ_SHARE = 0.6  # of that speed that decoding reaches
LAUNCHES_S = 100e-6  # of the host, for each layer of a forward, eager
SAVED = 1.5  # a policy's time is about the baseline's over this
WARMUP = 3
# of a record: forwards of target and drafter for each token of a text, and seconds of the host for
# each token of each point (docs/results/translation.md, What screening costs)
RECORDED_FORWARDS = (1.1, 1.4)
REPLAY_S = 5e-4
# for the estimates of a machine without a GPU, or with one that is not in the list
ASSUMED_GPU = "a100"
ALL = "all"
CHOICES = ("experiment", "scale", "match")  # groups that decide what is swept
# groups of which each choice is a setting of its own
SETTINGS = ("pair", "dataset", "model", "template")
# others bear their script's name
APPLICATIONS = {"run.py": "config", "scripts/generate_calibration.py": "calibration"}
MEASURES = ("config", "match_rates")  # configurations whose points are decoded one by one
RECORDS = ("screen",)  # those whose points are decoded over a record
COUNTING = "module=ngram"  # of a training that counts with a tokenizer
# of trained weights: with gradients, and moments, which Adafactor factors
COPIES = {"adafactor": 2, "adamw": 4}
DEVICE_MAPS = ("runtime.device_map", "train.device_map", "model.device_map")
# of alignment
NO_DATA = {"hub_id": None, "limit": None, "max_source_tokens": None, "name": "answers"}

Words = tuple[str, ...]  # of a command line


@dataclass(frozen=True)
class RunSetting:
    """What the points of a run have in common: models, data, precision and lengths.

    points: how many there are, 0 for a command that answers or trains. at_once: texts that a
    command that answers or records decodes together, else 0. templates: in how many each is asked. copies: of
    the weights, in memory. spread: over all GPUs.
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
    copies: int = 1
    spread: bool = False


@dataclass(frozen=True)
class Needs:
    """What one setting needs. download_gb: by hub id. examples, hours (on this GPU): None where they are
    not known.
    """

    setting: RunSetting
    download_gb: Mapping[str, float]
    weights_gb: float
    cache_gb: float
    examples: int | None
    hours: float | None

    @property
    def memory_gb(self) -> float:
        return self.weights_gb + self.cache_gb + CONTEXT_GB


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
    group_choices = tuple(word for word in overrides if word.partition("=")[0] in CHOICES)
    swept = composed(application, group_choices).hydra.sweeper.get("params") or {}
    return read_lists(
        [*group_choices, *(f"{key}={value}" for key, value in swept.items()), *overrides]
    )


def replaced_words(words: Words, changes: Sequence[str]) -> Words:
    """The command line with these KEY=VALUE in place of those with the keys that it has."""
    keys = {word.partition("=")[0] for word in changes}
    unchanged = (word for word in words if "=" not in word or word.partition("=")[0] not in keys)
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
    pair, trained = cfg.get("pair"), cfg.get("train")
    model_path = cfg.model.get("path") if "model" in cfg else None
    if "config" in cfg.get("model", {}):  # of random weights
        model_path = f"outputs/{cfg.name}/checkpoint"
    models = (
        [model_path]
        if model_path or pair is None
        else [pair.target, pair.draft, pair.get("second_draft")]
    )
    # released heads draft beside a target, as a small model does
    if (heads := OmegaConf.select(cfg, "policy.heads")) in hub()["models"]:
        models.append(heads)
    frozen = trained is None or "answers" in cfg  # of conf/shared/frozen.yaml
    chat_templates = cfg.dataset.get("chat_template") if "dataset" in cfg else None
    return RunSetting(
        target=models[0],
        drafts=tuple(model for model in models[1:] if model is not None),
        dataset=OmegaConf.to_container(cfg.dataset) if "dataset" in cfg else NO_DATA,
        dtype=cfg.runtime.dtype if trained is None else "bfloat16" if frozen else "float32",
        max_new_tokens=cfg.decoding.max_new_tokens
        if "decoding" in cfg
        else trained.max_target_tokens,
        repeats=cfg.measure.repeats if "measure" in cfg else 1,
        points=points,
        # of conf/calibration.yaml, or of conf/screen.yaml
        at_once=cfg.screen.batch if "screen" in cfg else cfg.get("batch_size", 0),
        templates=1 if isinstance(chat_templates, str | None) else len(chat_templates),
        copies=1 if frozen else COPIES[trained.optimizer],
        spread=any(OmegaConf.select(cfg, key) for key in DEVICE_MAPS),
    )


def unverified() -> list[str]:
    """Ids that were seen nowhere."""
    return [
        name
        for kind in ("models", "datasets")
        for name, card in hub()[kind].items()
        if card["seen"] is None
    ]


def needs(setting: RunSetting, gpu: str) -> Needs:
    """What the setting takes, on this GPU. Raises UserError for an unknown one."""
    require_choice("gpu", gpu, GPUS)
    sizes = {
        name: size_of(name) for name in (setting.target, *setting.drafts) if name in hub()["models"]
    }
    stored = {name: hub()["models"][name]["stored"] for name in sizes}
    download = {name: sizes[name].weights * width / 1e9 for name, width in stored.items() if width}
    data, hours = setting.dataset, None
    card = hub()["datasets"].get(data["hub_id"], {}) if data.get("path") is None else {}
    rows = [
        count
        for count in (data["limit"], card.get("splits", {}).get(data.get("split")))
        if count is not None
    ]
    examples = min(rows, default=None)
    if card:
        download[data["hub_id"]] = card["mb"] / 1e3
        tokens = min(card["tokens"], setting.max_new_tokens)
        if setting.target in sizes and examples is not None and setting.points and setting.at_once:
            hours = record_hours(list(sizes.values()), setting, gpu, examples, tokens)
        elif setting.target in sizes and examples is not None:
            hours = _hours(
                sizes[setting.target],
                setting,
                gpu,
                examples,
                tokens,
            )
    prompt = setting.dataset["max_source_tokens"] or PROMPT
    cached = sum(size.cache for size in sizes.values()) * (prompt + setting.max_new_tokens)
    gigabytes = BYTES[setting.dtype] / 1e9
    weights = setting.copies * sum(size.weights for size in sizes.values())
    return Needs(setting, download, weights * gigabytes, cached * gigabytes, examples, hours)


def _hours(target: Size, setting: RunSetting, gpu: str, examples: int, tokens: int) -> float | None:
    """Method and baseline decode every example in turn; warm-up is decoded too. Answers are decoded
    many at once.

    tokens: of a text. None for a training.
    """
    if setting.points:
        forwards = setting.points * (setting.repeats * examples + WARMUP) * tokens * (1 + 1 / SAVED)
    elif setting.at_once:
        forwards = examples * setting.templates * tokens / setting.at_once
    else:
        return None
    return forwards * _forward_s(target, setting, gpu) / 3600


def record_hours(
    models: Sequence[Size], setting: RunSetting, gpu: str, examples: int, tokens: int
) -> float:
    """Of a screening: its models run where a context is new, many texts at once, and the host
    decodes every point over what they scored.

    models: the target first. tokens: of a text.
    """
    forwards_s = sum(
        forwards * _forward_s(model, setting, gpu)
        for forwards, model in zip(RECORDED_FORWARDS, models, strict=False)
    )
    token_s = forwards_s / setting.at_once + setting.points * REPLAY_S
    return examples * tokens * token_s / 3600


def _forward_s(model: Size, setting: RunSetting, gpu: str) -> float:
    """Seconds of a forward, which reads the weights, or launches its kernels if that takes
    longer.
    """
    read_s = model.read * BYTES[setting.dtype] / (READ_SHARE * GPUS[gpu][1] * 1e9)
    return max(read_s, LAUNCHES_S * model.layers)


class Size(NamedTuple):
    """Of a model: its weights, those that a token reads, a token's values in the cache, and decoder
    layers.

    The last two are 0 where only the number of weights is known.
    """

    weights: int
    read: int
    cache: int
    layers: int


@cache
def size_of(model: str) -> Size:
    from transformers import AutoConfig  # late: it takes a second to load

    from bild_lab.lab.measure.cost import dimensions

    card = hub()["models"][model]
    if card["outline"] is None:
        return Size(card["weights"] * 10**6, card["weights"] * 10**6, 0, 0)
    values = dict(hub()["outlines"][card["outline"]])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    sizes, depth = dimensions(config), config.num_hidden_layers
    # T5 v1.0 has one matrix
    embedding = 0 if config.model_type == "t5" else sizes.dim * config.vocab_size
    return Size(
        sizes.weights + embedding,
        sizes.layers.values + sizes.head.values,
        depth * sizes.cache_width,
        depth,
    )


def describe_needs(run_needs: Sequence[Needs], gpu: str) -> str:
    """What a command needs, in a few words; empty if nothing is known."""
    if not run_needs:
        return ""
    largest = max(run_needs, key=lambda need: need.memory_gb)
    gigabytes = downloads(run_needs)
    parts = [f"{sum(gigabytes.values()):.1f} GB to download"] if gigabytes else []
    if largest.weights_gb:
        gpus = math.ceil(largest.memory_gb / GPUS[gpu][0])
        fits = "fits" if gpus == 1 else f"does not fit: runtime.device_map=auto over {gpus} GPUs"
        parts.append(f"{largest.memory_gb:.1f} GB of memory ({fits} in {GPUS[gpu][0]} GB)")
        hours = hours_of(run_needs)
        parts.append("time unknown" if hours is None else f"about {hours:.1f} h")
    return ", ".join(parts)


def hours_of(run_needs: Sequence[Needs]) -> float | None:
    """Of a command with these settings; None if it is not known of each."""
    known = [need.hours for need in run_needs]
    return None if None in known or not known else sum(known)


def downloads(run_needs: Sequence[Needs]) -> dict[str, float]:
    """GB to download, each id once."""
    return {name: size for need in run_needs for name, size in need.download_gb.items()}
