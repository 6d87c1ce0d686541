"""Build a Weights & Biases report over groups of runs: python scripts/wandb_report.py GROUP [GROUP …] [KEY=VALUE …]

A group is the name of a sweep that was logged. The report's spec is written to outputs/NAME. Publishing it in the
project needs a login (`wandb login`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from bild_lab.errors import UserError, require_flag
from bild_lab.lab.config.cli import escape, output, refusing, run_application, words_as_list
from bild_lab.lab.config.groups import hydra_main

OUTPUTS = Path("outputs")


def report(cfg: DictConfig) -> None:
    """Write the spec, publish it, and print its address.

    Raises UserError for bad input, for a sweep without runs, and for a report that could not be
    published.
    """
    # imported late: torch and wandb take seconds
    from bild_lab.files import write_atomically
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.store.records import require_writable
    from bild_lab.report.wandb.report import (
        connect,
        group_report,
        logged_panels,
        publish,
        report_spec,
    )

    require_flag("offline", cfg.offline)
    folder = sweep_folder(cfg)
    require_writable(folder)
    groups = [str(group).removeprefix(f"{OUTPUTS}/").rstrip("/") for group in cfg.groups]
    api, why = (None, "") if cfg.offline else connect()
    panels = logged_panels(groups, cfg.project, cfg.entity, OUTPUTS, api)
    built = group_report(groups, panels, cfg.project, cfg.entity, cfg.title)
    path = folder / "report.json"
    write_atomically(path, report_spec(built).encode())
    output.print(escape(f"{path}: the spec of {built.title!r}"))
    if cfg.offline:
        return
    address, why = (None, why) if api is None else publish(built, api)
    if address is None:
        raise UserError(
            f"not published: {why}; {path} is kept, and the same command publishes it after `wandb"
            " login`"
        )
    output.print(escape(f"published at {address}"))


@hydra_main("wandb_report")
def main(cfg: DictConfig) -> None:
    """One report."""
    with refusing():
        report(cfg)


if __name__ == "__main__":
    sys.argv[1:] = words_as_list(sys.argv[1:], "groups")
    run_application(main, "wandb_report")
