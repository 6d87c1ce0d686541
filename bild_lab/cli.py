"""What every entrypoint shares: one clear message for bad input, and Hydra's errors in plain words."""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.logging import RichHandler

from bild_lab.errors import UserError

BAD_INPUT, INTERRUPTED = 2, 130
console = Console(stderr=True, soft_wrap=True, highlight=False)
output = Console(soft_wrap=True, highlight=False)
FREE_TEXT = (
    "dataset.prompt_template",
    "dataset.path",
    "pair.target",
    "pair.draft",
    "pair.second_draft",
    "policy.table",
)


def run_application(main: Callable[[], Any]) -> NoReturn:
    """Run a Hydra application and exit with its code; bad input ends in one message and no traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its exceptions on instead of printing them
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console)])
    logging.captureWarnings(True)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its notes on our own calls are not the user's
    multirun = [word for word in sys.argv[1:] if word in ("-m", "--multirun")]  # Hydra wants it in front
    sys.argv[1:] = [*multirun[:1], *(quoted(word) for word in sys.argv[1:] if word not in multirun)]
    try:
        main()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        refuse(error)
    except KeyboardInterrupt:
        console.print("[bold]stopped[/bold]; finished points are kept, the same command runs the rest")
        sys.exit(INTERRUPTED)
    sys.exit(0)


def quoted(word: str) -> str:
    """An override whose value is free text, with the quotes that Hydra's grammar wants and a shell takes away.

    `dataset.prompt_template=German: {source}` would not parse. Values that are quoted already, and
    lists of paths to sweep over, stay as they are.
    """
    key, equals, value = word.partition("=")
    if not equals or key not in FREE_TEXT or re.fullmatch(r"[\w./~:-]*", value) or value[:1] in "'\"":
        return word
    if key != "dataset.prompt_template" and "," in value:
        return word
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def refuse(error: BaseException) -> NoReturn:
    """Say what is wrong with the input and exit with code 2."""
    console.print(f"[bold red]error[/bold red]: {escape(plain_message(error))}")
    sys.exit(BAD_INPUT)


def plain_message(error: BaseException) -> str:
    """The error in words a user can act on."""
    if isinstance(error, UserError):
        return str(error)
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    text = "\n".join(str(each) for each in causes)
    if match := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(match[1])
    if match := re.search(r"Could not find '([^']+)'", text):
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        return unknown_choice(match[1], options)
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip() and "full_key" not in line)


def unknown_key(key: str) -> str:
    """A message about a configuration key that does not exist, with the nearest that does."""
    known = known_keys()
    if key in known:
        return f"not every chosen configuration has the key {key}; sweep policies with different knobs one by one"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"there is no configuration key {key}{meant} `python run.py --cfg job` lists them all"


def unknown_choice(choice: str, options: list[str]) -> str:
    """A message about a file that its config group does not have."""
    group, _, name = choice.rpartition("/")
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]}?" if near else ""
    known = f" {group or 'the configuration'} can be {', '.join(options)}" if options else ""
    return f"there is no {group or 'config'} {name!r}{meant}{known}"


def known_keys() -> list[str]:
    """Every key of the configuration with the chosen policy, dotted."""
    from omegaconf import DictConfig, OmegaConf

    from bild_lab.config import compose_config

    # of several policies to sweep over, the first
    chosen = [match[0] for word in sys.argv[1:] if (match := re.match(r"(policy|dataset|pair|logger)=\w+", word))]
    config = compose_config(chosen)

    def walk(node: DictConfig, prefix: str) -> list[str]:
        keys = []
        for name in node:
            keys.append(f"{prefix}{name}")
            if OmegaConf.is_dict(node._get_node(name)):
                keys += walk(node._get_node(name), f"{prefix}{name}.")
        return keys

    return walk(config, "")


def escape(text: str) -> str:
    """Square brackets as text, not as markup."""
    return text.replace("[", r"\[")
