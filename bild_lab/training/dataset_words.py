"""A dataset as words of a command line, for the commands that trainings print."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.cli import quote_free_text
from bild_lab.lab.config import config_dir
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.rows import find_split_files

LOCAL = "local"
TEMPLATES = ("chat_template", "next_turn_template")
RESERVED = ("null", "true", "false", "inf", "nan")
HELD_OUT = ("test", "validation")  # splits to decode, where the dataset has them


def dataset_words(spec: DatasetSpec) -> list[str]:
    """The words that choose this dataset: its file, and the keys that differ from it. Limits are left out.

    The split is the file's own, if the data have it, else another than the one given, if there is one.
    """
    first = spec.name.partition(" + ")[0]  # of several datasets
    name = first if (config_dir() / "dataset" / f"{first}.yaml").is_file() else LOCAL
    given = _file("dataset", name)
    usual = {field.name: field.default for field in fields(DatasetSpec)} | given
    values = {**asdict(spec), "name": first}
    words = [f"dataset={name}"]
    if (template := _template(values)) is not None:
        words.append(f"template={template}")
        usual |= {key: values[key] for key in TEMPLATES}
    derived = DatasetSpec(**{**values, "name": None}).name if usual["name"] is None else usual["name"]
    usual |= {"name": derived, "limit": values["limit"], "metric": usual["metric"] or "agreement"}
    values["split"] = _split(spec, usual["split"])
    different = [key for key in values if _plain(values[key]) != _plain(usual[key])]
    return words + [_word(f"dataset.{key}", values[key]) for key in different]


def _file(group: str, name: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(config_dir() / group / f"{name}.yaml"))


def _template(values: Mapping[str, Any]) -> str | None:
    """The file of conf/template with these templates."""
    unset = {field.name: field.default for field in fields(DatasetSpec)}
    for file in sorted((config_dir() / "template").glob("*.yaml")):
        own = _file("template", file.stem)
        held = {**unset, **own}
        if set(TEMPLATES) & set(own) and all(_plain(held[key]) == _plain(values[key]) for key in TEMPLATES):
            return file.stem
    return None


def _split(spec: DatasetSpec, usual: str) -> str:
    """A split to decode: the usual one, or what a local dataset has instead."""
    if spec.path is None:
        return usual
    folders = [name for name in (spec.hub_data_dir, spec.hub_config) if name]
    for split in (usual, *HELD_OUT):
        try:
            find_split_files(Path(spec.path).expanduser(), split, folders)
        except UserError:
            continue
        return split
    return spec.split


def _plain(value: Any) -> Any:
    """A column or template that is alone like one in a list."""
    if not isinstance(value, list | tuple):
        return value
    return value[0] if len(value) == 1 else list(value)


def _word(key: str, value: Any) -> str:
    """The override; free text as it is, which run.py quotes itself."""
    value = _plain(value)
    free = isinstance(value, str) and quote_free_text(f"{key}={value}") != f"{key}={value}"
    return f"{key}={value if free else _quoted(value)}"


def _quoted(value: Any) -> str:
    """The value as Hydra reads it."""
    value = _plain(value)
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    plain = re.fullmatch(r"[A-Za-z_./][\w./-]*", value, flags=re.A) and value.lower() not in RESERVED
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return value if plain else f"'{escaped}'"
