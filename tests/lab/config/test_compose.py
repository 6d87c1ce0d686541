"""Policies by name are what Hydra composes, also in a folder of the user's own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.config import compose as config
from bild_lab.lab.config.compose import (
    compose_config,
    compose_policy,
    config_dir,
    require_own_files,
    resolved_policy,
    without_step_error,
)
from bild_lab.lab.config.policies import require_policy
from bild_lab.lab.config.schemas import DecodingSpec, typed
from bild_lab.lab.data.dataset_spec import DatasetSpec


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


def test_a_policy_of_the_users_own_folder_refers_to_other_groups_and_other_policies(
    own: Path,
) -> None:
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


def test_a_file_of_the_users_own_that_a_shipped_one_hides_is_refused(own: Path) -> None:
    shutil.copy(config_dir() / "policy/bild.yaml", own)
    (own / "speculative.yaml").write_text("name: speculative\n")
    require_own_files(compose_config(["policy=bild"]))  # a copy says the same
    edited = (config_dir() / "policy/vanilla.yaml").read_text().swapcase()
    (own / "vanilla.yaml").write_text(edited)
    for name in ("speculative", "vanilla"):
        with pytest.raises(
            UserError, match=rf"{name}\.yaml has the name of a file that is shipped"
        ):
            require_own_files(compose_config([f"policy={name}"]))


def test_a_knob_of_ones_own_policy_that_nothing_refers_to_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = {
        "name": "mine",
        "used": 1,
        "user": 2,
        "of_other": 3,
        "decoder": {"_target_": "bild_lab.engine.decode.DraftThenVerify"},
    }
    policy["decoder"]["values"] = ["${policy.used}", "${drafter_of:${policy.of_other},null}"]
    require_policy(OmegaConf.create(policy))
    (told,) = caplog.messages
    assert told.startswith("policy mine has a knob 'user' that changes nothing in it")


def test_a_policy_of_ones_own_needs_a_name_of_its_own() -> None:
    decoder = {"_target_": "bild_lab.engine.decode.DraftThenVerify"}
    with pytest.raises(UserError, match="a policy of your own needs another name"):
        require_policy(OmegaConf.create({"name": "bild", "window": 3, "decoder": decoder}))
    with pytest.raises(UserError, match=r"policy must have a name, got None; write name: NAME"):
        require_policy(OmegaConf.create({"window": 3, "decoder": decoder}))


def test_the_knobs_of_a_policy_that_brings_its_baseline_are_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is given them all."""
    require_policy(OmegaConf.merge(compose_policy("server"), {"name": "mine"}))
    assert not caplog.messages


def test_a_policy_in_the_shipped_folder_may_be_made_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = shutil.copytree(config_dir(), tmp_path / "conf")
    monkeypatch.setattr(config, "config_dir", lambda: conf)
    (conf / "policy/more.yaml").write_text(
        "defaults:\n  - bild\n  - _self_\nname: more\nwindow: 3\n"
    )
    (conf / "policy/whole.yaml").write_text(
        "# @package _global_\npolicy:\n  name: whole\n  window: 9\nname: other\n"
    )
    assert (compose_policy("more").name, compose_policy("more").window) == ("more", 3)
    assert compose_policy("more").fallback == compose_policy("bild").fallback
    assert compose_policy("whole").window == 9


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"first": "bita"}, "policy hybrid: policy bita has no drafter that drafts for a plain"),
        ({"second": "sufix"}, "policy hybrid: policy must be one of .*did you mean suffix?"),
        ({"first_knobs": {"factr": 1}}, "policy hybrid: policy suffix has no knob 'factr'; it has"),
        # it was the shipped default's drafter, without a word
        ({"first": {}}, "policy hybrid: a drafter comes from a policy's name, such as suffix, got"),
        (
            {"first": 3},
            "policy hybrid: a drafter comes from a policy's name, such as suffix, got 3",
        ),
        # they were overlooked
        ({"first_knobs": ""}, "the knobs of policy suffix are a mapping, .* or null, got ''"),
        ({"first_knobs": False}, "the knobs of policy suffix are a mapping, .* or null, got False"),
        ({"second_knobs": [1]}, r"of policy token_recycling are a mapping, .* or null, got \[1\]"),
    ],
)
def test_what_a_policy_made_of_others_cannot_have_is_refused_in_its_own_words(
    knobs: dict[str, Any], words: str
) -> None:
    """Fault: words of Python and OmegaConf, such as "'int' object has no attribute 'items'"."""
    with pytest.raises(
        UserError, match=f"^{words}" if words.startswith("policy") else words
    ) as told:
        resolved_policy(compose_policy("hybrid", knobs))
    assert "resolving" not in str(told.value) and "attribute" not in str(told.value)


@pytest.mark.fast("words0", "words3")
@pytest.mark.parametrize(
    "words",
    [
        (
            "name=mine",
            "resume=false",
            "policy.window=3",
            "decoding.temperature=0.5",
            "dataset.limit=2",
        ),
        (
            "dataset=multi30k",
            "policy=speculative",
            "policy.window=${decoding.max_new_tokens}",
            "decoding=sample",
        ),
        ("experiment=bild/fig4", "scale=small", "policy.fallback=0.1"),
        ("+policy.mine=[1,2]", "+mine={deep: {er: 1}}", "~policy.rollback", "++mine.deep.er=2"),
        (
            "decoding={max_new_tokens: 3}",
            "policy.decoder.drafter={_target_: a.b}",
            "decoding.max_new_tokens=4",
        ),
    ],
)
def test_what_is_composed_from_files_that_were_kept_is_what_hydra_composes(
    words: tuple[str, ...],
) -> None:
    compose_config([])
    ours = compose_config(list(words))
    with initialize_config_dir(str(config_dir()), **config.HYDRA_VERSION):
        theirs = compose("config", list(words))
    assert ours == theirs and OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(theirs)
    assert OmegaConf.is_struct(ours) and OmegaConf.get_type(ours, "pair") == OmegaConf.get_type(
        theirs, "pair"
    )
    ours.policy.name = "changed"
    assert compose_config(list(words)) == theirs, "what a caller changes is the caller's own"
    with initialize_config_dir(str(config_dir()), **config.HYDRA_VERSION):
        assert config.in_our_application()
        for _ in range(2):  # with files that were read, and with kept ones
            assert config.without_hydra(compose_config(list(words))) == theirs


def test_only_a_number_with_the_error_of_a_step_changes() -> None:
    words = [
        "policy.fallback=0.30000000000000004",
        "policy.rollback=0.25",
        "train.learning_rate=3.0000000000000004e-05",
        "runtime.seed=12345678901234567",
        "name='2026.11291234567890'",
        "pair.target=outputs/qwen2.5-coder",
        "policy.fallback=0.3745401188473625",  # as a sweeper draws it
    ]
    assert without_step_error(words) == [
        "policy.fallback=0.3",
        words[1],
        "train.learning_rate=3e-05",
        *words[3:],
    ]
    assert without_step_error(["policy.shift=2.7755575615655784e-17"]) == ["policy.shift=0.0"]


@pytest.mark.parametrize(
    "words", [("policy.abacus=1",), ("policy.window=1,2",), ("policy@x=bild",), ("pair=abacus",)]
)
def test_what_cannot_be_composed_is_refused_in_hydras_words(words: tuple[str, ...]) -> None:
    with (
        initialize_config_dir(str(config_dir()), **config.HYDRA_VERSION),
        pytest.raises(HydraException) as theirs,
    ):
        compose("config", list(words))
    with pytest.raises(type(theirs.value), match=re.escape(str(theirs.value))):
        compose_config(list(words))


def test_a_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = shutil.copytree(config_dir(), tmp_path / "conf")
    monkeypatch.setattr(config, "config_dir", lambda: conf)
    before = compose_config([]).decoding.max_new_tokens
    (conf / "decoding" / "greedy.yaml").write_text(f"max_new_tokens: {before + 10}\n")
    assert compose_config([]).decoding.max_new_tokens == before + 10


def test_whether_a_key_is_a_group_is_looked_up_once_in_a_command() -> None:
    """Fault: a sweep over a thousand values looks for the files of each word of each point."""
    asked: list[str] = []

    class Loader:
        def get_group_options(self, key: str, results_filter: object) -> list[str]:
            asked.append(key)
            return ["bild"] if key == "policy" else []

    loader, parser = Loader(), OverridesParser.create()
    for word in ("policy.fallback=0.1", "policy.fallback=0.2", "policy=bild", "policy=vanilla"):
        (override,) = parser.parse_overrides([word])
        assert config._sets_a_value(override, loader) == word.startswith("policy.")
    assert asked == ["policy.fallback", "policy"]


@pytest.mark.parametrize(
    ("written", "template"),
    [
        (r"echo \${name} {source}", "echo ${name} {source}"),  # planted: the dataset's name
        (r"cost \${x} {source}", "cost ${x} {source}"),
        (r"{source} \${", "{source} ${"),
        ("${dataset.name}: {source}", "toy: {source}"),
        ("{source} $5", "{source} $5"),
    ],
)
def test_an_escaped_interpolation_is_text(written: str, template: str) -> None:
    cfg = compose_config([f"dataset.prompt_template='{written}'", f"decoding.stop=['{written}']"])
    assert typed(DatasetSpec, cfg.dataset, "dataset").prompt_template == template
    assert typed(DecodingSpec, cfg.decoding, "decoding").stop == (template,)


@pytest.mark.parametrize(
    "text", ["${temperature}", "${", r"\${x}", r"a\\${x}\\", "{${x:y,'z'}}", r"\d+ {source}"]
)
def test_values_from_python_are_text(text: str) -> None:
    found = typed(DecodingSpec, {"max_new_tokens": 1, "stop": [text, "${max_new_tokens}"]}, "one")
    assert found.stop == (text, "${max_new_tokens}")
