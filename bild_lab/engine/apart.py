"""Copies of a method that decode several texts side by side."""

from __future__ import annotations

import copy
from collections import deque
from typing import TypeVar

from bild_lab.engine.drafters.windows import Window

Part = TypeVar("Part")
CONTAINERS = (list, dict, set, deque)


def apart(part: Part) -> Part:
    """A copy of a method for one more text: what keeps state of a text is copied, models and tables are shared.

    State is kept by methods, drafters and windows, and by the lists, dictionaries and sets that they hold.
    """
    if type(part) in CONTAINERS:
        return copy.copy(part)
    method = hasattr(part, "decode") and hasattr(part, "lossless")
    if isinstance(part, type) or not (method or hasattr(part, "propose") or isinstance(part, Window)):
        return part
    other = copy.copy(part)
    for name, value in vars(part).items():
        object.__setattr__(other, name, apart(value))  # some are frozen
    return other
