"""A target's greedy answers to a dataset: python scripts/generate_calibration.py name=calib [KEY=VALUE …]

Several devices share the work:

    accelerate launch --multi_gpu --num_processes 2 scripts/generate_calibration.py name=calib

(on CPUs too, with runtime.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.markup import escape

from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.console import console, output
from bild_lab.lab.config.entrypoint import refusing, run_application
from bild_lab.lab.config.schemas import stop_strings, typed
from bild_lab.ranks import launched, process_group

if TYPE_CHECKING:
    import torch

    from bild_lab.training.calibration import CalibrationJob

WANTED = (
    "a name for the answers, a model and a dataset are needed; python"
    " scripts/generate_calibration.py name=calib model.path=DIR dataset=local dataset.path=FILE, or"
    " name=calib alone for the toy model"
)


def generate(cfg: DictConfig) -> None:
    """Generate the missing answers. Raises UserError for bad input."""
    # torch is loaded after the words are checked
    from bild_lab.engine.models.device import resolve_device
    from bild_lab.training.calibration import generate_calibration
    from bild_lab.training.reports import answers_bar

    device = resolve_device(cfg.runtime.device)
    processes = process_group(device.type == "cpu")
    job = calibration_job(cfg, processes.device if launched().count > 1 else device)
    with answers_bar() as report:
        answered = generate_calibration(job, report)
    print_summary(job, answered)
    processes.destroy_process_group()


def calibration_job(cfg: DictConfig, device: torch.device) -> CalibrationJob:
    """The configuration, checked; no weights are read. device: this process's own."""
    from bild_lab.engine.models.device import set_threads
    from bild_lab.lab.data.dataset_spec import DatasetSpec, for_model
    from bild_lab.lab.data.examples import load_examples
    from bild_lab.lab.data.prompts import cut_sources
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.point.read_model import configured_model
    from bild_lab.lab.store.records import require_writable
    from bild_lab.training.calibration import CalibrationJob
    from bild_lab.training.modules.states import BasePlacement
    from bild_lab.training.reports import dataset_words

    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    folder = sweep_folder(cfg)
    require_writable(folder)
    set_threads(cfg.runtime.threads)
    device_map = BasePlacement(cfg.runtime.device_map).device_map
    target = configured_model(cfg, device, cfg.runtime.dtype, device_map)
    target.checkpoint.check()
    dataset = for_model(dataset, target.checkpoint)
    examples = cut_sources(
        load_examples(dataset), dataset.max_source_tokens, target.checkpoint.prompt_length
    )
    sizes = (cfg.decoding.max_new_tokens, cfg.batch_size, cfg.part_size)
    stop = stop_strings(cfg.decoding.stop)
    return CalibrationJob(target, dataset, examples, *sizes, folder, dataset_words(dataset), stop)


def print_summary(job: CalibrationJob, answered: int) -> None:
    """Print what the folder holds and the command that uses it. answered: how many answers this run
    generated.
    """
    metrics = json.loads((job.folder / "metrics.json").read_text(encoding="utf-8"))
    if not answered:
        console.print("[dim]all answers were there already[/dim]")
    what = (
        f"{metrics['examples']:,} answers of {job.target.checkpoint.path} to {job.dataset.name}"
        f" {job.dataset.split}"
    )
    counts = (
        f"{metrics['answer_tokens']:,} tokens, {metrics['cut_by_length']:,} answers cut at"
        f" {job.max_new_tokens}"
    )
    speed = (
        f"{metrics['examples_per_s']:.1f} examples and {metrics['tokens_per_s']:,.0f} tokens/s in"
        " each process"
    )
    output.print(escape(f"{job.folder}: {what}, {counts}; {speed}"))
    words = ["name=aligned", "model.path=SMALL", f"calibration={job.folder}"]
    words += job.target.checkpoint.switches
    output.print(escape(f"align with: python scripts/align.py {shlex.join(words)}"))


@hydra_main("calibration")
def main(cfg: DictConfig) -> None:
    """One folder of answers."""
    with refusing():
        generate(cfg)


if __name__ == "__main__":
    run_application(main, "calibration", WANTED)
