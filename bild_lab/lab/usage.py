"""What `--help` prints: how a command is called, what it does, and its keys and groups.

All of it is read from the script's own text and from the files of `conf`, so help loads and writes nothing.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml

from bild_lab.lab.config import config_dir
from bild_lab.lab.glossary import terms_text

WIDTH = 80
WIRING = ("defaults", "hydra", "decoder")  # keys that connect parts and are not for the command line
GLOSSARY_OF = "config"  # the configuration of run.py, whose reports use the terms


def usage(text: str, config_name: str | None) -> str:
    """Help for a script. text: its docstring, whose first line ends in a command. config_name: None without keys."""
    first, _, rest = text.strip().partition("\n")
    what, _, command = first.partition(": python ")
    parts = [f"usage: python {command}", f"{what}.", *([rest.strip("\n")] if rest.strip() else [])]
    if config_name is not None:
        parts += list(_keys(config_name))
        script = command.split()[0]
        parts.append(f"The whole configuration, without running anything: python {script} --cfg job")
    if config_name == GLOSSARY_OF:
        parts.append(f"Words of the reports\n\n{terms_text(WIDTH)}")
    return "\n\n".join(parts)


def _keys(config_name: str) -> Iterator[str]:
    """The command's own keys, the keys of its groups, and the files that a group can take."""
    own, groups = _read(config_name)
    twice = any(re.search(rf"^{group}:", own, flags=re.M) for group in groups)
    said = "; of a key that is here twice, the first" if twice else ""
    yield f"Keys, with their defaults{said} (KEY=VALUE, such as {_example(own)})\n\n{textwrap.indent(own, '  ')}"
    for group, chosen in groups.items():
        if chosen is not None and (text := _body(config_dir() / group / f"{chosen}.yaml")):
            yield f"  {group}:  # {group}={chosen}\n{textwrap.indent(text, '    ')}"
    listed = "\n".join(_files(group) for group in groups)
    if listed:
        yield f"Groups (GROUP=FILE, such as {_choice(groups)})\n\n{listed}"


def _read(config_name: str) -> tuple[str, dict[str, str | None]]:
    """The own keys of a configuration and its groups with the chosen files, those of its base included."""
    file = config_dir() / f"{config_name}.yaml"
    texts, groups = [], {}
    for entry in yaml.safe_load(file.read_text(encoding="utf-8")).get("defaults", ()):
        if isinstance(entry, str) and entry != "_self_":
            text, inherited = _read(entry)
            texts.append(text)
            groups |= inherited
        elif isinstance(entry, dict):
            groups |= {group: one for group, one in entry.items() if not group.startswith(("override ", "schema@"))}
    return "\n".join([*texts, _body(file)]), groups


def _body(file: Path) -> str:
    """A file's keys as they are written, with their comments, without its head and without wiring."""
    kept, wiring = [], True
    for line in file.read_text(encoding="utf-8").splitlines():
        if key := re.match(r"(\w+):", line):
            wiring = key[1] in WIRING
        if not wiring and not line.startswith("#") and line.strip() and not line.startswith("_target_"):
            kept.append(line)
    return "\n".join(kept)


def _files(group: str) -> str:
    """A group's files, and its folders with a slash, in a paragraph."""
    folder = config_dir() / group
    files = sorted(file.stem for file in folder.glob("*.yaml"))
    folders = sorted(f"{one.name}/…" for one in folder.iterdir() if one.is_dir() and any(one.glob("*.yaml")))
    names = ", ".join([*files, *folders])
    wrapper = textwrap.TextWrapper(WIDTH, break_on_hyphens=False, subsequent_indent=" " * 13)
    return wrapper.fill(f"  {group:10} {names}")


def _example(own: str) -> str:
    """The first own key with a value as a word of the command line."""
    first = next(line for line in own.splitlines() if re.match(r"\w+: ", line) and not re.match(r"\w+:\s+#", line))
    return re.sub(r"\s+#.*", "", first).replace(": ", "=")


def _choice(groups: dict[str, str | None]) -> str:
    return next(f"{group}={chosen}" for group, chosen in groups.items() if chosen is not None)
