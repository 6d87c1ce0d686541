"""A model's own greedy answers to many prompts, decoded in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.batch import Batch
from bild_lab.engine.batch_room import require_room
from bild_lab.engine.batched import decode_batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import NoDraft
from bild_lab.engine.hf_generation import HuggingFaceGenerate
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel, why_no_kernels, why_not_native
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.lab.decoding.load import fits_twice


def greedy_answers(
    model: HuggingFaceModel,
    sources: Sequence[Source],
    max_new_tokens: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The tokens that `vanilla` emits for each prompt, decoded in batches, the longest prompts first.

    On our own decoders they are vanilla's; on the CPU kernels in every precision, else in float32. A model that has
    none answers by batched `generate`. advance: called with 1 after each answer. Raises UserError for a batch that does
    not fit into the memory.
    """
    order = sorted(range(len(sources)), key=lambda index: -source_length(sources[index]))
    requests = [
        Request(sources[index].to(model.device), Limits(len(sources[index].prompt), max_new_tokens, ends))
        for ends in [model.checkpoint.end_tokens]
        for index in order
    ]
    own = our_decoder(model)
    method: Method = HuggingFaceGenerate(model) if own is None else DraftThenVerify(own, NoDraft(own), ExactMatch())
    if own is not None:
        own.load()
        require_room([own], requests, batch_size, "batch_size")
    found = decode_batch(method, requests, Batch(batch_size), lambda index: advance(1))
    answers: list[list[int]] = [[]] * len(sources)
    for index, text in zip(order, found, strict=True):
        answers[index] = text.token_ids
    return answers


def our_decoder(model: HuggingFaceModel) -> NativeModel | None:
    """The model on our own decoders, with the weights that it has loaded; None for another architecture."""
    if why_not_native(model.checkpoint.config, model.dtype) is not None:
        return None
    kernels = why_no_kernels(model.device, model.dtype) is None and fits_twice(model.checkpoint, model.dtype)
    own = NativeModel(model, kernels=kernels)
    if (module := vars(model).get("module")) is not None:
        own.decoder = own.family(module)
    return own


def source_length(source: Source) -> int:
    """Tokens that the model reads before it emits the first one."""
    return len(source.prompt) if source.encoder_ids is None else source.encoder_ids.shape[1]
