"""Which keys a tree's rows see in a model with windows, which layers a decoder has, and where a
forward may end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from bild_lab.engine.models.hf.layer_control import (
    Plan,
    along_branches,
    decoder_layers,
    wrap_blocks,
    wrap_layers,
)
from bild_lab.engine.models.placed_rows import PlacedRows
from tests.tiny import tiny_llama, tiny_t5
from tests.tiny_architectures import build

WINDOW = 2


def near(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """A model's own rule, by positions."""
    return (key <= row) & (key > row - WINDOW)


def test_a_row_sees_a_prefix_its_window_of_the_text_and_its_own_branch() -> None:
    # slots: a prefix of two, a text of three, then two rows at one position, and a child of the first
    keys = torch.tensor([-2, -1, 0, 1, 2, 3, 3, 4])
    visible = torch.ones(3, 8, dtype=torch.bool)
    visible[0, 6:] = visible[1, [5, 7]] = visible[2, 6] = False
    placed = PlacedRows(slice(5, 8), 8, torch.tensor([3, 3, 4]), visible, keys)
    mask = along_branches(placed, near)
    rows, slots = torch.arange(5, 8)[:, None], torch.arange(8)[None]
    seen = mask(torch.tensor(0), torch.tensor(0), rows, slots)
    assert [row.nonzero().flatten().tolist() for row in seen] == [
        [0, 1, 4, 5],
        [0, 1, 4, 6],
        [0, 1, 5, 7],
    ]


def test_a_forward_ends_once_its_layers_ran_and_the_states_asked_for_are_there() -> None:
    plan = Plan(start=0, layers=[0, 1], hidden=(3,), stop=True)
    assert [plan.ends_after(index, index == 3) for index in range(4)] == [
        False,
        False,
        False,
        False,
    ]
    plan.layers, plan.hidden = [0, 1], (1,)
    assert [plan.ends_after(index, index == 3) for index in range(3)] == [False, True, False]
    plan.layers, plan.hidden = [], (2,)  # none runs, and its states are those before
    assert [plan.ends_after(index, index == 3) for index in range(3)] == [False, True, True]
    plan.layers, plan.hidden = None, (1,)  # all run: those behind store their keys too
    assert [plan.ends_after(index, index == 3) for index in range(4)] == [False] * 3 + [True]
    plan.stop = False
    assert not any(plan.ends_after(index, index == 3) for index in range(3))


def test_states_replace_the_input_of_the_first_layer_that_runs() -> None:
    states = torch.zeros(1, 4)
    first = {None: 0, (): 0, (0, 2): 0, (2, 3): 2}
    for layers, expected in first.items():
        plan = Plan(start=0, layers=layers, states=states)
        assert [index for index in range(4) if plan.reads_states(index)] == [expected]
    assert not any(Plan(start=0, layers=(0, 2)).reads_states(index) for index in range(4))


def test_a_decoder_may_have_another_depth_than_its_encoder() -> None:
    module = tiny_t5(0, layers=3, decoder_layers=2)
    assert len(decoder_layers(module)) == 2


def test_layers_are_found_in_the_base_model_and_in_a_part_of_it() -> None:
    for name in ("llama", "opt"):  # OPT's base model holds a decoder, which holds the layers
        module = build(name)
        assert len(decoder_layers(module)) == module.config.num_hidden_layers


def test_a_mask_that_others_make_is_as_before() -> None:
    wrap_layers(tiny_llama(0))
    for name, make in (("sdpa", sdpa_mask), ("eager", eager_mask)):
        sizes = {"batch_size": 1, "q_length": 5, "kv_length": 5, "device": torch.device("cpu")}
        sizes["allow_is_causal_skip"] = False
        rules = {"mask_function": sliding_window_causal_mask_function(2)}
        for options in (sizes, sizes | rules):
            assert torch.equal(ALL_MASK_ATTENTION_FUNCTIONS[name](**options), make(**options))


@pytest.mark.parametrize("make", [tiny_llama, tiny_t5])
def test_a_module_serves_any_number_of_texts(make: Callable[[int], PreTrainedModel]) -> None:
    module = make(0).eval()
    ids = torch.tensor([[5, 9, 12]])
    inputs = {"input_ids": ids}
    if module.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    expected = module(**inputs).logits
    for _ in range(sys.getrecursionlimit()):  # each text wraps; planted: a wrapper around a wrapper
        wrap_layers(module)
        assert wrap_blocks(module)
    assert torch.equal(module(**inputs).logits, expected)
