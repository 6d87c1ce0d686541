"""Evaluates a model during its training: validation loss, and the metric of its greedy texts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from bild_lab.engine.models.ranks import launched
from bild_lab.lab.metrics import score
from bild_lab.training.batches import IGNORED, Collator, TokenizedExample, evaluation_batches
from bild_lab.training.finetuning.losses import LayerLoss


@dataclass(frozen=True)
class Evaluator:
    """Scores a model on validation examples. Each process scores its share, and each gets the whole result.

    references: of every example. settings: greedy decoding, as `greedy_settings` gives it. Texts are decoded in the
    training's precision, in batches, with Transformers' `generate`.
    """

    references: Sequence[Sequence[str]]
    examples: Sequence[TokenizedExample]
    metric: str
    tokenizer: PreTrainedTokenizerBase
    collate: Collator
    batch_size: int
    settings: GenerationConfig

    def __call__(self, model: PreTrainedModel, loss: LayerLoss) -> dict[str, float]:
        """`METRIC` with `METRIC_low` and `METRIC_high` (95 %), `loss` in nats a token, and seconds.

        A loss over several layers adds `loss_layer_N` for each.
        """
        started = time.perf_counter()
        with _evaluating(model, self.settings), torch.no_grad():
            losses = self._losses(model, loss)
            texts = self._texts(model)
        quality = score(self.metric, texts, self.references)
        return {
            self.metric: quality.value,
            f"{self.metric}_low": quality.low,
            f"{self.metric}_high": quality.high,
            **losses,
            "seconds": time.perf_counter() - started,
        }

    def _losses(self, model: PreTrainedModel, loss: LayerLoss) -> dict[str, float]:
        sums, count = {}, 0
        for indices in self._batches():
            batch = _moved(self.collate([self.examples[index] for index in indices]), model.device)
            labels = batch.pop("labels")
            outputs = model(**batch, output_hidden_states=loss.inner, use_cache=False)
            for layer, total in loss.sums(outputs, labels).items():
                sums[layer] = sums.get(layer, 0.0) + float(total)
            count += int((labels != IGNORED).sum())
        shares = launched().gather((sums, count))
        tokens = sum(count for _, count in shares)
        layers = sorted({layer for sums, _ in shares for layer in sums})
        means = {layer: math.fsum(sums.get(layer, 0.0) for sums, _ in shares) / tokens for layer in layers}
        inner = {f"loss_layer_{layer}": mean for layer, mean in means.items()} if loss.inner else {}
        return {"loss": means[layers[-1]], **inner}

    def _texts(self, model: PreTrainedModel) -> list[str]:
        texts: list[tuple[int, str]] = []
        for indices in self._batches():
            prompts = _moved(self.collate.prompts([self.examples[index] for index in indices]), model.device)
            out = model.generate(**prompts)
            prompt_length = 1 if model.config.is_encoder_decoder else prompts["input_ids"].shape[1]
            texts += zip(indices, self._decoded(out[:, prompt_length:]), strict=True)
        return [text for _, text in sorted(chain.from_iterable(launched().gather(texts)))]

    def _decoded(self, tokens: Tensor) -> list[str]:
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def _batches(self) -> Iterator[list[int]]:
        return evaluation_batches([one.length for one in self.examples], self.batch_size)


def greedy_settings(
    max_new_tokens: int, end_tokens: Sequence[int], pad: int, decoder_start: int | None
) -> GenerationConfig:
    """Greedy decoding alone, without the beams, penalties or forced tokens of a checkpoint."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(end_tokens),
        pad_token_id=pad,
        decoder_start_token_id=decoder_start,
        use_cache=True,
    )


@contextmanager
def _evaluating(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """The model without dropout and with these settings alone, inside the block."""
    training, own = model.training, model.generation_config
    model.eval()
    model.generation_config = settings  # `generate` takes missing settings from here
    try:
        yield
    finally:
        model.generation_config = own
        model.train(training)


def _moved(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}
