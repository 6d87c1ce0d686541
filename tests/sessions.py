"""Sessions over a decoder or a module, without a checkpoint, and what is compared of their traces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bild_lab.engine.draft import Tree
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native.compiled import Workspace
from bild_lab.engine.models.native.cpu import PackedDecoder, why_no_kernels
from bild_lab.engine.models.native.layers import Decoder, NativeLayers
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.request import Source
from bild_lab.engine.session import Prefix, Rows
from bild_lab.engine.trace import Forward, Trace

needs_kernels = pytest.mark.skipif(
    (reason := why_no_kernels(torch.device("cpu"), torch.float32)) is not None,
    reason=f"no CPU kernels: {reason}",
)


def native_session(
    decoder: Decoder,
    source: Source,
    room: int,
    prefix: Prefix | None = None,
    workspace: Workspace | None = None,
    forwards: list[Forward] | None = None,
    kernels: bool = False,
    bits: int | None = None,
) -> CachedSession:
    packed = PackedDecoder(decoder, bits) if kernels else None
    encoder = (
        PackedDecoder(decoder.encoder, bits) if kernels and isinstance(decoder, T5Decoder) else None
    )
    layers = NativeLayers(decoder, source, room, prefix, workspace, packed, encoder)
    return CachedSession(layers, source.prompt, forwards)


def tree_rows(tokens, parents) -> Rows:
    """Token ids that stand in a tree of these parents."""
    return Rows(tokens, Tree(parents))


def rounds_of(trace: Trace) -> list[tuple[object, ...]]:
    """What two ways to decode a text must have in common of its rounds."""
    return [
        (round_.drafted, round_.accepted, round_.next_token, round_.stats.get("fallback"))
        for round_ in trace.rounds
    ]


def forwards_of(trace: Trace) -> list[Forward]:
    """The same of its forwards, whatever model object ran them."""
    return [replace(forward, config=None) for forward in trace.forwards]
