"""Translation models read and write the languages that are asked for, by their tokenizers' own
tables.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import sentencepiece
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bild_lab.engine.models.checkpoint.loaded_checkpoint import LoadedCheckpoint
from bild_lab.errors import UserError
from bild_lab.lab.point.languages import Languages, languages_of
from bild_lab.lab.point.load import load
from tests.policies import shipped
from tests.tiny_architectures import configuration, relative_of, word_tokenizer

PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁b"]
SCORED = [(piece, -float(place)) for place, piece in enumerate(PIECES)]
START, END = 2, 2
NEW = 8


def m2m_100() -> M2M100Tokenizer:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").write_text("a b c d e a b\n" * 30)
        options = {"vocab_size": 12, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(
            input=folder / "text", model_prefix=folder / "pieces", **options
        )
        (folder / "vocab.json").write_text(
            json.dumps({piece: place for place, piece in enumerate(PIECES)})
        )
        return M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "pieces.model"))


TOKENIZERS = {
    "mbart": lambda: MBartTokenizer(vocab=SCORED),
    "mbart50": lambda: MBart50Tokenizer(vocab=SCORED),
    "m2m_100": m2m_100,
    "nllb": lambda: NllbTokenizer(
        vocab={piece: place for place, piece in enumerate(PIECES)}, merges=[]
    ),
}
CODES = {  # two languages and a word that is none
    "mbart": ("de_DE", "ro_RO", "de"),
    "mbart50": ("de_DE", "fr_XX", "de"),
    "m2m_100": ("de", "fr", "de_DE"),
    "nllb": ("deu_Latn", "fra_Latn", "de"),
}


@lru_cache
def translator(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of random weights and its tokenizer."""
    tokenizer = TOKENIZERS[name]()
    config = configuration("m2m_100" if name in ("m2m_100", "nllb") else "mbart")
    known = (*tokenizer.get_vocab().values(), *languages_of(tokenizer).values())
    config.vocab_size = 1 + max(known)  # without padding, which `generate` may emit
    config.pad_token_id, config.eos_token_id, config.forced_eos_token_id = 1, END, None
    config.decoder_start_token_id = START
    torch.manual_seed(1)
    return AutoModelForSeq2SeqLM.from_config(config).eval(), tokenizer


def generated(name: str, source: str, target: str) -> list[int]:
    """What Transformers' pages say to do, behind the token of the language."""
    module, tokenizer = translator(name)
    tokenizer.src_lang = source
    first = tokenizer.convert_tokens_to_ids(f"__{target}__" if name == "m2m_100" else target)
    options = (
        {"decoder_start_token_id": first} if name == "mbart" else {"forced_bos_token_id": first}
    )
    inputs = tokenizer("a b a", return_tensors="pt")
    spoken = 1 if name == "mbart" else 2
    out = module.generate(**inputs, **options, max_new_tokens=NEW + spoken - 1, do_sample=False)[
        0
    ].tolist()
    assert first in out[:2]
    return out[spoken:]


@pytest.mark.fast("mbart-speculative", "m2m_100-hf_generate")
@pytest.mark.parametrize("policy", ["speculative", "hf_generate"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_are_those_of_generate_in_these_languages(name: str, policy: str) -> None:
    module, tokenizer = translator(name)
    source, target, _ = CODES[name]
    pair = (module, tokenizer), (relative_of(module), tokenizer)
    decoder = load(*pair, policy=shipped(policy), source_language=source, target_language=target)
    other = load(*pair, policy=shipped(policy), source_language=target, target_language=source)
    tokenizer.src_lang = target
    found = [each.generate("a b a", NEW).token_ids for each in (decoder, other, decoder)]
    assert tokenizer.src_lang == target, "the tokenizer is left as it was"
    assert found[0] == found[2] != found[1]
    assert found[0] == generated(name, source, target)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_unknown_language_is_refused_with_the_nearest(name: str) -> None:
    module, tokenizer = translator(name)
    known, _, unknown = CODES[name]
    with pytest.raises(
        UserError,
        match=f"pair.target_language must be a language of .*, got '{unknown}'; .*{known}",
    ):
        load((module, tokenizer), policy=shipped("vanilla"), target_language=unknown)
    with pytest.raises(UserError, match="pair.source_language must be a language"):
        load((module, tokenizer), policy=shipped("vanilla"), source_language=unknown)


def test_other_tokenizers_have_no_languages() -> None:
    assert languages_of(word_tokenizer()) == {}
    checkpoint = LoadedCheckpoint("a T5", loaded_tokenizer=word_tokenizer())
    with pytest.raises(
        UserError, match="names a language of mBART, .* got 'de' for a T5 .*; leave it null"
    ):
        Languages(target="de").check(checkpoint)
