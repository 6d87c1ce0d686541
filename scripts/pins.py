"""Pin the papers' checkpoints and data sets to the commits that the hub has today: python scripts/pins.py [ID …]

    python scripts/pins.py                            every one that an experiment reads, anew
    python scripts/pins.py google-t5/t5-small         these alone; other pins stay

The commits, with their date, go to bild_lab/pins.yaml and are read wherever a command names no other revision.
A command that names one, such as pair.target_revision=main, reads that. Needs the hub.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import yaml

from bild_lab import files
from bild_lab.errors import UserError
from bild_lab.lab.cli import escape, output, run_application, stages
from bild_lab.lab.config import config_dir


def repositories() -> Iterator[tuple[str, str, str | None]]:
    """The kind, id and branch (None: main) of every repository that an experiment reads."""
    from bild_lab.papers.paper_runs import hub

    yield from (("models", name, None) for name in hub()["models"] if not name.startswith("outputs/"))
    for file in sorted((config_dir() / "dataset").glob("*.yaml")):
        dataset = yaml.safe_load(file.read_text(encoding="utf-8"))
        if dataset.get("hub_id"):
            yield "datasets", dataset["hub_id"], dataset.get("hub_revision")


def main() -> None:
    """Raises UserError for an id that no experiment reads, and in the end for those that the hub does not have."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    chosen = sys.argv[1:]
    known = list(dict.fromkeys(repositories()))
    if unknown := set(chosen) - {name for _, name, _ in known}:
        raise UserError(f"no experiment reads {', '.join(sorted(unknown))}; see bild_lab/papers/hub.yaml")
    text = files.PINS.read_text(encoding="utf-8")
    pins, failed = yaml.load(text, yaml.BaseLoader), []
    for kind, name, branch in known:
        if chosen and name not in chosen:
            continue
        stages.enter(f"asking for {name}")
        try:
            commit = HfApi().repo_info(name, repo_type=kind.removesuffix("s"), revision=branch).sha
        except (HTTPError, OSError) as error:
            failed.append(f"{name} ({str(error).strip().splitlines()[0]})")
            continue
        key = name if branch is None else f"{name}@{branch}"
        pins[kind][key] = {"revision": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        output.print(escape(f"{key}: {commit}"))
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    files.write_atomically(files.PINS, (head + yaml.safe_dump(pins)).encode())
    if failed:
        raise UserError(f"not pinned: {'; '.join(failed)}; check the hub, names and access (`hf auth login`)")


if __name__ == "__main__":
    run_application(main, None)
