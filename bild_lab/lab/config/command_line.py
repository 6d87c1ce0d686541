"""The words of a command line: options, overrides and free text, as Hydra's grammar needs them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.files import existing_path

ESCAPES = {"n": "\n", "t": "\t"}
# a part of an override's value: quoted text, or what lies between quotes, commas and brackets
PART_OF_VALUE = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,\[\]'"]+"""
PLAIN_WORD = r"[\w./~:-]*"  # a value without signs that mean something in Hydra's grammar
NUMBER = r"[\d._]+(?:[eE]-?\d+)?"
PLACES = ("path", "target", "draft", "tokenizer")  # how keys of files, folders and hub ids end
# how keys of texts end that may look like numbers
TEXTS = (
    *PLACES,
    "adapter",
    "table",
    "file",
    "corpus",
    "tree",
    "from",
    "calibration",
    "output",
    "outputs",
    "revision",
    "split",
    "config",
    "dir",
    "column",
    "categories",
    "group",
    "project",
    "entity",
)
TEXT_KEYS = ("name", "heads", "policy.heads")  # num_heads and module.heads are numbers
CONSOLE_COMMAND = "bild-lab"  # how commands begin where the package is installed
MULTIRUN = ("-m", "--multirun")
VALUED_OPTIONS = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
)
FREE_OPTIONS = ("--info", "-i", "--shell-completion", "-sc")  # words after them are not ours
SECRET_NAME = re.compile(r"(?i)(token|secret|password|passwd|api_?key|credentials?)$")
SECRET_VALUE = re.compile(r"\bhf_[A-Za-z0-9]{16,}")  # an access token of the hub


def as_typed(text: str) -> str:
    """The text with our commands as they were typed: `bild-lab screen` for `python
    scripts/screen.py`.
    """
    if not sys.argv[0].startswith(f"{CONSOLE_COMMAND} "):
        return text
    return re.sub(r"python (?:scripts/)?(\w+)\.py", rf"{CONSOLE_COMMAND} \1", text)


def key_of(word: str) -> str:
    """The key of an override KEY=VALUE."""
    return word.partition("=")[0]


def value_of(word: str) -> str:
    """The value of an override KEY=VALUE."""
    return word.partition("=")[2]


def options_first(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's options that have a value, each with it, and all other words."""
    options, other_words, remaining_words = [], [], list(words)
    while remaining_words:
        word = remaining_words.pop(0)
        if word in VALUED_OPTIONS and remaining_words:
            options += [word, remaining_words.pop(0)]
        elif key_of(word) in VALUED_OPTIONS:
            options.append(word)
        else:
            other_words.append(word)
    return options, other_words


def require_overrides(words: Sequence[str]) -> None:
    """Raise UserError for a word that is no KEY=VALUE, with what to write: Hydra itself only names
    the place in its grammar where it stopped.
    """
    if any(key_of(word) in FREE_OPTIONS for word in words):
        return
    for index, word in enumerate(words):
        if "=" not in word and word[:1] not in ("-", "~"):
            raise UserError(_no_override(word, words[index - 1] if index else ""))
        _require_range_in_order(word)


def _require_range_in_order(word: str) -> None:
    """Raise UserError for a sorted range: Hydra 1.3 sweeps over other values than those of a range
    that ends between two steps.
    """
    key, _, value = word.partition("=")
    if re.match(r"(tag\([^'\"]*)?sort\([^'\"]*range\(", value):
        raise UserError(
            f"Hydra may sweep over other values than those of a sorted range, got {word!r}; write the"
            f" range in its order, such as {key}=range(5,0,-2) for 5, 3, 1"
        )


def _no_override(word: str, previous_word: str) -> str:
    """What to do about a word that has no =. previous_word: the word before it."""
    if "=" in previous_word:
        return (
            f"{word!r} is no KEY=VALUE; a value with spaces needs quotes: '{previous_word} {word}'"
        )
    return f"{word!r} is no KEY=VALUE, such as policy=bild; `{this_script()} --help` lists the keys"


def quote_free_text(word: str) -> str:
    """Put an override's free text in quotes: Hydra's grammar needs them, but the shell removes
    them.

    Free text is a template, and a path. Without quotes `dataset.prompt_template=German: {source}`
    does not parse, nor does a letter such as ü or a ~ in any value. Quoted values are unchanged,
    and so are lists of paths to sweep over, but for such letters, and for \\n and \\t
    (`with_line_breaks`).
    """
    word = with_line_breaks(word)
    key, equals, value = word.partition("=")
    if not equals or value[:1] in "'\"":
        return word
    bare_key = key.lstrip("+")
    kind = re.split(r"[._]", bare_key)[-1]
    is_text = bare_key in TEXT_KEYS or kind in TEXTS
    if re.fullmatch(PLAIN_WORD, value):
        return f"{key}={_quoted_if_needed(value, is_text)}"
    # `template` alone is a group, whose files may be swept over
    is_template = kind == "template" and bare_key != kind and value[:1] != "["
    is_one_place = kind in PLACES and "," not in value
    if is_template or is_one_place or existing_path(value, Path()) is not None:
        return f"{key}={_quoted_whole(value)}"
    values = value.split(",")
    if not all(re.fullmatch(PLAIN_WORD, swept_value) for swept_value in values):
        return word
    quoted = (_quoted_if_needed(swept_value, is_text) for swept_value in values)
    return f"{key}={','.join(quoted)}"


def _quoted_whole(value: str) -> str:
    """A whole value in quotes. The grammar reads a backslash as itself, unless a quote follows."""
    escaped = re.sub(
        r"(\\*)('|$)",
        lambda backslashes: backslashes[1] * 2 + backslashes[2].replace("'", "\\'"),
        value,
    )
    return f"'{escaped}'"


def _quoted_if_needed(value: str, is_text: bool) -> str:
    """A plain word, in quotes if it has a letter that Hydra's grammar takes in quotes alone, or is
    text that looks like a number: 2026_11_29 is one to Hydra, without its underscores.
    """
    looks_like_number = re.fullmatch(NUMBER, value) is not None
    if (is_text and looks_like_number) or not value.isascii() or "~" in value:
        return f"'{value}'"
    return value


def with_line_breaks(word: str) -> str:
    """An override of a template or of stop strings, with line breaks and tabs for \\n and \\t.

    Hydra's grammar has no such escapes, and would take a backslash and a letter. Two backslashes
    before the letter stand for these.
    """
    key, _, value = word.partition("=")
    kind = re.split(r"[._]", key)[-1]
    if kind not in ("template", "cut", "stop") or not re.search(r"\\[nt]", value):
        return word
    # one free text, which is put in quotes afterwards
    if kind == "template" and value[:1] not in "['\"":
        return f"{key}={unescaped(value)}"
    return f"{key}={re.sub(PART_OF_VALUE, lambda segment: _quoted(segment[0]), value)}"


def _quoted(segment: str) -> str:
    """A part of an override's value, in quotes if it needs them for its line breaks."""
    text = unescaped(segment)
    if text == segment or segment[:1] in "'\"":
        return text
    return "'" + text.replace("'", "\\'") + "'"


def unescaped(text: str) -> str:
    return re.sub(
        r"\\(\\?)([nt])",
        lambda escape: escape[1] + escape[2] if escape[1] else ESCAPES[escape[2]],
        text,
    )


def require_no_secrets(words: list[str]) -> None:
    """Raise UserError for a word with an access token, a key or a password: overrides are saved
    with the results.
    """
    environment_secrets = {
        value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= 8
    }
    for word in words:
        key, _, value = word.partition("=")
        copies_secret = any(
            SECRET_NAME.search(name) for name in re.findall(r"oc\.env:\s*['\"]?(\w+)", value)
        )
        sets_secret = SECRET_NAME.search(key) and value not in ("", "null")
        if (
            copies_secret
            or sets_secret
            or SECRET_VALUE.search(word)
            or any(secret in word for secret in environment_secrets)
        ):
            named_key = key.lstrip("+~") if "=" in word else "a word of the command line"
            raise UserError(
                f"{named_key} would save a secret with the results; leave it out and set it in the"
                " environment only: `export HF_TOKEN=…` or `hf auth login`, `export"
                " WANDB_API_KEY=…` or `wandb login`"
            )


def words_as_list(words: list[str], key: str) -> list[str]:
    """The command line with its plain words collected in the list `key`.

    Overrides and options are unchanged.
    """
    # the word before each word: in `--cfg job`, job is the value of an option
    previous_words = ["", *words]
    plain = [
        "=" not in word and word[:1] != "-" and previous_word[:1] != "-"
        for previous_word, word in zip(previous_words, words, strict=False)
    ]
    plain_words = [word for word, is_plain in zip(words, plain, strict=True) if is_plain]
    other_words = [word for word, is_plain in zip(words, plain, strict=True) if not is_plain]
    return [*other_words, list_override(key, plain_words)] if plain_words else other_words


def list_override(key: str, words: Sequence[str]) -> str:
    """An override that gives the key these words as a list, quoted as Hydra reads them."""
    quoted = ("'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in words)
    return f"{key}=[{','.join(quoted)}]"


def this_script() -> str:
    """How this command was started, without its words, as it can be typed again where it was
    typed.
    """
    if sys.argv[0].startswith(f"{CONSOLE_COMMAND} "):
        return sys.argv[0]
    script = Path(sys.argv[0])
    with suppress(ValueError):
        script = script.absolute().relative_to(Path.cwd())
    return shlex.join(["python", str(script)])
