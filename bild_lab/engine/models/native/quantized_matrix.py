"""Weights of 8 and 4 bits for PyTorch's weight-only kernels, on a GPU or a CPU.

Activations keep their precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.models.native.cpu.panels import quantized
from bild_lab.engine.models.native.stack import Stack, StoredMatrix
from bild_lab.errors import UserError

GROUP = 32  # inputs that share a scale of 4 bits
ROWS = 16  # the kernels take multiples of so many outputs


class QuantizedMatrix:
    """A matrix, [out, in]: of 8 bits with a scale for each output, or of 4 bits in groups of 32
    inputs with a scale.

    Rounded as GGML's Q8_0 and Q4_0 are (`quantized`).
    """

    def __init__(self, matrix: Float[Tensor, "out in"], bits: int) -> None:
        self.shape, self._bits, self._dtype = matrix.shape, bits, matrix.dtype
        outputs, inputs = self.shape
        scales, numbers = quantized(matrix.view(outputs, -1, inputs if bits == 8 else GROUP), bits)
        scales, numbers = scales.to(matrix.dtype).view(outputs, -1), numbers.view(outputs, inputs)
        if bits == 8:
            self._numbers, self._scales = numbers.to(torch.int8), scales.view(-1)
            return
        # [groups, out, 2]
        self._scales = torch.stack([scales.T, torch.zeros_like(scales.T)], -1).contiguous()
        from_zero = (numbers + 8).to(torch.int32)
        # two numbers a byte, then in the order of the matrix units, by 2 or 8 tiles of 16 inputs
        if matrix.is_cuda:
            pairs = (from_zero[:, ::2] << 4 | from_zero[:, 1::2]).to(torch.uint8)
            self._numbers = torch._convert_weight_to_int4pack(pairs, 2 if inputs % 128 else 8)
        else:
            self._numbers = torch._convert_weight_to_int4pack_for_cpu(from_zero, 2)

    def product(self, x: Float[Tensor, "m in"]) -> Float[Tensor, "m out"]:
        if self._bits == 8:
            return torch._weight_int8pack_mm(x, self._numbers, self._scales)
        multiply = torch._weight_int4pack_mm if x.is_cuda else torch._weight_int4pack_mm_for_cpu
        return multiply(x, self._numbers, GROUP, self._scales)

    def numbers(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """The matrix as it is rounded."""
        identity = torch.eye(self.shape[1], dtype=self._dtype, device=self._scales.device)
        return self.product(identity).T.to(dtype)


def for_pytorch(matrix: Float[Tensor, "out in"], bits: int) -> Tensor | tuple[QuantizedMatrix]:
    """The matrix rounded; one of another size than the kernels take stays as
    it is.

    Raises UserError for 4 bits in another precision than bfloat16 on a GPU, whose kernel knows no
    other.
    """
    if bits == 4 and matrix.is_cuda and matrix.dtype != torch.bfloat16:
        raise UserError(
            "on a GPU weights of 4 bits need runtime.dtype=bfloat16; set it, or runtime.weights=8"
        )
    outputs, inputs = matrix.shape
    if inputs % GROUP or outputs % ROWS:
        return matrix
    return (QuantizedMatrix(matrix, bits),)


def quantize_weights(stack: Stack, rounded: Callable[[StoredMatrix], StoredMatrix]) -> None:
    """Quantize a stack's matrices, one layer after another, so that no two layers are whole at
    once. rounded: what takes a matrix's place.
    """
    stack.layers = [
        layer.with_matrices(
            {name: rounded(weight.matrix) for name, weight in layer.weights.items()}
        )
        for layer in stack.layers
    ]
    head = rounded(stack.head)
    stack.read_head = lambda: head
