"""Several metrics at once, and the part of a text that counts."""

from __future__ import annotations

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.metrics import Scoring, compare, cut_text, score


def test_a_text_is_cut_before_the_first_of_the_marks() -> None:
    assert cut_text("    return 1\n\ndef g():\nclass", ["\nclass", "\ndef"]) == "    return 1\n"
    assert cut_text("one END two END three", ["END"]) == "one "
    assert cut_text("END of it", ["END"]) == ""
    assert cut_text("nothing", ["\ndef"]) == cut_text("nothing", ()) == "nothing"


def test_every_metric_is_that_of_the_cut_texts_except_agreement() -> None:
    ours, theirs = ["12 Question: 5", "7 Question: 9"], ["12 Question: 6", "8 Question: 9"]
    references = [["12"], ["8"]]
    judged = Scoring(("numeric", "chrf", "agreement"), cut=("Question:",)).judge(ours, theirs, references, seed=3)
    assert list(judged) == ["numeric", "chrf", "agreement"]
    assert judged["numeric"].score.value == 50 and judged["numeric"].difference.value == -50
    cut = ["12 ", "7 "], ["12 ", "8 "]
    assert judged["chrf"].score == score("chrf", cut[0], references, seed=3)
    assert judged["chrf"].difference == compare("chrf", *cut, references, seed=3)
    assert judged["agreement"].score.value == 0  # the texts themselves all differ
    same = Scoring(("agreement",), cut=("Question:",)).judge(ours[:1], ours[:1], references[:1], seed=3)
    assert same["agreement"].score.value == 100


def test_the_first_metric_leads() -> None:
    assert Scoring(("chrf", "bleu")).lead == "chrf"


def test_programs_run_only_where_that_was_allowed() -> None:
    texts, references = ["    return 1"], [["def f():\n{answer}\nassert f() == 1\n"]]
    judged = Scoring(("pass_at_1",), run_code=True).judge(texts, None, references, seed=0)
    assert (judged["pass_at_1"].score.metric, judged["pass_at_1"].score.value) == ("pass@1", 100)
    with pytest.raises(UserError, match="measure.run_code=true"):
        Scoring(("pass_at_1",)).judge(texts, None, references, seed=0)
