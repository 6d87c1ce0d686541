"""Rows rounded to 8 bits times weights in blocks: as whole numbers say, on every kind of processor."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from bild_lab.engine.models.checkpoint.gguf_file import PackedTensor
from bild_lab.engine.models.native.cpu import library
from bild_lab.engine.models.native.cpu.panels import BLOCK, PANEL, packed_matrix
from bild_lab.engine.models.native.stack import Weight
from tests.sessions import needs_kernels

pytestmark = needs_kernels
INPUTS = 512
KINDS = [Type.Q8_0, Type.Q5_0, Type.Q4_0, Type.Q4_K, Type.Q6_K]
PROGRAM = """
#include "products.h"
template <int R>
void store_products(const Rounded* rounded, const Matrix& matrix, int inputs, float* to) {
    vec out[R][2];
    multiply<R>(rounded, inputs / BLOCK, blocks_of(matrix, 0), inputs, out);
    for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half) store(to + r * PANEL + half * LANES, out[r][half]);
}
extern "C" void round_all(const float* x, int rows, int inputs, int8_t* numbers, float* steps) {
    std::vector<Rounded> rounded(rows * inputs / BLOCK);
    round_to_bytes(x, inputs, rows, inputs, rounded.data());
    for (size_t i = 0; i < rounded.size(); ++i) {
        std::memcpy(numbers + i * BLOCK, rounded[i].numbers, BLOCK);
        steps[i] = rounded[i].step;
    }
}
extern "C" void multiply_rows(const float* x, int rows, const Matrix* matrix, float* to) {
    std::vector<Rounded> rounded(rows * matrix->inputs / BLOCK);
    round_to_bytes(x, matrix->inputs, rows, matrix->inputs, rounded.data());
    by_most<ROUNDED_ROWS>(rows, [&]<int R>(int row) {
        store_products<R>(rounded.data() + row * matrix->inputs / BLOCK, *matrix, matrix->inputs, to + row * PANEL);
    });
}
"""


def compiled(
    folder: Path, flags: Sequence[str] = (), fault: tuple[str, str] | None = None
) -> ctypes.CDLL:
    """The program, for a processor with these flags; with a fault: one text of the headers as another."""
    headers = folder / "headers"
    shutil.copytree(library.SOURCE.parent, headers, dirs_exist_ok=True)
    if fault:
        faulty = [path for path in headers.glob("*.h") if fault[0] in path.read_text()]
        assert faulty
        for header in faulty:
            header.write_text(header.read_text().replace(*fault))
    source, made = headers / "program.cpp", folder / "program.so"
    source.write_text(PROGRAM)
    command = [library._compiler(), *library.FLAGS, *flags, "-w", "-shared", str(source)]
    subprocess.run([*command, "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("rounded"))


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def matrix_of(kind: Type, folder: Path, largest: bool = False) -> PackedTensor:
    """Random bytes as a panel's weights. largest: every number is the largest or the smallest."""
    block, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (PANEL, INPUTS // block, size), np.uint8)
    if largest:
        blocks = random.choice(np.array([0x00, 0xFF, 0x7F, 0x80], np.uint8), blocks.shape)
    scales = {Type.Q4_K: (0, 2), Type.Q6_K: (208,)}.get(kind, (0,))
    for place in scales:
        blocks[..., place : place + 2] = np.array([2e-3], np.float16).view(np.uint8)
    blocks.tofile(folder / "blocks")
    return PackedTensor(folder / "blocks", kind, (PANEL, INPUTS), 0)


def rows_of(count: int) -> Tensor:
    """Rows whose blocks differ in size, with a block of zeros."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, INPUTS, generator=generator) * torch.logspace(-3, 3, INPUTS)
    x[0, BLOCK : 2 * BLOCK] = 0
    return x


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The whole numbers of rows, and the step of each 32, as the kernels should have them."""
    blocks = x.view(len(x), -1, BLOCK)
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, 127 / most, 0.0)
    return (blocks * inverse).round(), most / 127


def products(program: ctypes.CDLL, x: Tensor, matrix: PackedTensor) -> Tensor:
    packed = packed_matrix(Weight((matrix,)))
    results = torch.empty(len(x), PANEL)
    program.multiply_rows(pointer(x), len(x), ctypes.byref(packed.matrix), pointer(results))
    return results


def expected(x: Tensor, matrix: PackedTensor) -> Tensor:
    """The same in float64, of the weights that the blocks stand for."""
    numbers, steps = rounded(x)
    weights = torch.from_numpy(dequantize(matrix.blocks(), matrix.type)).double()
    return (numbers.double() * steps).flatten(1) @ weights.T


def is_right(program: ctypes.CDLL, kind: Type, folder: Path, largest: bool = False) -> bool:
    matrix, x = matrix_of(kind, folder, largest), rows_of(11)
    if largest:
        x = x.sign()
    exact = expected(x, matrix)
    errors = (products(program, x, matrix).double() - exact).abs()
    return bool((errors <= 1e-5 * exact.abs().amax(-1, keepdim=True)).all())


def test_rows_are_rounded_to_the_nearest_of_255_numbers(program: ctypes.CDLL) -> None:
    x = rows_of(5)
    numbers = torch.empty(5, INPUTS // BLOCK, BLOCK, dtype=torch.int8)
    steps = torch.empty(5, INPUTS // BLOCK, 1)
    program.round_all(pointer(x), len(x), INPUTS, pointer(numbers), pointer(steps))
    expected_numbers, expected_steps = rounded(x)
    assert numbers.abs().amax() == 127 and not numbers[0, 1].any()
    assert torch.equal(numbers.float(), expected_numbers)
    torch.testing.assert_close(steps, expected_steps)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_what_is_no_number_gives_none_and_the_others_stay(
    wrong: float, program: ctypes.CDLL, tmp_path: Path
) -> None:
    matrix, x = matrix_of(Type.Q4_K, tmp_path), rows_of(3)
    before = products(program, x, matrix)
    x[1, 7] = wrong
    after = products(program, x, matrix)
    assert after[1].isnan().all() and torch.equal(after[::2], before[::2])


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_rounded_rows(
    kind: Type, program: ctypes.CDLL, tmp_path: Path
) -> None:
    assert is_right(program, kind, tmp_path)
    assert is_right(program, kind, tmp_path, largest=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kind: Type, program: ctypes.CDLL, tmp_path: Path
) -> None:
    matrix, x = matrix_of(kind, tmp_path), rows_of(21)
    alone = torch.cat([products(program, row[None], matrix) for row in x])
    for count in range(2, 22):
        assert torch.equal(products(program, x[:count].contiguous(), matrix), alone[:count])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["-mno-avx512vnni"],
        ["-mno-avx512vnni", "-mno-avx512bw"],
        ["-mno-avx512f"],
        ["-mno-avx2"],
        ["-mno-avx2", "-mno-fma"],
    ],
    ids=" ".join,
)
def test_other_processors_give_the_same_bits(
    flags: list[str], program: ctypes.CDLL, tmp_path: Path
) -> None:
    other = compiled(tmp_path, flags)
    for kind in KINDS:
        for largest in (False, True):
            assert is_right(other, kind, tmp_path, largest)
        matrix, x = matrix_of(kind, tmp_path), rows_of(11)
        if "-mno-fma" not in flags:
            assert torch.equal(products(other, x, matrix), products(program, x, matrix))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "fault", "kind"),
    [
        ([], ("128.0f * total", "127.0f * total"), Type.Q8_0),
        ([], ("s.least * total", "s.least"), Type.Q4_K),
        ([], ("half_total[run]", "half_total[0]"), Type.Q6_K),
        ([], ("bytes(group, 4)", "bytes(group, 3)"), Type.Q6_K),
        (["-mno-avx512vnni"], ("if constexpr (BITS < 8)", "if constexpr (BITS < 9)"), Type.Q8_0),
        (["-mno-avx512f"], ("weights & 0x80808080u", "weights & 0x00808080u"), Type.Q8_0),
    ],
)
def test_a_planted_fault_is_noticed(
    flags: list[str], fault: tuple[str, str], kind: Type, tmp_path: Path
) -> None:
    faulty = compiled(tmp_path, flags, fault)
    assert not (is_right(faulty, kind, tmp_path) and is_right(faulty, kind, tmp_path, largest=True))
