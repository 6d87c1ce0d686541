"""Greedy texts of lossless policies beside vanilla's, at every window and wherever a text may
end.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Request
from bild_lab.engine.trace import Trace
from bild_lab.lab.config.compose import policy_names
from bild_lab.lab.point.build import build_method
from bild_lab.training.modules.ngrams import estimate
from tests.engine.methods.modules.tiny import files_of
from tests.policies import EXTERNAL, is_lossless, is_peer, shipped

WINDOWS = 10
WINDOW_KNOBS = ("window", "inner_window", "max_window")
LOSSLESS = [policy for policy in policy_names() if policy not in EXTERNAL and is_lossless(policy)]


@dataclass(frozen=True)
class Models:
    """Loaded models of one engine, and a table of n-grams for policies that draft from one."""

    target: HuggingFaceModel
    draft: HuggingFaceModel
    second_draft: HuggingFaceModel
    table: Path

    def method(self, policy: str, window: int) -> Method:
        node = copy.deepcopy(shipped(policy))
        for knob in WINDOW_KNOBS:
            if knob in node:
                node[knob] = window
        if "table" in node:
            node.table = str(self.table)
        node.update(
            files_of(policy, self.target.checkpoint.config, self.table.with_suffix(".adapters"))
        )
        parts = {"target": self.target, "draft": self.draft, "second_draft": self.second_draft}
        return build_method(
            node, {name: lambda model=model: model for name, model in parts.items()}
        )


@dataclass(frozen=True)
class Case:
    """A request, the window to draft with, and the tokens that vanilla answers the request with."""

    request: Request
    window: int
    expected: list[int]


@dataclass
class Seen:
    """What became of the drafts of many texts, so that a comparison can show that it compared
    something.

    accepted: drafted tokens that stand. rejections: drafts that did not stand whole. ended_in_draft
    and cut_in_draft: texts whose last token is a drafted one, an end token or the last that the
    limit allows.
    """

    accepted: int = 0
    rejections: int = 0
    ended_in_draft: int = 0
    cut_in_draft: int = 0

    def add(self, trace: Trace, request: Request, emitted: Sequence[int]) -> None:
        self.accepted += trace.accepted
        self.rejections += trace.rollbacks
        before = sum(each.accepted + 1 for each in trace.rounds[:-1])
        if len(emitted) - before <= trace.rounds[-1].accepted:
            ended = emitted[-1] in request.limits.end_tokens
            self.ended_in_draft += ended
            self.cut_in_draft += not ended

    def missing(self) -> set[str]:
        """What never happened."""
        return {name for name, count in vars(self).items() if count == 0}


def drafts(policy: str) -> bool:
    """Its drafts can be looked into."""
    return policy not in ("vanilla", "truncation", "ppd", "alpha") and not is_peer(policy)


def emitted(method: Method, request: Request, trace: Trace) -> list[int]:
    return method.decode(request, trace)[request.limits.prompt_length :]


def compare(policy: str, models: Models, cases: Sequence[Case], seen: Seen) -> None:
    """Decode every case and compare it token by token."""
    method = lru_cache(lambda window: models.method(policy, window))
    for case in cases:
        trace = Trace()
        tokens = emitted(method(case.window), case.request, trace)
        assert tokens == case.expected, f"{policy}, window {case.window}: {case.request}"
        if drafts(policy):
            seen.add(trace, case.request, tokens)


def table_of(texts: Sequence[Sequence[int]], target: HuggingFaceModel, path: Path) -> Path:
    """A table of n-grams of these texts."""
    estimate(texts, 2, target.checkpoint.vocabulary, "the target's own texts").save(path)
    return path
