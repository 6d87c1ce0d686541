"""Medusa's heads, packed for the kernels in `forward.cpp`."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_void_p

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.models.native.cpu.library import library
from bild_lab.engine.models.native.cpu.outline import Weight
from bild_lab.engine.models.native.cpu.packed import PackedDecoder
from bild_lab.engine.models.native.cpu.panels import Matrix, packed_matrix


class _Heads(Structure):
    _fields_ = (
        *((name, c_int32) for name in "dim vocab half layers shared".split()),
        ("blocks", c_void_p),
        ("outputs", c_void_p),
    )


class PackedHeads:
    """Medusa's heads by the kernels: `MedusaHeads.likeliest` in one call.

    blocks: [heads, layers, dim, dim]. biases: [heads, layers, dim]. outputs: of each head; or the target's decoder,
    whose matrix to the vocabulary all heads share.
    """

    def __init__(
        self,
        blocks: Float[Tensor, "heads layers dim dim"],
        biases: Float[Tensor, "heads layers dim"],
        outputs: Float[Tensor, "heads vocab dim"] | PackedDecoder,
    ) -> None:
        self._library = library()
        shared = isinstance(outputs, PackedDecoder)
        if shared and outputs.dtype != blocks.dtype:
            raise ValueError(f"heads in {blocks.dtype} cannot share a matrix in {outputs.dtype}")
        pairs = zip(blocks.flatten(0, 1), biases.flatten(0, 1), strict=True)
        matrices = [packed_matrix(Weight(matrix, bias)) for matrix, bias in pairs]
        ends = [(outputs.head, outputs)] if shared else [packed_matrix(Weight(matrix)) for matrix in outputs]
        self._held = (
            (Matrix * len(matrices))(*(made for made, *_ in matrices)),
            (Matrix * len(ends))(*(made for made, *_ in ends)),
            [held for _, *held in [*matrices, *ends]],
        )
        self._heads = _Heads(
            dim=blocks.shape[-1],
            vocab=self._held[1][0].outputs,
            half=blocks.dtype == torch.bfloat16,
            layers=blocks.shape[1],
            shared=shared,
            blocks=ctypes.addressof(self._held[0]),
            outputs=ctypes.addressof(self._held[1]),
        )

    def likeliest(self, hidden: Float[Tensor, " dim"], depth: int, count: int) -> Int[Tensor, "depth count"]:
        """The first heads' likeliest tokens."""
        state, tokens = hidden.float().contiguous(), torch.empty(depth, count, dtype=torch.long)
        self._library.likeliest_tokens(
            ctypes.byref(self._heads), state.data_ptr(), depth, count, torch.get_num_threads(), tokens.data_ptr()
        )
        return tokens
