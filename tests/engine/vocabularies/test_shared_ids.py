"""A drafter that has, or lacks, a few of the target's tokens drafts without translation."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import bild_lab
from bild_lab.engine.vocabularies import SharedIdModel, TranslatedModel
from bild_lab.errors import warn_once
from tests.tiny import (
    VOCABULARY,
    WORDS,
    padded,
    relative_of,
    save,
    tiny_llama,
    tiny_tokenizer,
)

ENGINES = ("kernels", "native", "hf")
PROMPTS = ["w5 w9 w30", "w20 w21 w20 w21", "w7"]


def checkpoint(
    folder: Path, rows: int, *special: str, draft: bool = False, words: list[str] = WORDS
) -> str:
    """A target, or its drafter, with these rows and further special tokens."""
    model = tiny_llama(1)
    model = relative_of(model, 2, noise=0.2) if draft else model
    save(model if rows == VOCABULARY else padded(model, rows), folder)
    tokenizer = tiny_tokenizer(False, words)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.fast(
    "the target has one more-kernels",
    "the drafter has one more and is padded-native",
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param((40,), (41, "<pad2>"), id="the drafter has one more"),
        # for which the drafter has no row
        pytest.param((41, "<mark>"), (40,), id="the target has one more"),
        pytest.param((41, "<mark>"), (42, "<this>", "<that>"), id="both have others"),
        pytest.param((40,), (44, "<pad2>"), id="the drafter has one more and is padded"),
    ],
)
def test_texts_are_the_targets_and_no_foreign_token_is_drafted(
    tmp_path: Path, ours: tuple[int, str], theirs: tuple[int, str], engine: str
) -> None:
    target, draft = (
        checkpoint(tmp_path / "target", *ours),
        checkpoint(tmp_path / "draft", *theirs, draft=True),
    )
    prompts = [*PROMPTS, "w5 <mark> w9"] if "<mark>" in ours else PROMPTS
    expected = [
        each.token_ids for each in bild_lab.load(target, policy="vanilla").generate(prompts, 16)
    ]
    for policy in ("speculative", "speculative_tree"):
        decoder = bild_lab.load(target, draft, policy, engine=engine)
        assert isinstance(decoder.models[1], SharedIdModel)
        found = decoder.generate(prompts, 16, batch=1 if engine == "hf" else 2)
        assert [each.token_ids for each in found] == expected, policy
    found = bild_lab.load(target, draft, "speculative", engine=engine).generate(
        prompts, 16, temperature=1.0
    )
    assert (
        max(token for each in found for one in each.trace.rounds for token in one.drafted)
        < VOCABULARY
    )


def test_a_draft_is_that_of_the_drafter_without_the_further_token(tmp_path: Path) -> None:
    """The whole chain is still one program of the kernels, and tokens are accepted as before."""
    target, draft = (
        checkpoint(tmp_path / "target", 40),
        checkpoint(tmp_path / "draft", 40, draft=True),
    )
    longer = checkpoint(tmp_path / "longer", 41, "<pad2>", draft=True)
    for policy in ("speculative", "speculative_tree", "bild"):
        rounds = []
        for each in (draft, longer):
            decoder = bild_lab.load(target, each, policy, engine="kernels")
            rounds.append(
                [one.drafted for text in decoder.generate(PROMPTS, 16) for one in text.trace.rounds]
            )
        assert rounds[0] == rounds[1]
    model = bild_lab.load(target, longer, "speculative", engine="kernels").models[1]
    assert model.shared.covers_most_of(41) and len(model.shared) == 40


def test_a_drafter_of_the_same_tokenizer_with_too_few_rows_reads_another_token_instead(
    tmp_path: Path,
) -> None:
    target = checkpoint(tmp_path / "target", 48, "<mark>")
    draft = checkpoint(tmp_path / "draft", 40, "<mark>", draft=True)
    decoder = bild_lab.load(target, draft, "speculative")
    expected = bild_lab.load(target, policy="vanilla").generate("w5 <mark> w9", 16).token_ids
    assert decoder.generate("w5 <mark> w9", 16).token_ids == expected
    assert decoder.models[1].stand_ins == {40: 3}


def test_a_draft_vocabulary_holds_beside_it(tmp_path: Path) -> None:
    target, draft = (
        checkpoint(tmp_path / "target", 40),
        checkpoint(tmp_path / "draft", 41, "<pad2>", draft=True),
    )
    (tmp_path / "tokens.txt").write_text("\n".join(map(str, range(1, 30))))
    for engine in ENGINES:
        decoder = bild_lab.load(
            target,
            draft,
            "speculative",
            engine=engine,
            draft_vocabulary=str(tmp_path / "tokens.txt"),
        )
        drafted = [
            token for one in decoder.generate("w5 w9", 16).trace.rounds for token in one.drafted
        ]
        assert drafted and max(drafted) < 30


def test_other_vocabularies_are_translated_and_the_log_says_what_it_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    target = checkpoint(tmp_path / "target", 40)
    with caplog.at_level(logging.WARNING):
        bild_lab.load(
            target, checkpoint(tmp_path / "more", 41, "<pad2>", draft=True), "speculative"
        )
        assert "vocabulary" not in caplog.text
        draft = checkpoint(tmp_path / "draft", 40, draft=True, words=WORDS[::-1])
        decoder = bild_lab.load(target, draft, "speculative")
    assert isinstance(decoder.models[1], TranslatedModel)
    assert (
        "draft has another vocabulary than the target, which shares 36 of its 36 pieces"
        in caplog.text
    )
