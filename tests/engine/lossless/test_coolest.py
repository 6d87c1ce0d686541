"""At the smallest temperature, or where one token alone is kept, sampled texts are the greedy
ones.
"""

from __future__ import annotations

import pytest

from bild_lab.engine.sampling import COOLEST, HOTTEST, Sampling
from tests.checkpoints import tiny_checkpoints
from tests.policies import GREEDY_ONLY, RUNNABLE, is_peer, load

CASES = [
    (policy, family, engine)
    for policy, family in RUNNABLE
    if policy not in GREEDY_ONLY
    for engine in (("hf",) if is_peer(policy) else ("auto", "native", "hf"))
]
SURE = [
    {"temperature": COOLEST},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-46},
    {"temperature": 1.0, "top_p": 5e-324, "top_k": 10**9},
]


@pytest.mark.fast("prompt_lookup-t5-auto", "suffix-t5-auto")
@pytest.mark.parametrize(("policy", "family", "engine"), CASES)
def test_texts_without_a_choice_are_the_greedy_ones(policy: str, family: str, engine: str) -> None:
    decoder = load(tiny_checkpoints(), family, policy, engine=engine)
    greedy = load(tiny_checkpoints(), family, "vanilla", engine=engine)
    for prompt in ("w5 w9 w30", "w7"):
        expected = greedy.generate(prompt, 12).token_ids
        for sampling in SURE:
            text = decoder.generate(prompt, 12, **sampling).token_ids
            assert text == expected or not decoder.method.lossless(
                Sampling(sampling["temperature"])
            ), sampling
        assert decoder.generate(prompt, 12, temperature=HOTTEST, top_k=10**9).token_ids
