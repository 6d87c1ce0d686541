"""What of a sweep was logged to Weights & Biases: `wandb/logged.jsonl` in its folder, a line for each run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError

OFFLINE, ONLINE = "offline", "online"


@dataclass(frozen=True)
class Logged:
    """One run. measured: when its point was measured, None for a run that is no point. mode: "online" or "offline"."""

    run: str
    measured: str | None
    mode: str
    project: str
    entity: str | None


def note(folder: Path, logged: Logged) -> None:
    """Add a run to the record of a sweep's folder."""
    file = _file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(logged)) + "\n")


def noted(folder: Path) -> list[Logged]:
    """The record of a sweep's folder, oldest first; empty if nothing was logged."""
    file, found = _file(folder), []
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for line in lines:
        with suppress(ValueError, TypeError):  # a line that a killed process left half written
            found.append(Logged(**json.loads(line)))
    return found


def sync_command(folder: Path) -> str:
    """The command line that sends a folder's offline runs; those that were sent before are left out by wandb."""
    return f"wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"


def require_logged(groups: Sequence[str], project: str, entity: str | None, outputs: Path, api: Any | None) -> None:
    """Raise UserError for a sweep without runs in the project: a report on it would be empty.

    api: `wandb.Api()`, which is asked for the runs of each group. With None the records under `outputs` decide.
    """
    for group in groups:
        record = noted(outputs / group)
        if api is None and record:
            continue
        if api is not None and _count(api, group, project, entity):
            continue
        if any(one.mode == OFFLINE for one in record):
            raise UserError(f"the runs of {group!r} are still offline; send them: {sync_command(outputs / group)}")
        where = f" in project {project!r}" if api is not None else f": there is no {_file(outputs / group)}"
        raise UserError(
            f"sweep {group!r} was never logged{where}; log it: "
            f"python scripts/log_sweep.py {shlex.quote(str(outputs / group))}"
        )


def _count(api: Any, group: str, project: str, entity: str | None) -> int:
    """How many runs a group has on the server; none in a project that does not exist."""
    place = f"{entity or api.default_entity}/{project}"
    try:
        return len(api.runs(place, filters={"group": group}, per_page=1))
    except ValueError:  # the client's word for an unknown project
        return 0
    except Exception as error:  # the client raises errors of many types
        raise UserError(f"the runs of {place} cannot be read: {' '.join(str(error).split())}") from error


def _file(folder: Path) -> Path:
    return folder / "wandb" / "logged.jsonl"
