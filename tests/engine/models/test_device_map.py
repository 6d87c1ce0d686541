"""Targets that Accelerate deals out to devices and to disk: the same texts, and what cannot be is
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.integrations import accelerate

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.admission import input_device
from bild_lab.engine.models.hf.layer_control import Plan, following
from bild_lab.engine.models.hf.model import SpreadModel
from bild_lab.engine.models.hf.slot_cache import SlotCache
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.prepare import Point, prepare
from bild_lab.lab.point.read_model import configured_model, load_model
from bild_lab.lab.store.records import Sweep
from tests.policies import load

PROMPT = "w5 w9 w12 w30 w7"
CPU = torch.device("cpu")
# room for some layers beside the largest, which Accelerate keeps free
BYTES = {"llama": 80_000, "t5": 140_000}


@pytest.fixture(autouse=True)
def fresh() -> None:
    load_model.cache_clear()  # what is shared was placed in another test's memory


@pytest.fixture(params=["llama", "t5"])
def scarce(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A family of models for which the machine's memory does not suffice."""
    monkeypatch.setattr(
        accelerate, "accelerate_max_memory", lambda limits: {"cpu": BYTES[request.param]}
    )
    return request.param


def tokens(checkpoints: Path, family: str, policy: str, **options: object) -> list[int]:
    return load(checkpoints, family, policy, **options).generate(PROMPT, 24).token_ids


@pytest.mark.fast("sequential")
@pytest.mark.parametrize("device_map", ["auto", "sequential"])
def test_a_target_that_fits_is_as_without_a_map(device_map: str, checkpoints: Path) -> None:
    spread = load(checkpoints, "llama", "bild", device_map=device_map)
    assert spread.generate(PROMPT, 24).token_ids == tokens(
        checkpoints, "llama", "bild", engine="hf"
    )
    assert spread.target.parts == {"cpu": 1}
    assert [model.engine for model in spread.models] == ["hf", "hf"]


@pytest.mark.fast("llama-medusa")
@pytest.mark.parametrize("policy", ["bild", "speculative", "bita", "medusa", "hf_assisted"])
def test_layers_on_disk_decode_the_same_text(policy: str, scarce: str, checkpoints: Path) -> None:
    if scarce == "t5" and policy in ("bita", "medusa"):
        pytest.skip("of decoder-only models")
    decoder = load(checkpoints, scarce, policy, device_map="auto")
    assert decoder.generate(PROMPT, 24).token_ids == tokens(
        checkpoints, scarce, policy, engine="hf"
    )
    assert decoder.target.parts["cpu"] >= 2 and decoder.target.parts["disk"] >= 2
    assert any(weight.is_meta for weight in decoder.target.module.parameters())


def test_tokens_go_in_where_they_are_computed_not_where_the_first_weights_lie(
    checkpoints: Path,
) -> None:
    where = {"": "disk"}
    module = Checkpoint(str(checkpoints / "llama")).weights(torch.float32, device_map=where)
    assert module.device.type == "meta"
    assert input_device(module) == CPU
    model = SpreadModel(Checkpoint(str(checkpoints / "llama")), CPU, torch.float32, where)
    logits = model.start(model.source(PROMPT), 8).extend([7, 8]).logits
    whole = load_model(str(checkpoints / "llama"), None, "cpu", torch.float32, "hf")
    assert torch.equal(logits, whole.start(whole.source(PROMPT), 8).extend([7, 8]).logits)


def test_vocabulary_matrices_that_are_elsewhere_are_refused(checkpoints: Path) -> None:
    checkpoint = Checkpoint(str(checkpoints / "llama"))
    kept = SpreadModel(checkpoint, CPU, torch.float32, {"": "cpu"}).vocabulary_weights()
    module = checkpoint.weights(torch.float32)
    assert torch.equal(kept[0], module.model.embed_tokens.weight) and torch.equal(
        kept[1], module.lm_head.weight
    )
    with pytest.raises(
        UserError, match="reads the target's vocabulary matrices, and .* is spread over devices"
    ):
        SpreadModel(checkpoint, CPU, torch.float32, {"": "disk"}).vocabulary_weights()


def test_a_model_whose_tokens_go_in_elsewhere_than_its_drafters_is_refused(
    checkpoints: Path,
) -> None:
    model = SpreadModel(
        Checkpoint(str(checkpoints / "llama")), torch.device("meta"), torch.float32, "auto"
    )
    with pytest.raises(
        UserError, match="takes its tokens on cpu, as no part of it found room on meta"
    ):
        model.load()


def test_a_prefix_goes_to_the_device_of_its_layer() -> None:
    cache = SlotCache()
    here, elsewhere = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 5, 4, device="meta")
    with following(Plan(start=0)):
        for layer in (0, 1):
            cache.update(here, here, layer)
    with following(Plan(start=3)):
        cache.update(elsewhere, elsewhere, 1)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 2, 3, 4), (1, 2, 8, 4)]
    assert [layer.values.device.type for layer in cache.layers] == ["cpu", "meta"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"device_map": "spread"},
            "must be one of null, auto, balanced, balanced_low_0, sequential, got 'spread'",
        ),
        ({"device_map": "cuda:1"}, "got 'cuda:1'"),
        (
            {"device_map": "auto", "engine": "native"},
            "spread over devices runs on hf; set runtime.engine=hf or auto",
        ),
        ({"device_map": "auto", "compile": True}, "only the native engine compiles"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    options: dict[str, object], message: str, checkpoints: Path
) -> None:
    with pytest.raises(UserError, match=message):
        load(checkpoints, "llama", "bild", **options)


LAYERS = {  # of the policies that run some of the target's layers, their knobs
    "layer_skip": {"skipped_layers": [1], "skipped_attention": [0]},
    "early_exit_speculative": {"exit_layer": 1},
    "bild_early_exit": {"exit_layer": 1},
    "calm": {"threshold": 0.5},
}


@pytest.mark.fast("llama-layer_skip")
@pytest.mark.parametrize("policy", LAYERS)
def test_layers_of_a_spread_target_draft_as_those_on_one_device(
    policy: str, scarce: str, checkpoints: Path
) -> None:
    """Self-SpecDec skips layers and blocks of Llama-2-70B, which lies on several GPUs."""
    knobs = LAYERS[policy]
    spread = load(checkpoints, scarce, policy, device_map="auto", **knobs)
    whole = load(checkpoints, scarce, policy, engine="hf", **knobs)
    here, there = spread.generate(PROMPT, 24), whole.generate(PROMPT, 24)
    assert here.token_ids == there.token_ids
    assert here.trace.rounds == there.trace.rounds
    assert spread.target.parts["disk"] >= 2


def test_a_policy_that_runs_layers_at_once_asks_for_one_device(checkpoints: Path) -> None:
    with pytest.raises(UserError, match=r"is spread over devices; leave out runtime\.device_map"):
        load(checkpoints, "llama", "ppd", device_map="auto")


def test_a_map_decides_the_engine_of_a_command_that_names_none(checkpoints: Path) -> None:
    cfg = compose_config([f"model.path={checkpoints / 'llama'}"], "calibration")
    assert configured_model(cfg, CPU, "float32").engine != "hf"
    assert isinstance(configured_model(cfg, CPU, "float32", "auto"), SpreadModel)


@pytest.fixture
def configured(
    checkpoints: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.chdir(tmp_path)
    words = [
        f"pair.target={checkpoints / 'llama'}",
        "dataset=multi30k",
        f"dataset.path={data}",
        "dataset.limit=2",
    ]
    return [
        *words,
        "decoding.max_new_tokens=6",
        "policy=vanilla",
        "measure.baseline=null",
        "measure.repeats=1",
    ]


def point_of(words: list[str], *more: str) -> Point:
    return prepare(compose_config([*words, *more]))


@pytest.mark.slow
def test_a_map_is_part_of_a_points_setting_and_its_absence_is_not(configured: list[str]) -> None:
    plain, spread = point_of(configured), point_of(configured, "runtime.device_map=auto")
    assert "device_map" not in plain.setting
    assert spread.setting["device_map"] == "auto"
    other = point_of(configured, "runtime.device_map=balanced")
    assert len({plain.id, spread.id, other.id}) == 3
    assert spread.setting["hardware"] == plain.setting["hardware"]


@pytest.mark.slow
def test_a_result_says_how_many_parts_lie_where(
    configured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate, "accelerate_max_memory", lambda limits: {"cpu": BYTES["llama"]})
    result = run_point(
        point_of(configured, "runtime.device_map=auto"), Sweep(tmp_path / "outputs" / "spread")
    )
    parts = result.environment["parts"]
    assert set(parts) == {"cpu", "disk"} and sum(parts.values()) > 3
