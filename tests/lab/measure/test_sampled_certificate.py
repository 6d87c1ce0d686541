"""The sampled certificate on tables of probabilities: what is exact, what is rounding, what is a
defect, and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.lookup.prompt_lookup import PromptLookup
from bild_lab.engine.methods.speculative.cascades import Cactus
from bild_lab.engine.methods.speculative.combined_drafters import (
    HybridDrafter,
    SpeculativeDrafter,
)
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.speculative.typical_acceptance import TypicalAcceptance
from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.engine.protocols import Acceptance, Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling, pick
from bild_lab.engine.session import ALL_LOGITS, OutputSpec, Scores
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure import sampled_certificate
from bild_lab.lab.measure.certificate import (
    DEFECT,
    EQUAL,
    EXACT,
    NO_FORM,
    ROUNDING,
    SESSION_DEFECT,
    Certificate,
    count_verdicts,
)
from bild_lab.lab.measure.sampled_certificate import (
    DRAW_TOLERANCE,
    DRAWS,
    LOGITS,
    OUTPUT,
    TEXT,
    UNVERIFIED,
    certify_sampled,
    drawn_as_declared,
)
from bild_lab.lab.schema.numbers import CertificateCounts
from tests.engine.lossless.toy import TableModel, TableSession
from tests.engine.methods.speculative.exact import table
from tests.lab.measure.controls import Dropping

TARGET, DRAFTER = table(1, 5), table(11, 5)
LENGTH = 12


class Loaded(TableModel):
    """A table that counts as loaded. off: what the logits of several rows are moved by, in texts up
    to `until`.
    """

    dtype, depth, off, until = torch.float32, 2, 0.0, 99

    def start(self, source: Source, room: int, *_: object) -> TableSession:
        session = super().start(source, room)
        session.__class__ = Moved
        session.off, session.until = self.off, self.until
        return session


class Moved(TableSession):
    def extend(self, rows: Any, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        before = self.length
        scores = super().extend(rows, output_spec)
        if len(scores.logits) > 1 and before < self.until:
            scores.logits[:, 0] += self.off
        return replace(scores, head_input=scores.logits) if output_spec.head_input else scores


def loaded(probs: Tensor, **changes: Any) -> Loaded:
    model = Loaded(probs)
    vars(model).update(changes)
    return model


def request(seed: int = 3, length: int = LENGTH) -> Request:
    return Request(
        Source((0,)), Limits(1, length), Sampling(0.8), torch.Generator().manual_seed(seed)
    )


def certified(
    rule: Acceptance, drafter: Drafter | None = None, target: Loaded | None = None, **changes: Any
) -> Certificate:
    target = target or loaded(TARGET)
    method = DraftThenVerify(target, drafter or ModelDrafter(loaded(DRAFTER), 3), rule, **changes)
    tokens = method.decode(request(), Trace())[1:]
    return certify_sampled(method, target, request(), tokens)


def test_a_lossless_rule_is_exact_in_every_context() -> None:
    found = certified(SpeculativeSampling())
    assert (found.verdict, found.check, found.position, found.contexts) == (
        EXACT,
        None,
        None,
        LENGTH,
    )
    assert found.output < 1e-9
    assert 4 in found.rounding  # three drafted tokens and the last committed one
    assert set(found.rounding.values()) == {0.0}


def test_the_target_alone_is_exact() -> None:
    found = certified(SpeculativeSampling(), NoDraft(loaded(TARGET)))
    assert (found.verdict, found.rounding) == (EXACT, {1: 0.0})


@pytest.mark.parametrize("rule", [SpeculativeSampling(0.5), TypicalAcceptance(0.2, 0.5)])
def test_a_lossy_rule_is_a_defect_of_the_size_of_its_distance(rule: Acceptance) -> None:
    found = certified(rule)
    assert (found.verdict, found.check) == (DEFECT, OUTPUT)
    assert 0.01 < found.output < 1


def test_a_rule_without_a_closed_form_has_no_verdict_but_its_logits_are_compared() -> None:
    found = certified(Cactus(0.3))
    assert (found.verdict, found.output) == (NO_FORM, None)
    assert found.contexts == LENGTH
    broken = certified(Cactus(0.3), target=loaded(TARGET, off=3.0))
    assert (broken.verdict, broken.check) == (SESSION_DEFECT, LOGITS)


def test_a_closed_form_of_another_shape_is_refused_with_its_rules_name() -> None:
    class First(SpeculativeSampling):
        def output_distribution(self, *arguments: Any) -> Tensor:
            return super().output_distribution(*arguments)[:1]

    with pytest.raises(UserError, match=r"output_distribution of First must give .*, got \[1, 5\]"):
        certified(First())


def test_a_closed_form_of_no_numbers_is_a_defect() -> None:
    class Broken(SpeculativeSampling):
        def output_distribution(self, *arguments: Any) -> Tensor:
            return super().output_distribution(*arguments) * float("nan")

    found = certified(Broken())
    assert (found.verdict, found.check, found.position) == (DEFECT, OUTPUT, 0)


def test_a_method_without_rounds_has_no_verdict() -> None:
    assert certify_sampled(SimpleNamespace(), loaded(TARGET), request(), [1]) == Certificate(
        NO_FORM
    )


def test_what_rounding_can_explain_is_reported_by_the_number_of_rows() -> None:
    found = certified(SpeculativeSampling(), target=loaded(TARGET, off=1e-4))
    assert found.verdict == ROUNDING
    assert 1e-6 < max(found.rounding.values()) < 1e-4
    more = certified(SpeculativeSampling(), target=loaded(TARGET, off=1e-2))
    assert (more.verdict, more.check) == (SESSION_DEFECT, LOGITS)
    half = certified(SpeculativeSampling(), target=loaded(TARGET, off=1e-2, dtype=torch.bfloat16))
    assert half.verdict == ROUNDING
    # in the first round alone
    once = certified(SpeculativeSampling(), target=loaded(TARGET, off=1e-4, until=1))
    assert once.verdict == ROUNDING


def test_another_text_than_the_seeds_is_a_defect_at_its_first_other_token() -> None:
    method = DraftThenVerify(
        loaded(TARGET), ModelDrafter(loaded(DRAFTER), 3), SpeculativeSampling()
    )
    tokens = method.decode(request(), Trace())[1:]
    tokens[4] = (tokens[4] + 1) % 5
    found = certify_sampled(method, method.target, request(), tokens)
    assert (found.verdict, found.check, found.position) == (DEFECT, TEXT, 4)
    shorter = certify_sampled(
        method, method.target, request(), method.decode(request(), Trace())[1:8]
    )
    assert (shorter.verdict, shorter.check, shorter.position) == (DEFECT, TEXT, 7)


def test_tokens_that_no_round_verified_are_a_defect() -> None:
    method = DraftThenVerify(
        loaded(TARGET), ModelDrafter(loaded(DRAFTER), 3), SpeculativeSampling(), verify_tail=False
    )
    found = [
        certify_sampled(
            method, method.target, request(seed), method.decode(request(seed), Trace())[1:]
        )
        for seed in range(6)
    ]
    assert {(one.verdict, one.check) for one in found} <= {(EXACT, None), (DEFECT, UNVERIFIED)}
    assert UNVERIFIED in {one.check for one in found}


class Colder(ModelDrafter):
    """Declares a colder distribution than the one that it draws from, and hides its random
    numbers.
    """

    def propose(self, tokens: list[int]) -> Draft:
        draft = super().propose(tokens)
        colder = draft.probs**2
        return replace(draft, probs=colder / colder.sum(-1, keepdim=True), uniforms=None)


def test_a_distribution_that_is_not_the_models_is_found_by_the_output_alone() -> None:
    found = certified(SpeculativeSampling(), Colder(loaded(DRAFTER), 3))
    assert (found.verdict, found.check) == (DEFECT, OUTPUT)
    # rounding may be as large: q counts as declared
    unknown = Colder(loaded(DRAFTER, dtype=torch.bfloat16), 3)
    assert certified(SpeculativeSampling(), unknown).verdict == EXACT
    # whose rows are all the same
    kernels = Colder(loaded(DRAFTER, dtype=torch.bfloat16, engine="kernels"), 3)
    assert certified(SpeculativeSampling(), kernels).check == OUTPUT


def test_tokens_are_drawn_again_from_their_q() -> None:
    probs, uniforms = (
        DRAFTER.repeat(20, 1),
        torch.rand(100, generator=torch.Generator().manual_seed(0)).double(),
    )
    draft = Draft(pick(probs, uniforms), probs=probs, uniforms=uniforms)
    assert drawn_as_declared(draft)
    assert drawn_as_declared(replace(draft, probs=probs.float()))
    for at in range(100):
        swapped = draft.tokens.clone()
        swapped[at] = (swapped[at] + 1) % 5
        assert not drawn_as_declared(replace(draft, tokens=swapped))
    assert drawn_as_declared(replace(draft, tokens=swapped, uniforms=None))  # nothing to draw with
    assert drawn_as_declared(Draft(torch.tensor([3])))
    assert drawn_as_declared(Draft(torch.tensor([3]), uniforms=torch.tensor([0.5]).double()))


@pytest.mark.parametrize(("miss", "drawn"), [(DRAW_TOLERANCE, True), (2 * DRAW_TOLERANCE, False)])
@pytest.mark.parametrize(("token", "side"), [(0, 1), (1, -1)])
def test_a_random_number_may_miss_a_share_by_rounding_alone(
    token: int, side: int, miss: float, drawn: bool
) -> None:
    draft = Draft(
        torch.tensor([token]),
        probs=torch.tensor([[0.5, 0.5]]),
        uniforms=torch.tensor([0.5]).double(),
    )
    assert drawn_as_declared(draft)
    assert drawn_as_declared(replace(draft, uniforms=draft.uniforms + side * miss)) == drawn


def test_the_misdrawn_position_is_found() -> None:
    class Wrong(ModelDrafter):
        def propose(self, tokens: list[int]) -> Draft:
            draft = super().propose(tokens)
            return replace(draft, uniforms=1 - draft.uniforms) if len(tokens) > 6 else draft

    found = certified(SpeculativeSampling(), Wrong(loaded(DRAFTER), 3))
    assert (found.verdict, found.check) == (DEFECT, DRAWS)
    assert found.position >= 6


def test_sampled_verdicts_are_counted_with_the_largest_variations() -> None:
    several = [
        Certificate(EXACT, output=1e-9, rounding={2: 0.0, 4: 1e-7}),
        Certificate(ROUNDING, output=1e-8, rounding={4: 1e-4}),
        Certificate(SESSION_DEFECT, 3, check=LOGITS, output=0.0, rounding={3: 0.2}),
        Certificate(NO_FORM, rounding={3: 0.1}),
    ]
    counts = count_verdicts(several, claimed=True)
    rounding = {"2": 0.0, "3": 0.2, "4": 1e-4}
    assert counts == CertificateCounts(
        equal=1, ties=1, defects=1, unjudged=1, output=1e-8, rounding=rounding, claimed=True
    )
    assert list(counts.rounding) == ["2", "3", "4"]


def test_that_every_sampled_text_was_judged_is_told() -> None:
    assert count_verdicts([Certificate(EXACT, contexts=3)], claimed=True).unjudged == 0
    assert count_verdicts([Certificate(EQUAL)], claimed=True).unjudged is None  # greedy


def test_a_sum_in_float32_may_miss_one_but_not_by_much() -> None:
    """A vocabulary's worth of rounding is no defect of the rule; a q that does not sum to 1 is."""

    class Scaled(ModelDrafter):
        factor = 1.0

        def propose(self, tokens: list[int]) -> Draft:
            draft = super().propose(tokens)
            # the loop itself looks at a text's first draft
            return replace(draft, probs=draft.probs * (self.factor if len(tokens) > 1 else 1.0))

    drafter = Scaled(loaded(DRAFTER), 3)
    drafter.factor = 1 + 2e-5
    assert certified(SpeculativeSampling(), drafter).verdict == EXACT
    drafter.factor = 0.9
    found = certified(SpeculativeSampling(), drafter)
    assert (found.verdict, found.check) == (DEFECT, OUTPUT)
    unknown = Scaled(loaded(DRAFTER, dtype=torch.bfloat16), 3)
    unknown.factor = 0.9  # its tokens are drawn by their shares of the sum, as the model says too
    assert certified(SpeculativeSampling(), unknown).output == pytest.approx(found.output)


@pytest.mark.parametrize("length", [1, 7])
def test_rows_after_the_end_of_the_text_are_no_contexts(length: int) -> None:
    """Every draft is accepted, as the target drafts, so the last round's own token has no room."""
    target = loaded(TARGET)
    method = DraftThenVerify(target, ModelDrafter(target, 4), SpeculativeSampling())
    found = certify_sampled(
        method, target, request(3, length), method.decode(request(3, length), Trace())[1:]
    )
    assert (found.verdict, found.contexts) == (EXACT, length)


def test_an_empty_text_has_no_verdict() -> None:
    method = DraftThenVerify(
        loaded(TARGET), ModelDrafter(loaded(DRAFTER), 3), SpeculativeSampling()
    )
    assert certify_sampled(method, method.target, request(length=0), []) == Certificate(
        NO_FORM, contexts=0
    )


def test_rows_that_forbid_other_tokens_are_a_defect_of_the_session() -> None:
    found = certified(SpeculativeSampling(), target=loaded(TARGET, off=-float("inf")))
    assert (found.verdict, found.check) == (SESSION_DEFECT, LOGITS)


def test_rows_that_alone_have_no_scores_are_a_defect_of_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of which no difference is larger than rounding."""
    nothing = SimpleNamespace(after=lambda tokens: torch.full((5,), float("nan")))
    monkeypatch.setattr(sampled_certificate, "RowByRow", lambda model, request: nothing)
    found = certified(SpeculativeSampling(), NoDraft(loaded(TARGET)))
    assert (found.verdict, found.check) == (SESSION_DEFECT, LOGITS)


class LenientLater(SpeculativeSampling):
    """Lossless in the first rounds; by their text, and by what else the target's forward gave."""

    required_outputs = OutputSpec(head_input=True)

    def in_round(self, tokens: Sequence[int], scores: Scores) -> Acceptance:
        assert torch.equal(scores.head_input, scores.logits)
        return SpeculativeSampling(0.2 if len(tokens) > 6 else 1.0)


class OfNoModel(Colder):
    """Names no model either."""

    draws_from = None


def test_draws_without_their_random_numbers_from_no_known_model_are_not_judged() -> None:
    found = certified(SpeculativeSampling(), OfNoModel(loaded(DRAFTER), 3))
    assert (found.verdict, found.output, found.contexts > 0) == (NO_FORM, None, True)


def test_a_text_of_which_some_contexts_cannot_be_judged_has_no_verdict() -> None:
    copies = PromptLookup(loaded(TARGET), 3, longest_match=2)
    found = certified(
        SpeculativeSampling(), HybridDrafter(copies, OfNoModel(loaded(DRAFTER), 3), 2)
    )
    assert found.verdict == NO_FORM and found.output < 1e-9


def test_a_rule_of_each_round_is_judged_by_what_it_emits_in_that_round() -> None:
    found = certified(LenientLater())
    assert (found.verdict, found.check) == (DEFECT, OUTPUT)
    assert found.position >= 6


def test_a_drafter_whose_own_scores_are_no_numbers_does_not_draw_what_it_declares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hiding(ModelDrafter):
        def propose(self, tokens: list[int]) -> Draft:
            return replace(super().propose(tokens), uniforms=None)

    nothing = SimpleNamespace(after=lambda tokens: torch.full((5,), float("nan")))
    assert certified(SpeculativeSampling(), Hiding(loaded(DRAFTER), 3)).verdict == EXACT
    monkeypatch.setattr(sampled_certificate, "one_row_of_drafter", lambda method, request: nothing)
    found = certified(SpeculativeSampling(), Hiding(loaded(DRAFTER), 3))
    assert (found.verdict, found.check, found.output) == (DEFECT, OUTPUT, 1)


SECONDS = {
    "nothing": lambda: NoDraft(loaded(TARGET)),
    "copies": lambda: PromptLookup(loaded(TARGET), 3, longest_match=2),
    "another model": lambda: ModelDrafter(loaded(TARGET), 2),
}


@pytest.mark.parametrize("second", SECONDS)
def test_draws_that_are_dropped_for_what_they_are_are_found(second: str) -> None:
    first = ModelDrafter(loaded(DRAFTER), 3, 0.35)  # unsure after some tokens
    sound = certified(SpeculativeSampling(), HybridDrafter(first, SECONDS[second](), 2))
    assert (sound.verdict, sound.check) == (EXACT, None)
    found = certified(SpeculativeSampling(), Dropping(first, SECONDS[second](), 2))
    assert (found.verdict, found.check) == (DEFECT, DRAWS)
    assert found.output < 1e-9  # of the drafts that are left each looks right
    nested = HybridDrafter(Dropping(first, SECONDS[second](), 2), NoDraft(loaded(TARGET)), 1)
    assert certified(SpeculativeSampling(), nested).check == DRAWS


def hierarchy() -> SpeculativeDrafter:
    """Its tokens come without random numbers, from a model of its own."""
    return SpeculativeDrafter(loaded(DRAFTER), ModelDrafter(loaded(table(7, 5)), 2), 3)


@pytest.mark.parametrize("second", SECONDS)
def test_a_hybrids_drafts_are_judged_by_the_model_that_drew_them(second: str) -> None:
    """Fault: a hierarchy in a hybrid was not judged, as the hybrid named no model."""
    judged = certified(SpeculativeSampling(), HybridDrafter(hierarchy(), SECONDS[second](), 1))
    assert (judged.verdict, judged.check) == (EXACT, None)
    behind = HybridDrafter(PromptLookup(loaded(TARGET), 3, longest_match=2), hierarchy(), 2)
    assert certified(SpeculativeSampling(), behind).verdict == EXACT
    colder = HybridDrafter(Colder(loaded(DRAFTER), 3), SECONDS[second](), 1)
    found = certified(SpeculativeSampling(), colder)
    assert (found.verdict, found.check) == (DEFECT, OUTPUT)
