"""Docstrings become lists of parameters and fields in the Python reference."""

from __future__ import annotations

import pytest

pytest.importorskip("griffe", reason="`make docs` installs it")

from docs.hooks.docstrings import as_list


def test_lines_that_explain_parameters_become_a_list() -> None:
    text = (
        "Decode.\n\nprompt: a text, or\nseveral.\ntop_k, top_p: both.\nRaises Error: for"
        " none.\nother: stays"
    )
    assert as_list(text, {"prompt", "top_k", "top_p"}).splitlines() == [
        "Decode.",
        "",
        "- `prompt`: a text, or",
        "several.",
        "- `top_k`, `top_p`: both.",
        "",
        "Raises Error: for none.",
        "other: stays",
    ]


def test_a_list_begins_after_an_empty_line() -> None:
    assert as_list("Says what.\nlimit: rows", {"limit"}) == "Says what.\n\n- `limit`: rows"


def test_sentences_that_explain_fields_become_a_list() -> None:
    known = {"text", "token_ids"}
    text = "One. token_ids: as emitted. text: without the end. Note: more."
    assert (
        as_list(text, known)
        == "One.\n\n- `token_ids`: as emitted.\n- `text`: without the end. Note: more."
    )
