"""Where a training starts: a checkpoint, or random weights of a fresh configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.errors import UserError, require_model_path, require_whole
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.toy_pair import named_checkpoint
from bild_lab.training.finetuning.tokenizer import train_tokenizer
from bild_lab.training.fit_checks import require_fitting_tokenizer


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids with a meaning. start: the first token of an encoder–decoder's decoder; None for a decoder."""

    end: tuple[int, ...]
    pad: int
    start: int | None


class StartingPoint(Protocol):
    """What a training starts from. Its constructor reads small files alone, and raises UserError if they do not fit."""

    @property
    def name(self) -> str:
        """Its name in the model card."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the first weights, under the user's own dotted keys."""

    @property
    def config(self) -> PreTrainedConfig:
        """The architecture; the vocabulary may differ if the tokenizer is trained later."""

    @property
    def trains_tokenizer(self) -> bool:
        """Whether `tokenizer` trains one."""

    def tokenizer(self, texts: Callable[[], Iterable[str]]) -> PreTrainedTokenizerBase:
        """The model's tokenizer; if it has none yet, one is trained on the texts."""

    def special_tokens(self, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
        """Token ids that training and decoding need."""

    def model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """The weights, in float32 on the CPU; random weights come from the global generator."""


class FromCheckpoint:
    """Start from a checkpoint's weights and tokenizer."""

    trains_tokenizer = False

    def __init__(self, path: str, revision: str | None = None) -> None:
        require_model_path("model.path", path)
        self._checkpoint = named_checkpoint(path, revision)
        self._checkpoint.check()
        require_fitting_tokenizer(
            self._checkpoint.tokenizer, self._checkpoint.config, self._checkpoint.end_tokens, self.name
        )

    @property
    def name(self) -> str:
        return self._checkpoint.path

    @property
    def identity(self) -> dict[str, Any]:
        return {"model.weights": self._checkpoint.fingerprint}

    @property
    def config(self) -> PreTrainedConfig:
        return self._checkpoint.config

    def tokenizer(self, texts: Callable[[], Iterable[str]]) -> PreTrainedTokenizerBase:
        return self._checkpoint.tokenizer

    def special_tokens(self, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
        checkpoint = self._checkpoint
        pad = next(
            (each for each in (tokenizer.pad_token_id, checkpoint.generation.pad_token_id) if each is not None),
            tokenizer.eos_token_id,  # Llama has no padding token; padding is masked, so any token will do
        )
        start = checkpoint.decoder_start if checkpoint.encoder_decoder else None
        return SpecialTokens(tuple(sorted(checkpoint.end_tokens)), pad, start)

    def model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        return self._checkpoint.weights(torch.float32)


@dataclass(frozen=True, kw_only=True)
class FreshModel:
    """A model with random weights: the fields of `conf/model/*.yaml`.

    config: `model_type` and the arguments of its configuration in Transformers. Vocabulary and special tokens are not
    among them, as the tokenizer decides them. vocabulary: how many pieces a trained tokenizer has. tokenizer: a
    checkpoint whose tokenizer is used instead of training one, as a target and its drafter must share one.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: int = 6000
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        require_whole("model.vocabulary", self.vocabulary, 32)
        known = CONFIG_MAPPING.keys()
        if self.config.get("model_type") not in known:
            raise UserError(
                f"model.config.model_type must be one of Transformers' model types, got "
                f"{self.config.get('model_type')!r}; t5, mt5 and llama decode fastest here"
            )
        fields = {each.name for each in dataclasses.fields(self._config_class)}
        if unknown := sorted(set(self.config) - fields - {"model_type"}):
            raise UserError(f"model.config: {self._config_class.__name__} has no key {unknown[0]!r}")

    @property
    def _config_class(self) -> type[PreTrainedConfig]:
        return CONFIG_MAPPING[self.config["model_type"]]

    def configuration(self, **special: Any) -> PreTrainedConfig:
        """The configuration in Transformers. Raises UserError for values that Transformers refuses."""
        values = {key: value for key, value in self.config.items() if key != "model_type"}
        try:
            return self._config_class(**values, **special)
        except (StrictDataclassError, ValueError, TypeError) as error:
            raise UserError(f"model.config: {' '.join(str(error).split())}") from error


class FromScratch:
    """Start from random weights, with a tokenizer trained on the texts or taken from a checkpoint."""

    def __init__(self, fresh: FreshModel, max_target_tokens: int) -> None:
        self._fresh, self._longest = fresh, max_target_tokens
        self.config = fresh.configuration()
        self._shared = None if fresh.tokenizer is None else Checkpoint(fresh.tokenizer)
        if self._shared is not None:
            self._require_same_kind(self._shared)

    @property
    def name(self) -> str:
        return f"random weights ({self._fresh.name})"

    @property
    def trains_tokenizer(self) -> bool:
        return self._shared is None

    @property
    def identity(self) -> dict[str, Any]:
        shared = None if self._shared is None else content_hash(self._shared.vocabulary)
        config = {f"model.config.{key}": value for key, value in self._fresh.config.items()}
        return {**config, "model.vocabulary": self._fresh.vocabulary, "model.tokenizer": shared}

    def tokenizer(self, texts: Callable[[], Iterable[str]]) -> PreTrainedTokenizerBase:
        if self._shared is not None:
            return self._shared.tokenizer
        return train_tokenizer(texts(), self._fresh.vocabulary, self.config.is_encoder_decoder)

    def special_tokens(self, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
        start = tokenizer.pad_token_id if self.config.is_encoder_decoder else None
        return SpecialTokens((tokenizer.eos_token_id,), tokenizer.pad_token_id, start)

    def model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        if self.config.is_encoder_decoder:
            special["decoder_start_token_id"] = tokenizer.pad_token_id
        else:
            special["bos_token_id"] = tokenizer.bos_token_id
        config = self._fresh.configuration(vocab_size=len(tokenizer), **special)
        require_fitting_tokenizer(tokenizer, config, frozenset([tokenizer.eos_token_id]), self._fresh.name)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        try:
            model = auto.from_config(config, dtype=torch.float32)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"model.config cannot be built: {str(error).strip().splitlines()[0]}") from error
        model.config.architectures = [type(model).__name__]
        model.generation_config.max_new_tokens = self._longest
        return model

    def _require_same_kind(self, shared: Checkpoint) -> None:
        shared.check()
        if shared.encoder_decoder != self.config.is_encoder_decoder:
            raise UserError(
                f"model.tokenizer={shared.path} belongs to {_kind(shared.encoder_decoder)}, but {self._fresh.name} is "
                f"{_kind(self.config.is_encoder_decoder)}: prompts of the two are tokenized differently; "
                "choose a checkpoint of the same kind, or null"
            )


def _kind(encoder_decoder: bool) -> str:
    return "an encoder–decoder" if encoder_decoder else "a decoder"
