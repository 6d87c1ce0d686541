"""Tests of the trace viewer: who wrote which token, and what a browser makes of it."""

import pytest

from bild_lab.lab.results.groups import by_setting
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.examples import read_examples
from bild_lab.report.page.html import write_html
from bild_lab.report.page.tables import name_of
from bild_lab.report.page.trace_viewer import viewer_data
from tests.report.sample import sample_drafted, sample_example

KNOBS = {"fallback": 0.5, "rollback": 1.0, "window": 10}
WORDS = {1: "</s>", 10: " a", 11: " red", 12: " car", 13: " bus", 14: "<script>alert(1)</script>"}


def a_round(drafted, accepted, next_token, **more):
    return {"drafted": drafted, "accepted": accepted, "next_token": next_token, "fallback": False, **more}


def an_example(rounds, token_ids, **changes):
    spans = [["prefill", 0, 0.001], ["draft", 0.001, 0.002], ["verify", 0.002, 0.004]]
    pieces = {str(token): piece for token, piece in WORDS.items()}
    traced = {"prompt": "ein rotes Auto", "pieces": pieces, "spans": spans}
    return sample_example(**{"example": "test-0", "token_ids": token_ids, "rounds": rounds, **traced, **changes})


def stored(folder, *examples):
    """A finished point with these examples."""
    result = sample_drafted("bild", KNOBS, 1.5, 0.0, (0.8, 1.0))
    Sweep(folder).write_point(result.point, "", result, examples)
    return Sweep(folder).newest(result.point)


def shown_of(*results):
    """What the viewer shows of these results."""
    (group,) = by_setting(results)
    return viewer_data(group, {name_of(one): read_examples(one.folder) for one in results})


@pytest.fixture
def shown(tmp_path):
    def rounds_of(rounds, token_ids):
        (point,) = shown_of(stored(tmp_path, an_example(rounds, token_ids)))
        return point["examples"][0]["rounds"]

    return rounds_of


def test_a_rejected_draft_is_dropped_and_the_target_replaces_it(shown):
    (first, second) = shown([a_round([10, 13, 12], 1, 11), a_round([12], 1, 1)], [10, 11, 12, 1])
    assert (first["kept"], first["dropped"], first["own"]) == ([10], [13, 12], 11)
    assert (second["kept"], second["dropped"], second["own"]) == ([12], [], 1)


def test_a_text_that_an_accepted_token_ends_has_no_token_of_the_targets_behind_it(shown):
    (only,) = shown([a_round([10, 1], 2, 13)], [10, 1])
    assert (only["kept"], only["own"]) == ([10, 1], None)


def test_a_tail_that_nobody_verified_stands_as_drafted(shown):
    (only,) = shown([a_round([10, 1], 2, None)], [10, 1])
    assert (only["kept"], only["own"]) == ([10, 1], None)


def test_a_tree_of_drafts_is_shown_whole(shown):
    (first, _) = shown([a_round([13, 10, 11], 2, 12), a_round([], 0, 1)], [10, 11, 12, 1])
    assert (first["kept"], first["tree"], first["dropped"]) == ([10, 11], [13, 10, 11], [])


def test_points_without_traced_texts_are_not_shown(tmp_path):
    assert shown_of(stored(tmp_path, sample_example(rounds=[a_round([10], 1, 11)]))) == []
    assert shown_of(sample_drafted("bild", KNOBS, 1.5, 0.0, (0.8, 1.0))) == []  # which lies in no folder


def rendered(dom_of, folder, script):
    """The page's DOM after a browser without a network ran it, and then this script."""
    rounds = [
        a_round([10, 13], 1, 11, confidence=[0.9, 0.7], distance=[0.1, 2.5]),
        a_round([14], 1, 12, confidence=[0.8, 0.3], fallback=True),
    ]
    examples = [an_example(rounds, [10, 11, 14, 12], example=name) for name in ("test-0", "test-1")]
    write_html("first", [stored(folder, *examples)], [], folder / "report.html")
    return dom_of(folder / "report.html", script).split('<div class="viewer"')[1].split("</section>")[0]


PRESS = "const press = (key) => document.querySelector('.viewer').dispatchEvent(new KeyboardEvent('keydown', {key}));"


@pytest.mark.slow
def test_a_browser_shows_the_whole_text_first(dom_of, tmp_path):
    page = rendered(dom_of, tmp_path, "")
    assert "round 2 of 2" in page
    assert '<span class="accepted"> a</span><span class="replacement"> red</span>' in page
    assert '<span class="accepted now">&lt;script&gt;alert(1)&lt;/script&gt;</span>' in page
    assert '<span class="fallback now"> car</span>' in page


@pytest.mark.slow
def test_keys_step_through_rounds_and_examples(dom_of, tmp_path):
    page = rendered(dom_of, tmp_path, PRESS + "press('ArrowDown'); press('End'); press('ArrowLeft');")
    assert "round 1 of 2" in page
    assert '<span class="dropped now"> bus</span><span class="replacement now"> red</span>' in page
    assert "distance, nats (rollback above 1)" in page
    assert page.count("<rect") == 3
    assert "test-1</option>" in page
