"""The commands that trainings print, tried as printed."""

from __future__ import annotations

import shlex

from bild_lab.lab.config.command_line import quote_free_text
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.point.prepare import Point, prepare

LEAD = "decode with it: python run.py "


def printed_point(printed: str, *more: str) -> Point:
    """The first point of the printed command, and more words: checked, with its data read and its
    files found.
    """
    (line,) = [line for line in printed.splitlines() if LEAD in line]
    words = [word for word in [*shlex.split(line.partition(LEAD)[2]), *more] if word != "-m"]
    return prepare(
        compose_config([quote_free_text(word.replace("top_k=1,3,5", "top_k=1")) for word in words])
    )
