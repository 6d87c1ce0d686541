"""Decoding by the Triton kernels, run by Triton's interpreter: every lossless policy gives vanilla's
tokens, a program drafts what the loop does, and a text of a batch is the one that it is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from bild_lab.engine.acceptance import BlockVerification, ExactMatch, SpeculativeSampling
from bild_lab.engine.batch_decoding import decode_batch
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import ModelDrafter
from bild_lab.engine.methods.early_exit.calm import Calm
from bild_lab.engine.methods.early_exit.views import EarlyExit, LayerSkip
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import ChainSpec, GrownTree
from bild_lab.engine.trace import Trace
from tests.engine.loops import NEVER
from tests.engine.lossless.greedy import (
    LOSSLESS,
    Case,
    Models,
    Seen,
    compare,
    emitted,
    table_of,
)
from tests.engine.lossless.random_models import random_target
from tests.policies import FAMILIES, REFUSED, WINDOWED, in_memory, is_peer
from tests.sessions import rounds_of
from tests.tiny import relative_of, source_of, tiny_llama
from tests.triton_interpreter import interpreter, needs_triton, tilings, triton_model  # noqa: F401

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

PRECISIONS = {"t5": torch.float32}  # the others run in float16
LAYERS = 2
SIZES = {family: {"head_dim": 16} for family in WINDOWED}  # normed heads are powers of two
WINDOW = 3
LONGEST = 6  # new tokens
ENDS = frozenset([7, 12])
PROMPTS = ([14, 3], [11, 25, 6, 4], [21, 8, 33])
LONG_PROMPT = [3 + 7 * index % 36 for index in range(70)]  # its first rows run by PyTorch
# alpha emits vanilla's texts whatever it drafts
POLICIES = [policy for policy in LOSSLESS if not is_peer(policy) and policy != "alpha"]
IN_WINDOWS = ("bita", "early_exit_speculative", "layer_skip", "prompt_lookup", "speculative")
CASES = [
    (policy, family)
    for policy in POLICIES
    for family in (*FAMILIES, *WINDOWED)
    if (policy, family) not in REFUSED and (family in FAMILIES or policy in IN_WINDOWS)
]
ModelsOf = Callable[[str], Models]
CasesOf = Callable[..., list[Case]]


def request_of(
    family: str, words: list[int], end_tokens: frozenset[int] = NEVER, seed: int | None = None
) -> Request:
    """A greedy request, or one that samples, with this seed."""
    source = source_of(family, words)
    limits = Limits(len(source.prompt), LONGEST, end_tokens)
    if seed is None:
        return Request(source, limits)
    return Request(source, limits, Sampling(1.0), torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models_of(tmp_path_factory: pytest.TempPathFactory) -> ModelsOf:
    """Models of a family, for all tests."""
    folder = tmp_path_factory.mktemp("tables")

    @cache
    def build_models(family: str) -> Models:
        target = random_target(family, 0, LAYERS, **SIZES.get(family, {}))
        modules = (target, *(relative_of(target, 100, noise) for noise in (0.05, 0.4)))
        dtype = PRECISIONS.get(family, torch.float16)
        models = (triton_model(module.to(dtype)) for module in modules)
        return Models(*models, folder / f"{family}.safetensors")

    return build_models


@pytest.fixture(scope="module")
def cases_of(models_of: ModelsOf) -> CasesOf:
    """Requests with the texts that a family's vanilla gives, and a table of their n-grams.

    The first text is cut by its limit, the second ends by an end token.
    """

    @cache
    def answered(family: str, long: bool = False) -> list[Case]:
        models = models_of(family)
        vanilla = models.method("vanilla", 1)
        cases = []
        for words in (LONG_PROMPT,) if long else PROMPTS[:2]:
            request = request_of(family, words)
            text = emitted(vanilla, request, Trace())
            if cases:
                end = text[3]
                limits = replace(request.limits, end_tokens=frozenset([end]))
                request, text = replace(request, limits=limits), text[: text.index(end) + 1]
            cases.append(Case(request, WINDOW, text))
        texts = [[case.request.source.prompt[-1], *case.expected] for case in cases]
        table_of(texts, models.target, models.table)
        return cases

    return answered


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "family"), CASES)
def test_every_policy_writes_vanillas_texts_on_these_kernels(
    policy: str, family: str, models_of: ModelsOf, cases_of: CasesOf
) -> None:
    seen = Seen()
    compare(policy, models_of(family), cases_of(family), seen)
    if policy == "speculative":
        assert seen.accepted and seen.rejections


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_texts_of_a_long_prompt_are_vanillas(
    policy: str, models_of: ModelsOf, cases_of: CasesOf
) -> None:
    """PyTorch runs the prompt's first rows, whose number no draft changes."""
    compare(policy, models_of("llama"), cases_of("llama", long=True), Seen())


@dataclass(frozen=True)
class Drafting:
    """What drafts for a target, and a rule.

    view: of the target, or None for a model of its own. stop: as in `ModelDrafter`.
    reads: whether each drafted token is read, as it is not on an accelerator. seed: of the draws.
    """

    view: Callable[[NativeModel], object] | None = None
    rule: Acceptance = SpeculativeSampling()
    stop: float | None = None
    reads: bool = True
    seed: int = 0

    def decode(self, models: Models, request: Request, fused: bool) -> tuple[list[int], Trace]:
        draft = models.draft if self.view is None else models.target
        draft = draft if fused else draft.without_fused_drafting()
        if self.view is not None:
            draft = self.view(draft)
        keeps_probs = not request.sampling.greedy
        drafter = ModelDrafter(draft, WINDOW, self.stop, keeps_probs)
        drafter.stop_on_eos = self.reads
        method = DraftThenVerify(models.target, drafter, self.rule)
        trace = Trace()
        return method.decode(request, trace), trace


DRAFTINGS = {
    "model": Drafting(),
    # it drafts an end token
    "model, unread": Drafting(rule=BlockVerification(), reads=False, seed=2),
    "model with a fallback": Drafting(stop=0.4),
    "first layer": Drafting(lambda target: EarlyExit(target, 1)),
    "without blocks": Drafting(lambda target: LayerSkip(target, [], [0], [1])),
}


@pytest.mark.fast("llama-model, unread")
@pytest.mark.parametrize("name", DRAFTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_texts_of_a_program_are_those_of_the_loop(
    family: str, name: str, models_of: ModelsOf
) -> None:
    """Both draw by the same numbers from the same distributions."""
    drafting = DRAFTINGS[name]
    (text, trace), (expected, expected_trace) = (
        drafting.decode(
            models_of(family), request_of(family, PROMPTS[0], ENDS, drafting.seed), fused
        )
        for fused in (True, False)
    )
    assert text == expected
    assert rounds_of(trace) == rounds_of(expected_trace)
    assert trace.drafted


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_chains_of_a_program_are_those_of_the_loop(
    family: str, models_of: ModelsOf, cases_of: CasesOf
) -> None:
    drafting = Drafting(rule=ExactMatch(), stop=0.5)
    for case in cases_of(family):
        (text, trace), (expected, expected_trace) = (
            drafting.decode(models_of(family), case.request, fused) for fused in (True, False)
        )
        assert text == expected == [*case.request.source.prompt, *case.expected]
        assert rounds_of(trace) == rounds_of(expected_trace)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each text whose tree was asked of the kernels, whether a program grew it."""
    from bild_lab.engine.models.native.gpu import TritonDecoder

    grown: list[bool] = []
    draft = TritonDecoder.draft

    def counted(decoder: TritonDecoder, *texts: object) -> Sequence[GrownTree | None]:
        trees = draft(decoder, *texts)
        grown.extend(tree is not None for tree in trees)
        return trees

    monkeypatch.setattr(TritonDecoder, "draft", counted)
    return grown


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["speculative_tree", "bild_tree"])
def test_trees_of_a_program_are_those_of_the_loop(
    policy: str, family: str, seed: int | None, models_of: ModelsOf, programs: list[bool]
) -> None:
    """Greedy text is also the target's own."""
    models = models_of(family)
    request = request_of(family, PROMPTS[0], ENDS, seed)
    text, expected = Trace(), Trace()
    by_program = models.method(policy, WINDOW).decode(request, text)
    assert programs and all(programs)
    unfused = replace(models, draft=models.draft.without_fused_drafting())
    request = request_of(family, PROMPTS[0], ENDS, seed)
    assert unfused.method(policy, WINDOW).decode(request, expected) == by_program
    assert rounds_of(text) == rounds_of(expected)
    assert text.accepted
    if seed is None:
        assert by_program == models.method("vanilla", 1).decode(request, Trace())


@pytest.mark.slow
def test_trees_of_a_batch_grow_side_by_side(models_of: ModelsOf, programs: list[bool]) -> None:
    method = models_of("llama").method("speculative_tree", WINDOW)
    requests = [request_of("llama", words) for words in PROMPTS]
    texts = decode_batch(method, requests, Batch(3))
    assert programs and all(programs)
    for request, text in zip(requests, texts, strict=True):
        assert text.token_ids == emitted(method, request, Trace())


def test_of_equal_scores_a_program_drafts_the_first_token() -> None:
    from bild_lab.engine.models.native.gpu.tilings import streaming

    module = tiny_llama(0).half()
    weight = module.lm_head.weight.data
    weight.copy_(weight[:4].repeat(len(weight) // 4, 1))  # in one tile, and in several
    source = source_of("llama", PROMPTS[0])
    with tilings(streaming(16, 32, 1, 4, 2)):
        session = triton_model(module).start(source, LONGEST)
        drafted = session.draft(source.prompt[-1:], ChainSpec(3, frozenset())).tokens
    assert len(drafted) == 3 and max(drafted) < 4


BATCHED = [
    ("speculative", "t5", None),
    ("speculative", "llama", None),
    ("speculative", "gemma3", None),
    ("speculative_tree", "llama", None),
    ("early_exit_speculative", "t5", None),
    ("layer_skip", "llama", None),
    ("bita", "llama", None),
    ("eagle", "t5", None),
    ("ppd", "llama", None),
    ("speculative", "llama", 1),
    ("block_verification", "t5", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "family", "seed"), BATCHED)
def test_texts_of_a_batch_are_those_of_batch_1(
    policy: str, family: str, seed: int | None, models_of: ModelsOf
) -> None:
    method = models_of(family).method(policy, WINDOW)

    def requests() -> list[Request]:
        """One of them has a long prompt, and begins when another one has ended."""
        prompts = [*PROMPTS, LONG_PROMPT] if family == "llama" else PROMPTS
        return [
            replace(request, limits=replace(request.limits, max_new_tokens=2 + index % 3))
            for index, request in enumerate(
                request_of(family, words, seed=seed) for words in prompts
            )
        ]

    texts = decode_batch(method, requests(), Batch(2))
    for request, text in zip(requests(), texts, strict=True):
        trace = Trace()
        assert text.token_ids == emitted(method, request, trace)
        assert rounds_of(text.trace) == rounds_of(trace)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_calm_leaves_where_it_does_on_pytorch(family: str) -> None:
    """In float32, where the two differ by little."""
    module = random_target(family, 0).float()
    exits = set()
    for threshold in (0.0, 0.9, 1.0):
        texts, traces = [], []
        for target in (triton_model(module), in_memory(module, "native")):
            method = Calm(target, "hidden_state", threshold, 4)
            texts.append(method.decode(request_of(family, PROMPTS[0]), trace := Trace()))
            traces.append([round_.stats["exit_layer"] for round_ in trace.rounds])
        assert texts[0] == texts[1]
        assert traces[0] == traces[1]
        exits |= set(traces[0])
    assert exits == {1, 2, 3}
