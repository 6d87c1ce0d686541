"""A drafter learns the target's distributions: on the target's answers or on its own texts, by a divergence of choice.

DistillSpec (Zhou et al., 2024, §4, Algorithm 1) and generalized knowledge distillation (Agarwal et al., 2024, §3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.trace import until_end
from bild_lab.errors import UserError, require_choice, require_number
from bild_lab.training.batches import IGNORED, Collator, TokenizedExample

Probs = Float[Tensor, "n vocab"]
DATA = ("answers", "drafter", "mixture")


def kl(log_p: Probs, log_q: Probs) -> Float[Tensor, " n"]:
    """KL(p ‖ q), in nats: the target's distribution over the drafter's."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Probs, log_q: Probs) -> Float[Tensor, " n"]:
    """KL(q ‖ p), in nats: the drafter gives up what it cannot have."""
    return kl(log_q, log_p)


def js(log_p: Probs, log_q: Probs) -> Float[Tensor, " n"]:
    """The Jensen–Shannon divergence, in nats: half of both to their mean."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return (kl(log_p, log_m) + kl(log_q, log_m)) / 2


def tv(log_p: Probs, log_q: Probs) -> Float[Tensor, " n"]:
    """The total variation, from 0 to 1: what is left of 1 by the acceptance rate of speculative sampling."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def nla(log_p: Probs, log_q: Probs) -> Float[Tensor, " n"]:
    """The acceptance rate's negative logarithm, in nats, −log Σ min(p, q) (LK losses, Samarin et al., 2026)."""
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def lk(log_p: Probs, log_q: Probs) -> Float[Tensor, " n"]:
    """λ KL(p ‖ q) + (1 − λ) TV(p, q) with λ = exp(−3 α): from one to the other as the acceptance rate α = 1 − TV grows.

    The hybrid of LK losses, with the authors' best η of 3; λ has no gradient.
    """
    distance = tv(log_p, log_q)
    share = (-3 * (1 - distance.detach())).exp()
    return share * kl(log_p, log_q) + (1 - share) * distance


DIVERGENCES: dict[str, Callable[[Probs, Probs], Float[Tensor, " n"]]] = {
    one.__name__: one for one in (kl, reverse_kl, js, tv, nla, lk)
}


def answer_log_probs(model: PreTrainedModel, batch: Mapping[str, Tensor], start: int | None, pieces: int) -> Probs:
    """A model's log-probabilities of the first `pieces` tokens, for each label of a collated batch.

    start: the first token of the model's decoder; None for a decoder-only model, whose row predicts the next token.
    """
    fed = {name: rows for name, rows in batch.items() if name != "labels"}
    labels = batch["labels"]
    if start is not None:  # which may differ from that of another model on the same batch
        first = torch.full_like(labels[:, :1], start)
        fed["decoder_input_ids"] = torch.cat([first, fed["decoder_input_ids"][:, 1:]], 1)
    logits = model(**fed, use_cache=False).logits
    if start is None:
        labels, logits = labels[:, 1:], logits[:, :-1]
    return logits[labels != IGNORED][:, :pieces].float().log_softmax(-1)


def decoder_start(checkpoint: Checkpoint) -> int | None:
    """The first token of an encoder–decoder's decoder; None for a decoder-only model."""
    return checkpoint.decoder_start if checkpoint.encoder_decoder else None


def pieces_of(checkpoint: Checkpoint) -> int:
    """Tokens of the vocabulary; a head may have more rows."""
    return max(checkpoint.vocabulary.values()) + 1


@dataclass(frozen=True)
class Teaching:
    """What a drafter learns from: the fields of `align` in `conf/align.yaml`. Raises UserError for unknown values.

    data: the texts of each step. answers: the target's. drafter: the drafter's own, as it is at that step. mixture:
    both in turn. loss: a divergence between the target's whole distribution and the drafter's at every token; None
    learns the answers themselves. temperature: at which the drafter writes; 0 is greedy. decay: the weight of a
    token, to the power of how many tokens before it in its text the two models would not have agreed on; 1 counts all
    alike, less counts the first disagreement most.
    """

    data: str = "answers"
    loss: str | None = None
    temperature: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        require_choice("align.data", self.data, DATA)
        require_choice("align.loss", self.loss, (None, *DIVERGENCES))
        require_number("align.temperature", self.temperature, 0, 100)
        require_number("align.decay", self.decay, 0, 1, above=True)
        if self.loss is None and (self.data != "answers" or self.decay != 1):
            wanted = f"align.data={self.data} align.decay={self.decay:g}"
            raise UserError(f"{wanted} need the target's distributions; set align.loss to {', '.join(DIVERGENCES)}")

    @property
    def identity(self) -> dict[str, Any]:
        """The values under the user's own keys; nothing where the answers themselves are learned."""
        return {} if self.loss is None else {f"align.{key}": value for key, value in asdict(self).items()}

    def writing(self, greedy: GenerationConfig) -> GenerationConfig:
        """How the drafter writes. greedy: the same, greedily."""
        found = deepcopy(greedy)
        if self.temperature:
            found.update(do_sample=True, temperature=self.temperature, top_k=0)
        return found

    def writes_at(self, step: int) -> bool:
        """Whether the drafter writes the texts of this step, which counts from 0."""
        return self.data == "drafter" or (self.data == "mixture" and step % 2 == 1)


@dataclass(frozen=True)
class Distillation:
    """The loss of one step, in the divergence's unit a token.

    settings: how the drafter writes. evaluating: a context in which a model has these settings and no dropout.
    """

    teaching: Teaching
    teacher: HuggingFaceModel
    collate: Collator
    settings: GenerationConfig
    evaluating: Callable[[PreTrainedModel, GenerationConfig], AbstractContextManager[None]]
    seed: int

    @cached_property
    def pieces(self) -> int:
        return pieces_of(self.teacher.checkpoint)

    def batch(self, examples: Sequence[TokenizedExample]) -> dict[str, Any]:
        """The examples as they are: their texts are made when the step begins."""
        return {"examples": list(examples)}

    def __call__(self, model: PreTrainedModel, examples: Sequence[TokenizedExample], step: int) -> Float[Tensor, ""]:
        """The loss of one step on these examples, in training mode."""
        if self.teaching.writes_at(step):
            examples = self.written(model, examples, step)
        batch = {name: rows.to(model.device) for name, rows in self.collate(examples).items()}
        with torch.no_grad():
            log_p = answer_log_probs(self.teacher.module, batch, decoder_start(self.teacher.checkpoint), self.pieces)
        log_q = answer_log_probs(model, batch, self.collate.start, self.pieces)
        weights = self.teaching.decay ** _disagreements(log_p, log_q, batch["labels"] != IGNORED)
        return (weights * DIVERGENCES[self.teaching.loss](log_p, log_q)).sum() / weights.sum()

    @torch.no_grad()
    def written(
        self, model: PreTrainedModel, examples: Sequence[TokenizedExample], step: int
    ) -> list[TokenizedExample]:
        """The examples with the drafter's own texts in place of the target's answers. Seeded by the step alone."""
        prompts = {name: rows.to(model.device) for name, rows in self.collate.prompts(examples).items()}
        devices = [model.device] if model.device.type == "cuda" else []
        with self.evaluating(model, self.settings), torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.seed + step)
            out = model.generate(**prompts)
        before = 1 if self.collate.start is not None else prompts["input_ids"].shape[1]
        ends = frozenset(self.settings.eos_token_id)
        return [
            replace(one, answer=np.array(row[: until_end(row, ends)], np.int32))
            for one, row in zip(examples, out[:, before:].tolist(), strict=True)
        ]


def _disagreements(log_p: Probs, log_q: Probs, learned: Bool[Tensor, "batch n"]) -> Int[Tensor, " learned"]:
    """For each learned token, how many before it in its row have another most likely token for the two models."""
    differ = torch.zeros(learned.shape, dtype=torch.long, device=learned.device)
    differ[learned] = (log_p.argmax(-1) != log_q.argmax(-1)).long()
    return (differ.cumsum(-1) - differ)[learned]
