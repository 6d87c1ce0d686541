"""What an item of a paper takes, step by step, and its run: python scripts/paper_run.py ITEM [run=true] [KEY=VALUE …]

    python scripts/paper_run.py bild/fig4                       the steps, and what each needs
    python scripts/paper_run.py bild/fig4 run=true              runs them: calibration, trainings, sweeps, figure
    python scripts/paper_run.py bild/fig4 scale=small run=true  on the toy pair
    python scripts/paper_run.py bild/fig4 gpu=t4                on a GPU that is not here
    python scripts/paper_run.py all                             every item; bild/thresholds: an experiment of no item

A step that is done is skipped, so the same command goes on where it was stopped. One that cannot run here says why,
and what does not depend on it still runs. force=true also tries what should not fit. Other KEY=VALUE go to every step
that has the key, such as dataset.limit=100. Memory is a closed form, times are estimates.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bild_lab.errors import UserError
from bild_lab.lab.cli import console, escape, output, run_application, stages

FLAGS = ("true", "false")


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for. gpu: None for the one that is here."""

    item: str
    scale: str
    gpu: str | None
    run: bool
    force: bool
    overrides: list[str]


def parse(words: list[str]) -> Wanted:
    """Read the command line. Raises UserError for anything that is no item, no setting and no override."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    scale, gpu = settings.pop("scale", "paper"), settings.pop("gpu", None)
    run, force = (settings.pop(key, "false") for key in ("run", "force"))
    if len(names) != 1 or run not in FLAGS or force not in FLAGS:
        raise UserError(f"give one item such as bild/fig4, or all, then KEY=VALUE; got {' '.join(words) or 'nothing'}")
    return Wanted(names[0], scale, gpu, run == "true", force == "true", [f"{k}={v}" for k, v in settings.items()])


def main() -> None:
    wanted = parse(sys.argv[1:])
    stages.enter("reading the experiments")
    from bild_lab.papers.paper_runs import downloads, needs, sentence, unverified
    from bild_lab.papers.steps import machine_of, outlook, run_steps, steps_of

    machine = machine_of(wanted.gpu, wanted.force)
    steps = steps_of(wanted.item, wanted.scale, wanted.overrides)
    if wanted.run:
        stages.leave()
        if not run_steps(steps, machine, lambda text: console.print(f"[dim]{escape(text)}[/dim]")):
            raise SystemExit(1)
        return
    everything = []
    for place, (step, state) in enumerate(outlook(steps, machine), 1):
        needed = [needs(each, machine.gpu) for each in step.settings]
        everything += needed
        reads = f"reads {', '.join(step.reads)}" if step.reads else ""
        parts = [step.command, reads, f"writes {step.writes}", sentence(needed, machine.gpu)]
        output.print(escape(f"{place} {state}: {'; '.join(filter(None, parts))}"))
    sizes = downloads(everything)
    listed = ", ".join(f"{name} {size:.1f}" for name, size in sorted(sizes.items()))
    hours = sum(each.hours or 0.0 for each in everything)
    total = f"together {sum(sizes.values()):.0f} GB to download ({listed}), about {hours:.1f} h on {machine.gpu}"
    output.print(escape(total if sizes else "nothing to download"))
    if unseen := sorted(set(unverified()) & set(sizes)):
        output.print(escape(f"not seen on the hub's pages: {', '.join(unseen)}"))


if __name__ == "__main__":
    run_application(main, None)
