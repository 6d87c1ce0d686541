"""Fields of released drafters: what becomes of them, and the target that a drafter must fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bild_lab.engine.methods.drafter_fields import (
    are_layers,
    fitted,
    is_count,
    is_switch,
    layer_config,
    require_tokens_of,
)
from bild_lab.engine.methods.eagle.module import EAGLE3
from bild_lab.engine.methods.module_folder import FolderKind
from bild_lab.errors import UserError
from tests.engine.methods.modules.tiny import random_eagle
from tests.tiny import tiny_llama

KIND = FolderKind("weights", "config.json", "drafter", "give another")
PLACE = Path("a/config.json")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
}


def test_the_shapes_of_a_layer_are_those_of_the_file() -> None:
    others = {
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 77,
    }
    config = layer_config({**SIZES, **others, "num_hidden_layers": 9}, 3, PLACE, KIND)
    assert config.num_hidden_layers == 3
    assert {name: getattr(config, name) for name in SIZES | others} == SIZES | others
    plain = layer_config({**SIZES, "num_key_value_heads": None, "head_dim": None}, 1, PLACE, KIND)
    assert (plain.num_key_value_heads, plain.head_dim) == (4, 8)


@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_positions_are_those_of_the_file(rotation: dict) -> None:
    rotary = layer_config({**SIZES, **rotation}, 1, PLACE, KIND).rope_parameters
    assert (rotary["rope_theta"], rotary["rope_type"], rotary["factor"]) == (500.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", True),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", "2"),
        ("head_dim", 6.0),
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_a_field_of_another_form_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"drafter with {field}={value} is not known: a/config"):
        layer_config({**SIZES, field: value}, 1, PLACE, KIND)


def test_counts_switches_and_layers() -> None:
    assert [is_count(value) for value in (1, 0, True, "1", 1.0)] == [True, *[False] * 4]
    assert is_count(0, 0) and not is_count(-1, 0)
    assert [is_switch(value) for value in (None, True, False, 0, "")] == [True] * 3 + [False] * 2
    assert are_layers([0, 2]) and not any(map(are_layers, ([], (0, 2), None, [-1], [True])))


def test_each_token_of_a_drafter_is_one_of_the_targets() -> None:
    require_tokens_of(10, torch.tensor([0, 3, 7]), None, PLACE, KIND)  # the tokens 0, 4 and 9
    for difference, tokens in (([0, 3, 8], "0 to 10"), ([-1, 3, 7], "-1 to 9")):
        with pytest.raises(UserError, match=f"whose d2t gives tokens from {tokens} is not known"):
            require_tokens_of(10, torch.tensor(difference), None, PLACE, KIND)
    named = torch.zeros(10, dtype=torch.bool)
    named[[0, 4, 9]] = True
    require_tokens_of(10, torch.tensor([9, -1, 2]), named, PLACE, KIND)  # 9, 0 and 4: any order
    with pytest.raises(UserError, match="whose d2t and t2d name different tokens"):
        require_tokens_of(10, torch.tensor([8, -1, 2]), named, PLACE, KIND)


def target_of(depth: int = 3, width: int = 32, vocabulary: int = 40) -> SimpleNamespace:
    """A target whose text model is a part of it."""
    text = SimpleNamespace(hidden_size=width, vocab_size=vocabulary)
    config = SimpleNamespace(get_text_config=lambda decoder: text)
    return SimpleNamespace(
        checkpoint=SimpleNamespace(config=config, depth=depth, fingerprint="", path="it"),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )


def test_a_drafter_fits_a_target_with_its_sizes_and_its_layers() -> None:
    def eagle() -> torch.nn.Module:
        return random_eagle(EAGLE3, tiny_llama(0, layers=9).config)  # reads layers 2, 4 and 6

    found = fitted(eagle(), target_of(7), "it")
    assert found.fc.weight.dtype == torch.bfloat16 and not found.fc.weight.requires_grad
    for target, message in (
        (target_of(6), r"after the layers \[2, 4, 6\] of its target, but .* the last of 6"),
        (target_of(7, width=64), "whose target_size is 32, but the target's is 64"),
        (target_of(7, vocabulary=41), "whose vocabulary is 40, but the target's is 41"),
    ):
        with pytest.raises(UserError, match=message):
            fitted(eagle(), target, "it")
