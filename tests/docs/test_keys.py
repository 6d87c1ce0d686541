"""The reference of keys has every key, with its default and a meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from bild_lab.lab.config.compose import compose_config, config_dir, knob_values, policy_names
from bild_lab.lab.config.schemas import DecodingSpec, MeasureSpec, PairSpec, RuntimeSpec
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.screening.screen_spec import ScreenSpec
from bild_lab.training.train_spec import TrainSpec
from docs.hooks import keys

SPECS = {"pair": PairSpec, "dataset": DatasetSpec, "decoding": DecodingSpec, "runtime": RuntimeSpec}
SPECS |= {"measure": MeasureSpec, "screen": ScreenSpec, "train": TrainSpec}
APPLICATIONS = sorted(file.stem for file in config_dir().glob("*.yaml"))


@lru_cache
def listed() -> dict[str, list[keys.Key]]:
    found: dict[str, list[keys.Key]] = {}
    for key in keys.every_key():
        found.setdefault(key.name, []).append(key)
    return found


def is_listed(name: str) -> bool:
    """Under its own name or, in a mapping whose keys are those of Transformers, under the
    mapping's.
    """
    return name in listed() or any(name.startswith(f"model.{open_}.") for open_ in keys.OPEN)


def leaves(node: Any, prefix: str = "") -> Iterator[str]:
    node = {key: node._get_node(key) for key in node} if isinstance(node, DictConfig) else node
    if not isinstance(node, Mapping):
        yield prefix.removesuffix(".")
        return
    for name, value in node.items():
        yield from leaves(value, f"{prefix}{name}.")


def test_every_key_has_a_meaning() -> None:
    """Write a comment after a key in conf, or after its field if the group has a schema."""
    assert keys.without_meaning() == []


@pytest.mark.parametrize("name", APPLICATIONS)
def test_every_key_that_a_command_composes_is_listed(name: str) -> None:
    composed = compose_config([], name)
    parts = tuple(f"policy.{part}" for part in ("name", "decoder."))
    missing = [
        key
        for key in leaves(composed)
        if not key.endswith("_target_") and not key.startswith(parts)
    ]
    assert [
        key
        for key in missing
        if not is_listed(key) and composed._get_node(key.split(".")[0]) is not None
    ] == []


def test_every_key_of_a_schema_is_listed() -> None:
    fields = {
        f"{group}.{field.name}"
        for group, spec in SPECS.items()
        for field in dataclasses.fields(spec)
    }
    assert sorted(fields - listed().keys()) == []


def test_every_knob_of_every_policy_is_listed_with_its_value() -> None:
    sections = {section.title.removeprefix("policy="): section for section in keys.sections()}
    for policy in policy_names():
        told = {
            key.name.removeprefix("policy."): yaml.safe_load(key.default)
            for key in sections[policy].keys
        }
        assert told == knob_values(
            yaml.safe_load((config_dir() / f"policy/{policy}.yaml").read_text())
        )


def test_the_logger_and_every_file_of_every_group_are_listed() -> None:
    assert {
        f"logger.{key}" for key in compose_config(["logger=wandb"]).logger if key != "_target_"
    } <= listed().keys()
    told = {(section.title, name) for section in keys.sections() for name, _ in section.files}
    folders = {folder.name for folder in config_dir().iterdir() if folder.is_dir()} - {
        "hydra",  # launchers: docs/scaling.md
        "paper",
        "shared",
    }
    files = {(name, file) for name in folders for file in keys.files(name)}
    assert told == files and len(files) > 150
    assert [
        what
        for section in keys.sections()
        for name, what in section.files
        if not what or "python " in what
    ] == []


def test_defaults_are_those_that_a_command_takes() -> None:
    composed = compose_config([])
    assert {key.default for key in listed()["runtime.dtype"]} == {"auto"}
    for name in (
        "pair.target",
        "dataset.metric",
        "decoding.max_new_tokens",
        "measure.repeats",
        "policy.rollback",
    ):
        assert str(OmegaConf.select(composed, name)) in {key.default for key in listed()[name]}
    # of the schema, as the toy corpus has none
    assert [key.default for key in listed()["dataset.turns"]] == ["1"]


def test_a_meaning_is_the_comment_after_a_key_and_the_lines_above_it(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(
        "# What it is: python run.py some=one\n"
        "first: 1  # after\n"
        "# above,\n# in two lines\n"
        "text: '# of the value'\n"
        "group:  # of the group\n"
        "  # above too\n"
        "  inner: [1, 2]  # and after\n"
        "bare: null\n"
    )
    assert list(keys.keys_in(file)) == [
        keys.Key("first", "1", "after"),
        keys.Key("text", "'# of the value'", "above, in two lines"),
        keys.Key("group", None, "of the group"),
        keys.Key("group.inner", "[1, 2]", "above too and after"),
        keys.Key("bare", "null", ""),
    ]
    assert keys.header(file) == "What it is"


def test_the_page_is_made_of_tables_whose_rows_fit() -> None:
    rows = [line for line in keys.page().splitlines() if line.startswith("| `")]
    assert len(rows) > 400
    assert {line.replace("\\|", "").count("|") for line in rows} == {3, 4}
