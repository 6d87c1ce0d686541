"""Predictive pipelined decoding on a machine (Yang et al., 2023, Algorithm 1), which the paper left to future work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.adapters.layer_heads import LayerHeads, LayerHeadsConfig, require_heads_of
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.ppd.lanes import Together, two_lanes
from bild_lab.engine.ppd.log import PipelineLog
from bild_lab.engine.ppd.session import Head, PipelinedSession
from bild_lab.engine.ppd.theory import require_exit
from bild_lab.engine.request import Request
from bild_lab.engine.trace import Round, Trace, recorded_to
from bild_lab.errors import UserError
from bild_lab.lab.config import require_whole

SHARED = "shared"


@dataclass(frozen=True)
class PredictivePipeline:
    """The target alone, each token begun while the one before it is finished; its text is the target's own.

    After the exit layer d̄ of d a head predicts the next token. The k likeliest candidates go through their first
    d − d̄ layers, as one batch, while the current token goes through its last d − d̄ ones: in two threads on the
    CPU, of one intra-op thread each, in two streams on a GPU. The token that the last layer chooses, greedily or
    sampled, is the next one in any case; if it was a candidate, its layers are not run again.

    exit_layer: d̄, from d/2 to d − 1; None for half the layers, rounded up. top_k: k. heads: "shared" for the target's
    own head, or a folder of heads trained for each layer. Raises UserError for values out of range, and where
    target and heads cannot do it.
    """

    target: NativeModel
    exit_layer: int | None = None
    top_k: int = 3
    heads: str = SHARED

    def __post_init__(self) -> None:
        if not isinstance(self.target, NativeModel):
            raise UserError("ppd runs parts of the target's layers, for which it needs runtime.engine=native or auto")
        if self.target.compiled:
            raise UserError("ppd runs parts of the target's layers, which are not compiled; set runtime.compile=false")
        self._require_exit()
        require_whole("top_k", self.top_k, 1)
        vocabulary = self.target.checkpoint.config.vocab_size
        if self.top_k > vocabulary:
            raise UserError(f"top_k must be at most the target's vocabulary of {vocabulary} tokens, got {self.top_k}")
        if not isinstance(self.heads, str) or not self.heads:
            raise UserError(f"heads must be {SHARED} or a folder of heads trained for each layer, got {self.heads!r}")
        if self.heads != SHARED:
            require_heads_of(self.target, LayerHeadsConfig.read(self.heads), self.heads, self._exit)

    @property
    def engine(self) -> str:
        return self.target.engine

    def prepare(self, request: Request) -> None:
        """Have the heads read."""
        _ = self._head

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        self.prepare(request)
        trace.pipeline = log = PipelineLog(self._depth, self._exit, self.top_k)
        limits, tokens = request.limits, list(request.source.prompt)
        with recorded_to(trace.forwards), trace.span("prefill"):
            session = PipelinedSession(self.target.decoder, request.source, limits.max_new_tokens, log)
        with two_lanes(self.target.device) as together:
            while not limits.reached(tokens):
                token = self._next(session, tokens, request, trace, together)
                tokens = limits.append(tokens, [token])
                trace.rounds.append(Round((), 0, token, False, 0, (), ()))
        return tokens

    def _next(
        self, session: PipelinedSession, tokens: list[int], request: Request, trace: Trace, together: Together
    ) -> int:
        """The token behind these; if it was among the candidates, its first layers are done."""
        choose = partial(request.sampling.choose, generator=request.generator)
        last = request.limits.room(tokens) == 1  # no token comes after the next one
        with trace.span("draft"):
            x = session.to_exit(tokens)
            candidates: Int[Tensor, " k"] | None = None if last else self._head(x[-1:])[0].topk(self.top_k).indices
        with trace.span("verify"):
            if candidates is None:
                return int(choose(session.finish(x)))
            logits, begun = session.finish_beside(x, candidates, together)
            token, *predicted = torch.cat([choose(logits), candidates]).tolist()
        matched = token in predicted
        session.continue_with(begun, predicted.index(token) if matched else None)
        if not request.limits.reached([*tokens, token]):
            trace.pipeline.matches.append(matched)
        return token

    @cached_property
    def _head(self) -> Head:
        if self.heads == SHARED:
            return self.target.decoder.logits
        heads = LayerHeads.load(self.heads).to(self.target.device, self.target.dtype).requires_grad_(False)
        return partial(heads.logits, self._exit)

    @property
    def _depth(self) -> int:
        config = self.target.checkpoint.config
        return config.num_decoder_layers if config.is_encoder_decoder else config.num_hidden_layers

    @property
    def _exit(self) -> int:
        return math.ceil(self._depth / 2) if self.exit_layer is None else self.exit_layer

    def _require_exit(self) -> None:
        if self._depth == 1:
            raise UserError("ppd needs a target of two layers or more, got one; use policy=vanilla")
        require_exit(self._depth, self._exit)
        if self._exit == self._depth:
            raise UserError(
                f"exit_layer must leave a layer to run beside the candidates, got {self._exit} of {self._depth}; "
                f"use at most {self._depth - 1}"
            )
