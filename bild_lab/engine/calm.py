"""CALM: every token leaves the decoder behind the layer where it has settled (BiLD §7.2; Schuster et al., 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.attention import Rows
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.model import NativeSession
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.models.native.views import depth_of
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import rows_of
from bild_lab.engine.trace import Round, Trace, recorded_to
from bild_lab.errors import UserError

Decoder = LlamaDecoder | T5Decoder
State = Float[Tensor, "1 dim"]
Confidence = tuple[Float[Tensor, " 1"], Float[Tensor, "1 vocab"] | None]  # and the logits it took, if any


def hidden_state(decoder: Decoder, before: State, after: State) -> Confidence:
    """Saturation: the cosine of a layer's input and output, at most 1 however it rounds."""
    return cosine_similarity(precise(before), precise(after)).clamp(max=1.0), None


def softmax(decoder: Decoder, before: State, after: State) -> Confidence:
    """Softmax response: the largest probability minus the second, of the shared head behind this layer."""
    logits = decoder.logits(after)
    likeliest = precise(logits).softmax(-1).topk(2).values  # [1, 2]
    return likeliest[:, 0] - likeliest[:, 1], logits


MEASURES: dict[str, Callable[[Decoder, State, State], Confidence]] = {"hidden_state": hidden_state, "softmax": softmax}


@dataclass(frozen=True)
class Calm:
    """Decodes token by token, each through as many layers as it takes until the measure exceeds the threshold.

    measure: hidden_state or softmax, at temperature 1, looked at behind every layer but the last; behind the
    first layer hidden_state compares with the embedding. threshold: λ. temperature: t, how fast the threshold
    decays along the text (`decaying_threshold`).

    The state with which a token leaves stands for the inputs of the layers it skips: their keys and values
    are computed from it, and nothing else. A decoder-only prompt runs through all layers, but for its last
    token, which decides on the first exit. Every look waits for the device, so on an accelerator a layer waits
    for the one before it.

    Raises UserError for values out of range and for a target that does not run natively.
    """

    target: NativeModel
    measure: str
    threshold: float
    temperature: float

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise UserError(f"CALM's measure must be one of {', '.join(MEASURES)}, got {self.measure!r}")
        if not number(self.threshold) or not 0.0 <= self.threshold <= 1.0:
            raise UserError(
                f"CALM's threshold must lie in [0, 1], got {self.threshold!r}; smaller exits earlier, "
                "1 with temperature 0 never"
            )
        if not number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise UserError(
                f"CALM's temperature must be a number >= 0, got {self.temperature!r}; 0 keeps the threshold constant"
            )
        depth_of(self.target)

    @property
    def engine(self) -> str:
        return self.target.engine

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        limits = request.limits
        tokens = list(request.source.prompt)
        with recorded_to(trace.forwards), trace.span("prefill"):
            session = self.target.start(request.source, limits.max_new_tokens)
            session.prefill()
        while not limits.reached(tokens):
            position = len(tokens) - limits.prompt_length
            bar = decaying_threshold(self.threshold, self.temperature, position, limits.max_new_tokens)
            with trace.span("verify"):
                logits, exit_layer = self._step(session, tokens[-1], bar)
                token = int(request.sampling.choose(logits, request.generator))
            tokens = limits.append(tokens, [token])
            trace.rounds.append(Round((), 0, token, False, 0, (), (), exit_layer))
        return tokens

    def _step(self, session: NativeSession, token: int, bar: float) -> tuple[Float[Tensor, "1 vocab"], int]:
        """Run one token until it is above the bar; its logits, and behind how many layers it left."""
        decoder, depth = session.decoder, len(session.decoder.layers)
        rows = session.place(0, 1)
        x = decoder.embed(rows_of([token], decoder.embedding.device))
        logits = None
        for exit_layer in range(1, depth + 1):
            before, logits = x, None
            x = decoder.run(x, rows, session.cache, *session.memory, layers=range(exit_layer - 1, exit_layer))
            if exit_layer < depth:
                confidence, logits = MEASURES[self.measure](decoder, before, x)
                if float(confidence) > bar:
                    break
        decoder.fill(x, rows, session.cache, range(exit_layer, depth))
        session.cache.length = rows.stop
        self._record(session, rows, exit_layer, depth)
        return decoder.logits(x) if logits is None else logits, exit_layer

    def _record(self, session: NativeSession, rows: Rows, exit_layer: int, depth: int) -> None:
        """Note the layers up to the exit: one by one where the head is run behind each, otherwise as one forward."""
        together = 1 if self.measure == "softmax" else exit_layer
        for first in range(0, exit_layer, together):
            skipped = depth - exit_layer if first + together == exit_layer else 0
            session.record(1, rows.stop - 1, 1, layers=together, first_layer=first, filled_layers=skipped)


def decaying_threshold(threshold: float, temperature: float, position: int, length: int) -> float:
    """clip(0.9 λ + 0.1 exp(−t i / N), 0, 1) for output position i, from 0, of at most N (CALM; BiLD §7.2.1)."""
    return min(1.0, max(0.0, 0.9 * threshold + 0.1 * math.exp(-temperature * position / length)))


def number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
