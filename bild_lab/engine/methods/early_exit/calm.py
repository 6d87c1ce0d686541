"""CALM: every token exits after the first layer that is confident enough (BiLD §7.2; Schuster et
al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from bild_lab.engine.decode import TokenLoop
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.engine.session import (
    DraftShape,
    LoadedModel,
    OutputSpec,
    Rows,
    SessionOptions,
    StagedSession,
)
from bild_lab.engine.trace import Round, Trace
from bild_lab.errors import require_choice, require_finite, require_number

State = Float[Tensor, "1 dim"]
Logits = Float[Tensor, "1 vocab"]


def saturation(
    layer_input: State, layer_output: State, logits: Logits | None
) -> Float[Tensor, " 1"]:
    """Cosine similarity of a layer's input and output, clamped to at most 1."""
    return cosine_similarity(precise(layer_input), precise(layer_output)).clamp(max=1.0)


def softmax_response(
    layer_input: State, layer_output: State, logits: Logits | None
) -> Float[Tensor, " 1"]:
    """The largest minus the second-largest probability of the shared head after this layer."""
    most_likely = precise(logits).softmax(-1).topk(2).values  # [1, 2]
    return most_likely[:, 0] - most_likely[:, 1]


# how confident a token is after a layer, by the layer's input and output, and the shared head's
# logits after it
Measure = Callable[[State, State, Logits | None], Float[Tensor, " 1"]]
MEASURES: dict[str, Measure] = {
    "hidden_state": saturation,
    "softmax": softmax_response,
}


@dataclass(frozen=True)
class Calm(TokenLoop):
    """Decodes token by token. Each token runs layer by layer until the measure exceeds the
    threshold.

    measure: hidden_state or softmax, at temperature 1, taken after every layer but the last. After
        the first layer hidden_state compares with the embedding.
    threshold: λ.
    temperature: t, how fast the threshold decays along the text (`decaying_threshold`).

    The hidden state at the exit is copied to the skipped layers: only their keys and values are
    computed from it. A decoder-only prompt runs through all layers, except its last token. The
    kernels measure hidden_state themselves; without them every measurement waits for the device. A
    round's statistics hold `exit_layer`.

    Raises UserError for values out of range and for a target whose layers cannot be run one by one.
    """

    draft_shape: ClassVar[DraftShape] = DraftShape.ROWS
    cuda_graph_safe: ClassVar[bool] = False

    target: LoadedModel
    measure: str
    threshold: float
    temperature: float

    def __post_init__(self) -> None:
        require_choice("CALM's measure", self.measure, MEASURES)
        exits = "smaller exits earlier, 1 with temperature 0 never"
        require_number("CALM's threshold", self.threshold, 0, 1, remedy=exits)
        require_finite(
            "CALM's temperature", self.temperature, 0, remedy="0 keeps the threshold constant"
        )
        self.target.require_layers("CALM")

    def lossless(self, sampling: Sampling) -> bool:
        return False

    def rounds(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        limits = request.limits
        tokens = list(request.source.prompt)
        with trace.span("prefill"):
            session = self.target.start(
                request.source, limits.max_new_tokens, SessionOptions(trace.forwards)
            )
            session.prefill()
        while not limits.reached(tokens):
            position = len(tokens) - limits.prompt_length
            threshold = decaying_threshold(
                self.threshold, self.temperature, position, limits.max_new_tokens
            )
            with trace.span("verify"):
                logits, exit_layer = self._step(session, tokens[-1], threshold)
                token = int(request.sampling.choose(logits, request.generator))
            tokens = limits.append(tokens, [token])
            trace.rounds.append(Round(next_token=token, stats={"exit_layer": exit_layer}))
            yield [token]

    def _step(self, session: StagedSession, token: int, threshold: float) -> tuple[Logits, int]:
        """Run one token until its confidence exceeds the threshold.

        Returns its logits and how many layers ran.
        """
        confidence = MEASURES[self.measure]
        if (
            confidence is saturation
            and (exit_result := session.forward_until_confident(token, threshold)) is not None
        ):
            return exit_result
        return leave_layer_by_layer(session, token, threshold, confidence, self.target.depth)


def leave_layer_by_layer(
    session: StagedSession, token: int, threshold: float, confidence: Measure, depth: int
) -> tuple[Logits, int]:
    """Run one token layer by layer, of `depth`, until its confidence exceeds the threshold.

    Returns its logits and how many layers ran.
    """
    reads_logits = confidence is softmax_response
    states: State | None = None
    for layer in range(depth):
        is_last = layer + 1 == depth
        output_spec = OutputSpec(
            logits=int(is_last or reads_logits),
            layers=(layer,),
            hidden=(layer, layer + 1)[int(layer > 0) :],
        )
        scores = session.extend(Rows([token], states=states), output_spec)
        layer_input, states = (states, *scores.hidden)[-2:]
        if is_last:
            break
        if float(confidence(layer_input, states, scores.logits)) > threshold:
            logits = scores.logits
            if logits is None:
                logits = session.extend(
                    Rows([token], states=states), OutputSpec(logits=1, layers=())
                ).logits
            skipped = OutputSpec(logits=0, layers=range(layer + 1, depth), fill=True)
            session.extend(Rows([token], states=states), skipped)
            return logits, layer + 1
    return scores.logits, depth


def decaying_threshold(threshold: float, temperature: float, position: int, length: int) -> float:
    """clip(0.9 λ + 0.1 exp(−t i / N), 0, 1) for output position i, from 0, of at most N (CALM; BiLD
    §7.2.1).
    """
    return min(1.0, max(0.0, 0.9 * threshold + 0.1 * math.exp(-temperature * position / length)))
