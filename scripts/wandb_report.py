"""Build a Weights & Biases report over groups of runs: python scripts/wandb_report.py GROUP [GROUP …] [KEY=VALUE …]

A group is a sweep's name. The report's spec is always written to outputs/NAME. Publishing it in the project needs a
login (`wandb login`).
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from bild_lab.errors import require_flag
from bild_lab.lab.cli import console, escape, output, refusing, run_application, words_as_list
from bild_lab.lab.config import config_dir


def report(cfg: DictConfig) -> None:
    """Write the spec, publish it, and print its address. Raises UserError for bad input."""
    from bild_lab.files import write_atomically
    from bild_lab.lab.point import sweep_folder
    from bild_lab.lab.results.records import require_writable
    from bild_lab.report.wandb.report import group_report, publish, report_spec  # wandb takes seconds to import

    require_flag("offline", cfg.offline)
    folder = sweep_folder(cfg)
    require_writable(folder)
    built = group_report([str(group) for group in cfg.groups], cfg.project, cfg.entity, cfg.title)
    path = folder / "report.json"
    write_atomically(path, report_spec(built).encode())
    output.print(escape(f"{path}: the spec of {built.title!r}"))
    if cfg.offline:
        return
    try:
        address = publish(built)
    except Exception as error:  # without a login or a network the client raises errors of many types
        console.print(f"[bold]not published[/bold]: {escape(str(error))}")
        console.print("log in with `wandb login` and run the same command, or keep the spec with offline=true")
        return
    output.print(escape(f"published at {address}"))


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="wandb_report")
def main(cfg: DictConfig) -> None:
    """One report."""
    with refusing():
        report(cfg)


if __name__ == "__main__":
    sys.argv[1:] = words_as_list(sys.argv[1:], "groups")
    run_application(main, "wandb_report")
