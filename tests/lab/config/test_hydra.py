"""The library inside other people's Hydra applications, and in several threads."""

from __future__ import annotations

import sys
from argparse import Action, ArgumentParser, _ActionsContainer
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from threading import Thread
from typing import Any

import pytest
from hydra import compose, initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton

from bild_lab.lab.config import compose as config
from bild_lab.lab.config.compose import (
    APPLICATION,
    compose_config,
    compose_policy,
    in_our_application,
)


@pytest.fixture(params=[None, *([] if config.HYDRA_1_4 else ["1.1"]), "1.3"])
def users(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[type, object]]:
    """An application of somebody else, with a configuration named as ours.

    Gives what Hydra keeps of it.
    """
    (tmp_path / "config.yaml").write_text("theirs: 1\n")
    with initialize_config_dir(str(tmp_path), version_base=request.param):
        assert compose("config").theirs == 1
        yield {kind: Singleton._instances.get(kind) for kind in APPLICATION}


def test_ours_are_composed_inside_another_application_which_stays_as_it_was(
    users: dict[type, object],
) -> None:
    loaded = users[GlobalHydra].hydra
    config._merged_files.cache_clear()
    assert not in_our_application()
    assert compose_policy("speculative", {"window": 3}).window == 3
    assert compose_config(["policy=bild"]).policy.name == "bild"
    assert {kind: Singleton._instances.get(kind) for kind in APPLICATION} == users
    assert GlobalHydra.instance().hydra is loaded and compose("config").theirs == 1


def test_a_failure_leaves_the_other_application_too(users: dict[type, object]) -> None:
    with pytest.raises(Exception, match="abacus"):
        compose_config(["policy=abacus"])
    assert {kind: Singleton._instances.get(kind) for kind in APPLICATION} == users


def test_threads_compose_at_once() -> None:
    found: list[str] = []
    names = ["bild", "speculative", "calm", "vanilla"]
    threads = [
        Thread(
            target=lambda name=name: found.append(compose_config([f"policy={name}"]).policy.name)
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(names) and not GlobalHydra.instance().is_initialized()


def test_importing_a_command_leaves_the_version_that_hydra_behaves_as(
    users: dict[type, object],
) -> None:
    before = version.getbase()
    config.hydra_main("config")(lambda cfg: cfg)
    assert version.getbase() == before


def test_a_policys_file_that_changed_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = copytree(config.config_dir(), tmp_path / "conf")
    monkeypatch.setattr(config, "config_dir", lambda: copied)
    file = copied / "policy/speculative.yaml"
    assert compose_policy("speculative").window == 5
    file.write_text(file.read_text().replace("window: 5", "window: 17"))
    assert compose_policy("speculative").window == 17
    (copied / "policy/mine.yaml").write_text(file.read_text().replace(": speculative", ": mine"))
    assert compose_policy("mine").name == "mine"


@pytest.mark.skipif(config.HYDRA_1_4, reason="Hydra 1.4 sees to it itself")
def test_commands_start_where_python_looks_at_help_texts_as_a_parser_takes_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Python 3.14 does; one of Hydra 1.3 is no text until it is shown."""
    add_argument = _ActionsContainer.add_argument

    def checking(parser: ArgumentParser, *names: str, **options: Any) -> Action:
        action = add_argument(parser, *names, **options)
        parser._check_help(action)
        return action

    def check(parser: ArgumentParser, action: Action) -> None:
        if not isinstance(action.help, str | None):
            raise ValueError("badly formed help string")

    monkeypatch.setattr(_ActionsContainer, "add_argument", checking)
    monkeypatch.setattr(_ActionsContainer, "_check_help", check, raising=False)
    monkeypatch.setattr(sys, "argv", ["run.py", "--cfg", "job"])
    inside = config.hydra_main("config")(lambda cfg: cfg)
    with config.help_that_is_no_text():  # a command inside another one
        inside()
        assert ArgumentParser._check_help is not check
    inside()
    assert capsys.readouterr().out.count("pair:\n") == 2
    assert ArgumentParser._check_help is check
