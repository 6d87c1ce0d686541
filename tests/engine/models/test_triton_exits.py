"""A row that leaves early by the Triton kernels, in one program: it is the row that runs layer by
layer, to the last bit.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from bild_lab.engine.methods.early_exit.calm import leave_layer_by_layer, saturation
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.session import OutputSpec
from tests.engine.models.test_triton import build, tickets_left
from tests.triton_interpreter import interpreter, needs_triton, triton_session  # noqa: F401

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

NEVER = 1.0  # a cosine is at most 1
ALWAYS = -1.0


def after_prompt(session: CachedSession) -> CachedSession:
    """The session after its prompt. Slots that no row has written hold NaN."""
    for store in (session.layers.cache.keys, session.layers.cache.values):
        store.fill_(torch.nan)
    session.prefill()
    return session


def caches(session: CachedSession) -> torch.Tensor:
    """What stands in the slots of the text's rows."""
    cache = session.layers.cache
    written = torch.stack([cache.keys, cache.values])[..., : session.length, :]
    assert written.isfinite().all()
    return written


@pytest.mark.fast("t5 v1.0")
@pytest.mark.parametrize("name", ["t5 v1.0", "t5 v1.1", "llama", "qwen2 windows", "gemma3"])
@torch.inference_mode()
def test_a_row_leaves_where_and_with_what_it_does_layer_by_layer(name: str) -> None:
    _, decoder, source = build(name, torch.float16 if name == "llama" else torch.float32)
    depth, token = len(decoder.layers), 7
    first = after_prompt(triton_session(decoder, source, 64))
    states = first.extend([token], OutputSpec(hidden=range(depth + 1))).hidden
    cosines = [float(saturation(before, after, None)) for before, after in pairwise(states[:-1])]
    thresholds = [ALWAYS, *(cosine - 1e-3 for cosine in cosines), NEVER]
    exits, captures = [], None
    for threshold in thresholds:
        program, loop = (
            after_prompt(triton_session(decoder, source, 64, like=first)) for _ in range(2)
        )
        logits, layers = program.forward_until_confident(token, threshold)
        if captures is not None:  # a threshold is no other program
            assert program.layers.packed.captures == captures
        expected, expected_layers = leave_layer_by_layer(loop, token, threshold, saturation, depth)
        assert layers == expected_layers
        assert torch.equal(logits, expected)
        assert torch.equal(caches(program), caches(loop))
        assert tickets_left(program) == 0
        captures = program.layers.packed.captures
        exits.append(layers)
    assert exits[0] == 1 and exits[-1] == depth


def test_the_kernel_after_a_measurement_begins_in_turn() -> None:
    """It reads whether the row runs before it waits; no GPU here would show it."""
    from bild_lab.engine.models.native.gpu.exits import leave_if_confident
    from bild_lab.engine.models.native.gpu.plan import ForwardPlan, PassShape
    from tests.triton_compiler import SIZES, shapes_alone

    plan = ForwardPlan(shapes_alone(SIZES["t5-large"]), (9, 0))
    shape = PassShape(1, 1, 1, 1, 1, layers=(0,), exits=True)
    launches = plan.launches(shape)
    overlaps = [launch.constants.get("launch_pdl", False) for launch in launches]
    measures = [launch.kernel is leave_if_confident for launch in launches]
    assert sum(measures) == 2
    assert overlaps == [True, *(not measured for measured in measures[:-1])]
