"""The loss and scores of a module that predicts several tokens at every context, one in each column."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bild_lab.training.frozen.splits import Sample, Splitter, collate
from bild_lab.training.pairs import IGNORED
from bild_lab.training.progress import TerminalLog

TOP = 5  # candidates a column; the paper's draft trees take as many (BiTA §4.1.2)

PerContext = Callable[[Bool[Tensor, "n columns"]], Float[Tensor, " n"]]


class ColumnLoss:
    """Cross-entropy in nats a label, each column's weighed. Called as the Trainer calls its `compute_loss_func`."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = tuple(weights)

    def __call__(
        self,
        logits: Float[Tensor, "*rows columns vocab"],
        labels: Int[Tensor, "*rows columns"],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Float[Tensor, ""]:
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return self.total(logits, labels) / count

    def total(
        self, logits: Float[Tensor, "*rows columns vocab"], labels: Int[Tensor, "*rows columns"]
    ) -> Float[Tensor, ""]:
        """The weighed sum over all labels."""
        each = cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return (each.view(labels.shape) * each.new_tensor(self._weights)).sum()


def leading_run(hits: Bool[Tensor, "n columns"]) -> Float[Tensor, " n"]:
    """How many columns are right before the first that is wrong: the drafts of a chain that would be accepted."""
    return hits.long().cumprod(-1).sum(-1).float()


@dataclass(frozen=True)
class ColumnEvaluator:
    """Scores a module on held-out samples, each process its share; every process gets the whole result.

    columns: their names. metric: what decides which weights are best, the mean over contexts of `per_context`, which
    is given the columns whose first choice is right.
    """

    pairs: Sequence[Sample]
    splitter: Splitter
    columns: tuple[str, ...]
    metric: str
    per_context: PerContext
    batch_size: int

    def __call__(self, model: nn.Module, loss: ColumnLoss) -> dict[str, float]:
        """The metric, `loss` in nats a label, and seconds.

        And each column's share of labels that are its first choice, `top_1_COLUMN`, or among the first five,
        `top_5_COLUMN`.
        """
        started = time.perf_counter()
        shares = gather_object([self._sums(model, loss).tolist()])
        loss_sum, metric_sum, contexts, *counts = torch.tensor(shares, dtype=torch.double).sum(0).tolist()
        size = len(self.columns)
        labels, firsts, near = (counts[start : start + size] for start in range(0, 3 * size, size))
        scores = {"loss": loss_sum / sum(labels), self.metric: metric_sum / contexts}
        for index, column in enumerate(self.columns):
            scores[f"top_1_{column}"] = firsts[index] / labels[index]
            scores[f"top_{TOP}_{column}"] = near[index] / labels[index]
        return {**scores, "seconds": time.perf_counter() - started}

    @torch.no_grad()
    def _sums(self, model: nn.Module, loss: ColumnLoss) -> Float[Tensor, " sums"]:
        """This process's sums: loss, metric, contexts; then each column's labels, first choices and near ones."""
        device = next(model.parameters()).device
        sums = torch.zeros(3 + 3 * len(self.columns), dtype=torch.double, device=device)
        for batch in self._share():
            labels = batch.pop("labels").to(device)
            logits = model(**{name: tensor.to(device) for name, tensor in batch.items()})
            learned = (labels != IGNORED).any(-1)  # [batch groups], without those that pad
            chosen, wanted = logits[learned].topk(min(TOP, logits.shape[-1])).indices, labels[learned][..., None]
            hits, near = (chosen[..., :1] == wanted).any(-1), (chosen == wanted).any(-1)  # [n, columns] each
            columns = [(wanted != IGNORED).squeeze(-1), hits, near]
            whole = torch.stack([loss.total(logits, labels), self.per_context(hits).sum(), learned.sum()])
            sums += torch.cat([whole, *(column.sum(0) for column in columns)])
        return sums

    def _share(self) -> Iterator[dict[str, Tensor]]:
        """This process's samples, in batches of similar length."""
        state = PartialState()
        ordered = sorted(self.pairs, key=lambda sample: -sample.length)
        mine = ordered[state.process_index :: state.num_processes]
        for start in range(0, len(mine), self.batch_size):
            yield collate([self.splitter.spread(sample) for sample in mine[start : start + self.batch_size]])


class ColumnLog(TerminalLog):
    """Adds to the line of an evaluation one that has every column's accuracy."""

    def on_evaluate(self, args, state, control, metrics: dict[str, Any] | None = None, **kwargs):
        """Two lines."""
        super().on_evaluate(args, state, control, metrics, **kwargs)
        for top in (1, TOP):
            named = {key.removeprefix(f"eval_top_{top}_"): value for key, value in metrics.items()}
            shares = ", ".join(f"{name} {value:.1%}" for name, value in named.items() if name not in metrics)
            self._bar.console.print(f"top-{top} accuracy: {shares}")
