"""Measure decoding policies: python run.py [-m] [KEY=VALUE …] [GROUP=FILE …]

    python run.py                                      a first run, seconds: experiment=first_run
    python run.py experiment=quickstart                a sweep on the toy pair
    python run.py -m name=mine policy=bild policy.fallback=0.3,0.5 policy.rollback=2,5
    python run.py --cfg job --resolve policy=bild      print the whole configuration
    eval "$(python run.py -sc install=bash)"           complete keys with TAB

After -m a list of values is a sweep. Results go to outputs/NAME; a repeated command
skips finished points. docs/commands.md has the other commands.
"""

import sys

import hydra
from omegaconf import DictConfig

from bild_lab.lab.cli import console, require_one_process, run_application
from bild_lab.lab.config import config_dir

FIRST = "experiment=first_run"
NEXT = (
    "next: python run.py experiment=quickstart    a sweep of thresholds, the same pair\n"
    "      python run.py -m name=mine pair.target=DIR pair.draft=DIR dataset=local \\\n"
    "        dataset.path=FILE dataset.source_column=COLUMN policy=bild,speculative\n"
    "      python run.py --help                   every key, and the words of the reports"
)


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
def main(cfg: DictConfig) -> float:
    """One point of a sweep."""
    from bild_lab.lab.sweep import measure_point  # torch loads only if there is something to measure

    return measure_point(cfg)


def run() -> None:
    """Run what the command line says; without a word, a first experiment that ends with a hint."""
    require_one_process()
    first = not sys.argv[1:]
    if first:
        console.print(f"[dim]no arguments: {FIRST}[/dim]")
        sys.argv.append(FIRST)
    try:
        run_application(main)
    except SystemExit as ended:
        if first and not ended.code:
            console.print(NEXT)
        raise


if __name__ == "__main__":
    run()
