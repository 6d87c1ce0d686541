"""What an item of a paper takes, step by step, and its run: python scripts/paper_run.py ITEM [run=true] [KEY=VALUE …]

    python scripts/paper_run.py bild/fig4                       the steps, and what each needs
    python scripts/paper_run.py bild/fig4 run=true              runs them: calibration, trainings, sweeps, figure
    python scripts/paper_run.py bild/fig4 scale=small run=true  on the toy pair
    python scripts/paper_run.py bild/fig4 live=true             decodes every example at every point: many hours
    python scripts/paper_run.py bild/fig4 gpu=t4                on a GPU that is not here; gpus=8: on eight of them
    python scripts/paper_run.py bita/tab1 run=true processes=4  on four of the visible GPUs; without it on all
    python scripts/paper_run.py all                             every item; bild/thresholds: an experiment of no item
    python scripts/paper_run.py bild/fig4 run=true launcher=slurm slurm.partition=gpu gpu=a100 gpus=8
    python scripts/paper_run.py pins [ID …] [ID=BRANCH …]       pins checkpoints and data sets to the hub's commits
    python scripts/paper_run.py ppd/tab1 runtime.allow_pickles=true   where weights are in pickles alone

On several GPUs Accelerate starts trainings and calibrations on all of them, and steps that decode run side by side,
each on a GPU of its own, or on as few as hold its model. What they print is in outputs/.steps. Without a GPU,
processes=N runs so many at once.

A step that is done is skipped, so the same command goes on where it was stopped. One that cannot run here says why,
and what does not depend on it still runs. force=true also tries what should not fit. Other KEY=VALUE go to every step
that has the key, such as measure.repeats=3; at the paper's scale those of dataset, template and decoding, such as
dataset.limit=100, to what is measured alone, as answers and trainings keep the paper's data. pair=NAME and dataset=NAME
run the commands of this pair or data set; one of your own takes the place of all. launcher=slurm submits the steps as
jobs, each after those that it waits for; slurm.KEY=VALUE are sbatch's options, gpu= and gpus= the nodes' GPUs. Memory
is a closed form, times are estimates.

The hub is asked whether this login may read what is gated, and which weights are in pickles alone; without a hub the
cards of bild_lab/papers/runs/hub.yaml answer. LIMA, which is gated, is left out of BiTA's trainings where it may not be
read. calibration=[FILE.jsonl] takes BiTA's released answers of one pair, pair=NAME, in place of answering.

pins asks the hub for today's commit of every repository that an experiment reads, or of these IDs alone; with ID=BRANCH
the branch is read in place of main, such as one with safetensors. The commits go to bild_lab/pins.yaml with their date
and are read wherever a command names no other revision, such as pair.target_revision=main. run=true pins what the item
reads and is not pinned yet.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.markup import escape

from bild_lab import files
from bild_lab.errors import UserError
from bild_lab.lab.config.console import console, output, status_line
from bild_lab.lab.config.entrypoint import run_application

if TYPE_CHECKING:
    from bild_lab.papers.runs.machine import Machine
    from bild_lab.papers.runs.steps import Step

FLAGS = ("true", "false")
SLURM = "slurm."
ROUGE_LSUM = "rougeLsum"
LEFT_OUT = (
    "it is gated, and this login may not read it, so adapters and heads learn the answers to the"
    " other data sets; accept the terms on the page of {name}, then hf auth login, to learn all"
)
PINS = "pins"  # the word for pinning in place of an item


@dataclass(frozen=True)
class PaperRunOptions:
    """What the command line asks for.

    gpu: None for the GPUs that are here. gpus: how many the named machine has. processes: how many
    GPUs are taken; None: all. live: as in `steps_of`. slurm: options of jobs; None: no jobs.
    """

    item: str
    scale: str
    gpu: str | None
    gpus: int | None
    processes: int | None
    run: bool
    force: bool
    live: bool
    slurm: dict[str, str] | None
    overrides: list[str]


def parse(words: list[str]) -> PaperRunOptions:
    """Read the command line.

    Raises UserError for anything that is no item, no setting and no override.
    """
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    scale, gpu = settings.pop("scale", "paper"), settings.pop("gpu", None)
    gpus, processes = (whole_number(key, settings.pop(key, None)) for key in ("gpus", "processes"))
    run, force, live, launcher = (
        settings.pop(key, "false") for key in ("run", "force", "live", "launcher")
    )
    slurm_options = {
        key.removeprefix(SLURM): settings.pop(key)
        for key in list(settings)
        if key.startswith(SLURM)
    }
    if gpus is None and gpu is not None and slurm_options.get("gpus_per_node", "").isdecimal():
        gpus = int(slurm_options["gpus_per_node"])
    if launcher not in ("slurm", "false") or (slurm_options and launcher == "false"):
        raise UserError(
            f"launcher must be slurm, with slurm.KEY=VALUE, or left out; got {launcher}"
        )
    if len(names) != 1 or not {run, force, live} <= set(FLAGS):
        raise UserError(
            "give one item such as bild/fig4, or all, then KEY=VALUE; got"
            f" {' '.join(words) or 'nothing'}"
        )
    if dashed := [word for word in names if word.startswith("-")]:
        raise UserError(f"settings are KEY=VALUE, such as run=true, got {dashed[0]}")
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return PaperRunOptions(
        item=names[0],
        scale=scale,
        gpu=gpu,
        gpus=gpus,
        processes=processes,
        run=run == "true",
        force=force == "true",
        live=live == "true",
        slurm=slurm_options if launcher == "slurm" else None,
        overrides=overrides,
    )


def whole_number(key: str, word: str | None) -> int | None:
    """The number that a word is; None without one. Raises UserError for any other word."""
    if word is None:
        return None
    if not word.isdecimal():
        raise UserError(f"{key} must be a whole number, at least 1, got {word}")
    return int(word)


def pin_named(words: Sequence[str]) -> None:
    """Pin the repositories that the words name, or all.

    Raises UserError for an id that no experiment reads, and in the end for those that the hub does
    not have.
    """
    from bild_lab.papers.runs.repositories import named_repositories, pin

    branches = named_repositories(words)
    status_line.enter(f"asking for {len(branches)} repositories")
    pinned, failed = pin(branches)
    for key, commit in pinned.items():
        output.print(escape(f"{key}: {commit}"))
    if failed:
        reasons = "; ".join(f"{key} ({reason})" for key, reason in failed.items())
        raise UserError(f"not pinned: {reasons}; check the hub, names and access (`hf auth login`)")


def pin_step(steps: Sequence[Step], run: bool) -> str:
    """The line about the pins of what the steps read. run: pin first what is not pinned yet."""
    from bild_lab.papers.runs.repositories import hub_is_reachable, pin, unpinned

    read = [repository for step in steps for repository in step.repositories]
    missing = unpinned(read)
    if not missing:
        return f"done: all {len(set(read))} repositories are pinned" if read else "nothing to pin"
    names = ", ".join(repository.key for repository in missing)
    if not run:
        are = "repository is" if len(missing) == 1 else "repositories are"
        return f"to do: {len(missing)} {are} not pinned yet ({names}); run=true pins"
    if not hub_is_reachable():
        return f"not done, as the hub cannot be reached: read as they are on this day: {names}"
    try:
        pinned, failed = pin(dict.fromkeys(missing))
    except OSError as error:
        return f"not done, as {files.PINS} cannot be written ({error}); main is read as it is today"
    sentences = [f"pinned {key} to {commit}" for key, commit in pinned.items()]
    sentences += [f"{key} is not pinned: {reason}" for key, reason in failed.items()]
    return "; ".join(sentences)


def steps_with_access(options: PaperRunOptions, logged_in: bool) -> tuple[list[Step], list[str]]:
    """The steps, without the answers that trainings can do without and this login may not read;
    and the ids of these data sets.
    """
    from bild_lab.papers.runs.recipes import OPTIONAL_ANSWERS
    from bild_lab.papers.runs.repositories import may_read, state_of
    from bild_lab.papers.runs.steps import steps_of

    steps = steps_of(options.item, options.scale, options.overrides, live=options.live)
    read = {repository.name: repository for step in steps for repository in step.repositories}
    left_out = [
        name
        for name, hub_id in OPTIONAL_ANSWERS.items()
        if hub_id in read and not may_read(state_of(read[hub_id]), logged_in)
    ]
    if left_out:
        steps = steps_of(options.item, options.scale, options.overrides, left_out, options.live)
    return steps, [OPTIONAL_ANSWERS[name] for name in left_out]


def require_one_model(steps: Sequence[Step], overrides: Sequence[str]) -> None:
    """Raise UserError if answers from a file would be learned as those of several models."""
    if not any(word.startswith("calibration=") and ".json" in word for word in overrides):
        return
    models = dict.fromkeys(
        setting.target
        for step in steps
        if "calibration=" in step.command
        for setting in step.settings
    )
    if len(models) > 1:
        raise UserError(
            "a file of calibration=[…] has the answers of one model, but the trainings are of"
            f" {', '.join(map(str, models))}; choose one with pair=NAME"
        )


def sentences_line(steps: Sequence[Step], run: bool) -> str | None:
    """The line about NLTK's sentence splitter; None if no step scores by ROUGE-Lsum. run: fetch its
    data first.
    """
    from bild_lab.lab.metrics.sentence_data import FOLDER, PACKAGE, fetch_sentence_data
    from bild_lab.lab.metrics.writing import splitter_name

    data = [setting.dataset for step in steps for setting in step.settings]
    metrics = [
        metric
        for dataset in data
        for metric in (dataset.get("metric"), *(dataset.get("metrics") or ()))
    ]
    if ROUGE_LSUM not in metrics:
        return None
    if splitter_name() == PACKAGE:
        return f"done: NLTK's {PACKAGE} splits sentences for ROUGE-Lsum"
    without = "sentences are split by a short list of abbreviations, as points and figures say"
    if not run:
        return (
            f"to do: run=true fetches NLTK's {PACKAGE} for ROUGE-Lsum; without internet {without}"
        )
    if (reason := fetch_sentence_data()) is not None:
        return f"not done, as NLTK's {PACKAGE} cannot be fetched ({reason}): {without}"
    return f"done: NLTK's {PACKAGE} was fetched into {FOLDER}"


def main() -> None:
    if sys.argv[1:2] == [PINS]:
        pin_named(sys.argv[2:])
        return
    options = parse(sys.argv[1:])
    status_line.enter("reading the experiments")
    from bild_lab.papers.runs.machine import machine_of
    from bild_lab.papers.runs.step_runs import run_steps, submit_steps

    machine = machine_of(options.gpu, options.force, options.gpus, options.processes)
    steps, left_out = steps_with_access(options, machine.gated)
    require_one_model(steps, options.overrides)
    pins = pin_step(steps, options.run)
    if options.run:
        # a step is done with the pins that it was made with
        steps, left_out = steps_with_access(options, machine.gated)
    output.print(escape(f"0 pins: {pins}"))
    for name in left_out:
        output.print(escape(f"without {name}: {LEFT_OUT.format(name=name)}"))
    if (sentences := sentences_line(steps, options.run)) is not None:
        output.print(escape(f"0 sentences: {sentences}"))
    if options.run:
        status_line.leave()
        if machine.warning and machine.gpus > 1:
            console.print(f"[bold]{escape(machine.warning)}[/bold]")
        submits = (
            run_steps if options.slurm is None else partial(submit_steps, parameters=options.slurm)
        )
        if not submits(
            steps, machine, say=lambda text: console.print(f"[dim]{escape(text)}[/dim]")
        ):
            raise SystemExit(1)
        return
    print_plan(steps, machine)


def print_plan(steps: Sequence[Step], machine: Machine) -> None:
    """Each step with its command and its needs on this machine, and the needs of all together."""
    from bild_lab.papers.runs.machine import (
        describe_placement,
        has_known_sizes,
        needs_of,
        placement_of,
    )
    from bild_lab.papers.runs.needs import describe_needs, downloads, gpu_hours_of
    from bild_lab.papers.runs.paper_runs import unverified
    from bild_lab.papers.runs.step_processes import command_line
    from bild_lab.papers.runs.step_runs import plan

    needed, known_hours, unknown = [], [], []
    for place, (step, status) in enumerate(plan(steps, machine), 1):
        step_needs = needs_of(step, machine)
        needed += step_needs
        hours = gpu_hours_of(step_needs)
        if hours is not None:
            known_hours.append(hours)
        elif step_needs:
            unknown.append(place)
        reads = f"reads {', '.join(step.reads)}" if step.reads else ""
        writes = f"writes {step.writes}"
        placement = placement_of(step, machine)
        command = step.command if placement is None else command_line(step, placement)
        spread_over = 1 if placement is None else placement.spread_over
        described = describe_needs(step_needs, spread_over)
        parts = [command, reads, writes, describe_placement(step, machine), described]
        output.print(escape(f"{place} {status}: {'; '.join(filter(None, parts))}"))
    # nothing is estimated for toys
    warning = machine.warning if has_known_sizes(needed) else machine.few_cores
    if warning:
        output.print(escape(warning))
    sizes = downloads(needed)
    if unseen := sorted(set(unverified()) & set(sizes)):
        output.print(escape(f"not seen on the hub's pages: {', '.join(unseen)}"))
    output.print(escape(total(sizes, known_hours, unknown, machine.gpu)))


def total(
    sizes: Mapping[str, float], known_hours: Sequence[float], unknown: Sequence[int], gpu: str
) -> str:
    """The downloads of all steps together, and their time if some of it is known. unknown: places
    of steps whose time is not.
    """
    listed = ", ".join(f"{name} {size:.1f}" for name, size in sorted(sizes.items()))
    words = "nothing to download"
    if sizes:
        words = f"together {sum(sizes.values()):.0f} GB to download ({listed})"
    if not known_hours:
        return words
    hours = sum(known_hours)
    time = f"about {hours:.1f} GPU-hours on {gpu}"
    if unknown:
        steps = "step" if len(unknown) == 1 else "steps"
        places = ", ".join(map(str, unknown))
        time = f"at least {hours:.1f} GPU-hours on {gpu}; unknown: {steps} {places}"
    return f"{words}, {time}"


if __name__ == "__main__":
    run_application(main, None)
