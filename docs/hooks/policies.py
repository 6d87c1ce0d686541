"""The table of all policies in docs/policies.md, made of the heads of conf/policy/*.yaml.

    python -m docs.hooks.policies      # after a head has changed: writes the table anew

The first comment line of a file says what the policy does and its source, then the command that
runs it. The second has the cells that the keys of the file cannot tell:

    # lossless: yes | needs: draft model | works on: any
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from docs.hooks import keys

PAGE = keys.ROOT / "docs/policies.md"
BEGIN = "<!-- conf/policy: python -m docs.hooks.policies writes this table -->"
END = "<!-- end of the table -->"
CELLS = ("lossless", "needs", "works on")
# knobs that many policies share, which the page explains once
SHARED = ("name", "verify_tail", "draft_vocabulary", "draft_vocabulary_from")


def table(folder: Path = keys.CONF / "policy") -> str:
    """The rows of all policies in a folder, by name."""
    return "\n".join(_rows(folder))


def cells(file: Path) -> dict[str, str]:
    """The cells in the second line of a policy's file.

    ValueError: the line is missing, or has other cells.
    """
    second = file.read_text(encoding="utf-8").splitlines()[1]
    pairs = [cell.partition(":") for cell in second.lstrip("# ").split(" | ")]
    found = {name.strip(): text.strip() for name, _, text in pairs}
    if tuple(found) != CELLS or not all(found.values()):
        wanted = " | ".join(f"{name}: …" for name in CELLS)
        raise ValueError(f"the second line of {file} must be `# {wanted}`, got {second!r}")
    return found


def with_table(page: str, rows: str, begin: str = BEGIN) -> str:
    """The text of a page with these rows between its comments `begin` and `END`."""
    before, _, rest = page.partition(f"{begin}\n")
    _, _, after = rest.partition(f"\n{END}")
    if not after:
        raise ValueError(f"the page must have the lines {begin} and {END}")
    return f"{before}{begin}\n\n{rows}\n\n{END}{after}"


def _rows(folder: Path) -> Iterator[str]:
    yield "| Policy | What it does | Needs | Lossless | Works on | Knobs |"
    yield "|---|---|---|---|---|---|"
    for file in sorted(folder.glob("*.yaml")):
        told = cells(file)
        knobs = [key.name for key in keys.keys_in(file) if key.name not in SHARED]
        listed = ", ".join(f"`{knob}`" for knob in knobs if "." not in knob) or "–"
        yield (
            f"| `{file.stem}` | {keys.header(file)} | {told['needs']} | {told['lossless']} |"
            f" {told['works on']} | {listed} |"
        )


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
    sys.stdout.write(f"{PAGE} has the table of {keys.CONF / 'policy'}\n")
