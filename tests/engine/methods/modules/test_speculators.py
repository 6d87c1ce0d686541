"""EAGLE-3 in speculators' layout, with the norms of 3.1, beside that package's own forward.

The package asks for another version of Transformers than ours, so it is not installed by default:
pip install --no-deps --target DIR speculators openai loguru distro jiter pydantic-settings
python-dotenv hs-connectors, and PYTHONPATH=DIR.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bild_lab.engine.methods.eagle.module import (
    AUX_LAYERS,
    EAGLE3,
    JOINT_NORM,
    LAYER_NORMS,
    STATE_NORMS,
    Eagle,
    read_eagle,
)
from bild_lab.errors import UserError
from tests.engine.methods.modules.test_eagle import MODEL, scores
from tests.engine.methods.modules.tiny import random_eagle, save_package_model

WIDTH, LAYERS, VOCABULARY, KNOWN, STEPS = 24, 3, 40, 20, 3
NORMS = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "joined": {"norm_before_fc": True},
    "apart": {"fc_norm": True},
    "3.1": {"norm_output": True, "fc_norm": True},
    "all of 3.1": {"norm_output": True, "norm_before_fc": True, "norm_before_residual": True},
}


@pytest.mark.parametrize(
    "others",
    [
        {"state_norm": JOINT_NORM},
        {"state_norm": LAYER_NORMS, "feeds_normed": True},
        {"head_norms": True, "normed_residual": True},
    ],
)
def test_norms_are_written_and_read_again(tmp_path: Path, others: dict) -> None:
    eagle = random_eagle(EAGLE3, MODEL.config, known=KNOWN, **others)
    eagle.save(tmp_path)
    again = read_eagle(tmp_path, 3)
    assert again.config == eagle.config and torch.equal(scores(again), scores(eagle))
    plain = random_eagle(EAGLE3, MODEL.config, known=KNOWN)
    assert not torch.equal(scores(plain), scores(eagle))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "sliding_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "unheard"}}, "rope_type=unheard"),
        ({"num_attention_heads": None}, "num_attention_heads=None"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"norm_before_residual": "false"}, "norm_before_residual=false"),
        ({"norm_output": 1}, "norm_output=1"),
        ({"norm_before_fc": True}, "norm_before_fc=True"),  # without its weight
        ({"fc_norm": True}, "fc_norm=True"),
        ({"draft_vocab_size": KNOWN + 1}, f"draft_vocab_size={KNOWN + 1}"),
        ({"target_hidden_size": 99}, "target_hidden_size=99"),
        ({"base": "x"}, "base=x"),
        ({AUX_LAYERS: [-1, 0, 1]}, r"eagle_aux_hidden_state_layer_ids=\[-1, 0, 1\]"),
        ({AUX_LAYERS: ["0", 1, 1]}, r"eagle_aux_hidden_state_layer_ids=\['0', 1, 1\]"),
        ({AUX_LAYERS: [0] * 5}, "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_fields_that_are_not_known_are_refused(layer: dict, message: str, tmp_path: Path) -> None:
    random_eagle(EAGLE3, MODEL.config, known=KNOWN).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **layer}))
    with pytest.raises(UserError, match=message):
        read_eagle(tmp_path, 3)


@pytest.mark.parametrize("norm", [JOINT_NORM, LAYER_NORMS])
def test_a_norm_that_the_configuration_denies_is_refused(norm: str, tmp_path: Path) -> None:
    random_eagle(EAGLE3, MODEL.config, known=KNOWN, state_norm=norm).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    flag = STATE_NORMS[norm]
    (tmp_path / "config.json").write_text(json.dumps({**config, flag: False}))
    with pytest.raises(UserError, match=f"{flag}=False"):
        read_eagle(tmp_path, 3)


@pytest.mark.parametrize("shift", [-100, 100])
def test_a_vocabulary_that_the_target_does_not_have_is_refused(shift: int, tmp_path: Path) -> None:
    eagle = random_eagle(EAGLE3, MODEL.config, known=KNOWN)
    eagle.d2t += shift
    eagle.save(tmp_path)
    with pytest.raises(UserError, match="whose d2t gives tokens from"):
        read_eagle(tmp_path, 3)


def test_vocabularies_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Planted: a d2t that was never filled takes the first tokens for the drafter's."""
    eagle = random_eagle(EAGLE3, MODEL.config, known=KNOWN)
    eagle.save(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    of_target = torch.zeros(MODEL.config.vocab_size, dtype=torch.bool)
    of_target[eagle.tokens] = True
    for t2d in (of_target, torch.zeros_like(of_target)):  # the second says nothing
        save_file(weights | {"t2d": t2d}, file)
        assert read_eagle(tmp_path, 3).tokens.tolist() == eagle.tokens.tolist()
    zeros = torch.zeros_like(weights["d2t"])
    save_file(weights | {"t2d": of_target, "d2t": zeros}, file)
    with pytest.raises(UserError, match="whose d2t and t2d name different tokens"):
        read_eagle(tmp_path, 3)
    zeros[1] = -1
    save_file(weights | {"d2t": zeros}, file)
    with pytest.raises(UserError, match="whose d2t gives a token twice"):
        read_eagle(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("norms", NORMS)
def test_drafts_are_those_of_the_packages_own_forward(
    norms: str, kind: str, tmp_path: Path
) -> None:
    eagle3 = pytest.importorskip("speculators.models.eagle3.core")
    package = package_model(eagle3, kind, NORMS[norms])
    folder = tmp_path / "eagle"
    save_package_model(package, folder)
    eagle = read_eagle(folder, 8).eval()
    generator = torch.Generator().manual_seed(1)
    length = 7
    states = torch.randn(1, length, LAYERS * WIDTH, generator=generator)
    tokens = torch.randint(3, VOCABULARY, (1, length), generator=generator)
    with torch.no_grad():
        drafted = package(states, tokens, torch.zeros(1, length), ttt_steps=STEPS)
        ours = drafted_by(eagle, states, tokens)
    assert [step.tolist() for step in drafted] == [step.tolist() for step in ours]


def package_model(eagle3: object, kind: str, norms: dict) -> torch.nn.Module:
    """A model of the package with random weights."""
    from transformers import LlamaConfig, Qwen3Config

    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        attn_implementation="eager",
    )
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=KNOWN,
        eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        **norms,
    )
    torch.manual_seed(0)
    model = eagle3.Eagle3DraftModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_((parameter.ndim == 1) + scale * torch.randn(parameter.shape))
        model.d2t.copy_(torch.arange(KNOWN))
    return model


def drafted_by(eagle: Eagle, states: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What our layer drafts at every position, as ids of its head, in the package's steps: each
    attends to the first step's pairs up to its position, and to its own position's later pairs, and
    is given the text's own next token.
    """
    length = tokens.shape[1]
    keys, values = [], []
    positions = 1 + torch.arange(length)[None]
    text = tokens
    hidden, steps = eagle.fused(states), []
    for step in range(STEPS):

        def store(new_keys: torch.Tensor, new_values: torch.Tensor) -> tuple:
            keys.append(new_keys)
            values.append(new_values)
            return torch.cat(keys, 2), torch.cat(values, 2)

        causal = torch.ones(length, length, dtype=torch.bool).tril()
        own = torch.eye(length, dtype=torch.bool)
        mask = torch.cat([causal, *[own] * step], 1)[None, None]
        hidden = eagle(eagle.embed(text), hidden, positions + step, store, mask)
        steps.append(eagle.head_logits(hidden).argmax(-1))
        text = torch.cat([text[:, 1:], text.new_zeros(1, 1)], 1)
    return steps
