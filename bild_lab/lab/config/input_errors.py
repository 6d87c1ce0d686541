"""Errors of the user's input, Hydra's and OmegaConf's too, in plain words."""

from __future__ import annotations

import re
import sys
import traceback
from contextlib import suppress

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError, suggestion
from bild_lab.lab.config.command_line import this_script
from bild_lab.lab.config.compose import compose_config, config_dir


def raised_by_hydra(error: BaseException) -> bool:
    """Whether the error comes from Hydra itself, not from the code that it runs."""
    names = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    packages = [name.partition(".")[0] for name in names]
    innermost_package = next(
        (name for name in reversed(packages) if name not in sys.stdlib_module_names), ""
    )
    return innermost_package in ("hydra", "omegaconf", "antlr4")


def plain_message(error: BaseException, config_name: str | None = "config") -> str:
    """The error in words that a user can act on. config_name: the configuration whose keys are
    suggested.
    """
    if isinstance(error, UserError):
        return str(error)
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    text = "\n".join(str(cause) for cause in causes)
    if match := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(match[1], config_name)
    if match := re.search(r"Could not find '([^']+)'", text):
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        return unknown_choice(match[1], options)
    if match := re.search(r"Error merging override (.+)\n(.+)", text):
        return f"{match[1]}: {wrong_type(match[2])}"
    if match := re.search(r"LexerNoViableAltException: (.+)", text):
        signs = " ".join(dict.fromkeys(sign for sign in match[1] if not sign.isascii()))
        return (
            f"{match[1]} cannot be read{signs and f' because of {signs}'}; write plain signs, or"
            " quote the value"
        )
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return values_outside_sweep(match[1])
    return " ".join(
        line.strip() for line in str(error).splitlines() if line.strip() and "full_key" not in line
    )


def wrong_type(omegaconf_message: str) -> str:
    """OmegaConf's words for a value of a wrong type, with the value that was wanted."""
    match = re.fullmatch(
        r"Value '(.*)' of type '\w+' could not be converted to (Integer|Float|Boolean)",
        omegaconf_message.strip(),
    )
    if match is None:
        return omegaconf_message
    kinds = {
        "Integer": "a whole number without point or exponent",
        "Float": "a number",
        "Boolean": "true or false",
    }
    value, kind = match[1], match[2]
    if kind == "Integer" and re.fullmatch(r"-?\d+\.0", value):  # 1e3 has become 1000.0
        return f"{kinds[kind]} is wanted: {value.removesuffix('.0')}"
    return f"{kinds[kind]} is wanted, got {value}"


def values_outside_sweep(word: str) -> str:
    """A message about values with commas outside a sweep."""
    key, _, values = word.partition("=")
    if re.fullmatch(r"-?\d+,\d+", values):
        decimal = f"{key}={values.replace(',', '.')}"
        return (
            f"{word} has two values: a decimal has a point, {decimal}; to sweep over both, add -m"
        )
    return (
        f"{word} has several values: add -m to sweep over them, or write a list as {key}=[{values}]"
    )


def unknown_key(key: str, config_name: str | None) -> str:
    """A message about a configuration key that does not exist, with the most similar key that does.

    config_name: None for a command that passes its words on as those of run.py.
    """
    keys = known_keys(config_name or "config")
    if key in keys:
        return (
            f"not every chosen configuration has the key {key}; run policies with different knobs"
            " one by one"
        )
    script = this_script() if config_name is not None else "python run.py"
    meant = suggestion(key, keys) or ";"
    return f"there is no configuration key {key}{meant} `{script} --cfg job` lists them all"


def unknown_choice(choice: str, options: list[str]) -> str:
    """A message about a file that is not in its config group, or that is a folder there.

    options: what Hydra found in the group, a user's own files included.
    """
    group, _, name = choice.partition("/")
    folder = config_dir() / group
    files = [
        file.relative_to(folder).with_suffix("").as_posix()
        for file in sorted(folder.rglob("*.yaml"))
    ]
    if files_in_folder := [file for file in files if file.startswith(f"{name}/")]:
        return f"{group}={name} is a folder; choose one of its files: {', '.join(files_in_folder)}"
    meant = suggestion(name, [*files, *options]) or "."
    return (
        f"there is no {group or 'config'} {name!r}{meant} There are"
        f" {', '.join(dict.fromkeys([*options, *files]))}"
    )


def known_keys(config_name: str) -> list[str]:
    """Every dotted key of the configuration, with the chosen policy, dataset and so on."""
    config = compose_config([], config_name)
    # of several policies to sweep over, take the first
    group_choices = [match for word in sys.argv[1:] if (match := re.match(r"(\w+)=\w+", word))]
    groups = [match[0] for match in group_choices if OmegaConf.is_dict(config.get(match[1]))]
    with suppress(HydraException):  # the choice does not exist either
        config = compose_config(groups, config_name)

    def walk(node: DictConfig, prefix: str) -> list[str]:
        keys = []
        for name in node:
            keys.append(f"{prefix}{name}")
            if OmegaConf.is_dict(node._get_node(name)):
                keys += walk(node._get_node(name), f"{prefix}{name}.")
        return keys

    return walk(config, "")
