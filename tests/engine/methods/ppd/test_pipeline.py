"""The pipeline on a machine: its text is the target's own, and it runs what the paper says it
runs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

import bild_lab
from bild_lab.engine.methods.ppd.pipeline import PredictivePipeline
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.cost import total_cost
from bild_lab.lab.measure.prediction import pipeline_log
from tests.engine.loops import NEVER
from tests.engine.methods.ppd.runs import compute_of_runs, latency_of_runs
from tests.policies import FAMILIES, in_memory
from tests.tiny import VOCABULARY, source_of, tiny_llama, tiny_t5

DEPTH = 5
EXITS = (3, 4)


@pytest.fixture(scope="module", params=["native", "hf"])
def targets(request: pytest.FixtureRequest) -> dict[str, LoadedModel]:
    """Layers behind the first add less, so that many early predictions come true and many do
    not.
    """
    found = {}
    for family, make in (("t5", tiny_t5), ("llama", tiny_llama)):
        model = make(7, layers=DEPTH)
        ends = (".o.weight", "o_proj.weight", "wo.weight", "down_proj.weight")
        for name, weight in model.named_parameters():
            if (
                name.endswith(ends)
                and name.startswith(("decoder.block", "model.layers"))
                and ".0." not in name[:16]
            ):
                weight.data *= 0.5
        found[family] = in_memory(model, request.param)
    return found


def requests_of(family: str, count: int, longest: int = 20) -> list[Request]:
    chance = random.Random(family)
    made = []
    for _ in range(count):
        words = chance.choices(range(3, VOCABULARY), k=chance.randint(1, 9))
        source = source_of(family, words)
        made.append(Request(source, Limits(len(source.prompt), longest, NEVER)))
    return made


def alone(target: LoadedModel, request: Request) -> list[int]:
    """The target's own text, by the loop that every policy is compared with."""
    return target_alone(target).decode(request, Trace())


def decoded(
    target: LoadedModel, request: Request, exit_layer: int | None, top_k: int
) -> tuple[list[int], Trace]:
    trace = Trace()
    return PredictivePipeline(target, exit_layer, top_k).decode(request, trace), trace


@pytest.mark.fast("native-llama-3-2")
@pytest.mark.parametrize(
    ("family", "exit_layer", "top_k"), [*product(FAMILIES, EXITS, [1, 2, 3, VOCABULARY])]
)
def test_the_text_is_the_targets_own(
    targets: dict[str, LoadedModel], family: str, exit_layer: int, top_k: int
) -> None:
    matches = []
    for request in requests_of(family, 5):
        tokens, trace = decoded(targets[family], request, exit_layer, top_k)
        assert tokens == alone(targets[family], request)
        matches += pipeline_log(trace).matches
    assert any(matches)
    assert all(matches) == (top_k == VOCABULARY), (
        "some predictions fail, unless every token is a candidate"
    )


@pytest.mark.fast("native-t5")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_ends_where_the_targets_own_ends(
    targets: dict[str, LoadedModel], family: str
) -> None:
    """At end tokens and at length limits anywhere."""
    request = requests_of(family, 1)[0]
    text = alone(targets[family], request)[request.limits.prompt_length :]
    for index, token in list(enumerate(text))[::3]:
        for limits in (
            replace(request.limits, end_tokens=frozenset([token])),
            replace(request.limits, max_new_tokens=index + 1),
        ):
            cut = replace(request, limits=limits)
            assert decoded(targets[family], cut, 3, 2)[0] == alone(targets[family], cut)


@pytest.mark.fast("native-llama")
@pytest.mark.parametrize("family", FAMILIES[::-1])
def test_sampled_tokens_are_those_that_the_target_draws_with_the_same_seed(
    targets: dict[str, LoadedModel], family: str
) -> None:
    sampled = replace(requests_of(family, 1)[0], sampling=Sampling(1.0))
    texts = []
    for seed in range(5):
        first, second = (
            replace(sampled, generator=torch.Generator().manual_seed(seed)) for _ in range(2)
        )
        texts.append(decoded(targets[family], first, 3, 3)[0])
        assert texts[-1] == alone(targets[family], second)
    assert len({tuple(text) for text in texts}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_decodings_of_one_text_are_alike(
    targets: dict[str, LoadedModel], family: str
) -> None:
    request = requests_of(family, 1)[0]
    runs = [decoded(targets[family], request, 3, 3) for _ in range(20)]
    assert len({tuple(tokens) for tokens, _ in runs}) == 1
    assert all(trace.rounds == runs[0][1].rounds for _, trace in runs)
    # in which order two threads begin is chance
    ran = [Counter(map(repr, trace.forwards)) for _, trace in runs]
    assert all(each == ran[0] for each in ran)


def runs_of(matches: Sequence[bool]) -> list[int]:
    """How many tokens each run has: one is ended by each prediction that does not come true."""
    ends = [place for place, matched in enumerate([*matches, False], 1) if not matched]
    return [end - start for start, end in pairwise([0, *ends])]


@pytest.mark.fast("native-t5-3", "hf-llama-4")
@pytest.mark.parametrize(("family", "exit_layer"), [*product(FAMILIES, EXITS)])
def test_the_units_as_executed_are_those_of_the_theorems_runs(
    targets: dict[str, LoadedModel], family: str, exit_layer: int
) -> None:
    k = 2
    for request in requests_of(family, 4):
        tokens, trace = decoded(targets[family], request, exit_layer, k)
        log, emitted = pipeline_log(trace), len(tokens) - request.limits.prompt_length
        assert len(log.matches) == emitted - 1
        runs = runs_of(log.matches)
        assert log.latency == latency_of_runs(runs, DEPTH, exit_layer)
        # the token that fills the limit has no candidates behind it
        assert log.compute == compute_of_runs(runs, DEPTH, exit_layer, k) - k * (DEPTH - exit_layer)
        assert log.concurrent == emitted * (DEPTH - exit_layer)


def test_a_text_that_ends_by_itself_has_candidates_for_every_token(
    targets: dict[str, LoadedModel],
) -> None:
    request = requests_of("llama", 1)[0]
    text = alone(targets["llama"], request)[request.limits.prompt_length :]
    ended = replace(request, limits=replace(request.limits, end_tokens=frozenset([text[6]])))
    log = pipeline_log(decoded(targets["llama"], ended, 3, 2)[1])
    assert log.compute == compute_of_runs(runs_of(log.matches), DEPTH, 3, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_forwards_are_the_layers_that_were_run(
    targets: dict[str, LoadedModel], family: str
) -> None:
    request, exit_layer, k = requests_of(family, 1)[0], 4, 3
    if targets[family].engine == "hf":
        pytest.skip("the layers of Transformers are wrapped, not run by a decoder of ours")
    decoder, run = targets[family].decoder, type(targets[family].decoder).run
    ran: list[tuple[int, int]] = []

    def counting(x, rows, cache, *memory, layers, hidden=None, skipped):
        assert not skipped.attention and not skipped.feed_forward
        ran.append((rows.count, len(layers)))
        return run(decoder, x, rows, cache, *memory, layers=layers, hidden=hidden, skipped=skipped)

    decoder.run = counting
    try:
        _, trace = decoded(targets[family], request, exit_layer, k)
    finally:
        del decoder.run
    own = [each for each in trace.forwards if not each.encoder]
    assert sorted((each.rows, each.layers) for each in own) == sorted(ran)
    assert sum(rows == k for rows, _ in ran[1:]) == len(pipeline_log(trace).matches)
    single = sum(layers for rows, layers in ran if rows == 1)
    prompt = 0 if family == "t5" else DEPTH  # which goes in with the first token
    assert single + prompt == pipeline_log(trace).latency
    assert total_cost(trace.forwards, 4).flops > 0


def test_a_traced_text_tells_each_token_and_its_stages(targets: dict[str, LoadedModel]) -> None:
    request, trace = requests_of("llama", 1, longest=4)[0], StageTrace()
    text = PredictivePipeline(targets["llama"], 3, 2).decode(request, trace)
    assert [each.next_token for each in trace.rounds] == text[request.limits.prompt_length :]
    assert [name for name, _, _ in trace.spans] == ["prefill", *["draft", "verify"] * 4]


def test_a_text_has_room_for_its_candidates_and_tells_how_it_was_decoded(
    targets: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rooms = targets["llama"], []
    start = target.start
    monkeypatch.setattr(
        target,
        "start",
        lambda source, room, *rest: (rooms.append(room), start(source, room, *rest))[1],
        raising=False,
    )
    trace = Trace(stats={"loaded": True})
    PredictivePipeline(target, 3, 2).decode(requests_of("llama", 1)[0], trace)
    assert rooms == [20 + 2]
    assert trace.stats == {"loaded": True, "layers": DEPTH, "exit_layer": 3, "top_k": 2}


def test_candidates_are_not_scored(targets: dict[str, LoadedModel]) -> None:
    """The head over so many rows would cost as much as a layer."""
    _, trace = decoded(targets["t5"], requests_of("t5", 1)[0], 3, 4)
    begun = [each for each in trace.forwards if each.rows == 4 and not each.encoder]
    assert begun and {each.scored for each in begun} == {0}


def test_without_an_exit_layer_half_of_the_layers_are_run_first(
    targets: dict[str, LoadedModel],
) -> None:
    log = pipeline_log(decoded(targets["t5"], requests_of("t5", 1)[0], None, 1)[1])
    assert (log.layers, log.exit_layer) == (DEPTH, 3)


@pytest.mark.parametrize("top_k", [0, VOCABULARY + 1])
def test_as_many_candidates_as_there_are_tokens_may_be_asked_for(
    targets: dict[str, LoadedModel], top_k: int
) -> None:
    with pytest.raises(UserError, match=f"top_k must be .* >= 1 and <= 40, got {top_k}"):
        PredictivePipeline(targets["llama"], 3, top_k)


def test_compiled_steps_are_refused(checkpoints: Path) -> None:
    with pytest.raises(UserError, match=r"set runtime\.compile=false"):
        bild_lab.load(str(checkpoints / "t5"), policy="ppd", compile=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_two_streams_give_the_targets_text() -> None:
    model = in_memory(tiny_llama(7, layers=DEPTH).cuda(), "native")
    for request in requests_of("llama", 5):
        there = replace(request, source=request.source.to(torch.device("cuda")))
        assert decoded(model, there, 3, 3)[0] == alone(model, there)
