"""The kernels' vectors round and activate as PyTorch does, on any processor; what is no number
stays none.
"""

from __future__ import annotations

import ctypes
import subprocess
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from bild_lab.engine.models.native.cpu import library
from tests.sessions import needs_kernels

pytestmark = needs_kernels
LANES = 16
PROGRAM = f"""
#include "{library.SOURCE.with_name("vectors.h")}"
extern "C" void round_all(const float* x, uint16_t* vectors, uint16_t* single, int count) {{
    for (int i = 0; i < count; i += LANES) *reinterpret_cast<halves*>(vectors + i) = narrow(load(x + i));
    for (int i = 0; i < count; ++i) narrow(x[i], reinterpret_cast<bfloat16*>(single) + i);
}}
extern "C" void activate_all(const float* x, float* to, int kind, int count) {{
    for (int i = 0; i < count; i += LANES) store(to + i, activate(load(x + i), kind));
}}
"""


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("vectors")
    source, made = folder / "vectors.cpp", folder / "vectors.so"
    source.write_text(PROGRAM)
    flags = [flag for flag in library.FLAGS if flag != "-fopenmp"]
    subprocess.run(
        [library._compiler(), *flags, "-w", "-shared", str(source), "-o", str(made)], check=True
    )
    return ctypes.CDLL(str(made))


def patterns() -> Tensor:
    """Floats of all kinds: NaNs of every payload at the ends, infinities, subnormals, ties, random
    bits.
    """
    special = [
        0x7FFFFFFF,
        0x7FFF8000,
        0x7F800001,
        0xFFFFFFFF,
        0xFFFF8001,
        0x7F800000,
        0xFF800000,
        0x7F7FFFFF,
    ]
    special += [0, 0x80000000, 1, 0x80000001, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001]
    random = torch.randint(0, 2**32, (4096,), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor(special), random]).to(torch.uint32).view(torch.float32)


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def test_one_float_and_a_vector_are_rounded_to_bfloat16_as_pytorch_does(
    vectors: ctypes.CDLL,
) -> None:
    floats = patterns()
    together, alone = (torch.empty(len(floats), dtype=torch.bfloat16) for _ in range(2))
    vectors.round_all(pointer(floats), pointer(together), pointer(alone), len(floats))
    expected = floats.bfloat16()
    assert torch.equal(expected.isnan(), floats.isnan())
    for rounded in (together, alone):
        torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)


ACTIVATIONS = {
    "relu": relu,
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
}


@pytest.mark.parametrize(("kind", "own"), [*enumerate(ACTIVATIONS.values())], ids=ACTIVATIONS)
def test_activations_are_pytorchs_and_keep_what_is_no_number(
    vectors: ctypes.CDLL, kind: int, own: object
) -> None:
    floats = torch.cat(
        [torch.linspace(-12, 12, LANES * 20), torch.tensor([torch.nan, -torch.nan] * (LANES // 2))]
    )
    found = torch.empty_like(floats)
    vectors.activate_all(pointer(floats), pointer(found), kind, len(floats))
    torch.testing.assert_close(found, own(floats), rtol=1e-5, atol=1e-6, equal_nan=True)
