"""Decoding from Python, `bild_lab.load(...)`, and what a policy's decoder is put together from:
models (`read_model`), a method of parts (`build`), processors and stop strings (`processors`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bild_lab.engine.models.checkpoint.chat import ChatSettings
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.gguf_file import recognized
from bild_lab.engine.models.checkpoint.loaded_checkpoint import LoadedCheckpoint
from bild_lab.engine.models.checkpoint.precision import AUTO, resolve_dtype
from bild_lab.engine.models.device import (
    DTYPES,
    cpu_by_default,
    dtype_name,
    resolve_device,
    set_threads,
)
from bild_lab.engine.models.hf.model import HuggingFaceModel, require_device_map
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.protocols import BringsBaseline, External, Method, Replays, Served
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.vocabularies import TranslatedModel, in_vocabulary_of
from bild_lab.errors import UserError, require_choice, warn_once
from bild_lab.lab.config.compose import compose_policy, knob_values, policies_of, resolved_policy
from bild_lab.lab.config.schemas import DecodingSpec, PairSpec, RuntimeSpec, typed
from bild_lab.lab.point.build import build_method
from bild_lab.lab.point.decoder import KNOWS_NO_STOP, Decoder, ends_at_stop_strings
from bild_lab.lab.point.languages import NONE, Languages, warn_of_what_is_left_out
from bild_lab.lab.point.processors import processors_of, stop_of
from bild_lab.lab.point.prompt_forms import plain_value
from bild_lab.lab.point.read_model import ENGINES, load_model
from bild_lab.lab.store.hashing import parts_of

_PAIR_OPTIONS = ("_revision", "_language", "_weights")
OPTIONS = {  # the keys of the configuration that `load` takes beside knobs
    "pair": {field.name for field in fields(PairSpec) if field.name.endswith(_PAIR_OPTIONS)},
    "runtime": {field.name for field in fields(RuntimeSpec)} - {"batch", "seed"},
}
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]  # a model in memory and its tokenizer


def load(
    target: str | Path | Loaded,
    draft: str | Path | Loaded | None = None,
    policy: str | DictConfig = "bild",
    second_draft: str | Path | Loaded | None = None,
    config_dir: str | Path | None = None,
    **options: Any,
) -> Decoder:
    """A decoder for a pair of checkpoints.

    target, draft, second_draft: a folder, a hub id, a GGUF file, toy:large or toy:small; or a model
    in memory with its tokenizer, which runs on hf.
    policy: a name in conf/policy with its knobs as keywords (`fallback=0.6`), or a composed policy.
    config_dir: a folder with further policies, as --config-dir.
    options: knobs; and by the names and with the values of the configuration the keys of
    `RuntimeSpec` (`dtype`, `device`, `engine`, `compile` …), of `PairSpec` (`target_revision`,
    `source_language` …), and `processors`, which may also be objects, `stop` (stop strings),
    `chat_template_date` and `chat_template_kwargs` of `dataset`, for the messages of a chat.
    `threads` is of the whole process. Weights load at the first decoding. Decoders of the same files
    share them; they leave the memory with the last decoder that has them and the next `load` of
    others. Raises UserError if the parts do not fit together.
    """
    if not isinstance(policy, str | DictConfig):
        raise UserError(f"policy must be a name, or a composed policy, got {policy!r:.80}")
    # a knob may come from NumPy, such as one of np.linspace(0, 1, 5)
    options = {key: plain_value(value) for key, value in options.items()}
    paths: dict[str, str | None] = {}
    in_memory: dict[str, Loaded] = {}
    for key, model in (("target", target), ("draft", draft), ("second_draft", second_draft)):
        if isinstance(model, str | Path | None):
            paths[key] = None if model is None else str(model)
        else:
            paths[key], in_memory[key] = key, model
    group_options = {
        group: {key: options.pop(key) for key in keys & options.keys()}
        for group, keys in OPTIONS.items()
    }
    decoding = DecodingSpec(
        1, stop=options.pop("stop", None), processors=options.pop("processors", NONE)
    )
    chat = ChatSettings(
        options.pop("chat_template_date", None), options.pop("chat_template_kwargs", {})
    )
    if options and not isinstance(policy, str):
        raise UserError(
            f"knobs need a policy's name, got a composed policy; set {', '.join(options)} in it"
            " instead"
        )
    folder = None if config_dir is None else Path(config_dir).expanduser()
    with policies_of(folder):
        node = compose_policy(policy, options) if isinstance(policy, str) else policy
        pair = typed(PairSpec, {"name": "user", **paths, **group_options["pair"]}, "pair")
        runtime = typed(RuntimeSpec, group_options["runtime"], "runtime")
        with load_model.renewed(), cpu_by_default():
            decoder = decoder_of(node, pair, decoding, runtime, in_memory=in_memory)
    set_threads(runtime.threads)
    return replace(decoder, chat=chat)


def decoder_of(
    policy: DictConfig,
    pair: PairSpec,
    decoding: DecodingSpec,
    runtime: RuntimeSpec,
    wrap: Callable[[LoadedModel], LoadedModel] = lambda model: model,
    in_memory: Mapping[str, Loaded] = MappingProxyType({}),
) -> Decoder:
    """A policy's decoder, as the configuration says.

    wrap: takes every model's place, such as a record of it. in_memory: models that need no loading,
    by their keys in `pair`. Raises UserError if the parts do not fit together.
    """
    require_choice("runtime.engine", runtime.engine, ENGINES)
    runtime = resolve_auto(runtime, policy, pair, in_memory)
    models = _Models(pair, runtime, in_memory)
    target = wrap(models.load("target", runtime.device_map))
    drafts: list[LoadedModel] = []

    def draft_model(key: str) -> LoadedModel:
        if getattr(pair, key) is None:
            raise UserError(
                f"policy {policy.name} drafts with a small model; give one with pair.{key} ({key}=)"
            )
        model = models.as_drafter(models.load(key))
        drafts.append(in_vocabulary_of(target.checkpoint, wrap(model)))
        warn_of_translation(drafts[-1])
        return drafts[-1]

    parts = {key: partial(draft_model, key) for key in ("draft", "second_draft")}
    method = build_method(policy, {"target": lambda: target, **parts})
    for model in (target, *drafts):
        model.checkpoint.check()
    _require_weights_run(method, policy, runtime, pair)
    languages = Languages(pair.source_language, pair.target_language)
    languages.check(target.checkpoint)
    processors = processors_of(decoding.processors, target.checkpoint)
    if isinstance(method, External) and (processors or pair.target_language is not None):
        raise UserError(
            f"{method.engine} knows neither processors nor target languages here; set"
            f" decoding.processors={NONE} and pair.target_language=null, or use policy=hf_generate"
        )
    stop = stop_of(decoding, target.checkpoint)
    if stop and not ends_at_stop_strings(method):
        raise UserError(KNOWS_NO_STOP.format(method.engine))
    warn_of_what_is_left_out(
        decoding.processors, languages, target.checkpoint, sampled=decoding.temperature > 0
    )
    return Decoder(
        target, method, (target, *drafts), processors, languages, stop, policy=str(policy.name)
    )


def _require_weights_run(
    method: Method, policy: DictConfig, runtime: RuntimeSpec, pair: PairSpec
) -> None:
    """Raise UserError where weights of fewer bits were asked for, and the method's engine runs none."""
    if not (runtime.weights or pair.draft_weights):
        return
    if runtime.weights == "gguf" and getattr(method, "reads_gguf_blocks", False):
        return
    is_peer = isinstance(method, External) and not isinstance(method, Served)
    if is_peer or method.engine == "hf":
        raise UserError(
            f"policy {policy.name} runs the original weights; set runtime.weights=null"
            " pair.draft_weights=null"
        )


def warn_of_translation(draft: LoadedModel) -> None:
    """Log, once for each pair, that a drafter has another vocabulary than the target, and what that
    costs.
    """
    if not isinstance(draft, TranslatedModel):
        return
    facts = draft.facts
    warn_once(
        f"{facts['draft']} has another vocabulary than the target, which shares {facts['shared']}"
        f" of its {facts['target_pieces']} pieces with it: texts are translated, and tokens drafted"
        " one forward at a time, which is slower; a drafter with the target's tokenizer needs no"
        " translation"
    )


class _Models:
    """Loads the models of a pair, all on one engine."""

    def __init__(
        self, pair: PairSpec, runtime: RuntimeSpec, in_memory: Mapping[str, Loaded]
    ) -> None:
        device = resolve_device(runtime.device)
        require_device_map(runtime.device_map, device)
        self.device = str(device)
        self.dtype = DTYPES[runtime.dtype]
        on_hf = runtime.engine == "auto" and (runtime.device_map is not None or in_memory)
        self.engine = "hf" if on_hf else runtime.engine
        self._pair, self._runtime, self._in_memory = pair, runtime, in_memory

    def load(self, key: str, device_map: str | None = None) -> LoadedModel:
        """The model of this key of the pair, on one device or spread over several."""
        if key in self._in_memory:
            return self._model_in_memory(self._in_memory[key], device_map)
        runtime, pair = self._runtime, self._pair
        draft_bits = None if key == "target" else pair.draft_weights
        return load_model(
            getattr(pair, key),
            getattr(pair, f"{key}_revision"),
            self.device,
            self.dtype,
            self.engine,
            compile=runtime.compile,
            trust_remote_code=runtime.trust_remote_code,
            device_map=device_map,
            allow_pickles=runtime.allow_pickles,
            bits=draft_bits or runtime.weights,
        )

    def _model_in_memory(self, loaded: Loaded, device_map: str | None) -> LoadedModel:
        own_weights = self._runtime.weights or self._pair.draft_weights
        if (
            self.engine != "hf"
            or self._runtime.compile == "true"
            or device_map is not None
            or own_weights
        ):
            raise UserError(
                "a model in memory runs on hf, on one device, got other settings; save it to a"
                " folder and give that"
            )
        checkpoint = _loaded_checkpoint(loaded)
        return HuggingFaceModel(checkpoint, torch.device(self.device), self.dtype)

    def as_drafter(self, model: LoadedModel) -> LoadedModel:
        """The model as `runtime.compile_drafter` wants it to draft."""
        compile_drafter, native = self._runtime.compile_drafter, isinstance(model, NativeModel)
        graphs = native and (model.compiled or model.graphs) and model.device.type == "cuda"
        if compile_drafter == "true" and not graphs and model.engine != "kernels":
            raise UserError(
                "only the kernels, and a GPU with CUDA graphs, draft in one program, and "
                f"{model.checkpoint.path} runs on {model.engine}; set runtime.compile_drafter=auto"
            )
        return model.without_fused_drafting() if compile_drafter == "false" and native else model


def _loaded_checkpoint(loaded: Loaded) -> LoadedCheckpoint:
    """The checkpoint of a model in memory. Raises UserError for one without its tokenizer."""
    if not isinstance(loaded, tuple):
        raise UserError(
            f"a model in memory comes with its tokenizer: ({type(loaded).__name__}, tokenizer)"
        )
    module, tokenizer = loaded
    return LoadedCheckpoint(type(module).__name__, module=module, loaded_tokenizer=tokenizer)


def resolve_auto(
    runtime: RuntimeSpec,
    policy: DictConfig,
    pair: PairSpec,
    in_memory: Mapping[str, Loaded] = MappingProxyType({}),
) -> RuntimeSpec:
    """The runtime with `dtype: auto` decided by the target, and `compile: auto` by the policy.

    Reads no weights.
    """
    device = resolve_device(runtime.device)
    if "target" in in_memory and runtime.dtype == AUTO:
        dtype = _loaded_checkpoint(in_memory["target"]).module.dtype
    else:
        target = Checkpoint(pair.target, pair.target_revision, runtime.trust_remote_code)
        dtype = resolve_dtype(runtime.dtype, recognized(target), device)
    return replace(
        runtime,
        dtype=dtype_name(dtype),
        compile=resolve_compile(runtime, policy, device),
    )


def resolve_compile(runtime: RuntimeSpec, policy: DictConfig, device: torch.device) -> str:
    """What `compile: auto` is: CUDA graphs on a GPU, for one text at a time and a policy whose
    passes they hold.

    The others, such as layers one by one, would pay for launches that the baseline is spared; all
    of it runs without. Their parts say `cuda_graph_safe = False`. Raises UserError for graphs without a
    GPU.
    """
    on_gpu = device.type == "cuda"
    if runtime.compile == "graphs" and not on_gpu:
        raise UserError(
            f"CUDA graphs need a GPU, got runtime.device={runtime.device}; set runtime.compile=auto"
        )
    if runtime.compile != "auto":
        return runtime.compile
    native = runtime.engine in ("auto", "native") and runtime.device_map is None
    graphs = on_gpu and native and runtime.batch == 1 and runs_in_graphs(policy)
    return "graphs" if graphs else "false"


def runs_in_graphs(policy: DictConfig) -> bool:
    """Whether CUDA graphs hold all passes of a policy."""
    return all(
        getattr(constructor, "cuda_graph_safe", True) for constructor in _constructors(policy)
    )


def brought_baseline(policy: DictConfig) -> DictConfig | None:
    """The policy that this one is compared with in place of `measure.baseline`; None: with that.

    See `BringsBaseline`.
    """
    for constructor in _constructors(policy):
        if isinstance(constructor, type) and issubclass(constructor, BringsBaseline):
            knobs = constructor.baseline_knobs(knob_values(resolved_policy(policy)))
            return None if knobs is None else compose_policy(policy.name, knobs)
    return None


def replays(policy: DictConfig) -> bool:
    """Whether a policy's texts come from a file of answers."""
    return any(
        isinstance(constructor, type) and issubclass(constructor, Replays)
        for constructor in _constructors(policy)
    )


def _constructors(policy: DictConfig) -> list[Callable[..., Any]]:
    """The class or function of each part of a policy's decoder."""
    return [constructor for constructor, _ in parts_of(resolved_policy(policy)["decoder"])]
