"""The console command `bild-lab NAME …`, also `python -m bild_lab NAME …`: each command, from any
folder.
"""

from __future__ import annotations

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from bild_lab.errors import UserError, did_you_mean
from bild_lab.lab import application
from bild_lab.lab.config.command_line import CONSOLE_COMMAND
from bild_lab.lab.config.console import tolerate_streams
from bild_lab.lab.config.entrypoint import print_and_exit, refuse

HEAD = f"""usage: {CONSOLE_COMMAND} COMMAND [KEY=VALUE …]

Results go to the folder `outputs` of the working directory. After a command, --help explains it, and --config-dir DIR
adds your own configurations to those of the package.
"""


def scripts() -> dict[str, Path]:
    """The files of all commands but `run`, by name: in the package where it is installed, next to
    it in a checkout.
    """
    package = Path(__file__).resolve().parent
    folders = [
        folder for folder in (package / "scripts", package.parent / "scripts") if folder.is_dir()
    ]
    return {file.stem: file for file in sorted(folders[0].glob("*.py"))}


def main() -> None:
    """Run the command that the first word names, with the others.

    Exits with code 2 if there is no such command.
    """
    tolerate_streams()
    word, files = "".join(sys.argv[1:2]), scripts()
    name = word.replace("-", "_")
    if word in ("", "-h", "--help"):
        texts = {
            command: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
            for command, file in files.items()
        }
        texts = {"run": application.__doc__, **texts}
        print_and_exit(
            "\n".join(
                [
                    HEAD,
                    *(
                        f"  {command:21} {str(text).partition(': python ')[0]}"
                        for command, text in texts.items()
                    ),
                ]
            )
        )
    if name not in ("run", *files):
        meant = did_you_mean(name, ["run", *files])
        meant = f"{meant} " if meant else ""
        refuse(
            UserError(f"there is no command {word!r}; {meant}{CONSOLE_COMMAND} --help lists them"),
            None,
        )
    sys.argv = [f"{CONSOLE_COMMAND} {name}", *sys.argv[2:]]
    if name == "run":
        application.command()
    spec = spec_from_file_location("__main__", files[name])
    sys.modules["__main__"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["__main__"])


if __name__ == "__main__":
    main()
