"""EAGLE's folders: those of SafeAILab's releases and of vLLM's speculators hold the same layer;
others are refused.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bild_lab.engine.methods.eagle.module import (
    EAGLE,
    EAGLE3,
    JOINT_NORM,
    LAYER_NORMS,
    STATE_NORMS,
    Eagle,
    read_eagle,
    spread_layers,
)
from bild_lab.errors import UserError
from tests.engine.methods.drafters.naive import fused, head_scores, layer
from tests.engine.methods.modules.tiny import random_eagle
from tests.loopback_hub import REPOSITORY, loopback_hub
from tests.policies import load
from tests.tiny import tiny_llama

MODEL = tiny_llama(0, layers=3)
ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
FEED_FORWARD = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
# the names in the files, as the code that reads the releases has them
NAMES = {
    EAGLE: {
        "fc.weight",
        *(
            f"layers.0.{name}"
            for name in [*ATTENTION, *FEED_FORWARD, "post_attention_layernorm.weight"]
        ),
    },
    EAGLE3: {
        *("fc.weight", "norm.weight", "lm_head.weight", "d2t"),
        *(f"midlayer.{name}" for name in [*ATTENTION, *FEED_FORWARD]),
        *(
            f"midlayer.{name}.weight"
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        ),
    },
}


TOKENS = [5, 9, 12, 30]


def random_states(eagle: Eagle) -> torch.Tensor:
    """Of the target, a row for each of TOKENS."""
    width = eagle.config.target_size * max(1, len(eagle.config.target_layers))
    return torch.randn(4, width, generator=torch.Generator().manual_seed(0))


def scores(eagle: Eagle, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Of a few pairs, so that every weight matters."""
    eagle.attach(MODEL.model.embed_tokens.weight, MODEL.lm_head.weight, bias)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        outputs = eagle(
            eagle.embed(torch.tensor([TOKENS])),
            eagle.fused(random_states(eagle)[None]),
            torch.arange(4),
            lambda keys, values: (keys, values),
            mask,
        )
        return eagle.logits(outputs)


@pytest.mark.parametrize(
    ("variant", "form"),
    [
        (EAGLE, {}),
        (EAGLE, {"bias": (True, True), "embeds": True}),
        (EAGLE3, {}),
        (EAGLE3, {"state_norm": JOINT_NORM, "embeds": True}),
        (EAGLE3, {"state_norm": LAYER_NORMS, "feeds_normed": True}),
        (EAGLE3, {"head_norms": True, "normed_residual": True, "bias": (True, True)}),
    ],
)
@torch.no_grad()
def test_each_form_of_the_layer_scores_as_it_is_defined(variant: str, form: dict) -> None:
    eagle = random_eagle(variant, MODEL.config, known=20 if variant == EAGLE3 else None, **form)
    found = scores(eagle, torch.zeros(40).index_fill(0, torch.tensor([6]), -torch.inf))[0]
    states = [fused(eagle, row) for row in random_states(eagle)]
    for pairs in (1, 4):
        expected = head_scores(eagle, layer(eagle, TOKENS[:pairs], states[:pairs]))
        torch.testing.assert_close(found[pairs - 1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [None, JOINT_NORM, LAYER_NORMS])
def test_the_configuration_says_what_the_releases_read_in_it(
    norm: str | None, tmp_path: Path
) -> None:
    fusion_alone = random_eagle(EAGLE, MODEL.config, bias=(True, False))
    fusion_alone.save(tmp_path / "eagle")
    assert json.loads((tmp_path / "eagle/config.json").read_text())["bias"] is True
    form = {
        "normed_residual": norm is None,
        "feeds_normed": norm == LAYER_NORMS,
        "state_norm": norm,
    }
    random_eagle(EAGLE3, MODEL.config, known=20, **form).save(tmp_path / "eagle3")
    written = json.loads((tmp_path / "eagle3/config.json").read_text())
    assert written["norm_before_residual"] is (norm is None)
    assert written["norm_output"] is (norm == LAYER_NORMS)
    assert [flag in written for flag in STATE_NORMS.values()] == [
        norm == JOINT_NORM,
        norm == LAYER_NORMS,
    ]


@pytest.mark.parametrize("variant", [EAGLE, EAGLE3])
def test_own_folders_have_the_names_of_the_releases(variant: str, tmp_path: Path) -> None:
    saved = random_eagle(variant, MODEL.config, known=20 if variant == EAGLE3 else None)
    saved.save(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == NAMES[variant]
    again = read_eagle(tmp_path, 3)
    assert torch.equal(scores(again), scores(saved))
    assert again.config.target_layers == saved.config.target_layers


def released_config(**others: object) -> dict[str, object]:
    """As in SafeAILab's repository, of tiny sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 24,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": 40,
        **others,
    }


def written(
    folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor], pickled: bool = False
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("pickled", [True, False], ids=["bin", "safetensors"])
def test_eagles_in_safeailabs_files_score_as_they_did_when_saved(
    pickled: bool, tmp_path: Path
) -> None:
    first = random_eagle(EAGLE, MODEL.config, bias=(True, True), embeds=True)
    first.save(tmp_path / "own")
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    assert {"embed_tokens.weight", "fc.bias", "layers.0.self_attn.q_proj.bias"} <= set(tensors)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)  # of older releases
    eagle = read_eagle(written(tmp_path / "eagle", released_config(bias=True), tensors, pickled), 3)
    assert eagle.config.variant == EAGLE and torch.equal(scores(eagle), scores(first))

    third = random_eagle(EAGLE3, MODEL.config, known=20)
    third.save(tmp_path / "own3")
    tensors = {
        **load_file(tmp_path / "own3" / "model.safetensors"),
        "t2d": torch.zeros(40, dtype=torch.bool),
    }
    config = released_config(draft_vocab_size=20, rope_theta=10000.0)
    eagle = read_eagle(written(tmp_path / "eagle3", config, tensors, pickled), 3)
    assert eagle.config.variant == EAGLE3 and torch.equal(scores(eagle), scores(third))
    assert eagle.config.target_layers == spread_layers(3)


def test_eagles_in_speculators_files_score_as_they_did_when_saved(tmp_path: Path) -> None:
    first = random_eagle(EAGLE, MODEL.config, bias=(True, False))
    first.save(tmp_path / "own")
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    renamed = {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensors[name]
        for name in tensors
    }
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "fusion_bias": True,
        "layernorms": False,
        "transformer_layer_config": released_config(),
        "speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": "a model"}},
    }
    eagle = read_eagle(written(tmp_path / "eagle", config, renamed), 3)
    assert eagle.config.variant == EAGLE and torch.equal(scores(eagle), scores(first))

    third = random_eagle(EAGLE3, MODEL.config, known=20, embeds=True, normed_residual=True)
    third.save(tmp_path / "own3")
    tensors = load_file(tmp_path / "own3" / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensors[name] for name in tensors}
    renamed["verifier_norm.weight"] = torch.ones(32)  # a copy of the target's
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 20,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "transformer_layer_config": released_config(),
    }
    eagle = read_eagle(written(tmp_path / "eagle3", config, renamed), 8)
    assert eagle.config.target_layers == (0, 1, 2)
    assert eagle.config.normed_residual and torch.equal(scores(eagle), scores(third))


def test_a_head_of_some_tokens_scores_no_others() -> None:
    eagle = random_eagle(EAGLE3, MODEL.config, known=10)
    logits = scores(eagle)
    known = torch.arange(10) * 2  # d2t is the difference
    assert eagle.tokens.tolist() == known.tolist()
    assert logits[..., known].isfinite().all() and logits.isneginf().sum() == 4 * 30


def test_the_released_layers_are_read_where_the_target_is_deep_enough() -> None:
    assert spread_layers(32) == (2, 16, 29)
    assert spread_layers(10) == (2, 5, 7)
    assert [spread_layers(depth) for depth in (6, 2, 1)] == [(2, 3, 5), (0, 1, 1), (0, 0, 0)]


@pytest.mark.parametrize(
    ("depth", "named", "read"),
    [
        (36, [1, 17, 32], (2, 18, 33)),  # gpt-oss, by NVIDIA
        (94, [1, 46, 90], (2, 47, 91)),  # Qwen3 235B, by NVIDIA
        (36, [2, 18, 33], (2, 18, 33)),
        (36, [24, 30, 35], (24, 30, 35)),
        (36, [1, 9, 17], (1, 9, 17)),
    ],
)
def test_layers_named_by_their_outputs_are_those_of_the_released_code(
    depth: int, named: list[int], read: tuple[int, ...], tmp_path: Path
) -> None:
    """Planted: the states one layer earlier, which the drafter never saw in its training."""
    random_eagle(EAGLE3, MODEL.config).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = named
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_eagle(tmp_path, depth).config.target_layers == read


def test_what_is_no_eagle_or_does_not_fit_is_refused(tmp_path: Path, checkpoints: Path) -> None:
    for policy in ("eagle", "eagle3"):
        with pytest.raises(UserError) as refused:
            load(checkpoints, "llama", policy, heads=None)
        hint = str(refused.value)
        assert hint.startswith(
            f"policy {policy} needs a trained layer; make one with: python scripts"
        )
        assert f" module={policy} " in hint and f"policy.heads=outputs/{policy}/heads" in hint
    with pytest.raises(UserError, match="is no EAGLE: it needs config.json and model.safetensors"):
        load(checkpoints, "llama", "eagle", heads=str(tmp_path / "nothing"))
    config = tiny_llama(0).config
    random_eagle(EAGLE, config).save(tmp_path / "eagle")
    with pytest.raises(
        UserError, match="is of the variant eagle, got policy=eagle3; use policy=eagle"
    ):
        load(checkpoints, "llama", "eagle3", heads=str(tmp_path / "eagle"))
    random_eagle(EAGLE, config, base={"fingerprint": "other weights"}).save(tmp_path / "other")
    with pytest.raises(
        UserError, match="trained for another model, whose weights are not those of .*llama"
    ):
        load(checkpoints, "llama", "eagle", heads=str(tmp_path / "other"))
    random_eagle(EAGLE3, tiny_llama(0, layers=9).config).save(tmp_path / "deep")
    with pytest.raises(
        UserError,
        match=r"after the layers \[2, 4, 6\] of its target, but these must lie before the last",
    ):
        load(checkpoints, "llama", "eagle3", heads=str(tmp_path / "deep"))
    tensors = load_file(tmp_path / "eagle" / "model.safetensors")
    deeper = released_config(num_hidden_layers=2)
    speculators = {"speculators_model_type": "eagle", "transformer_layer_config": deeper}
    for name, released in (("two", deeper), ("speculators", speculators)):
        two = written(tmp_path / name, released, tensors)
        with pytest.raises(UserError, match="an EAGLE has one layer, got .* with 2"):
            load(checkpoints, "llama", "eagle", heads=str(two))
    del tensors["layers.0.self_attn.o_proj.weight"]
    with pytest.raises(UserError, match=r"must hold o_proj.weight \[32, 24\], got nothing"):
        read_eagle(written(tmp_path / "cut", released_config(), tensors), 2)


class Harmful:
    def __reduce__(self):
        return (print, ("harm was done",))


def test_a_pickle_that_is_more_than_tensors_is_refused_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "harmful", released_config(), {})
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Harmful()}, protocol=2))
    with pytest.raises(UserError, match=r"cannot read .*pytorch_model\.bin"):
        read_eagle(folder, 2)
    assert "harm" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_eagle_comes_from_the_hub(tmp_path: Path) -> None:
    random_eagle(EAGLE, MODEL.config).save(tmp_path / "eagle")
    files = {file.name: file.read_bytes() for file in (tmp_path / "eagle").iterdir()}
    code = (
        "from bild_lab.engine.methods.eagle.module import KIND, WEIGHTS, read_eagle\n"
        "from bild_lab.engine.methods.module_folder import released_folder\n"
        "print(read_eagle(released_folder('me/eagle', KIND, WEIGHTS), 3).config.variant)"
    )
    with loopback_hub({}, {"me/eagle": files}) as endpoint:
        places = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(REPOSITORY),
        }
        switches = {"HF_HUB_DISABLE_XET": "1", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**places, **switches},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.stdout.strip() == "eagle", done.stderr
