"""Words that are nearly right: one helper names what was meant, wherever a name is refused."""

from __future__ import annotations

import pytest

from bild_lab.engine.models.checkpoint.precision import resolve_dtype
from bild_lab.engine.models.device import resolve_device
from bild_lab.errors import UserError, did_you_mean, first_line, require_choice, suggestion
from bild_lab.lab.config.compose import compose_policy
from bild_lab.lab.config.schemas import picture_kinds
from bild_lab.lab.metrics.text_metrics import metric_named
from bild_lab.papers.runs.paper_runs import items_of


def test_the_most_similar_word_is_meant_in_whatever_case_and_none_for_others() -> None:
    assert did_you_mean("BIDL", ["vanilla", "bild"]) == "did you mean bild?"
    assert did_you_mean("xyz", ["vanilla", "bild"]) == suggestion("xyz", ["bild"]) == ""
    with pytest.raises(UserError, match=r"got 'smal'; did you mean small\?"):
        require_choice("scale", "smal", ["paper", "small", None])


@pytest.mark.parametrize(
    ("refused", "meant"),
    [
        (lambda: compose_policy("bidl"), "bild"),
        (lambda: compose_policy("bild", {"falback": 0.5}), "fallback"),
        (lambda: metric_named("bleuu"), "bleu"),
        (lambda: resolve_device("gpu"), "cuda"),
        (lambda: resolve_device("cuda0"), "cuda:0"),
        (lambda: resolve_device("CPU"), "cpu"),
        (lambda: resolve_dtype("bf16", None, None), "bfloat16"),
        (lambda: items_of("bild/fg4"), "bild/fig4"),
    ],
)
def test_a_name_that_is_nearly_right_is_refused_with_the_right_one(refused, meant: str) -> None:
    with pytest.raises(UserError, match=rf"did you mean {meant}\?"):
        refused()


def test_the_kinds_of_pictures_are_a_word_words_with_commas_or_a_list() -> None:
    assert picture_kinds("png") == ["png"] and picture_kinds("png,pdf") == picture_kinds(
        ["png", "pdf"]
    )
    for wrong in ("jpg", "", [], 3):
        with pytest.raises(UserError, match="figures are png, pdf, svg"):
            picture_kinds(wrong)


def test_of_a_message_the_first_line_counts_and_without_one_the_kind_of_error() -> None:
    assert first_line(OSError("\n  cannot read a\nin b")) == "cannot read a"
    assert [first_line(error) for error in (EOFError(), ValueError(" \n"))] == [
        "EOFError",
        "ValueError",
    ]
