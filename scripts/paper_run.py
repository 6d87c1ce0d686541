"""What an item of a paper takes, step by step, and its run: python scripts/paper_run.py ITEM [run=true] [KEY=VALUE …]

    python scripts/paper_run.py bild/fig4                       the steps, and what each needs
    python scripts/paper_run.py bild/fig4 run=true              runs them: calibration, trainings, sweeps, figure
    python scripts/paper_run.py bild/fig4 scale=small run=true  on the toy pair
    python scripts/paper_run.py bild/fig4 gpu=t4                on a GPU that is not here
    python scripts/paper_run.py all                             every item; bild/thresholds: an experiment of no item
    python scripts/paper_run.py bild/fig4 run=true launcher=slurm slurm.partition=gpu slurm.gpus_per_node=1 gpu=a100
    python scripts/paper_run.py pins [ID …]                     pins checkpoints and data sets to the hub's commits

A step that is done is skipped, so the same command goes on where it was stopped. One that cannot run here says why,
and what does not depend on it still runs. force=true also tries what should not fit. Other KEY=VALUE go to every step
that has the key, such as dataset.limit=100. launcher=slurm submits the steps as jobs, each after those that it waits
for; slurm.KEY=VALUE are sbatch's options, gpu= the nodes' GPU. Memory is a closed form, times are estimates.

pins asks the hub for today's commit of every repository that an experiment reads, or of these IDs alone. The commits go
to bild_lab/pins.yaml with their date and are read wherever a command names no other revision, such as
pair.target_revision=main.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import yaml
from rich.markup import escape

from bild_lab import files
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import config_dir
from bild_lab.lab.config.console import console, output, status_line
from bild_lab.lab.config.entrypoint import run_application

FLAGS = ("true", "false")
SLURM = "slurm."
PINS = "pins"  # the word for pinning in place of an item


@dataclass(frozen=True)
class PaperRunOptions:
    """What the command line asks for.

    gpu: None for the GPU that is here. slurm: options of jobs; None: no jobs.
    """

    item: str
    scale: str
    gpu: str | None
    run: bool
    force: bool
    slurm: dict[str, str] | None
    overrides: list[str]


def parse(words: list[str]) -> PaperRunOptions:
    """Read the command line.

    Raises UserError for anything that is no item, no setting and no override.
    """
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    scale, gpu = settings.pop("scale", "paper"), settings.pop("gpu", None)
    run, force, launcher = (settings.pop(key, "false") for key in ("run", "force", "launcher"))
    slurm_options = {
        key.removeprefix(SLURM): settings.pop(key)
        for key in list(settings)
        if key.startswith(SLURM)
    }
    if launcher not in ("slurm", "false") or (slurm_options and launcher == "false"):
        raise UserError(
            f"launcher must be slurm, with slurm.KEY=VALUE, or left out; got {launcher}"
        )
    if len(names) != 1 or run not in FLAGS or force not in FLAGS:
        raise UserError(
            "give one item such as bild/fig4, or all, then KEY=VALUE; got"
            f" {' '.join(words) or 'nothing'}"
        )
    if dashed := [word for word in names if word.startswith("-")]:
        raise UserError(f"settings are KEY=VALUE, such as run=true, got {dashed[0]}")
    overrides = [f"{key}={value}" for key, value in settings.items()]
    slurm = slurm_options if launcher == "slurm" else None
    return PaperRunOptions(names[0], scale, gpu, run == "true", force == "true", slurm, overrides)


def repositories() -> Iterator[tuple[str, str, str | None]]:
    """The kind, id and branch (None: main) of every repository that an experiment reads."""
    from bild_lab.papers.paper_runs import hub

    yield from (
        ("models", name, None) for name in hub()["models"] if not name.startswith("outputs/")
    )
    for file in sorted((config_dir() / "dataset").glob("*.yaml")):
        dataset = yaml.safe_load(file.read_text(encoding="utf-8"))
        if dataset.get("hub_id"):
            yield "datasets", dataset["hub_id"], dataset.get("hub_revision")


def pin(names: Sequence[str]) -> None:
    """Pin these repositories, or all.

    Raises UserError for an id that no experiment reads, and in the end for those that the hub does
    not have.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    known = list(dict.fromkeys(repositories()))
    if unknown := set(names) - {name for _, name, _ in known}:
        raise UserError(
            f"no experiment reads {', '.join(sorted(unknown))}; see bild_lab/papers/hub.yaml"
        )
    text = files.PINS.read_text(encoding="utf-8")
    pins, failed = yaml.load(text, yaml.BaseLoader), []
    for kind, name, branch in known:
        if names and name not in names:
            continue
        status_line.enter(f"asking for {name}")
        try:
            commit = HfApi().repo_info(name, repo_type=kind.removesuffix("s"), revision=branch).sha
        except (HTTPError, OSError) as error:
            failed.append(f"{name} ({str(error).strip().splitlines()[0]})")
            continue
        key = name if branch is None else f"{name}@{branch}"
        pins[kind][key] = {"revision": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        output.print(escape(f"{key}: {commit}"))
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    files.write_atomically(files.PINS, (head + yaml.safe_dump(pins)).encode())
    if failed:
        raise UserError(
            f"not pinned: {'; '.join(failed)}; check the hub, names and access (`hf auth login`)"
        )


def main() -> None:
    if sys.argv[1:2] == [PINS]:
        pin(sys.argv[2:])
        return
    options = parse(sys.argv[1:])
    status_line.enter("reading the experiments")
    from bild_lab.papers.machine import machine_of
    from bild_lab.papers.needs import describe_needs, downloads, gpu_hours_of, needs
    from bild_lab.papers.paper_runs import unverified
    from bild_lab.papers.step_runs import plan, run_steps, submit_steps
    from bild_lab.papers.steps import steps_of

    machine = machine_of(options.gpu, options.force)
    steps = steps_of(options.item, options.scale, options.overrides)
    if options.run:
        status_line.leave()
        submits = (
            run_steps if options.slurm is None else partial(submit_steps, parameters=options.slurm)
        )
        if not submits(
            steps, machine, say=lambda text: console.print(f"[dim]{escape(text)}[/dim]")
        ):
            raise SystemExit(1)
        return
    needed, known_hours, unknown = [], 0.0, []
    for place, (step, status) in enumerate(plan(steps, machine), 1):
        step_needs = [needs(setting, machine.gpu) for setting in step.settings]
        needed += step_needs
        hours = gpu_hours_of(step_needs)
        known_hours += hours or 0.0
        if step_needs and hours is None:
            unknown.append(place)
        reads = f"reads {', '.join(step.reads)}" if step.reads else ""
        writes = f"writes {step.writes}"
        parts = [step.command, reads, writes, describe_needs(step_needs, machine.gpu)]
        output.print(escape(f"{place} {status}: {'; '.join(filter(None, parts))}"))
    if machine.warning:
        output.print(escape(machine.warning))
    sizes = downloads(needed)
    if unseen := sorted(set(unverified()) & set(sizes)):
        output.print(escape(f"not seen on the hub's pages: {', '.join(unseen)}"))
    output.print(escape(total(sizes, known_hours, unknown, machine.gpu)))


def total(sizes: Mapping[str, float], hours: float, unknown: Sequence[int], gpu: str) -> str:
    """The downloads and time of all steps together. unknown: places of steps whose time is not."""
    listed = ", ".join(f"{name} {size:.1f}" for name, size in sorted(sizes.items()))
    words = "nothing to download"
    if sizes:
        words = f"together {sum(sizes.values()):.0f} GB to download ({listed})"
    time = f"about {hours:.1f} GPU-hours on {gpu}"
    if unknown:
        steps = "step" if len(unknown) == 1 else "steps"
        places = ", ".join(map(str, unknown))
        time = f"at least {hours:.1f} GPU-hours on {gpu}; unknown: {steps} {places}"
    return f"{words}, {time}"


if __name__ == "__main__":
    run_application(main, None)
