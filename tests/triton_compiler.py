"""Compile the Triton kernels at published sizes for a GPU that is not here:

python -m tests.triton_compiler CAPABILITY [NAME …], such as 90 qwen2.5-1.5b

It prints one line of JSON for each kernel: registers, bytes of stack and of shared memory, how
often some instructions occur, and how often it multiplies.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from bild_lab.engine.models.native.cpu.panels import PLAIN
from bild_lab.engine.models.native.gpu.block_matrix import FOUR_BITS, BlockMatrix
from bild_lab.engine.models.native.gpu.chains import ChainPrograms, ChainShape
from bild_lab.engine.models.native.gpu.graphs import GraphCache
from bild_lab.engine.models.native.gpu.growing import add_children, next_level
from bild_lab.engine.models.native.gpu.plan import (
    ForwardPlan,
    Launch,
    PassShape,
)
from bild_lab.engine.models.native.gpu.trees import LevelSizes, TreePrograms, TreeShape
from bild_lab.engine.models.native.stack import Layer, Stack, Weight

# of one kernel these differ between forwards: whether rows may stop or are a tree, whether only keys
# and values are wanted, and when it begins
VARIED = {"STOPPABLE", "TREE", "FILLS", "launch_pdl"}
# instructions of the machine, and of what the assembler is given, that multiply: where a product is
# taken into a sum, one more that also adds. Plain sums are not counted, as they are repeated, joined
# with a conversion, or move a number
MULTIPLYING = re.compile(
    r"\b(FFMA|DFMA|HMMA|HGMMA|IMMA|IGMMA|UTCHMMA|UTCIMMA|fma(?=\.\S*f32)|mul(?=\.\S*f32))(\S*)"
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a published model."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    activation: str = "silu"
    gated: bool = True
    biased: bool = False
    normed_heads: bool = False
    normed_blocks: bool = False
    encoder_decoder: bool = False
    window: int = 0
    type: int = PLAIN  # of the matrices, as in `BlockMatrix`


SIZES = {
    "t5-large": Sizes(1024, 16, 16, 64, 4096, 32128, "relu", gated=False, encoder_decoder=True),
    "t5-v1.1-large": Sizes(1024, 16, 16, 64, 2816, 32128, "gelu_tanh", encoder_decoder=True),
    "qwen2.5-1.5b": Sizes(1536, 12, 2, 128, 8960, 151936, biased=True),
    "qwen2.5-0.5b": Sizes(896, 14, 2, 64, 4864, 151936, biased=True),
    "qwen3-0.6b": Sizes(1024, 16, 8, 128, 3072, 151936, normed_heads=True),
    "gemma3-270m": Sizes(
        640, 4, 1, 256, 2048, 262144, "gelu_tanh", normed_heads=True, normed_blocks=True, window=512
    ),
    "mistral-7b": Sizes(4096, 32, 8, 128, 14336, 32000, window=4096),
}
SIZES |= {
    f"{name} {type.name}": replace(SIZES[name], type=type)
    for name, types in {
        "t5-large": (Type.Q4_0,),
        "qwen2.5-1.5b": (Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K),
        "qwen2.5-0.5b": (Type.Q8_0,),
        "qwen3-0.6b": (Type.Q8_0, Type.Q4_K, Type.Q6_K),
        "gemma3-270m": (Type.Q8_0, Type.Q4_0),
        "mistral-7b": (Type.Q8_0, Type.Q4_K),
    }.items()
    for type in types
}


class NoDevice:
    """Enough of a driver to compile for a GPU that this process does not have."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def shapes_alone(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Stack:
    """One layer of these sizes, without numbers."""

    def vector(size: int, precision: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=precision, device="meta")

    def matrix(outputs: int, inputs: int) -> Tensor | tuple[BlockMatrix]:
        if sizes.type == PLAIN:
            return torch.empty(outputs, inputs, dtype=dtype, device="meta")
        bytes = inputs // 2 if sizes.type in FOUR_BITS else inputs
        packed = torch.empty(outputs, bytes, dtype=torch.int8, device="meta")
        words = torch.empty(outputs, 4, dtype=torch.int32, device="meta")  # of no kernel's shape
        return (BlockMatrix(sizes.type, packed, words, words),)

    def weight(outputs: int, inputs: int, **fields: Any) -> Weight:
        return Weight(matrix(outputs, inputs), **fields)

    dim, width = sizes.dim, sizes.heads * sizes.head_dim
    outputs = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    block_norm = vector(dim, torch.float32) if sizes.normed_blocks else None
    heads = sizes.heads + sizes.kv_heads
    layer = Layer(
        norm=vector(dim),
        qkv=weight(outputs, dim, bias=vector(outputs) if sizes.biased else None),
        out=weight(dim, width),
        feed_norm=vector(dim),
        inner=weight(sizes.hidden * (1 + sizes.gated), dim, gated=sizes.gated),
        outer=weight(dim, sizes.hidden),
        head_norm=vector(heads * sizes.head_dim).view(heads, -1) if sizes.normed_heads else None,
        out_norm=block_norm,
        feed_out_norm=block_norm,
        cross_norm=vector(dim) if sizes.encoder_decoder else None,
        cross_query=weight(width, dim) if sizes.encoder_decoder else None,
        cross_out=weight(dim, width) if sizes.encoder_decoder else None,
        window=sizes.window,
    )
    embedding = torch.empty(sizes.vocab, dim, dtype=dtype, device="meta")
    head = matrix(sizes.vocab, dim)
    return Stack(
        layers=[layer],
        embedding=embedding,
        read_head=lambda: head,
        final_norm=vector(dim),
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        hidden=sizes.hidden,
        activation=sizes.activation,
        epsilon=1e-6,
        distance_bias=vector(sizes.heads * 129).view(-1, 129) if sizes.encoder_decoder else None,
    )


def launches_of(sizes: Sizes, capability: int) -> list[Launch]:
    """The kernels of forwards of eight rows: of a chain, of a tree, and of programs of two steps."""
    plan = ForwardPlan(shapes_alone(sizes), (capability // 10, capability % 10))
    shape = PassShape(rows=8, scored=8, tiles=8, chunks=8, source_chunks=1, layers=(0,))
    variants = [
        shape._replace(stoppable=True),
        shape._replace(tree_chunks=2, hidden=True, from_states=True),
        shape._replace(rows=1, scored=1, tiles=1, exits=True),
    ]
    chains = ChainPrograms(plan, GraphCache(torch.device("cpu")))
    program = ChainShape(shape, variants[0], 1, 2, 0.0, keeps_probs=False, keeps_states=True)
    launches = [launch for variant in (shape, *variants) for launch in plan.launches(variant)]
    launches += chains.launches(program)
    # chains, EAGLE-2's trees, and the most that a program has
    trees = TreePrograms(plan, GraphCache(torch.device("cpu")))
    for width, children, temperature in ((1, 1, 0.7), (10, 10, 1.0), (64, 16, 1.0)):
        sizes = LevelSizes(levels=3, texts=1, width=width, children=children)
        grows = TreeShape(shape, shape, sizes, temperature)
        launches += [
            launch
            for launch in trees.launches(grows)
            if launch.kernel in (add_children, next_level)
        ]
    return launches


def resources(launch: Launch) -> dict[str, Any]:
    """What a compiled kernel takes, and some of its instructions.

    same_kernel: what its variants have in common.
    """
    arguments = [
        MockTensor(argument.dtype) if isinstance(argument, Tensor) else argument
        for argument in launch.values
    ]
    compiled = launch.kernel.warmup(*arguments, grid=launch.grid, **launch.constants)
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        usage = output_of(tools / "cuobjdump", "-res-usage", file)
        instructions = output_of(tools / "nvdisasm", "-c", file)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {
        "kernel": launch.kernel.__name__,
        "registers": int(registers),
        "stack": int(stack),
        "shared": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "mma": ptx.count("mma.sync"),
        "whole_mma": ptx.count("m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
        "wide_copies": ptx.count("cp.async.cg"),
        "narrow_copies": ptx.count("cp.async.ca"),
        "waits": ptx.count("griddepcontrol.wait"),
        "fences": ptx.count("fence.proxy.async"),
        "products": products_in(instructions + ptx),
        "same_kernel": str(
            sorted((key, launch.constants[key]) for key in launch.constants.keys() - VARIED)
        ),
        **{
            name: launch.constants.get(name)
            for name in ("WAYS", "RESIDENT", "STOPPABLE", "TYPE", "BLOCK_N")
        },
    }


def products_in(code: str) -> dict[str, int]:
    """How often each kind of instruction multiplies; of two numbers at once counts twice."""
    products: Counter[str] = Counter()
    for kind, modifiers in MULTIPLYING.findall(code):
        products[kind] += 2 if modifiers.endswith("x2") or modifiers.startswith("2") else 1
    return products


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(capability: int, names: list[str]) -> None:
    driver.set_active(NoDevice(capability))
    seen = set()
    for name in names or SIZES:
        for launch in launches_of(SIZES[name], capability):
            found = {"model": name, **resources(launch)}
            if (key := str(found)) not in seen:
                seen.add(key)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
