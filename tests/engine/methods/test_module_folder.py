"""Folders of small modules: what is read of them, for which target, and from where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods import module_folder
from bild_lab.engine.methods.module_folder import (
    FolderKind,
    SavedModule,
    base_sizes,
    described_in,
    read_tensors,
    released_folder,
)
from bild_lab.errors import UserError

KIND = FolderKind("weights.safetensors", "config.json", "small module", "make one")


@dataclass(frozen=True)
class Shapes:
    width: int
    base: Mapping[str, Any]
    rank: int = 0


class Small(SavedModule):
    """A module of one vector."""

    kind, config_class = KIND, Shapes

    def __init__(self, config: Shapes) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.zeros(config.width))


def saved(folder: Path, value: float = 1.0, **base: str) -> Path:
    module = Small(Shapes(3, base))
    nn.init.constant_(module.weight, value)
    module.save(folder)
    return folder


def target_of(fingerprint: str = "ours") -> SimpleNamespace:
    checkpoint = SimpleNamespace(fingerprint=fingerprint, path="a target")
    return SimpleNamespace(checkpoint=checkpoint, device=torch.device("cpu"), dtype=torch.bfloat16)


def test_a_module_for_a_target_has_its_precision_and_its_draft_vocabulary(tmp_path: Path) -> None:
    vocabulary = DraftVocabulary(torch.tensor([3, 4]))
    found = Small.load_for(target_of(), str(saved(tmp_path)), vocabulary, width=3)
    assert found.weight.dtype == torch.bfloat16 and not found.weight.requires_grad
    assert found.draft_vocabulary is vocabulary
    assert Small.load_for(target_of(), str(tmp_path), width=3).draft_vocabulary is None


def test_a_module_is_of_the_target_with_its_sizes_and_its_weights(tmp_path: Path) -> None:
    ours = saved(tmp_path / "ours", path="the model", fingerprint="ours")
    Small.load_for(target_of(), str(ours), width=3)
    Small.load_for(target_of(), str(saved(tmp_path / "unknown")), width=3)
    with pytest.raises(UserError, match="trained for the model, whose weights are not those of"):
        Small.load_for(target_of("others"), str(ours), width=3)
    with pytest.raises(UserError, match="whose width is 3, but the target's is 4"):
        Small.load_for(target_of(), str(ours), width=4)
    with pytest.raises(UserError, match="this policy needs a small module; make one"):
        Small.load_for(target_of(), None)


def test_numbers_are_not_rounded_to_the_precision_that_a_process_makes_tensors_in(
    tmp_path: Path,
) -> None:
    saved(tmp_path, value=0.123456)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = Small.load(tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.weight.tolist() == torch.full((3,), 0.123456).tolist()


def test_a_configuration_holds_its_fields_and_nothing_else(tmp_path: Path) -> None:
    config = saved(tmp_path) / "config.json"
    whole = json.loads(config.read_text())
    assert Small.load(tmp_path).config == Shapes(3, {})
    for content in ({"width": 3, "base": {}}, {**whole, "unknown": 1}):
        config.write_text(json.dumps(content))
        with pytest.raises(UserError, match="must hold base, rank, width and nothing else"):
            Small.load(tmp_path)


def test_weights_are_those_that_the_configuration_describes(tmp_path: Path) -> None:
    (saved(tmp_path) / "config.json").write_text(json.dumps({"width": 4, "base": {}, "rank": 0}))
    with pytest.raises(UserError, match=r"must hold weight \[4\], got weight \[3\]"):
        Small.load(tmp_path)
    module = Small(Shapes(3, {}))
    module.register_buffer("more", torch.zeros(3, 2).T)  # as it lies in memory
    module.save(tmp_path)
    with pytest.raises(UserError, match=r"must hold nothing, got more \[2, 3\]"):
        Small.load(tmp_path)


def test_a_folder_may_be_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path / "small")
    assert Small.load("~/small").config == Shapes(3, {})


def test_a_pickle_of_something_else_than_tensors_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": 1}, tmp_path / "weights.bin")
    with pytest.raises(UserError, match=r"weights\.bin must hold tensors by name"):
        read_tensors(tmp_path, KIND, ["weights.bin"])
    with pytest.raises(UserError, match=r"it needs config\.json and other\.bin"):
        read_tensors(tmp_path, KIND, ["other.bin"])


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyError("no"), TypeError("no"), AttributeError("no")]
)
def test_a_misread_configuration_is_named(error: Exception) -> None:
    with pytest.raises(UserError, match=r"small/config\.json describes no small module \(.*no"):
        with described_in(Path("small"), KIND):
            raise error
    with pytest.raises(UserError, match="division by zero"), described_in(Path("small"), KIND):
        _ = 1 / 0
    with pytest.raises(UserError, match=r"small is no small module: it needs config\.json"):
        with described_in(Path("small"), KIND) as path:
            path.read_text()


def test_sizes_of_a_base_with_heads_of_their_own_width() -> None:
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
    )
    assert tuple(base_sizes(config, "it").values()) == (2, 2, 6, 32, 40)
    plain = LlamaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    assert tuple(base_sizes(plain, "it").values()) == (2, 4, 8, 32, 40)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of the hub."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def fetch(name: str, **options: Any) -> str:
        asked.append((name, options))
        return "/cache"

    monkeypatch.setattr(module_folder, "snapshot_download", fetch)
    return asked


@pytest.mark.parametrize(
    "path", ["heads", "./heads", "../heads", "~/heads", "/some/heads", "outputs/eagle/heads"]
)
def test_what_cannot_be_an_id_of_the_hub_is_a_folder(
    path: str, fetched: list[tuple[str, dict[str, Any]]]
) -> None:
    assert released_folder(path, KIND, ["*.bin"]) == Path(path).expanduser()
    assert not fetched


@pytest.mark.parametrize("problem", [None, "there is no network"])
def test_of_the_hub_the_weights_and_the_configuration_are_fetched_at_the_pinned_commit(
    problem: str | None,
    fetched: list[tuple[str, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module_folder, "hub_problem", lambda: problem)
    pins = {"me/pinned": {"revision": "c0ffee"}}
    monkeypatch.setattr(module_folder, "pin_of", lambda kind, name, revision: pins.get(name))
    for name in ("me/pinned", "me/other"):
        assert released_folder(name, KIND, ["*.bin"]) == Path("/cache")
    offline = {"allow_patterns": ["config.json", "*.bin"], "local_files_only": problem is not None}
    assert fetched == [
        ("me/pinned", {"revision": "c0ffee", **offline}),
        ("me/other", {"revision": None, **offline}),
    ]


def test_a_folder_that_is_there_comes_before_an_id_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: list[tuple[str, dict[str, Any]]]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "heads").mkdir(parents=True)
    assert released_folder("me/heads", KIND, []) == Path("me/heads") and not fetched
