"""Checkpoints of a hub that serves them, withholds them, breaks off or is not there: the real
`from_pretrained`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loopback_hub import (
    commit_of,
    contents,
    loopback_hub,
    pickled,
    printed_in_a_fresh_process,
)

WHOLE = commit_of("me/whole")
CODE = b"""
from pathlib import Path
from transformers import T5Config
Path("ran").write_text("the checkpoint's own code")
class OwnConfig(T5Config):
    model_type = "own"
"""
_READ_ALL = """
import json, sys, torch
from bild_lab.errors import UserError
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
for fields in json.loads(sys.argv[1]):
    try:
        checkpoint = Checkpoint(**fields)
        checkpoint.check()
        print("read", checkpoint.fingerprint, type(checkpoint.weights(torch.float32)).__name__)
    except UserError as error:
        print(" ".join(str(error).split()))
"""


def read_in_a_fresh_process(
    endpoint: str, home: Path, *checkpoints: dict[str, object]
) -> list[str]:
    """What came of each checkpoint."""
    return printed_in_a_fresh_process(_READ_ALL, endpoint, home, json.dumps(checkpoints))


@pytest.fixture
def models(checkpoints: Path) -> dict[str, dict[str, bytes]]:
    whole = contents(checkpoints / "t5")
    own = {
        **json.loads(whole["config.json"]),
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig"},
    }
    return {
        "me/whole": whole,
        "me/gated": whole,
        "me/own-code": {**whole, "config.json": json.dumps(own).encode(), "own.py": CODE},
        "me/pickled": pickled(whole),
        "me/pickled@refs/pr/1": whole,
    }


@pytest.mark.slow
def test_a_hubs_checkpoints_are_read_or_refused_with_what_to_do(
    models: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    asked = ["me/whole", "me/missing", "me/gated", "me/own-code", "me/pickled"]
    revised = [{"path": "me/whole", "revision": revision} for revision in (WHOLE, "v9")]
    with loopback_hub({}, models, gated=["me/gated"]) as endpoint:
        told = read_in_a_fresh_process(
            endpoint, tmp_path, *({"path": path} for path in asked), *revised
        )
    whole, missing, gated, own_code, refused, commit, wrong = told
    assert whole == commit == f"read {WHOLE} T5ForConditionalGeneration"
    assert "of me/missing from the hub" in missing and "check its name" in missing
    assert "of me/gated from the hub" in gated and "`hf auth login`" in gated
    assert own_code.endswith("look at it first, then set runtime.trust_remote_code=true")
    assert not (tmp_path / "ran").exists()
    assert (
        "me/pickled has pytorch_model.bin and no safetensors" in refused
        and "runtime.allow_pickles=true" in refused
    )
    assert "of me/whole from the hub" in wrong and "v9" in wrong


@pytest.mark.slow
def test_a_download_that_broke_off_is_named_and_what_is_cached_serves_without_a_network(
    models: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    whole = {"path": "me/whole"}
    with loopback_hub({}, models, truncated=["model.safetensors"]) as endpoint:
        (told,) = read_in_a_fresh_process(endpoint, tmp_path, whole)
    assert (
        "cannot read the weights of me/whole from the hub" in told and "repeat the command" in told
    )
    with loopback_hub({}, models) as endpoint:
        (again,) = read_in_a_fresh_process(endpoint, tmp_path, whole)
    closed = "http://127.0.0.1:9"
    offline, unknown = read_in_a_fresh_process(closed, tmp_path, whole, {"path": "me/unknown"})
    assert again == offline == f"read {WHOLE} T5ForConditionalGeneration"
    assert (
        "wanted the checkpoint me/unknown from the Hugging Face hub" in unknown
        and "pair.target=DIR" in unknown
    )


@pytest.mark.slow
def test_code_of_a_checkpoint_runs_only_where_it_was_asked_for(
    models: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    trusted = {"path": "me/own-code", "trust_remote_code": True}
    with loopback_hub({}, models) as endpoint:
        read_in_a_fresh_process(endpoint, tmp_path, trusted)
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_hubs_pickles_are_read_where_they_are_allowed_and_safetensors_of_another_revision_need_no_permission(
    models: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    allowed = {"path": "me/pickled", "allow_pickles": True}
    fetched: list[str] = []
    with loopback_hub({}, models, fetched=fetched) as endpoint:
        converted, read, preferred = read_in_a_fresh_process(
            endpoint,
            tmp_path,
            {"path": "me/pickled", "revision": "refs/pr/1"},
            allowed,
            {**allowed, "path": "me/whole"},
        )
    assert all(line.endswith("T5ForConditionalGeneration") for line in (converted, read, preferred))
    weights = [name for name in fetched if name.endswith((".bin", ".safetensors"))]
    assert weights == [
        "me/pickled@refs/pr/1/model.safetensors",
        "me/pickled@main/pytorch_model.bin",
        "me/whole@main/model.safetensors",
    ]
