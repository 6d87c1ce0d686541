"""A model in memory as a checkpoint."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
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
                f"the loaded model is in {loaded_name}, and {requested_name} was asked for; set"
                f" dtype={loaded_name!r}"
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


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block these modules are in evaluation mode, without dropout; after it each part of
    them is as it was, such as in the middle of a training.
    """
    in_training = [part for module in modules for part in module.modules() if part.training]
    for part in in_training:
        part.training = False
    try:
        yield
    finally:
        for part in in_training:
            part.training = True
