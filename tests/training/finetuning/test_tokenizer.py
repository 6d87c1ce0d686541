"""Tokenizers that a training makes for itself."""

from __future__ import annotations

from bild_lab.training.finetuning.tokenizer import train_tokenizer
from tests.training.jobs import TURNED, WORDS

TEXTS = [*WORDS, *TURNED.values(), "Hund, Katze und Maus!"]


def test_the_same_texts_give_the_same_vocabulary() -> None:
    first, second = (train_tokenizer(iter(TEXTS), 80, encoder_decoder=True) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert len(first) <= 80


def test_the_texts_of_an_encoder_decoder_end_with_the_end_token() -> None:
    tokenizer = train_tokenizer(TEXTS, 80, encoder_decoder=True)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    ids = tokenizer("Hund, Katze und Maus!")["input_ids"]
    assert ids[-1] == 1 and ids.count(1) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hund, Katze und Maus!"


def test_the_texts_of_a_decoder_start_with_the_start_token_and_have_no_end() -> None:
    tokenizer = train_tokenizer(TEXTS, 80, encoder_decoder=False)
    assert tokenizer.bos_token_id == 3
    ids = tokenizer("Hund, Katze und Maus!")["input_ids"]
    assert ids[0] == 3 and 1 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hund, Katze und Maus!"
