"""Views of a target: they draft over its cache what their layers alone would, and leave the target
as it was.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import bild_lab
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.early_exit.views import EarlyExit, LayerSkip, LayerView
from bild_lab.engine.methods.speculative.draft_tree import ModelTreeDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.models.native.layers import NativeLayers
from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import ChainSpec, LoadedModel, OutputSpec, for_draft
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_policy
from bild_lab.lab.point.build import build_method
from tests.engine.lossless.random_models import random_source, random_target
from tests.policies import FAMILIES, WINDOWED, in_memory
from tests.sessions import needs_kernels
from tests.tiny import START

PROMPT = "ein Hund läuft im Wasser"


ENGINES = ("native", "hf")
families = pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
engines = pytest.mark.parametrize("engine", ENGINES)


def target_of(family: str, engine: str, seed: int = 0) -> LoadedModel:
    return in_memory(random_target(family, seed).double(), engine)


def alone(
    family: str, source: Source, tokens: list[int], layers: int, seed: int = 0
) -> torch.Tensor:
    """Logits of the last token by a module that has only so many decoder layers, nothing cached."""
    module = random_target(family, seed).double()
    stack = module.decoder.block if family == "t5" else module.model.layers
    del stack[layers:]
    ids = torch.tensor([[*source.prompt, *tokens]])
    if source.encoder_ids is None:
        return module(input_ids=ids, use_cache=False).logits[0, -1:]
    return module(input_ids=source.encoder_ids, decoder_input_ids=ids, use_cache=False).logits[
        0, -1:
    ]


# Transformers normalizes in float32
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


@pytest.mark.fast("1-native-t5", "2-native-llama", "2-hf-qwen3", "3-hf-gemma3")
@families
@engines
@pytest.mark.parametrize("layers", [1, 2, 3])
@torch.inference_mode()
def test_an_early_exit_scores_as_its_layers_alone(family: str, engine: str, layers: int) -> None:
    target, source = target_of(family, engine), random_source(family, random.Random(3))
    session = target.start(source, 20)
    view = EarlyExit(target, layers).start(source, 20, for_draft(session))
    close(view.extend([source.prompt[-1]]).logits, alone(family, source, [], layers))
    close(view.extend([9]).logits, alone(family, source, [9], layers))
    session.extend([source.prompt[-1], 9, 10, 11])
    session.keep([0, 1, 2])
    view.rollback(session.length)
    close(view.extend([12]).logits, alone(family, source, [9, 10, 12], layers))


ZEROED = {  # the weights behind which a block adds nothing, by what their names end in
    "attention": (
        ".SelfAttention.o.weight",
        ".EncDecAttention.o.weight",
        "self_attn.o_proj.weight",
    ),
    "feed_forward": (".wo.weight", "mlp.down_proj.weight"),
}
ZEROED["layers"] = (*ZEROED["attention"], *ZEROED["feed_forward"])


def without(family: str, part: str, layers: Sequence[int]) -> PreTrainedModel:
    """The first target with the last products of this part of these layers zero."""
    module = random_target(family, 0).double()
    for name, weight in module.named_parameters():
        if name.startswith(
            tuple(f"{stack}.{at}." for stack in ("decoder.block", "model.layers") for at in layers)
        ):
            weight.data *= not name.endswith(ZEROED[part])
    return module


@pytest.mark.fast(
    "attention-hf-llama",
    "attention-hf-t5",
    "feed_forward-native-llama",
    "layers-native-t5",
    "layers-hf-gemma3",
)
@families
@engines
@pytest.mark.parametrize("part", ZEROED)
@torch.inference_mode()
def test_a_skipped_layer_or_block_adds_nothing(family: str, engine: str, part: str) -> None:
    # nothing that the whole target ran
    source = replace(random_source(family, random.Random(3)), prompt=(START,))
    for layers in ([0], [1, 2]):
        target = target_of(family, engine)
        skip = LayerSkip(target, **{"skipped_layers": [], f"skipped_{part}": layers})
        view = skip.start(source, 20, for_draft(target.start(source, 20)))
        view.extend([START])
        expected = in_memory(without(family, part, layers), "hf").text_logits(
            replace(source, prompt=(START, 9))
        )
        close(view.extend([9]).logits, expected[-1:])


@needs_kernels
@torch.inference_mode()
def test_rows_that_a_view_has_run_come_before_its_next() -> None:
    source = random_source("llama", random.Random(3))
    target = in_memory(random_target("llama", 0).double(), "native")
    view = EarlyExit(target, 2).start(source, 20, for_draft(target.start(source, 20)))
    view.extend([source.prompt[-1], 9, 10])
    close(view.extend([11]).logits, alone("llama", source, [9, 10, 11], 2))
    target = in_memory(random_target("llama", 0).float(), "kernels")
    view = EarlyExit(target, 2).start(source, 20, for_draft(target.start(source, 20)))
    before = view.length
    drafted = view.draft([source.prompt[-1]], ChainSpec(4, frozenset()))
    # the last token that is drafted has not run
    assert view.length == before + drafted.forwards
    assert len(drafted.tokens) == drafted.forwards
    scores = alone("llama", source, drafted.tokens, 2)
    again = view.draft([drafted.tokens[-1]], ChainSpec(1, frozenset()))
    assert again.tokens == [int(scores.argmax())]
    tokens = [*drafted.tokens, *again.tokens]
    torch.testing.assert_close(
        view.extend(again.tokens).logits,
        alone("llama", source, tokens, 2).float(),
        atol=1e-4,
        rtol=1e-4,
    )


@needs_kernels
@torch.inference_mode()
def test_a_chain_that_is_drafted_in_one_go_leaves_out_the_same_blocks() -> None:
    source = random_source("llama", random.Random(3))
    target = in_memory(random_target("llama", 0).float(), "kernels")

    def view_of(**blocks: Sequence[int]) -> LayerView:
        skip = LayerSkip(target, [], **blocks)
        return skip.start(source, 20, for_draft(target.start(source, 20)))

    chains = set()
    for blocks in ({"skipped_attention": [0, 1]}, {"skipped_feed_forward": [0, 1]}):
        one_by_one, view = [source.prompt[-1]], view_of(**blocks)
        for _ in range(5):
            one_by_one.append(int(view.extend(one_by_one[-1:]).logits.argmax()))
        drafted = view_of(**blocks).draft(one_by_one[:1], ChainSpec(5, frozenset()))
        assert drafted.tokens == one_by_one[1:]
        chains.add(tuple(drafted.tokens))
    assert len(chains) == 2


@pytest.mark.fast("t5", "qwen3")
@needs_kernels
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
@torch.inference_mode()
def test_the_kernels_skip_the_same_blocks(family: str) -> None:
    source, module = random_source(family, random.Random(3)), random_target(family, 0).float()
    found = []
    for engine in ("native", "kernels"):
        target = in_memory(module, engine)
        session = target.start(source, 20)
        view = LayerSkip(target, [], [0, 2], [1]).start(source, 20, for_draft(session))
        view.extend([source.prompt[-1]])
        found.append(view.extend([9]).logits)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(
        found[1], EarlyExit(target, 3).start(source, 20, for_draft(session)).extend([9]).logits
    )


def test_blocks_that_cannot_be_told_apart_are_refused() -> None:
    target = in_memory(random_target("llama", 0), "hf")
    target.module.model.layers[1].ffn = target.module.model.layers[1].mlp  # which of both is it?
    LayerSkip(target, [1])
    with pytest.raises(
        UserError, match="cannot be skipped apart; name whole layers in policy.skipped_layers"
    ):
        LayerSkip(target, [], [0])


def test_blocks_with_the_residual_sum_inside_are_refused() -> None:
    module = random_target("llama", 0)
    target = in_memory(module, "hf")

    def with_sum(layer: torch.nn.Module) -> None:
        run = layer.mlp.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            return run(hidden) + hidden  # as if the block held a part of the stream

        layer.mlp.forward = forward
        layer.forward = partial(block_by_block, layer)

    def block_by_block(
        layer: torch.nn.Module, hidden_states: torch.Tensor, **rest: object
    ) -> torch.Tensor:
        mixed, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **rest)
        return layer.mlp(hidden_states + mixed)  # adds nothing, and yet the stream is lost

    for layer in module.model.layers:
        with_sum(layer)
    LayerSkip(target, [1])
    with pytest.raises(UserError, match="cannot be skipped apart"):
        LayerSkip(target, [], [0])


VIEWS = {
    "early_exit_speculative": {},
    "bild_early_exit": {"rollback": 0.69},  # which is lossless
    "layer_skip": {},
    "layer_skip of blocks": {
        "skipped_layers": [],
        "skipped_attention": [1],
        "skipped_feed_forward": [0],
    },
}


@pytest.mark.fast("early_exit_speculative-hf-llama")
@families
@engines
@pytest.mark.parametrize("view", list(VIEWS))
def test_what_a_view_drafts_leaves_the_targets_text_as_it_was(
    checkpoints: Path, family: str, engine: str, view: str
) -> None:
    plain = bild_lab.load(str(checkpoints / family), policy="vanilla", dtype="float64")
    options = {"policy": view.split()[0], "dtype": "float64", "engine": engine, **VIEWS[view]}
    made = bild_lab.load(str(checkpoints / family), **options).generate(PROMPT, 40)
    assert made.token_ids == plain.generate(PROMPT, 40).token_ids
    assert made.trace.drafted > 0
    if view == "layer_skip of blocks":
        part = [each for each in made.trace.forwards if each.layers is not None]
        assert {(each.skipped_attention, each.skipped_feed_forward) for each in part} == {(1, 1)}


def test_the_last_exit_is_the_target_and_every_draft_of_it_is_accepted(checkpoints: Path) -> None:
    last = {"policy": "early_exit_speculative", "exit_layer": 2}
    drafted = bild_lab.load(str(checkpoints / "llama"), dtype="float64", **last)
    trace = drafted.generate(PROMPT, 40).trace
    assert trace.accepted == trace.drafted > 0


# a layer and a slot of the cache, in the order in which rows went through
Work = list[tuple[int, int]]


def spied(model: NativeModel, patch: pytest.MonkeyPatch) -> Work:
    """What the model's layers are asked to run from now on."""
    decoder, work = model.decoder, []
    run = decoder.run

    def noted(
        x: torch.Tensor,
        rows: PlacedRows,
        cache: KeyValueCache,
        *memory: object,
        layers: range,
        **rest: object,
    ):
        assert x.shape[0] == rows.count
        slots = range(rows.stop - rows.count, rows.stop)
        work.extend((layer, slot) for layer in layers for slot in slots)
        return run(x, rows, cache, *memory, layers=layers, **rest)

    patch.setattr(decoder, "run", noted)
    return work


@pytest.mark.fast("early_exit_speculative-2-llama", "early_exit_speculative-2-gemma3")
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
@pytest.mark.parametrize("exit_layer", [2, 1, 3])
@pytest.mark.parametrize("policy", ["bild_early_exit", "early_exit_speculative"])
def test_no_layer_runs_a_token_twice(
    family: str, exit_layer: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = in_memory(random_target(family, 2), "native")
    method = build_method(
        compose_policy(policy, {"exit_layer": exit_layer}), {"target": lambda: target}
    )
    chance = random.Random(0)
    rollbacks = accepted = 0
    for _ in range(4):
        source, trace = random_source(family, chance), Trace()
        with monkeypatch.context() as patch:
            work = spied(target, patch)
            method.decode(Request(source, Limits(len(source.prompt), 24)), trace)
        expected = Counter(
            (layer, slot) for layer in range(3) for slot in range(len(source.prompt) - 1)
        )
        text = len(source.prompt) - 1
        # every layer runs the committed token and the draft, wherever it ran before
        for each in trace.rounds:
            slots = range(text, text + 1 + len(each.drafted))
            expected.update((layer, slot) for layer in range(3) for slot in slots)
            text += 1 + each.accepted
        assert Counter(work) == expected
        rollbacks += trace.rollbacks
        accepted += trace.accepted
    assert accepted > 0
    assert rollbacks > 0 or exit_layer == 3


def test_trees_of_the_targets_layers_are_refused() -> None:
    target, source = in_memory(random_target("llama", 0), "native"), Source((START, 5, 6))
    for model in (EarlyExit(target, 1), LayerSkip(target, [1])):
        drafter = ModelTreeDrafter(model, nodes=3, window=2, width=2, children=2)
        with pytest.raises(
            UserError, match="layers of the target draft chains alone; choose ModelDrafter for them"
        ):
            DraftThenVerify(target, drafter, ExactMatch()).decode(
                Request(source, Limits(3, 9)), Trace()
            )


@dataclass(frozen=True)
class Step:
    """What a view drafts with, what the target is fed then, and which of that it keeps."""

    drafted: list[int]
    fed: list[int]
    kept: int


ROUNDS = {
    "whole draft": Step([9, 10, 11], [9, 10, 11, 12], 4),
    "rejected in the middle": Step([9, 10, 11], [9, 10, 11, 12], 2),
    "fallback: nothing drafted but every row begun": Step([9], [9], 1),
    "another text from the second row on": Step([9, 10, 11], [9, 20, 21], 3),
    "another text altogether": Step([9, 10], [20, 21, 22], 1),
    "fewer rows than begun": Step([9, 10, 11], [9, 10], 2),
    "no draft": Step([], [9], 1),
}


@pytest.mark.fast(
    "native-t5-1-dtype0", "native-gemma3-1-dtype0", "hf-llama-2-dtype0", "hf-qwen3-1-dtype0"
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@families
@engines
@torch.inference_mode()
def test_verification_after_an_exit_scores_as_running_everything_does(
    family: str, engine: str, exit_layer: int, dtype: torch.dtype
) -> None:
    target = in_memory(random_target(family, 3).to(dtype), engine)
    source = random_source(family, random.Random(2))
    plain, session = target.start(source, 60), target.start(source, 60)
    view = EarlyExit(target, exit_layer).start(source, 60, for_draft(session))
    plain.prefill()
    session.prefill()
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    for name, step in ROUNDS.items():
        view.rollback(session.length)
        for token in step.drafted:
            view.extend([token])
        output_spec = OutputSpec(head_input=True)
        scores, expected = (
            session.extend(step.fed, output_spec),
            plain.extend(step.fed, output_spec),
        )
        scale = float(expected.logits.abs().max())
        assert float((scores.logits - expected.logits).abs().max()) <= tolerance * scale, name
        torch.testing.assert_close(scores.head_input, expected.head_input)
        for one in (session, plain):
            one.keep(range(step.kept))
        assert session.length == plain.length
        for ours, expected_rows in zip(cached(session), cached(plain), strict=True):
            torch.testing.assert_close(ours, expected_rows)


def cached(session: CachedSession) -> list[torch.Tensor]:
    """Keys and values of the cached rows, layer by layer."""
    layers, filled = session.layers, session.length
    if isinstance(layers, NativeLayers):
        return [*layers.cache.keys[:, :, :filled], *layers.cache.values[:, :, :filled]]
    return [
        store[0, :, :filled] for each in layers._cache.layers for store in (each.keys, each.values)
    ]


@torch.inference_mode()
def test_begun_rows_stay_after_the_cache_has_grown() -> None:
    target = in_memory(random_target("llama", 0), "native")
    source = Source((START,))
    session = target.start(source, 4)
    view = EarlyExit(target, 1).start(source, 4, for_draft(session))
    # one by one past what there is
    tokens = [3 + index % 30 for index in range(session.layers.cache.capacity + 5)]
    for token in tokens:
        view.extend([token])
    expected = target.start(source, 200).extend(tokens)
    torch.testing.assert_close(session.extend(tokens).logits, expected.logits)


def test_layers_that_do_not_give_the_same_one_by_one_are_refused() -> None:
    module = random_target("llama", 0)
    whole = module.model.forward
    target = in_memory(module, "hf")
    EarlyExit(target, 1)
    module.model.forward = lambda *args, **kwargs: whole(*args, **kwargs)  # as before
    EarlyExit(target, 1)
    layer = module.model.layers[2]
    run, calls = layer.forward, []

    def counting(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(1)  # a layer whose result hangs on what ran before it
        return run(hidden_states, *args, **kwargs) * (1 + 0.1 * len(calls))

    layer.forward = counting
    with pytest.raises(UserError, match="do not give the same one by one as all together"):
        EarlyExit(target, 1)


def test_something_is_left_out_and_something_runs() -> None:
    target, every = in_memory(random_target("llama", 0), "native"), [0, 1, 2]
    assert LayerSkip(target, [0, 1]).layers == (2,)
    assert LayerSkip(target, [0, 1], [2]).layers == (2,)  # its feed-forward runs
    for layers in ([3], [-1], [True], 1, "1"):
        with pytest.raises(
            UserError, match="skipped_layers must name some, not all, of the layers"
        ):
            LayerSkip(target, layers)
    for skipped in (([],), (every,), ([], every, every), ([0], [1, 2], [1, 2])):
        with pytest.raises(UserError, match="must name some, not all, of the layers 0 to 2, got"):
            LayerSkip(target, *skipped)


@pytest.mark.fast(
    "early_exit_speculative-exit_layer-0",
    "layer_skip-skipped_layers-wrong5",
    "layer_skip-skipped_layers-3",
    "layer_skip-skipped_layers-wrong9",
)
@pytest.mark.parametrize(
    ("policy", "knob", "wrong"),
    [
        *(("early_exit_speculative", "exit_layer", wrong) for wrong in (0, 99, True, 1.5)),
        *(
            ("layer_skip", "skipped_layers", wrong)
            for wrong in ([], [99], [-1], 3, "all", [*range(8)])
        ),
        ("layer_skip", "skipped_attention", [True]),
        ("layer_skip", "skipped_feed_forward", [99]),
    ],
)
def test_layers_that_the_target_does_not_have_are_refused(
    checkpoints: Path, policy: str, knob: str, wrong: object
) -> None:
    with pytest.raises(UserError, match=knob):
        bild_lab.load(str(checkpoints / "t5"), policy=policy, **{knob: wrong})
