"""Code shared by all commands: help, one clear message for bad input, Hydra's errors in plain
words.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any, NoReturn

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner

from bild_lab.errors import UserError, did_you_mean, suggestion
from bild_lab.lab.config.compose import compose_config, config_dir
from bild_lab.lab.schema.glossary import terms_text
from bild_lab.ranks import launched

BAD_INPUT, INTERRUPTED = 2, 130
ESCAPES = {"n": "\n", "t": "\t"}
# of an override's value: quoted text, or what lies between quotes, commas and brackets
PART_OF_VALUE = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,\[\]'"]+"""
WIDTH = 80  # columns of help
CONSOLE_COMMAND = "bild-lab"  # where the package is installed
KEPT = "the same command goes on from what it has stored, if anything"
POINTS_KEPT = "finished points are kept, the same command runs the rest"
SOON_S, SILENT_S = 3.0, 60.0  # without a line in a file or a pipe: of a stage, of any command
MULTIRUN = ("-m", "--multirun")
VALUED_OPTIONS = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp"),
    *("--config-name", "-cn", "--config-dir", "-cd"),
)
FLAGS = (
    "--hydra-help",
    "--version",
    "--resolve",
    "--run",
    "-r",
    "--experimental-rerun",
    *MULTIRUN,
    *VALUED_OPTIONS,
)
FREE_OPTIONS = ("--info", "-i", "--shell-completion", "-sc")  # what follows them is theirs
LONG_DASHES, CURLED_QUOTES = (
    ("\u2013", "\u2014", "\u2212"),
    ("\u201c", "\u201d", "\u2018", "\u2019"),
)
SECRET_NAME = re.compile(r"(?i)(token|secret|password|passwd|api_?key|credentials?)$")
SECRET_VALUE = re.compile(r"\bhf_[A-Za-z0-9]{16,}")  # an access token of the hub


def as_typed(text: str) -> str:
    """The text with our commands as they were typed:

    `bild-lab screen` for `python scripts/screen.py`.
    """
    if not sys.argv[0].startswith(f"{CONSOLE_COMMAND} "):
        return text
    return re.sub(r"python (?:scripts/)?(\w+)\.py", rf"{CONSOLE_COMMAND} \1", text)


class Said(Console):
    """A stream for people. It names commands as they were typed."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(
            *(as_typed(printed) if isinstance(printed, str) else printed for printed in objects),
            **options,
        )


console = Said(stderr=True, soft_wrap=True, highlight=False)
output = Said(soft_wrap=True, highlight=False)


class Stages:
    """The line on a terminal that says what the command is doing now.

    It goes when something is printed on the output, and when the command ends. In a file or a pipe
    it is a line that stays, of what lasts some seconds. began_s: when the command began, by the
    clock of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self._live: Live | Timer | None = None
        self.began_s = time.perf_counter()

    def enter(self, name: str) -> None:
        """From now on the command is doing this."""
        if not console.is_terminal:
            self.soon(f"{name} …")
        elif not console.quiet:
            self.leave()
            line = Spinner("dots", f"[dim]{escape(name)} …[/dim]")
            self._live = Live(
                line, console=console, transient=True, refresh_per_second=5, redirect_stdout=False
            )
            self._live.start(refresh=True)

    def soon(self, said: str) -> None:
        """Print this if it is still true in a few seconds."""
        self.leave()
        self._live = Timer(SOON_S, console.print, [escape(said)])
        self._live.daemon = True
        self._live.start()

    def leave(self) -> None:
        """Remove the line."""
        if self._live is not None:
            self._live.cancel() if isinstance(self._live, Timer) else self._live.stop()
            self._live = None

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Called by `output` before it prints (a render hook of rich)."""
        self.leave()
        return renderables


class Refused(SystemExit):
    """The input was refused with this message, which is printed."""

    def __init__(self, message: str) -> None:
        super().__init__(BAD_INPUT)
        self.message = message


class Stopped(KeyboardInterrupt):
    """A signal asked a sweep to stop. code: the exit status, 130 for SIGINT and 143 for SIGTERM.
    finish: ends it.
    """

    def __init__(self, code: int, finish: Callable[[int], None]) -> None:
        super().__init__()
        self.code, self.finish = code, finish


stages = Stages()
output.push_render_hook(stages)


class Bar(Progress):
    """In a file or a pipe, where no bar is seen, it is a line after each minute without one."""

    _spoke_s = 0.0

    def start(self) -> None:
        super().start()
        self._spoke_s = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._spoke_s = time.monotonic()
        self.console.print(line)

    def update(self, task_id: int, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say_what_is_done(task_id)

    def advance(self, task_id: int, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say_what_is_done(task_id)

    def _say_what_is_done(self, task_id: int) -> None:
        if (
            not self.disable
            and not self.console.is_terminal
            and time.monotonic() - self._spoke_s >= SILENT_S
        ):
            task = next(
                progress_task for progress_task in self.tasks if progress_task.id == task_id
            )
            total = "" if task.total is None else f" of {task.total:,.0f}"
            self.say(f"{escape(task.description)}: {task.completed:,.0f}{total}")


def progress(*columns: ProgressColumn, shown: bool = True) -> Bar:
    """A bar of what is done, with the time left, in place of the stage.

    It goes when its block ends.
    """
    stages.leave()
    all_columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        MofNCompleteColumn(),
        *columns,
        TimeRemainingColumn(),
    )
    return Bar(
        *all_columns,
        console=console,
        transient=True,
        expand=True,
        disable=not shown,
        refresh_per_second=4,
    )


def require_words(required_words: str) -> None:
    """Refuse a command line without a word: the command takes long, and nobody said what to do it
    with.

    required_words: what the words say, and an example.
    """
    if not sys.argv[1:]:
        console.quiet = not launched().first
        refuse(UserError(f"{required_words}; got no word, --help says more"))


def tolerate_streams() -> None:
    """Print a question mark for a character that the terminal or the pipe cannot show, rather than
    stop there.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has streams of its own
            stream.reconfigure(errors="replace")


def run_application(
    main: Callable[[], Any],
    config_name: str | None = "config",
    required_words: str = "",
    stop_notice: str = KEPT,
) -> NoReturn:
    """Run an application and exit with its code. Bad input gives one message and no traceback.

    config_name: the application's configuration, all words being its overrides. `--help` shows its
    keys, and they are suggested for misspelt ones. None: the application reads its words itself,
    which need not be KEY=VALUE. required_words: as in `require_words`, of an application that does nothing
    without a word. kept: what is left when it is stopped.
    """
    tolerate_streams()
    if {"-h", "--help"} & set(sys.argv[1:]):
        show(usage(sys.modules[main.__module__].__doc__ or "", config_name))
    if required_words:
        require_words(required_words)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its exceptions instead of printing them
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console)]
    )
    logging.captureWarnings(True)
    # its warnings are about our calls, not the user's
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    multirun = [word for word in sys.argv[1:] if word in MULTIRUN]
    options, words = options_first([word for word in sys.argv[1:] if word not in multirun])
    try:
        if config_name is not None:
            require_overrides(words)
        # Hydra wants its options first
        sys.argv[1:] = [*multirun[:1], *options, *map(quote_free_text, words)]
        require_no_secrets(sys.argv[1:])
        if launched().first and all(word[:1] != "-" or word in multirun for word in sys.argv[1:]):
            stages.enter("reading the configuration")  # options make Hydra itself print
        main()
        sys.stdout.flush()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        refuse(error, config_name)
    except BrokenPipeError:  # `--cfg job | head`: the reader has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not raised_by_hydra(error):
            raise
        refuse(error, config_name)
    except Stopped as stop:
        stop.finish(stop.code)
    except KeyboardInterrupt:
        console.print(f"[bold]stopped[/bold]; {stop_notice}")
        sys.exit(INTERRUPTED)
    finally:
        stages.leave()
    sys.exit(0)


def options_first(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's options that have a value, each with it, and all other words."""
    options, other_words, remaining_words = [], [], list(words)
    while remaining_words:
        word = remaining_words.pop(0)
        if word in VALUED_OPTIONS and remaining_words:
            options += [word, remaining_words.pop(0)]
        elif word.partition("=")[0] in VALUED_OPTIONS:
            options.append(word)
        else:
            other_words.append(word)
    return options, other_words


def require_overrides(words: Sequence[str]) -> None:
    """Raise UserError for a word that is no KEY=VALUE, by what a shell, a keyboard or another
    tool's habits make.

    Hydra itself only names the place in its grammar where it stopped.
    """
    if any(word.partition("=")[0] in FREE_OPTIONS for word in words):
        return
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        next_word = words[place + 1] if place + 1 < len(words) else ""
        if word[:1] in LONG_DASHES:
            raise UserError(
                f"{word!r} begins with a long dash; write it with a hyphen: -{word[1:]}"
            )
        if word[:2] == "--" and equals:
            raise UserError(
                f"{word!r} is no option; keys have no hyphens before them: {word.lstrip('-')}"
            )
        # an option may be shortened
        if word[:1] == "-" and not any(flag.startswith(word) for flag in FLAGS):
            meant = did_you_mean(word, FLAGS) or "keys are KEY=VALUE without hyphens"
            raise UserError(f"there is no option {word!r}; {meant}")
        if word[:1] in ("-", "~"):
            continue
        space_before_equals = not equals and next_word[:1] == "="
        space_after_equals = (
            equals and not value and next_word and "=" not in next_word and next_word[:1] != "-"
        )
        if space_before_equals or space_after_equals:
            joined = "".join([word, *words[place + 1 : place + (3 if next_word == "=" else 2)]])
            raise UserError(
                f"a space around = parts the key from its value; write them together: {joined}"
            )
        if not equals:
            raise UserError(_no_override(word, words[place - 1] if place else ""))
        if key.endswith("template"):  # free text
            continue
        if value[:1] in CURLED_QUOTES:
            raise UserError(f"{word!r} has curled quotes; write straight ones, ' or \", or none")
        if value.endswith(",") and len(value) > 1:
            remedy = (
                f"{word}{next_word}" if next_word and "=" not in next_word else word.rstrip(",")
            )
            raise UserError(
                f"{word!r} ends with a comma; values have no space between them: {remedy}"
            )


def _no_override(word: str, previous_word: str) -> str:
    """What to do about a word that has no =. previous_word: the word before it."""
    if "=" in previous_word:
        return (
            f"{word!r} is no KEY=VALUE; a value with spaces needs quotes: '{previous_word} {word}'"
        )
    return f"{word!r} is no KEY=VALUE, such as policy=bild; `{this_script()} --help` lists the keys"


def usage(text: str, config_name: str | None) -> str:
    """Help for a script. text: its docstring, whose first line ends in a command. config_name:

    None without keys.
    """
    summary_line, _, details = text.strip().partition("\n")
    purpose, _, command = summary_line.partition(": python ")
    sections = [
        f"usage: python {command}",
        f"{purpose}.",
        *([details.strip("\n")] if details.strip() else []),
    ]
    if config_name is not None:
        file = config_dir() / f"{config_name}.yaml"
        keys = file.read_text(encoding="utf-8").partition("\n")[2].partition("\nhydra:")[0]
        wrapper = textwrap.TextWrapper(WIDTH, break_on_hyphens=False, subsequent_indent=" " * 13)
        group_lines = []
        for group in sorted(folder for folder in config_dir().iterdir() if folder.is_dir()):
            files = sorted(file.stem for file in group.glob("*.yaml"))
            folders = sorted(f"{folder.name}/…" for folder in group.iterdir() if folder.is_dir())
            group_lines.append(wrapper.fill(f"  {group.name:10} {', '.join([*files, *folders])}"))
        sections.append(f"Keys (KEY=VALUE), from conf/{file.name}\n\n{keys.strip()}")
        sections.append("Groups (GROUP=FILE)\n\n" + "\n".join(group_lines))
        sections.append(
            f"Every key with its value, without running anything: python {command.split()[0]}"
            " --cfg job"
        )
    if config_name == "config":  # of run.py, whose reports use the terms
        sections.append(f"Words of the reports\n\n{terms_text(WIDTH)}")
    return "\n\n".join(sections)


def show(text: str) -> NoReturn:
    """Print a text on standard output and exit, also if the reader stops early: `--help | head`."""
    with suppress(BrokenPipeError):
        sys.stdout.write(f"{as_typed(text)}\n")
        sys.stdout.flush()
        sys.exit(0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def quote_free_text(word: str) -> str:
    """Put an override's free text in quotes: Hydra's grammar needs them, but the shell removes
    them.

    Free text is a template, and a path. Without quotes `dataset.prompt_template=German: {source}`
    does not parse. Quoted values, and lists of paths to sweep over, are unchanged, but for \\n and
    \\t (`with_line_breaks`).
    """
    word = with_line_breaks(word)
    key, equals, value = word.partition("=")
    if not equals or re.fullmatch(r"[\w./~:-]*", value) or value[:1] in "'\"":
        return word
    kind = re.split(r"[._]", key)[-1]
    # `template` alone is a group, whose files may be swept over
    is_free_text = (kind == "template" and key != kind and value[:1] != "[") or (
        "," not in value and kind in ("path", "target", "draft", "tokenizer")
    )
    if not is_free_text and not _exists(value):
        return word
    # the grammar reads a backslash as itself, unless a quote follows
    escaped = re.sub(
        r"(\\*)('|$)",
        lambda backslashes: backslashes[1] * 2 + backslashes[2].replace("'", "\\'"),
        value,
    )
    return f"{key}='{escaped}'"


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


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        # too long for a path, a user that there is not, a zero byte
        return False


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
    values = ",".join(
        "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in plain_words
    )
    return [*other_words, f"{key}=[{values}]"] if plain_words else other_words


def refuse(error: BaseException, config_name: str | None = "config") -> NoReturn:
    """Print what is wrong with the input and exit with code 2."""
    stages.leave()
    message = plain_message(error, config_name)
    console.print(f"[bold red]error[/bold red]: {escape(message)}")
    raise Refused(message)


@contextmanager
def refusing(config_name: str = "config") -> Iterator[None]:
    """Turn bad input in the block into one message and exit code 2. With several processes, only
    the first prints.

    Use it inside the function that Hydra calls: Hydra prints an extra line before an error that
    passes through it. The block loads its libraries itself, late, so that bad words of the command
    line are refused at once.
    """
    if not launched().first:
        console.quiet = output.quiet = True
    stages.enter("loading libraries")
    try:
        yield
    except (UserError, HydraException, OmegaConfBaseException) as error:
        refuse(error, config_name)


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
        return f"{match[1]}: {wanted_value(match[2])}"
    if match := re.search(r"LexerNoViableAltException: (.+)", text):
        signs = " ".join(dict.fromkeys(sign for sign in match[1] if not sign.isascii()))
        return (
            f"{match[1]} cannot be read{signs and f' because of {signs}'}; write plain signs, or"
            " quote the value"
        )
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return several_values(match[1])
    return " ".join(
        line.strip() for line in str(error).splitlines() if line.strip() and "full_key" not in line
    )


def wanted_value(omegaconf_message: str) -> str:
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


def several_values(word: str) -> str:
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


def require_one_process() -> None:
    """Exit with a message under `torchrun`: all its processes would measure the same points, at the
    same time.
    """
    if (count := launched().count) > 1:
        refuse(
            UserError(f"points are measured in one process, got {count}; run it without torchrun")
        )
