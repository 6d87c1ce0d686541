"""How the kernels cut matrix products into tiles: measured choices, and a rule for all others.

A tiling decides the order of a sum, so a model must use the same one for every number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

from bild_lab.engine.models.native.gpu.block_matrix import BLOCK, PAIR

# programs that keep a large GPU busy
MANY_PROGRAMS = 128
# compute capabilities, by their first number, with more than 200 KB of shared memory, as the measured
# tilings need; the rule's need less than SHARED_BYTES, which all have from 8.0 on
LARGE_SHARED = (9, 10)
SHARED_BYTES = 98_304
# the most inputs of which a program can keep all weights on the chip
RESIDENT_INPUTS = 2048
# the most numbers of a matrix that few programs can load at once; larger ones stream
RESIDENT_NUMBERS = 9_000_000


class Tiling(NamedTuple):
    """A cut of one matrix product, [outputs, inputs].

    block_n: outputs of a program.
    block_k, ways: inputs of one step are `ways` blocks; with more than one each is summed by
        itself.
    warps: of a program.
    stages: buffers of a pipeline.
    split: parts of the inputs, each a program of its own.
    resident: a program loads all its weights before it waits for the kernel before, so `ways *
        block_k * split` covers the inputs.
    """

    block_n: int
    block_k: int
    ways: int
    warps: int
    stages: int = 1
    split: int = 1
    resident: bool = False

    @property
    def rows(self) -> int:
        """Rows of a tile: the matrix units' 8, or 16 where all warps share one sum."""
        return 16 if self.ways == 1 else 8

    def divides(self, inputs: int) -> bool:
        """Whether no step reaches beyond the inputs."""
        step = self.block_k * self.ways
        return step * self.split == inputs if self.resident else inputs % step == 0


def streaming(
    block_n: int, block_k: int, ways: int, warps: int, stages: int, split: int = 1
) -> Tiling:
    return Tiling(block_n, block_k, ways, warps, stages, split)


def resident(block_n: int, block_k: int, ways: int, warps: int, split: int = 1) -> Tiling:
    return Tiling(block_n, block_k, ways, warps, split=split, resident=True)


# by (product, inputs, outputs), the fastest on an H200; products as in `plan.py`
MEASURED: dict[tuple[str, int, int], Tiling] = {
    # T5-small
    ("project", 512, 1536): resident(16, 128, 4, 4),
    ("feed_forward", 512, 2048): resident(16, 128, 4, 4),
    ("residual", 512, 512): resident(16, 128, 4, 4),
    # T5-large
    ("project", 1024, 3072): resident(16, 256, 4, 4),
    ("residual", 1024, 1024): resident(16, 256, 4, 4),
    ("feed_forward", 1024, 4096): resident(16, 256, 4, 4),
    ("residual", 4096, 1024): resident(16, 256, 4, 4, split=4),
    ("score", 1024, 32128): streaming(128, 64, 1, 4, 5),
    # T5-3B
    ("project", 1024, 12288): resident(16, 256, 4, 4),
    ("feed_forward", 1024, 16384): streaming(128, 128, 1, 8, 4),
    ("residual", 16384, 1024): streaming(16, 128, 4, 4, 3, split=8),
    # Qwen2.5 1.5B
    ("project", 1536, 2048): resident(32, 256, 8, 8),
    ("residual", 1536, 1536): resident(16, 256, 8, 8),
    ("feed_forward", 1536, 17920): streaming(64, 128, 1, 4, 4),
    ("residual", 8960, 1536): streaming(64, 128, 1, 4, 6, split=4),
    ("score", 1536, 151936): streaming(64, 128, 1, 4, 5),
    # Qwen2.5 0.5B
    ("project", 896, 1152): resident(16, 256, 4, 4),
    ("residual", 896, 896): resident(16, 256, 4, 4),
    ("feed_forward", 896, 9728): streaming(64, 128, 1, 4, 4),
    ("residual", 4864, 896): resident(16, 256, 4, 4, split=5),
    ("score", 896, 151936): streaming(64, 128, 1, 4, 5),
    # Llama 7B
    ("project", 4096, 12288): streaming(32, 64, 4, 4, 4),
    ("residual", 4096, 4096): streaming(16, 128, 4, 4, 3, split=2),
    ("feed_forward", 4096, 22016): streaming(64, 128, 1, 4, 4),
    ("residual", 11008, 4096): streaming(64, 128, 1, 4, 4, split=4),
    ("score", 4096, 32000): streaming(32, 64, 4, 4, 4),
    # Llama 68M
    ("project", 768, 2304): resident(16, 256, 4, 4),
    ("feed_forward", 768, 6144): resident(16, 256, 4, 4),
    ("residual", 3072, 768): resident(32, 256, 8, 8, split=2),
    ("score", 768, 32000): streaming(128, 64, 1, 4, 5),
}


def tiling_of(
    product: str,
    inputs: int,
    outputs: int,
    capability: tuple[int, int],
    head_dim: int | None = None,
) -> Tiling:
    """The tiling of a product on a GPU of this compute capability.

    head_dim: of a projection whose heads are normed, so that a tile must be one head; None: any.
    """
    large_shared = capability[0] in LARGE_SHARED
    if head_dim is not None:
        # eight warps copy 16 bytes each of a block of 128 inputs; of 64 inputs four do
        block_k, warps = (128, 8) if head_dim > 128 and large_shared else (64, 4)
        shared_bytes = 2 * SHARED_BYTES if large_shared else SHARED_BYTES
        stages = min(4, shared_bytes // ((head_dim + 16) * block_k * 2))
        split = split_for(outputs // head_dim, inputs, block_k)
        return streaming(head_dim, block_k, 1, warps, stages, split)
    if large_shared and (product, inputs, outputs) in MEASURED:
        return MEASURED[product, inputs, outputs]
    if product == "score":
        return streaming(64, 128, 1, 4, 4)
    if inputs <= RESIDENT_INPUTS and inputs * outputs <= RESIDENT_NUMBERS:
        block_k = 256 if inputs > 512 else 128
        ways = max(2, power_of_two(-(-inputs // block_k)))
        return resident(16, block_k, ways, ways)
    return streaming(64, 128, 1, 4, 4, split=split_for(-(-outputs // 64), inputs, 128))


def block_tiling(inputs: int, outputs: int, head_dim: int | None = None) -> Tiling:
    """The tiling of a product whose weights are in blocks, by a rule: none was measured.

    head_dim: as in `tiling_of`. Of more outputs a program rounds the same states only once; of
    fewer there are more programs.
    """
    block_n = head_dim or (64 if outputs >= 64 * MANY_PROGRAMS else 32)
    ways = BLOCK // PAIR
    split = split_for(-(-outputs // block_n), inputs, BLOCK)
    return streaming(block_n, PAIR, ways, ways, 3 if block_n <= 64 else 2, split)


def split_for(tiles: int, inputs: int, block_k: int) -> int:
    """In how many parts the inputs are cut so that there are many programs: 1, 2, 4 or 8, each of
    at least four steps.
    """
    split = 1
    while split < 8 and tiles * split < MANY_PROGRAMS and inputs >= 8 * split * block_k:
        split *= 2
    return split


def power_of_two(count: int) -> int:
    """The least power of two that is at least this."""
    return 1 << max(0, count - 1).bit_length()
