"""The words are explained once, for the report and for the command line."""

from __future__ import annotations

import sys

import pytest

import run
from bild_lab.lab.cli import run_application
from bild_lab.lab.glossary import TERMS, terms_text


def test_every_term_is_explained_once() -> None:
    words = [word.strip() for term in TERMS for word in term.words.split(",")]
    assert len({term.words for term in TERMS}) == len(TERMS)
    assert all(words)
    assert all(term.meaning.endswith(".") for term in TERMS)


def test_the_text_keeps_to_its_width_and_loses_nothing() -> None:
    text = terms_text(60)
    assert max(map(len, text.splitlines())) <= 60
    assert " ".join(text.split()) == " ".join(f"{term.words}: {term.meaning}" for term in TERMS)


def test_help_explains_the_terms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        run_application(run.main)
    printed = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert terms_text(80) in printed
    assert "policy.fallback=0.3,0.5" in printed  # an example to start from
    assert "bild_early_exit" in printed  # and the choices
