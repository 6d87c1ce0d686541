"""Decoding several texts at once with any method, unchanged: the texts and counts of each are those
of batch 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.models.device import free_bytes
from bild_lab.engine.models.native.layers import cache_bytes
from bild_lab.engine.protocols import DecodesTogether, Method
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError


@dataclass(frozen=True)
class BatchedText:
    """One text of a batch. token_ids: as emitted. latency_s, share_s: as in `Ended`."""

    token_ids: list[int]
    trace: Trace
    latency_s: float
    share_s: float


def decode_batch(
    method: Method,
    requests: Sequence[Request],
    batch: Batch,
    ended: Callable[[int], None] = lambda index: None,
    make: Callable[[], Trace] = Trace,
) -> list[BatchedText]:
    """Decode all requests with a method, `batch.size` of them at a time. ended: called with the
    index of each text.

    make: gives the trace of each text that has a loop.

    A method keeps no state of a text. Random numbers come from the generator of its request, so a
    text does not depend on those beside it. Models must be those of `why_not_in_batches`.
    """
    if isinstance(method, DecodesTogether):
        return _together(method, requests, batch.size, ended)

    def loop(request: Request) -> tuple[list[int], Trace]:
        trace = make()
        return method.decode(request, trace)[request.limits.prompt_length :], trace

    texts = batch.run([partial(loop, request) for request in requests], ended)
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
            texts.append(
                BatchedText(
                    tokens[one.limits.prompt_length :], Trace(), seconds, seconds / len(some)
                )
            )
    return texts


def why_not_in_batches(method: Method, models: Sequence[LoadedModel]) -> str | None:
    """Why this method over these models decodes one text at a time, or None if it decodes
    batches.
    """
    if isinstance(method, DecodesTogether):
        return None
    if method.draft_shape is None:
        return f"it is a loop of its own, on {method.engine}"
    if any(model.engine not in ("native", "kernels") for model in models):
        return "Transformers' own modules run one text at a time here (engine hf)"
    return "compiled steps hold one text" if any(model.compiled for model in models) else None


QUIET_BATCH = 16  # texts at once where no clock runs
SPARE = 0.9  # of the free memory that caches may take
GIB = 2**30


def require_batches(name: str, method: Method, models: Sequence[LoadedModel]) -> None:
    """Raise UserError for a policy that decodes one text at a time."""
    if (reason := why_not_in_batches(method, models)) is not None:
        raise UserError(
            f"policy {name} decodes no batches: {reason}; set runtime.batch=1, or"
            " runtime.engine=auto for a model that runs natively"
        )


def require_room(models: Iterable[LoadedModel], requests: Sequence[Request], batch: int) -> None:
    """Raise UserError, with the batch that fits, if the caches of a batch would not fit into the
    free memory.
    """
    models = list(models)
    fits = most_texts(models, requests)
    if fits is None or batch <= fits:
        return
    remedy = f"at most {fits} fit: set runtime.batch={fits}" if fits else "not even one text fits"
    needed, free = batch * bytes_of_text(models, requests) / GIB, free_bytes(models[0].device) / GIB
    raise UserError(
        f"a batch of {batch} texts needs {needed:.2f} GiB for its caches, and {free:.2f} GiB are"
        f" free; {remedy}, or lower decoding.max_new_tokens"
    )


def auto_batch_size(
    method: Method,
    models: Sequence[LoadedModel],
    requests: Sequence[Request],
    most: int = QUIET_BATCH,
) -> int:
    """How many texts to decode at once where no clock runs: 1 for what decodes no batches."""
    if why_not_in_batches(method, models) is not None:
        return 1
    fits = most_texts(models, requests)
    return most if fits is None else max(1, min(most, fits))


def most_texts(models: Iterable[LoadedModel], requests: Sequence[Request]) -> int | None:
    """The largest batch whose caches fit into the free memory; None if our own engines keep
    none.
    """
    models = list(models)
    each = bytes_of_text(models, requests)
    return int(SPARE * free_bytes(models[0].device) / each) if each else None


def bytes_of_text(models: Iterable[LoadedModel], requests: Sequence[Request]) -> int:
    """Of one place in a batch: the caches of its text, and of one whose encoder has run ahead.

    The longest text counts for each.
    """
    if not requests:
        return 0
    tokens = max(len(one.source.prompt) + one.limits.max_new_tokens for one in requests)
    sources = [
        0 if one.source.encoder_ids is None else one.source.encoder_ids.shape[1] for one in requests
    ]
    native = [model for model in models if model.engine in ("native", "kernels")]
    return 2 * sum(
        cache_bytes(model.checkpoint.config, model.dtype, tokens, max(sources)) for model in native
    )
