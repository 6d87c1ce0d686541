"""N-gram tables against counting by hand, and what is drafted from them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.stats import chisquare

import bild_lab
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.lookup.ngram import (
    NGramDrafter,
    NGramTable,
    TokenCounts,
    load_table,
    read_table,
)
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling, pick
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.training.modules.ngrams import estimate
from tests.engine.methods.drafters.tables import ngram_table
from tests.stubs import SESSION, StubModel

WIDTH = 8
VOCABULARY = {f"w{token}": token for token in range(WIDTH)}
CORPUS = [[0, 5, 6, 5, 7, 1], [0, 5, 6, 1]]  # a start token, words, an end token
UNIFORM = StubModel(lambda _: torch.zeros(WIDTH))


def fits(token: int, what: str) -> None:
    """A model with an embedding for every token."""


def table(order: int = 2) -> NGramTable:
    return estimate(CORPUS, order, VOCABULARY, "two texts")


def pairs(counts: TokenCounts) -> list[tuple[int, int]]:
    return list(zip(counts.tokens.tolist(), counts.times.tolist(), strict=True))


def drafted(
    ngrams: NGramTable, tokens: list[int], window: int = 4, room: int = 20, end: int = -1
) -> list[int]:
    drafter = NGramDrafter(UNIFORM, ngrams, window)
    drafter = drafter.start(
        Request(Source(tuple(tokens)), Limits(len(tokens), room, frozenset([end]))), SESSION
    )
    draft = drafter.propose(tokens)
    assert draft.probs is None and draft.calls == 0
    return draft.token_list


def test_counts_are_those_of_counting_one_by_one() -> None:
    chance = random.Random(0)
    texts = [chance.choices(range(50), k=chance.randint(1, 40)) for _ in range(80)]
    ngrams = estimate(texts, 2, {str(token): token for token in range(60)}, "noise")
    single = Counter(token for text in texts for token in text[1:])
    double = Counter(pair for text in texts for pair in pairwise(text))
    assert dict(pairs(ngrams.unigrams)) == single
    assert {(one, other): n for one in range(50) for other, n in pairs(ngrams.after(one))} == double
    for token in range(50):
        after = Counter({other: n for (one, other), n in double.items() if one == token})
        assert ngrams.most_likely_after(token) == min(
            after, key=lambda other: (-after[other], other)
        )


# ends texts, is in none, is in no vocabulary
@pytest.mark.parametrize("unseen", [1, 3, WIDTH - 1 + 1, 4000])
def test_after_an_unseen_token_bigrams_are_unigrams(unseen: int) -> None:
    assert pairs(table().after(unseen)) == pairs(table().unigrams)
    assert table().most_likely_after(unseen) == 5


def test_a_table_of_order_1_is_that_of_order_2_without_its_bigrams() -> None:
    assert len(table(2).unigram().followers.tokens) == 0
    for ngrams in (table(1), table(2).unigram()):
        assert ngrams.order == 1
        assert pairs(ngrams.after(5)) == pairs(ngrams.unigrams) == pairs(table().unigrams)
        assert ngrams.most_likely_after(5) == 5


def test_greedy_drafts_follow_the_most_likely_tokens() -> None:
    assert drafted(table(), [2, 0]) == [5, 6, 1, 5]
    assert drafted(table(1), [2, 0]) == [5, 5, 5, 5]


def test_drafts_end_with_an_end_token_and_at_the_length_limit() -> None:
    assert drafted(table(), [0], end=1) == [5, 6, 1]
    assert drafted(table(), [0], room=2) == [5, 6]


def sampled(
    ngrams: NGramTable, sampling: Sampling, seed: int, window: int = 3
) -> bild_lab.engine.draft.Draft:
    request = Request(Source((5,)), Limits(1, 20), sampling, torch.Generator().manual_seed(seed))
    return NGramDrafter(UNIFORM, ngrams, window).start(request, SESSION).propose([5])


def test_each_drawn_token_has_the_number_that_picked_it() -> None:
    draft = sampled(table(), Sampling(1.0), 0)
    assert len(draft.uniforms) == len(draft) > 0
    assert pick(draft.probs, draft.uniforms).tolist() == draft.token_list


# counts without ties, whose order a nucleus would leave open
UNEVEN = [[5, 6]] * 6 + [[5, 7]] * 3 + [[5, 5]] + [[6, 5]] * 4 + [[7, 2]] * 2 + [[6, 3]] * 3


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.5), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.8)],
    ids=str,
)
@pytest.mark.parametrize("order", [1, 2])
def test_probs_are_the_tables_distribution_standardized_as_the_targets(
    sampling: Sampling, order: int
) -> None:
    ngrams = estimate(UNEVEN, order, VOCABULARY, "uneven")
    for seed in range(6):
        draft = sampled(ngrams, sampling, seed)
        assert draft.probs.shape == (3, WIDTH)
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(3))
        for before, row in zip([5, *draft.token_list], draft.probs, strict=False):
            counts = torch.zeros(WIDTH)
            after = [text for text in UNEVEN if order == 2 and text[0] == before] or UNEVEN
            for text in after:
                counts[text[1]] += 1
            torch.testing.assert_close(row, sampling.probs(counts.log()[None])[0])
        assert (draft.probs.gather(-1, draft.tokens[:, None]) > 0).all()


@pytest.mark.slow
def test_sampled_text_is_distributed_as_the_targets_whatever_the_table() -> None:
    chances = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.2, 0.3, 0.1, 0.3], dtype=torch.float64)
    target = StubModel(lambda _: chances.log())
    ngrams = estimate(UNEVEN, 2, VOCABULARY, "uneven")
    method, trace = (
        DraftThenVerify(target, NGramDrafter(target, ngrams, 1), SpeculativeSampling()),
        Trace(),
    )
    seen = torch.zeros(WIDTH)
    for seed in range(1500):  # a generator each, as every example has
        request = Request(
            Source((5,)), Limits(1, 1), Sampling(1.0), torch.Generator().manual_seed(seed)
        )
        seen[method.decode(request, trace)[-1]] += 1
    likely = chances > 0
    assert 300 < trace.accepted < 1200
    assert seen[~likely].sum() == 0
    assert chisquare(seen[likely].numpy(), 1500 * chances[likely].numpy()).pvalue > 0.001


@pytest.mark.parametrize("order", [1, 2])
def test_a_saved_table_reads_as_it_was(order: int, tmp_path: Path) -> None:
    table(order).save(tmp_path / "new" / "table.safetensors")
    found = read_table(tmp_path / "new" / "table.safetensors")
    for key, value in vars(table(order)).items():
        if isinstance(value, TokenCounts):
            assert pairs(getattr(found, key)) == pairs(value)
        else:
            assert (
                torch.equal(found.starts, value)
                if key == "starts"
                else getattr(found, key) == value
            )
    with safe_open(tmp_path / "new" / "table.safetensors", framework="pt") as file:
        assert file.metadata()["tokens"] == "8"  # for a reader of the file


def test_tables_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    target = SimpleNamespace(
        checkpoint=SimpleNamespace(path="here", vocabulary=VOCABULARY, require_row=fits)
    )
    other = SimpleNamespace(
        checkpoint=SimpleNamespace(path="there", vocabulary={**VOCABULARY, "w8": 8})
    )
    path = tmp_path / "table.safetensors"
    with pytest.raises(
        UserError,
        match=r"policy.table must be .*, got null; make one with: python scripts/train_mod",
    ):
        load_table(target, None, 2)
    with pytest.raises(UserError, match=r"no n-gram table .*table.safetensors; make one with"):
        load_table(target, str(path), 2)
    table(1).save(path)
    assert load_table(target, str(path), 1).order == 1
    with pytest.raises(UserError, match="holds unigrams, but bigrams are wanted"):
        load_table(target, str(path), 2)
    with pytest.raises(
        UserError, match=r"\(two texts\) has another vocabulary than there \(9 pieces\)"
    ):
        load_table(other, str(path), 1)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="is not an n-gram table of this version"):
        load_table(target, str(path), 1)
    path.write_bytes(b"text")
    with pytest.raises(UserError, match="cannot read the n-gram table"):
        load_table(target, str(path), 1)


def test_a_table_of_order_2_serves_as_unigrams_too(tmp_path: Path) -> None:
    target = SimpleNamespace(
        checkpoint=SimpleNamespace(path="here", vocabulary=VOCABULARY, require_row=fits)
    )
    table().save(tmp_path / "table.safetensors")
    assert load_table(target, str(tmp_path / "table.safetensors"), 1).most_likely_after(6) == 5
    assert load_table(target, str(tmp_path / "table.safetensors"), 2).most_likely_after(6) == 1


def test_a_table_of_another_vocabulary_fails_before_any_weight_is_read(checkpoints: Path) -> None:
    path = ngram_table(checkpoints / "llama")
    with pytest.raises(UserError, match="has another vocabulary than .*llama-words"):
        bild_lab.load(
            str(checkpoints / "llama-words"), policy="ngram", table=str(path), dtype="float16"
        )
    fresh = bild_lab.load(str(checkpoints / "llama-words"), policy="vanilla", dtype="float16")
    assert "module" not in vars(fresh.target)
