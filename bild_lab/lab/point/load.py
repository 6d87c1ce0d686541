"""Decoding from Python, `bild_lab.load(...)`, and how a policy's decoder is built: its models on
their engine, its method of parts, its processors and stop strings.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from bild_lab.engine.logits_processors import OF_SOURCES, Processors, score_settings
from bild_lab.engine.models.checkpoint.chat import ChatSettings
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.gguf_file import GgufCheckpoint, recognized
from bild_lab.engine.models.checkpoint.loaded_checkpoint import LoadedCheckpoint
from bild_lab.engine.models.checkpoint.precision import AUTO, resolve_dtype
from bild_lab.engine.models.device import (
    DTYPES,
    cpu_by_default,
    dtype_name,
    resolve_device,
    set_threads,
)
from bild_lab.engine.models.hf.model import (
    HuggingFaceModel,
    SpreadModel,
    require_device_map,
)
from bild_lab.engine.models.native import (
    GPU_PRECISIONS,
    NativeModel,
    why_no_kernels,
    why_not_native,
)
from bild_lab.engine.protocols import BringsBaseline, External, Method, Replays, Served
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.stop import StopStrings
from bild_lab.engine.vocabularies import TranslatedModel, in_vocabulary_of
from bild_lab.errors import (
    UserError,
    first_line,
    require_choice,
    require_flag,
    require_model_path,
    warn_once,
)
from bild_lab.lab.config.compose import (
    compose_policy,
    knob_values,
    policies_of,
    resolved_policy,
)
from bild_lab.lab.config.policies import describe_decoder, find_part
from bild_lab.lab.config.schemas import DecodingSpec, PairSpec, RuntimeSpec, stop_strings, typed
from bild_lab.lab.point.decoder import KNOWS_NO_STOP, Decoder, ends_at_stop_strings
from bild_lab.lab.point.languages import (
    CHECKPOINT,
    NONE,
    Languages,
    warn_of_what_is_left_out,
)
from bild_lab.lab.point.prompt_forms import plain_value
from bild_lab.lab.point.shared_models import SharedModels
from bild_lab.lab.store.hashing import parts_of

ENGINES = ("auto", "kernels", "native", "hf")
_PAIR_OPTIONS = ("_revision", "_language", "_weights")
OPTIONS = {  # the keys of the configuration that `load` takes beside knobs
    "pair": {field.name for field in fields(PairSpec) if field.name.endswith(_PAIR_OPTIONS)},
    "runtime": {field.name for field in fields(RuntimeSpec)} - {"batch", "seed"},
}
MANY_COLUMNS = 2**21  # more than any vocabulary has
METHOD_PARTS = ("engine", "draft_shape", "lossless", "decode")  # of `Method`
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
        model = models.drafting(models.load(key))
        drafts.append(in_vocabulary_of(target.checkpoint, wrap(model)))
        warn_of_translation(drafts[-1])
        return drafts[-1]

    parts = {key: partial(draft_model, key) for key in ("draft", "second_draft")}
    method = build_method(policy, {"target": lambda: target, **parts})
    for model in (target, *drafts):
        model.checkpoint.check()
    if (runtime.weights or pair.draft_weights) and not _runs_quantized(method, runtime.weights):
        raise UserError(
            f"policy {policy.name} runs the original weights; set runtime.weights=null"
            " pair.draft_weights=null"
        )
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


def _runs_quantized(method: Method, weights: int | str | None) -> bool:
    """Whether a method's engine runs weights of fewer bits. weights: as `runtime.weights`."""
    if weights == "gguf" and getattr(method, "reads_gguf_blocks", False):
        return True
    is_peer = isinstance(method, External) and not isinstance(method, Served)
    return not is_peer and method.engine != "hf"


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

    def drafting(self, model: LoadedModel) -> LoadedModel:
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
        getattr(constructor, "cuda_graph_safe", True)
        for constructor, _ in parts_of(resolved_policy(policy)["decoder"])
    )


def brought_baseline(policy: DictConfig) -> DictConfig | None:
    """The policy that this one is compared with in place of `measure.baseline`; None: with that.

    See `BringsBaseline`.
    """
    values = resolved_policy(policy)
    for constructor, _ in parts_of(values["decoder"]):
        if isinstance(constructor, type) and issubclass(constructor, BringsBaseline):
            knobs = constructor.baseline_knobs(knob_values(values))
            return None if knobs is None else compose_policy(policy.name, knobs)
    return None


def replays(policy: DictConfig) -> bool:
    """Whether a policy's texts come from a file of answers."""
    return any(
        isinstance(constructor, type) and issubclass(constructor, Replays)
        for constructor, _ in parts_of(resolved_policy(policy)["decoder"])
    )


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
    if engine in ("kernels", "native") and device_map is not None:
        raise UserError(
            "a target that is spread over devices runs on hf; set runtime.engine=hf or auto"
        )
    why_hf = None if engine == "hf" else why_not_native(checkpoint.config, dtype)
    if engine in ("kernels", "native") and why_hf is not None:
        raise UserError(f"{path} cannot run natively, as {why_hf}; set runtime.engine=hf or auto")
    where = torch.device(device)
    if engine != "hf" and why_hf is None:
        if engine == "kernels":
            _require_kernels(compile, checkpoint, where, dtype, bits)
        lacking = _why_without_kernels(engine, compile, checkpoint, where, dtype)
        if bits in (8, 4) and dtype == torch.float64:
            raise UserError(
                f"weights={bits} run in float32, bfloat16 or float16, got runtime.dtype=float64; set"
                " another precision, or runtime.weights=null pair.draft_weights=null"
            )
        if bits != "gguf" or lacking is None:
            module = HuggingFaceModel(checkpoint, where, dtype)
            return NativeModel(
                module, compile == "true", lacking is None, bits, compile == "graphs"
            )
        why_hf = lacking
    if bits is not None:
        raise UserError(
            f"only our own decoders run weights={bits}, gguf the kernels alone, and they cannot run"
            f" {path}{f', as {why_hf}' if why_hf else ''};"
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


def build_method(policy: DictConfig, models: dict[str, Callable[[], Any]]) -> Method:
    """The policy's `decoder`: every part built from its `_target_` and values.

    A part with a parameter named like one of `models` ("target", "draft") gets that model.
    Raises UserError for wrong knobs, and for a class that is no method.
    """
    method = build(resolved_policy(policy)["decoder"], models)
    if lacking := [name for name in METHOD_PARTS if not hasattr(method, name)]:
        raise UserError(
            f"the decoder of policy {policy.get('name')}, a {type(method).__name__}, lacks"
            f" {lacking[0]}; a method has {', '.join(METHOD_PARTS)}, and DraftThenVerify makes one of"
            " a drafter and a rule"
        )
    return method


def build(node: Any, models: dict[str, Callable[[], Any]]) -> Any:
    """Turn nested `_target_` mappings into objects, innermost first. Other values are unchanged.

    Raises UserError for a `_target_` that cannot be used, and for values that a part cannot take.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    # values first, so that a threshold out of range is found before a model is read
    values = {key: build(value, models) for key, value in node.items() if key != "_target_"}
    constructor = find_part(node["_target_"])
    parameters = inspect.signature(constructor).parameters
    if unknown := sorted(set(values) - set(parameters)):
        known = ", ".join(sorted(set(parameters) - set(models)))
        raise UserError(
            f"{constructor.__name__} has no parameter {unknown[0]!r}; it has {known or 'none'}"
        )
    for name in set(parameters) & set(models) - set(values):
        values[name] = models[name]()
    _require_parts(constructor, values)
    try:
        return constructor(**values)
    except UserError:
        raise
    # how a part of a user's refuses values, and a file that is missing
    except (TypeError, AttributeError, ValueError, OSError) as error:
        raise UserError(f"{constructor.__name__}: {error}; got {describe_decoder(node)}") from error


def _require_parts(constructor: Callable[..., Any], values: dict[str, Any]) -> None:
    """Raise UserError if a parameter declares one of our protocols and gets plain data."""
    module = sys.modules[constructor.__module__]
    for name, parameter in inspect.signature(constructor).parameters.items():
        annotation = getattr(module, str(parameter.annotation), None)
        value = values.get(name)
        is_plain = value is None or isinstance(value, bool | int | float | str | list | dict)
        if getattr(annotation, "_is_protocol", False) and is_plain:
            raise UserError(
                f"{constructor.__name__} needs a {annotation.__name__} as its {name}, got {value!r}; give"
                " its _target_"
            )


def processors_of(processors: Any, checkpoint: Checkpoint) -> Processors:
    """The processors of `decoding.processors`: none, those of the target's generation settings, or
    a list.

    Raises UserError for anything else.
    """
    if processors == NONE:
        return Processors()
    if processors == CHECKPOINT:
        settings = score_settings(checkpoint.generation)
        _require_one_vocabulary(settings, checkpoint)
        return Processors(settings)
    if isinstance(processors, str) or not isinstance(processors, Sequence) or not processors:
        raise UserError(
            f"decoding.processors must be {CHECKPOINT}, {NONE}, or a list of Transformers' logits"
            " processors such as [{_target_: transformers.NoRepeatNGramLogitsProcessor,"
            f" ngram_size: 3}}], got {processors!r}"
        )
    listed = Processors(added=tuple(map(_processor, processors)))
    _require_suited(listed.added, checkpoint)
    return listed


def _require_one_vocabulary(settings: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise UserError for a processor that looks for a source's tokens in a text of another
    vocabulary.
    """
    of_sources = [name for name in OF_SOURCES if name in settings]
    if of_sources and not checkpoint.one_vocabulary:
        raise UserError(
            f"{checkpoint.path} asks for {of_sources[0]}, which looks for the source's tokens in the"
            " text, but has a vocabulary for each; set decoding.processors=none, or list the other"
            " processors"
        )


def stop_of(decoding: DecodingSpec, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The stop strings of `decoding.stop`, and with `processors: checkpoint` those of the
    generation settings.

    Raises UserError as `StopStrings` does.
    """
    strings = decoding.stop
    if decoding.processors == CHECKPOINT:
        strings = (*strings, *stop_strings(checkpoint.generation.stop_strings))
    unique_strings = tuple(dict.fromkeys(strings))
    if unique_strings:
        StopStrings(unique_strings, checkpoint)  # refuses
    return unique_strings


def _processor(node: Any) -> LogitsProcessor:
    try:
        built = build(node, {})
    except ValueError as error:  # the processors check their values themselves
        raise UserError(f"decoding.processors: {error}") from error
    if not isinstance(built, LogitsProcessor):
        raise UserError(
            f"decoding.processors must list logits processors, each with its _target_, got {node!r}"
        )
    return built


def _require_suited(processors: Sequence[LogitsProcessor], checkpoint: Checkpoint) -> None:
    """Raise UserError for a processor of tokens that this checkpoint does not have: some check their
    values at the first scores alone.

    One that would fail at scores of any number of tokens wants another text than the one that is
    made up here, or another device; it is not judged. A user's own is not called: it may remember
    what it is called with.
    """
    for processor in processors:
        if type(processor).__module__.partition(".")[0] != "transformers":
            continue
        error = _error_of(processor, checkpoint.columns)
        if error is not None and _error_of(processor, MANY_COLUMNS) is None:
            raise UserError(
                f"decoding.processors: {type(processor).__name__} cannot change the"
                f" {checkpoint.columns} scores of {checkpoint.path}: {first_line(error)}; correct its"
                " values"
            ) from error


def _error_of(processor: LogitsProcessor, columns: int) -> Exception | None:
    """What the processor raises at the scores of this many tokens, behind a text of one."""
    text, scores = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, columns)
    try:
        copy(processor)(text, scores)
    except Exception as error:  # such as IndexError, RuntimeError, ValueError
        return error
    return None
