"""What the papers' commands need: downloads, memory by closed forms, and an estimate of the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from bild_lab.errors import require_choice
from bild_lab.papers.runs.paper_runs import RunSetting, hub
from bild_lab.papers.runs.training_needs import (
    ModelShape,
    TrainingMemory,
    shape_of,
    training_flops,
    training_memory,
)

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "auto": 4}  # of auto the most
PROMPT = 512  # tokens, where nothing else is known
ANSWER = 300  # tokens of a chat model's answer, where its data set is not known
CONTEXT_GB = 1.0  # what CUDA, its libraries and small tensors take
MOST_GPUS = 8  # of a node, over which a model may be spread
ROOM_SHARE = 0.9  # of a GPU's memory that rows at once are fitted into
# memory in GB, how fast it is read, in GB/s, and products in half precision with dense matrices, in
# TFLOP/s, as their makers say
GPUS = {
    "t4": (16, 320, 65),
    "l4": (24, 300, 121),
    "a10": (24, 600, 125),
    "a10g": (24, 600, 70),
    "a40": (48, 696, 150),
    "l40s": (48, 864, 362),
    "v100": (16, 900, 125),
    "rtx3090": (24, 936, 71),
    "rtx4090": (24, 1008, 165),
    "a100": (80, 2039, 312),
    "h100": (80, 3350, 989),
    "h200": (141, 4800, 989),
}
READ_SHARE = 0.6  # of the speed of memory that decoding reaches
# of the products that training reaches: BiTA's adapter of a 7B model, by its authors 7 hours on 32
# A100s, is 28 % if 1.2 million rows of 2,048 tokens go forward and back beside frozen weights
TRAINING_SHARE = 0.28
LAUNCHES_S = 100e-6  # of the host, for each layer of a forward, eager
# of the host, for each layer of a pass forward and back by modules, the optimizer's part included
TRAINING_LAUNCHES_S = 5e-3
MODULE_LAUNCHES_S = 1.5e-3  # of the host, for each layer of a forward by modules
# of a record: forwards of target and drafter for each token of a text, and seconds of the host for
# each token of each point
RECORDED_FORWARDS = (1.1, 1.4)
REPLAY_S = 5e-4
SAVED = 1.5  # a policy's time is about the baseline's over this
WARMUP = 3
# for the estimates of a machine without a GPU, or with one that is not in the list
ASSUMED_GPU = "a100"


@dataclass(frozen=True)
class Needs:
    """What one setting needs."""

    setting: RunSetting
    download_gb: dict[str, float]  # by hub id
    weights_gb: float  # of all models
    state_gb: float  # of a training, gradients and optimizer
    # of a row: a decoded text's caches, or what an example leaves for the backward pass; None where
    # it is not known
    row_gb: float | None
    rows: int  # at once, at most; fewer where the GPU of `room_gb` holds fewer
    room_gb: float
    examples: int | None  # None where it is not known
    hours: float | None  # None where it is not known
    # those that the hours are of; of a model that may be spread, as many as take the fewest
    # GPU-hours
    gpus: int = 1
    # of the models that draft, which stay whole on one GPU where the target is spread over several
    drafts_gb: float = 0.0
    node_gpus: int = MOST_GPUS  # of the machine, among which `gpus` is chosen

    @property
    def memory_gb(self) -> float:
        """GB of the memory of one GPU that holds everything."""
        return self.memory_on(1)

    def memory_on(self, gpus: int) -> float:
        """GB of the fullest GPU where the target's layers are spread over so many, with their
        weights and what rows leave in them, with as many rows as fit there, one at least.
        """
        return self._fixed_gb(gpus) + self.rows_on(gpus) * (self.row_gb or 0.0) / gpus

    def rows_on(self, gpus: int) -> int:
        """Rows at once; of a training a divisor of the most."""
        if not self.row_gb:
            return self.rows
        room_gb = ROOM_SHARE * self.room_gb - self._fixed_gb(gpus)
        fits = min(self.rows, max(1, int(room_gb * gpus / self.row_gb)))
        if self.setting.training is None:
            return fits
        return next(rows for rows in range(fits, 0, -1) if self.rows % rows == 0)

    def _fixed_gb(self, gpus: int) -> float:
        target_gb = self.weights_gb - self.drafts_gb
        return target_gb / gpus + self.drafts_gb + self.state_gb + CONTEXT_GB

    @property
    def fitting(self) -> list[int]:
        """Numbers of GPUs over which it may be spread, so that it fits; none if no number will do."""
        counts = range(1, MOST_GPUS + 1)
        return [count for count in counts if self.memory_on(count) <= self.room_gb]

    @property
    def gpu_hours(self) -> float | None:
        """The hours of all GPUs that a spread model occupies, of which one works at a time."""
        return None if self.hours is None else self.hours * self.gpus

    def timed(self, hours_on: Callable[[int], float]) -> Needs:
        """The needs with their hours. hours_on: the hours on a number of GPUs."""
        fitting = self.fitting if self.setting.spread else []
        here = [count for count in fitting if count <= self.node_gpus]
        counts = here or fitting[:1] or [1]
        gpus = min(counts, key=lambda count: count * hours_on(count))
        return replace(self, gpus=gpus, hours=hours_on(gpus))


def needs(
    setting: RunSetting, gpu: str, node_gpus: int = MOST_GPUS, room_gb: float | None = None
) -> Needs:
    """What the setting takes, on a machine with so many of this GPU.

    room_gb: of the memory of each, of which some have more and others less; None: as in `GPUS`.
    Raises UserError for an unknown GPU.
    """
    require_choice("gpu", gpu, GPUS)
    sizes = {
        name: size_of(name) for name in (setting.target, *setting.drafts) if name in hub()["models"]
    }
    target = sizes.get(setting.target)
    card = _dataset_card(setting)
    prompt = setting.dataset["max_source_tokens"] or PROMPT
    gigabytes = BYTES[setting.dtype] / 1e9
    head_weights = 0
    if setting.heads and target is not None and target.shape is not None:
        head_weights = setting.heads * target.shape.vocabulary * target.shape.dim
    drafting = (set(setting.drafts) & set(sizes)) - {setting.target}
    cached_tokens = prompt + setting.max_new_tokens
    needed = Needs(
        setting=setting,
        download_gb=_download_gb(setting, sizes, card),
        weights_gb=(sum(size.weights for size in sizes.values()) + head_weights) * gigabytes,
        state_gb=0.0,
        row_gb=sum(size.cache for size in sizes.values()) * cached_tokens * gigabytes,
        rows=max(1, setting.at_once),
        room_gb=GPUS[gpu][0] if room_gb is None else room_gb,
        examples=_example_count(setting, card),
        hours=None,
        drafts_gb=gigabytes * sum(sizes[name].weights for name in drafting),
        node_gpus=node_gpus,
    )
    if target is None:
        return needed
    tokens = min(card["tokens"] if card else ANSWER, setting.max_new_tokens)
    if setting.training is not None:
        return _with_training(needed, target, gpu, prompt, tokens)
    examples = needed.examples
    if not card or examples is None or not (setting.points or setting.at_once):
        return needed
    if setting.points and setting.at_once:
        models = list(sizes.values())
        return needed.timed(lambda _: record_hours(models, setting, gpu, examples, tokens))
    return needed.timed(lambda gpus: _hours(needed, target, gpu, gpus, examples, tokens))


def _dataset_card(setting: RunSetting) -> Mapping[str, Any]:
    """What is known of the setting's data set on the hub; empty for files and unknown ones."""
    data = setting.dataset
    return hub()["datasets"].get(data["hub_id"], {}) if data.get("path") is None else {}


def _download_gb(
    setting: RunSetting, models: Collection[str], card: Mapping[str, Any]
) -> dict[str, float]:
    """GB to download, by hub id. models: those that are listed. card: of the data set."""
    stored = {name: hub()["models"][name]["stored"] for name in models}
    download = {
        name: size_of(name).weights * width / 1e9 for name, width in stored.items() if width
    }
    if card:
        download[setting.dataset["hub_id"]] = card["mb"] / 1e3
    return download


def _example_count(setting: RunSetting, card: Mapping[str, Any]) -> int | None:
    """How many examples the setting takes of its split; None if nothing says."""
    data = setting.dataset
    counts = [] if data["limit"] is None else [data["limit"]]
    rows = card.get("splits", {}).get(data.get("split"))
    if rows is not None:
        counts.append(max(0, rows - data.get("skip", 0)))
    return min(counts, default=None)


def _hours(needed: Needs, target: Size, gpu: str, gpus: int, examples: int, tokens: int) -> float:
    """Method and baseline decode every example in turn; warm-up is decoded too. Answers are decoded
    many at once, whose caches are half full on average.

    tokens: of a text.
    """
    setting, speed = needed.setting, READ_SHARE * GPUS[gpu][1]  # GB/s
    read_s = target.read * BYTES[setting.dtype] / (1e9 * speed)
    if setting.points:
        forwards = setting.points * (setting.repeats * examples + WARMUP) * tokens * (1 + 1 / SAVED)
    else:
        rows = needed.rows_on(gpus)
        forwards = examples * setting.templates * tokens / rows
        read_s += rows * (needed.row_gb or 0.0) / 2 / speed
    return forwards * max(read_s, LAUNCHES_S * target.layers) / 3600


def record_hours(
    models: Sequence[Size], setting: RunSetting, gpu: str, examples: int, tokens: int
) -> float:
    """The hours of a screening: its models run where a context is new, many texts at once, and the
    host decodes every point over what they scored.

    models: the target first. tokens: of a text.
    """
    speed = READ_SHARE * GPUS[gpu][1]  # GB/s
    forwards_s = sum(
        forwards * max(model.read * BYTES[setting.dtype] / (1e9 * speed), LAUNCHES_S * model.layers)
        for forwards, model in zip(RECORDED_FORWARDS, models, strict=False)
    )
    token_s = forwards_s / setting.at_once + setting.points * REPLAY_S
    return examples * tokens * token_s / 3600


def _with_training(needed: Needs, target: Size, gpu: str, prompt: int, tokens: int) -> Needs:
    """The needs with the memory and time of a training, each where it is known.

    prompt: the longest. tokens: of a mean answer.
    """
    setting, training = needed.setting, needed.setting.training
    shape = target.shape if setting.outline is None else shape_of(configuration_of(setting.outline))
    most_rows = max(1, training.batch_size // training.accumulate)
    memory: TrainingMemory | None = None
    if shape is not None:
        memory = training_memory(training, shape, target.weights, prompt)
    if memory is None:
        return replace(needed, row_gb=None, rows=most_rows)
    needed = replace(
        needed,
        state_gb=(memory.trained + memory.state) / 1e9,
        row_gb=memory.row / 1e9,
        rows=most_rows,
    )
    steps = training.steps
    if steps is None:
        if needed.examples is None:
            return needed
        steps = math.ceil(training.passes * needed.examples / training.batch_size)
    if setting.dataset.get("turns", 1) is None:  # a conversation is one row
        tokens = training.target_tokens
    flops = training_flops(training, shape, target.weights, min(prompt, PROMPT), tokens)
    product_s = training.batch_size * flops / (TRAINING_SHARE * GPUS[gpu][2] * 1e12)
    read_s = target.read * BYTES["float32"] / (1e9 * READ_SHARE * GPUS[gpu][1])
    evaluations = steps / training.evaluate_every if training.evaluate_every else 0
    batches = math.ceil(training.evaluated / most_rows)
    evaluation_s = batches * tokens * max(read_s, MODULE_LAUNCHES_S * shape.layers)

    def hours_on(gpus: int) -> float:
        passes = training.batch_size / needed.rows_on(gpus)
        launches_s = passes * (shape.layers + shape.encoder) * TRAINING_LAUNCHES_S
        step_s = max(product_s, launches_s)
        return training.trainings * (steps * step_s + evaluations * evaluation_s) / 3600

    return needed.timed(hours_on)


class Size(NamedTuple):
    """How large a model is: its weights, those that a token reads, a token's values in the cache, and
    its decoder layers.

    The last two are 0, and its shape is None, where only the number of weights is known.
    """

    weights: int
    read: int
    cache: int
    layers: int
    shape: ModelShape | None = None


@cache
def size_of(model: str) -> Size:
    from bild_lab.lab.measure.cost import dimensions

    card = hub()["models"][model]
    if card["outline"] is None:
        return Size(card["weights"] * 10**6, card["weights"] * 10**6, 0, 0)
    config = configuration_of(hub()["outlines"][card["outline"]])
    sizes, depth = dimensions(config), config.num_hidden_layers
    # T5 v1.0 has one matrix
    embedding = 0 if config.model_type == "t5" else sizes.dim * config.vocab_size
    return Size(
        sizes.weights + embedding,
        sizes.layers.values + sizes.head.values,
        depth * sizes.cache_width,
        depth,
        shape_of(config),
    )


def configuration_of(outline: Any) -> Any:
    """A configuration of Transformers."""
    from transformers import AutoConfig  # late: it takes a second to load

    values = dict(outline)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def describe_needs(run_needs: Sequence[Needs], spread_over: int = 1) -> str:
    """What a command needs, in a few words; empty if nothing is known.

    spread_over: the GPUs that hold its target together.
    """
    if not run_needs:
        return ""
    largest = max(run_needs, key=lambda need: need.memory_gb)
    gigabytes = downloads(run_needs)
    parts = [f"{sum(gigabytes.values()):.1f} GB to download"] if gigabytes else []
    if largest.weights_gb:
        parts.append(_memory_words(largest, spread_over))
        hours = gpu_hours_of(run_needs)
        parts.append("time unknown" if hours is None else f"about {hours:.1f} GPU-hours")
    return ", ".join(parts)


def _memory_words(need: Needs, spread_over: int) -> str:
    """The memory of a setting on each of its GPUs, how many rows it has at once, and whether it
    fits.
    """
    memory_gb = need.memory_on(spread_over)
    memory = f"{memory_gb:.1f} GB of memory"
    if spread_over > 1:
        memory += f" on each of {spread_over} GPUs"
    if memory_gb <= need.room_gb:
        fits = f"fits in {need.room_gb:.0f} GB"
    else:
        fits = f"does not fit in {need.room_gb:.0f} GB"
        if need.fitting:
            fits += f", {need.fitting[0]} GPUs hold it"
    if need.row_gb is None:
        return f"at least {memory} ({fits}, without the rows of a step, which are not known)"
    if need.rows > 1:
        fits += f", {need.rows_on(spread_over)} of {need.rows} rows at once"
    return f"{memory} ({fits})"


def gpu_hours_of(run_needs: Sequence[Needs]) -> float | None:
    """The GPU-hours of a command with these settings, of all GPUs that models are spread over; None
    if those of one of them are not known.
    """
    hours = [need.gpu_hours for need in run_needs]
    return None if not hours or None in hours else sum(hours)


def downloads(run_needs: Sequence[Needs]) -> dict[str, float]:
    """GB to download, each id once."""
    return {name: size for need in run_needs for name, size in need.download_gb.items()}
