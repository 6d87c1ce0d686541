"""Runs an application: help, one clear message for bad input, and the exit code.

Errors of Hydra and OmegaConf are put in plain words.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.logging import RichHandler
from rich.markup import escape

from bild_lab.errors import UserError, suggestion
from bild_lab.lab.config.command_line import (
    MULTIRUN,
    as_typed,
    key_of,
    options_first,
    quote_free_text,
    require_no_secrets,
    require_overrides,
    this_script,
)
from bild_lab.lab.config.compose import (
    BUILT_BY_HYDRA,
    compose_config,
    config_dir,
    override_words,
    searching,
)
from bild_lab.lab.config.console import console, output, status_line, tolerate_streams
from bild_lab.lab.config.policies import flat_values
from bild_lab.lab.schema.glossary import terms_text
from bild_lab.ranks import launched

FAILED_POINTS, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes
# variables of the environment that `run_application` sets
COMMAND_VARIABLES = ("HYDRA_FULL_ERROR", "TRANSFORMERS_VERBOSITY")
WIDTH = 80  # columns of help
STORED_KEPT = "the same command goes on from what it has stored, if anything"
POINTS_KEPT = "finished points are kept, the same command runs the rest"


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


def require_words(required_words: str) -> None:
    """Refuse a command line without a word for a command that takes long: nobody said what it is
    to work on.

    required_words: what the words say, and an example.
    """
    if not sys.argv[1:]:
        console.quiet = not launched().is_main
        refuse(UserError(f"{required_words}; got no word, --help says more"))


def run_application(
    main: Callable[[], Any],
    config_name: str | None = "config",
    required_words: str = "",
    stop_notice: str = STORED_KEPT,
) -> NoReturn:
    """Run an application and exit with its code. Bad input gives one message and no traceback.

    config_name: the application's configuration, all words being its overrides. `--help` shows its
    keys, and they are suggested for misspelt ones. None: the application reads its words itself,
    which need not be KEY=VALUE. required_words: as in `require_words`, for an application that does
    nothing without a word. stop_notice: what is left when it is stopped.
    """
    tolerate_streams()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print_and_exit(help_text(sys.modules[main.__module__].__doc__ or "", config_name))
    if required_words:
        require_words(required_words)
    _set_up_messages()
    try:
        _rewrite_command_line(are_overrides=config_name is not None)
        main()
        sys.stdout.flush()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        refuse(error, config_name)
    except BrokenPipeError:  # `--cfg job | head`: the reader has stopped reading
        _discard_output()
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
        status_line.leave()
    sys.exit(0)


def _set_up_messages() -> None:
    """Set what libraries print, and where: Hydra raises its errors, and warnings are log lines."""
    full_error, verbosity = COMMAND_VARIABLES
    os.environ[full_error] = "1"  # Hydra raises its exceptions instead of printing them
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console)]
    )
    logging.captureWarnings(True)
    # warnings of Transformers are about our calls, not the user's
    os.environ.setdefault(verbosity, "error")


def _rewrite_command_line(are_overrides: bool) -> None:
    """Put the words of the command line as Hydra takes them: options first, free text in quotes.

    are_overrides: whether each other word must be KEY=VALUE. Raises UserError for one that is not,
    and for a secret.
    """
    multirun = [word for word in sys.argv[1:] if word in MULTIRUN]
    options, words = options_first([word for word in sys.argv[1:] if word not in multirun])
    if are_overrides:
        require_overrides(words)
    sys.argv[1:] = [*multirun[:1], *options, *map(quote_free_text, words)]
    require_no_secrets(sys.argv[1:])
    has_options = any(word[:1] == "-" and word not in multirun for word in sys.argv[1:])
    if launched().is_main and not has_options:  # options make Hydra itself print
        status_line.enter("reading the configuration")


def help_text(docstring: str, config_name: str | None) -> str:
    """Help for a script.

    docstring: the script's, whose first line ends in a command. config_name: the configuration
    whose keys are shown; None for a script without keys.
    """
    summary_line, _, details = docstring.strip().partition("\n")
    purpose, _, command = summary_line.partition(": python ")
    sections = [
        f"usage: python {command}",
        f"{purpose}.",
        *([details.strip("\n")] if details.strip() else []),
    ]
    if config_name is not None:
        file = config_dir() / f"{config_name}.yaml"
        keys = file.read_text(encoding="utf-8").partition("\n")[2].partition("\nhydra:")[0]
        sections.append(f"Keys (KEY=VALUE), from conf/{file.name}\n\n{keys.strip()}")
        sections.append("Groups (GROUP=FILE)\n\n" + "\n".join(_group_lines()))
        sections.append(
            f"Every key with its value, without running anything: python {command.split()[0]}"
            " --cfg job"
        )
    if config_name == "config":  # run.py writes reports, which use the terms
        sections.append(f"Words of the reports\n\n{terms_text(WIDTH)}")
    return "\n\n".join(sections)


def _group_lines() -> list[str]:
    """A line of the help for each group of `conf`: its files and folders."""
    wrapper = textwrap.TextWrapper(WIDTH, break_on_hyphens=False, subsequent_indent=" " * 13)
    lines = []
    for group in sorted(folder for folder in config_dir().iterdir() if folder.is_dir()):
        files = sorted(file.stem for file in group.glob("*.yaml"))
        folders = sorted(f"{folder.name}/…" for folder in group.iterdir() if folder.is_dir())
        lines.append(wrapper.fill(f"  {group.name:10} {', '.join([*files, *folders])}"))
    return lines


def print_and_exit(text: str) -> NoReturn:
    """Print a text on standard output and exit, also if the reader stops early: `--help | head`."""
    with suppress(BrokenPipeError):
        sys.stdout.write(f"{as_typed(text)}\n")
        sys.stdout.flush()
        sys.exit(0)
    _discard_output()
    sys.exit(0)


def _discard_output() -> None:
    """Send standard output nowhere: its reader has stopped reading, and Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refuse(error: BaseException, config_name: str | None = "config") -> NoReturn:
    """Print what is wrong with the input and exit with code 2."""
    status_line.leave()
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
    if not launched().is_main:
        console.quiet = output.quiet = True
    status_line.enter("loading libraries")
    new_folder = None
    try:
        if HydraConfig.initialized():
            hydra = HydraConfig.get()
            new_folder = _new_folder(hydra)
            require_same_folder(hydra)
            require_no_launcher(hydra)
            words = override_words(hydra)
            if any(map(_may_change_nothing, words)):
                require_effect(words, compose_config(words, hydra.job.config_name), hydra)
        yield
    except (UserError, HydraException, OmegaConfBaseException) as error:
        if new_folder is not None:
            with suppress(OSError):  # something is in it
                new_folder.rmdir()
        refuse(error, config_name)


def _new_folder(hydra: DictConfig) -> Path | None:
    """The folder that Hydra has made for this command, such as outputs/NAME; None if it was there
    before, as the working directory is. hydra: its part of the configuration.
    """
    folder = Path(hydra.runtime.output_dir)
    began = time.time() - (time.perf_counter() - status_line.began_s)
    try:
        is_new = folder.stat().st_mtime >= began
    except OSError:  # of several processes another one has removed it
        return None
    return folder if is_new and not Path(hydra.runtime.cwd).is_relative_to(folder) else None


def require_same_folder(hydra: DictConfig) -> None:
    """Raise UserError where Hydra changes the working directory: what is written there is not found
    again, and relative paths lead elsewhere. hydra: its part of the configuration.
    """
    if hydra.job.chdir:
        raise UserError(
            "hydra.job.chdir=true would put results where no report and no later command finds"
            " them; leave it out, results go to outputs/NAME of the working directory"
        )


def require_no_launcher(hydra: DictConfig, remedy: str = "leave it out") -> None:
    """Raise UserError for a launcher, or a sweeper, of one run: Hydra starts none. hydra: its part of
    the configuration. remedy: what to do.
    """
    for word in hydra.overrides.hydra if hydra.mode == RunMode.RUN else ():
        if key_of(word).startswith(("hydra/launcher", "hydra.launcher", "hydra/sweeper")):
            raise UserError(
                f"{word} would change nothing, as this command is one run in this process; {remedy}"
            )


def require_effect(words: Sequence[str], cfg: DictConfig, hydra: DictConfig) -> None:
    """Raise UserError for a word of the command line that changes nothing: a metric beside a list of
    metrics that another one leads, and an added key that no other refers to, such as a misspelt
    group.

    words: the overrides. cfg: the configuration that they make. hydra: its own part of it.
    """
    for word in filter(_may_change_nothing, words):
        if word[:1] == "+" and key_of(word).lstrip("+") not in hydra.runtime.choices:
            _require_referred_to(word, cfg, hydra)
        if _is_metric(word):
            _require_leading(word, cfg.dataset)


def _may_change_nothing(word: str) -> bool:
    return word[:1] == "+" or _is_metric(word)


def _is_metric(word: str) -> bool:
    return word.lstrip("+").startswith("dataset.metric=")


def _require_leading(word: str, dataset: DictConfig) -> None:
    """Raise UserError where `dataset.metrics` has not the metric of this word, or not first."""
    metric, metrics = dataset.metric, dataset.get("metrics")
    if metric is None or not metrics or metric == metrics or metric == metrics[0]:
        return
    raise UserError(
        f"{word} would change nothing beside dataset.metrics={metrics}, whose first metric leads; set"
        f" dataset.metrics=null, or a list that begins with {metric}"
    )


def _require_referred_to(word: str, cfg: DictConfig, hydra: DictConfig) -> None:
    """Raise UserError where a word adds a group, or a key outside of any, that no value refers to."""
    key = key_of(word).lstrip("+")
    name, config_name = key.partition(".")[0], hydra.job.config_name
    if name in compose_config([], config_name):  # the keys of a known group are checked with it
        return
    if _has_own_callbacks(hydra):  # which may read any key, and say nowhere which
        return
    values, hydra_values = (OmegaConf.to_container(node, resolve=False) for node in (cfg, hydra))
    may_refer = [value for key_name, value in values.items() if key_name not in (name, "hydra")]
    may_refer += [value for key_name, value in hydra_values.items() if key_name != "overrides"]
    # a point of a sweep has their values nowhere else
    may_refer += hydra_values["overrides"]["hydra"]
    if re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", str(may_refer)):
        return
    meant = suggestion(key, known_keys(config_name)) or "."
    raise UserError(
        f"{word} adds a key that no value refers to, so it changes nothing{meant} A key of your own"
        f" needs ${{{key}}} where its value belongs"
    )


def _has_own_callbacks(hydra: DictConfig) -> bool:
    """Whether a callback of the user's own runs beside ours."""
    callbacks = filter(None, (hydra.callbacks or {}).values())
    # a point of a sweep has what the command line says of callbacks nowhere else
    return any(callback.get("_target_") not in BUILT_BY_HYDRA for callback in callbacks) or any(
        re.match(r"\+*hydra[./]callbacks", word) for word in hydra.overrides.hydra
    )


def require_one_process() -> None:
    """Exit with a message under `torchrun`: all its processes would measure the same points at
    once.
    """
    if (count := launched().count) > 1:
        refuse(
            UserError(f"points are measured in one process, got {count}; run it without torchrun")
        )


def raised_by_hydra(error: BaseException) -> bool:
    """Whether the error comes from Hydra, or from a file that it cannot read, not from the code that
    it runs.
    """
    names = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    packages = [name.partition(".")[0] for name in names]
    innermost_package = next(
        (name for name in reversed(packages) if name not in sys.stdlib_module_names), ""
    )
    return innermost_package in ("hydra", "omegaconf", "antlr4", "yaml")


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
    if match := re.search(r"Could not find '([^']+)'\s+Available options in '([^']+)'", text):
        choice, group = match.groups()
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        return unknown_choice(group, choice.removeprefix(f"{group}/"), options)
    if match := re.search(r"Error merging override (.+)\n(.+)", text):
        return f"{match[1]}: {match[2]}"
    if match := re.search(r"LexerNoViableAltException: (.+)", text):
        signs = " ".join(dict.fromkeys(sign for sign in match[1] if not sign.isascii()))
        return (
            f"{match[1]} cannot be read{signs and f' because of {signs}'}; write plain signs, or"
            " quote the value"
        )
    message = " ".join(
        line.strip() for line in str(error).splitlines() if line.strip() and "full_key" not in line
    )
    if isinstance(error, OverrideParseException):  # its words do not have the override
        return f"{error.override} cannot be read: {message}"
    return message


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


def unknown_choice(group: str, name: str, options: list[str]) -> str:
    """A message about a file that is not in its config group, or that is a folder there.

    group: such as hydra/launcher. options: what Hydra found in it, a user's own files included.
    """
    folder = config_dir() / group
    files = [
        file.relative_to(folder).with_suffix("").as_posix()
        for file in sorted(folder.rglob("*.yaml"))
    ]
    if files_in_folder := [file for file in files if file.startswith(f"{name}/")]:
        return f"{group}={name} is a folder; choose one of its files: {', '.join(files_in_folder)}"
    meant = suggestion(name, [*files, *options]) or "."
    known = ", ".join(dict.fromkeys([*options, *files]))
    if group == "hydra/launcher" and "joblib" not in options:
        known += "; pip install 'bild_lab[launchers]' brings joblib and submitit's"
    return f"there is no {group} {name!r}{meant} There are {known}"


def known_keys(config_name: str) -> list[str]:
    """Every dotted key of the configuration, with the chosen policy, dataset and so on."""
    config = compose_config([], config_name)
    # a sweep over several policies takes the first
    group_choices = [match for word in sys.argv[1:] if (match := re.match(r"(\w+)=\w+", word))]
    groups = [match[0] for match in group_choices if OmegaConf.is_dict(config.get(match[1]))]
    options = " ".join(options_first(sys.argv[1:])[0])
    if own_folder := re.search(r"(?:--config-dir|-cd)[= ](.+?)(?: -|$)", options):
        groups.append(searching(Path(own_folder[1])))
    with suppress(HydraException):  # the choice does not exist either
        config = compose_config(groups, config_name)

    return [*config, *flat_values(OmegaConf.to_container(config, resolve=False))]
