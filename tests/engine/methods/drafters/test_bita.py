"""BiTA's decoding against Algorithm 1 without a cache, on random adapters and on masks that know
the text.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.bita import PROMPTS, BitaTarget, MaskTokenDrafter
from bild_lab.engine.methods.markov import MarkovHead
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from tests.engine.loops import NEVER
from tests.engine.methods.modules.oracle import (
    Step,
    algorithm_1,
    straightforward,
    uncached_masks,
)
from tests.engine.methods.modules.tiny import misled, random_adapter
from tests.engine.methods.speculative.exact import TARGET, outcomes, sampled, targets
from tests.policies import in_memory
from tests.stubs import StubModel, uncached
from tests.tiny import START, VOCABULARY, tiny_llama

DECODINGS = ("efficient_tree", "full_tree", "straightforward")
WIDTHS = [8, 4, 2]  # of 40 tokens, so that random masks are right now and then


def expected_steps(
    decoding: str, seed: int, prompt: str, source: Source, length: int
) -> list[Step]:
    module = tiny_llama(seed).double()
    large = uncached(module, source)
    masks = uncached_masks(module, random_adapter(module.config, prompt))
    if decoding == "straightforward":
        return straightforward(large, masks, list(source.prompt), 3, length)
    return algorithm_1(
        large, masks, list(source.prompt), WIDTHS, length, full=decoding == "full_tree"
    )


def flattened(candidates: list[list[int]], full: bool) -> tuple[int, ...]:
    """A tree's tokens in the order of its rows: a full tree repeats each depth under every node
    above it.
    """
    times, tokens = 1, []
    for level in candidates:
        tokens += level * times
        times *= len(level) if full else 1
    return tuple(tokens)


@pytest.mark.fast("efficient_tree-deep", "full_tree-none")
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("decoding", DECODINGS)
def test_every_round_is_that_of_algorithm_1(decoding: str, prompt: str) -> None:
    accepted = 0
    for seed, length in ((0, 40), (1, 30)) if decoding == "straightforward" else ((0, 14), (1, 9)):
        words = torch.randint(3, VOCABULARY, (5,), generator=torch.Generator().manual_seed(seed))
        source = Source((START, *words.tolist()))
        module = tiny_llama(seed).double()
        adapter = random_adapter(module.config, prompt).double().requires_grad_(False)
        target = in_memory(module, "native" if seed else "hf")
        drafter = MaskTokenDrafter(target, adapter, decoding, WIDTHS)
        trace, request = Trace(), Request(source, Limits(len(source.prompt), length, NEVER))
        tokens = DraftThenVerify(BitaTarget(target, adapter), drafter, ExactMatch()).decode(
            request, trace
        )
        steps = expected_steps(decoding, seed, prompt, source, length)
        expected = [flattened(step.candidates, decoding == "full_tree") for step in steps]
        assert [each.drafted for each in trace.rounds] == expected
        emitted = [token for step in steps for token in step.appended]
        assert tokens == [*source.prompt, *emitted[:length]]
        accepted += trace.accepted
    assert accepted


def copying() -> StubModel:
    """Counts up modulo 10; mask j after n predicts n + j + 2."""

    def next_logits(tokens: list[int]) -> Tensor:
        masks = [token for token in tokens if token >= 10]
        assert masks == list(range(10, 10 + len(masks)))
        text = tokens[: len(tokens) - len(masks)]
        return torch.nn.functional.one_hot(
            torch.tensor((text[-1] + 1 + len(masks)) % 10), 10
        ).double()

    return StubModel(next_logits)


def test_no_probe_is_run_for_tokens_after_the_length_limit() -> None:
    model = copying()
    checkpoint = SimpleNamespace(columns=10)
    target = SimpleNamespace(checkpoint=checkpoint, device=torch.device("cpu"))
    adapter = SimpleNamespace(
        config=SimpleNamespace(mask_tokens=3), markov=None, draft_vocabulary=None
    )
    drafter = MaskTokenDrafter(target, adapter, "efficient_tree", 2)
    request = Request(Source((0,)), Limits(1, 4, NEVER))
    DraftThenVerify(model, drafter, SpeculativeSampling()).decode(request, Trace())
    # the first token and 3 masks, for the 3 tokens that may follow; then it, 6 candidates, and 2
    # masks for each of 7
    assert len(model.fed) == 4 + 1 + 6 + 14
    assert model.fed[:5] == [0, 10, 11, 12, 1]
    assert model.fed[-14:] == [10, 11] * 7


class Scripted(SpeculativeSampling):
    """Speculative sampling whose outcomes are dictated; behind the script decoding stops, and tells
    what could come.
    """

    def __init__(self, script: list[Verdict]) -> None:
        super().__init__()
        self._script = iter(script)

    def __call__(self, draft: Draft, logits: Tensor, request: Request) -> Verdict:
        verdict = next(self._script, None)
        if verdict is None:
            raise Unscripted(draft, outcomes(SpeculativeSampling(), draft, logits, request))
        return verdict


class Unscripted(Exception):
    def __init__(self, draft: Draft, law: dict[tuple[int, ...], float]) -> None:
        super().__init__("what comes here is chance")
        self.draft, self.law = draft, law


def path_of(draft: Draft, text: tuple[int, ...]) -> Verdict:
    path: list[int] = []
    for token in text[:-1]:
        nodes = list(zip(draft.parent_list, draft.token_list, strict=True))
        path.append(nodes.index((path[-1] if path else -1, token)))
    return Verdict(tuple(path), text[-1])


def masked_table(tokens: list[int]) -> Tensor:
    """Token 0, 1 or 2 by a table of the last one; masks, 3 and 4, by one of their own, which leans
    on the text.
    """
    masks = [token for token in tokens if token > 2]
    if not masks:
        return TARGET[tokens[-1]].log()
    lean = torch.tensor([0.3, 0.5, 0.2], dtype=torch.double).roll(
        tokens[-1 - len(masks)] + len(masks)
    )
    return lean.log()


@pytest.mark.fast("straightforward-right")
@pytest.mark.parametrize("markov", ["without", "right", "wrong"])
@pytest.mark.parametrize("decoding", DECODINGS)
@torch.no_grad()
def test_sampled_texts_have_exactly_the_targets_distribution(
    decoding: str, markov: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that can happen in three tokens, by the whole loop; also with a Markov head that is told
    the wrong tokens.
    """
    if markov == "wrong":
        misled(monkeypatch)
    head = None if markov == "without" else MarkovHead(3, 2)
    if head is not None:
        head.after.normal_(generator=torch.Generator().manual_seed(1))
    checkpoint = SimpleNamespace(columns=3)
    target = SimpleNamespace(checkpoint=checkpoint, device=torch.device("cpu"), engine="native")
    adapter = SimpleNamespace(
        config=SimpleNamespace(mask_tokens=2), markov=head, draft_vocabulary=None
    )
    length, depths = 3, set()
    law: dict[tuple[int, ...], float] = defaultdict(float)

    def walk(script: list[Verdict], chance: float) -> None:
        drafter = MaskTokenDrafter(target, adapter, decoding, 2)
        request = Request(
            Source((0,)), Limits(1, length), Sampling(temperature=1.0), sampled().generator
        )
        try:
            tokens = DraftThenVerify(StubModel(masked_table), drafter, Scripted(script)).decode(
                request, Trace()
            )
        except Unscripted as pause:
            for text, share in pause.law.items():
                depths.add(len(text) - 1)
                walk([*script, path_of(pause.draft, text)], chance * share)
        else:
            law[tuple(tokens[1:])] += chance

    walk([], 1.0)
    joint = torch.zeros([3] * length, dtype=torch.double)
    for text, chance in law.items():
        joint[text] = chance
    torch.testing.assert_close(joint, targets(TARGET, length), atol=1e-6, rtol=0)
    assert depths == {0, 1, 2}
