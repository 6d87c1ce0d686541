"""Where a training starts: a checkpoint or random weights, its tokenizer, and whether both fit the
examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.positions import max_session_positions
from bild_lab.errors import UserError, first_line, one_line, require_choice, require_whole
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.point.languages import languages_of
from bild_lab.lab.store.hashing import content_hash

# ids 0, 1, 2 as in T5; decoders have 3 too
PAD, END, UNKNOWN, START = "<pad>", "</s>", "<unk>", "<s>"
PIECES = ("bpe", "wordpiece")
_LONGEST_TEXT = 512  # tokens; the dataset decides whether longer texts are cut


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids with a meaning. start: the first token of an encoder–decoder's decoder; None for a
    decoder.
    """

    end: tuple[int, ...]
    pad: int
    start: int | None


class FromCheckpoint:
    """Start from a checkpoint's weights and tokenizer.

    checkpoint: where both are. Raises UserError if they do not fit; reads no weights.
    """

    trains_tokenizer = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint.check()
        self.checkpoint = checkpoint
        require_fitting_tokenizer(
            checkpoint.tokenizer, checkpoint.config, checkpoint.end_tokens, checkpoint.path
        )
        require_no_languages(checkpoint)
        self.name, self.config = checkpoint.path, checkpoint.config

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the first weights, under the user's own dotted keys."""
        return {"model.weights": self.checkpoint.fingerprint}

    def tokenizer(self, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        """The model's own."""
        return self.checkpoint.tokenizer

    def special_tokens(self, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
        """Token ids that training and decoding need."""
        checkpoint = self.checkpoint
        pad = next(
            (
                token_id
                for token_id in (tokenizer.pad_token_id, checkpoint.generation.pad_token_id)
                if token_id is not None
            ),
            # Llama has no padding token; padding is masked, so any token will do
            tokenizer.eos_token_id,
        )
        start = checkpoint.decoder_start if checkpoint.encoder_decoder else None
        return SpecialTokens(tuple(sorted(checkpoint.end_tokens)), pad, start)

    def outline(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """The model on the meta device, without weights."""
        return self.checkpoint.weightless()

    def model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """The weights, in float32 on the CPU."""
        return self.checkpoint.weights(torch.float32)


@dataclass(frozen=True, kw_only=True)
class FreshModel:
    """A model with random weights: the fields of `conf/model/*.yaml`.

    config: `model_type` and the arguments of its configuration in Transformers. Vocabulary and
    special tokens are not among them, as the tokenizer decides them. vocabulary: how many pieces a
    trained tokenizer has. pieces: bpe, or wordpiece (BERT's, cased). tokenizer: a checkpoint whose
    tokenizer is used instead of training one, as a target and its drafter must share one.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    vocabulary: int = 6000
    pieces: str = "bpe"
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        require_whole("model.vocabulary", self.vocabulary, 32)
        require_choice("model.pieces", self.pieces, PIECES)
        kind = self.config.get("model_type")
        if kind not in CONFIG_MAPPING.keys():  # noqa: SIM118 (a lazy mapping)
            raise UserError(
                f"model.config.model_type must be one of Transformers' model types, got {kind!r}; "
                "t5, mt5 and llama decode fastest here"
            )
        known = {config_field.name for config_field in dataclasses.fields(CONFIG_MAPPING[kind])}
        if unknown := sorted(set(self.config) - known - {"model_type"}):
            raise UserError(
                f"model.config: {CONFIG_MAPPING[kind].__name__} has no key {unknown[0]!r}"
            )

    def configuration(self, **special: Any) -> PreTrainedConfig:
        """The configuration in Transformers.

        Raises UserError for values that Transformers refuses.
        """
        values = {key: value for key, value in self.config.items() if key != "model_type"}
        try:
            return CONFIG_MAPPING[self.config["model_type"]](**values, **special)
        except (StrictDataclassError, ValueError, TypeError) as error:
            raise UserError(f"model.config: {one_line(error)}") from error


class FromScratch:
    """Start from random weights, with a tokenizer trained on the texts or taken from a checkpoint.

    Its methods are those of `FromCheckpoint`. checkpoint: where the tokenizer is; None if it is
    trained. Random weights come from the global generator.
    """

    def __init__(self, fresh: FreshModel, max_target_tokens: int) -> None:
        self._fresh, self._longest = fresh, max_target_tokens
        self.name, self.config = f"random weights ({fresh.name})", fresh.configuration()
        self.checkpoint: Checkpoint | None = None
        if fresh.tokenizer is not None:
            # of which no weights are read
            self.checkpoint = Checkpoint(fresh.tokenizer, allow_pickles=True)
        self.trains_tokenizer = self.checkpoint is None
        if (shared := self.checkpoint) is not None:
            shared.check()
            require_no_languages(shared)
            if shared.encoder_decoder != self.config.is_encoder_decoder:
                kinds = {True: "an encoder–decoder", False: "a decoder"}
                raise UserError(
                    f"model.tokenizer={shared.path} belongs to {kinds[shared.encoder_decoder]}, but"
                    f" {fresh.name} is {kinds[self.config.is_encoder_decoder]}: prompts of the two"
                    " are tokenized differently; choose a checkpoint of the same kind, or null"
                )

    @property
    def identity(self) -> dict[str, Any]:
        shared = None if self.checkpoint is None else content_hash(self.checkpoint.vocabulary)
        config = {f"model.config.{key}": value for key, value in self._fresh.config.items()}
        pieces = {"model.vocabulary": self._fresh.vocabulary, "model.pieces": self._fresh.pieces}
        return {**config, **pieces, "model.tokenizer": shared}

    def tokenizer(self, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        if self.checkpoint is not None:
            return self.checkpoint.tokenizer
        return train_tokenizer(
            texts, self._fresh.vocabulary, self.config.is_encoder_decoder, self._fresh.pieces
        )

    def special_tokens(self, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
        start = tokenizer.pad_token_id if self.config.is_encoder_decoder else None
        return SpecialTokens((tokenizer.eos_token_id,), tokenizer.pad_token_id, start)

    def outline(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        with torch.device("meta"):
            return self.model(tokenizer)

    def model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        if self.config.is_encoder_decoder:
            special["decoder_start_token_id"] = tokenizer.pad_token_id
        else:
            special["bos_token_id"] = tokenizer.bos_token_id
        config = self._fresh.configuration(vocab_size=len(tokenizer), **special)
        require_fitting_tokenizer(
            tokenizer, config, frozenset([tokenizer.eos_token_id]), self._fresh.name
        )
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        try:
            model = auto.from_config(config, dtype=torch.float32)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"model.config cannot be built: {first_line(error)}") from error
        model.config.architectures = [type(model).__name__]
        model.generation_config.max_new_tokens = self._longest
        return model


StartingPoint = FromCheckpoint | FromScratch


def train_tokenizer(
    texts: Iterable[str], pieces: int, encoder_decoder: bool, kind: str = "bpe"
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `pieces` pieces, one vocabulary for prompts and answers.

    kind: bpe for byte pairs, or wordpiece for BERT's word pieces (Devlin et al., 2019), without
    lower-casing. The texts of an encoder–decoder end with </s>, as T5's do; the texts of a decoder
    start with <s>, as Llama's do. The same texts give the same vocabulary.
    """
    specials = [PAD, END, UNKNOWN] if encoder_decoder else [PAD, END, UNKNOWN, START]
    options = {"vocab_size": pieces, "special_tokens": specials, "show_progress": False}
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
        trainer = trainers.WordPieceTrainer(**options)
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        trainer = trainers.BpeTrainer(**options)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
        )
        tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(texts, trainer)
    single, pair = (
        (f"$A {END}", f"$A {END} $B {END}")
        if encoder_decoder
        else (f"{START} $A", f"{START} $A $B")
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(name, specials.index(name)) for name in specials]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        bos_token=None if encoder_decoder else START,
        clean_up_tokenization_spaces=False,
        model_max_length=_LONGEST_TEXT,
    )


def require_no_languages(checkpoint: Checkpoint) -> None:
    """Raise UserError for a translation model that is told its languages: a training would mark
    neither the source's nor the answer's.
    """
    if languages_of(checkpoint.tokenizer):
        raise UserError(
            f"{checkpoint.path} is told the languages that it translates between"
            f" ({type(checkpoint.tokenizer).__name__}), and training of such models, or on their"
            " answers, is not supported; give a checkpoint of another kind, such as T5's"
        )


def require_references(examples: Sequence[Example]) -> None:
    """Raise UserError for an example that has no answer to learn."""
    for example in examples:
        if not example.references:
            raise UserError(
                f"example {example.id} has no reference to learn from; set dataset.reference_column"
                " to the answers"
            )


def require_room(lengths: Sequence[int], outline: PreTrainedModel) -> None:
    """Raise UserError if a decoder has fewer positions than the longest example has tokens, or if
    decoding never reads so many: a rotation that changes with the longest row of a batch would
    change that of all rows.

    outline: the decoder, which may be on the meta device.
    """
    config, longest = outline.config, max(lengths)
    if config.is_encoder_decoder:
        return
    configured = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = (configured, max_session_positions(outline))
    room = min((limit for limit in limits if limit is not None), default=None)
    if room is not None and longest > room:
        raise UserError(
            f"the longest example has {longest} tokens, but the model has positions for {room}; "
            "set dataset.max_source_tokens or train.max_target_tokens"
        )


def require_fitting_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    end_tokens: frozenset[int],
    name: str,
) -> None:
    """Raise UserError unless the model has an embedding for every token, and decoding ends at the
    end token.
    """
    rows, highest = config.get_text_config().vocab_size, max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise UserError(
            f"the tokenizer of {name} does not match its model: it has token {highest}, the model"
            f" {rows} embeddings; take both from one checkpoint"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {name} has no end token; set its eos_token, as answers end with it"
        )
    if tokenizer.eos_token_id not in end_tokens:
        raise UserError(
            f"the tokenizer of {name} does not match its model: texts end with token"
            f" {tokenizer.eos_token_id}, decoding with {sorted(end_tokens)}; take both from one"
            " checkpoint"
        )
