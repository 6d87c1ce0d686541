"""Controls that must fail: a certificate finds each planted fault, on chains and trees, and clears
sound decoders.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import product

import pytest

from bild_lab.engine.request import Limits, Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.lab.measure.certificate import DEFECT, EQUAL, EXACT, SESSION_DEFECT, TIE, Certificate
from bild_lab.lab.measure.greedy_certificate import certify
from bild_lab.lab.measure.sampled_certificate import DRAWS, LOGITS, OUTPUT, certify_sampled
from tests.engine.loops import NEVER
from tests.engine.lossless.random_models import random_source, random_target
from tests.lab.measure.controls import TARGET_FAULTS, decoder, emitted
from tests.policies import FAMILIES, in_memory
from tests.tiny import relative_of

LENGTH = 8  # of sampled texts
TEXTS, GREEDY_LENGTH = 4, 16  # a fault may leave a short text as it is
SHAPES = ("chains", "trees")
CONTROLS = (*TARGET_FAULTS, "misdeclared draft")
FURTHER = ("undrawn draft", "no residual")
CAUGHT_BY = {
    **dict.fromkeys(TARGET_FAULTS, LOGITS),
    "misdeclared draft": DRAWS,
    "undrawn draft": DRAWS,
    "no residual": OUTPUT,
}


@cache
def models(family: str) -> tuple[LoadedModel, LoadedModel]:
    target = random_target(family, 0)
    return in_memory(target, "native"), in_memory(relative_of(target, 100, 0.2).double(), "native")


def requests(family: str, temperature: float, texts: int, length: int) -> list[Request]:
    chance = random.Random(7)
    sources = [random_source(family, chance) for _ in range(texts)]
    limits = [Limits(len(source.prompt), length, NEVER) for source in sources]
    return [Request(*pair, Sampling(temperature)) for pair in zip(sources, limits, strict=True)]


def sampled(family: str, shape: str, fault: str | None, texts: int = 1) -> Certificate:
    """The verdict on the first of so many texts that is no exact one, or else on the last."""
    target, draft = models(family)
    for request in requests(family, 0.8, texts, LENGTH):
        method = decoder(target, draft, shape == "trees", fault)
        tokens = emitted(method, request.seeded(1, 0))
        found = certify_sampled(method, method.target, request.seeded(1, 0), tokens)
        if found.verdict != EXACT:
            break
    return found


def greedy(family: str, shape: str, fault: str | None) -> list[Certificate]:
    target, draft = models(family)
    method, vanilla = (
        decoder(target, draft, shape == "trees", each, greedy=True) for each in (fault, None)
    )
    texts = [
        (request, emitted(method, request), emitted(vanilla, request))
        for request in requests(family, 0.0, TEXTS, GREEDY_LENGTH)
    ]
    return [certify(method.target, request, tokens, own, method) for request, tokens, own in texts]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_decoder_has_the_targets_distribution_in_every_context(
    family: str, shape: str
) -> None:
    # each text, as a verdict that is not exact ends the search
    found = sampled(family, shape, None, TEXTS)
    assert (found.verdict, found.check, found.contexts) == (EXACT, None, LENGTH)
    assert found.output < 1e-12
    assert max(found.rounding) > 1
    assert max(found.rounding.values()) < 1e-12


def judged(fault: str, family: str, shape: str) -> None:
    found = sampled(family, shape, fault, TEXTS)
    wanted = SESSION_DEFECT if CAUGHT_BY[fault] == LOGITS else DEFECT
    assert (found.verdict, found.check) == (wanted, CAUGHT_BY[fault])
    assert 0 <= found.position < LENGTH


@pytest.mark.parametrize(("family", "shape"), list(product(FAMILIES, SHAPES)))
@pytest.mark.parametrize("fault", CONTROLS)
def test_each_control_is_caught_and_by_this_check(fault: str, family: str, shape: str) -> None:
    judged(fault, family, shape)


@pytest.mark.fast("undrawn draft-t5-chains", "no residual-t5-trees")
@pytest.mark.parametrize(("fault", "family", "shape"), [*product(FURTHER, FAMILIES, SHAPES)])
def test_further_faults_are_caught_too(fault: str, family: str, shape: str) -> None:
    judged(fault, family, shape)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape"), list(product(FAMILIES, SHAPES)))
def test_a_misdeclared_draft_is_seen_in_its_law_too(family: str, shape: str) -> None:
    """The drafter's model says what its tokens are drawn from."""
    assert sampled(family, shape, "misdeclared draft").output > 1e-3
    assert sampled(family, shape, "undrawn draft").output < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape"), list(product(FAMILIES, SHAPES)))
@pytest.mark.parametrize("fault", [None, *TARGET_FAULTS])
def test_faults_of_the_target_are_caught_in_greedy_texts(
    fault: str | None, family: str, shape: str
) -> None:
    verdicts = {found.verdict for found in greedy(family, shape, fault)}
    if fault is None:
        assert verdicts == {EQUAL}
    else:
        assert SESSION_DEFECT in verdicts
        assert TIE not in verdicts
