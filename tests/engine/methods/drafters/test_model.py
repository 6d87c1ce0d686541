"""A model's chain: where it ends, what it keeps, and windows that follow the acceptance rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.early_exit.views import EarlyExit
from bild_lab.engine.methods.speculative.draft_model import (
    PRIOR_TOKENS,
    PROBE_ROUNDS,
    AdaptiveWindow,
    ModelDrafter,
)
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.speculative.theory import optimal_window
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling, pick
from bild_lab.engine.session import DEFAULT_OPTIONS, ChainResult, ChainSpec, Scores, SessionOptions
from bild_lab.errors import UserError
from tests.engine.loops import decode
from tests.policies import in_memory
from tests.stubs import SESSION, NextLogits, StubModel, StubSession
from tests.tiny import START, TINY

END = 4
TABLE = torch.tensor(
    [
        [0.1, 0.6, 0.1, 0.1, 0.1],  # 0 is followed by 1, 1 by 2, 2 by 3, and 3 by the end
        [0.1, 0.1, 0.5, 0.2, 0.1],
        [0.2, 0.1, 0.1, 0.4, 0.2],
        [0.1, 0.0, 0.1, 0.1, 0.7],
        [0.9, 0.1, 0.0, 0.0, 0.0],
    ],
    dtype=torch.float64,
)
WARM = Sampling(temperature=0.5, top_k=4)


class Programmed(StubModel):
    """Has a program for whole chains, which notes what it is given."""

    def __init__(self, drafted: ChainResult | None = None) -> None:
        super().__init__(lambda tokens: TABLE[tokens[-1]].log())
        self.drafted, self.given = drafted, []

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> StubSession:
        model = self

        class Session(StubSession):
            def draft(self, rows: Sequence[int], chain: ChainSpec) -> ChainResult | None:
                model.given.append((list(rows), chain))
                return model.drafted

        self.started = (source, room, session_options.forwards)
        return Session(self, list(source.prompt[:-1]))


def request_of(room: int = 20, sampling: Sampling | None = None, seed: int = 0) -> Request:
    return Request(
        Source((0,)),
        Limits(1, room, frozenset([END])),
        sampling or Sampling(),
        torch.Generator().manual_seed(seed),
    )


def begun(
    request: Request, *given: object, model: Programmed | None = None, **options: object
) -> ModelDrafter:
    drafter = ModelDrafter(model or Programmed(), *(given or (9,)), **options)
    drafter = drafter.start(request, SESSION)
    return drafter


def numbers(held: Tensor | None) -> list | None:
    return None if held is None else held.tolist()


def test_a_greedy_chain_ends_with_the_window_the_text_or_an_end_token() -> None:
    drafts = [
        begun(request_of(), 2).propose([0]),
        begun(request_of(room=3)).propose([0]),
        begun(request_of()).propose([0]),
    ]
    assert [each.token_list for each in drafts] == [[1, 2], [1, 2, 3], [1, 2, 3, END]]
    assert [each.calls for each in drafts] == [2, 3, 4]
    for each in drafts:
        assert (each.parents, each.probs, each.unscaled_probs, each.uniforms, each.stats) == (
            None,
            None,
            None,
            None,
            {},
        )
    reads_none = begun(request_of(), 6)
    assert reads_none.stop_on_eos
    reads_none.stop_on_eos = False  # as on an accelerator
    assert reads_none.propose([0]).token_list == [1, 2, 3, END, 0, 1]


def test_rows_that_stay_are_not_fed_again() -> None:
    model = Programmed()
    drafter = begun(request_of(), 3, model=model)
    assert model.started == (drafter._request.source, 20, SESSION.forwards)
    drafter.propose([0])
    assert model.fed == [0, 1, 2] and drafter._session.length == 3
    assert drafter.propose([0, 1, 2, 2]).token_list == [3, END]
    assert model.fed == [0, 1, 2, 2, 3]
    drafter.rollback(2)
    assert drafter._session.length == 2
    drafter.propose([0, 1, 2, 2])
    assert model.fed == [0, 1, 2, 2, 3, 2, 2, 3]


def test_a_sampled_chain_has_what_each_token_was_drawn_from_and_by() -> None:
    drafter = begun(request_of(sampling=WARM, seed=5), 5, keeps_probs=True)
    draft = drafter.propose([0])
    uniforms = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    before = [0, *draft.token_list[:-1]]
    assert len(draft) >= 2 and draft.calls == len(draft)
    assert numbers(draft.uniforms) == uniforms[: len(draft)].tolist()
    torch.testing.assert_close(draft.probs, WARM.probs(TABLE[before].log()))
    torch.testing.assert_close(draft.unscaled_probs, TABLE[before])
    assert draft.tokens.tolist() == pick(draft.probs, draft.uniforms).tolist()
    others = [
        begun(request_of(sampling=WARM, seed=seed), 5).propose([0]) for seed in (5, 5, 6, 7, 8)
    ]
    assert others[0].token_list == draft.token_list and others[0].unscaled_probs is None
    assert len({tuple(each.uniforms.tolist()) for each in others}) > 1


def test_a_chain_ends_before_a_token_of_low_confidence() -> None:
    draft = begun(request_of(), 9, 0.45).propose([0])
    assert draft.token_list == [1, 2] and draft.calls == 3
    assert draft.stats == {"fallback": True, "confidence": pytest.approx((0.6, 0.5, 0.4))}
    drafter = begun(request_of(sampling=WARM), 9, 0.95, keeps_probs=True)
    nothing = drafter.propose([0])
    assert (nothing.token_list, nothing.calls, nothing.probs, nothing.unscaled_probs) == (
        [],
        1,
        None,
        None,
    )
    assert nothing.tokens.dtype == torch.long and len(nothing.uniforms) == 0
    sure = begun(request_of(sampling=WARM), 3, 0.0).propose([0])
    assert (len(sure.probs), sure.stats["fallback"], len(sure.stats["confidence"])) == (
        len(sure),
        False,
        sure.calls,
    )
    cut = begun(request_of(sampling=Sampling(0.01)), 9, 0.45, keeps_probs=True).propose([0])
    assert (len(cut), cut.probs.shape, cut.unscaled_probs.shape) == (2, (2, 5), (2, 5))


DRAFTED = ChainResult([1, 2], 3, True, [0.6, 0.5, 0.4], TABLE[:2], TABLE[1:3])


def test_a_program_is_given_all_of_it_and_its_chain_is_the_draft() -> None:
    model = Programmed(DRAFTED)
    drafter = begun(request_of(sampling=WARM, seed=5), 9, 0.5, keeps_probs=True, model=model)
    draft = drafter.propose([0, 3])
    ((rows, chain),) = model.given
    uniforms = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    assert rows == [0, 3] and chain.uniforms.tolist() == uniforms.tolist()
    assert replace(chain, uniforms=None) == ChainSpec(
        9, frozenset([END]), 0.5, 0.5, None, True, False, True
    )
    assert (draft.token_list, draft.calls, draft.uniforms.tolist()) == (
        [1, 2],
        3,
        uniforms[:2].tolist(),
    )
    assert draft.probs is DRAFTED.probs and draft.unscaled_probs is DRAFTED.unscaled_probs
    assert draft.stats == {"fallback": True, "confidence": (0.6, 0.5, 0.4)} and model.fed == []
    model.drafted = replace(DRAFTED, tokens=[], forwards=1)
    empty = drafter.propose([0, 3])
    assert (empty.token_list, empty.probs, empty.unscaled_probs, empty.calls) == ([], None, None, 1)
    model.drafted = ChainResult([1], 1, False, [0.6], TABLE[:1], TABLE[1:2])
    single = drafter.propose([0, 3])
    assert (
        single.probs is model.drafted.probs
        and single.unscaled_probs is model.drafted.unscaled_probs
    )
    drafter.stop_on_eos = False  # as on an accelerator
    drafter.propose([0, 3])
    assert [chain.stop_on_eos for _, chain in model.given] == [True, True, True, False]
    plain = Programmed(replace(DRAFTED, tokens=torch.tensor([1, 2])))
    draft = begun(request_of(room=4), 9, model=plain).propose([0])
    assert (draft.token_list, draft.stats, draft.uniforms) == ([1, 2], {}, None)
    assert plain.given == [
        ([0], ChainSpec(4, frozenset([END]), None, 0.0, None, False, True, True))
    ]


def test_a_window_of_nothing_asks_for_no_program() -> None:
    model = Programmed(DRAFTED)
    window = AdaptiveWindow(cost_ratio=0.9, max_window=4, prior=0.5, memory=1.0)
    idle = begun(request_of(), window, model=model).propose([0])
    assert (idle.token_list, idle.calls, idle.probs) == ([], 0, None) and model.given == []
    unasked = begun(request_of(), window, 0.5, model=model).propose([0])
    assert unasked.stats == {"fallback": False, "confidence": ()}  # it handed nothing over


def test_a_window_learns_from_its_own_rounds_and_begins_each_text_anew() -> None:
    window = AdaptiveWindow(cost_ratio=0.1, max_window=4, prior=0.5, memory=1.0)
    drafter = begun(request_of(), window)
    draft, verdict = Draft(torch.tensor([1, 2])), Verdict((0,), 3)
    drafter.observe_other([0], draft, Scores(None), verdict)
    assert drafter._window.acceptance_rate == 0.5
    drafter.observe(draft, Scores(None), verdict)
    assert drafter._window.acceptance_rate == 3 / 6
    drafter.observe(draft, Scores(None), Verdict((0, 1), 3))
    assert drafter._window.acceptance_rate == 5 / 8
    assert (
        drafter.start(request_of(), SESSION)._window.acceptance_rate
        == window.acceptance_rate
        == 0.5
    )


def test_what_a_drafter_gives_and_draws_from() -> None:
    model = Programmed()
    assert (ModelDrafter(model, 1).gives, ModelDrafter(model, 1, keeps_probs=True).gives) == (
        set(),
        {"unscaled_probs"},
    )
    assert ModelDrafter(model, 1).draws_from is model and not ModelDrafter(model, 1).drafts_trees
    for wrong in (-0.1, 1.1, "much"):
        with pytest.raises(UserError, match=r"^fallback, or stop_confidence, must lie in"):
            ModelDrafter(model, 1, wrong)
    with pytest.raises(UserError, match="keeps_probs must be true or false, got 1"):
        ModelDrafter(model, 1, keeps_probs=1)
    meta = replace(StubModel(lambda _: TABLE[0]), device=torch.device("meta"))
    assert not ModelDrafter(meta, 1).stop_on_eos and ModelDrafter(meta, 1, 0.3).stop_on_eos


def test_a_view_of_the_target_drafts_beside_it_and_offers_no_states_of_its_own() -> None:
    target, source = in_memory(TINY["llama"](0), "native"), Source((START, 5, 9))
    drafter = ModelDrafter(EarlyExit(target, 1), 3)
    drafter = drafter.start(Request(source, Limits(3, 20)), target.start(source, 20))
    assert len(drafter.propose([START, 5, 9])) == 3
    assert drafter.draws_from is None and ModelDrafter(target, 3).draws_from is target


def saying(*tokens_from: tuple[int, int]) -> NextLogits:
    """After each length of text from `tokens_from[i][0]` on, always says `tokens_from[i][1]`."""

    def next_logits(tokens: list[int]) -> torch.Tensor:
        said = [token for start, token in tokens_from if len(tokens) >= start][-1]
        return 9.0 * torch.nn.functional.one_hot(torch.tensor(said), 4).double()

    return next_logits


def drafted(
    draft: NextLogits, target: NextLogits, window: AdaptiveWindow, length: int
) -> list[int]:
    """How many tokens each round drafted."""
    drafter = ModelDrafter(StubModel(draft), window)
    _, trace = decode(StubModel(target), drafter, SpeculativeSampling(), Source((0,)), length)
    return [len(each.drafted) for each in trace.rounds]


def test_the_window_is_the_one_that_pays_most_at_the_rate_seen_of_late() -> None:
    window = AdaptiveWindow(cost_ratio=0.1, max_window=12, prior=0.7, memory=0.8)
    accepted, judged = 0.7 * PRIOR_TOKENS, PRIOR_TOKENS
    sizes = []
    for drafts, stood in [(5, 5), (7, 7), (9, 9), (9, 2), (6, 0), (3, 0), (2, 1), (2, 2), (3, 3)]:
        assert window.acceptance_rate == pytest.approx(accepted / judged)
        assert window.size() == optimal_window(accepted / judged, 0.1, 12)
        sizes.append(window.size())
        window.observe(drafts, stood)
        accepted = 0.8 * accepted + stood
        judged = 0.8 * judged + stood + (stood < drafts)
    assert len(set(sizes)) > 5, sizes


def test_the_window_grows_to_its_limit_while_everything_is_accepted() -> None:
    window = AdaptiveWindow(cost_ratio=0.1, max_window=6, prior=0.4, memory=0.5)
    agreeing = saying((0, 1))
    # the last, as much as there is room
    assert drafted(agreeing, agreeing, window, 40) == [2, 4, 6, 6, 6, 6, 4]


def test_where_nothing_is_accepted_one_token_is_drafted_in_every_eighth_round() -> None:
    window = AdaptiveWindow(cost_ratio=0.3, max_window=6, prior=0.7, memory=0.5)
    rounds = drafted(saying((0, 1)), saying((0, 2)), window, 2 + 2 * PROBE_ROUNDS)
    assert PROBE_ROUNDS == 8
    assert rounds == [2, 1, *[0] * 7, 1, *[0] * 7, 1]


def test_drafting_resumes_after_a_probe_that_stood() -> None:
    window = AdaptiveWindow(cost_ratio=0.3, max_window=6, prior=0.7, memory=0.5)
    rounds = drafted(saying((0, 1)), saying((0, 2), (9, 1)), window, 30)
    assert rounds[:11] == [2, 1, *[0] * 7, 1, 1]
    assert max(rounds[11:]) == 6


def test_a_round_without_a_draft_costs_no_forward_of_the_drafter() -> None:
    draft = StubModel(saying((0, 1)))
    drafter = ModelDrafter(
        draft, AdaptiveWindow(cost_ratio=0.3, max_window=6, prior=0.7, memory=0.5)
    )
    _, trace = decode(StubModel(saying((0, 2))), drafter, ExactMatch(), Source((0,)), 9)
    assert trace.draft_calls == trace.drafted == 3
    assert trace.target_calls == 9
