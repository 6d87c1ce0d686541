"""The reference of keys: every key of conf with its default and its meaning.

Meanings are the comments of the YAML files, and for groups with a schema those of its fields: the
comment behind a key and the comment lines right above it.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
MAIN = "config"  # of run.py
SCHEMAS = {  # of groups whose files share their keys
    "pair": ("bild_lab/lab/config/schemas.py", "PairSpec"),
    "dataset": ("bild_lab/lab/data/dataset_spec.py", "DatasetSpec"),
    "train": ("bild_lab/training/train_spec.py", "TrainSpec"),
}
NOT_KEYS = ("defaults", "hydra", "decoder", "_target_")  # of composition, and the parts of a policy
OPEN = ("config",)  # mappings whose keys are those of Transformers
WHOLE = ("experiment", "match", "scale", "template")  # groups whose files set keys of other groups


@dataclass(frozen=True)
class Key:
    """A dotted key, its default as written (None for a key with keys of its own), and what it
    means.
    """

    name: str
    default: str | None
    meaning: str

    def under(self, group: str) -> Key:
        return replace(self, name=f"{group}.{self.name}")


@dataclass(frozen=True)
class Section:
    """Keys under one heading. level: of the heading. files: of a group, each with what it is."""

    title: str
    level: int
    text: str
    keys: tuple[Key, ...] = ()
    files: tuple[tuple[str, str], ...] = ()


def sections() -> Iterator[Section]:
    """What the page holds, in its order."""
    yield Section("run.py", 3, f"{_source(MAIN)} All other keys are in groups.", _own(MAIN))
    shared = groups(MAIN)
    for group, chosen in shared.items():
        yield from _group(group, chosen)
    scripts = {name: script for script, name in _applications() if name != MAIN}
    yield Section("Scripts", 3, "What each script takes besides the keys of its groups.")
    for name in sorted(scripts, key=scripts.__getitem__):
        yield Section(scripts[name], 4, _what(name), _own(name))
    for name in scripts:
        for group, chosen in groups(name).items():
            if group not in shared:
                shared[group] = chosen
                yield from _group(group, chosen)


def every_key() -> list[Key]:
    """All keys of the page, with the group's name in front."""
    return [key for section in sections() for key in section.keys]


def page() -> str:
    """The sections as Markdown."""
    return "\n".join(line for section in sections() for line in _lines(section))


def without_meaning() -> list[str]:
    return sorted({key.name for key in every_key() if not key.meaning})


def groups(name: str) -> dict[str, str]:
    """The groups of a configuration, each with the file that it takes by default ("null" for
    none).
    """
    chosen: dict[str, str] = {}
    for entry in yaml.safe_load((CONF / f"{name}.yaml").read_text()).get("defaults", ()):
        if isinstance(entry, dict):
            ((group, file),) = entry.items()
            chosen |= {} if group.startswith(("override", "schema@")) else {group: file or "null"}
        elif entry != "_self_":
            chosen |= groups(entry)
    return chosen


def files(group: str) -> list[str]:
    folder = CONF / group
    return sorted(
        file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml")
    )


def header(file: Path) -> str:
    """The first line of a file without the command that it ends with."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
    return re.split(r":? \(?(?:to decode: )?python (?:run|scripts)", lines[0].lstrip("# "))[
        0
    ].rstrip(".:")


def keys_in(file: Path) -> Iterator[Key]:
    """The keys of a YAML file."""
    text = file.read_text()
    lines = text.splitlines()
    session_options = next(
        (number for number, line in enumerate(lines) if not line.startswith("#")), len(lines)
    )

    def commented(key: yaml.Node, value: yaml.Node) -> str:
        flat = value.start_mark.line == key.end_mark.line  # else it is a block below the key
        end = value.end_mark if flat else key.end_mark
        return _joined(
            lines, key.start_mark.line, lines[end.line][end.column :].lstrip(":"), session_options
        )

    def walk(node: yaml.MappingNode, prefix: str) -> Iterator[Key]:
        for key, value in node.value:
            if key.value in NOT_KEYS:
                continue
            meaning, nested = commented(key, value), isinstance(value, yaml.MappingNode)
            if not nested:
                yield Key(
                    prefix + key.value,
                    text[value.start_mark.index : value.end_mark.index].strip(),
                    meaning,
                )
            elif meaning:
                yield Key(prefix + key.value, None, meaning)
            if nested and key.value not in OPEN:
                yield from walk(value, f"{prefix}{key.value}.")

    if isinstance(node := yaml.compose(text), yaml.MappingNode):
        yield from walk(node, "")


@lru_cache
def fields_of(file: str, name: str) -> tuple[Key, ...]:
    """The fields of a dataclass, read from its source: importing it may need torch."""
    path = ROOT / file
    lines = path.read_text().splitlines()
    with path.open("rb") as source:
        tokens = list(tokenize.tokenize(source.readline))
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    (body,) = (
        node.body for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == name
    )
    found = []
    for node in body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            default = "required" if node.value is None else _yaml_of(node.value)
            meaning = _joined(lines, node.lineno - 1, comments.get(node.end_lineno, ""), 0)
            found.append(Key(node.target.id, default, meaning))
    return tuple(found)


def _group(group: str, chosen: str) -> Iterator[Section]:
    of_group = f"`{group}=NAME` takes `conf/{group}/NAME.yaml`; `{chosen}` unless told."
    listed = tuple((name, header(CONF / group / f"{name}.yaml")) for name in files(group))
    if group == "policy":
        yield Section(
            group, 4, f"{of_group} `policy.decoder` holds the parts of a policy.", files=listed
        )
        for name in files(group):
            keys = tuple(
                key.under(group)
                for key in keys_in(CONF / group / f"{name}.yaml")
                if key.name != "name"
            )
            yield Section(f"policy={name}", 5, f"{header(CONF / group / f'{name}.yaml')}.", keys)
    elif group in WHOLE:
        sets = "keys of `dataset`" if group == "template" else "keys of all groups"
        yield Section(group, 4, f"{of_group} The file sets {sets}.", files=listed)
    else:
        yield Section(
            group, 4, of_group, tuple(key.under(group) for key in _shared(group, chosen)), listed
        )


def _shared(group: str, chosen: str) -> Iterable[Key]:
    """The keys of a group's files, with the default of the chosen one."""
    found: dict[str, Key] = {}
    for name in dict.fromkeys((*([] if chosen == "null" else [chosen]), *files(group))):
        for key in keys_in(CONF / group / f"{name}.yaml"):
            if not (key.name in found and found[key.name].meaning):
                found[key.name] = (
                    replace(key, default=found[key.name].default) if key.name in found else key
                )
    if group not in SCHEMAS:
        return found.values()
    own = {key.name: key.default for key in keys_in(CONF / group / f"{chosen}.yaml")}
    return [
        replace(key, default=own.get(key.name, key.default)) for key in fields_of(*SCHEMAS[group])
    ]


@lru_cache
def _known() -> dict[str, str]:
    """The meanings of the keys of run.py and of all groups."""
    every = {group: chosen for _, name in _applications() for group, chosen in groups(name).items()}
    plain = {group: chosen for group, chosen in every.items() if group not in ("policy", *WHOLE)}
    found = {
        f"{group}.{key.name}": key.meaning
        for group, chosen in plain.items()
        for key in _shared(group, chosen)
    }
    return found | {key.name: key.meaning for key in keys_in(CONF / f"{MAIN}.yaml")}


def _own(name: str) -> tuple[Key, ...]:
    """The keys that a configuration's own file and those of `conf/shared` in it set.

    One of a group without a comment has the group's meaning.
    """
    entries = yaml.safe_load((CONF / f"{name}.yaml").read_text()).get("defaults", ())
    shared = [entry for entry in entries if isinstance(entry, str) and entry.startswith("shared/")]
    found = [key for one in (name, *shared) for key in keys_in(CONF / f"{one}.yaml")]
    return tuple(replace(key, meaning=key.meaning or _known().get(key.name, "")) for key in found)


@lru_cache
def _applications() -> list[tuple[str, str]]:
    """Scripts, each with the name of its configuration."""
    found = [("run.py", MAIN)]
    for file in sorted((ROOT / "scripts").glob("*.py")):
        named = re.search(r'@hydra_main\("(\w+)"\)', file.read_text())
        found += [(f"scripts/{file.name}", named[1])] if named and named[1] != MAIN else []
    return found


def _source(name: str) -> str:
    return f"{header(CONF / f'{name}.yaml')} (`conf/{name}.yaml`)."


def _what(name: str) -> str:
    entries = yaml.safe_load((CONF / f"{name}.yaml").read_text()).get("defaults", ())
    if MAIN in entries:
        return f"{_source(name)} All keys of `run.py`, and:"
    listed = ", ".join(f"`{group}={file}`" for group, file in groups(name).items())
    return f"{_source(name)}{f' Groups: {listed}.' if listed else ''}"


def _joined(lines: Sequence[str], line: int, behind: str, session_options: int) -> str:
    """The comment lines right above a line, if they are not of the file's opening, then the comment
    behind it.
    """
    above: list[str] = []
    while (line := line - 1) >= session_options and lines[line].lstrip().startswith("#"):
        above.insert(0, lines[line].strip().lstrip("# "))
    behind = behind.strip().lstrip("# ") if behind.strip().startswith("#") else ""
    return " ".join([*above, behind] if behind else above).strip()


def _yaml_of(value: ast.expr) -> str:
    """A default as YAML writes it."""
    if not isinstance(value, ast.Constant):
        return "see conf/dataset"
    return yaml.safe_dump(value.value, allow_unicode=True).removesuffix("\n").removesuffix("\n...")


def _lines(section: Section) -> Iterator[str]:
    yield f"\n{'#' * section.level} {section.title}\n\n{_cell(section.text)}\n"
    if section.keys:
        yield "| Key | Default | Meaning |\n|---|---|---|"
        yield from (
            f"| `{key.name}` | {_code(key.default)} | {_cell(key.meaning)} |"
            for key in section.keys
        )
    if section.files:
        yield f"\n| `{section.title}=` | What it is |\n|---|---|"
        yield from (f"| `{name}` | {_cell(what)} |" for name, what in section.files)


def _code(default: str | None) -> str:
    if default is None:
        return "–"
    short = default if len(default) < 60 else f"{default[:57]}…"
    return f"`{short}`".replace("|", "\\|").replace("\n", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
