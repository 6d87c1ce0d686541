"""Tests of what the report says about where points came from."""

from dataclasses import replace
from typing import Any

import pytest

from bild_lab.lab.schema.numbers import Quality, Streamed
from bild_lab.lab.schema.result import Result, Setting
from bild_lab.report.provenance import (
    caption,
    certified_without_claim,
    disturbance,
    notes,
    scored_differently,
    sources,
)
from tests.report.sample import ENVIRONMENT, sample_replayed, sample_result


def measured(fallback: float, **environment: object) -> Result:
    return sample_result(
        "bild", {"fallback": fallback}, 1.5, environment={**ENVIRONMENT, **environment}
    )


def test_points_of_one_place_need_no_table_and_no_note():
    results = [measured(0.2), measured(0.4)]
    assert sources(results) == [] and notes(results) == []
    assert sources([]) == [] and notes([]) == []


def test_places_differ_by_what_differs_alone():
    results = [
        measured(0.2),
        measured(0.4, git="def5678"),
        measured(0.6, git="def5678", torch="2.14.0"),
    ]
    assert sources(results) == [
        {"git": "abc1234", "torch": "2.13.0", "points": "1"},
        {"git": "def5678", "torch": "2.13.0", "points": "1"},
        {"git": "def5678", "torch": "2.14.0", "points": "1"},
    ]
    assert notes(results) == ["The points come from 3 sources, which differ in git, torch."]


def test_the_code_of_a_policy_is_compared_with_the_same_policys() -> None:
    bild, speculative = (
        measured(0.2, code="a"),
        replace(measured(0.4, code="b"), policy="speculative"),
    )
    assert sources([bild, speculative]) == []
    assert [one["code"] for one in sources([bild, speculative, measured(0.6, code="c")])] == [
        "a",
        "b",
        "c",
    ]


def test_a_policy_that_names_others_reaches_their_code() -> None:
    """Fault: `policy=hybrid policy.second=token_recycling,speculative` came from two sources."""

    def hybrid(second: str, min_depth: int, code: str) -> Result:
        knobs = {"second": second, "min_depth": min_depth}
        return sample_result("hybrid", knobs, 1.5, environment={**ENVIRONMENT, "code": code})

    results = [hybrid("token_recycling", 2, "a"), hybrid("speculative", 2, "b")]
    assert sources(results) == []
    assert len(sources([*results, hybrid("speculative", 4, "c")])) == 3


def test_a_knob_that_names_no_policy_hides_no_change_of_the_code() -> None:
    """Fault: points of several trees, between which the code was changed, came from one source."""
    results = [
        sample_result("eagle", {"tree": tree}, 1.5, environment={**ENVIRONMENT, "code": code})
        for tree, code in (("chain", "a"), ("full_tree", "b"), ([2, 3], "c"))
    ]
    assert [one["code"] for one in sources(results)] == ["a", "b", "c"]


def test_points_of_one_setting_that_were_scored_in_several_ways_are_told() -> None:
    """As a splitter of sentences that was fetched between two points makes them."""

    def scored(splitter: str, **setting: str) -> Result:
        signature = f"tokenizer:ascii|sentences:{splitter}|bs:1000|seed:0"
        rouge = {"metric": "ROUGE-Lsum", "value": 40.0, "low": 39.0, "high": 41.0}
        return sample_result(
            "bild",
            {"fallback": 0.1},
            1.5,
            quality={**rouge, "signature": signature},
            setting=setting,
        )

    (note,) = notes([scored("punkt_tab"), scored("marks"), scored("marks")])
    assert note.startswith(
        "ROUGE-Lsum was computed in 2 ways (tokenizer:ascii|sentences:punkt_tab;"
    )
    apart = [scored("punkt_tab"), scored("marks", dataset="xsum_de")]
    assert notes(apart) == [] and len(scored_differently(apart)) == 1
    assert notes([scored("marks"), measured(0.2)]) == []  # another metric


def test_shared_devices_and_older_measurements_are_counted():
    results = [measured(0.2, shared_device=True), measured(0.4, shared_device=False), measured(0.6)]
    first, second = notes(results, older=3)
    assert first.startswith("1 of 3 points was timed beside other jobs on the same device")
    assert second == "3 older measurements of these points are kept in the folder, not shown."


def test_points_timed_on_a_busy_machine_are_counted():
    results = [
        measured(0.2, busy_elsewhere_percent=74.4),
        measured(0.4, busy_elsewhere_percent=10),
        measured(0.6),
    ]
    assert notes(results) == [
        "1 of 3 points was timed while other programs used 74 % of the machine: do not rely on"
        " their latencies and speedups; their quality is valid. On an idle machine (or a free core,"
        " runtime.threads=1), with resume=false, they can be timed anew."
    ]
    (note,) = notes(
        [measured(0.2, busy_elsewhere_percent=74.4), measured(0.4, busy_elsewhere_percent=12)]
    )
    assert note.startswith(
        "2 of 2 points were timed while other programs used 12 to 74 % of the machine"
    )


def test_points_on_a_gpu_that_was_slowed_down_are_counted_with_the_causes() -> None:
    results = [
        measured(0.2, gpu_slowed_by="heat"),
        measured(0.4, gpu_slowed_by="power brake, heat"),
        measured(0.6, gpu_slowed_by=None),
    ]
    assert notes(results) == [
        "2 of 3 points were timed on a GPU slowed by heat and power brake: do not rely on"
        " their latencies and speedups; their quality is valid. At its full clock, with"
        " resume=false, they can be timed anew."
    ]
    assert caption(results) == "2 of 3 points timed unreliably"


def test_a_defect_of_a_policy_that_says_it_is_lossless_is_told() -> None:
    def point(policy: str, **counts: Any) -> Result:
        return sample_result(policy, {}, 1.5, certificate={"claimed": True, **counts})

    exact = point("speculative", equal=98, ties=2, defects=0)
    broken = point("own_rule", equal=10, ties=0, defects=14)
    unknown = point("other_rule", equal=0, ties=0, defects=0, unjudged=24)
    assert notes([exact, broken, unknown]) == [
        "own_rule() says that it is lossless, and 14 of its 24 texts differ from the target’s own"
        " by more than rounding: the policy or an engine has a defect.",
        "other_rule() says that it is lossless, and no certificate could judge 24 of its 24 texts:"
        " the distribution that it draws from is not known (uniforms of its drafts,"
        " output_distribution of its rule).",
        "Certified: 98 texts of 1 lossless point are the target’s own, 2 more up to rounding.",
    ]
    drawn = replace(
        exact,
        setting=Setting(
            {**exact.setting, "decoding": {**exact.setting["decoding"], "temperature": 1.0}}
        ),
    )
    assert notes([drawn]) == [
        "Certified: 98 texts of 1 lossless point are distributed as the target’s own, 2 more up to"
        " rounding."
    ]


def test_what_certificates_found_is_told_of_points_that_do_not_say_that_they_are_lossless() -> None:
    def point(policy: str, engine: str, **counts: int) -> Result:
        certificate = {"claimed": False, "equal": 0, "ties": 0, "defects": 0, **counts}
        return sample_result(policy, {}, 1.5, engine=engine, certificate=certificate)

    lossy = [point("bild", "kernels", defects=24), point("bild", "native", equal=1, ties=2)]
    server = point("server", "server", equal=6)
    unknown = point("other_server", "server", unjudged=6)
    assert notes([*lossy, server, unknown, sample_result("bild", {}, 1.5)]) == [
        "bild is lossy by design: 1 of its 27 texts is the target’s own, 2 more up to rounding.",
        "server does not say that it is lossless: 6 of its 6 texts are the target’s own, 0"
        " numerical ties, 0 defects.",
        "other_server does not say that it is lossless, and no certificate could judge 6 of its 6"
        " texts.",
    ]
    came = replace(
        point("server", "server", equal=2, unjudged=4), streamed=Streamed(errors=4, retries=0)
    )
    assert certified_without_claim([came]) == [
        "server does not say that it is lossless: 2 of its 2 texts are the target’s own, 0"
        " numerical ties, 0 defects."
    ]
    # the headline says it
    assert notes([sample_replayed(certificate={**vars(lossy[0].certificate)})]) == []


def test_points_of_one_server_are_told_apart_by_what_differs() -> None:
    certificate = {"claimed": False, "equal": 6, "ties": 0, "defects": 0}
    points = [
        sample_result(
            "server", {"window": window, "top": 3}, 1.5, engine="server", certificate=certificate
        )
        for window in (2, 4)
    ]
    assert [remark.split(" does")[0] for remark in certified_without_claim(points)] == [
        "server (window 2)",
        "server (window 4)",
    ]


@pytest.mark.parametrize(
    ("retries", "said"), [(0, []), (1, ["1 request was sent"]), (3, ["3 requests were sent"])]
)
def test_requests_that_were_sent_again_are_counted(retries: int, said: list[str]) -> None:
    streamed = Streamed(errors=0, retries=retries)
    found = notes([replace(measured(0.2), streamed=streamed), measured(0.4)])
    assert found == [
        f"{words} to the server again after a failure, whose seconds do not count."
        for words in said
    ]


def test_points_that_were_compiling_while_they_were_timed_are_counted() -> None:
    results = [measured(0.2, compiled_texts=12), measured(0.4)]
    assert notes(results) == [
        "1 of 2 points was timed while steps were compiled, each time anew: do not rely on"
        " their latencies and speedups; their quality is valid. In smaller batches, with"
        " resume=false, they can be timed anew."
    ]
    assert disturbance(results[0]) == "compiling in 12 texts"


def test_a_figure_is_captioned_with_how_many_of_its_points_were_disturbed():
    busy, quiet = measured(0.2, busy_elsewhere_percent=74.4), measured(0.4)
    assert caption([busy, quiet]) == "1 of 2 points timed unreliably"
    assert caption([quiet]) == "" == caption([])


def test_points_whose_texts_end_in_loops_are_named():
    plain = sample_result("bild", {"fallback": 0.2}, 1.5, looping=0.05)
    own = replace(plain, looping=0.1)
    targets = replace(plain, baseline_looping=0.25)
    assert notes([plain]) == []
    assert notes([plain, own, targets]) == [
        "In 2 of 3 points 10 to 25 % of the texts, or of the baseline’s, end in a loop, which is"
        " drafted easily: speedups on other texts are lower. Look at the prompts, the template and"
        " decoding.max_new_tokens."
    ]


@pytest.mark.parametrize(
    ("metric", "fields", "said"),
    [
        ("agreement", {"baseline_empty": 1.0}, "every text of the baseline is empty"),
        ("bleu", {"baseline_cut": 1.0}, "every text of the baseline was cut at 32 tokens"),
        ("bleu", {"baseline_cut": 0.9, "baseline_empty": 0.9, "empty": 0.9}, ""),
        ("agreement", {"baseline_cut": 1.0, "empty": 1.0}, "every text of the point is empty"),
        (
            "agreement",
            {"baseline_empty": 1.0, "empty": 1.0},
            "every text of the baseline is empty",
        ),
        ("agreement", {"baseline_cut": 1.0}, ""),
        (
            "pass_at_1",
            {"quality": Quality(metric="pass@1", value=0.0, baseline=0.0)},
            "the baseline’s pass@1 is 0",
        ),
    ],
)
def test_a_baseline_with_nothing_to_score_is_named(
    metric: str, fields: dict[str, Any], said: str
) -> None:
    plain = measured(0.2)
    setting = Setting(
        {
            **plain.setting,
            "metric": metric,
            "decoding": {**plain.setting.decoding, "max_new_tokens": 32},
        }
    )
    result = replace(plain, setting=setting, **fields)
    assert result.doubt == said
    found = notes([result, plain])
    assert found == ([f"In 1 of 2 points {said}: {found[0].partition(': ')[2]}"] if said else [])


def test_points_of_a_drafter_that_has_changed_are_told() -> None:
    def drafted(fallback: float, minute: int, **contents: str) -> Result:
        facts = {"pair": "mine", "contents": contents}
        stored_at = f"2026-11-29T10:0{minute}:00.000+00:00"
        return sample_result("bild", {"fallback": fallback}, 1.5, facts=facts, stored_at=stored_at)

    early, late = {"outputs/small": "a", "outputs/heads": "h"}, {"outputs/small": "b"}
    assert notes([drafted(0.2, 1, **early), drafted(0.4, 2, **early)]) == []
    results = [drafted(0.6, 3, **late), drafted(0.2, 1, **early), drafted(0.4, 2, **early)]
    assert notes(results) == [
        "outputs/small has changed since 2 points were measured with it: do not compare those with"
        " the others. The same command measures with what is there now."
    ]
    assert "since 1 point was measured with it: do not compare that" in notes(results[:2])[0]
    assert notes([*results[:1], sample_result("bild", {"fallback": 0.8}, 1.5)]) == []
