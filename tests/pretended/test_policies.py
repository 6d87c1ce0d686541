"""Whole policies on the pretended GPU: the CPU's tokens, and no more waits in a round than waits.py
says.

On a machine with a GPU the real one takes its place, and our kernels are left to
`scripts/check_gpu.py`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bild_lab.engine.batch_decoding import decode_batch
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.protocols import Method, Prepares
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Round, Trace
from tests.engine.loops import NEVER
from tests.engine.lossless.greedy import Models, drafts, emitted, table_of
from tests.engine.lossless.random_models import random_source, random_target
from tests.noting_batch import NotingBatch
from tests.policies import FAMILIES, GREEDY_ONLY, RUNNABLE, engines, in_memory, is_peer
from tests.pretended import Machine, pretended_gpu
from tests.pretended.machine import by_line
from tests.pretended.tensor import DEVICE
from tests.pretended.waits import EAGER, KERNELS, most_waits
from tests.tiny import relative_of
from tests.triton_interpreter import interpreter, needs_triton  # noqa: F401

NEW_TOKENS, WINDOW, SEED = 10, 4, 5
FEW_TOKENS = 6  # as Triton's interpreter is slow
SAMPLED = Sampling(temperature=1.0)
TRIES = 30  # sources, until one of them has a text that does not repeat itself
ON_FIRST_USE = 8  # waits of a first round beyond those of others: a prompt, shapes of trees
ON_LOOKUP = 3  # of a first round beyond those of others: `suffix` reads the source that often
FAST = {
    ("bild", "llama", "graphs", False),
    ("vanilla", "llama", "kernels", False),
}


def engines_of(policy: str) -> tuple[str, ...]:
    """Those of the CPU, CUDA graphs of PyTorch's kernels, and our own kernels."""
    if is_peer(policy):
        return engines(policy)
    return (*engines(policy), *(["graphs"] if policy != "ppd" else []), "kernels")


CASES = [
    (policy, family, engine, sampled)
    for policy, family in RUNNABLE
    for engine in engines_of(policy)
    for sampled in (False, True)
    if not (sampled and policy in GREEDY_ONLY)
]

UNCOUNTED = {"ppd", "synthetic"}  # of whose texts rounds tell not all
BATCHED = [
    (*case, "native") for case in RUNNABLE if not is_peer(case[0]) and case[0] not in UNCOUNTED
]
BATCHED += [
    (policy, family, "kernels")
    for policy in ("bild", "early_exit_speculative", "speculative_tree", "vanilla")
    for family in FAMILIES
]
FAST_BATCHES = {("prompt_lookup", "llama", "native")}
REAL = torch.cuda.is_available()
not_here = pytest.mark.skipif(REAL, reason="scripts/check_gpu.py checks our kernels on a real GPU")


def marks_of(engine: str, fast: bool) -> list[pytest.MarkDecorator]:
    """The marks of a case."""
    slow = [] if fast else [pytest.mark.slow]
    return [*slow, needs_triton, not_here] if engine == "kernels" else slow


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine | None]:
    if REAL:
        yield None
        return
    with pretended_gpu(triton=find_spec("triton") is not None) as machine:
        yield machine


def counting(machine: Machine | None) -> AbstractContextManager[list]:
    """The waits inside, one entry each."""
    return warned_waits() if machine is None else machine.counting()


@contextmanager
def warned_waits() -> Iterator[list[str]]:
    """The lines at which the host waits for a real GPU, as PyTorch warns of them."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines += [
        f"{Path(one.filename).name}:{one.lineno}"
        for one in found
        if "synchroniz" in str(one.message)
    ]


@dataclass(frozen=True)
class Pair:
    """Models of a family on the CPU and on the pretended GPU, and requests for both."""

    here: Callable[[str], Models]
    there: Callable[[str], Models]
    requests: tuple[Request, ...]


@pytest.fixture(scope="module")
def pairs(
    machine: Machine | None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], Pair]:
    """A pair of a family. small: of two layers in float32, with shorter texts."""
    folder = tmp_path_factory.mktemp("tables")

    @lru_cache
    def models(family: str, engine: str, device: str, small: bool) -> Models:
        target = random_target(family, 0, 2).float() if small else random_target(family, 0)
        relatives = (relative_of(target, 100, noise) for noise in (0.1, 0.4))
        kind = engine if engine in ("hf", "kernels") else "native"
        loaded = [in_memory(each.to(device), kind) for each in (target, *relatives)]
        if engine == "graphs":
            loaded = [each.with_backend(graphs=True) for each in loaded]
        return Models(*loaded, table_file(family, small))

    def table_file(family: str, small: bool) -> Path:
        return folder / f"{family}{'-small' if small else ''}.safetensors"

    @lru_cache
    def pair(family: str, small: bool) -> Pair:
        here = models(family, "native", "cpu", small)
        vanilla = here.method("vanilla", 1)
        new_tokens = FEW_TOKENS if small else NEW_TOKENS
        for seed in range(TRIES):
            source = random_source(family, random.Random(seed))
            request = Request(source, Limits(len(source.prompt), new_tokens, NEVER))
            text = emitted(vanilla, request, Trace())
            end = text[new_tokens // 2]
            if text.index(end) == new_tokens // 2:  # so that the text may end there, and not before
                break
        else:
            raise AssertionError(f"{family} repeats itself from every source")
        table_of([[source.prompt[-1], *text]], here.target, table_file(family, small))
        ends = replace(request, limits=replace(request.limits, end_tokens=frozenset([end])))
        return Pair(
            lambda engine: models(family, engine, "cpu", small),
            lambda engine: models(family, engine, "cuda", small),
            (request, ends),
        )

    return pair


def seeded(request: Request, device: torch.device | str) -> Request:
    """The request on a device, with a generator of its own if it samples."""
    generator = None if request.sampling.greedy else torch.Generator(device).manual_seed(SEED)
    return replace(request, source=request.source.to(torch.device(device)), generator=generator)


def rounds_of(
    method: Method, request: Request, machine: Machine | None
) -> tuple[list[int], list[tuple[Round, list[str]]]]:
    """The emitted tokens, and each round with the waits in it."""
    trace, tokens, found = Trace(), [], []
    stream = method.stream(request, trace)
    while True:
        with counting(machine) as waits:
            new = next(stream, None)
        if new is None:
            return tokens, found
        tokens += new
        found.append((trace.rounds[-1], list(map(str, waits))))


def decodes_by_programs(method: Method, request: Request) -> bool:
    """Whether it drafts nothing and decodes greedily, so that a text that is no stream takes several
    tokens in one program.
    """
    return isinstance(method, DraftThenVerify) and method.decodes_by_programs(request)


@pytest.mark.parametrize(
    ("policy", "family", "engine", "sampled"),
    [pytest.param(*case, marks=marks_of(case[2], case in FAST)) for case in CASES],
)
def test_the_gpu_gives_the_cpus_tokens_and_waits_as_often_as_documented(
    policy: str,
    family: str,
    engine: str,
    sampled: bool,
    machine: Machine | None,
    pairs: Callable[[str, bool], Pair],
    request: pytest.FixtureRequest,
) -> None:
    if engine == "kernels":
        request.getfixturevalue("interpreter")
    pair = pairs(family, engine == "kernels")
    here, there = pair.here("hf" if is_peer(policy) else "native"), pair.there(engine)
    expected, method = here.method(policy, WINDOW), there.method(policy, WINDOW)
    texts = pair.requests[: 1 if sampled or is_peer(policy) or engine == "kernels" else 2]
    for text in texts:
        text = replace(text, sampling=SAMPLED) if sampled else text
        wanted = emitted(expected, seeded(text, "cpu"), Trace())
        asked = seeded(text, DEVICE)
        if isinstance(method, Prepares):
            method.prepare(asked)
        # a view keeps the first text's workspace until it has the next one
        for _ in range(1 + (engine == "compiled")):
            # weights are moved, shapes made, and graphs captured
            emitted(method, seeded(text, DEVICE), Trace())
        if engine in ("graphs", "kernels") and decodes_by_programs(method, text):
            # as a stream it goes token by token, and not by programs: by graphs of its own
            rounds_of(method, seeded(text, DEVICE), machine)
            with counting(machine) as waits:
                emitted(method, asked, Trace())
            assert len(waits) <= 3, by_line(waits)
            asked = seeded(text, DEVICE)
        if not hasattr(method, "stream"):  # peers
            # peers draw from a generator of their own
            assert emitted(method, asked, Trace()) == wanted or sampled
            continue
        tokens, rounds = rounds_of(method, asked, machine)
        assert tokens == wanted or (REAL and sampled)  # whose generators draw other numbers
        most = most_waits(policy, engine)
        for place, (one, waits) in enumerate(rounds):
            allowed = most(one)
            if place == 0:  # the kernels' tables and shapes stand before
                allowed += ON_LOOKUP if engine == "kernels" else ON_FIRST_USE + one.draft_calls
            assert len(waits) <= allowed, (place, one, waits)
        assert len(rounds) > 1 or not drafts(policy)


@pytest.mark.parametrize(
    ("policy", "family", "engine"),
    [pytest.param(*case, marks=marks_of(case[2], case in FAST_BATCHES)) for case in BATCHED],
)
def test_texts_of_a_batch_wait_as_often_as_alone(
    policy: str,
    family: str,
    engine: str,
    machine: Machine | None,
    pairs: Callable[[str, bool], Pair],
    request: pytest.FixtureRequest,
) -> None:
    """Their forwards, which run together, wait for nothing."""
    if engine == "kernels":
        request.getfixturevalue("interpreter")
    pair, size = pairs(family, engine == "kernels"), 3
    here, method = (
        pair.here("native").method(policy, WINDOW),
        pair.there(engine).method(policy, WINDOW),
    )
    shorter = [
        replace(one, limits=replace(one.limits, max_new_tokens=one.limits.max_new_tokens // 2))
        for one in pair.requests
    ]
    requests = [*pair.requests, *shorter]
    wanted = [emitted(here, seeded(request, "cpu"), Trace()) for request in requests]
    asked = [seeded(request, DEVICE) for request in requests]
    decode_batch(method, asked, Batch(size))  # weights are moved, and shapes made
    batch = NotingBatch(size)
    with counting(machine) as waits:
        texts = decode_batch(method, asked, batch)
    assert [text.token_ids for text in texts] == wanted
    assert max(together for _, together in batch.group_sizes) == size
    assert not [
        each for each in map(str, waits) if "native/layers.py" in each or "side_by_side.py" in each
    ]
    most = most_waits(policy, engine)
    allowed = sum(
        ON_FIRST_USE + text.trace.rounds[0].draft_calls + sum(map(most, text.trace.rounds))
        for text in texts
    )
    assert len(waits) <= allowed, by_line(waits)


def test_every_policy_that_waits_more_than_once_is_tested() -> None:
    assert set(EAGER) | set(KERNELS) <= {policy for policy, _ in RUNNABLE}
