"""What a figure needs at the paper's scale, and its run: python scripts/paper_run.py FIGURE [gpu=GPU] [run=true]

    python scripts/paper_run.py bild_fig4             downloads, memory and time, on an A100
    python scripts/paper_run.py all gpu=t4            every figure
    python scripts/paper_run.py bild/thresholds       an experiment that is in no figure
    python scripts/paper_run.py bild_fig4 run=true    its commands, with runtime.device=cuda

Memory is a closed form. Times are estimates: what a token reads over the GPU's bandwidth.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.cli import console, escape, output, run_application, stages

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = "runtime.device=cuda"


def parse(words: list[str]) -> tuple[str, str, bool]:
    """The figure, the GPU, and whether to run. Raises UserError for anything else."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    gpu, run = settings.pop("gpu", "a100"), settings.pop("run", "false")
    if settings or len(names) != 1 or run not in ("true", "false"):
        raise UserError(f"give one figure, or all, then gpu=GPU and run=true; got {' '.join(words) or 'nothing'}")
    return names[0], gpu, run == "true"


def tell(figure: str, gpu: str) -> None:
    """Print what a figure's commands need."""
    from bild_lab.papers.paper_runs import commands, downloads, needs, sentence, settings_of

    output.print(f"[bold]{figure}[/bold]")
    needed = []
    for command in commands(figure):
        output.print(escape(f"  {on_gpu(command)}"))
        for setting in settings_of(command):
            needed.append(needs(setting, gpu))
            output.print(escape(f"    {sentence(needed[-1], gpu)}"))
    sizes = downloads(needed)
    hours = sum(each.hours or 0.0 for each in needed)
    listed = ", ".join(f"{name} {size:.1f}" for name, size in sorted(sizes.items()))
    output.print(
        escape(f"  together {sum(sizes.values()):.0f} GB to download ({listed}), about {hours:.1f} h of decoding")
    )


def on_gpu(command: str) -> str:
    """The command with the device, if it decodes; training scripts take the GPU by themselves."""
    from bild_lab.papers.paper_runs import DECODES

    return f"{command} {ON_GPU}" if shlex.split(command)[1] in DECODES else command


def run(figure: str) -> None:
    """Run a figure's commands in turn. Raises UserError if one fails; finished points are kept."""
    from bild_lab.papers.paper_runs import commands

    for command in commands(figure):
        console.print(f"[dim]{escape(on_gpu(command))}[/dim]")
        _, script, *words = shlex.split(on_gpu(command))
        stages.leave()
        if subprocess.run([sys.executable, str(ROOT / script), *words]).returncode != 0:
            raise UserError(f"{figure}: this command failed: {command}")


def main() -> None:
    name, gpu, runs = parse(sys.argv[1:])
    stages.enter("reading the experiments")
    from bild_lab.papers.paper_runs import figures, unverified

    for figure in figures(name):
        tell(figure, gpu)
        if runs:
            run(figure)
    output.print(escape(f"not seen on the hub's pages: {', '.join(unverified()) or 'nothing'}"))


if __name__ == "__main__":
    run_application(main, None)
