"""The tokenizer of a GGUF file, as llama.cpp reads it.

Sources: src/llama-vocab.cpp of llama.cpp, `llama_vocab::impl::load`. Transformers' own conversion
of byte-level vocabularies adds its default end token after the file's, writes special tokens with
letters beyond ASCII in the alphabet of bytes, where no text matches them, and knows neither which
rules of splitting words add a start token nor which take whole words first. Its conversion of
SentencePiece vocabularies puts a space before every text.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_SENTENCEPIECE_BUILDERS,
    add_gguf_special_tokens,
    sentencepiece_tokenizer,
)

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # kinds of vocabularies, by llama.cpp's names
# rules of splitting words: a start token begins each text unless the file says otherwise, and a
# word that is a token needs no merges
LLAMA_3_RULES = (
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken"
).split()


def tokenizer_of(location: str) -> PreTrainedTokenizerFast:
    """The tokenizer of the file at this path.

    Raises ValueError, TypeError, KeyError or IndexError for one that is not known.
    """
    architecture, parts, settings = get_gguf_tokenizer(location)
    kind, rule = parts.get("tokenizer_type"), parts.get("pre_tokenizer_type")
    if kind == BYTE_LEVEL:
        # it would be split as GPT-2 does
        if rule not in {*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2"}:
            raise ValueError(f"its rule of splitting words is {rule}, which is not known")
        backend = _byte_level(parts)
        settings.setdefault("add_bos_token", rule in LLAMA_3_RULES)
    elif (
        kind == SENTENCEPIECE
        and architecture not in GGUF_SENTENCEPIECE_BUILDERS
        and parts.get("add_prefix_space") is False
    ):
        backend = _without_space_before(parts)
    else:
        backend, _ = convert_gguf_tokenizer(architecture, parts)
    if rule == "qwen2":
        # Qwen2's own tokenizer has it; the file does not say
        backend.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _byte_level(parts: dict[str, Any]) -> Tokenizer:
    """A vocabulary of bytes, with its special tokens as the file spells them."""
    pieces, rule = parts["tokens"], parts.get("pre_tokenizer_type")
    backend = Tokenizer(
        BPE(
            {piece: token for token, piece in enumerate(pieces)},
            [tuple(merge.split(" ")) for merge in parts["merges"]],
            ignore_merges=rule in LLAMA_3_RULES,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule in GGUF_PRE_TOKENIZER_SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[rule]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    whole = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}  # whether they are special
    backend.add_tokens(
        [
            AddedToken(piece, normalized=False, special=whole[token_type])
            for piece, token_type in zip(pieces, parts.get("token_type", ()), strict=False)
            if token_type in whole
        ]
    )
    return backend


def _without_space_before(parts: dict[str, Any]) -> Tokenizer:
    """A SentencePiece vocabulary whose texts do not begin with a space."""
    tokenizer = sentencepiece_tokenizer(parts, partial(LlamaTokenizer, add_prefix_space=False))
    return add_gguf_special_tokens(tokenizer, parts).backend_tokenizer
