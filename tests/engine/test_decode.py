"""The loop against literal, cache-free transcriptions of the papers' algorithms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify, TokenLoop
from bild_lab.engine.draft import Draft, Tree, Verdict
from bild_lab.engine.methods.bild import ReleasedRollback, Rollback
from bild_lab.engine.methods.speculative.draft_model import (
    ModelDrafter,
    TargetFirstWindow,
    released_confidence,
)
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.rejection_sampling import RejectionSampling
from bild_lab.engine.methods.speculative.sampling import OverlapMeasurement
from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.engine.models.native import why_no_kernels
from bild_lab.engine.protocols import Acceptance, Drafter, Method, require_text
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import (
    ALL_LOGITS,
    DraftShape,
    Model,
    OutputSpec,
    Rows,
    Scores,
    Session,
    SessionOptions,
    as_rows,
)
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.recorder import recorded_rounds
from bild_lab.lab.measure.summary import mean_statistic
from bild_lab.lab.point.read_model import load_model
from tests.engine.loops import (
    FAMILIES,
    NEVER,
    TreeDrafter,
    autoregressive,
    copying,
    decode,
    finished,
    oracles,
    random_pair,
)
from tests.stubs import NextLogits, StubModel, StubSession, uncached
from tests.tiny import VOCABULARY


def algorithm_1(
    small: NextLogits,
    large: NextLogits,
    prompt: tuple[int, ...],
    done: Callable[[list[int]], bool],
    fallback: float,
    rollback: float,
    window: int,
    verify_tail: bool,
) -> list[int]:
    """Algorithm 1 of BiLD, line by line, greedy and without any cache.

    With the released window (control passes to the large model after so many tokens at the latest)
    and, where asked for, with the large model looking at a tail that ends the text.
    """
    y = list(prompt)
    handed_over = len(y)
    while not done(y):
        p_small = small(y).softmax(-1)
        if len(y) - handed_over < window and not p_small.max() < fallback:
            y = [*y, int(p_small.argmax())]
            if not done(y):
                continue
            if not verify_tail:
                return y
        d = {m: -float(large(y[:m]).log_softmax(-1)[y[m]]) for m in range(handed_over, len(y))}
        exceeding = [m for m in sorted(d) if d[m] > rollback]
        if exceeding:
            m = exceeding[0]
            y = [*y[:m], int(large(y[:m]).argmax())]
        elif not done(y):
            y = [*y, int(large(y).argmax())]
        handed_over = len(y)
    return y


def an_end_token(tokens: list[int], prompt_length: int, where: int) -> frozenset[int]:
    """A token the target emits, so that end tokens fall anywhere in the text."""
    return frozenset([tokens[min(prompt_length + where, len(tokens) - 1)]])


@pytest.mark.fast("True-t5", "False-llama")
@pytest.mark.parametrize(("verify_tail", "family"), [*itertools.product([True, False], FAMILIES)])
def test_bild_follows_algorithm_1_of_the_paper(family: str, verify_tail: bool) -> None:
    seen_rollback = seen_fallback = seen_full_window = False
    grid = itertools.product((0.0, 0.3, 0.6, 0.9), (0.4, 1.5, 4.0, math.inf), (1, 3, 10))
    for seed, (fallback, rollback, window) in enumerate(grid):
        if seed % (8 if verify_tail else 7):  # a sample
            continue
        target, draft, source = random_pair(family, seed % 8)
        large, small = oracles(family, seed % 8)
        max_new_tokens = (24, 13, 5)[seed % 3]
        free = autoregressive(large, source.prompt, finished(source, 24, NEVER))
        end = NEVER if seed % 2 else an_end_token(free, len(source.prompt), seed % 11)
        expected = algorithm_1(
            small,
            large,
            source.prompt,
            finished(source, max_new_tokens, end),
            fallback,
            rollback,
            window,
            verify_tail,
        )
        drafter = ModelDrafter(draft, window, fallback)
        actual, trace = decode(
            target,
            drafter,
            Rollback(rollback),
            source,
            max_new_tokens,
            end,
            verify_tail=verify_tail,
        )
        assert actual == expected, (seed, fallback, rollback, window)
        seen_rollback |= trace.rollbacks > 0
        seen_fallback |= trace.fallbacks > 0
        seen_full_window |= any(len(each.drafted) == window > 1 for each in trace.rounds)
    assert seen_rollback and seen_fallback and seen_full_window


def released_loop(
    small: NextLogits,
    large: NextLogits,
    prompt: tuple[int, ...],
    done: Callable[[list[int]], bool],
    fallback: float,
    rollback: float,
    window: int,
) -> tuple[list[int], int, int]:
    """BiLD's released loop by its description, token by token, without any cache:
    `policy=bild_released`.

    Also how often the large model ran, and how often it accepted a draft in spite of a token above
    the threshold.
    """
    y, judged, left = list(prompt), len(prompt), 0  # left: turns of the small model
    large_runs = overlooked = 0
    while not done(y):
        p_small = small(y).softmax(-1) if left else None
        if left and p_small.max() >= (0.6 if fallback == 0.0 else fallback):
            y, left = [*y, int(p_small.argmax())], left - 1
            continue
        large_runs += 1
        own = [large(y[:m]).log_softmax(-1) for m in range(judged, len(y) + 1)]
        above = [
            m
            for m in range(judged, len(y))
            if -own[m - judged][y[m]] > (5.0 if rollback == 0.0 else rollback)
        ]
        if above and int(own[above[0] - judged].argmax()) != y[above[0]]:
            y, left = [*y[: above[0]], int(own[above[0] - judged].argmax())], 0
        else:
            y, left, overlooked = [*y, int(own[-1].argmax())], window, overlooked + bool(above)
        judged = len(y)
    return y, large_runs, overlooked


def test_bild_released_follows_the_authors_loop() -> None:
    overlooked, second_passes = 0, 0
    grid = itertools.product((0.0, 0.3, 0.9), (0.0, 0.4, 1.0, 4.0), (1, 3, 10))
    for seed, (fallback, rollback, window) in enumerate(grid):
        table = 2 * torch.randn(
            2, 7, 7, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        table[1] = table[0] + 0.7 * table[1]
        large, small = (lambda y, own=own: own[y[-2], y[-1]] for own in table)
        source, end, most = (
            Source((0, 1)),
            frozenset([2 if seed % 2 else VOCABULARY]),
            (24, 13)[seed % 3 == 0],
        )
        done = finished(source, most, end)
        expected, runs, seen = released_loop(
            small, large, source.prompt, done, fallback, rollback, window
        )
        drafter = ModelDrafter(
            StubModel(small), TargetFirstWindow(window), released_confidence(fallback)
        )
        rule, options = ReleasedRollback(rollback), {"verify_tail": False}
        actual, trace = decode(StubModel(large), drafter, rule, source, most, end, **options)
        assert (actual, trace.target_calls) == (expected, runs), (seed, fallback, rollback, window)
        assert trace.rounds[0].drafted == ()
        after = [later for one, later in itertools.pairwise(trace.rounds) if one.rollback]
        assert all(one.drafted == () and one.next_token is not None for one in after)
        overlooked, second_passes = overlooked + seen, second_passes + len(after)
    assert overlooked > 5 and second_passes > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_vanilla_decodes_greedily_with_one_forward_a_token(family: str) -> None:
    target, _, source = random_pair(family, 3)
    actual, trace = decode(target, NoDraft(target), ExactMatch(), source, 15)
    assert actual == autoregressive(
        uncached(target.module, source), source.prompt, finished(source, 15, NEVER)
    )
    assert trace.target_calls == 15
    assert target.fed == [len(source.prompt), *[1] * 14]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_model_computes_a_committed_token_twice(family: str) -> None:
    target, draft, source = random_pair(family, 5)
    drafter = ModelDrafter(draft, 6, 0.3)
    tokens, trace = decode(target, drafter, Rollback(1.0), source, 30)
    rejected = sum(len(each.drafted) - each.accepted for each in trace.rounds)
    assert trace.rollbacks > 0
    # every row the target ran was a committed token that needed its key, or a draft it rejected;
    # the last round commits one token that is never fed, and may accept drafts behind the limit
    assert sum(target.fed) - rejected <= len(tokens)
    assert (
        sum(target.fed)
        == len(source.prompt) + sum(len(each.drafted) + 1 for each in trace.rounds) - 1
    )
    # the drafter runs a row once per call, and once more per token that the target chose for it
    assert sum(draft.fed) <= len(source.prompt) - 1 + sum(
        each.draft_calls + 1 for each in trace.rounds
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_drafts_give_the_same_text_in_fewer_rounds(family: str) -> None:
    target, _, source = random_pair(family, 4)
    truth = autoregressive(
        uncached(target.module, source), source.prompt, finished(source, 24, NEVER)
    )
    drafter = TreeDrafter(truth)
    actual, trace = decode(target, drafter, ExactMatch(), source, 24)
    assert actual == truth
    assert len(trace.rounds) == 8  # three tokens a round
    assert all(len(each.drafted) == 4 and each.accepted == 2 for each in trace.rounds[:-1])


def test_a_chain_only_rule_refuses_a_tree_drafter() -> None:
    with pytest.raises(
        UserError, match=r"RejectionSampling accepts chains.*TreeDrafter drafts trees"
    ):
        DraftThenVerify(StubModel(lambda _: torch.zeros(5)), TreeDrafter([]), RejectionSampling())


def test_a_drafter_that_goes_on_with_the_list_of_the_text_itself_is_refused() -> None:
    class Continuing(NoDraft):
        def propose(self, tokens: list[int]) -> Draft:
            tokens.append(1)
            return Draft(torch.tensor(tokens[-1:]))

    model = StubModel(lambda tokens: torch.zeros(5))
    method = DraftThenVerify(model, Continuing(model), ExactMatch())
    request = Request(Source((1,)), Limits(1, 8))
    with pytest.raises(UserError, match=r"Continuing has changed the list .* list\(tokens\)"):
        method.decode(request, Trace())


def test_a_rule_that_needs_what_the_drafter_does_not_give_is_refused() -> None:
    class Needy(ExactMatch):
        needs = frozenset({"unscaled_probs"})

    model = StubModel(lambda _: torch.zeros(5))
    with pytest.raises(
        UserError,
        match="Needy needs the unscaled_probs of every draft, which NoDraft does not give here",
    ):
        DraftThenVerify(model, NoDraft(model), Needy())
    with pytest.raises(UserError, match="verify_tail must be true or false, got 3"):
        DraftThenVerify(model, NoDraft(model), ExactMatch(), 3)


def test_a_method_is_what_its_parts_are() -> None:
    target = StubModel(lambda _: torch.zeros(5))
    drafters = NoDraft(target), ModelDrafter(target, 3), TreeDrafter([])
    draft_shape = [
        DraftThenVerify(target, drafter, ExactMatch()).draft_shape for drafter in drafters
    ]
    assert draft_shape == [DraftShape.ROWS, DraftShape.CHAINS, DraftShape.TREES]
    assert DraftThenVerify(target, drafters[0], ExactMatch()).engine == "stub"
    kinds = [
        (ExactMatch(), True),
        (ExactMatch(), False),
        (Rollback(5.0), True),
        (Rollback(5.0), False),
    ]
    lossless = [
        DraftThenVerify(target, drafters[0], rule, tail).lossless(Sampling())
        for rule, tail in kinds
    ]
    assert lossless == [True, False, False, False]


class NotingDrafter(NoDraft):
    """Drafts one wrong token and a probe, and notes what it receives."""

    def __init__(self, target: Model) -> None:
        self.received: list[tuple] = []

    def prepare(self, request: Request) -> None:
        self.received.append(("prepare", request))

    def begin(self, request: Request, target: Session) -> None:
        self.received.append(("start", request, target))

    def propose(self, tokens: list[int]) -> Draft:
        return Draft(
            torch.tensor([tokens[-1]]),
            probes=torch.tensor([9]),
            shape=Tree(torch.tensor([-1, 0, 1])),
        )

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.received.append((draft.token_list, scores.logits.shape[0], verdict.next_token))


class NotingRule(ExactMatch):
    """Notes the tokens and the rows of each round, and how many rows it judges."""

    required_outputs = OutputSpec(head_input=True, hidden=(1,))

    def __init__(self) -> None:
        self.rounds: list[tuple[list[int], int]] = []
        self.judged: list[int] = []

    def in_round(self, tokens: list[int], scores: Scores) -> Acceptance:
        self.rounds.append((list(tokens), scores.logits.shape[0]))
        return self

    def __call__(self, draft: Draft, logits: Tensor, request: Request) -> Verdict:
        self.judged.append(logits.shape[0])
        return super().__call__(draft, logits, request)


class NotingTarget(StubModel):
    """Notes how its sessions are started, and which outputs they are asked for."""

    def __init__(self) -> None:
        super().__init__(copying(1))
        self.starts: list[tuple[int, SessionOptions]] = []
        self.output_specs: list[OutputSpec] = []

    def start(self, source: Source, room: int, session_options: SessionOptions) -> NotingSession:
        self.starts.append((room, session_options))
        return NotingSession(self, list(source.prompt[:-1]))


class NotingSession(StubSession):
    def extend(self, rows: Rows, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        self._model.output_specs.append(output_spec)
        return super().extend(rows, output_spec)


@pytest.mark.parametrize("streamed", [True, False])
def test_each_part_gets_what_it_asks_for(streamed: bool) -> None:
    """A rule that reads the round sees the committed tokens and all scores, but judges none of the
    probes.
    """
    target, rule = NotingTarget(), NotingRule()
    drafter, request = NotingDrafter(target), Request(Source((4, 5)), Limits(2, 3))
    method, trace = DraftThenVerify(target, drafter, rule), Trace()
    if streamed:
        assert list(method.stream(request, trace)) == [[6], [7], [8]]
    else:
        assert method.decode(request, trace) == [4, 5, 6, 7, 8]
    ((room, session_options),) = target.starts
    assert room == 3 and session_options.forwards is trace.forwards
    prepared, started, *rounds = drafter.received
    assert prepared == ("prepare", request) and prepared[1] is request
    assert started[:2] == ("start", request) and started[1] is request
    assert isinstance(started[2], NotingSession)
    assert rounds == [([5], 3, 6), ([6], 3, 7), ([7], 3, 8)]
    assert rule.rounds == [([4, 5], 3), ([4, 5, 6], 3), ([4, 5, 6, 7], 3)]
    assert rule.judged == [2] * 3
    assert target.output_specs == [OutputSpec(head_input=True, hidden=(1,))] * 3


class AcceptsOnce(ExactMatch):
    """Accepts the draft of a text's first round."""

    def begin(self, request: Request) -> None:
        self._is_first = True

    def __call__(self, draft: Draft, logits: Tensor, request: Request) -> Verdict:
        self._is_first, is_first = False, self._is_first
        if not is_first:
            return Verdict((), int(logits[0].argmax()))
        return super().__call__(draft, logits, request)


def test_a_rule_keeps_the_state_of_one_text() -> None:
    target, request = StubModel(copying(1)), Request(Source((4,)), Limits(1, 5))
    method = DraftThenVerify(target, ModelDrafter(target, 2), AcceptsOnce())
    for trace in (Trace(), Trace()):
        assert method.decode(request, trace) == [4, 5, 6, 7, 8, 9]
        assert [one.accepted for one in trace.rounds] == [2, 0, 0]
    rounds = [recorded for recorded, _ in recorded_rounds(method, request)]
    assert [recorded.verdict.path for recorded in rounds] == [(0, 1), (), ()]
    # as it was asked: its distribution of a round is computed later
    assert [recorded.rule._is_first for recorded in rounds] == [True, False, False]


def test_a_rule_that_asks_for_nothing_gets_logits_alone() -> None:
    target, request = NotingTarget(), Request(Source((4, 5)), Limits(2, 3))
    DraftThenVerify(target, NotingDrafter(target), ExactMatch()).decode(request, Trace())
    assert target.output_specs == [ALL_LOGITS] * 3


def test_drafts_keep_to_the_positions_that_are_left() -> None:
    class Long(NoDraft):
        drafts_nothing = False

        def propose(self, tokens: list[int]) -> Draft:
            return Draft(torch.arange(tokens[-1] + 1, tokens[-1] + 6))

    target = StubModel(copying(1))
    request, trace = Request(Source((0,)), Limits(1, 7, positions=7)), Trace()
    assert DraftThenVerify(target, Long(target), ExactMatch()).decode(request, trace) == list(
        range(8)
    )
    assert [len(each.drafted) for each in trace.rounds] == [5, 0] and max(target.fed) == 6


@pytest.mark.parametrize("verify_tail", [True, False])
def test_what_is_drafted_after_the_end_counts_nowhere(verify_tail: bool) -> None:
    class Blind(NoDraft):
        drafts_nothing = False

        def propose(self, tokens: list[int]) -> Draft:
            return Draft(torch.tensor([1, 2, 3, 4]))

    target = StubModel(copying(1))
    ended = frozenset([3])
    tokens, trace = decode(
        target, Blind(target), ExactMatch(), Source((0,)), 8, ended, verify_tail=verify_tail
    )
    assert tokens == [0, 1, 2, 3] and trace.drafted == trace.accepted == 3


def test_an_unverified_tail_saves_the_last_target_call() -> None:
    calls = {}
    for verify_tail in (True, False):
        target = StubModel(copying(1))
        drafter = ModelDrafter(StubModel(copying(1)), 4, 0.5)
        tokens, trace = decode(
            target, drafter, Rollback(1.0), Source((0,)), 8, verify_tail=verify_tail
        )
        assert tokens == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        calls[verify_tail] = trace.target_calls
    assert calls == {True: 2, False: 1}


@pytest.mark.fast("0", "5")
@pytest.mark.parametrize("seed", range(6))
def test_rounds_are_the_same_if_the_drafter_does_not_look_for_end_tokens(seed: int) -> None:
    """As on an accelerator, where it drafts on behind an end token."""
    target, draft, source = random_pair("llama", seed)
    free = autoregressive(oracles("llama", seed)[0], source.prompt, finished(source, 24, NEVER))
    end = an_end_token(free, len(source.prompt), 5 + seed)
    found, forwards = [], []
    for looks in (True, False):
        drafter = ModelDrafter(draft, 5)
        drafter.stop_on_eos = looks
        tokens, trace = decode(target, drafter, ExactMatch(), source, end=end)
        found.append(
            (tokens, [(each.drafted, each.accepted, each.next_token) for each in trace.rounds])
        )
        forwards.append(trace.draft_calls)
    assert found[0] == found[1]
    assert forwards[0] <= forwards[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha_is_the_overlap_of_both_models_at_every_token_of_the_targets_own_text(
    temperature: float,
) -> None:
    tables = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    large, small = (StubModel(lambda y, own=own: own[y[-1]]) for own in tables)
    request = Request(
        Source((0,)), Limits(1, 60), Sampling(temperature), torch.Generator().manual_seed(1)
    )
    trace = Trace()
    text = DraftThenVerify(large, ModelDrafter(small, 2), OverlapMeasurement()).decode(
        request, trace
    )
    if temperature:
        p, q = (own[text[:-1]].softmax(-1) for own in tables)
        expected = torch.minimum(p, q).sum(-1).tolist()
    else:
        best = tables[:, text[:-1]].argmax(-1)
        assert text[1:] == best[0].tolist()  # the target's own
        expected = (best[0] == best[1]).double().tolist()
    measured = [one.stats["expected_acceptance"][0] for one in trace.rounds]
    assert measured == pytest.approx(expected) and len(measured) == 60 and trace.accepted == 0
    assert mean_statistic([trace], "expected_acceptance") == pytest.approx(sum(expected) / 60)


def test_a_tree_whose_parents_do_not_come_first_is_refused_with_its_drafters_name() -> None:
    """Fault: with processors, which read each row's branch, the text never came to its end."""

    class Circular(Drafter):
        drafts_trees = True

        def propose(self, tokens: list[int]) -> Draft:
            return Draft(torch.tensor([5, 6]), torch.tensor([1, 0]))

    target = StubModel(lambda tokens: torch.zeros(10))
    with pytest.raises(UserError, match="Circular has drafted a tree in which node 0 has the"):
        decode(target, Circular(), ExactMatch(), Source((1, 2)))


class Proposing(Drafter):
    """Proposes what it is given."""

    drafts_trees = False

    def __init__(self, proposal: object) -> None:
        self._proposal = proposal

    def propose(self, tokens: list[int]) -> Draft:
        return self._proposal


class Deciding(ExactMatch):
    """Decides what it is given."""

    def __init__(self, decision: object) -> None:
        self._decision = decision

    def __call__(self, draft: Draft, logits: Tensor, request: Request) -> Verdict:
        return self._decision


def test_what_an_extension_gives_is_refused_with_its_name() -> None:
    target, pair = StubModel(lambda tokens: torch.zeros(10)), Draft(torch.tensor([5, 6]))
    uneven = Draft(pair.tokens, probs=torch.full((2, 10), 0.2))
    tree = Draft(pair.tokens, torch.tensor([-1, -1]))
    with pytest.raises(UserError, match="from probs that sum to 2"):  # of a text of one round too
        decode(target, Proposing(uneven), ExactMatch(), Source((1, 2)), max_new_tokens=1)
    for drafter, rule, message in (
        (Proposing(None), ExactMatch(), "Proposing must draft a Draft, got NoneType"),
        (Proposing(uneven), ExactMatch(), "Proposing has drafted token 0 from probs that sum to 2"),
        (Proposing(tree), ExactMatch(), "Proposing has drafted a tree, and says drafts_trees ="),
        (Proposing(pair), Deciding(2), "Deciding must return a Verdict, got int"),
        (Proposing(pair), Deciding(Verdict((1,), 3)), r"Deciding has accepted the nodes \[1\]"),
        (Proposing(pair), Deciding(Verdict((0,), 10)), "Deciding must emit a token from 0 to 9"),
    ):
        with pytest.raises(UserError, match=message):
            decode(target, drafter, rule, Source((1, 2)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("engine", "token"),
    # native counts a negative number from the end of the embeddings
    [
        ("native", VOCABULARY),
        *((engine, i) for engine in ("kernels", "hf") for i in (VOCABULARY, -1)),
    ],
)
def test_a_token_that_the_target_does_not_have_is_refused_with_its_drafters_name(
    family: str, token: int, engine: str, checkpoints: Path
) -> None:
    """Fault: the engine's IndexError named no part of the policy."""
    if engine == "kernels" and why_no_kernels(torch.device("cpu"), torch.float32) is not None:
        pytest.skip("no CPU kernels here")
    target = load_model(str(checkpoints / family), None, "cpu", torch.float32, engine)
    drafter = Proposing(Draft(torch.tensor([5, token])))
    with pytest.raises(
        UserError, match=f"Proposing has drafted token {token}, which the target can"
    ):
        decode(target, drafter, ExactMatch(), target.source([5, 9]))


class FaultyEngine(StubModel):
    """An engine that cannot run two rows at once."""

    def start(self, source: Source, room: int, *_: object) -> StubSession:
        session = super().start(source, room)
        extend = session.extend

        def fail(rows: Rows, *output_spec: OutputSpec) -> Scores:
            if len(as_rows(rows).tokens) > 1:
                raise IndexError("slot 7 lies behind a cache of 6 slots")
            return extend(rows, *output_spec)

        session.extend = fail
        return session


def test_another_fault_of_an_engine_is_not_laid_to_the_drafter() -> None:
    """Fault: an IndexError for a position was shown as tokens that the target does not have."""
    target, draft = FaultyEngine(lambda tokens: torch.zeros(10)), Draft(torch.tensor([5, 6]))
    with pytest.raises(IndexError, match="slot 7 lies behind"):
        decode(target, Proposing(draft), ExactMatch(), Source((1, 2)))


class Yielding(TokenLoop):
    """Emits what it is given."""

    draft_shape = DraftShape.ROWS

    def __init__(self, emitted: Iterable[object]) -> None:
        self.target, self._emitted = StubModel(lambda tokens: torch.zeros(10)), emitted

    def lossless(self, sampling: Sampling) -> bool:
        return False

    def rounds(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        yield from self._emitted


@pytest.mark.parametrize(
    ("emitted", "message"),
    [
        (itertools.repeat([5]), "has emitted more than the 4 tokens"),
        ([[5, 6], [7, 8], [9]], "has emitted more than the 4 tokens"),
        (itertools.repeat([]), r"must yield a list of one or more tokens each round, got \[\]"),
        ([torch.tensor([5])], r"a list of one or more tokens each round, got tensor"),
        ([5], r"a list of one or more tokens each round, got 5"),
    ],
    ids=["for ever", "one too many", "nothing for ever", "a tensor", "a number"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_loop_of_ones_own_that_would_not_end_is_refused(
    emitted: Iterable[object], message: str, streamed: bool
) -> None:
    method, request = Yielding(emitted), Request(Source((1, 2)), Limits(2, 4))
    with pytest.raises(UserError, match=f"Yielding .*{message}"):
        list(method.stream(request, Trace())) if streamed else method.decode(request, Trace())
    full = Yielding([[5], [6, 7], [8]])
    assert full.decode(request, Trace()) == [1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (None, "must return the list of the prompt's tokens, .* got None"),
        ((1, 2, 5), "must return the list of the prompt's tokens"),
        ([5, 6, 7], r"got a list that begins \[5, 6, 7\] for a prompt that begins \[1, 2\]"),
        ([1, 2, *[5] * 5], "has emitted 5 tokens, where a text may have 4"),
    ],
)
def test_what_is_no_text_of_a_method_is_refused(tokens: object, message: str) -> None:
    """Fault: a method that returns the emitted tokens alone loses as many as the prompt has."""
    method: Method = Yielding([])
    request = Request(Source((1, 2)), Limits(2, 4))
    with pytest.raises(UserError, match=f"Yielding .*{message}"):
        require_text(method, request, tokens)
    for right in ([1, 2, 5], [1, 2, 5, 6, 7, 8], [1, 2]):
        require_text(method, request, right)
