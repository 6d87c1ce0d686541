"""A model in memory as a checkpoint."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.device import dtype_name
from bild_lab.errors import UserError


@dataclass(frozen=True, eq=False)
class LoadedCheckpoint(Checkpoint):
    """A model and its tokenizer that are in memory already. path: a name for messages, which others
    may have too.
    """

    module: PreTrainedModel | None = None
    loaded_tokenizer: PreTrainedTokenizerBase | None = None
    weight_files: ClassVar[None] = None
    _file_names: ClassVar[tuple[str, ...]] = ()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @cached_property
    def config(self) -> PreTrainedConfig:
        return self.module.config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.loaded_tokenizer

    @property
    def rows(self) -> int:
        return self._entries(
            self.module.get_decoder() if self.encoder_decoder else self.module, super().rows
        )

    @property
    def source_rows(self) -> int:
        return self._entries(
            self.module.get_encoder() if self.encoder_decoder else self.module, super().source_rows
        )

    @property
    def columns(self) -> int:
        head = self.module.get_output_embeddings()
        return self.rows if head is None else getattr(head, "out_features", self.rows)

    @staticmethod
    def _entries(submodule: PreTrainedModel, otherwise: int) -> int:
        """How many tokens a module embeds, which its configuration may not say."""
        # some decoders of Transformers are no whole models
        if not hasattr(submodule, "get_input_embeddings"):
            return otherwise
        return getattr(submodule.get_input_embeddings(), "num_embeddings", otherwise)

    @cached_property
    def generation(self) -> GenerationConfig:
        return copy.deepcopy(self.module.generation_config) or GenerationConfig.from_model_config(
            self.config
        )

    def weights(self, dtype: torch.dtype, **placement: Any) -> PreTrainedModel:
        if self.module.dtype != dtype:
            loaded_name, requested_name = (
                dtype_name(precision) for precision in (self.module.dtype, dtype)
            )
            raise UserError(
                f"the loaded model is in {loaded_name}, and {requested_name} was asked for, as one"
                f" precision is for all; convert it with .to(torch.{requested_name}), or have all"
                f" models in {loaded_name} and set dtype={loaded_name!r}"
            )
        return self.module

    def weightless(self) -> PreTrainedModel:
        """As that of a checkpoint; by the module's own class where it is none of Transformers."""
        try:
            return super().weightless()
        except UserError:
            if not isinstance(self.module, PreTrainedModel):
                raise
        with torch.device("meta"):
            return type(self.module)._from_config(copy.deepcopy(self.config), dtype=torch.bfloat16)

    def file_stamps(self) -> tuple[()]:
        """It has no files."""
        return ()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the weights."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.module.state_dict().items()):
            stored_bytes = weight.detach().cpu().contiguous().view(torch.uint8)
            digest.update(name.encode() + stored_bytes.numpy().tobytes())
        return digest.hexdigest()[:16]


@dataclass
class _Evaluation:
    """A module that is in evaluation mode for a while. in_training: the parts of it that were in
    training before. blocks: how many run, of as many threads.
    """

    in_training: list[nn.Module]
    blocks: int = 0


_evaluations: dict[nn.Module, _Evaluation] = {}
_evaluations_lock = Lock()


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block these modules are in evaluation mode, without dropout. After it, and after the
    blocks of other threads, each part of them is as it was, such as in the middle of a training.
    """
    with _evaluations_lock:
        for module in modules:
            if module not in _evaluations:
                in_training = [part for part in module.modules() if part.training]
                _evaluations[module] = _Evaluation(in_training)
                _set_training(in_training, False)
            _evaluations[module].blocks += 1
    try:
        yield
    finally:
        with _evaluations_lock:
            for module in modules:
                evaluation = _evaluations[module]
                evaluation.blocks -= 1
                if not evaluation.blocks:
                    _set_training(_evaluations.pop(module).in_training, True)


def _set_training(parts: Iterable[nn.Module], training: bool) -> None:
    """Set these modules alone, not their parts, as `nn.Module.train` would."""
    for part in parts:
        part.training = training
