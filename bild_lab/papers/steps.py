"""A paper's item as a graph of steps, each a command of the project, and their run in order."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from graphlib import TopologicalSorter
from itertools import product
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from bild_lab.errors import UserError, require_choice
from bild_lab.files import write_atomically
from bild_lab.lab.config.compose import plain_values
from bild_lab.papers.paper_runs import (
    ASSUMED_GPU,
    GPUS,
    SETTINGS,
    RunSetting,
    Words,
    application_of,
    commands,
    composed,
    configurations,
    found_configuration,
    hours_of,
    hub,
    items_of,
    lists_of,
    needs,
    settings_of,
)
from bild_lab.papers.published import SCALES, load_published, published_names

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = Path("outputs")
STAMPS = OUTPUTS / ".steps"
DONE, TO_DO = "done", "to do"
_NAMED = re.compile(r"\boutputs/([\w.-]+)")
_ABSENT = object()


@dataclass(frozen=True)
class Step:
    """One command line. writes: its folder in `outputs`. reads: the folders that it needs there.

    after: the commands of the steps that it waits for. missing: those of `reads` that no command
    writes and that are not there. configuration: everything that the command was composed of.
    figure: of a step that draws one from whatever points there are, so it also runs where steps
    before it did not.
    """

    command: str
    writes: str
    reads: tuple[str, ...]
    after: tuple[str, ...]
    missing: tuple[str, ...] = ()
    settings: tuple[RunSetting, ...] = ()
    configuration: str = field(default="", repr=False)
    figure: str | None = None


def steps_of(name: str, scale: str = "paper", overrides: Sequence[str] = ()) -> list[Step]:
    """Everything that makes an item, or all of them, in an order in which it can run; figures are
    last.

    An item's own commands come from its file in `published`. What a step reads from outputs is
    written by the command with that name=NAME: one of the item's own, else one of its experiment's
    `recipes`, else one of another item. A sweep is a step for each value that needs other models or
    folders, so that a pair waits for its own training only.
    overrides: KEY=VALUE, for every step that has the key.

    Raises UserError for an unknown item or scale, and a key that no step has.
    """
    require_choice("scale", scale, SCALES)
    graph: dict[str, Step] = {}
    with found_configuration():
        for item in items_of(name):
            _add(graph, item, commands(item, scale), scale, overrides)
    taken = {word.partition("=")[0] for command in graph for word in shlex.split(command)}
    if unused := [
        key for key in (word.partition("=")[0] for word in overrides) if key not in taken
    ]:
        raise UserError(
            f"no step of {name} has the key {unused[0]}; leave it out, or look it up with --cfg job"
        )
    order = TopologicalSorter(
        {command: step.after for command, step in graph.items()}
    ).static_order()
    return sorted((graph[command] for command in order), key=lambda step: step.figure is not None)


def _add(
    graph: dict[str, Step], item: str, own: Sequence[str], scale: str, overrides: Sequence[str]
) -> None:
    goals = [part for command in own for part in _parts(command, overrides)]
    waiting: list[tuple[Words, Sequence[str]]] = [(words, ()) for words in goals]
    while waiting:
        words, known = waiting.pop(0)
        if (command := shlex.join(words)) in graph:
            continue
        several = configurations(words)
        known = known or [*own, *_recipes(several), *_pool(scale)]
        writes = str(several[0].name) if several else ""
        text = "".join(json.dumps(plain_values(cfg), default=str) for cfg in several)
        reads, after, missing = (
            tuple(dict.fromkeys(each for each in _NAMED.findall(text) if each != writes)),
            [],
            [],
        )
        for folder in reads:
            writer = next((one for one in known if f"name={folder}" in one.split()), None)
            parts = [] if writer is None else _parts(writer, overrides)
            waiting += [(part, known) for part in parts]
            after += [shlex.join(part) for part in parts]
            if not parts and not (OUTPUTS / folder).exists():
                missing.append(folder)
        settings = tuple(settings_of(words))
        content = f"{text}{lists_of(words)}"
        graph[command] = Step(
            command, writes, reads, tuple(after), tuple(missing), settings, content
        )
    if item in published_names():
        command, folders = (
            f"python scripts/figures.py {item} scale={scale}",
            load_published(item).folders[scale],
        )
        after = tuple(dict.fromkeys(shlex.join(words) for words in goals))
        reads = tuple(one for one in folders if any(graph[each].writes == one for each in after))
        graph[command] = Step(command, f"figures/{item}", reads, after, figure=item)


@cache
def _pool(scale: str) -> list[str]:
    """Every command of every item."""
    return [
        command for name in published_names() for command in load_published(name).commands[scale]
    ]


def _recipes(several: Sequence[DictConfig]) -> list[str]:
    """The recipes of a command's configuration, without those that name what it does not have."""
    found = []
    for cfg in several[:1]:
        for key in cfg.get("recipes") or ():
            with suppress(InterpolationKeyError):  # of another pair
                found.append(cfg.recipes[key])
    return found


def _parts(command: str, overrides: Sequence[str]) -> list[Words]:
    """The command with the overrides that it has keys for, once for each value that needs other
    models or folders.
    """
    words = tuple(shlex.split(command))
    if (application := application_of(words[1])) is None:
        return [words]
    configuration = composed(application, tuple(values[0] for values in lists_of(words).values()))
    keys = [(word, word.partition("=")[0]) for word in overrides]
    given = [
        word
        for word, key in keys
        if OmegaConf.select(configuration, key, default=_ABSENT) is not _ABSENT
    ]
    words = _replaced(words, given)
    lists = lists_of(words)
    several = [
        values
        for key, values in lists.items()
        if len(values) > 1 and _differ(application, lists, key)
    ]
    return [_replaced(words, choice) for choice in product(*several)]


def _differ(application: str, lists: Mapping[str, Words], key: str) -> bool:
    """Whether values of a key need other models, or other folders in outputs."""
    if key.split(".")[0] not in SETTINGS and not any(_NAMED.search(value) for value in lists[key]):
        return False
    first = {other: values[0] for other, values in lists.items()}
    several = [composed(application, tuple({**first, key: value}.values())) for value in lists[key]]
    texts = [json.dumps(plain_values(cfg), default=str) for cfg in several]
    needed = [
        (cfg.get("pair"), cfg.get("model"), _NAMED.findall(text))
        for cfg, text in zip(several, texts, strict=True)
    ]
    return any(one != needed[0] for one in needed)


def _replaced(words: Words, changes: Sequence[str]) -> Words:
    keys = {word.partition("=")[0] for word in changes}
    return (
        *(word for word in words if word.partition("=")[0] not in keys or "=" not in word),
        *changes,
    )


@dataclass(frozen=True)
class Machine:
    """Where steps run. gpu: of paper_runs.GPUS, for estimates. room_gb: of its memory; None: there
    is no GPU here.

    gpus: how many. tries: steps also start where they should not fit. gated: ids that want a login
    may be read.
    warning: that the estimates are of another GPU than the one here; empty if they are not.
    """

    gpu: str
    room_gb: float | None
    gated: bool
    tries: bool = False
    gpus: int = 1
    warning: str = ""


def machine_of(gpu: str | None, tries: bool) -> Machine:
    """The machine with the GPU of this name; None: the one that is here.

    Raises UserError for an unknown one.
    """
    import torch  # late: it takes seconds to load
    from huggingface_hub import get_token

    gated = get_token() is not None
    if gpu is not None:
        require_choice("gpu", gpu, GPUS)
        return Machine(gpu, GPUS[gpu][0], gated, tries)
    assumed = (
        f"times are estimated for an {ASSUMED_GPU}; gpu=NAME takes another of {', '.join(GPUS)}"
    )
    if not torch.cuda.is_available():
        return Machine(
            ASSUMED_GPU, None, gated, tries, warning=f"there is no GPU here, so {assumed}"
        )
    here, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    if (known := known_gpu(here.name)) is None:
        warning = f"the GPU here, {here.name}, is not in the list, so {assumed}"
        return Machine(ASSUMED_GPU, here.total_memory / 1e9, gated, tries, count, warning)
    return Machine(known, here.total_memory / 1e9, gated, tries, count)


def known_gpu(name: str) -> str | None:
    """Which of `GPUS` this is, by the name that CUDA gives it; None for others, and for a part of
    one or a laptop's.
    """
    words = re.sub(r"\brtx (?=\d)", "rtx", name.lower()).replace("-", " ").split()
    if "mig" in words or "laptop" in words:
        return None
    return next((known for known in GPUS if known in words), None)


def obstacle(step: Step, machine: Machine) -> str | None:
    """Why a step cannot run on this machine; None if it can."""
    if step.missing:
        return (
            f"nothing writes outputs/{step.missing[0]}: put it there, or add its command to the"
            " experiment's recipes"
        )
    if unknown := [each for each in step.settings if each.target is None]:
        return (
            "it takes models of your own: give pair.target=DIR, and data in place of"
            f" {unknown[0].dataset['name']}"
        )
    several = [needs(each, machine.gpu) for each in step.settings]
    if machine.tries or not any(each.weights_gb for each in several):
        return None
    ids = {one for each in several for one in each.download_gb}
    cards = {**hub()["models"], **hub()["datasets"]}
    if (closed := sorted(one for one in ids if cards[one].get("gated"))) and not machine.gated:
        return f"gated: accept the terms on the page of {closed[0]}, then hf auth login"
    if machine.room_gb is None:
        return "no GPU here; gpu=NAME says what one needs, force=true tries"
    rooms = [machine.room_gb * (machine.gpus if each.setting.spread else 1) for each in several]
    lacking = [one for one, room in zip(several, rooms, strict=True) if one.memory_gb > room]
    if lacking:
        wanted, has = (
            f"memory: {lacking[0].memory_gb:.0f} GB",
            f"{machine.gpus} × {machine.room_gb:.0f} GB",
        )
        return (
            f"{wanted}, here are {has}; runtime.device_map=auto spreads a model, force=true tries"
        )
    return None


def is_done(step: Step) -> bool:
    """Whether a step ended well with this configuration and code, and nothing that it read or wrote
    has changed.

    A change of the code makes every step look again, which takes seconds where its results still
    count.
    """
    stamp = _stamp(step)
    if not stamp.is_file():
        return False
    noted, now = json.loads(stamp.read_text(encoding="utf-8")), _state(step)
    return noted["reads"] == now["reads"] and noted["writes"].items() <= now["writes"].items()


def _stamp(step: Step) -> Path:
    digest = hashlib.sha256(f"{_code()}\n{step.command}\n{step.configuration}".encode())
    return STAMPS / f"{digest.hexdigest()[:16]}.json"


@cache
def _code() -> str:
    files = sorted(
        file
        for file in (ROOT / "bild_lab").rglob("*")
        if file.suffix in (".py", ".cpp", ".h", ".yaml")
    )
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _state(step: Step) -> dict[str, dict[str, list[int]]]:
    """Size and time of every file that a step reads and writes in outputs.

    Of a sweep's folder, which other steps write too, the points count: they are never changed.
    """
    if step.figure is not None:
        written = [*OUTPUTS.glob(f"{step.writes}*")]
    elif shlex.split(step.command)[1] == "run.py":
        written = [*(OUTPUTS / step.writes).glob("points/*/result.json")]
    else:
        written = _files(step.writes)
    read = [file for folder in step.reads for file in _files(folder)]
    return {"reads": _sizes(read), "writes": _sizes(written)}


def _files(folder: str) -> list[Path]:
    return [
        file
        for file in (OUTPUTS / folder).rglob("*")
        if not any(part[0] == "." for part in file.parts)
    ]


def _sizes(files: Sequence[Path]) -> dict[str, list[int]]:
    several = ((str(file), file.stat()) for file in files if file.is_file())
    return {name: [one.st_size, one.st_mtime_ns] for name, one in several}


def perform(step: Step) -> None:
    """Run a step's command as a process, and note that it is done.

    Raises UserError if it fails or writes nothing.
    """
    _, script, *words = shlex.split(step.command)
    code = subprocess.run(
        [sys.executable, "-m", "bild_lab", Path(script).stem, *words], check=False
    ).returncode
    if code != 0:
        raise UserError(f"failed with status {code}: {step.command}")
    state = _state(step)
    if not state["writes"]:
        raise UserError(f"wrote nothing to outputs/{step.writes}: {step.command}")
    STAMPS.mkdir(parents=True, exist_ok=True)
    write_atomically(_stamp(step), json.dumps(state).encode())


def outlook(steps: Sequence[Step], machine: Machine) -> Iterator[tuple[Step, str]]:
    """Each step with what becomes of it: done, to do, or why it cannot run."""
    told: dict[str, str] = {}
    for step in steps:
        told[step.command] = _outlook(step, machine, told)
        yield step, told[step.command]


def _outlook(step: Step, machine: Machine, told: Mapping[str, str]) -> str:
    waits = [command for command in step.after if told[command] not in (DONE, TO_DO)]
    if step.figure is not None:
        if len(waits) == len(step.after):
            return "no step of it can run"
    elif waits:
        return f"it waits for {waits[0]}"
    elif (why := obstacle(step, machine)) is not None:
        return why
    changes = any(told[command] == TO_DO for command in step.after)
    return DONE if not changes and is_done(step) else TO_DO


def run_steps(steps: Sequence[Step], machine: Machine, say: Callable[[str], None]) -> bool:
    """Run what is to do, in order. Returns whether everything was done."""
    told: dict[str, str] = {}
    hours = [hours_of([needs(each, machine.gpu) for each in step.settings]) for step in steps]
    estimates = [each for each in hours if each]
    shares = [each or (sum(estimates) / len(estimates) if estimates else 1.0) for each in hours]
    spent_s = covered = 0.0
    for place, step in enumerate(steps, 1):
        state = _outlook(step, machine, told)
        if state == TO_DO:
            rest = range(place - 1, len(steps))
            known = all(hours[at] for at in rest if steps[at].figure is None)
            left = _time_left(sum(shares[at] for at in rest), known, spent_s, covered)
            say(f"step {place} of {len(steps)}, {left}: {step.command}")
            began = time.monotonic()
            try:
                perform(step)
                state = DONE
            except UserError as error:
                state = str(error)
            spent_s, covered = spent_s + time.monotonic() - began, covered + shares[place - 1]
        if state != DONE:
            say(f"step {place} of {len(steps)} was not done: {step.command}\n  {state}")
        told[step.command] = state
    return all(state == DONE for state in told.values())


def submit_steps(
    steps: Sequence[Step],
    machine: Machine,
    parameters: Mapping[str, str],
    say: Callable[[str], None],
) -> bool:
    """Submit what is to do as Slurm jobs, each after those that it waits for. Returns whether every
    step was.

    parameters: of the jobs, as sbatch takes them: partition, gpus_per_node, mem, time. Logs are in
    outputs/.steps. A job whose predecessor failed is cancelled by Slurm; a figure is drawn after
    all, whatever became of them.

    Raises UserError without submitit or sbatch.
    """
    try:
        from submitit import SlurmExecutor  # optional

        executor = SlurmExecutor(STAMPS)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"launcher=slurm needs submitit and Slurm's commands: {error}; leave it out to run here"
        ) from error
    told: dict[str, str] = {}
    jobs: dict[str, str] = {}
    for place, step in enumerate(steps, 1):
        told[step.command] = state = _outlook(step, machine, told)
        if state == TO_DO:
            before = [jobs[command] for command in step.after if command in jobs]
            kind = "afterok" if step.figure is None else "afterany"
            waits = (
                {"dependency": ":".join([kind, *before]), "kill_on_invalid_dep": "yes"}
                if before
                else {}
            )
            executor.update_parameters(
                job_name=step.writes.replace("/", "_"),
                additional_parameters={**parameters, **waits},
            )
            jobs[step.command] = executor.submit(perform, step).job_id
            after = f" after {', '.join(before)}" if before else ""
            say(f"step {place} of {len(steps)} is job {jobs[step.command]}{after}: {step.command}")
        elif state != DONE:
            say(f"step {place} of {len(steps)} was not submitted: {step.command}\n  {state}")
    return all(state in (DONE, TO_DO) for state in told.values())


def _time_left(share: float, known: bool, spent_s: float, covered: float) -> str:
    """Of steps with this share of the estimated hours, where steps with `covered` hours took
    `spent_s`.
    """
    if not covered and not known:
        return "time left unknown yet"
    seconds = share * (spent_s / covered if covered else 3600)
    return (
        f"about {seconds / 3600:.1f} h left"
        if seconds >= 3600
        else f"about {seconds / 60:.0f} min left"
    )
