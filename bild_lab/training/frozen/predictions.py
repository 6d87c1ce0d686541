"""Loss, scores and log of a small module, whose predictors each predict one token after every context."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bild_lab.engine.models.ranks import launched
from bild_lab.training.batches import IGNORED, evaluation_batches
from bild_lab.training.frozen.contexts import AnsweredPrompt, ContextChooser, collate
from bild_lab.training.terminal import TerminalLog

TOP = 5  # choices of a predictor; the paper's draft trees take as many (BiTA §4.1.2)

ContextScore = Callable[[Bool[Tensor, "n predictors"]], Float[Tensor, " n"]]


@dataclass(frozen=True)
class OwnLoss:
    """The logits of a module that learns more than the labels, and its loss for each label.

    It may be of the first predictors alone: then the others are not trained.
    """

    logits: Float[Tensor, "*rows predictors vocab"]
    losses: Float[Tensor, "*rows predictors"]


class PredictionLoss:
    """The loss in nats a label, weighted by predictor, called as the Trainer calls its `compute_loss_func`.

    It is cross-entropy with the labels, or the module's `OwnLoss`.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = tuple(weights)

    def __call__(
        self,
        predicted: Float[Tensor, "*rows predictors vocab"] | OwnLoss,
        labels: Int[Tensor, "*rows predictors"],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Float[Tensor, ""]:
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return self.total(predicted, labels) / count

    def total(
        self, predicted: Float[Tensor, "*rows predictors vocab"] | OwnLoss, labels: Int[Tensor, "*rows predictors"]
    ) -> Float[Tensor, ""]:
        """The weighted sum over all labels."""
        if isinstance(predicted, OwnLoss):
            trained = predicted.losses.shape[-1]
            each = predicted.losses.float().masked_fill(labels[..., :trained] == IGNORED, 0.0)
            return (each * each.new_tensor(self._weights[:trained])).sum()
        flat = predicted.flatten(0, -2).float()
        each = cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="none")
        return (each.view(labels.shape) * each.new_tensor(self._weights)).sum()


def leading_hits(hits: Bool[Tensor, "n predictors"]) -> Float[Tensor, " n"]:
    """How many predictors are right before the first wrong one: the tokens of a chain draft that would be accepted."""
    return hits.long().cumprod(-1).sum(-1).float()


@dataclass(frozen=True)
class PredictionEvaluator:
    """Scores a module on held-out rows. Each process scores its share, and each gets the whole result.

    predictors: their names. metric: chooses the best weights; it is the mean over contexts of `context_score`, whose
    argument says which predictors' first choices are right.
    """

    rows: Sequence[AnsweredPrompt]
    chooser: ContextChooser
    predictors: tuple[str, ...]
    metric: str
    context_score: ContextScore
    batch_size: int

    def __call__(self, model: nn.Module, loss: PredictionLoss) -> dict[str, float]:
        """The metric, `loss` in nats a label, and seconds.

        For each predictor also the share of labels that are its first choice, `top_1_NAME`, or among its first five,
        `top_5_NAME`.
        """
        started = time.perf_counter()
        shares = launched().gather(self._sums(model, loss).tolist())
        loss_sum, metric_sum, contexts, *counts = map(sum, zip(*shares, strict=True))
        size = len(self.predictors)
        labels, firsts, near = (counts[start : start + size] for start in range(0, 3 * size, size))
        scores = {"loss": loss_sum / sum(labels), self.metric: metric_sum / contexts}
        for index, predictor in enumerate(self.predictors):
            scores[f"top_1_{predictor}"] = firsts[index] / labels[index]
            scores[f"top_{TOP}_{predictor}"] = near[index] / labels[index]
        return {**scores, "seconds": time.perf_counter() - started}

    @torch.no_grad()
    def _sums(self, model: nn.Module, loss: PredictionLoss) -> Float[Tensor, " sums"]:
        """This process's sums: loss, metric, contexts; then each predictor's labels, first choices and first five."""
        device = next(model.parameters()).device
        sums = torch.zeros(3 + 3 * len(self.predictors), dtype=torch.double, device=device)
        for indices in evaluation_batches([row.length for row in self.rows], self.batch_size):
            batch = collate([self.chooser.evenly(self.rows[index]) for index in indices])
            labels = batch.pop("labels").to(device)
            predicted = model(**{name: tensor.to(device) for name, tensor in batch.items()})
            logits = predicted.logits if isinstance(predicted, OwnLoss) else predicted
            real = (labels != IGNORED).any(-1)  # [batch contexts], false for contexts that fill up
            chosen, wanted = logits[real].topk(min(TOP, logits.shape[-1])).indices, labels[real][..., None]
            hits, near = (chosen[..., :1] == wanted).any(-1), (chosen == wanted).any(-1)  # [n, predictors] each
            by_predictor = [(wanted != IGNORED).squeeze(-1), hits, near]
            whole = torch.stack([loss.total(predicted, labels), self.context_score(hits).sum(), real.sum()])
            sums += torch.cat([whole, *(each.sum(0) for each in by_predictor)])
        return sums


class PredictionLog(TerminalLog):
    """After the line of an evaluation, prints the accuracy of every predictor."""

    def on_evaluate(self, args, state, control, metrics: dict[str, Any] | None = None, **kwargs):
        """Three lines: the metric, first choices, first five choices."""
        super().on_evaluate(args, state, control, metrics, **kwargs)
        for top in (1, TOP):
            named = {key.removeprefix(f"eval_top_{top}_"): value for key, value in metrics.items()}
            shares = ", ".join(f"{name} {value:.1%}" for name, value in named.items() if name not in metrics)
            self.print(f"top-{top} accuracy: {shares}")
