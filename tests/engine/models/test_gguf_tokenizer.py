"""A GGUF file's tokenizer reads and writes text as llama.cpp does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel

from bild_lab.engine.models.checkpoint.gguf_file import GgufCheckpoint

LETTERS = sorted(ByteLevel.alphabet())
MERGES = ["h i", "Ġ hi", "t h", "th e"]
WORDS = ["hi", "Ġhi", "th", "the", "then", "(hi"]  # the last two have no merges
LLAMA_3 = {"start": "<|begin_of_text|>", "end": "<|end_of_text|>", "turn": "<|eot_id|>"}
DEEPSEEK = {
    "start": "<｜begin▁of▁sentence｜>",
    "end": "<｜end▁of▁sentence｜>",
    "turn": "<｜User｜>",
}
SPACES = "  "  # a token of the user's own, which Transformers would take for two letters of bytes


def written(
    path: Path, pieces: list[str], types: list[int], architecture: str = "llama", **settings: Any
) -> GgufCheckpoint:
    """The checkpoint of a file of this vocabulary, without layers. settings: under tokenizer.ggml."""
    writer = GGUFWriter(path, architecture)
    for add in (
        writer.add_context_length,
        writer.add_embedding_length,
        writer.add_feed_forward_length,
    ):
        add(8)
    writer.add_block_count(0)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((len(pieces), 8), np.float32))
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    for key, value in settings.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](f"tokenizer.ggml.{key}", value)
    if settings["model"] == "gpt2":
        writer.add_token_merges(MERGES)
    else:
        writer.add_token_scores([-float(index) for index in range(len(pieces))])
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()
    return GgufCheckpoint(str(path))


def byte_level(path: Path, special: dict[str, str], **settings: Any) -> GgufCheckpoint:
    ordinary = [*LETTERS, *WORDS]
    pieces = [*ordinary, *special.values(), SPACES]
    types = [TokenType.NORMAL] * len(ordinary) + [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED]
    named = {
        "bos_token_id": pieces.index(special["start"]),
        "eos_token_id": pieces.index(special["end"]),
    }
    return written(path, pieces, types, model="gpt2", **named, **settings)


@pytest.mark.parametrize("special", [LLAMA_3, DEEPSEEK])
def test_a_vocabulary_of_bytes_is_the_files_own_with_its_special_tokens_whole(
    special: dict[str, str], tmp_path: Path
) -> None:
    checkpoint = byte_level(tmp_path / "model.gguf", special, pre="llama-bpe")
    pieces = [*LETTERS, *WORDS, *special.values(), SPACES]
    assert checkpoint.vocabulary == {piece: token for token, piece in enumerate(pieces)}
    start, end, turn = (checkpoint.vocabulary[piece] for piece in special.values())
    assert checkpoint.end_tokens == {end, turn} if special is LLAMA_3 else {end}
    hi, spaces = checkpoint.vocabulary["hi"], checkpoint.vocabulary[SPACES]
    assert checkpoint.source(f"hi{special['turn']}hi  hi").prompt == (
        start,
        hi,
        turn,
        hi,
        spaces,
        hi,
    )
    assert checkpoint.continuation([hi, turn, spaces, hi]) == "hi  hi"


@pytest.mark.parametrize(
    ("rule", "settings", "starts"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_a_start_token_is_added_as_the_file_says_or_by_its_rule_of_splitting_words(
    rule: str, settings: dict[str, bool], starts: bool, tmp_path: Path
) -> None:
    checkpoint = byte_level(tmp_path / "model.gguf", LLAMA_3, pre=rule, **settings)
    start = checkpoint.vocabulary[LLAMA_3["start"]]
    assert checkpoint.source("hi").prompt == (
        *((start,) if starts else ()),
        checkpoint.vocabulary["hi"],
    )


@pytest.mark.parametrize(("rule", "expected"), [("llama-bpe", ["then"]), ("qwen2", ["the", "n"])])
def test_a_whole_word_comes_before_merges_where_its_rule_says_so(
    rule: str, expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    checkpoint = byte_level(path, LLAMA_3, pre=rule, add_bos_token=False)
    assert checkpoint.tokenizer.tokenize("then") == expected


def test_words_are_split_by_the_files_rule_alone(tmp_path: Path) -> None:
    """GPT-2's, which other rules have in place of their own, takes a sign from the word after it."""
    for rule, first in (("llama-bpe", ["(hi"]), ("gpt-2", ["(", "hi"])):
        checkpoint = byte_level(tmp_path / f"{rule}.gguf", LLAMA_3, pre=rule, add_bos_token=False)
        assert checkpoint.tokenizer.tokenize("(hi hi") == [*first, "Ġhi"]
        assert checkpoint.tokenizer.tokenize("hi") == ["hi"]  # no space before a text


@pytest.mark.parametrize(("rule", "same"), [("qwen2", True), ("llama-bpe", False)])
def test_letters_with_accents_are_composed_for_qwen2_alone(
    rule: str, same: bool, tmp_path: Path
) -> None:
    tokenizer = byte_level(tmp_path / "model.gguf", LLAMA_3, pre=rule).tokenizer
    assert (tokenizer.tokenize("e\u0301") == tokenizer.tokenize("\xe9")) == same


@pytest.mark.parametrize(("settings", "first"), [({}, "▁"), ({"add_space_prefix": False}, "")])
def test_a_space_before_a_text_of_sentencepiece_is_the_files_choice(
    settings: dict[str, bool], first: str, tmp_path: Path
) -> None:
    pieces = ["<unk>", "<s>", "</s>", "▁", "h", "i", "hi", "▁hi"]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.NORMAL] * 5]
    named = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    checkpoint = written(tmp_path / "model.gguf", pieces, types, model="llama", **named, **settings)
    assert checkpoint.tokenizer.tokenize("hi hi") == [f"{first}hi", "▁hi"]
    assert checkpoint.source("hi").prompt == (1, pieces.index(f"{first}hi"))
    assert checkpoint.tokenizer.tokenize("</s>hi")[0] == "</s>"
    assert checkpoint.continuation([pieces.index("▁hi")] * 2) == " hi hi"


def test_spaces_of_gemma_are_merged_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", SPACES, "▁", "h", "i", "hi", "▁hi"]
    types = [TokenType.CONTROL] * 5 + [TokenType.USER_DEFINED] + [TokenType.NORMAL] * 5
    named = {"bos_token_id": 2, "eos_token_id": 1, "add_space_prefix": False}
    path = tmp_path / "model.gguf"
    tokenizer = written(path, pieces, types, "gemma3", model="llama", **named).tokenizer
    assert tokenizer.tokenize("hi  hi hi") == ["hi", "▁▁", "hi", "▁hi"]
    assert tokenizer.convert_tokens_to_ids("▁▁") == pieces.index(SPACES)
