"""A drafter with a part of the head: its own distribution among these tokens, on every engine, and
exact sampling.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from bild_lab.engine import decode
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods.early_exit.views import EarlyExit
from bild_lab.engine.methods.fr_spec import NarrowModel, NarrowSession
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter, draft_chain
from bild_lab.engine.methods.speculative.draft_tree import ModelTreeDrafter, grow_tree
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import ChainResult, ChainSpec, LoadedModel, TreeSpec
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.certificate import DEFECT, EXACT
from bild_lab.lab.measure.sampled_certificate import DRAWS, OUTPUT, certify_sampled
from bild_lab.screening.recorded_model import RecordedModel
from tests.engine.methods.drafters.chances import by_context, require_targets_distribution
from tests.engine.models.test_quantized import CASES
from tests.engine.vocabularies.foreign import foreign
from tests.policies import in_memory
from tests.sessions import needs_kernels
from tests.stubs import StubModel
from tests.tiny import END, TINY, VOCABULARY, relative_of

TOKENS = [END, 4, 5, 9, 12, 13, 17, 20, 21, 22, 30, 33, 39]
OTHERS = [token for token in range(VOCABULARY) if token not in TOKENS]
ENGINES = [pytest.param("kernels", marks=needs_kernels), "native", "hf"]
WARM = Sampling(temperature=0.8)
LESS = float("-inf")


@cache
def model_of(family: str, engine: str, bits: int | None = None) -> tuple[LoadedModel, Source]:
    """Its widths are multiples of 32, so that its weights can be rounded."""
    model = in_memory(CASES[family][0](), engine)
    model.bits = bits
    return model, CASES[family][2]


def begun(model: LoadedModel, source: Source) -> NarrowSession:
    return NarrowModel(model, DraftVocabulary(TOKENS)).start(source, 40)


def test_a_mask_keeps_these_scores_and_a_row_without_any_of_them() -> None:
    forced = [LESS, LESS, 0.0, LESS, LESS]  # to token 2, by a processor
    masked = DraftVocabulary([3, 1, 3]).masked(torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], forced]))
    assert masked.tolist() == [[LESS, 1.0, LESS, 3.0, LESS], forced]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", CASES)
def test_scores_are_those_of_the_whole_head_and_the_forwards_say_how_many(
    family: str, engine: str
) -> None:
    model, source = model_of(family, engine)
    narrow, tokens = begun(model, source), [source.prompt[-1], 7, 30]
    ours, whole = narrow.extend(tokens).logits, model.start(source, 40).extend(tokens).logits
    torch.testing.assert_close(
        ours[:, TOKENS], whole[:, TOKENS], rtol=0, atol=0 if engine == "kernels" else 1e-5
    )
    assert ours.shape == whole.shape and bool((ours[:, OTHERS] == LESS).all())
    assert narrow.forwards[-1].vocabulary == (None if engine == "hf" else len(TOKENS))


@pytest.mark.fast("llama-None", "t5-4")
@needs_kernels
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("family", CASES)
def test_the_kernels_draft_the_tokens_and_the_distributions_of_a_mask(
    family: str, bits: int | None
) -> None:
    model, source = model_of(family, "kernels", bits)
    feed, ends = [source.prompt[-1], 11, 30], frozenset([END])
    narrow, whole = (
        each.extend(feed).logits[:, TOKENS]
        for each in (begun(model, source), model.start(source, 40))
    )
    # of GGML
    assert torch.equal(narrow, whole) and model.packed.head.type == {None: 0, 8: 8, 4: 2}[bits]
    uniforms = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for sampling, threshold in ((Sampling(), None), (WARM, None), (Sampling(), 0.12)):
        chain = ChainSpec(
            7,
            ends,
            threshold,
            sampling.temperature,
            None if sampling.greedy else uniforms,
            keeps_probs=True,
        )
        by_program, by_steps = (begun(model, source) for _ in range(2))
        one, other = by_program.draft(feed, chain), draft_chain(by_steps, feed, chain, sampling)
        assert list(one.tokens) == list(other.tokens) and {*one.tokens} <= {*TOKENS}
        assert (one.forwards, one.fallback) == (other.forwards, other.fallback)
        assert one.confidences == pytest.approx(other.confidences, abs=1e-6)
        torch.testing.assert_close(one.unscaled_probs, other.unscaled_probs, atol=1e-6, rtol=1e-5)
        if not sampling.greedy:
            torch.testing.assert_close(one.probs, other.probs, atol=1e-6, rtol=1e-5)
        assert by_program.forwards == by_steps.forwards
    tree_spec = TreeSpec(nodes=9, depth=4, width=3, children=2, end_tokens=ends)
    one, other = (
        begun(model, source).draft(feed, tree_spec),
        grow_tree(begun(model, source), feed, tree_spec, Sampling()),
    )
    assert (one.tokens, one.parents, one.forwards[1:]) == (
        other.tokens,
        other.parents,
        other.forwards[1:],
    )
    assert {*one.tokens} <= {*TOKENS} and len(one.tokens) > 4


# rows of which every token has TARGET / DRAFTER, among the tokens 0 and 2, 1/2 or at least 1
TARGET = ([1 / 4, 1 / 4, 1 / 2], [1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 4, 1 / 4])
DRAFTER = ([1 / 4, 1 / 2, 1 / 4], [1 / 6, 1 / 2, 1 / 3], [1 / 4, 1 / 2, 1 / 4])


def sampled_exactly(monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    drafter = ModelDrafter(StubModel(by_context(DRAFTER)), 2, vocabulary=DraftVocabulary([0, 2]))
    method = DraftThenVerify(StubModel(by_context(TARGET)), drafter, SpeculativeSampling())
    traces = require_targets_distribution(method, by_context(TARGET), (0,), 3, monkeypatch)
    assert set(traces) == {(0, *rest) for rest in product(range(3), repeat=3)}
    return [trace for several in traces.values() for trace in several]


def test_sampled_text_is_the_targets_though_the_drafter_lacks_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = [each for trace in sampled_exactly(monkeypatch) for each in trace.rounds]
    assert {token for each in rounds for token in each.drafted} == {0, 2}


def test_a_distribution_that_is_not_normalized_anew_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_normalized(session: NarrowSession, rows: list[int], chain: ChainSpec) -> ChainResult:
        drafted = draft_chain(session, rows, chain, Sampling(temperature=1.0))
        # what the whole head gives them, as the other token has 1/2
        return replace(drafted, probs=drafted.probs / 2)

    monkeypatch.setattr(NarrowSession, "draft", not_normalized)
    with pytest.raises(UserError, match="probs that sum to 0.5"):  # by the loop
        sampled_exactly(monkeypatch)
    monkeypatch.setattr(decode, "require_distributions", lambda *_: None)
    with pytest.raises(AssertionError):  # by what is emitted
        sampled_exactly(monkeypatch)


def certificates(draft: LoadedModel, vocabulary: DraftVocabulary) -> set[tuple[str, str | None]]:
    """Verdicts and what found a defect, of sampled texts."""
    target, found = in_memory(TINY["llama"](0), "kernels"), set()
    method = DraftThenVerify(
        target, ModelDrafter(draft, 3, vocabulary=vocabulary), SpeculativeSampling()
    )
    for seed in range(4):
        limits = Limits(3, 12, frozenset([END]))
        first, again = (
            Request(Source((2, 5, 9)), limits, WARM, torch.Generator().manual_seed(seed))
            for _ in "12"
        )
        one = certify_sampled(method, target, again, method.decode(first, Trace())[3:])
        found.add((one.verdict, one.check))
    return found


@needs_kernels
def test_certificates_find_every_context_exact_and_planted_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = in_memory(relative_of(TINY["llama"](0), 5, 0.2), "kernels")
    assert certificates(draft, DraftVocabulary(TOKENS)) == {(EXACT, None)}
    off_by_one = DraftVocabulary(TOKENS)
    shifted = off_by_one.tokens.roll(1)
    # the rows of the head lie as before
    draft.packed._model_for(off_by_one).tokens = shifted.data_ptr()
    assert (DEFECT, DRAWS) in certificates(draft, off_by_one)
    widened = DraftVocabulary.widened

    def not_normalized(
        own: DraftVocabulary, part: torch.Tensor, width: int, others: float
    ) -> torch.Tensor:
        return widened(own, part * (others or 0.7), width, others)

    monkeypatch.setattr(DraftVocabulary, "widened", not_normalized)
    monkeypatch.setattr(
        DraftVocabulary,
        "masked",
        lambda own, logits: logits.index_fill(1, torch.tensor(OTHERS), LESS),
    )
    with pytest.raises(UserError, match="probs that sum to 0.7"):
        certificates(draft, DraftVocabulary(TOKENS))
    monkeypatch.setattr(decode, "require_distributions", lambda *_: None)
    assert (DEFECT, OUTPUT) in certificates(draft, DraftVocabulary(TOKENS))


@pytest.mark.fast("llama-kernels")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", CASES)
def test_greedy_texts_are_the_targets_and_a_record_gives_the_same_rounds(
    family: str, engine: str
) -> None:
    source = CASES[family][2]
    live = [
        in_memory(make, engine) for make in (TINY[family](0), relative_of(TINY[family](0), 3, 0.2))
    ]
    request = Request(source, Limits(len(source.prompt), 12, frozenset([END])))
    expected = DraftThenVerify(live[0], NoDraft(live[0]), SpeculativeSampling()).decode(
        request, Trace()
    )
    drafters = {
        "chain": lambda large, small: ModelDrafter(
            small, 4, 0.2, vocabulary=DraftVocabulary(TOKENS)
        ),
        "tree": lambda large, small: ModelTreeDrafter(
            small, 6, 3, 2, 2, vocabulary=DraftVocabulary(TOKENS)
        ),
        "view": lambda large, small: ModelDrafter(
            EarlyExit(large, 1), 3, vocabulary=DraftVocabulary(TOKENS)
        ),
    }
    for name, made in drafters.items():
        rounds = []
        for models in (live, [RecordedModel(each) for each in live]):
            method, trace = (
                DraftThenVerify(models[0], made(*models), SpeculativeSampling()),
                Trace(),
            )
            assert method.decode(request, trace) == expected, name
            rounds.append([(each.drafted, each.accepted) for each in trace.rounds])
            assert {one.vocabulary for one in trace.forwards} == (
                {None} if engine == "hf" else {None, len(TOKENS)}
            )
        assert rounds[0] == rounds[1] and {
            token for drafted, _ in rounds[0] for token in drafted
        } <= {*TOKENS}


def test_a_view_has_no_distribution_of_its_own_and_another_vocabulary_is_refused() -> None:
    target, vocabulary = in_memory(TINY["llama"](0), "native"), DraftVocabulary(TOKENS)
    assert ModelDrafter(EarlyExit(target, 1), 3, vocabulary=vocabulary).draws_from is None
    assert isinstance(ModelDrafter(target, 3, vocabulary=vocabulary).draws_from, NarrowModel)
    with pytest.raises(UserError, match="set policy.draft_vocabulary=null"):
        NarrowModel(foreign(TINY["llama"](0), "native", 1, target), vocabulary)
