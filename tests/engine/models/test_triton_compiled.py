"""The Triton kernels, compiled for GPUs that are not here: they spill no registers, fit the chip's
shared memory, use the instructions that they are written for, and add up alike in all variants.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.triton_interpreter import needs_triton

ROOT = Path(__file__).resolve().parents[3]
# of one program, by compute capability
SHARED_BYTES = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# of a kernel whose weights are not in blocks; at 12.0 the compiler leaves some in kernels of 40
# registers, too
STACK_BYTES = {80: 0, 86: 0, 90: 0, 100: 0, 120: 16}
# the instructions of the matrix units by which all warps share a sum
SHARED_SUMS = {90: "wgmma", 100: "tcgen05", 120: "mma"}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_without_spills(capability: int) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_compiler", str(capability)],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == {
        "begin_stream",
        "copy_rows",
        "choose",
        "add_children",
        "next_level",
        "project",
        "attend",
        "residual",
        "add_normed",
        "feed_forward",
        "score",
        "leave_if_confident",
    }
    most = STACK_BYTES[capability]
    assert [kernel for kernel in kernels if kernel["stack"] > most and not kernel["TYPE"]] == []
    # a head of 256 in blocks, which is one tile where heads are normed, has too many sums
    spilling = [kernel for kernel in kernels if kernel["stack"] > 8]
    assert {(kernel["kernel"], kernel["BLOCK_N"]) for kernel in spilling} <= {("project", 256)}
    assert all(kernel["stack"] <= 512 for kernel in spilling)
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED_BYTES[capability]] == []
    # what streams is copied past the first cache, 16 bytes at a time, but for scales
    assert [kernel for kernel in kernels if kernel["narrow_copies"] and not kernel["TYPE"]] == []
    streaming = [kernel for kernel in kernels if kernel["WAYS"] and not kernel["RESIDENT"]]
    assert streaming
    assert all(kernel["wide_copies"] for kernel in streaming)
    in_blocks = [kernel for kernel in kernels if kernel["TYPE"]]
    assert {kernel["TYPE"] for kernel in in_blocks} == {Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K}
    assert all(kernel["whole_mma"] for kernel in in_blocks)
    # matrix units that read memory by themselves wait for what threads copied
    reading = [kernel for kernel in kernels if kernel["wgmma"] or kernel["tcgen05"]]
    assert all(kernel["fences"] for kernel in reading)
    # a row has the same bits in a chain, in a tree and before an exit: no variant of a kernel takes
    # a product into a sum where another does not
    products: dict[tuple[str, ...], set[str]] = {}
    for kernel in kernels:
        one = tuple(kernel[key] for key in ("model", "kernel", "same_kernel"))
        products.setdefault(one, set()).add(str(sorted(kernel["products"].items())))
    assert {one: found for one, found in products.items() if len(found) > 1} == {}
    assert len(products) < len(kernels)
    if capability >= 90:
        assert all(kernel["waits"] for kernel in kernels)
        instruction = SHARED_SUMS[capability]
        assert all(kernel[instruction] for kernel in streaming if kernel["WAYS"] == 1)
