"""Weights in blocks, in memory as the Triton kernels of `blocks.py` read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from jaxtyping import Float, Int, Int8, Int32
from torch import Tensor
from torch.nn.functional import linear, pad

from bild_lab.engine.models.checkpoint.gguf_file import PackedTensor
from bild_lab.engine.models.native.cpu.panels import PLAIN, quantized, scales_and_numbers
from bild_lab.engine.models.native.stack import StoredMatrix, numbers_of
from bild_lab.errors import UserError

GROUP = 32  # inputs whose states are rounded together
PAIR = 2 * GROUP  # inputs whose scales share a word
BLOCK = 256  # inputs of a block of Q4_K and Q6_K
CHUNK = 8192  # outputs that are rounded or unpacked at a time, so that few are in float32
LEAST_STATE = 1e-30  # smaller ones count as zeros
WORDS = 4  # that a copy of 16 bytes takes; a line of scales has a multiple of these
FOUR_BITS = (Type.Q4_0, Type.Q4_K)  # the others are kept in 8
NESTED = (Type.Q4_K, Type.Q6_K)  # whose scales are whole numbers, and have a scale
KEPT_AS = {Type.Q5_0: Type.Q8_0}  # what has numbers and scales of the same kind
ZEROS = {Type.Q8_0: 128, Type.Q5_0: 16, Type.Q4_0: 8, Type.Q4_K: 8, Type.Q6_K: 32}


class BlockMatrix:
    """A matrix, [out, in], of whole numbers with scales, as GGML's types have them.

    type: Q8_0, Q4_0, Q4_K or Q6_K.
    packed: the numbers, signed, in [out, in] bytes; of four bits, [out, in / 2]: a byte has an
        input of a pair's first group in its lower bits, and of the second in the others.
    scales: [out, pairs], padded with zeros. Q8_0 and Q4_0: two of float16, the first group's in the
        lower half. Q6_K: four signed bytes, one for each 16 inputs. Q4_K: four bytes, the scales of
        both groups, then their minima.
    block_scales: [out, blocks] words, which multiply the scales: two of float16, for Q4_K the
        second of the minima.
    """

    def __init__(
        self,
        type: int,
        packed: Int8[Tensor, "out bytes"],
        scales: Int32[Tensor, "out words"],
        block_scales: Int32[Tensor, "out blocks"] | None = None,
    ) -> None:
        self.type, self.packed, self.scales, self.block_scales = type, packed, scales, block_scales
        inputs = packed.shape[1] * (2 if type in FOUR_BITS else 1)
        self.shape = torch.Size((packed.shape[0], inputs))

    @classmethod
    def rounded(cls, matrix: Float[Tensor, "out in"], bits: int) -> BlockMatrix:
        """Round a matrix, whose inputs are a multiple of 64, as GGML makes Q8_0, of 8 bits, or Q4_0."""
        type, parts = Type.Q8_0 if bits == 8 else Type.Q4_0, []
        for rows in matrix.split(CHUNK):
            scales, numbers = quantized(rows.view(len(rows), -1, GROUP), bits)
            numbers = numbers.to(torch.int8).flatten(1)
            parts.append(cls.of_numbers(type, numbers, scales.view(len(rows), -1)))
        return joined(parts)

    @classmethod
    def stored(cls, tensor: PackedTensor, device: torch.device) -> BlockMatrix:
        """A tensor of a GGUF file, with the numbers and scales that it has there."""
        outputs, block_bytes = tensor.shape[0], GGML_QUANT_SIZES[tensor.type][1]
        blocks = torch.from_numpy(tensor.blocks()).view(-1, block_bytes)
        scales, bit_groups = scales_and_numbers(blocks, tensor.type)
        numbers = torch.zeros_like(bit_groups[0][0]).flatten(1)
        first_bit = 0
        for values, bits in bit_groups:  # the lowest first
            numbers |= values.flatten(1) << first_bit
            first_bit += bits
        # what counts from 0 wraps around to what is signed
        signed = (numbers - ZEROS[tensor.type]).view(torch.int8)
        if tensor.type not in NESTED:
            (steps,), block_scales = scales, None
        elif tensor.type == Type.Q4_K:
            scale, minimum, *steps = scales
            steps = torch.cat([group_steps.view(-1, 4, 2) for group_steps in steps], 2)
            block_scales = torch.cat([scale, minimum], 1)
        else:
            scale, steps = scales
            block_scales = torch.cat([scale, torch.zeros_like(scale)], 1)
        of_blocks = None if block_scales is None else block_scales.view(outputs, -1)
        return cls.of_numbers(
            KEPT_AS.get(tensor.type, tensor.type),
            signed.view(outputs, -1).to(device),
            steps.reshape(outputs, -1).to(device),
            None if of_blocks is None else of_blocks.to(device),
        )

    @classmethod
    def of_numbers(
        cls,
        type: int,
        numbers: Int8[Tensor, "out in"],
        scales: Tensor,
        block_scales: Tensor | None = None,
    ) -> BlockMatrix:
        """Pack signed whole numbers. scales, block_scales: of each output, one after the other, in the
        file's precision.
        """
        packed = numbers
        if type in FOUR_BITS:
            halves = numbers.unflatten(1, (-1, 2, GROUP))
            packed = (halves[:, :, 0] & 15 | halves[:, :, 1] << 4).flatten(1)
        words = scales.contiguous().view(torch.int32)
        words = pad(words, (0, -words.shape[1] % WORDS))
        nested = None if block_scales is None else block_scales.contiguous().view(torch.int32)
        return cls(type, packed, words, nested)

    @property
    def nbytes(self) -> int:
        tensors = (self.packed, self.scales, self.block_scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def product(self, x: Float[Tensor, "m in"]) -> Float[Tensor, "m out"]:
        """By PyTorch, which a prompt takes, with states rounded as in `blocks.py`."""
        groups = x.float().unflatten(-1, (-1, GROUP))
        largest = groups.abs().amax(-1, keepdim=True)
        inverse = torch.where(largest > LEAST_STATE, 127 / largest, 0.0)
        states = (groups * inverse).round() * (largest / 127)
        return linear(states.flatten(-2).to(x.dtype), self.numbers(x.dtype))

    def numbers(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """What the numbers stand for, rounded to this precision."""
        numbers = torch.empty(self.shape, dtype=dtype, device=self.packed.device)
        for start in range(0, self.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            numbers[rows] = self[rows]._exact_numbers()
        return numbers

    def _exact_numbers(self) -> Float[Tensor, "out in"]:
        """What the numbers stand for, in float32."""
        outputs, inputs = self.shape
        signed = self.packed
        if self.type in FOUR_BITS:
            by_pair = signed.unflatten(1, (-1, 1, GROUP))
            signed = torch.cat([by_pair << 4 >> 4, by_pair >> 4], 2)
        words = self.scales[:, : inputs // PAIR].contiguous()
        minima = None
        if self.block_scales is None:
            scales = words.view(torch.float16).float()
        else:
            steps = words.view(torch.int8).view(outputs, -1, 4)
            of_blocks = self.block_scales.view(torch.float16).float().view(outputs, -1, 2)
            of_pairs = of_blocks.repeat_interleave(BLOCK // PAIR, 1)
            scales = steps * of_pairs[:, :, :1]
            if self.type == Type.Q4_K:
                scales, minima = scales[:, :, :2], steps[:, :, 2:] * of_pairs[:, :, 1:]
        scales = scales.reshape(outputs, -1, 1)
        values = signed.reshape(outputs, scales.shape[1], -1).float()
        if minima is None:
            values *= scales
        else:
            values = (values + ZEROS[self.type]) * scales - minima.reshape(outputs, -1, 1)
        return values.view(outputs, inputs)

    def __getitem__(self, outputs: Int[Tensor, " n"] | slice) -> BlockMatrix:
        """The matrix of these outputs alone."""
        nested = None if self.block_scales is None else self.block_scales[outputs]
        return BlockMatrix(self.type, self.packed[outputs], self.scales[outputs], nested)


def in_blocks(
    matrix: StoredMatrix,
    bits: int | str,
    device: torch.device,
    dtype: torch.dtype,
) -> StoredMatrix:
    """What the kernels take in place of a matrix: several parts, where neighbours have different
    types.

    bits: 8 or 4 to round it; gguf: what a file has in blocks stays so. Where inputs are no multiple
    of 64 they are plain numbers, of this precision.
    """
    if bits != "gguf":
        return matrix if matrix.shape[1] % PAIR else (BlockMatrix.rounded(matrix, bits),)
    if isinstance(matrix, Tensor):
        return matrix
    if matrix[0].shape[1] % PAIR:
        return torch.cat([numbers_of(stored, dtype).to(device) for stored in matrix])
    matrices = [
        stored if isinstance(stored, Tensor) else BlockMatrix.stored(stored, device)
        for stored in matrix
    ]
    return tuple(joined(list(group)) for _, group in groupby(matrices, type_of))


def bytes_of(matrix: StoredMatrix) -> int:
    matrices = matrix if isinstance(matrix, tuple) else (matrix,)
    return sum(stored.nbytes for stored in matrices)


def type_of(matrix: Tensor | BlockMatrix) -> int:
    return PLAIN if isinstance(matrix, Tensor) else matrix.type


def joined(matrices: Sequence[Tensor] | Sequence[BlockMatrix]) -> Tensor | BlockMatrix:
    """Matrices of one type, one after the other."""
    if len(matrices) == 1:
        return matrices[0]
    if isinstance(matrices[0], Tensor):
        return torch.cat(matrices)
    block_scales = None
    if matrices[0].block_scales is not None:
        block_scales = torch.cat([matrix.block_scales for matrix in matrices])
    packed = torch.cat([matrix.packed for matrix in matrices])
    scales = torch.cat([matrix.scales for matrix in matrices])
    return BlockMatrix(matrices[0].type, packed, scales, block_scales)


class ProductWeights(NamedTuple):
    """What the kernel of a product reads of a matrix, or of a part of one.

    numbers, scales, block_scales, type: as in `BlockMatrix`; scales that it does not have are
    never read. first, outputs: the part's first output, and how many it has.
    """

    numbers: Tensor
    scales: Tensor
    block_scales: Tensor
    type: int
    first: int
    outputs: int

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Those of a product's kernel."""
        return {
            "weights": self.numbers,
            "scales": self.scales,
            "block_scales": self.block_scales,
        }

    @classmethod
    def parts(cls, matrix: StoredMatrix) -> Iterator[ProductWeights]:
        """Each part of a matrix."""
        first_output = 0
        for stored in matrix if isinstance(matrix, tuple) else (matrix,):
            outputs = stored.shape[0]
            if isinstance(stored, Tensor):
                yield cls(stored, stored, stored, PLAIN, first_output, outputs)
            else:
                block_scales = stored.scales if stored.block_scales is None else stored.block_scales
                yield cls(
                    stored.packed,
                    stored.scales,
                    block_scales,
                    int(stored.type),
                    first_output,
                    outputs,
                )
            first_output += outputs

    @classmethod
    def whole(cls, matrix: StoredMatrix) -> ProductWeights:
        """A matrix of one type. Raises UserError for one of several."""
        parts = list(cls.parts(matrix))
        if len(parts) > 1:
            raise several_types(parts)
        return parts[0]


def several_types(parts: Sequence[ProductWeights]) -> UserError:
    types = [Type(part.type).name if part.type else "numbers" for part in parts]
    return UserError(
        f"matrices whose outputs share a tile are stored as {' and '.join(dict.fromkeys(types))};"
        " set runtime.weights=null pair.draft_weights=null"
    )
