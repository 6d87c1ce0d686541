"""Whether a model, its tokenizer and the examples go together: checked before any weights are read."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from bild_lab.errors import UserError
from bild_lab.lab.data.examples import Example


def require_references(examples: Sequence[Example]) -> None:
    """Raise UserError for an example that has no answer to learn."""
    for example in examples:
        if not example.references:
            raise UserError(
                f"example {example.id} has no reference to learn from; set dataset.reference_column to the answers"
            )


def require_room(lengths: Sequence[int], config: PreTrainedConfig) -> None:
    """Raise UserError if a decoder has fewer positions than the longest example has tokens."""
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = max(lengths)
    if not config.is_encoder_decoder and room is not None and longest > room:
        raise UserError(
            f"the longest example has {longest} tokens, but the model has positions for {room}; "
            "set dataset.max_source_tokens or train.max_target_tokens"
        )


def require_fitting_tokenizer(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, end_tokens: frozenset[int], name: str
) -> None:
    """Raise UserError unless the model has an embedding for every token, and decoding ends at the end token."""
    rows, highest = config.get_text_config().vocab_size, max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise UserError(
            f"the tokenizer of {name} does not match its model: it has token {highest}, the model {rows} embeddings; "
            "take both from one checkpoint"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no end token; set its eos_token, as answers end with it")
    if tokenizer.eos_token_id not in end_tokens:
        raise UserError(
            f"the tokenizer of {name} does not match its model: texts end with token {tokenizer.eos_token_id}, "
            f"decoding with {sorted(end_tokens)}; take both from one checkpoint"
        )
