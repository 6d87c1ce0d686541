"""A checkpoint's texts are cut into tokens as its tokenizer.json says, whatever its architecture."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.normalizers import NFC, NFKC, Lowercase, Replace, Strip, StripAccents
from tokenizers.pre_tokenizers import (
    ByteLevel,
    Metaspace,
    Sequence,
    Split,
    Whitespace,
    WhitespaceSplit,
)
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, NllbTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from bild_lab.engine.models.checkpoint.chat import ChatSettings
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.tokenizer_file import cut_alike, may_be_rebuilt
from bild_lab.errors import warn_once

TEXT = "In 2023 the café had 650841823 guests"
SPECIAL = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
# as Llama 3 cuts, in threes, and as Qwen 2 does, digit by digit
DIGITS = {"threes": r"\p{N}{1,3}", "single": r"\p{N}"}
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def words() -> Tokenizer:
    pieces = [*TEXT.split(), TEXT.split()[1][:2]]
    vocabulary = SPECIAL | {piece: len(SPECIAL) + i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def bytes_with(digits: str, lower: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    rule = Split(Regex(QWEN.replace("DIGITS", DIGITS[digits])), "isolated")
    tokenizer.pre_tokenizer = Sequence([rule, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if lower:
        tokenizer.normalizer = Lowercase()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def stored(tokenizer: Tokenizer, folder: Path, model_type: str, declared: str | None) -> Path:
    """The small files of a checkpoint of this architecture. declared: its tokenizer_class."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if declared is not None:
        settings["tokenizer_class"] = declared
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "model_type", "declared"),
    [
        (bytes_with("threes"), "qwen2", "PreTrainedTokenizerFast"),
        (bytes_with("threes"), "qwen2", "LlamaTokenizerFast"),
        (bytes_with("threes"), "qwen3", None),
        (bytes_with("single", lower=True), "gpt2", "GPT2TokenizerFast"),
        (words(), "qwen2", "PreTrainedTokenizerFast"),
        (words(), "llama", "LlamaTokenizerFast"),
        (words(), "t5", None),  # where Transformers cannot make one
        (words(), "gemma3_text", None),
    ],
)
def test_texts_are_cut_as_the_checkpoints_own_file_says(
    tokenizer: Tokenizer,
    model_type: str,
    declared: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = stored(tokenizer, tmp_path, model_type, declared)
    expected = tokenizer.encode(TEXT, add_special_tokens=False)
    try:  # planted: what Transformers takes it for, where it is told nothing else
        rebuilt = AutoTokenizer.from_pretrained(folder)
    except TypeError:
        rebuilt = None
    assert rebuilt is None or rebuilt.encode(TEXT, add_special_tokens=False) != expected.ids
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint(str(folder))
        assert checkpoint.tokenizer.encode(TEXT, add_special_tokens=False) == expected.ids
        assert checkpoint.tokenizer.eos_token_id == SPECIAL["</s>"]
    told = [line for line in caplog.messages if "as its tokenizer.json says" in line]
    assert len(told) == (0 if rebuilt is None else 1)
    if rebuilt is not None:
        assert f"takes it for a {type(rebuilt).__name__}, which" in told[0]


def test_a_tokenizer_that_is_its_architectures_own_stays_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that pads and cuts its texts says nothing else of them."""
    tokenizer = bytes_with("single")
    tokenizer.normalizer = NFC()
    tokenizer.enable_padding(length=300)
    tokenizer.enable_truncation(4)
    folder = stored(tokenizer, tmp_path, "qwen2", "Qwen2TokenizerFast")
    with caplog.at_level(logging.WARNING):
        found = Checkpoint(str(folder)).tokenizer
    assert type(found).__name__ == "Qwen2Tokenizer"
    assert "tokenizer.json" not in caplog.text


@pytest.mark.parametrize("lower", [False, True], ids=["its own rules", "other rules"])
def test_a_space_before_the_text_is_a_setting_beside_the_file(lower: bool, tmp_path: Path) -> None:
    tokenizer = bytes_with("single", lower)
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    folder = stored(tokenizer, tmp_path, "gpt2", "GPT2TokenizerFast")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_prefix_space": True}))
    found = Checkpoint(str(folder)).tokenizer
    assert (type(found).__name__ == "GPT2Tokenizer") is not lower
    assert found.tokenize("the") == found.tokenize(" the") == ["Ġthe"]


@pytest.mark.parametrize("scheme", ["always", "first"])
@pytest.mark.parametrize("legacy", [True, False])
def test_a_word_after_a_special_token_begins_as_the_file_says(
    scheme: str, legacy: bool, tmp_path: Path
) -> None:
    """Llama 2's chats have a space there; the class of Transformers 5 asks `legacy` for it."""
    tokenizer = words()
    pieces = ["<unk>", *map(chr, range(ord("a"), ord("z") + 1)), "▁"]
    tokenizer.model = BPE({**SPECIAL, **{piece: 4 + i for i, piece in enumerate(pieces[1:])}}, [])
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.add_special_tokens(list(SPECIAL))
    folder = stored(tokenizer, tmp_path, "llama", "LlamaTokenizerFast")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"legacy": legacy}))
    expected = tokenizer.encode("ab</s>cd", add_special_tokens=False).ids
    alike = AutoTokenizer.from_pretrained(folder).encode("ab</s>cd", add_special_tokens=False)
    assert (alike == expected) is ((scheme == "always") is legacy)
    found = Checkpoint(str(folder)).tokenizer
    assert found.encode("ab</s>cd", add_special_tokens=False) == expected


def test_special_tokens_that_the_class_has_by_default_stay(tmp_path: Path) -> None:
    """Planted: a file read by itself has none, and a chat's template wrote none."""
    folder = stored(words(), tmp_path, "llama", "LlamaTokenizerFast")
    template = "{{ bos_token }} {{ messages[0]['content'] }}"
    settings = {"tokenizer_class": "LlamaTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = Checkpoint(str(folder))
    assert type(found.tokenizer) is PreTrainedTokenizerFast
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert found.tokenizer.special_tokens_map == special_tokens
    messages = [{"role": "user", "content": "In 2023"}]
    assert found.chat_tokens(messages, ChatSettings()) == [SPECIAL["<s>"], 4, 5]
    # a class without any of its own: what the file's architecture has is another's
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Checkpoint(str(folder)).tokenizer.bos_token is None


def test_a_special_token_that_the_file_does_not_know_is_not_added(tmp_path: Path) -> None:
    tokenizer = bytes_with("single", lower=True)  # without <|endoftext|>
    folder = stored(tokenizer, tmp_path, "gpt2", "GPT2TokenizerFast")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2TokenizerFast"}')
    found = Checkpoint(str(folder)).tokenizer
    assert found.bos_token is None and len(found) == tokenizer.get_vocab_size()


@pytest.mark.parametrize("joins", [False, True], ids=["around", "joined"])
def test_special_tokens_around_a_text_and_how_tokens_are_joined_are_the_files_too(
    joins: bool, tmp_path: Path
) -> None:
    """Planted: only the cuts were compared."""
    if joins:
        tokenizer, model_type = bytes_with("single"), "qwen2"
        tokenizer.normalizer = NFC()
        tokenizer.decoder = decoders.Sequence([decoders.Replace("e", "a"), decoders.ByteLevel()])
    else:  # T5's class writes an end token whatever the file says
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
        pieces += [(letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
        tokenizer, model_type = Tokenizer(Unigram(pieces, unk_id=2)), "t5"
        tokenizer.pre_tokenizer = Sequence([WhitespaceSplit(), Metaspace()])
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    folder = stored(tokenizer, tmp_path, model_type, None)
    rebuilt, found = AutoTokenizer.from_pretrained(folder), Checkpoint(str(folder)).tokenizer
    ids = tokenizer.encode("the cat").ids
    assert found("the cat")["input_ids"] == ids
    assert found.decode(ids) == tokenizer.decode(ids)
    assert (rebuilt("the cat")["input_ids"], rebuilt.decode(ids)) != (ids, tokenizer.decode(ids))


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def by_bytes(rule: object = None, digits: str = "single") -> PreTrainedTokenizerFast:
    """Cuts a text into bytes, and joins two digits that stand together."""
    pieces = [*LETTERS, "20", "12"]
    tokenizer = Tokenizer(
        BPE({piece: i for i, piece in enumerate(pieces)}, [("2", "0"), ("1", "2")])
    )
    if rule is not None:
        tokenizer.normalizer = rule
    cut = Split(Regex(DIGITS[digits]), "isolated")
    tokenizer.pre_tokenizer = Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    "rule",
    [
        Lowercase(),
        NFC(),
        NFKC(),
        StripAccents(),
        Strip(),
        Replace(Regex(" +"), " "),
        Replace("\n", " "),
        Replace("\t", " "),
        Replace("\u2014", "-"),
    ],
    ids=str,
)
def test_a_rule_that_alone_is_another_is_found(rule: object) -> None:
    assert cut_alike(by_bytes(), by_bytes())
    assert not cut_alike(by_bytes(rule), by_bytes()) and not cut_alike(by_bytes(), by_bytes(rule))
    assert not cut_alike(by_bytes(digits="threes"), by_bytes())


@pytest.mark.parametrize("known", ["bos_token", "eos_token"])
def test_a_word_after_either_special_token_is_looked_at(known: str) -> None:
    def with_spaces(scheme: str) -> PreTrainedTokenizerFast:
        pieces = {
            piece: i for i, piece in enumerate(["<s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"])
        }
        tokenizer = Tokenizer(BPE(pieces, [], unk_token="<unk>"))
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme=scheme, split=False)
        tokenizer.add_special_tokens(["<s>"])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{known: "<s>"})

    always, first = with_spaces("always"), with_spaces("first")
    assert cut_alike(always, always) and not cut_alike(always, first)


def test_classes_of_others_and_those_with_languages_are_taken_as_they_are() -> None:
    class Own(Qwen2Tokenizer):
        """Of a checkpoint's own code."""

    found = [
        Qwen2Tokenizer(),
        Own(),
        by_bytes(),
        NllbTokenizer(vocab={"<unk>": 0, "a": 1}, merges=[]),
    ]
    assert [may_be_rebuilt(one) for one in found] == [True, False, False, False]


@pytest.mark.parametrize("asked", [False, True])
def test_a_setting_beside_the_file_also_takes_the_space_away(asked: bool, tmp_path: Path) -> None:
    tokenizer = bytes_with("single", lower=True)
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=not asked)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder = stored(tokenizer, tmp_path, "gpt2", "GPT2TokenizerFast")
    settings = {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": asked}
    # with special tokens that the class has by default, and without
    for more in ({}, {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | more))
        assert Checkpoint(str(folder)).tokenizer.tokenize("the") == ["Ġthe" if asked else "the"]


def test_default_tokens_are_those_of_the_class_that_is_named(tmp_path: Path) -> None:
    """Fault: a class of files alone got those of its architecture's."""
    tokenizer = bytes_with("threes")
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder = stored(tokenizer, tmp_path, "qwen2", None)
    for name, end in (("PreTrainedTokenizerFast", None), ("Qwen2TokenizerFast", "<|endoftext|>")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        found = Checkpoint(str(folder)).tokenizer
        assert type(found) is PreTrainedTokenizerFast and found.eos_token == end


def test_code_of_a_checkpoints_own_that_fails_is_not_passed_over(tmp_path: Path) -> None:
    """Planted: its tokenizer.json was read in its place, without a word."""
    folder = stored(words(), tmp_path, "t5", None)
    Checkpoint(str(folder)).tokenizer  # noqa: B018
    with pytest.raises(TypeError):
        Checkpoint(str(folder), trust_remote_code=True).tokenizer  # noqa: B018
