"""A fault to plant in Markov heads."""

from __future__ import annotations

import pytest

from bild_lab.engine.heads.markov import MarkovHead


def misled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head takes the token after the one that it is told."""
    own = MarkovHead.forward
    monkeypatch.setattr(MarkovHead, "forward", lambda head, tokens: own(head, (tokens + 1) % len(head.before)))
