"""Docstrings as the Python reference shows them: lines such as "window: …" become a list of
parameters or fields.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

LINE = re.compile(r"^(\w+(?:, \w+)*): ")
SENTENCE = re.compile(r"(?<=\.) (\w+(?:, \w+)*): ")


class Parameters(Extension):
    """Lets a list begin at a line that explains parameters of a function, or fields of a class."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is None or not (obj.is_class or obj.is_function):
            return
        known = set(obj.members) | {each.name for each in getattr(obj, "parameters", ())}
        obj.docstring.value = as_list(obj.docstring.value, known)


def as_list(text: str, known: set[str]) -> str:
    """The text with an item for each line or sentence that begins with known names and a colon."""
    apart = SENTENCE.sub(
        lambda found: f"\n{found[1]}: " if set(found[1].split(", ")) <= known else found[0], text
    )
    lines: list[str] = []
    listing = False
    for line in apart.splitlines():
        found = LINE.match(line)
        if found and set(found[1].split(", ")) <= known:
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines += [] if listing or not lines or not lines[-1] else [""]
            lines.append(f"- {names}: {line[found.end() :]}")
            listing = True
        elif listing and re.match(
            r"[A-Z]|$", line
        ):  # what follows the list; other lines belong to its last item
            lines += ["", line] if line else [line]
            listing = False
        else:
            lines.append(line)
    return "\n".join(lines)
