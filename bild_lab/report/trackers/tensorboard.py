"""TensorBoard: a tracker without an account."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bild_lab.errors import UserError
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import by_setting
from bild_lab.lab.store.records import Sweep
from bild_lab.report.headline import headline
from bild_lab.report.phrases import setting_titles
from bild_lab.report.terminal import points_text
from bild_lab.report.trackers.wandb import SWEEP
from bild_lab.report.trackers.wandb_panels import flat_metrics


class TensorBoardRun:
    """A run in a folder, with what trainings ask of one of Weights & Biases. summary: its numbers
    as a whole.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds

        self.writer, self._config, self.summary = SummaryWriter(str(folder)), config, {}

    def define_metric(self, name: str, **_: Any) -> None:
        """Every number is over the step here."""

    def log(self, numbers: Mapping[str, Any]) -> None:
        """The numbers of a step, with their "step"."""
        for name in set(numbers) - {"step"}:
            self.writer.add_scalar(name, numbers[name], numbers["step"])

    def finish(self) -> None:
        """Write configuration and summary, a row of the tab HPARAMS, and close the files."""
        known = {
            key: setting if isinstance(setting, int | float | str) else str(setting)
            for key, setting in self._config.items()
        }
        numbers = {
            name: number for name, number in self.summary.items() if isinstance(number, int | float)
        }
        self.writer.add_hparams(known, numbers, run_name=".")
        self.writer.close()


class TensorBoardLogger:
    """Write each point, the sweep as a whole and each training as a run, in the folder
    `tensorboard` of `directory`.

    Raises UserError where the package tensorboard is not installed.
    """

    def __init__(self, directory: str) -> None:
        if find_spec("tensorboard") is None:
            raise UserError(
                "logger=tensorboard needs the package tensorboard; pip install"
                " 'bild_lab[tensorboard]'"
            )
        self._folder = Path(directory) / "tensorboard"

    def begin(
        self, identity: str, name: str, config: Mapping[str, Any], *_: Any, anew: bool = False
    ) -> TensorBoardRun:
        """Begin a run, or go on with one of this identity. anew: remove an earlier one."""
        if anew:
            shutil.rmtree(self._folder / identity, ignore_errors=True)
        return TensorBoardRun(self._folder / identity, {"name": name, **config})

    def log_point(self, result: Result, config: dict, force: bool = False) -> None:
        """Write a point's knobs, its setting and its numbers."""
        about = {
            key: result.setting.get(key)
            for key in ("target", "draft", "dataset", "split", "dtype", "hardware")
        }
        run = self.begin(
            result.point, result.name, {"policy": result.policy, **result.knobs, **about}, anew=True
        )
        run.summary.update(flat_metrics(result))
        run.finish()

    def log_sweep(self, sweep: Sweep) -> None:
        """Write the headline, the points as tables, and the picture. Points that newer ones replaced
        lose their runs.
        """
        results = sweep.results()
        shown = {result.point for result in results}
        for result in sweep.all_results():
            if result.point not in shown:
                shutil.rmtree(self._folder / result.point, ignore_errors=True)
        writer = self.begin(SWEEP, sweep.name, {}, anew=True).writer
        texts, groups = [headline(results)], by_setting(results)
        for group, title in zip(groups, setting_titles(groups), strict=True):
            texts += [title, points_text(group, latex=False)]
        writer.add_text("sweep", "\n\n".join(texts))
        if (file := sweep.folder / "pareto.png").is_file():
            writer.add_image(
                "pareto", np.asarray(Image.open(file).convert("RGB")), dataformats="HWC"
            )
        writer.close()

    def closing(self) -> list[str]:
        """How to look at the runs."""
        return [f"logged to TensorBoard: tensorboard --logdir {self._folder}"]
