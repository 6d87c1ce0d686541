"""What each token of a vocabulary writes, in bytes, and the tokens that write a text."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from bild_lab.engine.models.checkpoint.chat import lacks_special_tokens

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte that has no piece
METASPACE = "▁"  # how it writes a space
# texts before another one, so that its first word does not look like a text's first
ANCHORS = ("\n", "|", "a", "0")
PROBES = 50  # pieces that are tried to see whether a tokenizer adds a space


class Pieces:
    """The pieces of a tokenizer.

    written: the bytes of each ordinary token, by its id. A piece may hold a part of a character.
    Special tokens and the token for unknown text write nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = {
            token: piece
            for token, piece in tokenizer.added_tokens_decoder.items()
            if not piece.special
        }
        nothing = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        decoded = piece_decoder(tokenizer)
        pieces = tokenizer.get_vocab().items()
        self.written: dict[int, bytes] = {
            token: decoded(piece) for piece, token in pieces if token not in nothing
        }
        self.written |= {token: piece.content.encode() for token, piece in added.items()}
        self.special = {piece: token for piece, token in pieces if token not in self.written}

    @cached_property
    def tokens_of(self) -> dict[bytes, int]:
        """The token that writes these bytes; of several the one that is not a byte by number."""
        named = self._tokenizer.convert_ids_to_tokens(list(self.written))
        byte_by_number = {
            token for token, piece in zip(self.written, named, strict=True) if BYTE.fullmatch(piece)
        }
        order = sorted(self.written, key=lambda token: (token not in byte_by_number, -token))
        return {self.written[token]: token for token in order}  # later ones stay

    @cached_property
    def adds_space(self) -> bool:
        """Whether the first word of a text is written with a space before it, as SentencePiece
        does.
        """
        spaced = [
            (token, text)
            for token, text in self.written.items()
            if text[:1] == b" " and text[1:].isalnum()
        ]
        return any(
            self.encode(text[1:].decode(errors="ignore")) == [token]
            for token, text in spaced[:PROBES]
        )

    @cached_property
    def template(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        plain = self.encode("a")
        with_special = self._tokenizer("a", verbose=False)["input_ids"]
        start = len(with_special)  # where the text begins among the special tokens
        for place in range(len(with_special)):
            if with_special[place : place + len(plain)] == plain:
                start = place
                break
        return with_special[:start], with_special[start + len(plain) :]

    def encode(self, text: str) -> list[int]:
        """The tokenizer's own tokens for a whole text, without special ones."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def text(self, tokens: Iterable[int]) -> bytes:
        """What these tokens write; special ones write nothing."""
        return b"".join(self.written.get(token, b"") for token in tokens)

    def tokens(self, text: bytes, continues: bool) -> list[int]:
        """Tokens that write this text. continues: it continues another text, perhaps within a word
        or a character.

        Parts of characters are written with single bytes if there are such tokens, else left out. A
        text that the tokenizer cannot write as it is, such as one that it normalizes, gets the
        tokens of what it makes of it.
        """
        # these bytes end a character
        body = text.lstrip(bytes(range(0x80, 0xC0))) if continues else text
        decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        characters = decoder.decode(body)
        ends, begins = text[: len(text) - len(body)], decoder.getstate()[0]
        return [
            *self._byte_tokens(ends),
            *self._encoded(characters, continues or bool(ends)),
            *self._byte_tokens(begins),
        ]

    def _byte_tokens(self, text: bytes) -> list[int]:
        """The tokens of single bytes, without the bytes that have none."""
        single_bytes = [bytes([byte]) for byte in text]
        return [self.tokens_of[byte] for byte in single_bytes if byte in self.tokens_of]

    def _encoded(self, text: str, continues: bool) -> list[int]:
        if not text:
            return []
        plain = self.encode(text)
        if not continues or self._is_written(plain, text):
            return plain
        # 1. the tokenizer adds the space itself
        if text[0] == " " and self._is_written(without_space := self.encode(text[1:]), text):
            return without_space
        # 2. the tokens of the text after another one
        for anchor in ANCHORS:
            anchor_tokens = self.encode(anchor)
            both = self.encode(anchor + text)
            tokens = both[len(anchor_tokens) :]
            if both[: len(anchor_tokens)] == anchor_tokens and self._is_written(tokens, text):
                return tokens
        return plain

    def _is_written(self, tokens: list[int], text: str) -> bool:
        return all(token in self.written for token in tokens) and self.text(tokens) == text.encode()


def piece_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """From a piece to the bytes that it writes, as the tokenizer's decoder says."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        steps: list[dict[str, Any]] = [
            {"type": "Metaspace", "replacement": METASPACE},
            {"type": "ByteFallback"},
        ]
    elif backend.decoder is None:
        return lambda piece: f" {piece}".encode()  # pieces are joined by spaces
    else:
        steps = simple_steps(json.loads(backend.decoder.__getstate__()))
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        table = {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}
        return lambda piece: b"".join(table.get(letter, letter.encode()) for letter in piece)
    if "WordPiece" in kinds:
        prefix = kinds["WordPiece"]["prefix"]
        return lambda piece: (
            piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
        ).encode()
    replaced = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replaced.append((step["pattern"]["String"], step["content"]))
        if step["type"] == "BPEDecoder":
            replaced.append((step["suffix"], " "))
    falls_back = "ByteFallback" in kinds

    def written(piece: str) -> bytes:
        if falls_back and (match := BYTE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in replaced:
            piece = piece.replace(old, new)
        return piece.encode()

    return written


def simple_steps(step: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder, those of a sequence one after the other."""
    if step["type"] != "Sequence":
        return [step]
    return [simple for substep in step["decoders"] for simple in simple_steps(substep)]


def piece_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str | None:
    """The piece of this id; None for an id that the tokenizer cannot decode."""
    try:
        piece = tokenizer.convert_ids_to_tokens(token)
    except (IndexError, KeyError, OverflowError):  # of tokenizers in Python
        return None
    return None if piece == tokenizer.unk_token and token != tokenizer.unk_token_id else piece


def begin_of_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What an empty text is continued from: the begin-of-text token, nothing where the tokenizer
    has none.
    """
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **limits: Any
) -> list[list[int]]:
    """Prompts as token ids, with the tokenizer's special tokens unless they are `CompleteText`, an
    empty one as the begin-of-text token alone.

    limits: options of the tokenizer that cut them.
    """
    prompts = []
    for add_special_tokens, group in groupby(texts, key=lacks_special_tokens):
        group_texts = list(group)
        found = tokenizer(
            group_texts, add_special_tokens=add_special_tokens, verbose=False, **limits
        )["input_ids"]
        prompts += [
            once_started(tokenizer, text, ids or begin_of_text(tokenizer))
            for text, ids in zip(group_texts, found, strict=True)
        ]
    return prompts


def once_started(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> list[int]:
    """The tokens without the start token that was added to a text that has it."""
    start = tokenizer.bos_token
    twice = (
        lacks_special_tokens(text)
        and start is not None
        and text.startswith(start)
        and ids[:2] == [tokenizer.bos_token_id] * 2
    )
    return ids[1:] if twice else ids
