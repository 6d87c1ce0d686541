"""The session protocol's contract, over every engine and family, against forwards without a
cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch

from bild_lab.engine.models.hf.model import open_session
from bild_lab.engine.models.native import compiled
from bild_lab.engine.models.native.compiled import Workspace
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.request import Source
from bild_lab.engine.session import OutputSpec, Rows, Session
from tests.policies import WINDOWED
from tests.sessions import native_session, needs_kernels, tree_rows
from tests.stubs import NextLogits, uncached
from tests.tiny import PAD, START, TINY, tiny_t5


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of fixed shape are traced and then run as they are, which takes no compiler."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")


Opened = tuple[Session, NextLogits, list[int]]
#       root
#      /    \
#     1      2
#    / \      \
#   3   4      5
ROWS = [7, 8, 9, 10, 11, 12]
PARENTS = [-1, 0, 0, 1, 1, 2]
BRANCHES = {3: [7, 8, 10], 4: [7, 8, 11], 5: [7, 9, 12]}


def opened_on(engine: str, family: str) -> Opened:
    """A session of a random model on hf, native, compiled or, in float32, kernels; and what scores
    without a cache.
    """
    t5 = family == "t5"
    source = (
        Source((PAD,), torch.tensor([[5, 9, 12, 30, 1]])) if t5 else Source((START, 5, 9, 12, 30))
    )
    module = tiny_t5(0, layers=2, decoder_layers=3) if t5 else TINY[family](0)
    if engine != "kernels":
        module = module.double()
    large = uncached(copy.deepcopy(module).double(), source)
    if engine == "hf":
        return open_session(module, source), large, list(source.prompt)
    decoder = (T5Decoder if t5 else LlamaDecoder)(module)
    workspace = Workspace(decoder, 128, 16 if t5 else 0) if engine == "compiled" else None
    session = native_session(decoder, source, 4, workspace=workspace, kernels=engine == "kernels")
    return session, large, list(source.prompt)


MARKS = {"kernels": [needs_kernels], "compiled": [pytest.mark.slow]}  # compiling takes seconds
CASES = [("hf", "t5"), ("hf", "llama"), ("compiled", "t5"), ("compiled", "llama")]
CASES += [
    (engine, family) for engine in ("native", "kernels") for family in ("t5", "llama", *WINDOWED)
]
CASES += [("compiled", family) for family in WINDOWED]
sessions = pytest.mark.parametrize(
    "opened",
    [
        pytest.param(
            partial(opened_on, engine, family),
            id=f"{engine} {family}",
            marks=[] if engine == "compiled" and family not in WINDOWED else MARKS.get(engine, []),
        )
        for engine, family in CASES
    ],
)


def assert_scores(scores: torch.Tensor, large: NextLogits, contexts: list[list[int]]) -> None:
    expected = torch.stack([large(context) for context in contexts])
    # Transformers normalizes and rotates in float32 whatever the precision; the native engine does
    # not
    # Transformers' own float32 is 3e-4 from its float64 here
    atol = 1e-4 if scores.dtype == torch.float64 else 5e-4
    torch.testing.assert_close(scores.double(), expected, atol=atol, rtol=1e-4)


@pytest.mark.fast("hf t5", "native llama", "native gemma3", "kernels llama")
@sessions
def test_rows_of_a_chain_score_as_without_a_cache(opened: Callable[[], Opened]) -> None:
    session, large, prompt = opened()
    assert session.length == len(prompt) - 1
    scores = session.extend([prompt[-1], 6, 7, 8]).logits
    assert_scores(scores, large, [prompt, [*prompt, 6], [*prompt, 6, 7], [*prompt, 6, 7, 8]])
    assert session.length == len(prompt) + 3
    assert_scores(session.extend([9]).logits, large, [[*prompt, 6, 7, 8, 9]])


@pytest.mark.fast("hf t5", "native llama", "native gemma3", "kernels llama")
@sessions
def test_rollback_forgets_everything_after_it(opened: Callable[[], Opened]) -> None:
    session, large, prompt = opened()
    session.extend([prompt[-1], 6, 7, 8])
    session.rollback(len(prompt) + 1)  # prompt and 6 stay
    assert session.length == len(prompt) + 1
    assert_scores(session.extend([20, 21]).logits, large, [[*prompt, 6, 20], [*prompt, 6, 20, 21]])


@pytest.mark.fast(
    "with the prompt-hf t5",
    "with the prompt-native llama",
    "with the prompt-native gemma3",
    "with the prompt-kernels llama",
    "after the prompt-native t5",
    "after the prompt-native qwen3",
    "after the prompt-kernels gemma3",
)
@sessions
@pytest.mark.parametrize("fresh", [True, False], ids=["with the prompt", "after the prompt"])
def test_rows_of_a_tree_see_their_own_branch_only(
    opened: Callable[[], Opened], fresh: bool
) -> None:
    session, large, prompt = opened()
    before = prompt
    if not fresh:
        session.extend([prompt[-1], 20])
        before = [*prompt, 20]
        scores = session.extend(tree_rows(ROWS, torch.tensor(PARENTS))).logits
    else:
        rows, parents = [prompt[-1], *ROWS], [-1, *(parent + 1 for parent in PARENTS)]
        scores = session.extend(tree_rows(rows, torch.tensor(parents))).logits[1:]
    contexts = [[7], [7, 8], [7, 9], [7, 8, 10], [7, 8, 11], [7, 9, 12]]
    assert_scores(scores, large, [[*before, *context] for context in contexts])


@pytest.mark.parametrize("engine", ["hf", "native"])
def test_a_tree_counts_distances_far_after_its_text_as_t5_does(engine: str) -> None:
    session, large, prompt = opened_on(engine, "t5")
    further = [3 + row % 30 for row in range(140)]  # 128 rows back and more have one bias
    session.extend([prompt[-1], *further])
    scores = session.extend(tree_rows(ROWS, torch.tensor(PARENTS))).logits
    contexts = [[7], [7, 8], [7, 9], [7, 8, 10], [7, 8, 11], [7, 9, 12]]
    assert_scores(scores, large, [[*prompt, *further, *context] for context in contexts])


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_forward_without_scores_runs_every_layer_and_not_the_head(family: str) -> None:
    session, large, prompt = opened_on("hf", family)
    heads: list[int] = []
    session.layers.module.get_output_embeddings().register_forward_hook(lambda *_: heads.append(1))
    session.extend([prompt[-1], 7], OutputSpec(logits=0, hidden=(1,)))
    session.extend([8], OutputSpec(logits=0))
    assert heads == []
    assert_scores(session.extend([9]).logits, large, [[*prompt, 7, 8, 9]])


@pytest.mark.parametrize(("family", "scored"), [("t5", 3), ("llama", 1)])
def test_rows_that_the_head_of_a_module_runs_are_counted(family: str, scored: int) -> None:
    session, _, prompt = opened_on("hf", family)  # T5 of Transformers scores every row
    session.extend([prompt[-1], 7])
    session.extend([8, 9, 10], OutputSpec(logits=1))
    session.extend([11, 12], OutputSpec(logits=0))
    assert [forward.scored for forward in session.forwards[-2:]] == [scored, 0]


def test_a_module_keeps_no_hook_of_a_forward() -> None:
    session, _, prompt = opened_on("hf", "llama")
    head = session.layers.module.get_output_embeddings()
    assert session.extend(prompt[-1:], OutputSpec(head_input=True)).head_input is not None
    assert not head._forward_pre_hooks


@pytest.mark.parametrize("engine", ["hf", "native"])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_embeddings_as_states_score_as_their_tokens_do(engine: str, family: str) -> None:
    session, _, prompt = opened_on(engine, family)
    session.extend(prompt[-1:])
    scores = session.extend([7, 8], OutputSpec(logits=2, hidden=(0,)))
    session.rollback(len(prompt))
    again = session.extend(Rows([7, 8], states=scores.hidden[0]))
    torch.testing.assert_close(again.logits, scores.logits)


@pytest.mark.fast("5-hf t5", "5-native llama", "5-native gemma3", "5-kernels llama")
@sessions
@pytest.mark.parametrize("leaf", [5, 4, 3])
def test_a_tree_fed_level_by_level_is_one_tree(opened: Callable[[], Opened], leaf: int) -> None:
    session, large, prompt = opened()
    session.extend([prompt[-1]])
    found = []
    for start, stop in ((0, 1), (1, 3), (3, 4), (4, 6)):
        found.append(
            session.extend(tree_rows(ROWS[start:stop], torch.tensor(PARENTS[:stop]))).logits
        )
    contexts = [[7], [7, 8], [7, 9], [7, 8, 10], [7, 8, 11], [7, 9, 12]]
    assert_scores(torch.cat(found), large, [[*prompt, *context] for context in contexts])
    session.keep([0, PARENTS[leaf], leaf])
    before = [*prompt, *BRANCHES[leaf]]
    assert_scores(session.extend([20, 21]).logits, large, [[*before, 20], [*before, 20, 21]])


@pytest.mark.fast(
    "3-hf t5",
    "3-native llama",
    "3-kernels llama",
    "4-native qwen3",
    "4-kernels gemma3",
    "5-hf llama",
    "5-kernels t5",
)
@sessions
@pytest.mark.parametrize("leaf", [3, 4, 5])
def test_keeping_a_branch_is_as_if_only_it_had_been_fed(
    opened: Callable[[], Opened], leaf: int
) -> None:
    session, large, prompt = opened()
    session.extend([prompt[-1]])
    session.extend(tree_rows(ROWS, torch.tensor(PARENTS)))
    path = [leaf]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    session.keep(path)
    assert session.length == len(prompt) + 3
    before = [*prompt, *BRANCHES[leaf]]
    assert_scores(session.extend([20, 21]).logits, large, [[*before, 20], [*before, 20, 21]])


@pytest.mark.fast("hf t5", "native llama", "native gemma3", "kernels llama")
@sessions
def test_keeping_nothing_restores_the_cache(opened: Callable[[], Opened]) -> None:
    session, large, prompt = opened()
    session.extend([prompt[-1]])
    session.extend(tree_rows(ROWS, torch.tensor(PARENTS)))
    session.keep([])
    assert_scores(session.extend([20]).logits, large, [[*prompt, 20]])


@pytest.mark.fast("hf t5", "native llama", "native gemma3", "kernels llama")
@sessions
def test_a_tree_leaves_no_trace_on_the_module(opened: Callable[[], Opened]) -> None:
    session, _, prompt = opened()
    session.extend([prompt[-1]])
    session.extend(tree_rows(ROWS, torch.tensor(PARENTS)))
    again, large, _ = opened()
    assert_scores(again.extend([prompt[-1], 6]).logits, large, [prompt, [*prompt, 6]])
