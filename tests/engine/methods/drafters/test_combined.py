"""Hierarchies and hybrids: what drafters made of drafters draft, learn and refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.eagle.drafter import EagleDrafter
from bild_lab.engine.methods.eagle.module import EAGLE
from bild_lab.engine.methods.lookup.lookahead import LookaheadDrafter
from bild_lab.engine.methods.lookup.prompt_lookup import PromptLookup
from bild_lab.engine.methods.speculative.combined_drafters import (
    HybridDrafter,
    SpeculativeDrafter,
)
from bild_lab.engine.methods.speculative.draft_model import AdaptiveWindow, ModelDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.speculative.synthetic import SyntheticDrafter
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import ALL_LOGITS, OutputSpec, Scores, TreeSpec, merged_outputs
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_policy, knob_values, resolved_policy
from bild_lab.lab.store.hashing import named_files
from tests.engine.loops import (
    FAMILIES,
    NEVER,
    TreeDrafter,
    autoregressive,
    copying,
    decode,
    finished,
    longer_than,
    random_pair,
)
from tests.engine.methods.drafters.naive import eagle_behind, grown, texts_before
from tests.engine.methods.modules.tiny import files_of, random_eagle
from tests.policies import in_memory, load
from tests.sessions import rounds_of
from tests.stubs import SESSION, ModuleModel, StubModel, uncached
from tests.tiny import START, relative_of, tiny_llama

INNER: dict[str, Callable[[ModuleModel], Drafter]] = {
    "copied": lambda middle: PromptLookup(middle, window=3, longest_match=2),
    "modelled": lambda middle: ModelDrafter(ModuleModel(relative_of(middle.module, 7, 0.1)), 3),
}


@pytest.mark.fast("copied-llama")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inner", INNER)
def test_it_drafts_what_the_model_in_the_middle_would_alone(family: str, inner: str) -> None:
    target, middle, source = random_pair(family, 2, noise=0.03)
    drafter = SpeculativeDrafter(middle, INNER[inner](middle), 5)
    _, trace = decode(target, drafter, ExactMatch(), source, 20)
    small = uncached(middle.module, source)
    y = list(source.prompt)
    for each in trace.rounds:
        room = len(source.prompt) + 20 - len(y)
        assert (
            list(each.drafted)
            == autoregressive(small, tuple(y), longer_than(len(y) + min(5, room)))[len(y) :]
        )
        y += [*each.drafted[: each.accepted], each.next_token]
    assert trace.rollbacks > 0 and trace.accepted > 0


def test_the_model_in_the_middle_runs_once_for_several_tokens_that_it_drafts() -> None:
    target, middle, small = (StubModel(copying(1)) for _ in range(3))
    drafter = SpeculativeDrafter(middle, ModelDrafter(small, 2), 6)
    _, trace = decode(target, drafter, SpeculativeSampling(), Source((0,)), 14)
    assert [each.accepted for each in trace.rounds] == [6, 6]
    # two inner rounds of two drafts and a token of the model's own: 2 forwards in the middle, 4
    # below
    assert [each.draft_calls for each in trace.rounds] == [6, 6]
    assert middle.fed == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]  # every committed token once


def test_each_token_comes_with_the_middle_models_distribution() -> None:
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double()
    middle, small = StubModel(lambda t: table[t[-1]]), StubModel(lambda t: 0.5 * table[t[-1]])
    sampling = Sampling(temperature=0.7, top_k=4)
    drafter = SpeculativeDrafter(middle, ModelDrafter(small, 3), 8)
    drafter = drafter.start(
        Request(Source((0,)), Limits(1, 20), sampling, torch.Generator().manual_seed(0)), SESSION
    )
    draft = drafter.propose([0])
    assert len(draft) == 8
    before = torch.tensor([0, *draft.token_list[:-1]])
    assert torch.equal(draft.probs, sampling.probs(table[before]))


def test_an_inner_drafter_of_trees_is_refused() -> None:
    with pytest.raises(
        UserError,
        match="inner drafter must draft chains, but TreeDrafter drafts trees; use a chain",
    ):
        SpeculativeDrafter(StubModel(copying(1)), TreeDrafter([]), 3)


def test_the_inner_drafter_observes_what_the_middle_model_chose_and_what_to_forget() -> None:
    observed: list[object] = []

    class Noting(ModelDrafter):
        def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
            observed.append(scores.logits.argmax(-1).tolist())

        def rollback(self, length: int) -> None:
            observed.append(length)

    middle, small = StubModel(copying(1)), StubModel(copying(1))
    drafter = SpeculativeDrafter(middle, Noting(small, 2), 3)
    drafter = drafter.start(Request(Source((0,)), Limits(1, 20)), SESSION)
    drafter.propose([0])
    drafter.rollback(2)
    assert observed == [[1, 2, 3], 2]


def test_inner_drafts_stay_within_the_positions_that_the_models_have() -> None:
    middle, small = StubModel(copying(1)), StubModel(copying(1))
    drafter = SpeculativeDrafter(middle, ModelDrafter(small, 5), 3)
    drafter = drafter.start(Request(Source((0,)), Limits(1, 20, positions=3)), SESSION)
    assert drafter.propose([0]).token_list == [1, 2, 3]
    assert len(middle.fed) == 3


def test_an_inner_drafter_prepares_before_the_text() -> None:
    target, middle = StubModel(copying(1)), StubModel(copying(1))
    drafter = SpeculativeDrafter(middle, SyntheticDrafter(StubModel(copying(1)), 1.0, 2), 4)
    request = Request(Source((0,)), Limits(1, 9))
    tokens = DraftThenVerify(target, drafter, ExactMatch()).decode(request, Trace())
    assert tokens == list(range(10))


TARGET = StubModel(lambda _: torch.zeros(9))
REQUEST = Request(Source((0,)), Limits(1, 50))


class Fixed(Drafter):
    """Drafts a chain of so many tokens, and notes what it observes."""

    drafts_trees = False

    def __init__(
        self,
        *sizes: int,
        required_outputs: OutputSpec = ALL_LOGITS,
        gives: frozenset[str] = frozenset(),
    ) -> None:
        self._sizes, self.observed = list(sizes), []
        self.required_outputs, self.gives = required_outputs, gives

    def propose(self, tokens: list[int]) -> Draft:
        return Draft(torch.full((self._sizes.pop(0),), 5), calls=1)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.observed.append("own")

    def observe_other(
        self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict
    ) -> None:
        self.observed.append("other")

    def rollback(self, length: int) -> None:
        self.observed.append(length)


def test_the_second_is_asked_where_the_first_drafts_too_little() -> None:
    first, second = Fixed(3, 1, 2), Fixed(7)
    hybrid = HybridDrafter(first, second, min_depth=2)
    hybrid = hybrid.start(REQUEST, SESSION)
    found = []
    for length, accepted in ((1, 2), (4, 0), (5, 1)):
        draft = hybrid.propose([0] * length)
        found.append((len(draft), draft.calls, draft.stats["second"]))
        hybrid.observe(draft, Scores(None), Verdict(tuple(range(accepted)), 1))
    assert found == [(3, 1, False), (7, 2, True), (2, 1, False)]
    # what stands of its drafts, and where one was dropped
    assert first.observed == ["own", 3, 4, "other", "own", 6]
    # where it is not asked, how much of the text stands
    assert second.observed == [0, "other", "own", 4, 4, "other"]


def test_a_draft_that_was_drawn_is_verified_however_short_it_is() -> None:
    hybrid = HybridDrafter(Fixed(), Fixed(), min_depth=2)
    drawn = Draft(torch.tensor([5]), probs=torch.full((1, 9), 1 / 9))
    assert hybrid._is_confident(drawn) and not hybrid._is_confident(replace(drawn, probs=None))


def test_it_needs_what_either_needs_and_gives_what_both_give() -> None:
    head, states = OutputSpec(head_input=True), OutputSpec(hidden=(1, 2))
    assert merged_outputs(ALL_LOGITS, ALL_LOGITS) == ALL_LOGITS
    assert merged_outputs(ALL_LOGITS, head) == merged_outputs(head, ALL_LOGITS) == head
    assert (
        merged_outputs(head, states)
        == merged_outputs(states, head)
        == OutputSpec(head_input=True, hidden=(1, 2))
    )
    with pytest.raises(UserError, match="must read the same hidden states of the target"):
        merged_outputs(OutputSpec(hidden=(1,)), states)
    both = Fixed(gives=frozenset({"unscaled_probs"}))
    assert HybridDrafter(both, both, 1).gives == {"unscaled_probs"}
    assert HybridDrafter(both, Fixed(), 1).gives == frozenset()
    assert not HybridDrafter(both, Fixed(), 1).drafts_trees
    assert HybridDrafter(both, LookaheadDrafter(TARGET, 2, 3, 2), 1).drafts_trees
    learning = Fixed()
    learning.learns_from_texts = True
    assert HybridDrafter(learning, both, 1).learns_from_texts
    assert HybridDrafter(both, learning, 1).learns_from_texts
    assert not HybridDrafter(both, both, 1).learns_from_texts


def test_a_window_that_adapts_learns_from_its_own_drafts_alone() -> None:
    window = AdaptiveWindow(cost_ratio=0.1, max_window=4, prior=0.5, memory=1.0)
    hybrid = HybridDrafter(Fixed(3), ModelDrafter(TARGET, window), 1)
    hybrid = hybrid.start(REQUEST, SESSION)
    hybrid.observe(hybrid.propose([0]), Scores(None), Verdict((0, 1, 2), 1))
    assert hybrid._second._window.acceptance_rate == window.acceptance_rate


PAIRS = [
    ("prompt_lookup", "speculative", {"window": 3}),
    ("speculative_tree", "suffix", {"factor": 4}),
    ("token_recycling", "medusa", None),
    ("suffix", "lookahead", {"window": 3}),
]


@pytest.mark.fast("prompt_lookup-speculative-knobs0", "token_recycling-medusa-None")
@pytest.mark.parametrize(("first", "second", "knobs"), PAIRS)
def test_texts_of_any_two_are_the_targets_own(
    checkpoints: Path, first: str, second: str, knobs: dict | None
) -> None:
    files = files_of(second, Checkpoint(str(checkpoints / "llama")).config, checkpoints)
    hybrid = load(
        checkpoints,
        "llama",
        "hybrid",
        first=first,
        second=second,
        min_depth=4,
        second_knobs={**(knobs or {}), **files} or None,
    )
    vanilla, asked = load(checkpoints, "llama", "vanilla"), set()
    for prompt in ("w5 w9 w30 w12", "w7 w7 w8 w7 w7"):
        found = hybrid.generate(prompt, max_new_tokens=25)
        assert found.token_ids == vanilla.generate(prompt, max_new_tokens=25).token_ids
        asked |= {each.stats["second"] for each in found.trace.rounds}
    assert True in asked


def test_a_drafter_of_states_reads_those_of_the_text_whatever_else_ran() -> None:
    """Lookahead's rows run behind its draft; EAGLE wants the states of the prompt."""
    module, length = tiny_llama(4, layers=3).double(), 24
    target, source = in_memory(module, "native"), Source((START, 5, 9, 12))
    eagle = random_eagle(EAGLE, module.config).double().requires_grad_(False)
    first = EagleDrafter(target, eagle, "dynamic", 4, nodes=6, width=2)
    hybrid = HybridDrafter(first, LookaheadDrafter(target, 3, 3, 3), 4)
    trace, request = Trace(), Request(source, Limits(len(source.prompt), length, NEVER))
    text = DraftThenVerify(target, hybrid, ExactMatch()).decode(request, trace)
    assert text == autoregressive(
        uncached(module, source), source.prompt, finished(source, length, NEVER)
    )
    seen = {True: 0, False: 0}
    for before, each in texts_before(trace.rounds, text, len(source.prompt)):
        room, asked = len(source.prompt) + length - len(before), each.stats["second"]
        if not asked:
            tree_spec = TreeSpec(6, min(4, room), 2, 3, NEVER)
            assert list(each.drafted) == grown(eagle_behind(eagle, module, before), tree_spec)
        seen[asked] += bool(each.drafted)
    assert all(seen.values()), seen


@pytest.mark.fast("eagle-kernels", "dflash-kernels", "mtp-kernels")
@pytest.mark.parametrize("engine", ["kernels", "hf"])
@pytest.mark.parametrize("policy", ["eagle", "eagle3", "mtp", "dflash"])
def test_a_drafter_of_states_gets_those_of_the_prompt_beside_layers_of_the_target(
    policy: str, engine: str, checkpoints: Path
) -> None:
    """Fault: layers of the target had run the prompt before, and its states came out of no
    verification: DFlash drafted without them, the others ended in a traceback.
    """
    files = files_of(policy, Checkpoint(str(checkpoints / "llama")).config, checkpoints)
    prompts = [START, 5], [START, 5, 9, 30, 12] * 8
    itself = load(checkpoints, "llama", policy, engine=engine)
    expected = [rounds_of(itself.generate(prompt, 20).trace) for prompt in prompts]
    assert all(any(drafted for drafted, *_ in rounds) for rounds in expected)
    # the first of these always drafts, the others never enough
    for first, second, min_depth in (
        (policy, "early_exit_speculative", 1),
        ("early_exit_speculative", policy, 9),
        ("layer_skip", policy, 9),
    ):
        place = "first_knobs" if first == policy else "second_knobs"
        knobs = {"first": first, "second": second, "min_depth": min_depth, place: files}
        hybrid = load(checkpoints, "llama", "hybrid", engine=engine, **knobs)
        found = [rounds_of(hybrid.generate(prompt, 20).trace) for prompt in prompts]
        assert found == expected, (first, second)


def test_a_hybrid_waits_for_the_states_of_the_prompt_one_round_at_most(checkpoints: Path) -> None:
    """A prompt of one token has none, and of a hybrid within another each hears what the other has
    waited for.
    """
    files = files_of("dflash", Checkpoint(str(checkpoints / "llama")).config, checkpoints)
    inner = {"first": "dflash", "first_knobs": files, "second": "layer_skip", "min_depth": 1}
    outer = {"first": "hybrid", "first_knobs": inner, "second": "suffix", "min_depth": 1}
    for knobs in (inner, outer):
        hybrid = load(checkpoints, "llama", "hybrid", **knobs)
        for prompt, waited in (([START], 0), ([START, 5, 9, 30, 12], 1)):
            rounds = hybrid.generate(prompt, 8).trace.rounds
            drafts = [bool(each.drafted) for each in rounds[:2]]
            assert drafts == [not waited, True], (knobs["first"], prompt)


def test_files_of_the_second_policy_count_with_their_content() -> None:
    policy = resolved_policy(
        compose_policy("hybrid", {"second": "medusa", "second_knobs": {"heads": "some/folder"}})
    )
    assert named_files(policy) == {"second_knobs.heads": "some/folder"}


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_bild_that_copies_is_bild_where_no_copy_is_long_enough(
    family: str, checkpoints: Path
) -> None:
    knobs = {"fallback": 0.05, "rollback": 3.0, "window": 3}
    prompt = "w5 w9 w12 w5 w9 w12 w5"
    bild = load(checkpoints, family, "bild", **knobs).generate(prompt, 20)

    def rounds(**more: object) -> list[tuple[int, ...]]:
        found = load(checkpoints, family, "bild_hybrid", **knobs, **more).generate(prompt, 20)
        return [one.drafted for one in found.trace.rounds]

    assert rounds(min_depth=99) == [one.drafted for one in bild.trace.rounds]
    copies = rounds(min_depth=1)
    assert copies != rounds(min_depth=99)
    assert copies != rounds(min_depth=1, first="prompt_lookup")


def test_bild_that_copies_has_the_values_of_bild() -> None:
    bild, hybrid = (knob_values(compose_policy(name)) for name in ("bild", "bild_hybrid"))
    common = bild.keys() & hybrid.keys()
    assert {"fallback", "rollback", "window"} <= common
    assert [hybrid[knob] for knob in common] == [bild[knob] for knob in common]


def test_what_has_a_part_that_never_samples_never_samples() -> None:
    model = StubModel(copying(1))
    copied, synthetic = PromptLookup(model, 3, 2), SyntheticDrafter(model, 0.5, 4)
    drafters = [
        synthetic,
        HybridDrafter(synthetic, copied, 1),
        HybridDrafter(copied, synthetic, 1),
        SpeculativeDrafter(model, synthetic, 3),
    ]
    assert all(DraftThenVerify(model, each, ExactMatch()).greedy_only for each in drafters)
    assert not DraftThenVerify(model, copied, ExactMatch()).greedy_only
