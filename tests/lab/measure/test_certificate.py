"""The certificate of greedy texts: the target's own scores tell ties and defects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.methods.bild import Rollback
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import ALL_LOGITS, Rows, as_rows
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure import score
from bild_lab.lab.measure.certificate import (
    DEFECT,
    EQUAL,
    SESSION_DEFECT,
    TIE,
    Certificate,
    count_verdicts,
    most_noise,
)
from bild_lab.lab.measure.greedy_certificate import (
    certify,
    certify_replayed,
    engine_difference,
    resolution,
    verification,
)
from bild_lab.lab.measure.recorder import RecordedRound
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.schema.numbers import CertificateCounts
from tests.stubs import StubModel

REQUEST = Request(Source((0,)), Limits(1, 8))


def of_length(count: int) -> Request:
    """A request for so many tokens."""
    return Request(REQUEST.source, Limits(1, count))


def scoring(values: dict[int, float], dtype: torch.dtype = torch.float32) -> StubModel:
    """The same logits after every text. dtype: the model's precision."""
    logits = torch.zeros(6, dtype=torch.float64)
    for token, value in values.items():
        logits[token] = value
    return StubModel(lambda _: logits, dtype=dtype)


def test_equal_texts_are_equal() -> None:
    assert certify(scoring({}), REQUEST, [1, 2], [1, 2]) == Certificate(EQUAL)


def test_a_tie_in_the_targets_scores_is_a_numerical_tie() -> None:
    found = certify(scoring({3: 5.0, 4: 5.0}), of_length(3), [3, 4, 3], [3, 3, 3])
    assert (found.verdict, found.position, found.token, found.target_token) == (TIE, 1, 4, 3)
    assert (found.gap, found.margin) == (0.0, 0.0)


def test_what_follows_a_tie_is_judged_too() -> None:
    """The target writes token 3 for ever, and finds token 4 as likely."""
    model = scoring({3: 5.0, 4: 5.0})
    assert certify(model, of_length(4), [4, 4, 3, 4], [3, 3, 3, 3]).position == 0
    later = certify(model, of_length(4), [4, 3, 3, 1], [3, 3, 3, 3])
    assert (later.verdict, later.position, later.token, later.target_token) == (DEFECT, 3, 1, 3)
    assert certify(model, of_length(4), [4, 3], [3, 3, 3, 3]) == Certificate(DEFECT, 2)


def test_a_token_that_the_target_thinks_less_of_is_a_defect() -> None:
    found = certify(scoring({3: 5.0, 4: 4.9}), REQUEST, [4], [3])
    assert found.verdict == DEFECT
    assert found.gap == pytest.approx(0.1)
    assert found.margin == pytest.approx(0.1)


def test_two_tokens_tied_below_the_best_are_a_defect() -> None:
    assert certify(scoring({2: 9.0, 3: 5.0, 4: 5.0}), REQUEST, [3], [4]).verdict == DEFECT


def test_what_counts_as_a_tie_is_what_the_targets_own_scores_vary_by() -> None:
    """In a forward of two rows, the prompt and the token before, token 4 gets more."""
    texts = (of_length(2), [3, 4], [3, 3])
    assert certify(by_width({}), *texts).verdict == DEFECT
    assert certify(by_width({2: 0.006}, torch.bfloat16), *texts).verdict == TIE
    found = certify(by_width({2: 0.006}), *texts)  # no rounding in float32 comes to so much
    assert found.verdict == SESSION_DEFECT == "defect of the model's session"
    assert count_verdicts([found], claimed=True).defects == 1
    near = by_width({2: 0.006})
    tied = torch.tensor([0, 0, 0, 5.0, 5.0, 0], dtype=torch.float64)  # the first token is a tie
    later = replace(near, next_logits=lambda text: near.next_logits(text) if text[1:] else tied)
    found = certify(later, of_length(2), [4, 4], [3, 3])
    assert (found.verdict, found.position) == (SESSION_DEFECT, 1)


def test_the_rows_of_a_round_are_the_last_token_the_draft_and_its_probes() -> None:
    for probes, rows in ((None, 3), (torch.tensor([-1, 0, 0, 1]), 7)):
        draft = Draft(torch.tensor([4, 5]), probes=probes)
        verified = RecordedRound((0,), ExactMatch(), draft, torch.zeros(3, 9), Verdict((), 1))
        assert verified.rows == rows


def test_a_constant_added_to_all_scores_is_no_difference_of_engines() -> None:
    alone = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert float(engine_difference(alone + 5, alone)) == 0
    moved = torch.tensor([0.4, 0.0, 0.0, 0.0])
    assert float(engine_difference(alone + moved, alone)) == pytest.approx(0.3)


def test_scores_of_two_tokens_vary_by_their_rounding_at_least() -> None:
    eps = torch.finfo(torch.float32).eps
    assert certify(scoring({3: 8.0, 4: 7.0, 5: 64.0}), of_length(1), [4], [3]).noise == 8 * eps
    tied, different = (
        certify(scoring({3: 8.0, 4: 8.0 - gap}), of_length(1), [4], [3])
        for gap in (32 * eps, 33 * eps)
    )
    assert (tied.verdict, different.verdict) == (TIE, DEFECT)  # four times the noise, and more


def test_scores_that_are_finer_than_the_models_precision_are_rounded_as_float32() -> None:
    """The sums of a model in bfloat16 may stay in float32: then a small gap is no tie."""
    coarse, fine = torch.tensor([8.0, 7.9375]), torch.tensor([8.0, 7.99])
    assert resolution(coarse, torch.bfloat16) == torch.finfo(torch.bfloat16).eps
    assert resolution(fine, torch.bfloat16) == torch.finfo(torch.float32).eps
    tied, different = (
        certify(scoring({3: 8.0, 4: below}, torch.bfloat16), of_length(1), [4], [3])
        for below in (7.9375, 7.99)
    )
    assert (tied.verdict, different.verdict) == (TIE, DEFECT)


def test_a_session_may_vary_by_the_rounding_of_two_sums_in_each_layer() -> None:
    def noise(dtype: torch.dtype, depth: int, engine: str = "native") -> float:
        return most_noise(StubModel(by_text, dtype=dtype, depth=depth, engine=engine))

    assert noise(torch.bfloat16, 8) == pytest.approx(4 * 2**-7 * 4)
    assert noise(torch.bfloat16, 2) == pytest.approx(4 * 2**-7 * 2)
    assert noise(torch.float32, 8) == 3e-4
    assert noise(torch.bfloat16, 8, "kernels") == 3e-4  # which sum every row alike


def test_rows_of_our_kernels_do_not_vary_with_their_number() -> None:
    found = [
        certify(replace(by_width({2: 0.006}, torch.bfloat16), engine=engine), *texts)
        for texts in [(of_length(2), [3, 4], [3, 3])]
        for engine in ("native", "kernels")
    ]
    assert [one.verdict for one in found] == [TIE, SESSION_DEFECT]


def test_a_text_that_goes_on_where_the_target_ends_is_a_defect() -> None:
    assert certify(scoring({}), REQUEST, [1, 2, 3], [1, 2]) == Certificate(DEFECT, 2, 3, None)
    assert certify(scoring({}), REQUEST, [1], [1, 2]) == Certificate(DEFECT, 1, None, 2)


def test_a_forbidden_token_is_a_defect_and_forbidden_ones_are_no_scores() -> None:
    forbidden = -float("inf")
    assert certify(scoring({3: 5.0, 4: forbidden}), REQUEST, [4], [3]) == Certificate(
        DEFECT, 0, 4, 3
    )
    tied = certify(scoring({2: forbidden, 3: 5.0, 4: 5.0}), of_length(1), [4], [3])
    assert (tied.verdict, tied.gap) == (TIE, 0.0)
    assert certify(scoring({2: forbidden, 3: 5.0, 4: 4.9}), REQUEST, [4], [3]).verdict == DEFECT


def test_verdicts_are_counted() -> None:
    each = [Certificate(EQUAL), Certificate(EQUAL), Certificate(TIE), Certificate(DEFECT)]
    assert count_verdicts(each, claimed=False) == CertificateCounts(
        equal=2, ties=1, defects=1, claimed=False
    )


def by_width(off: dict[int, float], dtype: torch.dtype = torch.float32) -> StubModel:
    """Token 3 is more likely than token 4 by 0.01 nats; a forward of so many rows adds this to
    token 4.
    """

    class ByWidth(StubModel):
        def start(self, source: Source, room: int, *_: object):  # type: ignore[no-untyped-def]
            session = super().start(source, room)
            extend = session.extend

            def moved(rows, output_spec=ALL_LOGITS):  # type: ignore[no-untyped-def]
                scores = extend(rows, output_spec)
                scores.logits[:, 4] += off.get(len(as_rows(rows).tokens), 0.0)
                return scores

            session.extend = moved  # type: ignore[method-assign]
            return session

    return ByWidth(
        lambda _: torch.tensor([0, 0, 0, 5.0, 4.99, 0], dtype=torch.float64), dtype=dtype
    )


class Fours(Drafter):
    """Drafts two tokens 4."""

    drafts_trees = False

    def propose(self, tokens: list[int]) -> Draft:
        return Draft(torch.tensor([4, 4]))


def test_a_text_is_scored_again_with_as_many_rows_as_verified_it() -> None:
    """Three rows run: the last committed token and two drafted ones."""
    target = by_width({3: 0.012}, torch.bfloat16)
    method = DraftThenVerify(target, Fours(), ExactMatch())
    request = Request(REQUEST.source, Limits(1, 2))
    found = certify(target, request, [4, 4], [3, 3], method)
    assert (found.verdict, found.position, found.rows) == (TIE, 0, 3)
    assert found.gap == pytest.approx(0.01)
    assert found.wide_gap == pytest.approx(-0.002)
    # a method without rounds: the prefix in one forward
    alone = certify(target, request, [4, 4], [3, 3])
    assert (alone.rows, alone.wide_gap) == (1, pytest.approx(0.01))


def test_a_text_that_its_verification_does_not_explain_is_a_defect() -> None:
    target = by_width({})
    method = DraftThenVerify(target, Fours(), Rollback(5.0))
    found = certify(target, Request(REQUEST.source, Limits(1, 2)), [4, 4], [3, 3], method)
    assert (found.verdict, found.rows) == (DEFECT, 3)
    assert found.wide_gap == pytest.approx(found.gap) == pytest.approx(0.01)


def test_a_token_that_the_rule_read_to_be_less_likely_is_a_defect_however_small_the_gap() -> None:
    """A rule that takes what is within so many nats, over scores whose rounding spans the gap."""
    near = scoring({3: 8.0, 4: 7.9375}, torch.bfloat16)
    method = DraftThenVerify(near, Fours(), Rollback(5.0))
    assert certify(near, of_length(1), [4], [3]).verdict == TIE
    found = certify(near, of_length(1), [4], [3], method)
    assert (found.verdict, found.rows) == (DEFECT, 3)
    even = scoring({3: 8.0, 4: 8.0}, torch.bfloat16)
    method = DraftThenVerify(even, Fours(), Rollback(5.0))
    assert certify(even, of_length(1), [4], [3], method).verdict == TIE
    # decoded again, the rule emits another token: what it read then says nothing
    exact = DraftThenVerify(near, Fours(), ExactMatch())
    assert certify(near, of_length(1), [4], [3], exact).verdict == TIE


def test_logits_that_only_the_rule_saw_count_as_noise() -> None:
    """Scored anew all is well: the fault was in what the session held."""
    target = by_width({})
    method = DraftThenVerify(by_width({3: 4.0}), Fours(), ExactMatch())
    found = certify(target, Request(REQUEST.source, Limits(1, 2)), [4, 4], [3, 3], method)
    assert found.verdict == SESSION_DEFECT
    assert found.wide_gap == pytest.approx(0.01)


def test_trees_are_scored_again_as_trees() -> None:
    class Siblings(Fours):
        drafts_trees = True

        def propose(self, tokens: list[int]) -> Draft:
            return Draft(torch.tensor([5, 4, 4]), torch.tensor([-1, -1, 1]))

    target = by_width({4: 0.012}, torch.bfloat16)
    method = DraftThenVerify(target, Siblings(), ExactMatch())
    found = certify(target, Request(REQUEST.source, Limits(1, 3)), [4, 4, 4], [4, 3, 3], method)
    assert (found.verdict, found.position, found.rows) == (TIE, 1, 4)
    assert found.wide_gap == pytest.approx(-0.002)


def by_text(text: list[int]) -> Tensor:
    """Other logits after every text."""
    seed = sum((token + 1) * 7**place for place, token in enumerate(text))
    return torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Noting(StubModel):
    """Notes the room of its sessions and the rows that they run."""

    def start(self, source: Source, room: int, *_: object):  # type: ignore[no-untyped-def]
        session = super().start(source, room)
        extend = session.extend

        def noted(rows, output_spec=ALL_LOGITS):  # type: ignore[no-untyped-def]
            self.rows.append(as_rows(rows))
            return extend(rows, output_spec)

        session.extend = noted  # type: ignore[method-assign]
        self.rooms.append(room)
        return session


def noting() -> Noting:
    model = Noting(by_text)
    model.rooms, model.rows = [], []
    return model


class Guesses(Fours):
    """Every token as a child of the text, and after each of them every token."""

    drafts_trees = True

    def propose(self, tokens: list[int]) -> Draft:
        parents = [ROOT] * 6 + [node for node in range(6) for _ in range(6)]
        return Draft(torch.arange(6).repeat(7), torch.tensor(parents))


def shape(rows: Rows) -> tuple[list[int], list[int] | None]:
    return list(map(int, rows.tokens)), None if rows.tree is None else rows.tree.parents.tolist()


@pytest.mark.parametrize(("drafter", "width"), [(Fours(), 3), (Guesses(), 43)])
def test_each_context_is_scored_again_after_the_same_tokens_in_the_same_rows(
    drafter: Drafter, width: int
) -> None:
    request, prompt = Request(Source((2, 0)), Limits(2, 8)), [2, 0]
    target = noting()
    method = DraftThenVerify(target, drafter, ExactMatch())
    text = method.decode(request, Trace())[2:]
    verified = [shape(rows) for rows in target.rows]
    for length in range(len(text)):
        context = [*prompt, *text[:length]]
        scored = verification(target, request, context, method)
        assert (scored.rows, scored.emitted) == (width, text[length])
        assert len(scored.together) == 2  # anew, and what the rule read
        assert all(
            torch.equal(logits, by_text(context)) for logits in (scored.alone, *scored.together)
        )
        assert shape(target.rows[-1]) in verified
    assert set(target.rooms) == {8}


def test_the_text_of_a_method_that_drafts_nothing_is_scored_in_one_forward() -> None:
    target = noting()
    for method in (None, target_alone(target)):
        scored = verification(target, REQUEST, [0, 3, 4, 5], method)
        assert (scored.rows, scored.emitted, len(scored.together)) == (4, None, 1)
        assert torch.equal(scored.together[0], by_text([0, 3, 4, 5]))
        assert shape(target.rows[-1]) == ([0, 3, 4, 5], None)
    assert set(target.rooms) == {8}


@dataclass
class Scored(StubModel):
    """On our engine, with the modules of Transformers beside it."""

    bits: int | None = None
    transformers: StubModel | None = None


LONG = Request(Source((10,)), Limits(1, 6))


def steps(text: list[int]) -> Tensor:
    """After token n comes n + 1; from 12 on n + 2 is tied with it, and after 20 the text ends with
    token 0.
    """
    logits = torch.zeros(40, dtype=torch.float64)
    logits[0 if text[-1] > 20 else text[-1] + 1] = 8.0
    if 12 <= text[-1] <= 20:
        logits[text[-1] + 2] = 8.0
    return logits


def replayed(tokens: list[int], request: Request = LONG) -> Certificate:
    start = request.source.prompt[0]
    own = [*range(start + 1, start + 7)]
    return certify_replayed(Scored(steps, engine="hf"), request, tokens, own)


def test_a_replayed_text_is_judged_on_after_a_tie() -> None:
    tied = replayed([11, 12, 14, 15, 17, 18])
    assert (tied.verdict, tied.position, tied.token, tied.target_token, tied.gap) == (
        TIE,
        2,
        14,
        13,
        0.0,
    )
    swapped = replayed([11, 12, 14, 15, 18, 19])
    assert (swapped.verdict, swapped.position, swapped.token, swapped.gap) == (DEFECT, 4, 18, 8.0)
    assert replayed([11, 12, 13, 14, 15, 16]) == Certificate(EQUAL)
    assert replayed([11, 13, 14, 15, 16, 17]).verdict == DEFECT  # before anything is tied


def test_a_replayed_text_that_stops_early_after_a_tie_is_a_defect() -> None:
    ended = Request(LONG.source, Limits(1, 6, frozenset([0])))
    assert replayed([11, 12, 14, 15, 0], ended).position == 4  # its end token is no tie
    assert replayed([11, 12, 14, 15]) == Certificate(DEFECT, 4)
    late = Request(Source((18,)), Limits(1, 6, frozenset([0])))
    assert (
        certify_replayed(Scored(steps, engine="hf"), late, [20, 22, 0], [19, 20, 21, 0]).verdict
        == TIE
    )


def test_what_two_engines_differ_by_is_noise_of_a_replayed_text() -> None:
    """Tokens 3 and 4 are 0.001 nats from each other; another engine's scores are off by as much, by
    more than rounding explains, or not at all.
    """

    def near(off: float) -> StubModel:
        return StubModel(
            lambda _: torch.tensor([0, 0, 0, 8.0, 7.999 + off, 7.0 - off], dtype=torch.float64)
        )

    request = Request(Source((0,)), Limits(1, 1))
    models = [
        Scored(near(0.0).next_logits, engine="kernels", transformers=near(off))
        for off in (0.0, 0.001, 4.0)
    ]
    verdicts = [certify_replayed(model, request, [4], [3]).verdict for model in models]
    assert verdicts == [DEFECT, TIE, SESSION_DEFECT]


def test_a_text_of_another_engine_than_the_targets_has_the_noise_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of `generate` beside our kernels, whose rows have no noise of their own."""
    judged: list[str] = []
    equal = Certificate(EQUAL)
    monkeypatch.setattr(score, "certify", lambda *_: judged.append("own") or equal)
    monkeypatch.setattr(score, "certify_replayed", lambda *_: judged.append("other") or equal)
    target = StubModel(by_text, engine="kernels")
    for engine in ("kernels", "hf"):
        decoder = SimpleNamespace(target=target, method=SimpleNamespace(engine=engine))
        point = SimpleNamespace(
            decoders={"method": decoder}, sampling=Sampling(), measure=SimpleNamespace()
        )
        texts = {name: [Timed([1], [1.0], Trace())] for name in ("method", "baseline")}
        assert score._certified(point, [REQUEST], texts) == [equal]
    assert judged == ["own", "other"]
