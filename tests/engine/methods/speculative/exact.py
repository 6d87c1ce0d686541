"""What a rule emits, exactly: its chances are read off it, and every draft is enumerated."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling

HALVINGS = 24  # an acceptance probability is found to within 6e-8
NEARLY_ONE = 1 - 2**-50
Distribution = dict[tuple[int, ...], float]  # the probability of each emitted text
Proposals = Iterator[tuple[Draft, float]]  # every draft and its probability
# q of a token, after another and its siblings so far
Sibling = Callable[[int, tuple[int, ...]], Tensor]


GREEDY = Request(Source((0,)), Limits(1, 10))


def sampled(temperature: float = 1.0) -> Request:
    return Request(
        Source((0,)),
        Limits(1, 99),
        Sampling(temperature=temperature),
        torch.Generator().manual_seed(0),
    )


def rows(*probs: Sequence[float]) -> Tensor:
    """Logits that give these probabilities."""
    return torch.tensor(probs, dtype=torch.float64).log()


def table(seed: int, vocabulary: int = 3) -> Tensor:
    """A next-token distribution for each last token."""
    logits = torch.randn(
        vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed)
    ).double()
    return (1.5 * logits).softmax(-1)


TARGET, DRAFTER = table(1), table(11)  # half of what one may say the other does not


@dataclass
class Dice:
    """Stands in for torch's chance: uniforms are dictated, in order, and what is drawn from last is
    noted.
    """

    uniform: Tensor
    drawn_from: Tensor = torch.empty(0)

    def rand(self, count: int, **_: object) -> Tensor:
        given, self.uniform = self.uniform[:count], self.uniform[count:]
        return given

    def multinomial(self, probs: Tensor, *_: object, **__: object) -> Tensor:
        self.drawn_from = probs
        return torch.zeros(probs.shape[0], 1, dtype=torch.long)


def outcomes(rule: Acceptance, draft: Draft, logits: Tensor, request: Request) -> Distribution:
    """The probability of everything the rule may emit for this draft.

    A token's probability of acceptance is the largest uniform at which it is still accepted, where
    the uniforms above it are 0, so that they are accepted, and those of earlier siblings 1.
    """
    output: Distribution = defaultdict(float)

    def verdict(uniform: Tensor) -> tuple[Verdict, Tensor]:
        dice = Dice(uniform)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", dice.rand)
            patch.setattr(torch, "multinomial", dice.multinomial)
            return rule(draft, logits, request), dice.drawn_from

    def accepts(above: list[int], node: int, value: float) -> bool:
        uniform = torch.ones(len(draft), dtype=torch.float64)
        uniform[above] = 0.0
        uniform[node] = value
        return node in verdict(uniform)[0].path

    def probability(above: list[int], node: int) -> float:
        if accepts(above, node, NEARLY_ONE):
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if accepts(above, node, middle) else (low, middle)
        return low

    def walk(above: list[int], node: int, reached: float) -> None:
        children = [child for child, parent in enumerate(draft.parent_list) if parent == node]
        for child in children:
            passes = probability(above, child)
            if reached * passes > 0:
                walk([*above, child], child, reached * passes)
            reached *= 1 - passes
        if reached > 1e-12:
            uniform = torch.ones(len(draft), dtype=torch.float64)
            uniform[above] = 0.0
            settled, drawn_from = verdict(uniform)
            assert list(settled.path) == above
            # of the draft's last rows
            rest = drawn_from[0 if drawn_from.shape[0] == 1 else node - len(draft)]
            for token, chance in enumerate(rest.tolist()):
                output[(*(draft.token_list[each] for each in above), token)] += reached * chance

    walk([], ROOT, 1.0)
    return output


def drafts(parents: list[int], q: Sibling, vocabulary: int, chain: bool) -> Proposals:
    """Every draft of this shape, each token drawn from its q, and its probability; token 0 is the
    last committed.
    """
    for tokens in itertools.product(range(vocabulary), repeat=len(parents)):
        rows = []
        for node, parent in enumerate(parents):
            siblings = tuple(tokens[other] for other in range(node) if parents[other] == parent)
            rows.append(q(0 if parent == ROOT else tokens[parent], siblings))
        probs = torch.stack(rows)
        chance = float(probs[torch.arange(len(tokens)), torch.tensor(tokens)].prod())
        if chance > 0:
            draft = Draft(torch.tensor(tokens), torch.tensor(parents), probs)
            yield replace(draft, parents=None) if chain else draft, chance


def chain_of(q: Tensor, length: int, vocabulary: int = 3) -> Proposals:
    return drafts(list(range(-1, length - 1)), lambda last, _: q[last], vocabulary, chain=True)


def rows_after(draft: Draft, table: Tensor) -> Tensor:
    """The logits after token 0 and after every drafted token, by a table of p given the last
    token.
    """
    return torch.cat([table[:1], table[draft.tokens]]).log()


def emitted(
    rule: Acceptance, proposals: Proposals, table: Tensor, request: Request
) -> Distribution:
    """The distribution of what one round emits."""
    output: Distribution = defaultdict(float)
    for draft, chance in proposals:
        for text, probability in outcomes(rule, draft, rows_after(draft, table), request).items():
            output[text] += chance * probability
    return output


def continued(output: Distribution, table: Tensor, length: int) -> Tensor:
    """The distribution of the first `length` tokens where the target's own follow: one axis a
    token.
    """
    vocabulary = table.shape[0]
    joint = torch.zeros([vocabulary] * length, dtype=torch.float64)
    for text, chance in output.items():
        missing = max(length - len(text), 0)
        for rest in itertools.product(range(vocabulary), repeat=missing):
            whole = (*text, *rest)[:length]
            joint[whole] += chance * likelihood(whole, table, len(text))
    return joint


def likelihood(text: tuple[int, ...], table: Tensor, start: int = 0) -> float:
    """The target's probability of a text after token 0, from position `start` on."""
    before = (0, *text)
    return math.prod(float(table[before[i], text[i]]) for i in range(start, len(text)))


def targets(table: Tensor, length: int) -> Tensor:
    """The distribution of the target's own first tokens."""
    return continued({(): 1.0}, table, length)
