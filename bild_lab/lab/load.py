"""Decoding from Python: `bild_lab.load(...)` and `decoder.generate(...)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from bild_lab.engine.models.checkpoint import Checkpoint, LoadedCheckpoint
from bild_lab.engine.models.device import resolve_device, resolve_dtype
from bild_lab.engine.models.hf import HuggingFaceModel, weightless
from bild_lab.engine.models.lora import adapter_or_model
from bild_lab.engine.models.native import NativeModel, why_no_kernels, why_not_native
from bild_lab.engine.models.placement import Placement
from bild_lab.engine.protocols import External, Method
from bild_lab.engine.session import LoadedModel, NeedsScoresError
from bild_lab.engine.vocabularies import AUTO, INTERSECTION, in_vocabulary_of
from bild_lab.errors import UserError
from bild_lab.lab.build import build_method
from bild_lab.lab.config import compose_policy
from bild_lab.lab.decoder import Decoder
from bild_lab.lab.generation_settings import (
    NONE,
    processors_of,
    tell_precision,
    tell_vocabularies,
    tell_what_is_left_out,
)
from bild_lab.lab.languages import Languages
from bild_lab.lab.toy_pair import named_checkpoint

ENGINES = ("auto", "kernels", "native", "hf")
ON_ONE_DEVICE = Placement()
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]  # a model in memory and its tokenizer


def load(
    target: str | Path | Loaded,
    draft: str | Path | Loaded | None = None,
    policy: str | DictConfig = "bild",
    dtype: str = "float32",
    device: str = "auto",
    engine: str = "auto",
    target_revision: str | None = None,
    draft_revision: str | None = None,
    second_draft: str | Path | Loaded | None = None,
    second_draft_revision: str | None = None,
    compile: bool = False,
    compile_drafter: bool | str = "auto",
    trust_remote_code: bool = False,
    device_map: str | None = None,
    tensor_parallel: bool = False,
    processors: str | Sequence[Mapping[str, Any] | LogitsProcessor] = NONE,
    source_language: str | None = None,
    target_language: str | None = None,
    vocabularies: str = AUTO,
    wrap: Callable[[LoadedModel], LoadedModel] = lambda model: model,
    **knobs: Any,
) -> Decoder:
    """A decoder for a pair of checkpoints.

    target, draft, second_draft: a folder, a hub id, toy:large or toy:small; or a model in memory with its tokenizer,
    which runs on hf.
    policy: a name in conf/policy with its knobs as keywords (`fallback=0.6`), or a composed policy.
    engine: kernels (our C++ on a CPU), native (PyTorch), hf, or auto: the first of these that can run the model.
    compile: run native steps with torch.compile, on a GPU with CUDA graphs. The first use of each step takes seconds.
    compile_drafter: a small model drafts a window as one program: auto (on kernels, and where compile is true on a
    GPU), true (or refuse), false (never).
    trust_remote_code: run Python code that comes with a checkpoint.
    device_map, tensor_parallel: how the target is spread over devices (`Placement`). The pair then runs on hf.
    processors: what scores pass through before a token is chosen: none; checkpoint, what the target's generation
    settings say; or a list of Transformers' logits processors, as objects or by `_target_`.
    source_language, target_language: of a translation model, by its tokenizer's codes (`Languages`).
    vocabularies: how a draft model with another vocabulary than the target's drafts: intersection, the tokens that both
    have; strings, its text tokenized anew; or auto.
    wrap: takes every model's place, such as a record of it (`engine.record`).
    Weights load at the first decoding, and later decoders share them.
    Raises UserError if the parts do not fit together.
    """
    require_engine(engine)
    if knobs and not isinstance(policy, str):
        raise UserError(f"knobs need a policy's name, got a composed policy; set {', '.join(knobs)} in it instead")
    node = compose_policy(policy, knobs) if isinstance(policy, str) else policy
    placement = Placement(device_map, tensor_parallel)
    where, precision = str(placement.home(resolve_device(device))), resolve_dtype(dtype)
    in_memory = not all(isinstance(each, str | Path | None) for each in (target, draft, second_draft))
    on_hf = placement.spread or in_memory
    engine = "hf" if on_hf and engine == "auto" else engine  # all models run on one engine

    def any_model(path: str | Path | Loaded, revision: str | None, placement: Placement) -> LoadedModel:
        if isinstance(path, str | Path):
            return load_model(str(path), revision, where, precision, engine, compile, trust_remote_code, placement)
        if engine != "hf" or compile or placement.spread:
            raise UserError(
                "a model in memory runs on hf, on one device, got other settings; save it to a folder and give that"
            )
        if not isinstance(path, tuple):
            raise UserError(f"a model in memory comes with its tokenizer: ({type(path).__name__}, tokenizer)")
        module, tokenizer = path
        checkpoint = LoadedCheckpoint(type(module).__name__, module=module, own_tokenizer=tokenizer)
        return HuggingFaceModel(checkpoint, torch.device(where), precision)

    target_model = wrap(any_model(target, target_revision, placement))
    drafts: list[LoadedModel] = []

    def loading(
        key: str, path: str | Path | Loaded | None, revision: str | None, how: str
    ) -> Callable[[], LoadedModel]:
        def load_draft() -> LoadedModel:
            if path is None:
                raise UserError(f"policy {node.name} drafts with a small model; give one with pair.{key} ({key}=)")
            model = any_model(path, revision, ON_ONE_DEVICE)
            graphs = model.compiled and model.device.type == "cuda"
            if compile_drafter is True and not graphs and model.engine != "kernels":
                raise UserError(
                    f"only the CPU kernels, and a GPU with runtime.compile=true, draft in one program, and {path} runs "
                    f"on {model.engine}; set runtime.compile_drafter=auto"
                )
            if compile_drafter is False and isinstance(model, NativeModel):
                model = model.step_by_step()
            drafts.append(in_vocabulary_of(target_model.checkpoint, wrap(model), how))
            return drafts[-1]

        return load_draft

    def build(how: str) -> Method:
        models = {
            "target": lambda: target_model,
            "draft": loading("draft", draft, draft_revision, how),
            "second_draft": loading("second_draft", second_draft, second_draft_revision, how),
        }
        return build_method(node, models)

    try:
        method = build(vocabularies)
    except NeedsScoresError:
        if vocabularies != AUTO:
            raise
        drafts.clear()
        method = build(INTERSECTION)
    for model in (target_model, *drafts):
        model.checkpoint.check()
        tell_precision(model.checkpoint, precision)
    checkpoint, languages = target_model.checkpoint, Languages(source_language, target_language)
    languages.check(checkpoint)
    chosen = processors_of(processors, checkpoint)
    if isinstance(method, External) and (chosen or target_language is not None):
        raise UserError(
            f"{method.engine} knows neither processors nor target languages here; set decoding.processors={NONE} and "
            "pair.target_language=null, or use policy=hf_generate"
        )
    tell_what_is_left_out(processors, languages, checkpoint)
    decoder = Decoder(target_model, method, (target_model, *drafts), chosen, languages)
    tell_vocabularies(decoder.vocabularies)
    return decoder


def require_engine(engine: str) -> None:
    """Raise UserError for an unknown engine."""
    if engine not in ENGINES:
        raise UserError(f"runtime.engine must be one of {', '.join(ENGINES)}, got {engine!r}")


def fits_twice(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Whether this machine has room for two copies of the weights."""
    numbers = sum(weight.numel() for weight in weightless(checkpoint).parameters())
    return 2 * numbers * dtype.itemsize < psutil.virtual_memory().total


@lru_cache(maxsize=4)
def load_model(
    path: str,
    revision: str | None,
    device: str,
    dtype: torch.dtype,
    engine: str,
    compile: bool = False,
    trust_remote_code: bool = False,
    placement: Placement = ON_ONE_DEVICE,
) -> LoadedModel:
    """A checkpoint's model, shared by all decoders of the process.

    Raises UserError for an unknown engine, for a model that the native engine cannot run, and for a placement that
    the model does not allow.
    """
    require_engine(engine)
    checkpoint = adapter_or_model(named_checkpoint(path, revision, trust_remote_code))
    if engine in ("kernels", "native") and placement.spread:
        raise UserError("a target that is spread over devices runs on hf; set runtime.engine=hf or auto")
    reason = None if engine == "hf" else why_not_native(checkpoint.config, dtype)
    if engine in ("kernels", "native") and reason is not None:
        raise UserError(f"{path} cannot run natively, as {reason}; set runtime.engine=hf or auto")
    where = torch.device(device)
    if engine != "hf" and reason is None:
        if engine == "kernels" and compile:
            raise UserError("the CPU kernels are compiled ahead of time; set runtime.compile=false")
        lacking = "native was asked for" if engine == "native" or compile else why_no_kernels(where, dtype)
        if lacking is None and not fits_twice(checkpoint, dtype):
            lacking = "its weights and their packed copy do not fit into memory"
        if engine == "kernels" and lacking is not None:
            raise UserError(f"the CPU kernels cannot run: {lacking}; set runtime.engine=auto")
        return NativeModel(HuggingFaceModel(checkpoint, where, dtype), compile, kernels=lacking is None)
    if compile:
        raise UserError(f"only the native engine compiles, and {path} runs on hf; set runtime.compile=false")
    return placement.model(checkpoint, where, dtype)
