"""A checkpoint is converted once for each content and version."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.peers import conversion
from bild_lab.engine.peers.conversion import conversion_name, converted
from bild_lab.errors import UserError


def test_a_conversion_is_named_by_weights_engine_versions_and_converter(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, draft = Checkpoint(str(checkpoints / "llama")), Checkpoint(str(checkpoints / "llama-draft"))
    names = [
        conversion_name(llama, "openvino", {"openvino": "1"}),
        conversion_name(draft, "openvino", {"openvino": "1"}),
        conversion_name(llama, "ctranslate2", {"openvino": "1"}),
        conversion_name(llama, "openvino", {"openvino": "2"}),
    ]
    assert names[0] == conversion_name(Checkpoint(str(checkpoints / "llama")), "openvino", {"openvino": "1"})
    other = tmp_path / "worker.py"
    other.write_text("another converter")
    monkeypatch.setattr(conversion, "SCRIPT", other)
    names.append(conversion_name(llama, "openvino", {"openvino": "1"}))
    assert len(set(names)) == 5


def test_a_checkpoint_is_converted_at_first_use_only(
    checkpoints: Path,
    fake_engines: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint(str(checkpoints / "llama"))
    folder = converted(checkpoint, "openvino", {"openvino": "1"})
    assert (folder / "model").read_text() == str(checkpoints / "llama") and folder.parent == fake_engines
    monkeypatch.setattr(conversion, "convert", None)
    assert converted(checkpoint, "openvino", {"openvino": "1"}) == folder


def test_a_conversion_that_fails_is_refused_and_leaves_nothing(
    checkpoints: Path,
    fake_engines: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "unknown"
    folder.symlink_to(checkpoints / "llama")
    message = "openvino cannot convert .*unknown: ValueError: unknown architecture; use another policy"
    with pytest.raises(UserError, match=message):
        converted(Checkpoint(str(folder)), "openvino", {"openvino": "1"})
    assert [file for file in fake_engines.iterdir() if file.suffix != ".lock"] == []
