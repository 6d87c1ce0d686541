"""Tokenizers of several kinds, and tiny models whose vocabulary is another."""

from __future__ import annotations

import copy
from functools import lru_cache
from types import SimpleNamespace

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bild_lab.engine.models.checkpoint.pieces import Pieces
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.vocabularies.overlap import VocabularyOverlap
from bild_lab.engine.vocabularies.translated import TranslatedModel
from tests.policies import in_memory
from tests.tiny import WORDS, tiny_tokenizer

TEXTS = [
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "Das Café heißt »Größe 10«, naïve 日本語 und 🙂 inklusive.",
    "unbelievable, unbeliever; believe: the the the theatre.",
]
ENDS = {
    "byte_level": "<|end|>",
    "byte_fallback": "</s>",
    "metaspace": "</s>",
    "lowercase": "[SEP]",
    "words": "</s>",
}


def byte_level() -> Tokenizer:
    """GPT-2's kind: every byte has a piece, a space belongs to the word behind it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: every text begins with a space, and what has no piece is written byte by
    byte.
    """
    known = [f"<0x{byte:02X}>" for byte in range(256)]
    seen = sorted({letter for text in TEXTS for letter in text if letter.isascii()} | {"▁"} - {" "})
    words = ["▁the", "th", "he", "▁th", "▁a", "an", "▁man", "▁t", "▁m", "▁ma"]
    pieces = {piece: 3 + at for at, piece in enumerate([*known, *seen, *words])}
    merges = [
        ("t", "h"),
        ("h", "e"),
        ("▁", "th"),
        ("▁th", "e"),
        ("▁", "a"),
        ("a", "n"),
        ("▁", "t"),
        ("▁", "m"),
    ]
    merges += [("▁m", "a"), ("▁m", "an")]
    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(
        models.BPE({**special, **pieces}, merges, unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made


def metaspace() -> Tokenizer:
    """T5's kind: SentencePiece that rewrites characters (NFKC), without pieces for bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=140, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return made


def lowercase() -> Tokenizer:
    """BERT's kind: what it reads it does not write back."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    special = ["[UNK]", "[SEP]"]
    made.train_from_iterator(
        TEXTS,
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False),
    )
    return made


def words() -> Tokenizer:
    """Whole words, joined by spaces."""
    names = sorted({word for text in TEXTS for word in text.split()})
    made = Tokenizer(
        models.WordLevel(
            {"</s>": 0, "<unk>": 1, **{w: 2 + at for at, w in enumerate(names)}}, "<unk>"
        )
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "words": words,
}
ALL_KINDS = {**KINDS, "lowercase": lowercase}


@lru_cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    unknown = {"lowercase": "[UNK]", "byte_level": None}.get(kind, "<unk>")
    start = {"byte_fallback": "<s>"}.get(kind)
    return PreTrainedTokenizerFast(
        tokenizer_object=ALL_KINDS[kind](), eos_token=ENDS[kind], unk_token=unknown, bos_token=start
    )


@lru_cache
def checkpoint(kind: str, encoder_decoder: bool = False) -> SimpleNamespace:
    """What is read of a checkpoint with this tokenizer."""
    own = tokenizer(kind)
    made = SimpleNamespace(
        path=kind, tokenizer=own, encoder_decoder=encoder_decoder, decoder_start=own.eos_token_id
    )
    made.end_tokens = frozenset([own.eos_token_id])
    made.config = SimpleNamespace(
        get_text_config=lambda decoder: SimpleNamespace(vocab_size=len(own))
    )
    made.pieces = Pieces(own)
    return made


def written(kind: str) -> list[str]:
    """The texts for which a tokenizer has ordinary tokens."""
    pieces = checkpoint(kind).pieces
    return [text for text in TEXTS if all(token in pieces.written for token in pieces.encode(text))]


def overlap(target: str, draft: str, encoder_decoder: bool = False) -> VocabularyOverlap:
    return VocabularyOverlap(
        checkpoint(target, encoder_decoder), checkpoint(draft, encoder_decoder)
    )


def foreign_words(seed: int) -> tuple[list[int], list[str]]:
    """Another order of the tiny models' words, two of which are missing and two of which have other
    names.

    Returns the old id of every new one, and the words in the new order.
    """
    order = torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(seed)).tolist()
    order = [at for at in order if at not in (4, 17)]
    names = [f"v{at}" if at in (10, 28) else WORDS[at] for at in order]
    return [0, 1, 2, *(3 + at for at in order)], names


def foreign_module(module: PreTrainedModel, seed: int) -> tuple[PreTrainedModel, list[str]]:
    """The same model in another vocabulary, and its words."""
    ids, names = foreign_words(seed)
    other = copy.deepcopy(module)
    for table in (other.get_input_embeddings(), other.lm_head):
        table.weight.data = table.weight.data[torch.tensor(ids)].clone()
    other.config.vocab_size = len(ids)
    return other, names


def foreign(
    module: PreTrainedModel, engine: str, seed: int, target: LoadedModel
) -> TranslatedModel:
    """The same model in another vocabulary, in the place of one of the target's.

    In both, w3 is a word like others.
    """
    other, names = foreign_module(module, seed)
    model = in_memory(other, engine)
    encoder_decoder = module.config.is_encoder_decoder
    vars(model.checkpoint).update(tokenizer=tiny_tokenizer(encoder_decoder, names, unknown="<pad>"))
    vars(target.checkpoint).update(tokenizer=tiny_tokenizer(encoder_decoder, unknown="<pad>"))
    return TranslatedModel(model, VocabularyOverlap(target.checkpoint, model.checkpoint))
