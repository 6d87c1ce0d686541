"""What a stream may show already: of the text so far, the beginning that later tokens cannot change."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from bild_lab.engine.models.checkpoint.pieces import BYTE
from bild_lab.engine.stop import UNFINISHED

# what decoders of WordPiece, and `clean_up_tokenization` of Transformers, write without spaces
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're", " do not")


def without_byte_tokens(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens without those at the end that write single bytes: the next byte may make them
    invalid.
    """
    names = tokenizer.convert_ids_to_tokens(token_ids)
    length = len(names)
    while length and BYTE.fullmatch(names[length - 1] or ""):
        length -= 1
    return token_ids[:length]


def stable_prefix(text: str, stop: Sequence[str] = ()) -> str:
    """The text without what later tokens may still change.

    Later tokens may change a part of a character, a space that some tokenizers remove before
    punctuation, and the beginning of a stop string.
    """
    text = text.rstrip(UNFINISHED)
    open_length = max(beginning_at_end(changing, text) for changing in (*CLEANED, *stop))
    return text[: len(text) - open_length]


def beginning_at_end(string: str, text: str) -> int:
    """How many characters at the end of the text may be the beginning of this string."""
    for length in range(len(string) - 1, 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
