"""What a training shows on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from bild_lab.training.job import TrainingJob

if TYPE_CHECKING:
    from bild_lab.training.frozen.job import FrozenJob


class TerminalLog(TrainerCallback):
    """Moves a bar with loss and throughput; prints a line for every evaluation, the learning rate too.

    Where there is no terminal to move a bar on, every log is a line.
    """

    def __init__(self, job: TrainingJob | FrozenJob, bar: Progress) -> None:
        self._metric, self._bar = job.metric, bar
        self._task = bar.add_task(job.title, total=job.recipe.max_steps, logged="")
        self._logged, self._best = "", float("-inf")

    def on_train_begin(self, args, state, control, **kwargs):
        """Start where an earlier run stopped."""
        self._bar.update(self._task, completed=state.global_step)
        if state.best_metric is not None:
            self._best = state.best_metric
        if state.global_step:
            self._bar.console.print(f"going on from step {state.global_step}")

    def on_step_end(self, args, state, control, **kwargs):
        """One step further."""
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the mean loss of the steps since the last log, in nats a token."""
        if logs and "loss" in logs:
            self._logged = (
                f"loss {logs['loss']:.3f}, learning rate {logs['learning_rate']:.1e}, "
                f"{logs['examples_per_s']:.0f} examples/s"
            )
            brief = f"loss {logs['loss']:.3f}, {logs['examples_per_s']:.0f} examples/s"
            self._bar.update(self._task, logged=brief)  # more would leave no room for the bar
            if not self._bar.console.is_terminal:
                self._bar.console.print(f"step {state.global_step}: {self._logged}")

    def on_evaluate(self, args, state, control, metrics: dict[str, Any] | None = None, **kwargs):
        """One line: quality, whether it is the best so far, and losses."""
        value = metrics[f"eval_{self._metric}"]
        best = ", the best so far" if value > self._best else ""
        self._best = max(self._best, value)
        self._bar.console.print(
            f"step {state.global_step}: {self._metric} {value:.2f}{best}; "
            f"validation loss {metrics['eval_loss']:.3f}; {self._logged}"
        )


@contextmanager
def terminal_log(job: TrainingJob | FrozenJob, kind: type[TerminalLog] = TerminalLog) -> Iterator[TerminalLog]:
    """A bar on the error stream while the block runs."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[logged]}")]
    console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not job.progress)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not job.progress) as bar:
        yield kind(job, bar)
