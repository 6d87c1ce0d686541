"""A checkpoint's model on the engine that a configuration asks for, or why that engine cannot run it."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.gguf_file import GgufCheckpoint, recognized
from bild_lab.engine.models.checkpoint.precision import resolve_dtype
from bild_lab.engine.models.hf.model import HuggingFaceModel, SpreadModel
from bild_lab.engine.models.native import (
    GPU_PRECISIONS,
    NativeModel,
    why_no_kernels,
    why_not_native,
)
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError, require_choice, require_flag, require_model_path
from bild_lab.lab.point.shared_models import SharedModels

ENGINES = ("auto", "kernels", "native", "hf")


def configured_checkpoint(cfg: DictConfig) -> Checkpoint:
    """The checkpoint of a command that has `model.path`, `model.revision` and
    `runtime.allow_pickles`.

    Raises UserError for a path or a switch that is none. Reads nothing.
    """
    require_model_path("model.path", cfg.model.path)
    require_flag("runtime.allow_pickles", cfg.runtime.allow_pickles)
    return Checkpoint(cfg.model.path, cfg.model.revision, allow_pickles=cfg.runtime.allow_pickles)


def configured_model(
    cfg: DictConfig, device: torch.device, dtype: str, device_map: str | None = None
) -> LoadedModel:
    """The model of `configured_checkpoint`. dtype: as `runtime.dtype`. No weights are read."""
    checkpoint = configured_checkpoint(cfg)
    return load_model(
        checkpoint.path,
        checkpoint.revision,
        str(device),
        resolve_dtype(dtype, recognized(checkpoint), device),
        "auto",
        device_map=device_map,
        allow_pickles=checkpoint.allow_pickles,
    )


def _read_model(
    path: str,
    revision: str | None,
    device: str,
    dtype: torch.dtype,
    engine: str,
    compile: str = "false",
    trust_remote_code: bool = False,
    device_map: str | None = None,
    allow_pickles: bool = False,
    bits: int | str | None = None,
) -> LoadedModel:
    """A checkpoint's model, whose weights are not read yet. bits: of them, as `runtime.weights`.

    Raises UserError for an unknown engine, for a model that the native engine cannot run, and for
    one that is to be spread over devices elsewhere than on hf, or quantized elsewhere than on the
    kernels.
    """
    require_choice("runtime.engine", engine, ENGINES)
    checkpoint = recognized(
        Checkpoint(path, revision, trust_remote_code, allow_pickles=allow_pickles)
    )
    _ = checkpoint.opened  # notes its files as they are now
    if bits == "gguf":
        _require_gguf_blocks(checkpoint)
    where = torch.device(device)
    if engine == "auto" and device_map is not None:
        engine = "hf"  # our own decoders have their model on one device
    why_hf = None if engine == "hf" else why_not_native(checkpoint.config, dtype)
    if engine in ("kernels", "native"):
        _require_native(path, device_map, why_hf)
    if engine != "hf" and why_hf is None:
        if engine == "kernels":
            _require_kernels(compile, checkpoint, where, dtype, bits)
        _require_precision_for(bits, dtype)
        lacking = _why_without_kernels(engine, compile, checkpoint, where, dtype)
        if bits != "gguf" or lacking is None:
            module = HuggingFaceModel(checkpoint, where, dtype)
            return NativeModel(
                module, compile == "true", lacking is None, bits, compile == "graphs"
            )
        why_hf = lacking
    if bits is not None:
        raise UserError(
            f"only our own decoders run weights={bits}, gguf the kernels alone, and they cannot run"
            f" {path}, as {why_hf or 'it runs on hf'};"
            f" set {_remedy_for_weights(bits, checkpoint, where, dtype)}"
        )
    if compile == "true":
        raise UserError(
            f"only the native engine compiles, and {path} runs on hf; set runtime.compile=false"
        )
    if device_map is not None:
        return SpreadModel(checkpoint, where, dtype, device_map)
    return HuggingFaceModel(checkpoint, where, dtype)


load_model = SharedModels(_read_model)


def _require_gguf_blocks(checkpoint: Checkpoint) -> None:
    """Raise UserError unless this is a GGUF file whose blocks the kernels know."""
    if not isinstance(checkpoint, GgufCheckpoint):
        raise UserError(
            f"weights=gguf keeps the blocks of a GGUF file, got {checkpoint.path}; give one, or set"
            " 8, 4 or null"
        )
    _ = checkpoint.kernel_blocks


def _require_native(path: str, device_map: str | None, why_hf: str | None) -> None:
    """Raise UserError where our own decoders were asked for and cannot run this model. why_hf: the
    reason why Transformers has to run it; None: it does not.
    """
    if device_map is not None:
        raise UserError(
            "a target that is spread over devices runs on hf; set runtime.engine=hf or auto"
        )
    if why_hf is not None:
        raise UserError(f"{path} cannot run natively, as {why_hf}; set runtime.engine=hf or auto")


def _require_precision_for(bits: int | str | None, dtype: torch.dtype) -> None:
    """Raise UserError for quantized weights in a precision that their products do not have."""
    if bits in (8, 4) and dtype == torch.float64:
        raise UserError(
            f"weights={bits} run in float32, bfloat16 or float16, got runtime.dtype=float64; set"
            " another precision, or runtime.weights=null pair.draft_weights=null"
        )


def _require_kernels(
    compile: str,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    bits: int | str | None,
) -> None:
    """Raise UserError where the kernels were asked for and cannot run."""
    if compile != "false":
        raise UserError("the kernels need no compiler; set runtime.compile=false")
    lacking = why_no_kernels(device, dtype, checkpoint.config)
    if lacking is not None:
        remedy = _remedy_for_kernels(bits, device, dtype)
        raise UserError(f"the kernels cannot run: {lacking}; set {remedy}")


def _why_without_kernels(
    engine: str, compile: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why our own decoder of this model runs without kernels; None: they run it."""
    if engine == "native" or compile != "false":
        return "native was asked for"
    if engine == "auto" and device.type == "cuda":  # until they are measured on one
        return "those of a GPU run only where they are asked for"
    return why_no_kernels(device, dtype, checkpoint.config)


def _remedy_for_kernels(bits: int | str | None, device: torch.device, dtype: torch.dtype) -> str:
    """What to set where kernels were asked for and cannot run."""
    remedies = ["runtime.engine=auto"] if bits != "gguf" else []
    if device.type == "cuda" and dtype not in GPU_PRECISIONS:
        remedies.append("runtime.dtype=bfloat16")
    return " or ".join(remedies) or "runtime.weights=null"


def _remedy_for_weights(
    bits: int | str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> str:
    """What to set where nothing here runs weights of these bits."""
    on_gpu = device.type == "cuda"
    if bits == "gguf" and on_gpu and why_not_native(checkpoint.config, dtype) is None:
        precision = "" if dtype in GPU_PRECISIONS else " runtime.dtype=bfloat16"
        return f"runtime.engine=kernels{precision}"
    return "runtime.weights=null pair.draft_weights=null"
