"""A replayed text that differs from the live one: a tie where rounding explains it, a defect where
a row is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import OutputSpec, Scores
from bild_lab.engine.trace import Forward, Round, Trace
from bild_lab.lab.measure.certificate import DEFECT, TIE, most_noise
from bild_lab.lab.measure.likelihood import log_probability, text_logits
from bild_lab.lab.measure.timing import time_methods
from bild_lab.screening import screen
from bild_lab.screening.candidates import Candidate, grid_of
from bild_lab.screening.recorded_model import text_name
from bild_lab.screening.recorded_text import LOGITS, RecordedNode
from bild_lab.screening.replay import (
    ComparedSession,
    ReplayedPoint,
    ReplayVerdict,
    judge_replay,
    replay_text,
)
from bild_lab.screening.screen import Screening
from tests.checkpoints import write_data

POLICIES = ["policy=speculative,bild"]


class Replayed:
    """Tiny checkpoints in bfloat16 on the native engine, decoded over a record."""

    def __init__(self, checkpoints: Path, folder: Path, knobs: Sequence[str] = ()) -> None:
        data = write_data(folder / "data", rows=3)
        (data / "test.jsonl").replace(data / "validation.jsonl")
        words = [
            f"pair.target={checkpoints / 'llama'}",
            f"pair.draft={checkpoints / 'llama-draft'}",
            "name=grid",
        ]
        words += [
            "dataset=multi30k",
            f"dataset.path={data}",
            "decoding.max_new_tokens=12",
            "runtime.threads=1",
        ]
        words += [
            "runtime.dtype=bfloat16",
            "runtime.engine=native",
            "dataset.prompt_template='{source}'",
            *knobs,
        ]
        self.screening = Screening(grid_of(words, POLICIES), "validation")
        self.screened = self.screening.decode(self.screening.grid.candidates)
        live = self.screening.point.decoders["method"].target
        self.target = next(
            one for one in self.screening.records.models.values() if one.model is live
        )

    def over(self, candidate: Candidate) -> partial:
        """Gives the policy's decoder over wrapped models."""
        return partial(self.screening.decoder, candidate.policy)

    def nodes(self, place: int, index: int = 0) -> list[RecordedNode]:
        """The target's nodes along a policy's text, from the first token that it feeds."""
        source = self.screening.requests[index].source
        self.target.start(source, 1)  # reads the text
        (texts,) = self.target._texts.values()
        text = texts[text_name(source)]
        (node,) = text.root.children.values()
        found = [node]
        for token in self.screened[place].texts[index].token_ids[:-1]:
            found.append(found[-1].children[token])
        return found

    def judged(self, place: int, index: int = 0) -> tuple[bool, ReplayVerdict]:
        """Whether the text changed, and the verdict on it."""
        one, request = self.screened[place], self.screening.requests[index]
        over = self.over(one.candidate)
        text = replay_text(one.candidate.name, over(self.screening.records), request).token_ids
        return text != one.texts[index].token_ids, judge_replay(
            over, self.screening.records, request, text
        )


def plant(node: RecordedNode, row: torch.Tensor) -> None:
    node.rows[LOGITS], node._choice = row, None


@pytest.fixture
def replayed(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replayed:
    monkeypatch.chdir(tmp_path)
    return Replayed(checkpoints, tmp_path)


def test_a_wrong_row_is_a_defect(replayed: Replayed) -> None:
    """For a lossless policy and a lossy one."""
    for place in (1, 2):
        changed, found = replayed.judged(place)
        assert not changed and found.largest <= most_noise(replayed.target)
        first = replayed.nodes(place)[0]
        right = first.rows[LOGITS]
        plant(first, -right)
        changed, found = replayed.judged(place)
        assert changed and found.verdict == DEFECT
        plant(first, right)


def test_whole_rows_are_compared_and_what_a_head_reads_too() -> None:
    asked: list[OutputSpec] = []

    def session(head_input: float) -> SimpleNamespace:
        def extend(rows: object, output_spec: OutputSpec) -> Scores:
            asked.append(output_spec)
            return Scores(torch.ones(1, 4), head_input=torch.full((1, 3), head_input))

        return SimpleNamespace(forwards=[], extend=extend)

    model = SimpleNamespace(largest=0.0)
    few = OutputSpec(logits=1, head_input=True, vocabulary=object())
    ComparedSession(model, session(1.0), session(2.0)).extend([1], few)
    assert model.largest == 0.5
    assert asked == [replace(few, vocabulary=None)] * 2


def test_a_threshold_within_the_rounding_is_a_tie_though_the_target_scores_its_sides_differently(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    anything = Replayed(checkpoints, tmp_path, ["policy.fallback=0", "policy.rollback=99"])
    firsts = [
        (index, text.token_ids[0], anything.nodes(2, index)[0])
        for index, text in enumerate(anything.screened[2].texts)
    ]
    index, drafted, node = next(
        one for one in firsts if int(one[2].rows[LOGITS].argmax()) != one[1]
    )
    scores = node.rows[LOGITS]
    distance = -float(scores[0].float().log_softmax(-1)[drafted])
    replayed = Replayed(
        checkpoints, tmp_path, ["policy.fallback=0", f"policy.rollback={distance + 1e-4}"]
    )
    changed, _ = replayed.judged(2, index)
    assert not changed and replayed.screened[2].texts[index].token_ids[0] == drafted
    further = scores.clone()
    further[0, drafted] -= 0.01 * scores.abs().max()
    assert 0 < float(scores[0, drafted] - further[0, drafted]) < 0.02 * float(scores.abs().max())
    plant(replayed.nodes(2, index)[0], further)
    changed, found = replayed.judged(2, index)
    assert changed and found.verdict == TIE and 0 < found.largest <= most_noise(replayed.target)


def test_points_are_scored_by_the_targets_likelihood_over_the_record(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    knobs = ["dataset.metric=log_probability", "policy.fallback=0", "policy.rollback=99"]
    screening = (replayed := Replayed(checkpoints, tmp_path, knobs)).screening
    ran = replayed.target.forwards(request.source for request in screening.requests)
    speculative, bild = screening.rows(replayed.screened, None)
    # the rows are there
    assert replayed.target.forwards(request.source for request in screening.requests) == ran
    pairs = [
        (request, text.token_ids)
        for request, text in zip(screening.requests, replayed.screened[2].texts, strict=True)
    ]
    live = replayed.target.model
    nats = [
        log_probability(text_logits(live, request, tokens), tokens) for request, tokens in pairs
    ]
    assert bild.quality == pytest.approx(
        sum(nats) / sum(len(tokens) for _, tokens in pairs), abs=0.02
    )
    assert (
        speculative.quality_difference == 0 > bild.quality_difference
        and bild.quality_metric == "log-probability"
    )


@pytest.mark.slow
def test_fewer_points_are_timed_where_a_text_takes_long(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, _, bild = replayed.screened
    points = [
        ReplayedPoint(
            bild.candidate,
            [
                replace(one, counts=Counter({**one.counts, "target_calls": calls}))
                for one in bild.texts
            ],
        )
        for calls in range(1, 6)
    ]
    counted: list[int] = []
    monkeypatch.setattr(
        screen,
        "time_methods",
        lambda methods, *others: counted.append(len(methods)) or time_methods(methods, *others),
    )
    for seconds in (1e-9, 1e4):
        replayed.screening.timed([alone, *points], seconds)
    assert counted == [1 + 2, *[1 + 5] * len(bild.texts)]


def test_a_text_counts_what_was_judged_and_the_forwards_of_its_target() -> None:
    """Of a tree the nodes beside the longest branch are not judged."""
    target = SimpleNamespace(checkpoint=SimpleNamespace(config=object()), depth=4)
    draft = SimpleNamespace(checkpoint=SimpleNamespace(config=object()))

    class Fixed:
        def decode(self, request: Request, trace: Trace) -> list[int]:
            tree = Round((1, 2, 3, 4), accepted=2, next_token=9, branch=2)
            trace.rounds += [tree, Round((1, 2), accepted=1, next_token=9)]
            trace.forwards += [Forward(one.checkpoint.config, 1) for one in (target, draft)]
            return [*request.source.prompt, 1, 2, 9, 1, 9]

    decoder = SimpleNamespace(method=Fixed(), target=target, models=[target, draft])
    text = replay_text("tree", decoder, Request(Source((0,)), Limits(1, 9)))
    counted = [text.counts[name] for name in ("tokens", "drafted", "accepted", "judged")]
    assert (text.token_ids, counted) == ((1, 2, 9, 1, 9), [5, 6, 3, 4])
    forwards = {name: count for name, count in text.features.items() if "forwards" in name}
    assert forwards == {"target forwards of one row": 1, "drafter 1 forwards": 1}


def test_a_text_that_differs_from_the_live_one_has_a_verdict_and_is_not_timed(
    replayed: Replayed,
) -> None:
    alone, speculative, _ = replayed.screened
    first, *others = speculative.texts
    wrong = replace(first, token_ids=first.token_ids[:-1])  # the planted fault
    screened = [alone, ReplayedPoint(speculative.candidate, [wrong, *others])]
    timed, differing = replayed.screening.timed(screened, 1e4)
    assert [one.verdict for one in differing] == [DEFECT]
    assert len(timed) == len(alone.texts) + len(others)
