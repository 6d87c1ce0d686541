"""A paper's item as a graph of steps: each is a command of the project that writes a folder of
`outputs`, and waits for the commands that write what it reads.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from graphlib import TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError, require_choice
from bild_lab.lab.config.command_line import key_of, value_of
from bild_lab.lab.config.compose import plain_values
from bild_lab.papers.published import SCALES, load_published, published_names
from bild_lab.papers.runs.paper_runs import (
    COUNTING,
    SETTINGS,
    RunSetting,
    Words,
    application_of,
    commands,
    composed,
    configurations,
    found_configuration,
    items_of,
    lists_of,
    replaced_words,
    settings_of,
)
from bild_lab.papers.runs.recipes import recipes_of
from bild_lab.papers.runs.recorded_steps import PREFIX, recorded_commands
from bild_lab.papers.runs.repositories import Repository, repositories_in
from bild_lab.screening.candidates import read_lists

OUTPUTS = Path("outputs")
_ABSENT = object()


class StepKind(Enum):
    """What a step does with models, which says how it can use GPUs.

    NONE: draws, counts or fetches, without a model. DECODING: one process; a large target is spread
    over GPUs where `runtime.device_map` says so. ANSWERING: any number of processes divide the
    questions, and a large model is spread. TRAINING: processes divide the rows of a pass.
    TRAINING_BESIDE_FROZEN: the same, and each may hold a part of a large frozen model.
    """

    NONE = auto()
    DECODING = auto()
    ANSWERING = auto()
    TRAINING = auto()
    TRAINING_BESIDE_FROZEN = auto()


WORK = {  # of the scripts that run models
    "run.py": StepKind.DECODING,
    "scripts/screen.py": StepKind.DECODING,
    "scripts/match_rates.py": StepKind.DECODING,
    "scripts/generate_calibration.py": StepKind.ANSWERING,
    "scripts/align.py": StepKind.TRAINING,
    "scripts/finetune.py": StepKind.TRAINING,
    "scripts/train_bita.py": StepKind.TRAINING_BESIDE_FROZEN,
    "scripts/train_lm_heads.py": StepKind.TRAINING_BESIDE_FROZEN,
    "scripts/train_module.py": StepKind.TRAINING_BESIDE_FROZEN,
}
LEARNING = (StepKind.ANSWERING, StepKind.TRAINING, StepKind.TRAINING_BESIDE_FROZEN)
# groups that choose what is measured and how; at the paper's scale trainings keep the paper's data
MEASURING_GROUPS = ("dataset", "template", "decoding")
# commands that time `generate` beside our baseline
TIMES_GENERATE = re.compile(r"experiment=\w+/generate")
# groups by which overrides choose among an item's commands, and the key that tells their files apart
CHOICES_OF_COMMANDS = {"pair": "pair.target", "dataset": "dataset.name"}
# keys that name data and models, each with the key that tells apart what it would replace
NAMING_KEYS = {
    "dataset.path": "dataset.name",
    "dataset.hub_id": "dataset.name",
    "pair.target": "pair.target",
    "pair.draft": "pair.draft",
    "pair.second_draft": "pair.second_draft",
}


@dataclass(frozen=True)
class Step:
    """One command line."""

    command: str
    writes: str  # its folder in `outputs`
    reads: tuple[str, ...]  # the folders that it needs there
    after: tuple[str, ...]  # the commands of the steps that it waits for
    # those of `reads` that no command writes and that are not there
    missing: tuple[str, ...] = ()
    settings: tuple[RunSetting, ...] = ()
    repositories: tuple[Repository, ...] = ()  # of the hub, that it reads
    # everything that the command was composed of, and the pins of what it reads
    configuration: str = field(default="", repr=False)
    # of a step that draws one from whatever points there are, so it also runs where steps before it
    # did not
    figure: str | None = None
    rows: int = 1  # of one pass of a training, which its processes divide evenly

    @property
    def work(self) -> StepKind:
        words = shlex.split(self.command)
        return StepKind.NONE if COUNTING in words else WORK.get(words[1], StepKind.NONE)

    @property
    def drawn(self) -> tuple[str, ...]:
        """The commands of the steps whose points a figure's step draws: not those that time `generate`
        beside our baseline, of which alone nothing is drawn.
        """
        return tuple(command for command in self.after if not TIMES_GENERATE.search(command))


def steps_of(
    name: str,
    scale: str = "paper",
    overrides: Sequence[str] = (),
    left_out: Collection[str] = (),
    live: bool = False,
) -> list[Step]:
    """Everything that makes an item, or all of them, in an order in which it can run; figures are
    last.

    An item's own commands come from its file in `published`. What a step reads from outputs is
    written by the command with that name=NAME: one of the item's own, else a recipe of its
    experiment, else a command of another item. A sweep is a step for each value that needs other
    models or folders, so that a pair waits for its own training only.
    overrides: KEY=VALUE, for every step that has the key; at the paper's scale those of
    `MEASURING_GROUPS` not for answers and trainings, which would learn the questions that are
    measured, or a few of their own. pair=NAME and dataset=NAME leave out the commands that measure
    other ones (`_chosen`). left_out: data sets of `recipes.OPTIONAL_ANSWERS` that no training
    learns. live: sweeps decode all examples at every point; else the quality of an item's recorded
    sweeps comes from a record (`recorded_steps.py`).

    Raises UserError for an unknown item or scale, name=NAME, a key that no step has, and data or a
    model of one's own in the place of several.
    """
    require_choice("scale", scale, SCALES)
    items = items_of(name)
    named = [word for word in overrides if word.startswith("name=")]
    if named and not set(items).isdisjoint(published_names()):
        raise UserError(
            f"an item's steps have folders of their own, got {named[0]}; leave it out, and run in"
            " another folder to keep other results apart"
        )
    graph: dict[str, Step] = {}
    with found_configuration():
        for item in items:
            _add_item(graph, item, scale, overrides, left_out, live)
        _require_one_replaced(name, graph, overrides)
    used_keys = {key_of(word) for command in graph for word in shlex.split(command)}
    for key in map(key_of, overrides):
        if key not in used_keys:
            raise UserError(
                f"no step of {name} has the key {key}; leave it out, or look it up with --cfg job"
            )
    order = TopologicalSorter(
        {command: step.after for command, step in graph.items()}
    ).static_order()
    return sorted((graph[command] for command in order), key=lambda step: step.figure is not None)


def _add_item(
    graph: dict[str, Step],
    item: str,
    scale: str,
    overrides: Sequence[str],
    left_out: Collection[str],
    live: bool,
) -> None:
    """Add the steps of an item's commands, those that write what they read, and the figure's."""
    item_commands = commands(item, scale)
    goals = [
        words
        for command in _chosen(item_commands, overrides)
        for words in _split_sweep(command, overrides, scale)
    ]
    if not live and item in published_names() and load_published(item).recorded:
        goals = [words for sweep in goals for words in recorded_commands(sweep, overrides)]
    # a step's command, and the commands among which those that it waits for are
    waiting: list[tuple[Words, Sequence[str]]] = [(words, ()) for words in goals]
    while waiting:
        words, writers = waiting.pop(0)
        command = shlex.join(words)
        if command in graph:
            continue
        if not writers:
            recipes = [
                recipe.command
                for configuration in configurations(words)[:1]
                for recipe in recipes_of(configuration, left_out)
            ]
            writers = [*item_commands, *recipes, *_all_commands(scale)]
        step, predecessors = _step(words, writers, overrides, scale)
        graph[command] = step
        waiting += [(predecessor, writers) for predecessor in predecessors]
    if item in published_names():
        figure = _figure_step(graph, item, goals, scale)
        graph[figure.command] = figure


def _require_one_replaced(name: str, graph: Mapping[str, Step], overrides: Sequence[str]) -> None:
    """Raise UserError for data or a model of one's own that several data sets or models would be
    replaced by, each under its own name.
    """
    for key in map(key_of, overrides):
        if key not in NAMING_KEYS:
            continue
        reading = [tuple(shlex.split(step.command)) for step in graph.values() if _reads(step, key)]
        commands_with_key = [words for words in reading if key in map(key_of, words)]
        replaced = dict.fromkeys(
            value for words in commands_with_key for value in _replaced_values(words, key)
        )
        if len(replaced) > 1:
            group = key.partition(".")[0]
            choices = {
                choice for words in commands_with_key for choice in lists_of(words).get(group, ())
            }
            remedy = (
                f"choose one with {group}=NAME"
                if len(choices) > 1
                else f"leave it out, and run it with python run.py {key}=…"
            )
            raise UserError(
                f"{key} would take the place of each of {', '.join(replaced)} in {name}; {remedy}"
            )


def _replaced_values(words: Words, key: str) -> list[str]:
    """The names of the data or models that a command would read without its override of this key."""
    unchanged = tuple(word for word in words if key_of(word) != key)
    values = [OmegaConf.select(cfg, NAMING_KEYS[key]) for cfg in configurations(unchanged)]
    # a pair without a draft model has none to be replaced
    return [str(value) for value in values if value is not None]


def _reads(step: Step, key: str) -> bool:
    """Whether a step reads what the key names. Of a pair, trainings and answers read nothing that
    is measured, and a command that times `generate` the target alone.
    """
    if not key.startswith("pair."):
        return True
    times_generate = TIMES_GENERATE.search(step.command) is not None
    return step.work is StepKind.DECODING and (key == "pair.target" or not times_generate)


def _chosen(item_commands: Sequence[str], overrides: Sequence[str]) -> Sequence[str]:
    """The commands that measure a pair or data set which overrides choose; all where none does, as
    with models and data of one's own. Of those that time `generate`, too.

    The others would measure a chosen pair on data that it was not made for, such as a translator on
    summaries. What is trained for those that are left is found by what they read.
    """
    choices = [word for word in overrides if key_of(word) in CHOICES_OF_COMMANDS]
    for key, values in read_lists(choices).items():
        of_generate = [command for command in item_commands if TIMES_GENERATE.search(command)]
        of_policies = [command for command in item_commands if command not in of_generate]
        remaining: list[str] = []
        for group in (of_generate, of_policies):
            remaining += [command for command in group if _measures(command, key, values)] or group
        item_commands = remaining
    return item_commands


def _measures(command: str, key: str, values: Words) -> bool:
    """Whether a command measures one of these pairs or data sets, of a pair one with its target;
    true for a command that measures and has no such key.
    """
    words = tuple(shlex.split(command))
    if WORK.get(words[1]) is not StepKind.DECODING:
        return False
    application, lists = application_of(words[1]), lists_of(words)
    of_other_keys = tuple(choices[0] for other_key, choices in lists.items() if other_key != key)
    if key not in composed(application, of_other_keys):
        return True

    def files_of(choices: Sequence[Words]) -> set[str]:
        """What tells the files of these choices apart."""
        configurations = [composed(application, (*choice, *of_other_keys)) for choice in choices]
        return {OmegaConf.select(cfg, CHOICES_OF_COMMANDS[key]) for cfg in configurations}

    of_command = [(value,) for value in lists.get(key, ())] or [()]
    return not files_of(of_command).isdisjoint(files_of([(value,) for value in values]))


def _step(
    words: Words, writers: Sequence[str], overrides: Sequence[str], scale: str
) -> tuple[Step, list[Words]]:
    """The step of a command, and the commands of the steps that it waits for."""
    compositions = configurations(words)
    writes = str(compositions[0].name) if compositions else ""
    reads = [folder for folder in output_folders(compositions) if folder != writes]
    predecessors: list[Words] = []
    missing: list[str] = []
    for folder in reads:
        writer = next(
            (command for command in writers if f"name={folder}" in shlex.split(command)), None
        )
        if writer is not None:
            predecessors += _split_sweep(writer, overrides, scale)
        elif not (OUTPUTS / folder).exists():
            missing.append(folder)
    lists = lists_of(words)
    repositories = repositories_in(compositions, _policies(compositions, lists))
    pins = {repository.key: repository.pin for repository in repositories if repository.pin}
    values = "".join(json.dumps(plain_values(cfg), default=str) for cfg in compositions)
    step = Step(
        command=shlex.join(words),
        writes=writes,
        reads=tuple(reads),
        after=tuple(shlex.join(predecessor) for predecessor in predecessors),
        missing=tuple(missing),
        settings=tuple(settings_of(words)),
        repositories=repositories,
        configuration=f"{values}{lists}" + (json.dumps(pins) if pins else ""),
        rows=_rows_of_a_pass(compositions),
    )
    return step, predecessors


def _policies(compositions: Sequence[DictConfig], lists: Mapping[str, Words]) -> list[str]:
    """The policies that a command decodes with, by name."""
    swept = [value_of(value) for value in lists.get("policy", ())]
    return swept or [str(cfg.policy.name) for cfg in compositions if "policy" in cfg]


def _rows_of_a_pass(compositions: Sequence[DictConfig]) -> int:
    """The examples of one forward and backward pass, over all processes; 1 for no training."""
    if not compositions or "train" not in compositions[0]:
        return 1
    recipe = compositions[0].train
    passes = recipe.accumulate if isinstance(recipe.accumulate, int) else 1
    return max(1, recipe.batch_size // passes)


def _figure_step(graph: Mapping[str, Step], item: str, goals: Sequence[Words], scale: str) -> Step:
    """The step that draws an item from the folders that its commands write."""
    after = tuple(dict.fromkeys(shlex.join(words) for words in goals))
    written = list(dict.fromkeys(graph[command].writes for command in after))
    folders = load_published(item).folders[scale]
    return Step(
        command=f"python scripts/figures.py {item} scale={scale}",
        writes=f"figures/{item}",
        reads=(
            *(folder for folder in folders if folder in written),
            *(folder for folder in written if folder.startswith(PREFIX)),
        ),
        after=after,
        figure=item,
    )


def output_folders(values: Any) -> list[str]:
    """The folders of `outputs` that paths among these values lie in, each once, in their order.

    values: configurations, lists or texts; a text may be a list of a sweep, A,B.
    """
    if isinstance(values, DictConfig):
        return output_folders(list(plain_values(values).values()))
    if isinstance(values, Mapping):
        return output_folders(list(values.values()))
    if isinstance(values, list | tuple):
        return list(dict.fromkeys(folder for value in values for folder in output_folders(value)))
    if not isinstance(values, str):
        return []
    paths = [Path(word.strip("[]'\" ")) for word in values.split(",")]
    return list(
        dict.fromkeys(
            path.parts[1] for path in paths if len(path.parts) > 1 and path.parts[0] == str(OUTPUTS)
        )
    )


@cache
def _all_commands(scale: str) -> list[str]:
    """Every command of every item."""
    return [
        command for name in published_names() for command in load_published(name).commands[scale]
    ]


def _split_sweep(command: str, overrides: Sequence[str], scale: str) -> list[Words]:
    """The command with the overrides that it takes, once for each value that needs other models or
    folders.
    """
    words = tuple(shlex.split(command))
    application = application_of(words[1])
    if application is None:
        return [words]
    words = replaced_words(words, _taken(words, application, overrides, scale))
    lists = lists_of(words)
    split_lists = [
        values
        for key, values in lists.items()
        if len(values) > 1 and _needs_differ(application, lists, key)
    ]
    return [replaced_words(words, choice) for choice in product(*split_lists)]


def _taken(words: Words, application: str, overrides: Sequence[str], scale: str) -> list[str]:
    """The overrides that a command takes: those that it has keys for, without those of
    `MEASURING_GROUPS` if it answers, trains or counts at the paper's scale.
    """
    configuration = composed(application, tuple(values[0] for values in lists_of(words).values()))
    learns = scale == "paper" and WORK.get(words[1]) in LEARNING

    def is_taken(key: str) -> bool:
        known = OmegaConf.select(configuration, key, default=_ABSENT) is not _ABSENT
        return known and not (learns and key.split(".")[0] in MEASURING_GROUPS)

    return [word for word in overrides if is_taken(key_of(word))]


def _needs_differ(application: str, lists: Mapping[str, Words], key: str) -> bool:
    """Whether values of a key need other models, or other folders in outputs."""
    values = lists[key]
    if key.split(".")[0] not in SETTINGS and not output_folders(
        [value_of(value) for value in values]
    ):
        return False
    first_values = {name: choices[0] for name, choices in lists.items()}
    compositions = [
        composed(application, tuple({**first_values, key: value}.values())) for value in values
    ]
    needed = [(cfg.get("pair"), cfg.get("model"), output_folders(cfg)) for cfg in compositions]
    return any(need != needed[0] for need in needed)
