"""Decoding several texts at once with any method, unchanged: the texts and counts of each are those of batch 1."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bild_lab.engine.batch import Batch
from bild_lab.engine.drafters.model import Window
from bild_lab.engine.protocols import DecodesTogether, Method
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace

Part = TypeVar("Part")
CONTAINERS = (list, dict, set, deque)


@dataclass(frozen=True)
class BatchedText:
    """One text of a batch. token_ids: as emitted. latency_s, share_s: as in `Ended`."""

    token_ids: list[int]
    trace: Trace
    latency_s: float
    share_s: float


def decode_batch(
    method: Method, requests: Sequence[Request], batch: Batch, ended: Callable[[int], None] = lambda index: None
) -> list[BatchedText]:
    """Decode all requests with a method, `batch.size` of them at a time. ended: called with the index of each text.

    Each text has a copy of the method's state. Random numbers come from the generator of its request, so a text does
    not depend on those beside it. Models must be those of `why_not_in_batches`.
    """
    if isinstance(method, DecodesTogether):
        return _together(method, requests, batch.size, ended)
    copies: dict[int, Method] = {}

    def loop_of(request: Request) -> Callable[[int], tuple[list[int], Trace]]:
        def loop(slot: int) -> tuple[list[int], Trace]:
            own = copies[slot] if slot in copies else copies.setdefault(slot, apart(method))
            trace = Trace()
            return own.decode(request, trace)[request.limits.prompt_length :], trace

        return loop

    texts = batch.run([loop_of(request) for request in requests], ended)
    return [BatchedText(*text.result, text.latency_s, text.share_s) for text in texts]


def _together(
    method: DecodesTogether, requests: Sequence[Request], size: int, ended: Callable[[int], None]
) -> list[BatchedText]:
    """So many texts at a time, in order; the next ones begin when all of them have ended."""
    texts: list[BatchedText] = []
    for start in range(0, len(requests), size):
        some = requests[start : start + size]
        began = time.perf_counter()
        found = method.decode_together(some)
        seconds = time.perf_counter() - began
        for one, tokens in zip(some, found, strict=True):
            ended(len(texts))
            texts.append(BatchedText(tokens[one.limits.prompt_length :], Trace(), seconds, seconds / len(some)))
    return texts


def why_not_in_batches(method: Method, models: Sequence[LoadedModel]) -> str | None:
    """Why this method over these models decodes one text at a time, or None if it decodes batches."""
    if isinstance(method, DecodesTogether):
        return None
    if method.feeds is None:
        return f"it is a loop of its own, on {method.engine}"
    if any(model.engine not in ("native", "kernels") for model in models):
        return "Transformers' own modules run one text at a time here (engine hf)"
    return "compiled steps hold one text" if any(model.compiled for model in models) else None


def apart(part: Part, copies: dict[int, Any] | None = None) -> Part:
    """A copy of a method for one more text: what keeps state of a text is copied, models and tables are shared.

    State is kept by methods, drafters and windows, and by the lists, dictionaries and sets that they hold; and by what
    can tell how it is `copied`. copies: of parts that were met before, by id.
    """
    copies = {} if copies is None else copies
    if id(part) in copies:
        return copies[id(part)]
    if hasattr(part, "copied"):
        return part.copied()
    if type(part) in CONTAINERS:
        return copy.copy(part)
    method = hasattr(part, "decode") and hasattr(part, "lossless")
    if isinstance(part, type) or not (method or hasattr(part, "propose") or isinstance(part, Window)):
        return part
    other = copies[id(part)] = copy.copy(part)
    for name, value in vars(part).items():
        object.__setattr__(other, name, apart(value, copies))  # some are frozen
    return other
