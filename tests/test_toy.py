"""The toy pair and its corpus, as they are shipped."""

from __future__ import annotations

from functools import lru_cache

import pytest

from bild_lab import load
from bild_lab.errors import UserError
from bild_lab.files import TOY, shipped_folder
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.metrics.quality import score
from tests.lab.data.test_examples import from_config


@lru_cache
def corpus(split: str) -> tuple[Example, ...]:
    return load_examples(from_config("toy", split=split))


def bleu(texts: list[str]) -> float:
    return score("bleu", texts, [one.references for one in corpus("test")[: len(texts)]]).value


def decoded(target: str, draft: str | None, policy: str, **knobs: float) -> tuple[list[str], float]:
    """The texts of 40 test sentences, and how many tokens a forward of the target gave."""
    decoder = load(target, draft, policy, **knobs)
    found = decoder.generate([one.prompt for one in corpus("test")[:40]])
    calls = sum(one.trace.target_calls for one in found)
    return [one.text for one in found], sum(len(one.token_ids) for one in found) / calls


def test_what_is_shipped_is_small() -> None:
    assert (
        sum(file.stat().st_size for part in ("large", "small") for file in (TOY / part).iterdir())
        < 4e6
    )
    assert sum(file.stat().st_size for file in (TOY / "corpus").iterdir()) < 1.2e6


def test_no_sentence_is_in_two_splits() -> None:
    sources = [one.source for split in ("train", "validation", "test") for one in corpus(split)]
    assert len(sources) == len(set(sources)) == 6600


@pytest.mark.parametrize("path", ["toy:", "toy:medium", "toy:large/config.json"])
def test_another_name_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="toy:large"):
        shipped_folder(path)


def missing_trade_offs(target: str, draft: str) -> set[str]:
    """Which of the things that the quickstart shows a pair does not show."""
    (alone, _), (drafter, _) = decoded(target, None, "vanilla"), decoded(draft, None, "vanilla")
    same, lossless_pace = decoded(target, draft, "speculative")
    strict, _ = decoded(target, draft, "bild", fallback=0.9, rollback=0.5)
    loose, loose_pace = decoded(target, draft, "bild", fallback=0.2, rollback=12.0)
    shown = {
        "a target that is good, not perfect": 60 < bleu(alone) < 95,
        "a worse drafter": bleu(drafter) < bleu(alone) - 5,
        "lossless drafting": same == alone and lossless_pace > 2,
        "quality lost by loose thresholds": bleu(strict) > bleu(loose) + 5,
        "calls saved by loose thresholds": loose_pace > lossless_pace,
    }
    return {what for what, holds in shown.items() if not holds}


@pytest.mark.slow
def test_the_pair_shows_what_each_method_trades() -> None:
    assert missing_trade_offs("toy:large", "toy:small") == set()


@pytest.mark.slow
def test_a_wrong_pair_is_noticed() -> None:
    assert missing_trade_offs("toy:large", "toy:large") == {
        "a worse drafter",
        "quality lost by loose thresholds",
    }
