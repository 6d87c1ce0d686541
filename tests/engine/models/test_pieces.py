"""What tokens write, and tokens for a text that is cut anywhere."""

from __future__ import annotations

import pytest

from tests.engine.vocabularies.foreign import (
    ALL_KINDS,
    KINDS,
    TEXTS,
    checkpoint,
    tokenizer,
    written,
)

WITH_BYTES = ("byte_level", "byte_fallback")  # they have a token for every byte


def known(kind: str) -> list[str]:
    """The texts without characters that the tokenizer lacks or rewrites."""
    return [text for text in TEXTS if kind in WITH_BYTES or text in written(kind)][:3]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_write_the_text_that_they_were_made_of(kind: str) -> None:
    pieces = checkpoint(kind).pieces
    assert known(kind)
    for text in known(kind):
        written = pieces.text(tokenizer(kind).encode(text))
        assert written.decode() == (" " + text if pieces.adds_space else text)


def test_a_tokenizer_is_asked_whether_it_adds_a_space() -> None:
    assert {kind: checkpoint(kind).pieces.adds_space for kind in ALL_KINDS} == {
        "byte_level": False,
        "byte_fallback": True,
        "metaspace": True,
        "words": True,
        "lowercase": True,
    }


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_a_text_is_continued_wherever_it_is_cut(kind: str) -> None:
    pieces = checkpoint(kind).pieces
    for text in known(kind):
        for cut in range(1, len(text)):
            rest = text[cut:].encode()
            assert pieces.text(pieces.tokens(rest, continues=True)) == rest, (kind, text[:cut])


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_character_may_be_cut_in_the_middle(kind: str) -> None:
    pieces, text = checkpoint(kind).pieces, TEXTS[2].encode()
    for cut in range(1, len(text)):
        first, rest = (
            pieces.tokens(text[:cut], continues=False),
            pieces.tokens(text[cut:], continues=True),
        )
        assert pieces.text([*first, *rest]).removeprefix(b" " * pieces.adds_space) == text, cut


def test_parts_of_characters_are_left_out_where_there_are_no_bytes() -> None:
    pieces = checkpoint("metaspace").pieces
    text = "M\u00e4nner".encode()
    assert pieces.text(pieces.tokens(text[:2], continues=True)) == b"M"
    assert pieces.text(pieces.tokens(text[2:], continues=True)) == b"nner"


def test_a_continuation_has_no_space_that_was_not_there() -> None:
    for kind in ("byte_fallback", "metaspace"):
        pieces = checkpoint(kind).pieces
        assert pieces.text(pieces.encode("an")) == b" an"
        assert pieces.text(pieces.tokens(b"an", continues=True)) == b"an"
        assert pieces.text(pieces.tokens(b" an", continues=True)) == b" an"


def test_what_a_normalizer_rewrites_gets_the_tokens_of_what_it_makes_of_it() -> None:
    metaspace, lower = checkpoint("metaspace").pieces, checkpoint("lowercase").pieces
    assert (
        metaspace.text(metaspace.tokens(" \ufb01nd".encode(), continues=True))
        != " \ufb01nd".encode()
    )
    assert metaspace.tokens(" \ufb01nd".encode(), continues=True) == metaspace.tokens(
        b" find", continues=True
    )
    assert lower.text(lower.tokens(b" A Man", continues=True)) == b" a man"


def test_special_and_unknown_tokens_write_nothing() -> None:
    for kind in ALL_KINDS:
        own, pieces = tokenizer(kind), checkpoint(kind).pieces
        assert own.eos_token_id not in pieces.written
        assert own.unk_token_id not in pieces.written
        assert set(pieces.special.values()) | set(pieces.written) == set(own.get_vocab().values())


def test_the_template_is_what_the_tokenizer_adds() -> None:
    assert checkpoint("byte_fallback").pieces.template == ([1], [])
    assert checkpoint("metaspace").pieces.template == ([], [1])
    assert checkpoint("byte_level").pieces.template == ([], [])


def test_of_two_tokens_for_one_byte_the_piece_is_taken() -> None:
    own, pieces = tokenizer("byte_fallback"), checkpoint("byte_fallback").pieces
    assert own.convert_ids_to_tokens(pieces.tokens_of[b"t"]) == "t"
    assert own.convert_ids_to_tokens(pieces.tokens_of[b"\xc3"]) == "<0xC3>"
