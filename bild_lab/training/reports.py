"""What a training reports: its progress on the terminal, its curves in Weights & Biases, a command
to decode with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from rich.markup import escape
from transformers import TrainerCallback

from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.config.console import ProgressBar, console, output, progress_bar
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import same_rows
from bild_lab.lab.point.build import build
from bild_lab.ranks import launched


class TerminalLog(TrainerCallback):
    """Moves a bar with loss and throughput, and prints a line for every evaluation, on the error
    stream.

    If that is not a terminal, every logged loss is a line too.
    """

    def __init__(self, bar: ProgressBar, title: str, steps: int, metric: str | None) -> None:
        self._metric, self._bar = metric, bar
        self._task = bar.add_task(title, total=steps, loss="")
        self._logged, self._best = "", float("-inf")

    def on_train_begin(self, args, state, control, **kwargs):
        """Start at the step that was reached before."""
        self._bar.update(self._task, completed=state.global_step)
        if state.best_metric is not None:
            self._best = state.best_metric
        if state.global_step:
            self._bar.print_line(f"resuming from step {state.global_step}")

    def on_step_end(self, args, state, control, **kwargs):
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the mean loss of the steps since the last log, in nats a token."""
        if logs and "loss" in logs:
            loss = f"loss {logs['loss']:.3f}"
            throughput = f"{logs['examples_per_s']:.3g} examples/s"
            self._logged = f"{loss}, learning rate {logs['learning_rate']:.1e}, {throughput}"
            # more would leave no room for the bar
            self._bar.update(self._task, loss=f"{loss}, {throughput}")
            if not self._bar.console.is_terminal:
                self._bar.print_line(f"step {state.global_step}: {self._logged}")

    def on_evaluate(self, args, state, control, metrics: dict[str, Any] | None = None, **kwargs):
        """The metric, whether it is the best so far, and losses."""
        value = metrics[f"eval_{self._metric}"]
        best = ", the best so far" if value > self._best else ""
        self._best = max(self._best, value)
        self._bar.print_line(
            f"step {state.global_step}: {self._metric} {value:.2f}{best}; "
            f"validation loss {metrics['eval_loss']:.3f}; {self._logged}"
        )


@contextmanager
def answers_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar of the first process's answers while the block runs; the block reports (more answers,
    all to answer).
    """
    with progress_bar(shown=launched().is_main) as bar:
        task = bar.add_task("answers", total=None)
        yield lambda count, total: bar.update(task, advance=count, total=total)


def training_logger(logger: DictConfig) -> Any:
    """The logger that `conf/logger` describes; None if it has no values.

    Raises UserError for wrong ones.
    """
    values = OmegaConf.to_container(logger, resolve=True)
    return build(values, {}) if set(values) - {"_target_"} else None


def print_closing(logger: Any) -> None:
    """Print where the runs of this process are; nothing without a logger."""
    for line in [] if logger is None else logger.closing():
        console.print(escape(line))


class LogToRun(TrainerCallback):
    """Sends every log and evaluation of a training to a run of Weights & Biases, or of a tracker
    with its methods.

    metric: of the evaluations, None without any. Curves are over the training's step, also after it
    was resumed.
    """

    def __init__(self, run: Any, metric: str | None) -> None:
        self._run = run
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        best = (
            {"loss": "min"}
            if metric is None
            else {"loss": "min", "eval_loss": "min", f"eval_{metric}": "max"}
        )
        # what the table of runs shows, rather than the last value
        for name, summary in best.items():
            run.define_metric(name, step_metric="step", summary=summary)

    def on_log(self, args, state, control, logs=None, **kwargs):
        numbers = {
            key: value for key, value in (logs or {}).items() if isinstance(value, int | float)
        }
        # wandb's own step cannot go back, as resuming does
        self._run.log({**numbers, "step": state.global_step})

    def on_train_end(self, args, state, control, **kwargs):
        if state.best_metric is not None:
            self._run.summary.update(
                {"best": state.best_metric, "best_step": state.best_global_step}
            )
        self._run.finish()


def print_decoding(command: str, words: Sequence[str], dataset: DatasetSpec) -> None:
    """Print a command that decodes with what was trained, and whether it decodes the very texts.

    words: those of the command that choose its dataset. dataset: what was trained on.
    """
    output.print(escape(f"decode with it: {command}"))
    if decodes_same_texts(words, dataset):
        output.print(
            "these texts were trained on, so their scores tell little; set dataset.split or"
            " dataset.path to others"
        )


def decodes_same_texts(words: Sequence[str], dataset: DatasetSpec) -> bool:
    """Whether a run with these words, of which a split is that of `dataset`, decodes its rows;
    False where that is not known.
    """
    if any(word.startswith("dataset.split=") for word in words):
        return True
    group = next(word for word in words if word.startswith("dataset="))
    return bool(_in_decoded_split(group, dataset))


def _in_decoded_split(group: str, dataset: DatasetSpec) -> bool | None:
    """Whether the split that a run with `group`, dataset=NAME, decodes has the rows of `dataset`;
    None where there is no such split or group, or the data have moved.
    """
    try:
        split = replace(dataset, split=compose_config([group]).dataset.split).split
        # the hub is not asked again for a note
        named = dataset if dataset.path else replace(dataset, hub_data_dir=None)
        return same_rows(named, split)
    except (UserError, HydraException):
        return None


def dataset_words(dataset: DatasetSpec) -> list[str]:
    """The words of the running command that choose its dataset, for a command that decodes on it.

    Limit and split are left out, as they say what is trained on; but the split stays where files
    have none that would be decoded. The file of a dataset may be among the user's own
    configurations.
    """
    hydra = HydraConfig.get()
    dataset_overrides = [
        word for word in hydra.overrides.task if word.startswith(("dataset.", "template="))
    ]
    unlimited = [
        word
        for word in dataset_overrides
        if not word.startswith(("dataset.split=", "dataset.limit="))
    ]
    group = f"dataset={hydra.runtime.choices.dataset}"
    missing = dataset.path is not None and _in_decoded_split(group, dataset) is None
    split = [f"dataset.split={dataset.split}"] if missing else []
    return [*own_configurations(), group, *unlimited, *split]


def own_configurations() -> list[str]:
    """The words that let another command find the user's own configurations, as the running one
    does; none outside of a command.
    """
    if not HydraConfig.initialized():
        return []
    hydra = HydraConfig.get()
    folders = [
        source.path for source in hydra.runtime.config_sources if source.provider == "command-line"
    ]
    search_paths = [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    return [*(word for folder in folders for word in ("--config-dir", folder)), *search_paths]
