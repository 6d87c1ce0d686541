"""CALM beside a literal version of it that computes everything anew with the modules of
Transformers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import bild_lab
from bild_lab.engine.methods.early_exit.calm import MEASURES, Calm, decaying_threshold
from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.cost import dimensions
from bild_lab.lab.measure.summary import counts
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.point.build import build_method
from tests.engine.loops import NEVER
from tests.engine.lossless.random_models import random_source
from tests.policies import FAMILIES, WINDOWED, in_memory, shipped
from tests.sessions import needs_kernels
from tests.tiny import TINY, scale_layer

DEPTH = 4
LENGTH = 16
PROMPT = "w5 w9 w30 w12"


def target_of(family: str, seed: int = 0) -> PreTrainedModel:
    """Four layers, of which the later ones change the state less."""
    model = TINY[family](seed, layers=DEPTH)
    for index in range(DEPTH):
        scale_layer(model, index, (0.8 if family == "gemma3" else 0.7) ** index)
    return model.double()


def requests_of(family: str, count: int, length: int = LENGTH) -> list[Request]:
    chance = random.Random(5)
    sources = [random_source(family, chance) for _ in range(count)]
    return [Request(source, Limits(len(source.prompt), length, NEVER)) for source in sources]


def decoded(
    module: PreTrainedModel,
    request: Request,
    measure: str = "hidden_state",
    threshold: float = 0.9,
    temperature: float = 4,
    engine: str = "native",
) -> tuple[list[int], Trace]:
    method = Calm(in_memory(module, engine), measure, threshold, temperature)
    return method.decode(request, trace := Trace()), trace


def vanilla(module: PreTrainedModel, request: Request) -> tuple[list[int], Trace]:
    target = in_memory(module, "native")
    return build_method(shipped("vanilla"), {"target": lambda: target}).decode(
        request, trace := Trace()
    ), trace


def work_of(trace: Trace) -> tuple[int, int]:
    """FLOPs of all forwards, and values moved."""
    works = [dimensions(one.config).work(one) for one in trace.forwards]
    return sum(flops for flops, _ in works), sum(values for _, values in works)


def exits_of(trace: Trace) -> list[int | None]:
    return [each.stats["exit_layer"] for each in trace.rounds]


@dataclass
class Oracle:
    """CALM as it is described: no cache; all rows go through all layers, and those that left stay
    what they were.

    exits: behind which layer each row left, by its place.
    """

    module: PreTrainedModel
    confidence: Callable[[Tensor, Tensor], float]
    threshold: float
    temperature: float
    exits: list[int] = field(default_factory=list)

    @torch.inference_mode()
    def decode(self, request: Request) -> tuple[list[int], list[int]]:
        limits, source = request.limits, request.source
        tokens = list(source.prompt)
        self.exits = [DEPTH] * (len(tokens) - 1)
        while not limits.reached(tokens):
            position, longest = len(tokens) - len(source.prompt), limits.max_new_tokens
            bar = 0.9 * self.threshold + 0.1 * math.exp(-self.temperature * position / longest)
            with self._leaving(min(max(bar, 0.0), 1.0), len(tokens)):
                ids = torch.tensor([tokens])
                if source.encoder_ids is None:
                    out = self.module(input_ids=ids, use_cache=False)
                else:
                    out = self.module(
                        input_ids=source.encoder_ids, decoder_input_ids=ids, use_cache=False
                    )
            self.exits += [DEPTH] * (len(tokens) - len(self.exits))
            tokens = limits.append(tokens, [int(out.logits[0, -1].argmax())])
        return tokens, self.exits[len(source.prompt) - 1 :]

    @contextmanager
    def _leaving(self, bar: float, count: int) -> Iterator[None]:
        """Inside, every layer leaves rows alone that left before it, and the last row may leave
        behind it.
        """
        layers = (
            self.module.decoder.block
            if self.module.config.is_encoder_decoder
            else self.module.model.layers
        )

        def hook(number: int) -> Callable[..., object]:
            def leave(layer: object, args: tuple, kwargs: dict, out: object) -> object:
                before = (args[0] if args else kwargs["hidden_states"])[0]
                after = (out[0] if isinstance(out, tuple) else out)[0].clone()
                for row, exit_layer in enumerate(self.exits):
                    if exit_layer < number:
                        after[row] = before[row]
                undecided = len(self.exits) < count and number < DEPTH
                if undecided and self.confidence(before[-1], after[-1]) > bar:
                    self.exits.append(number)
                return (after[None], *out[1:]) if isinstance(out, tuple) else after[None]

            return leave

        hooks = [
            layer.register_forward_hook(hook(i), with_kwargs=True)
            for i, layer in enumerate(layers, 1)
        ]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()


def saturation(before: Tensor, after: Tensor) -> float:
    size = float(before.norm() * after.norm())
    # the padding token's embedding is zero
    return min(1.0, float(before @ after) / size) if size else 0.0


def response_of(module: PreTrainedModel) -> Callable[[Tensor, Tensor], float]:
    """The softmax response by the module's own norm and head."""
    t5 = module.config.is_encoder_decoder
    norm = module.decoder.final_layer_norm if t5 else module.model.norm
    scale = module.config.d_model**-0.5 if t5 and module.config.scale_decoder_outputs else 1.0

    def response(before: Tensor, after: Tensor) -> float:
        first, second = (
            module.lm_head(norm(after) * scale)
            .softmax(-1)
            .sort(descending=True)
            .values[:2]
            .tolist()
        )
        return first - second

    return response


@pytest.mark.fast("gemma3-native-softmax-0.3-4")
@pytest.mark.parametrize(
    ("family", "engine", "measure", "threshold", "temperature"),
    [
        (family, engine, measure, threshold, temperature)
        for family in (*FAMILIES, *WINDOWED)
        for engine in ("native", "hf")
        for measure, threshold in (("hidden_state", 0.9), ("softmax", 0.3))
        for temperature in (0, 4)
    ],
)
def test_tokens_and_exits_are_those_of_calm_without_a_cache(
    family: str, engine: str, measure: str, threshold: float, temperature: float
) -> None:
    module = target_of(family, seed=2 if family in WINDOWED else 0)
    confidence = saturation if measure == "hidden_state" else response_of(module)
    seen = set()
    for request in requests_of(family, 3):
        expected = Oracle(module, confidence, threshold, temperature).decode(request)
        knobs = {
            "measure": measure,
            "threshold": threshold,
            "temperature": temperature,
            "engine": engine,
        }
        tokens, trace = decoded(module, request, **knobs)
        assert (tokens, exits_of(trace)) == expected
        seen |= set(exits_of(trace))
    assert DEPTH in seen
    assert len(seen) >= 3, "the case should see exits at several layers"


@pytest.mark.fast("llama-hidden_state")
@pytest.mark.parametrize("measure", ["hidden_state", "softmax"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_threshold_that_nothing_exceeds_leaves_the_targets_own_text(
    family: str, measure: str
) -> None:
    module = target_of(family)
    for request in requests_of(family, 3):
        tokens, trace = decoded(module, request, measure=measure, threshold=1, temperature=0)
        assert tokens == vanilla(module, request)[0]
        assert set(exits_of(trace)) == {DEPTH}


def test_the_threshold_decays_from_the_first_position_to_the_length_limit() -> None:
    assert decaying_threshold(0.9, 4, 0, 100) == pytest.approx(0.91)
    assert decaying_threshold(0.9, 4, 50, 100) == pytest.approx(0.81 + 0.1 * math.exp(-2))
    assert decaying_threshold(0.9, 4, 99, 100) == pytest.approx(0.81 + 0.1 * math.exp(-3.96))
    assert [decaying_threshold(0.7, 0, position, 10) for position in (0, 9)] == [
        pytest.approx(0.73)
    ] * 2
    assert decaying_threshold(1.0, 0, 5, 10) == 1.0
    assert decaying_threshold(2.0, 0, 5, 10) == 1.0  # clipped
    assert decaying_threshold(-1.0, 0, 5, 10) == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_skipped_layers_are_filled_and_not_run(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = target_of(family)
    target = in_memory(module, "native")
    work: dict[str, list[tuple[int, int]]] = {"run": [], "fill": []}

    def spy(name: str) -> None:
        own = getattr(target.decoder, name)

        def noted(x: Tensor, rows: PlacedRows, *rest: object, **named: object) -> object:
            layers = named["layers"] if "layers" in named else rest[-1]
            work[name] += [(layer, rows.stop - 1) for layer in layers if rows.count == 1]
            return own(x, rows, *rest, **named)

        monkeypatch.setattr(target.decoder, name, noted)

    spy("run")
    spy("fill")
    request = requests_of(family, 2)[1]
    Calm(target, "hidden_state", 0.9, 4).decode(request, trace := Trace())
    first = len(request.source.prompt) - 1
    assert first != 1, "a prompt of one row would be taken for a token"
    places = list(enumerate(exits_of(trace), first))
    assert work["run"] == [(layer, slot) for slot, left in places for layer in range(left)]
    assert work["fill"] == [(layer, slot) for slot, left in places for layer in range(left, DEPTH)]
    assert work["fill"]
    assert sum(each.layers or 0 for each in trace.forwards) == len(work["run"])
    assert sum(each.filled_layers for each in trace.forwards) == len(work["fill"])


@pytest.mark.fast("llama")
@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_leave_in_one_call_where_the_loop_leaves(family: str) -> None:
    target, exits = in_memory(target_of(family).float(), "kernels"), set()
    for request in requests_of(family, 4):
        for threshold in (0.6, 0.9, 0.97):
            ours, theirs = Trace(), Trace()
            text = Calm(target, "hidden_state", threshold, 4).decode(request, ours)
            assert text == Calm(
                target.without_fused_drafting(), "hidden_state", threshold, 4
            ).decode(request, theirs)
            assert exits_of(ours) == exits_of(theirs)
            assert len(ours.forwards) < len(theirs.forwards)
            assert work_of(ours) == pytest.approx(work_of(theirs), rel=0.01)
            exits |= set(exits_of(ours))
    assert len(exits) >= 3


@pytest.mark.parametrize(("measure", "scored"), [("softmax", sum), ("hidden_state", len)])
def test_the_head_runs_where_it_is_measured_and_once_after_the_exit(
    measure: str, scored: Callable[[list[int]], int]
) -> None:
    _, trace = decoded(target_of("t5"), requests_of("t5", 1)[0], measure=measure, threshold=0.7)
    assert len({*exits_of(trace)}) > 1
    assert sum(each.scored for each in trace.forwards) == scored(exits_of(trace))


def test_the_mean_exit_is_a_number_of_the_result() -> None:
    module, request = target_of("t5"), requests_of("t5", 1)[0]
    tokens, trace = decoded(module, request, threshold=0.9)
    exits = exits_of(trace)
    result = counts([Timed(tokens[1:], [1.0], trace)])
    assert result.exit_layer_mean == sum(exits) / LENGTH
    assert 1 < result.exit_layer_mean < DEPTH
    assert (result.target_calls, result.drafted, result.tokens_per_target_call) == (LENGTH, 0, 1.0)
    assert counts([Timed(tokens[1:], [1.0], vanilla(module, request)[1])]).exit_layer_mean is None


def test_a_stream_is_the_same_text_token_by_token() -> None:
    method, request = (
        Calm(in_memory(target_of("t5"), "native"), "softmax", 0.3, 4),
        requests_of("t5", 1)[0],
    )
    text = method.decode(request, Trace())
    assert list(method.stream(request, Trace())) == [
        [token] for token in text[request.limits.prompt_length :]
    ]
    assert not method.lossless(Sampling())


@pytest.mark.slow
def test_a_compiled_target_leaves_early_all_the_same(checkpoints: Path) -> None:
    texts = [
        bild_lab.load(
            str(checkpoints / "t5"), policy="calm", threshold=0.5, dtype="float64", compile=each
        )
        .generate(PROMPT, 20)
        .token_ids
        for each in (False, True)
    ]
    assert texts[0] == texts[1]


def test_a_confidence_equal_to_the_threshold_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = decaying_threshold(0.5, 0.0, 0, LENGTH)
    (request,) = requests_of("llama", 1)
    for confidence, exit_layer in ((bar, DEPTH), (math.nextafter(bar, 1), 1)):
        sure = torch.tensor([confidence], dtype=torch.float64)
        monkeypatch.setitem(MEASURES, "hidden_state", lambda *_, sure=sure: sure)
        _, trace = decoded(target_of("llama"), request, threshold=0.5, temperature=0.0)
        assert exits_of(trace) == [exit_layer] * LENGTH
