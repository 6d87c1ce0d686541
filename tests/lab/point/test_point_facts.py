"""A point's result holds the facts that figures ask for, and no fact decides what the point is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bild_lab.engine.methods.early_exit.layer_heads import LayerHeadsConfig
from bild_lab.engine.methods.module_folder import SavedModule
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.identity import MODULE_CONFIGS, _settings_in
from bild_lab.lab.point.prepare import Point, prepare
from bild_lab.lab.store.records import Sweep
from tests.engine.methods.modules.tiny import files_of, random_adapter
from tests.engine.vocabularies.foreign import foreign_module
from tests.tiny import save, tiny_llama


def point(checkpoints: Path, data: Path, *overrides: str) -> Point:
    pair = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    rest = [
        "dataset=multi30k",
        f"dataset.path={data}",
        "dataset.limit=2",
        "decoding.max_new_tokens=4",
    ]
    return prepare(compose_config([*pair, *rest, *overrides]))


def test_a_result_holds_the_pair_and_whether_its_drafter_was_aligned(
    checkpoints: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = Sweep(tmp_path / "sweep")
    run_point(point(checkpoints, data, "pair.name=mine", "pair.aligned=true"), sweep)
    (result,) = sweep.results()
    drafter = str(checkpoints / "llama-draft")
    counts = dict.fromkeys(("target", "draft"), tiny_llama(1).num_parameters())
    facts = {
        "pair": "mine",
        "aligned": True,
        "acceptance": "Rollback",
        "trained": {},
        "contents": {drafter: Checkpoint(drafter).fingerprint},
        "parameters": counts,
    }
    assert result.facts == facts and 0 < result.first_token_s < result.total_s


def test_facts_are_no_part_of_what_a_point_is(checkpoints: Path, data: Path) -> None:
    ours, theirs = (
        point(checkpoints, data),
        point(checkpoints, data, "pair.name=mine", "pair.aligned=true"),
    )
    assert ours.facts != theirs.facts
    assert (ours.id, ours.setting) == (theirs.id, theirs.setting)


def test_models_in_the_place_of_the_toy_pairs_have_their_own_names(
    checkpoints: Path, data: Path
) -> None:
    assert point(checkpoints, data).facts["pair"] == "llama drafted by llama-draft"
    assert point(checkpoints, data, "pair.draft=null", "policy=vanilla").facts["pair"] == "llama"
    assert (
        prepare(compose_config(["pair=toy", "dataset=toy", "dataset.limit=1"])).facts["pair"]
        == "toy"
    )


def test_what_two_vocabularies_share_is_a_fact(
    checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    module, words = foreign_module(tiny_llama(1), seed=3)
    folder = save(module, tmp_path / "foreign", words)
    (told,) = point(checkpoints, data, f"pair.draft={folder}").facts["vocabularies"]
    shared = {"shared": 32, "target_pieces": 36, "draft_pieces": 34}
    assert told == {"draft": str(folder), **shared}
    assert (
        "vocabularies"
        not in point(checkpoints, data, "policy=vanilla", f"pair.draft={folder}").facts
    )


@pytest.mark.parametrize(
    ("policy", "rule"), [("speculative", "SpeculativeSampling"), ("hf_generate", None)]
)
def test_the_acceptance_rule_is_a_fact(
    policy: str, rule: str | None, checkpoints: Path, data: Path
) -> None:
    assert point(checkpoints, data, f"policy={policy}").facts["acceptance"] == rule


def test_an_adapter_says_itself_how_it_was_trained(
    checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    """In a folder whose name says something else."""
    folder = tmp_path / "bita_none_p64_m1" / "adapter"
    random_adapter(tiny_llama(1).config, "shallow", prompt_tokens=4, mask_tokens=3).save(folder)
    told = point(checkpoints, data, "policy=bita", f"policy.adapter={folder}").facts["trained"][
        "adapter"
    ]
    assert (told["prompt"], told["prompt_tokens"], told["mask_tokens"]) == ("shallow", 4, 3)
    assert "base" not in told  # the model it is for is a path


@pytest.mark.parametrize(
    ("policy", "knob", "text"),
    [
        ("speculative", "draft_vocabulary", "[3, 5, 8]"),
        ("answers", "file", '{"prompt": "w5", "answer": "w6"}\n{"prompt": "w7", "answer": "w8"}\n'),
    ],
    ids=["a list", "JSON lines"],
)
def test_a_file_of_json_without_settings_has_none(
    policy: str, knob: str, text: str, checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    """Both were tracebacks before anything was measured."""
    file = tmp_path / "file.json"
    file.write_text(text)
    facts = point(checkpoints, data, f"policy={policy}", f"policy.{knob}={file}").facts
    assert facts["trained"] == {} and str(file) in facts["contents"]


def test_heads_say_how_they_were_trained(checkpoints: Path, data: Path, tmp_path: Path) -> None:
    needed = files_of("medusa", tiny_llama(1).config, checkpoints)
    facts = point(
        checkpoints,
        data,
        "policy=medusa",
        *(f"policy.{knob}={path}" for knob, path in needed.items()),
    ).facts
    assert facts["trained"]["heads"]["heads"] == 3
    written = LayerHeadsConfig(
        [4, 2], hidden_size=8, vocabulary=16, epsilon=1e-6, base={"path": "somewhere"}
    )
    (tmp_path / "heads_config.json").write_text(
        json.dumps({**vars(written), "layers": list(written.layers)})
    )
    assert _settings_in(tmp_path)["layers"] == [2, 4]
    assert _settings_in(tmp_path / "nowhere") is None
    kinds = {
        one.kind.config
        for one in SavedModule.__subclasses__()
        if one.__module__.startswith("bild_lab")
    }
    assert kinds <= set(MODULE_CONFIGS)
