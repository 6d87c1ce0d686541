"""Train a small model on a large one's answers: python scripts/align.py name=aligned model.path=SMALL [KEY=VALUE …]

Several devices train together:

    accelerate launch --multi_gpu --num_processes 2 scripts/align.py name=aligned model.path=SMALL

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bild_lab.errors import UserError, require_flag
from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.console import output
from bild_lab.lab.config.entrypoint import refusing, run_application
from bild_lab.lab.config.schemas import typed

if TYPE_CHECKING:
    from bild_lab.training.align import Alignment


def run(cfg: DictConfig) -> None:
    """Train, compare, and print how to measure it. Raises UserError for bad input."""
    from bild_lab.training.align import align  # late: torch takes seconds to load
    from bild_lab.training.reports import print_closing

    job = alignment(cfg)
    metrics = align(job)
    if metrics is None:  # another process reports
        return
    output.print(compared_table(metrics["alignment"]["compared"]))
    output.print(
        escape(f"{job.folder}/checkpoint is the aligned model; metrics.json holds the table")
    )
    for line in commands(job):
        output.print(escape(line))
    print_closing(job.logger)


def alignment(cfg: DictConfig) -> Alignment:
    """The configuration, typed."""
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.point.read_model import configured_checkpoint
    from bild_lab.lab.store.records import require_writable
    from bild_lab.training.align import Alignment
    from bild_lab.training.answers import read_calibration
    from bild_lab.training.distillation import DistillationSpec
    from bild_lab.training.reports import training_logger
    from bild_lab.training.train_spec import TrainSpec

    folder = sweep_folder(cfg)
    require_writable(folder)
    require_flag("acceptance", cfg.acceptance)
    for key, value in {"model.path": cfg.model.path, "calibration": cfg.calibration}.items():
        if not isinstance(value, str) or not value:
            raise UserError(f"{key} must be a folder, got {value!r}")
    recipe = typed(TrainSpec, cfg.train, "train")
    calibration = read_calibration(Path(cfg.calibration))
    small = unaligned = configured_checkpoint(cfg)
    if cfg.unaligned.path is not None:
        unaligned = replace(small, path=cfg.unaligned.path, revision=cfg.unaligned.revision)
    return Alignment(
        calibration=calibration,
        small=small,
        unaligned=unaligned,
        held_out=cfg.held_out,
        recipe=recipe,
        folder=folder,
        acceptance=cfg.acceptance,
        logger=training_logger(cfg.logger),
        distillation_spec=typed(DistillationSpec, cfg.align, "align"),
    )


def commands(job: Alignment) -> list[str]:
    """Commands that measure the target with its aligned drafter."""
    target, draft = job.target, job.folder / "checkpoint"
    revision = [] if target.revision is None else [f"pair.target_revision={target.revision}"]
    pair = [f"pair.target={target.path}", *revision, f"pair.draft={draft}", "pair.aligned=true"]
    shared = [*pair, *target.switches, *job.calibration.dataset_words]
    speculative = ["policy=speculative", "policy.window=3,5,7", *shared]
    thresholds = ["policy.fallback=0.1,0.2,0.3,0.5,0.7,0.9", "policy.rollback=0.69,1,1.5,2,3,5"]
    return [
        f"measure it: python run.py -m {shlex.join(speculative)}",
        (
            "choose BiLD's thresholds: python scripts/screen.py"
            f" {shlex.join(['policy=bild', *thresholds, *shared])}"
        ),
    ]


def compared_table(compared: dict[str, Any]) -> Table:
    """The drafter's agreement with the target before and after the alignment, in per cent."""
    labels = {
        "token_agreement": "target's tokens ranked first",
        "acceptance_rate": "expected acceptance rate",
    }
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("%")
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right")
    for key, both in compared.items():
        unaligned, aligned = both["before"] * 100, both["after"] * 100
        table.add_row(
            labels[key], f"{unaligned:.2f}", f"{aligned:.2f}", f"{aligned - unaligned:+.2f}"
        )
    return table


@hydra_main("align")
def main(cfg: DictConfig) -> None:
    """One aligned model."""
    with refusing():
        run(cfg)


if __name__ == "__main__":
    run_application(main, "align")
