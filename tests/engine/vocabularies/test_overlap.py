"""Which tokens two vocabularies share, and prompts in the other one."""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine.request import Source
from bild_lab.engine.vocabularies.overlap import VocabularyOverlap, require_shared
from bild_lab.errors import UserError
from tests.engine.vocabularies.foreign import KINDS, TEXTS, overlap, tokenizer

PAIRS = [(one, other) for one in KINDS for other in KINDS if one != other]


def named(kind: str, piece: str) -> int:
    return tokenizer(kind).convert_tokens_to_ids(piece)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_shared_tokens_write_the_same_and_have_one_partner(target: str, draft: str) -> None:
    both = overlap(target, draft)
    ours, theirs = both.target.pieces.written, both.draft.pieces.written
    for one, other in both.shared.items():
        assert ours.get(one) == theirs.get(other)
    assert len(set(both.shared.values())) == len(both.shared)
    ordinary = {text for text in ours.values() if text in set(theirs.values())}
    assert {ours[one] for one in both.shared if one in ours} == ordinary


def test_a_leading_space_is_one_thing_in_every_kind() -> None:
    both = overlap("byte_level", "metaspace")
    assert both.shared[named("byte_level", "Ġthe")] == named("metaspace", "▁the")
    assert overlap("words", "metaspace").shared[named("words", "the")] == named("metaspace", "▁the")
    assert (
        both.shared[named("byte_level", "t")] == named("metaspace", "t") != named("metaspace", "▁t")
    )


def test_bytes_are_shared_by_what_they_write() -> None:
    shared = overlap("byte_level", "byte_fallback").shared
    assert shared[named("byte_level", "Ã")] == named("byte_fallback", "<0xC3>")
    assert shared[named("byte_level", "a")] == named("byte_fallback", "a")  # and not <0x61>


def test_ends_are_shared_whatever_their_names_and_unknown_tokens_never() -> None:
    shared = overlap("byte_level", "metaspace").shared
    assert shared[named("byte_level", "<|end|>")] == named("metaspace", "</s>")
    both = overlap("metaspace", "byte_fallback")
    assert named("metaspace", "<unk>") not in both.shared
    assert both.shared[named("metaspace", "</s>")] == named("byte_fallback", "</s>")


@pytest.mark.fast(
    "byte_level-byte_fallback", "byte_fallback-words", "metaspace-byte_fallback", "words-byte_level"
)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_every_target_token_becomes_draft_tokens_that_write_it(target: str, draft: str) -> None:
    both = overlap(target, draft)
    whole = 0
    for token, text in both.target.pieces.written.items():
        standing = both.draft_tokens(token)
        assert standing
        whole += both.draft.pieces.text(standing) == text
    assert whole >= (
        len(both.target.pieces.written) if draft in ("byte_level", "byte_fallback") else 1
    )


def test_a_prompt_has_the_special_tokens_of_the_draft_models_tokenizer() -> None:
    text = TEXTS[0]
    both = overlap("byte_fallback", "metaspace")
    source = Source(tuple(tokenizer("byte_fallback")(text)["input_ids"]))
    assert list(both.source(source).prompt) == tokenizer("metaspace").encode(
        text, add_special_tokens=False
    )
    back = overlap("metaspace", "byte_fallback")
    source = Source(tuple(tokenizer("metaspace").encode(text, add_special_tokens=False)))
    assert list(back.source(source).prompt) == tokenizer("byte_fallback")(text)["input_ids"]


def test_a_source_is_read_as_the_draft_models_tokenizer_reads_its_text() -> None:
    text = TEXTS[1]
    both = overlap("metaspace", "byte_level", encoder_decoder=True)
    ids = tokenizer("metaspace")(text)["input_ids"]
    own = both.source(Source((7,), torch.tensor([ids])))
    assert own.encoder_ids.tolist() == [tokenizer("byte_level")(text)["input_ids"]]
    assert own.prompt == (tokenizer("byte_level").eos_token_id,)
    assert both.source(Source((7,), torch.tensor([ids])), most_encoded=3).encoder_ids.shape == (
        1,
        3,
    )


def test_special_tokens_inside_a_prompt_are_kept_where_the_draft_model_has_them() -> None:
    both = overlap("metaspace", "byte_fallback")
    end, ours, theirs = (
        named("metaspace", "</s>"),
        tokenizer("metaspace"),
        tokenizer("byte_fallback"),
    )
    ids = [
        *ours.encode("the man", add_special_tokens=False),
        end,
        *ours.encode("the", add_special_tokens=False),
    ]
    expected = [
        *theirs("the man")["input_ids"],
        named("byte_fallback", "</s>"),
        named("byte_fallback", "▁the"),
    ]
    assert list(both.source(Source(tuple(ids))).prompt) == expected


def test_a_pair_that_shares_hardly_a_piece_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the draft model's folder has lost its tokenizer's vocabulary."""
    both = overlap("words", "byte_level")
    assert require_shared(both) is None
    monkeypatch.setitem(both.target.pieces.__dict__, "tokens_of", {})
    apart = VocabularyOverlap(both.target, both.draft)
    with pytest.raises(
        UserError, match="words .*byte_level .* share 0 pieces; .*choose another draft model"
    ):
        require_shared(apart)


def test_the_most_tokens_of_the_draft_model_that_a_token_takes() -> None:
    both = overlap("byte_fallback", "metaspace")
    counts = {token: len(both.draft_tokens(token)) for token in range(both.width)}
    assert both.most_draft_tokens == max(counts.values()) > 1
