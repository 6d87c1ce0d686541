"""Train a small model on a large one's answers: python scripts/align.py name=aligned model.path=SMALL [KEY=VALUE …]

Several devices train together:

    accelerate launch --multi_gpu --num_processes 2 scripts/align.py name=aligned model.path=SMALL

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bild_lab.errors import UserError, require_flag
from bild_lab.lab.cli import console, escape, output, refusing, run_application
from bild_lab.lab.config import MeasureSpec, RuntimeSpec, hydra_main, typed

if TYPE_CHECKING:
    from bild_lab.training.align import Alignment


def run(cfg: DictConfig) -> None:
    """Train, compare, report. Raises UserError for bad input."""
    from bild_lab.lab.results.records import Sweep
    from bild_lab.report.sweep import report_sweep
    from bild_lab.training.align import align  # late: torch takes seconds to load
    from bild_lab.training.reports import print_closing

    job = alignment(cfg)
    metrics = align(job, lambda line: console.print(f"[dim]{escape(line)}[/dim]"))
    if metrics is None:  # another process reports
        return
    if job.comparison is not None:
        report_sweep(Sweep(job.folder))
    output.print(compared_table(metrics["alignment"]["compared"], job))
    output.print(escape(f"{job.folder}/checkpoint is the aligned model; metrics.json holds the table"))
    if job.logger is not None:
        job.logger.log_sweep(Sweep(job.folder))
    print_closing(job.logger)


def alignment(cfg: DictConfig) -> Alignment:
    """The configuration, typed."""
    from bild_lab.engine.models.checkpoint import Checkpoint
    from bild_lab.lab.point import sweep_folder
    from bild_lab.lab.results.records import require_writable
    from bild_lab.training.align import Alignment
    from bild_lab.training.answers import read_calibration
    from bild_lab.training.comparison import Comparison
    from bild_lab.training.distillation import Teaching
    from bild_lab.training.recipe import Recipe
    from bild_lab.training.reports import training_logger

    folder = sweep_folder(cfg)
    require_writable(folder)
    require_flag("sweep", cfg.sweep)
    for key, value in {"model.path": cfg.model.path, "calibration": cfg.calibration}.items():
        if not isinstance(value, str) or not value:
            raise UserError(f"{key} must be a folder, got {value!r}")
    comparison = typed(Comparison, cfg.comparison, "comparison")
    recipe = typed(Recipe, cfg.train, "train")
    runtime, measure = typed(RuntimeSpec, cfg.runtime, "runtime"), typed(MeasureSpec, cfg.measure, "measure")
    calibration = read_calibration(Path(cfg.calibration))
    small = Checkpoint(cfg.model.path, cfg.model.revision)
    unaligned = small if cfg.unaligned.path is None else Checkpoint(cfg.unaligned.path, cfg.unaligned.revision)
    return Alignment(
        calibration=calibration,
        small=small,
        unaligned=unaligned,
        held_out=cfg.held_out,
        recipe=recipe,
        folder=folder,
        runtime=runtime,
        measure=measure,
        comparison=comparison if cfg.sweep else None,
        logger=training_logger(cfg.logger),
        teaching=typed(Teaching, cfg.align, "align"),
    )


def compared_table(compared: dict[str, Any], job: Alignment) -> Table:
    """The measurements before and after the alignment."""
    metric = job.calibration.dataset.metric.upper()
    window = "" if job.comparison is None else job.comparison.window
    select = None if job.comparison is None else job.comparison.select
    chosen = "" if select is None else f" on {select}"
    rows = {
        "token_agreement": ("target's tokens predicted, %", 100),
        "text_agreement": ("target's texts reproduced, %", 100),
        "own_quality": (f"{metric} of the small model alone", 1),
        "target_quality": (f"{metric} of the target", 1),
        "acceptance_rate": (f"acceptance rate, speculative window {window}, %", 100),
        "tokens_per_target_call": ("its tokens per target call", 1),
        "speculative_speedup": ("its speedup", 1),
        "bild_speedup_at_no_loss": (f"speedup of BiLD at no loss{chosen}", 1),
        "bild_difference_at_no_loss": (f"its {metric} against the target's", 1),
        "bild_speedup_at_one_point": (f"speedup of BiLD within one point of loss{chosen}", 1),
        "bild_difference_at_one_point": (f"its {metric} against the target's", 1),
    }
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right")
    for key, (label, scale) in rows.items():
        if key in compared:
            before, after = compared[key]["before"], compared[key]["after"]
            change = None if before is None or after is None else after - before
            table.add_row(label, *(_number(value, scale) for value in (before, after)), _number(change, scale, "+"))
    return table


def _number(value: float | None, scale: float, sign: str = "") -> str:
    return "–" if value is None else f"{value * scale:{sign}.2f}"


@hydra_main("align")
def main(cfg: DictConfig) -> None:
    """One aligned model."""
    with refusing():
        run(cfg)


if __name__ == "__main__":
    run_application(main, "align")
