"""Sessions over a decoder or a module, without a checkpoint."""

from __future__ import annotations

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
from bild_lab.engine.trace import Forward

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
