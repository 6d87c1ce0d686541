"""FLy: the gate, the window, and the distribution of what is emitted, over every pattern of matches."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import Fly
from bild_lab.engine.acceptance.fly import entropy_of_most_likely
from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from tests.engine.acceptance.exact import DRAFTER, GREEDY, TARGET, Dice, Distribution, chain_of, rows_after, sampled

SURE, UNSURE = [0.94, 0.02, 0.02, 0.02], [0.4, 0.3, 0.2, 0.1]  # both choose 0


def greedy(flags: str, tokens: list[int], rule: Fly, parents: list[int] | None = None) -> Verdict:
    """A draft judged by rows that are sure (s) or unsure (u) of token 0; the last one is after the draft."""
    probs = torch.tensor([SURE if flag == "s" else UNSURE for flag in flags], dtype=torch.float64)
    shape = None if parents is None else torch.tensor(parents)
    return rule(Draft(torch.tensor(tokens), shape), probs.log(), GREEDY)


@pytest.mark.parametrize("row", [SURE, UNSURE, [1.0, 0.0, 0.0, 0.0], [0.7, 0.3]])
def test_the_entropy_is_that_of_the_three_most_likely(row: list[float]) -> None:
    expected = -sum(p * math.log(p) for p in sorted(row)[-3:] if p > 0)
    assert float(entropy_of_most_likely(torch.tensor([row], dtype=torch.float64))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "tokens", "path"),
    [
        ("suss s", [0, 1, 0, 0], (0, 1, 2, 3)),  # a mismatch at an unsure position, and two matches after it
        ("ssss s", [0, 1, 0, 0], (0,)),  # the target was sure
        ("suss s", [0, 1, 0, 1], (0,)),  # it corrects itself inside the window
        ("suss s", [0, 1, 1, 0], (0,)),
        ("sus s", [0, 1, 0], (0,)),  # too little is drafted after it
        ("uss s", [1, 0, 0], (0, 1, 2)),
        ("ussuss s", [1, 0, 0, 2, 0, 0], (0, 1, 2, 3, 4, 5)),  # twice
        ("ususs s", [1, 0, 1, 0, 0], ()),  # the first one is rejected, so the second does not matter
        ("usss s", [1, 0, 0, 1], (0, 1, 2)),  # after the window the next mismatch is judged for itself
    ],
)
def test_a_mismatch_is_accepted_after_an_open_gate_before_a_window_of_matches(
    flags: str, tokens: list[int], path: tuple[int, ...]
) -> None:
    verdict = greedy(flags.replace(" ", ""), tokens, Fly(0.5, 2))
    assert (verdict.path, verdict.next_token) == (path, 0)
    assert [place for place, one in enumerate(verdict.stats["forgiven"]) if one] == [
        place for place in path if tokens[place]
    ]


def test_at_the_threshold_the_gate_is_open() -> None:
    at = float(entropy_of_most_likely(torch.tensor([UNSURE], dtype=torch.float64).log().softmax(-1)))
    assert greedy("uss", [1, 0], Fly(at, 1)).path == (0, 1)
    assert greedy("uss", [1, 0], Fly(math.nextafter(at, 9), 1)).path == ()


def test_in_a_tree_the_matches_are_those_below() -> None:
    #  root -> 0 (mismatch), 1 (mismatch); 0 -> 2 (match); 1 -> 3 (match) -> 4 (match)
    parents = [ROOT, ROOT, 0, 1, 3]
    verdict = greedy("u" + "s" * 5, [1, 2, 0, 0, 0], Fly(0.5, 2), parents)
    assert (verdict.path, verdict.next_token) == ((1, 3, 4), 0)
    assert greedy("u" + "s" * 5, [1, 2, 0, 0, 0], Fly(0.5, 1), parents).path == (0, 2)  # token 1 is the likelier
    assert greedy("u" + "s" * 5, [1, 0, 0, 0, 0], Fly(0.5, 1), parents).path == (1, 3, 4)  # the target's choice first


def output_of(rule: Fly, draft: Draft, logits: Tensor, request: Request) -> Distribution:
    """What the rule emits: every pattern of tokens that speculative sampling keeps, dictated to it."""
    output: Distribution = defaultdict(float)
    p = logits.softmax(-1)
    chances = [min(1.0, float(p[i, t] / draft.probs[i, t])) for i, t in enumerate(draft.token_list)]
    for pattern in product((True, False), repeat=len(draft)):
        chance = math.prod(c if kept else 1 - c for c, kept in zip(chances, pattern, strict=True))
        if chance <= 0:
            continue
        dice = Dice(torch.tensor([0.0 if kept else 1.0 - 1e-12 for kept in pattern], dtype=torch.float64))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", dice.rand)
            patch.setattr(torch, "multinomial", dice.multinomial)
            verdict = rule(draft, logits, request)
        for token, share in enumerate(dice.drawn_from[len(verdict.path)].tolist()):
            output[(*(draft.token_list[node] for node in verdict.path), token)] += chance * share
    return output


def expected_output(draft: Draft, logits: Tensor, entropy: float, window: int) -> Distribution:
    """The paper's words with no tensor: walk the draft, and look ahead at every mismatch."""
    output: Distribution = defaultdict(float)
    p, q, tokens = logits.softmax(-1).tolist(), draft.probs.tolist(), draft.token_list
    n = len(tokens)
    chances = [min(1.0, p[i][tokens[i]] / q[i][tokens[i]]) for i in range(n)]
    unsure = [-sum(x * math.log(x) for x in sorted(row)[-3:]) >= entropy for row in p]

    def walk(place: int, known: int, reached: float) -> None:
        """known: how many tokens from here on are known to match."""
        if reached == 0:
            return
        if place == n:
            stop(place, p[n], reached)
        elif known:
            walk(place + 1, known - 1, reached)
        else:
            walk(place + 1, 0, reached * chances[place])
            fails = reached * (1 - chances[place])
            ahead = math.prod(chances[place + 1 : place + 1 + window])
            forgiven = ahead if unsure[place] and place + window < n else 0.0
            walk(place + 1, window, fails * forgiven)
            rest = [max(0.0, a - b) for a, b in zip(p[place], q[place], strict=True)]
            if sum(rest) > 0:
                stop(place, [share / sum(rest) for share in rest], fails * (1 - forgiven))

    def stop(place: int, row: list[float], reached: float) -> None:
        for token, share in enumerate(row):
            output[(*tokens[:place], token)] += reached * share

    walk(0, 0, 1.0)
    return output


@pytest.mark.parametrize(("entropy", "window"), [(0.0, 1), (0.85, 1), (0.0, 2), (2.0, 1)])
def test_what_is_emitted_has_exactly_the_distribution_of_the_rule(entropy: float, window: int) -> None:
    rule, forgave = Fly(entropy, window), False
    for draft, _ in chain_of(DRAFTER, 3):
        logits = rows_after(draft, TARGET)
        output, expected = output_of(rule, draft, logits, sampled()), expected_output(draft, logits, entropy, window)
        texts = {text for one in (output, expected) for text, chance in one.items() if chance > 1e-9}
        assert {t: output[t] for t in texts} == pytest.approx({t: expected[t] for t in texts}, abs=1e-9)
        plain = expected_output(draft, logits, 9.0, window)
        forgave |= any(abs(plain[t] - expected[t]) > 1e-3 for t in texts)
    assert forgave == (entropy < 2.0)


def test_a_token_that_cannot_be_drawn_is_not_forgiven() -> None:
    """Top-2 sampling gives token 2 no probability."""
    logits = torch.tensor([[0.4, 0.35, 0.25], [0.9, 0.05, 0.05], [0.9, 0.05, 0.05]], dtype=torch.float64).log()
    request = Request(Source((0,)), Limits(1, 9), Sampling(temperature=1.0, top_k=2), torch.Generator().manual_seed(0))
    q = torch.tensor([[0.1, 0.1, 0.8], [0.9, 0.05, 0.05]], dtype=torch.float64)
    for _ in range(20):
        assert Fly(0.1, 1)(Draft(torch.tensor([2, 0]), probs=q), logits, request).path == ()
