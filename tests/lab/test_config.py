"""Policies by name are what Hydra composes, also in a folder of the user's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins

from bild_lab.errors import UserError
from bild_lab.lab import config
from bild_lab.lab.config import compose_config, compose_policy, config_dir


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """Inside a Hydra application that was given this folder by --config-dir."""
    Plugins.instance()  # registers how folders are read
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    path.append("main", f"file://{config_dir()}")
    path.append("command-line", f"file://{tmp_path}")
    path.append("schema", "structured://")
    (tmp_path / "policy").mkdir()
    Hydra.create_main_hydra2("run", path)
    yield tmp_path / "policy"
    GlobalHydra.instance().clear()


def test_a_policy_of_the_users_own_folder_refers_to_other_groups_and_other_policies(own: Path) -> None:
    (own / "mine.yaml").write_text("name: mine\nwindow: ${decoding.max_new_tokens}\n")
    (own / "more.yaml").write_text("defaults:\n  - bild\n  - _self_\nname: more\nwindow: 3\n")
    (own / "bild.yaml").write_text("name: not the first on the path\n")
    assert compose_policy("mine").window == compose_config([]).decoding.max_new_tokens
    more = compose_policy("more")
    assert (more.name, more.window, more.fallback) == ("more", 3, compose_policy("bild").fallback)
    assert compose_policy("bild", {"window": 4}).window == 4
    for name in ("less", "3"):  # of which Hydra makes a number
        with pytest.raises(UserError, match=f"policy must be one of .*, got '{name}'"):
            compose_policy(name)


def test_a_policy_in_the_shipped_folder_may_be_made_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = shutil.copytree(config_dir(), tmp_path / "conf")
    monkeypatch.setattr(config, "config_dir", lambda: conf)
    (conf / "policy/more.yaml").write_text("defaults:\n  - bild\n  - _self_\nname: more\nwindow: 3\n")
    (conf / "policy/whole.yaml").write_text("# @package _global_\npolicy:\n  name: whole\n  window: 9\nname: other\n")
    assert (compose_policy("more").name, compose_policy("more").window) == ("more", 3)
    assert compose_policy("more").fallback == compose_policy("bild").fallback
    assert compose_policy("whole").window == 9
