"""Which kernels run a decoder: C++ on a CPU, Triton on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from bild_lab.engine.models.native import cpu
from bild_lab.engine.models.native.llama import head_width
from bild_lab.engine.models.native.packed_pass import KernelDecoder
from bild_lab.engine.models.native.quantized_matrix import for_pytorch
from bild_lab.engine.models.native.stack import Stack

GPU_PRECISIONS = (torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)  # the first whose matrix units take bfloat16
COLUMNS = 16  # how many columns of the residual stream the Triton kernels sum together


def why_no_kernels(
    device: torch.device, dtype: torch.dtype, config: PreTrainedConfig | None = None
) -> str | None:
    """Why the kernels cannot run here in this precision, or None if they can.

    Those of a CPU are compiled if need be. config: of the model, which the kernels of a GPU must
    fit; None: of any.
    """
    if device.type != "cuda":
        return cpu.why_no_kernels(device, dtype)
    if dtype not in GPU_PRECISIONS:
        return f"on a GPU they run bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"they need compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    if config is not None and (reason := why_unfit_for_gpu(config)) is not None:
        return reason
    return why_no_launches()


def why_no_launches() -> str | None:
    """Why Triton cannot launch kernels here, or None if it can."""
    try:
        start_triton()
    except CalledProcessError as error:
        reason = f"{error.cmd[0]} failed"
    except Exception as error:  # whatever Triton raises is its answer
        reason = " ".join(str(error).split()).rstrip(".")
    else:
        return None
    return (
        "Triton compiles what launches them, which takes a C compiler and the headers of Python"
        f" (gcc and python3-dev), and does not start: {reason}"
    )


def start_triton() -> None:
    """Load the C code that launches kernels, which Triton compiles once for a machine. Its
    interpreter launches none.
    """
    import triton  # not everywhere
    from triton.runtime import driver

    if not triton.knobs.runtime.interpret:
        _ = driver.active.utils


def why_unfit_for_gpu(config: PreTrainedConfig) -> str | None:
    """Why the kernels of a GPU cannot run a model of these sizes, or None if they can."""
    if config.is_encoder_decoder:
        dim, head_dim, normed_heads = config.d_model, config.d_kv, False
    else:
        dim = config.hidden_size
        head_dim = head_width(config)
        normed_heads = config.model_type in ("qwen3", "gemma3_text")
    if dim % COLUMNS:
        return f"its width, {dim}, is no multiple of {COLUMNS}"
    if head_dim % 2:
        return f"the width of its heads, {head_dim}, is odd"
    if normed_heads and (head_dim < COLUMNS or head_dim & (head_dim - 1)):
        return f"the width of its normed heads, {head_dim}, is no power of two from {COLUMNS} on"
    return None


def quantized_by(
    bits: int | str, triton: bool, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor | tuple[Any, ...]], Tensor | tuple[Any, ...]]:
    """What takes the place of a matrix, both as `Weight` holds them: weights of so many bits, or in
    blocks, for Triton, or for PyTorch's kernels.
    """
    if not triton:
        return partial(for_pytorch, bits=bits)
    from bild_lab.engine.models.native.gpu.block_matrix import in_blocks

    return partial(in_blocks, bits=bits, device=device, dtype=dtype)


def kernel_decoder(stack: Stack, bits: int | None, triton: bool) -> KernelDecoder:
    """The stack as kernels run it. bits: of the weights that those of a CPU pack. triton: by Triton,
    whose weights are as the stack holds them.
    """
    if not triton:
        return cpu.PackedDecoder(stack, bits)
    from bild_lab.engine.models.native.gpu import TritonDecoder  # Triton is not everywhere

    return TritonDecoder(stack)
