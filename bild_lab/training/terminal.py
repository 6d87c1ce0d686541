"""What a training shows on the terminal, on the error stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from bild_lab.engine.models.ranks import launched
from bild_lab.lab.cli import progress, stages


class TerminalLog(TrainerCallback):
    """Moves a bar with loss and throughput, and prints a line for every evaluation, with the learning rate.

    If the error stream is not a terminal, every logged loss is a line too.
    """

    def __init__(self, bar: Progress, title: str, steps: int, metric: str) -> None:
        self._metric, self._bar = metric, bar
        self._task = bar.add_task(title, total=steps, loss="")
        self._logged, self._best = "", float("-inf")

    def on_train_begin(self, args, state, control, **kwargs):
        """Start at the step that was reached before."""
        self._bar.update(self._task, completed=state.global_step)
        if state.best_metric is not None:
            self._best = state.best_metric
        if state.global_step:
            self.print(f"resuming from step {state.global_step}")

    def on_step_end(self, args, state, control, **kwargs):
        """One step more."""
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the mean loss of the steps since the last log, in nats a token."""
        if logs and "loss" in logs:
            loss, throughput = f"loss {logs['loss']:.3f}", f"{logs['examples_per_s']:.0f} examples/s"
            self._logged = f"{loss}, learning rate {logs['learning_rate']:.1e}, {throughput}"
            self._bar.update(self._task, loss=f"{loss}, {throughput}")  # more would leave no room for the bar
            if not self._bar.console.is_terminal:
                self.print(f"step {state.global_step}: {self._logged}")

    def on_evaluate(self, args, state, control, metrics: dict[str, Any] | None = None, **kwargs):
        """One line: the metric, whether it is the best so far, and losses."""
        value = metrics[f"eval_{self._metric}"]
        best = ", the best so far" if value > self._best else ""
        self._best = max(self._best, value)
        self.print(
            f"step {state.global_step}: {self._metric} {value:.2f}{best}; "
            f"validation loss {metrics['eval_loss']:.3f}; {self._logged}"
        )

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line)


@contextmanager
def progress_bar(shown: bool) -> Iterator[Progress]:
    """A bar of training steps while the block runs."""
    stages.leave()
    console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not shown)
    counted = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn())
    columns = (*counted, TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown, expand=True) as bar:
        yield bar


@contextmanager
def answers_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar of the first process's answers while the block runs; the block reports (answered, to answer)."""
    with progress(shown=launched().first) as bar:
        task = bar.add_task("answers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
