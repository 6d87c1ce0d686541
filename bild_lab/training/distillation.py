"""A drafter learns the target's distributions: on the target's answers, or on texts that both of
them decode together.

DistillSpec (Zhou et al., 2024, §4, Algorithm 1) and generalized knowledge distillation (Agarwal et
al., 2024, §3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from bild_lab.engine.batch_decoding import auto_batch_size, decode_batch
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft_checks import described
from bild_lab.engine.methods.bild import Rollback
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.loaded_checkpoint import LoadedCheckpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel, why_no_kernels, why_not_native
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.sampling import Sampling, require_temperature
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from bild_lab.errors import (
    UserError,
    cause_in_words,
    require_choice,
    require_finite,
    require_number,
    require_whole,
)
from bild_lab.lab.metrics.external_metrics import user_function
from bild_lab.lab.store.code import own_code_hash
from bild_lab.training.batches import IGNORED, Collator, TokenizedExample

Probs = Float[Tensor, "n vocab"]
# of the target's and the drafter's log-probabilities after n texts: a loss for each
Divergence = Callable[[Probs, Probs], Float[Tensor, " n"]]
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
    """The total variation, from 0 to 1: what is left of 1 by the acceptance rate of speculative
    sampling.
    """
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def nla(log_p: Probs, log_q: Probs) -> Float[Tensor, " n"]:
    """The acceptance rate's negative logarithm, in nats, −log Σ min(p, q) (LK losses, Samarin et
    al., 2026).
    """
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def lk(log_p: Probs, log_q: Probs) -> Float[Tensor, " n"]:
    """λ KL(p ‖ q) + (1 − λ) TV(p, q) with λ = exp(−3 α): from one to the other as the acceptance
    rate α = 1 − TV grows.

    The hybrid of LK losses, with the authors' best η of 3; λ has no gradient.
    """
    distance = tv(log_p, log_q)
    share = (-3 * (1 - distance.detach())).exp()
    return share * kl(log_p, log_q) + (1 - share) * distance


DIVERGENCES: dict[str, Divergence] = {
    divergence.__name__: divergence for divergence in (kl, reverse_kl, js, tv, nla, lk)
}
TRIED_SHAPE = (3, 7)  # rows and tokens of the distributions that a user's own loss is tried on


def divergence_of(loss: str) -> Divergence:
    """The divergence of `align.loss`: one of ours by its name, or the user's own, MODULE.FUNCTION.

    Raises UserError for another word, and for a function that cannot be imported.
    """
    return DIVERGENCES[loss] if loss in DIVERGENCES else user_function(loss, "loss")


def require_divergence(loss: str) -> None:
    """Raise UserError unless a user's own loss gives a finite number with a gradient for each row,
    as one try on random distributions shows.
    """
    function, random = divergence_of(loss), torch.Generator().manual_seed(0)
    log_p, log_q = (
        torch.randn(TRIED_SHAPE, generator=random).log_softmax(-1).requires_grad_(trained)
        for trained in (False, True)
    )
    signature = (
        "it gets the log-probabilities of target and drafter, [tokens, vocabulary] each, and"
        " returns a loss for each token, [tokens]"
    )
    try:
        with torch.enable_grad():
            losses = function(log_p, log_q)
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"the loss {loss} fails: {cause_in_words(error)}; {signature}") from error
    if not isinstance(losses, Tensor) or losses.shape != log_p.shape[:1]:
        raise UserError(
            f"the loss {loss} has given {described(losses)} for two tensors {list(TRIED_SHAPE)};"
            f" {signature}"
        )
    if not losses.requires_grad or not bool(losses.isfinite().all()):
        lacking = "finite numbers" if losses.requires_grad else "a gradient for the drafter"
        raise UserError(
            f"the loss {loss} must give {lacking}, got {losses.tolist()}; correct the function"
        )


def answer_log_probs(
    model: PreTrainedModel, batch: Mapping[str, Tensor], start: int | None, pieces: int
) -> Probs:
    """A model's log-probabilities of the first `pieces` tokens, for each label of a collated batch.

    start: the first token of the model's decoder; None for a decoder-only model, whose row predicts
    the next token.
    """
    fed = {name: rows for name, rows in batch.items() if name != "labels"}
    labels = batch["labels"]
    if start is not None:  # which may differ from that of another model on the same batch
        start_column = torch.full_like(labels[:, :1], start)
        fed["decoder_input_ids"] = torch.cat([start_column, fed["decoder_input_ids"][:, 1:]], 1)
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
class DistillationSpec:
    """What a drafter learns from: `align` of `conf/align.yaml`, which says what each is. A loss of
    the user's own is MODULE.FUNCTION. Raises UserError for others.

    Where texts are decoded with the drafter, the target's distributions are those that verified
    them.
    """

    data: str = "answers"
    loss: str | None = None
    temperature: float = 1.0
    fallback: float = 0.0
    rollback: float | None = None
    window: int = 1000

    def __post_init__(self) -> None:
        require_choice("align.data", self.data, DATA)
        if self.loss is not None and "." in self.loss:
            require_divergence(self.loss)
        else:
            require_choice("align.loss", self.loss, (None, *DIVERGENCES, "MODULE.FUNCTION"))
        require_number("align.temperature", self.temperature, 0, 100)
        require_temperature("align.temperature", self.temperature)
        require_number("align.fallback", self.fallback, 0, 1)
        require_whole("align.window", self.window, 1)
        if self.rollback is not None:
            require_finite("align.rollback", self.rollback, 0, remedy="null never rolls back")
        if self.loss is None and self.data != "answers":
            raise UserError(
                f"align.data={self.data} needs the target's distributions; set align.loss to"
                f" {', '.join(DIVERGENCES)}"
            )
        if self.data == "answers":
            self._require_no_decoding()

    def _require_no_decoding(self) -> None:
        """Raise UserError for a changed value of the decoding, as the answers are there already."""
        plain = DistillationSpec.__dataclass_fields__
        for name in ("temperature", "fallback", "rollback", "window"):
            if (value := getattr(self, name)) != plain[name].default:
                raise UserError(
                    f"align.{name}={value} has no effect with align.data=answers, which decodes no"
                    f" texts with the drafter; set align.data=drafter or mixture, or leave it out"
                )

    @property
    def identity(self) -> dict[str, Any]:
        """The values under the user's own keys; nothing where the answers themselves are
        learned.
        """
        if self.loss is None:
            return {}
        values = {f"align.{key}": value for key, value in asdict(self).items()}
        if "." not in self.loss:
            return values
        # as of a metric: the module that names the function, and the one that defines it
        modules = {self.loss.rpartition(".")[0], divergence_of(self.loss).__module__}
        return values | {"align.loss.code": own_code_hash(*modules)}

    def decodes_at(self, step: int) -> bool:
        """Whether the texts of this step, which counts from 0, are decoded with the drafter."""
        return self.data == "drafter" or (self.data == "mixture" and step % 2 == 1)


def on_engine(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A checkpoint on the fastest engine that decodes batches of it; on Transformers' modules where
    none does.
    """
    module = HuggingFaceModel(checkpoint, device, dtype)
    if why_not_native(checkpoint.config, dtype) is not None:
        return module
    on_cpu = device.type == "cpu"
    return NativeModel(module, kernels=on_cpu and why_no_kernels(device, dtype) is None)


class InTraining(LoadedCheckpoint):
    """A module whose weights are cast to the engine's precision as it reads them."""

    def weights(self, dtype: torch.dtype, **placement: Any) -> PreTrainedModel:
        return self.module


@dataclass
class _Verified(Trace):
    """Also keeps the target's logits of each token of the text: [tokens, vocab] of every round."""

    reads_logits = True
    logits: list[Tensor] = field(default_factory=list)

    def emitted(self, tokens: Sequence[int], logits: Tensor, rows: Sequence[int]) -> None:
        self.logits.append(logits[list(rows[: len(tokens)])])


@dataclass(frozen=True)
class Distillation:
    """The loss of one step, in the divergence's unit a token. end_tokens, longest: where decoded
    texts end.
    """

    distillation_spec: DistillationSpec
    teacher: LoadedModel
    collate: Collator
    end_tokens: frozenset[int]
    longest: int
    seed: int

    @cached_property
    def pieces(self) -> int:
        return pieces_of(self.teacher.checkpoint)

    @cached_property
    def _tokens(self) -> list[int] | None:
        """All ids below `pieces` but those without a token, which an engine never chooses; None if
        there are none.
        """
        without = {
            token for token in self.teacher.checkpoint.ids_without_token if token < self.pieces
        }
        return [token for token in range(self.pieces) if token not in without] if without else None

    def batch(self, examples: Sequence[TokenizedExample]) -> dict[str, Any]:
        """The examples as they are: their texts are made when the step begins."""
        return {"examples": list(examples)}

    def __call__(
        self, model: PreTrainedModel, examples: Sequence[TokenizedExample], step: int
    ) -> Float[Tensor, ""]:
        """The loss of one step on these examples, in training mode."""
        (batch,), _ = self.passes(model, [self.batch(examples)], step)
        return self.losses(model, **batch).mean()

    def passes(
        self, model: PreTrainedModel, batches: Sequence[Mapping[str, Any]], step: int
    ) -> tuple[list[dict[str, Any]], int]:
        """The passes of one step as arguments of `losses`, and how many tokens they learn together:
        by that number each sum of losses is divided, so that the passes' gradients are the step's.

        Where texts are decoded, all of them are before the first pass. The target's distributions
        of several passes wait in the host's memory.
        """
        if self.distillation_spec.decodes_at(step):
            decoded = [self.decoded(model, batch["examples"], step) for batch in batches]
            batches = [
                {"examples": examples, "log_p": log_p if len(decoded) == 1 else log_p.cpu()}
                for examples, log_p in decoded
            ]
        tokens = sum(len(example.answer) for batch in batches for example in batch["examples"])
        return list(batches), tokens

    def losses(
        self,
        model: PreTrainedModel,
        examples: Sequence[TokenizedExample],
        log_p: Probs | None = None,
    ) -> Float[Tensor, " n"]:
        """The loss at each token of the answers. log_p: the target's; None: it is asked."""
        batch = {name: rows.to(model.device) for name, rows in self.collate(examples).items()}
        if log_p is None:
            with torch.no_grad():
                target = self.teacher.transformers.module
                log_p = answer_log_probs(
                    target, batch, decoder_start(self.teacher.checkpoint), self.pieces
                )
        log_q = answer_log_probs(model, batch, self.collate.start, self.pieces)
        if self._tokens is not None:
            log_p, log_q = (rows[:, self._tokens].log_softmax(-1) for rows in (log_p, log_q))
        return divergence_of(self.distillation_spec.loss)(log_p, log_q)

    def decoded(
        self, model: PreTrainedModel, examples: Sequence[TokenizedExample], step: int
    ) -> tuple[list[TokenizedExample], Probs]:
        """The examples with texts that both models decode together in place of answers, seeded by
        step and prompt.

        Of all their tokens also the target's log-probabilities.
        """
        device, spec = model.device, self.distillation_spec
        drafter = InTraining(
            "the drafter", module=model, loaded_tokenizer=self.teacher.checkpoint.tokenizer
        )
        models = (self.teacher, on_engine(drafter, device, self.teacher.dtype))
        rule = SpeculativeSampling()
        if spec.rollback != 0:
            rule = Rollback(spec.rollback or math.inf)
        method = DraftThenVerify(
            models[0], ModelDrafter(models[1], spec.window, spec.fallback), rule
        )
        lengths = [loaded.session_positions for loaded in models]
        positions = min((length for length in lengths if length is not None), default=None)
        requests = [
            self._request(example.prompt.tolist(), positions, step, device) for example in examples
        ]
        # a drafter whose sessions differ writes other texts, which are verified
        self.teacher.admit(method.draft_shape)
        together = Batch(auto_batch_size(method, models, requests, len(requests)))
        with torch.autocast(device.type, enabled=False):  # half precision casts a weight once
            texts = decode_batch(method, requests, together, make_trace=_Verified)
        model.train()  # the engine has turned dropout off
        logits = torch.cat([rows[:, : self.pieces] for text in texts for rows in text.trace.logits])
        written = [
            replace(example, answer=np.array(text.token_ids, np.int32))
            for example, text in zip(examples, texts, strict=True)
        ]
        del texts  # whole distributions are large
        return written, logits.float().log_softmax(-1)

    def _request(
        self, prompt: list[int], positions: int | None, step: int, device: torch.device
    ) -> Request:
        """To decode a text in place of an answer. positions: how many tokens the models can read;
        None: any number.
        """
        source = self.teacher.source(prompt)
        longest = self.longest
        if positions is not None:
            # what is learned is read whole
            read = len(source.prompt) - (source.encoder_ids is not None)
            longest = min(longest, positions - read)
        limits = Limits(len(source.prompt), longest, self.end_tokens, positions)
        generator = torch.Generator(device).manual_seed(hash((self.seed, step, *prompt)) % 2**63)
        return Request(source, limits, Sampling(self.distillation_spec.temperature), generator)
