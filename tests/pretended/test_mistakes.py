"""Five mistakes that a CPU forgives, planted in the engine: each is caught when a policy decodes on
a pretended GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.native import layers
from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.models.placed_rows import PlacedRows, place_rows
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from tests.engine.loops import NEVER
from tests.engine.lossless.random_models import random_source, random_target
from tests.policies import in_memory
from tests.pretended import CudaFault, Machine, pretended_gpu
from tests.pretended.machine import by_line
from tests.pretended.tensor import DEVICE
from tests.tiny import relative_of

NEW_TOKENS = 8


class Desk:
    """A pair on the pretended GPU, and a request."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        target = random_target("llama", 0)
        self.target, self.draft = (
            in_memory(each.to("cuda"), "native") for each in (target, relative_of(target, 1, 0.1))
        )
        source = random_source("llama", random.Random(1)).to(DEVICE)
        self.request = Request(source, Limits(len(source.prompt), NEW_TOKENS, NEVER))

    def decode(self, stop: float | None = None, compiled: bool = False, **others: object) -> int:
        """How many waits a second text took, for each of its rounds."""
        draft = self.draft.with_backend(compiled=True) if compiled else self.draft
        method = DraftThenVerify(self.target, ModelDrafter(draft, 4, stop), SpeculativeSampling())
        request = replace(self.request, **others)
        method.decode(request, Trace())
        trace = Trace()
        with self.machine.counting() as waits:
            method.decode(request, trace)
        self.lines = by_line(waits)
        return len(waits) / len(trace.rounds)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with pretended_gpu() as machine:
        yield Desk(machine)


def test_without_a_mistake_a_round_waits_once(desk: Desk) -> None:
    assert desk.decode() == 1
    assert desk.decode(0.4, compiled=True) <= 2


@pytest.mark.parametrize("looks", [True, False])
def test_a_window_of_one_graph_ends_where_a_step_ends_if_that_is_looked_for(
    desk: Desk, looks: bool
) -> None:
    """Without, nothing is read."""
    drafter, tokens = (
        ModelDrafter(desk.draft.with_backend(compiled=True), 4),
        list(desk.request.source.prompt),
    )
    first = drafter.start(desk.request, desk.target.start(desk.request.source, NEW_TOKENS))
    drafted = first.propose(tokens).token_list
    del first  # frees the graph's memory
    drafter.stop_on_eos = looks
    ends = replace(desk.request.limits, end_tokens=frozenset([drafted[1]]))
    drafter = drafter.start(
        replace(desk.request, limits=ends), desk.target.start(desk.request.source, NEW_TOKENS)
    )
    with desk.machine.counting() as waits:
        draft = drafter.propose(tokens)
    assert len(waits) == looks
    assert draft.token_list == (drafted[: drafted.index(drafted[1]) + 1] if looks else drafted)


def test_graphs_outlive_the_tables_that_a_longer_text_replaces(desk: Desk) -> None:
    model = desk.target.with_backend(compiled=True)
    method = target_alone(model)
    text = method.decode(desk.request, Trace())
    desk.target.decoder.reach(1000)  # of the same weights
    assert method.decode(desk.request, Trace()) == text


def test_graphs_are_captured_on_the_models_gpu_whichever_is_current(desk: Desk) -> None:
    torch.cuda.set_device(1)
    assert desk.decode(0.4, compiled=True) <= 2


def test_a_mask_built_on_the_host(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(start: int, count: int, device: torch.device, *rest: object) -> PlacedRows:
        placed = place_rows(start, count, device, *rest)
        if placed.visible is None:
            return placed
        return replace(
            placed, visible=torch.ones(count, start + count, dtype=torch.bool).tril(start)
        )

    monkeypatch.setattr(layers, "place_rows", place)
    with pytest.raises(CudaFault, match="same device"):
        desk.decode()


def test_an_item_in_the_loop(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = ModelDrafter.propose

    def looking(drafter: ModelDrafter, tokens: list[int]) -> Draft:
        draft = propose(drafter, tokens)
        assert draft.tokens[-1].item() >= 0
        return draft

    monkeypatch.setattr(ModelDrafter, "propose", looking)
    assert desk.decode() == 2
    assert any("test_mistakes.py" in line and "item" in line for line in desk.lines)


def test_a_tensor_that_grows_inside_a_capture(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    write = KeyValueCache.write

    def growing(cache: KeyValueCache, *rows: object) -> None:
        write(cache, *rows)
        if torch.cuda.is_current_stream_capturing():
            cache.keys = torch.cat([cache.keys, cache.keys[:, :, :1]], 2)

    monkeypatch.setattr(KeyValueCache, "write", growing)
    with pytest.raises((CudaFault, RuntimeError)):
        desk.decode(0.4, compiled=True)


def test_a_generator_of_the_wrong_device(desk: Desk) -> None:
    assert (
        desk.decode(sampling=Sampling(1.0), generator=torch.Generator(DEVICE).manual_seed(1)) == 1
    )
    with pytest.raises(CudaFault, match="generator"):
        desk.decode(sampling=Sampling(1.0), generator=torch.Generator().manual_seed(1))


def test_a_transfer_that_reads_before_the_copy_is_done(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_host(draft: Draft, *values: torch.Tensor) -> list[list[float]]:
        copies = [each.double().to("cpu", non_blocking=True) for each in (draft.tokens, *values)]
        tokens, *lists = [each.tolist() for each in copies]
        draft.__dict__["token_list"] = [int(token) for token in tokens]
        return lists

    monkeypatch.setattr(Draft, "to_host", to_host)
    with pytest.raises(CudaFault, match="not been copied yet"):
        desk.decode()
