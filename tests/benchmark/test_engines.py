"""The real engines emit the tokens of `vanilla` in float32, on both families of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bild_lab
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.store.records import Sweep
from tests.benchmark.fake import needs_peers
from tests.checkpoints import SHARED, needs_shared, tiny_checkpoints

pytestmark = [pytest.mark.slow, needs_peers]
RUNS = [
    ("ctranslate2", "t5"),
    ("ctranslate2", "llama"),
    ("openvino", "t5"),
    ("openvino", "llama"),
    ("openvino_speculative", "llama"),
]
DRAFTS = {"t5": "t5-tiny", "llama": "llama-small"}
TEMPLATES = {"t5": "{}", "llama": "German: {} English:"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # shared by these tests
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize(("policy", "family"), RUNS)
def test_random_models_give_the_tokens_of_vanilla_at_every_limit(policy: str, family: str) -> None:
    target, draft = str(tiny_checkpoints() / family), str(tiny_checkpoints() / f"{family}-draft")
    vanilla, peer = bild_lab.load(target, draft, "vanilla"), bild_lab.load(target, draft, policy)
    for prompt in ("w5 w9 w30 w12", "w7", "w39 w38 w3 w3 w20 w21 w22 w23 w24"):
        for limit in (1, 2, 7, 25):
            expected = vanilla.generate(prompt, max_new_tokens=limit).token_ids
            assert peer.generate(prompt, max_new_tokens=limit).token_ids == expected
    peer.method.close()


@needs_shared
@pytest.mark.parametrize(("policy", "family"), RUNS)
def test_trained_models_give_the_tokens_of_vanilla(policy: str, family: str) -> None:
    models = SHARED / "models"
    pair = str(models / f"{family}-large"), str(models / DRAFTS[family])
    vanilla, peer = bild_lab.load(*pair, "vanilla"), bild_lab.load(*pair, policy)
    rows = (SHARED / "data" / "multi30k" / "test.jsonl").read_text().splitlines()[:8]
    for row in rows:
        prompt = TEMPLATES[family].format(json.loads(row)["de"])
        expected = vanilla.generate(prompt, max_new_tokens=48).token_ids
        assert peer.generate(prompt, max_new_tokens=48).token_ids == expected
    peer.method.close()


@needs_shared
@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize(("policy", "bits"), [("ctranslate2", 8), ("openvino", 8), ("openvino", 4)])
def test_quantized_weights_give_nearly_the_tokens_of_vanilla(
    policy: str, bits: int, family: str
) -> None:
    target = str(SHARED / "models" / f"{family}-large")
    vanilla = bild_lab.load(target, policy="vanilla")
    peer = bild_lab.load(target, policy=policy, bits=bits)
    rows = (SHARED / "data" / "multi30k" / "test.jsonl").read_text().splitlines()[:8]
    prompts = [TEMPLATES[family].format(json.loads(row)["de"]) for row in rows]
    texts = [
        [each.generate(prompt, max_new_tokens=24).token_ids for prompt in prompts]
        for each in (vanilla, peer)
    ]
    alike = [sum(map(int.__eq__, *pair)) / len(pair[0]) for pair in zip(*texts, strict=True)]
    # after the first token that differs few are alike
    assert sum(alike) / 8 > (0.8 if bits == 8 else 0.25)
    stored = sum(file.stat().st_size for file in peer.method._files()[0].rglob("*"))
    in_16_bits = Path(target, "model.safetensors").stat().st_size
    assert stored < (0.6 if bits == 8 else 0.4) * in_16_bits
    peer.method.close()


def test_a_sweep_measures_a_peer_beside_the_others(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = Sweep(tmp_path / "sweep")
    words = [
        f"pair.target={tiny_checkpoints() / 'llama'}",
        "dataset=multi30k",
        f"dataset.path={data}",
    ]
    for policy in ("hf_generate", "openvino"):
        run_point(prepare(compose_config([*words, f"policy={policy}", "dataset.limit=3"])), sweep)
    first, second = sorted(sweep.results(), key=lambda each: each.policy)
    assert (first.engine, second.engine) == ("hf", "openvino")
    assert dict(first.setting) == dict(second.setting)  # one curve
    assert second.agreement_with_target == 1.0
    assert "openvino-genai" in second.facts["versions"]
