"""A chain drafted as one program of fixed shape, on a GPU as one CUDA graph, and where it ends.

`cpu/drafting.h` has the same rules for the kernels, and `drafters/model.py` step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.sampling import most_likely, pick, precise
from bild_lab.engine.session import ChainResult, ChainSpec, on_device
from bild_lab.engine.trace import until_end

# the logits of rows at slots from `start` on: (tokens, start)
Forward = Callable[[Int[Tensor, " m"], Int[Tensor, ""]], Float[Tensor, "m vocab"]]


class WindowProgram:
    """The program of a whole window, whose inputs lie at fixed addresses.

    All steps run, whatever they draft: low confidence and end tokens are looked for afterwards, in
    one transfer of all tokens and confidences. If neither is looked for, nothing is read. rows: how
    many tokens are fed at most.
    """

    def __init__(self, forward: Forward, rows: int, chain: ChainSpec, device: torch.device) -> None:
        self.steps = chain.steps
        self._forward, self._temperature, self._keeps_probs = (
            forward,
            chain.temperature,
            chain.keeps_probs,
        )
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self.start = torch.zeros((), dtype=torch.long, device=device)
        self._count = torch.ones(1, dtype=torch.long, device=device)
        self._uniforms = (
            torch.zeros(self.steps, dtype=torch.float64, device=device)
            if chain.temperature
            else None
        )
        self.run = self.program  # or a graph of it

    def program(self) -> tuple[Float[Tensor, " twice"], Tensor | None, Tensor | None]:
        """The tokens, [steps], and the confidences, [steps], as float64 in one vector.

        Then each step's adjusted distribution and the one at temperature 1, [steps, vocab] each;
        None if they are not wanted.
        """
        # [1, vocab]
        logits = self._forward(self.tokens, self.start).index_select(0, self._count - 1)
        at = self.start + self._count[0]
        chosen, confidences, probs, own = [], [], [], []
        for place in range(self.steps):
            own.append(precise(logits).softmax(-1))
            confidences.append(own[-1].amax(-1))
            if self._uniforms is None:
                chosen.append(most_likely(precise(logits)))
            else:
                probs.append((precise(logits) / self._temperature).softmax(-1))
                chosen.append(pick(probs[-1], self._uniforms[place : place + 1]))
            if place + 1 < self.steps:
                logits = self._forward(chosen[-1], at)
                at = at + 1
        read = torch.cat(
            [*(each.double() for each in chosen), *(each.double() for each in confidences)]
        )
        return (
            read,
            torch.cat(probs) if probs else None,
            torch.cat(own) if self._keeps_probs else None,
        )

    def draft(self, start: int, tokens: Sequence[int], chain: ChainSpec) -> ChainResult:
        """Run these tokens from slot `start` on, and a chain after them, which may have fewer
        steps.
        """
        self.tokens[: len(tokens)] = on_device(tokens, self.tokens.device)
        self.start.fill_(start)
        self._count.fill_(len(tokens))
        if self._uniforms is not None:
            self._uniforms[: chain.steps] = chain.uniforms
        read, probs, own = self.run()
        if chain.threshold is None and not chain.stop_on_eos:
            drafted, forwards, confidences = read[: chain.steps].long(), chain.steps, []
        else:
            values = read.tolist()
            found, confidences = (
                [int(token) for token in values[: chain.steps]],
                values[self.steps :][: chain.steps],
            )
            count, forwards = end_of(chain, found, confidences)
            drafted, confidences = (
                found[:count],
                confidences[:forwards] if chain.threshold is not None else [],
            )
        return ChainResult(
            tokens=drafted,
            forwards=forwards,
            fallback=forwards > len(drafted),
            confidences=confidences,
            probs=None if probs is None else probs[: len(drafted)],
            own_probs=None if own is None else own[: len(drafted)],
        )


def end_of(
    chain: ChainSpec, tokens: Sequence[int], confidences: Sequence[float]
) -> tuple[int, int]:
    """How many of these tokens the chain has, and how many forwards it took.

    It ends with an end token, or before a token whose forward has a smaller confidence than the
    threshold.
    """
    ended, least = until_end(tokens, chain.end_tokens), chain.threshold
    if least is not None:
        for place, confidence in enumerate(confidences[:ended]):
            if confidence < least:
                return place, place + 1
    return ended, ended
