"""Decoding from Python: `bild_lab.load(...)` and `decoder.generate(...)`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bild_lab.engine.models.checkpoint import (
    Checkpoint,
    LoadedCheckpoint,
    Prompt,
    require_same_vocabulary,
    resolve_device,
    resolve_dtype,
)
from bild_lab.engine.models.hf import HuggingFaceModel, weightless
from bild_lab.engine.models.native import NativeModel, why_no_kernels, why_not_native
from bild_lab.engine.models.placement import Placement
from bild_lab.engine.models.ranks import Ranks
from bild_lab.engine.protocols import Method, Prepares, Streams
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.build import build_method
from bild_lab.lab.config import compose_policy
from bild_lab.lab.toy_pair import named_checkpoint

ENGINES = ("auto", "kernels", "native", "hf")
ON_ONE_DEVICE = Placement()


@dataclass(frozen=True)
class Generation:
    """One continuation. token_ids: as emitted, including the end token. text: without special tokens."""

    text: str
    token_ids: list[int]
    trace: Trace
    latency_s: float


@dataclass(frozen=True)
class Decoder:
    """A target model and a method that decodes with it."""

    target: LoadedModel
    method: Method
    models: tuple[LoadedModel, ...]  # the target, then the models that draft

    @property
    def running(self) -> tuple[LoadedModel, ...]:
        """The models that run: Transformers' own generate runs its own modules, whatever engine our loop uses.

        Of a peer in a process of its own these are the same checkpoints, as our loop would run them.
        """
        return tuple(each.transformers if self.method.engine == "hf" else each for each in self.models)

    @property
    def ranks(self) -> Ranks:
        """The processes that hold the target's weights."""
        return self.target.transformers.ranks

    def load_weights(self) -> None:
        """Read the weights now instead of at the first decoding.

        Raises UserError for a model whose sessions would not give its own scores.
        """
        for model in self.running:
            model.load()
            if self.method.feeds is not None:
                model.admit(self.method.feeds)

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        seed: int = 0,
        max_source_tokens: int | None = None,
    ) -> Request:
        """Tokenize a prompt (text, token ids or messages) and set its limits and sampling."""
        require_whole("max_new_tokens", max_new_tokens, 1)
        sampling = sampling or Sampling()
        source = self.target.source(prompt, max_source_tokens)
        positions = self._require_positions(source, max_new_tokens)
        limits = Limits(len(source.prompt), max_new_tokens, self.target.checkpoint.end_tokens, positions)
        generator = None if sampling.greedy else torch.Generator(self.target.device).manual_seed(seed)
        return Request(source, limits, sampling, generator)

    def _require_positions(self, source: Source, max_new_tokens: int) -> int | None:
        """How many tokens all models can read; None for any number. Raises UserError for a longer request."""
        prompt, read = len(source.prompt), len(source.prompt) + max_new_tokens - 1  # the last token is never read
        limits = []
        for model in self.running:
            name = f"{model.checkpoint.path} ({model.checkpoint.config.model_type})"
            most = model.positions if self.method.feeds is None else model.session_positions
            if most is not None and read > most:
                unchanged = "" if most == model.positions else ", as its rotation changes with longer texts"
                remedy = "" if most == model.positions else ", or use policy=hf_generate"
                raise UserError(
                    f"{name} reads at most {most} tokens{unchanged}, got a prompt of {prompt} and {max_new_tokens} new "
                    f"tokens; lower decoding.max_new_tokens or dataset.max_source_tokens{remedy}"
                )
            limits.append(most)
            longest = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
            if (most := model.source_positions) is not None and longest > most:
                raise UserError(
                    f"the encoder of {name} reads at most {most} tokens, got a source of {longest}; "
                    "lower dataset.max_source_tokens"
                )
        return min((most for most in limits if most is not None), default=None)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        max_source_tokens: int | None = None,
    ) -> Generation:
        """Continue one prompt, or translate it with an encoder–decoder. The trace holds every round and its stages.

        prompt: text, token ids, or the messages of a chat.
        max_source_tokens: a longer prompt is cut to so many tokens; None: never.
        """
        request = self.request(prompt, max_new_tokens, Sampling(temperature, top_k, top_p), seed, max_source_tokens)
        self.load_weights()
        if isinstance(self.method, Prepares):
            self.method.prepare(request)
        trace = StageTrace(synchronize=self.synchronize)
        started = time.perf_counter()
        tokens = self.method.decode(request, trace)
        self.synchronize()
        emitted = tokens[request.limits.prompt_length :]
        return Generation(self.text(emitted), emitted, trace, time.perf_counter() - started)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """The text of `generate` in pieces, as tokens are accepted.

        A method that cannot stream, such as beam search, gives the text in one piece.
        """
        request = self.request(prompt, max_new_tokens, Sampling(temperature, top_k, top_p), seed)
        self.load_weights()
        if isinstance(self.method, Streams):
            parts = self.method.stream(request, Trace())
        else:
            parts = iter([self.method.decode(request, Trace())[request.limits.prompt_length :]])
        emitted: list[int] = []
        shown = ""
        for part in parts:
            emitted += part
            text = settled(self.text(emitted))
            if text.startswith(shown) and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        text = self.text(emitted)
        if len(text) > len(shown):
            yield text[len(shown) :]

    def text(self, token_ids: list[int]) -> str:
        return self.target.checkpoint.tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def pieces(self, token_ids: Iterable[int]) -> dict[int, str]:
        """The text that each token adds, with its leading space, by token id. Special tokens are given by name."""
        tokenizer = self.target.checkpoint.tokenizer
        special = set(tokenizer.all_special_ids)
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1]  # a token decoded alone loses its leading space
        before = tokenizer.decode([anchor])
        return {
            token: tokenizer.convert_ids_to_tokens(token)
            if token in special
            else tokenizer.decode([anchor, token])[len(before) :]
            for token in token_ids
        }

    def synchronize(self) -> None:
        """Wait until the target's device has finished its work."""
        self.target.transformers.synchronize()


def settled(text: str) -> str:
    """The text without its last two words.

    Later tokens may still change these: a character may take several tokens, and some tokenizers remove spaces
    before punctuation.
    """
    words = list(re.finditer(r"\S+", text))
    return text[: words[-2].start()].rstrip() if len(words) > 2 else ""


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
    **knobs: Any,
) -> Decoder:
    """A decoder for a pair of checkpoints.

    target, draft, second_draft: a folder, a hub id, toy:large or toy:small; or a model in memory with its tokenizer,
    which runs on hf.
    policy: a name in conf/policy with its knobs as keywords (`fallback=0.6`), or a composed policy.
    engine: kernels (our C++ on a CPU), native (PyTorch), hf, or auto: the first of these that can run the model.
    compile: run native steps with torch.compile, on a GPU with CUDA graphs. The first use of each step takes seconds.
    compile_drafter: a small model drafts a window as one program: auto (on kernels), true (or refuse), false (never).
    trust_remote_code: run Python code that comes with a checkpoint.
    device_map, tensor_parallel: how the target is spread over devices (`Placement`). The pair then runs on hf.
    Weights load at the first decoding, and later decoders share them.
    Raises UserError if the parts do not fit together.
    """
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
        module, tokenizer = path
        checkpoint = LoadedCheckpoint(type(module).__name__, module=module, own_tokenizer=tokenizer)
        return HuggingFaceModel(checkpoint, torch.device(where), precision)

    target_model = any_model(target, target_revision, placement)
    drafts: list[LoadedModel] = []

    def loading(key: str, path: str | Path | Loaded | None, revision: str | None) -> Callable[[], LoadedModel]:
        def load_draft() -> LoadedModel:
            if path is None:
                raise UserError(f"policy {node.name} drafts with a small model; give one with pair.{key} ({key}=)")
            model = any_model(path, revision, ON_ONE_DEVICE)
            if compile_drafter is True and model.engine != "kernels":
                raise UserError(
                    f"only the CPU kernels draft in one program, and {path} runs on {model.engine}; "
                    "set runtime.compile_drafter=auto"
                )
            if compile_drafter is False and isinstance(model, NativeModel):
                model = model.step_by_step()
            drafts.append(model)
            return model

        return load_draft

    models = {
        "target": lambda: target_model,
        "draft": loading("draft", draft, draft_revision),
        "second_draft": loading("second_draft", second_draft, second_draft_revision),
    }
    method = build_method(node, models)
    for model in drafts:
        require_same_vocabulary(target_model.checkpoint, model.checkpoint)
    return Decoder(target_model, method, (target_model, *drafts))


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
    if engine not in ENGINES:
        raise UserError(f"runtime.engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    checkpoint = named_checkpoint(path, revision, trust_remote_code)
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
