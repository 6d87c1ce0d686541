"""The suffix automaton against counting every substring, and the suffix drafter against a search
from scratch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Verdict
from bild_lab.engine.methods.lookup.suffix import SuffixDrafter, corpus_files, give_back
from bild_lab.engine.methods.lookup.suffix_automaton import EMPTY, SuffixAutomaton
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Scores
from bild_lab.engine.trace import Trace
from tests.policies import load
from tests.stubs import SESSION, StubModel

TARGET = StubModel(lambda _: torch.zeros(10))
END = 9


def ends_of(piece: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Where a substring ends in a sequence."""
    size = len(piece)
    return [
        end for end in range(size, len(whole) + 1) if list(whole[end - size : end]) == list(piece)
    ]


def state_of(automaton: SuffixAutomaton, piece: Sequence[int]) -> int | None:
    state: int | None = EMPTY
    for token in piece:
        state = None if state is None else automaton.follow[state].get(token)
    return state


def test_the_automaton_counts_every_substring_while_the_sequence_grows_and_shrinks() -> None:
    chance = random.Random(0)
    for letters in (1, 2, 3, 3):
        automaton, sequence = SuffixAutomaton(), []
        for _ in range(30):
            if chance.random() < 0.4:
                sequence = sequence[: chance.randint(0, len(sequence))]
                automaton.cut(len(sequence))
            new = chance.choices(range(letters), k=chance.randint(1, 5))
            sequence = [*sequence, *new]
            automaton.extend(new)
            assert len(automaton) == len(sequence)
        for first in range(len(sequence)):
            for last in range(first + 1, min(len(sequence), first + 6) + 1):
                piece = sequence[first:last]
                ends, state = ends_of(piece, sequence), state_of(automaton, piece)
                assert (automaton.counts[state], automaton.latest[state]) == (len(ends), ends[-1])
                assert automaton.lengths[state] >= len(piece)
                assert len(ends_of(sequence[-automaton.lengths[state] :], sequence)) >= 1
        assert state_of(automaton, [letters]) is None
        fresh = SuffixAutomaton()
        fresh.extend(sequence)
        assert (
            automaton.counts[automaton.links[automaton.whole]]
            == fresh.counts[fresh.links[fresh.whole]]
        )


def searched(texts: list[list[int]], window: int, factor: float, min_prob: float) -> list[int]:
    """The draft by counting, with no automaton. texts: what may be copied, the text itself last."""
    tokens = texts[-1]
    drafted: list[int] = []

    def ways(match: list[int]) -> dict[int, tuple[int, int]]:
        """What followed this, how often, and where last."""
        found: dict[int, tuple[int, int]] = {}
        place = 0
        for text in texts:
            for end in ends_of(match, text):
                if end < len(text):
                    found[text[end]] = (found.get(text[end], (0, 0))[0] + 1, place + end)
            place += len(text) + 1
        return found

    def seen_elsewhere(match: list[int]) -> bool:
        return sum(len(ends_of(match, text)) for text in texts) > 1

    size = next(
        (size for size in range(len(tokens) - 1, 0, -1) if seen_elsewhere(tokens[-size:])), 0
    )
    match, chance = tokens[-size:] if size else [], 1.0
    most = min(window, int(factor * size))
    while len(drafted) < most:
        while match and not ways(match):
            match = match[1:]
        if not match:
            break
        found = ways(match)
        token = max(found, key=found.__getitem__)
        chance *= found[token][0] / sum(count for count, _ in found.values())
        if chance < min_prob:
            break
        drafted.append(token)
        match = [*match, token]
        if token == END:
            break
    return drafted


def suffix(
    prompt: list[int], encoder: list[int] | None = None, room: int = 20, **options: float
) -> SuffixDrafter:
    drafter = SuffixDrafter(TARGET, **{"window": 6, "factor": 2, "min_prob": 0.0, **options})
    drafter = drafter.start(request_of(prompt, encoder, room), SESSION)
    return drafter


def request_of(prompt: list[int], encoder: list[int] | None = None, room: int = 20) -> Request:
    ids = None if encoder is None else torch.tensor([encoder])
    return Request(Source(tuple(prompt), ids), Limits(len(prompt), room, frozenset([END])))


@pytest.mark.parametrize("encoder_decoder", [False, True])
def test_the_draft_is_what_a_search_from_scratch_finds(encoder_decoder: bool) -> None:
    chance = random.Random(int(encoder_decoder))
    found = 0
    for _ in range(60):
        letters = range(1, chance.choice([3, 5, 9]))
        encoder = (
            [*chance.choices(letters, k=chance.randint(1, 15)), END] if encoder_decoder else None
        )
        prompt = [0] if encoder_decoder else [0, *chance.choices(letters, k=chance.randint(1, 15))]
        options = {
            "window": chance.randint(1, 6),
            "factor": chance.choice([0.5, 1, 2.5]),
            "min_prob": chance.choice([0, 0.3, 0.6]),
        }
        tokens, drafter = prompt, suffix(prompt, encoder, room=1000, **options)
        for _ in range(10):
            draft = drafter.propose(tokens)
            texts = [*([encoder] if encoder else []), tokens]
            assert draft.token_list == searched(texts, **options), (texts, options)
            assert draft.probs is None and draft.calls == 0
            found += len(draft) > 0
            if chance.random() < 0.2:  # a drafter that asks this one had its text rejected
                tokens = [
                    *tokens[: chance.randint(len(prompt), len(tokens))],
                    chance.choice(letters),
                ]
            else:
                tokens = [*tokens, *chance.choices(letters, k=chance.randint(1, 4))]
    assert found > 250


def test_nothing_is_copied_from_a_source_in_another_vocabulary() -> None:
    for one_vocabulary, drafted in ((True, [6, 7]), (False, [])):
        request = request_of([0], [5, 6, 7])
        source = replace(request.source, one_vocabulary=one_vocabulary)
        drafter = SuffixDrafter(TARGET, window=6, factor=2, min_prob=0.0)
        drafter = drafter.start(replace(request, source=source), SESSION)
        assert drafter.propose([0, 5]).token_list == drafted


def test_the_first_word_of_a_vocabulary_is_drafted_like_any_other() -> None:
    assert suffix([3, 0, 5, 3], factor=1).propose([3, 0, 5, 3]).token_list == [0]


def test_drafts_end_with_an_end_token_and_at_the_length_limit() -> None:
    tokens = [1, 2, END, 3, 1]
    assert suffix(tokens, factor=9).propose(tokens).token_list == [2, END]
    assert suffix([1, 2, 3, 4, 1], room=2, factor=9).propose([1, 2, 3, 4, 1]).token_list == [2, 3]
    twice = [1, 2, 3, 4, 1, 2]  # fault: infinity has no whole number
    assert suffix(twice, room=2, factor=1e308).propose(twice).token_list == [3, 4]


def after(tokens: list[int]) -> torch.Tensor:
    table = torch.randn(10, 10, generator=torch.Generator().manual_seed(1)).double()
    return table[(tokens[-1] + 3 * (len(tokens) % 3)) % 10]


def counts(method: DraftThenVerify, prompts: Sequence[int]) -> list[int]:
    """The calls of the target for the texts behind these prompts."""
    found = []
    for prompt in prompts:
        trace = Trace()
        method.decode(Request(Source((prompt,)), Limits(1, 30)), trace)
        found.append(trace.target_calls)
    return found


def test_answers_are_kept_if_asked_for_and_a_prompt_that_comes_again_finds_what_it_first_found() -> (
    None
):
    target = StubModel(after)

    def method(keep: bool) -> DraftThenVerify:
        return DraftThenVerify(
            target, SuffixDrafter(target, 8, 4, 0.0, keep=keep), SpeculativeSampling()
        )

    alone, kept = counts(method(False), [1, 2, 3]), method(True)
    first = counts(kept, [1, 2, 3])
    assert first[0] == alone[0]
    assert sum(first) < sum(alone)
    assert counts(kept, [1, 2, 3, 2, 2, 1]) == [*first, first[1], first[1], first[0]]


def test_an_answer_counts_once_and_the_first_answer_to_a_prompt_stays_but_goes_on() -> None:
    drafter = suffix([8], keep=True)

    def begun(prompt: int) -> SuffixDrafter:
        drafter.prepare(request_of([prompt]))
        return drafter.start(request_of([prompt]), SESSION)

    def copied(prompt: int) -> list[int]:
        return begun(prompt).propose([prompt, 1]).token_list[:1]

    def answered(prompt: int, *answer: int) -> None:
        text = begun(prompt)
        text.observe(text.propose([prompt, *answer[:-1]]), Scores(None), Verdict((), answer[-1]))

    answered(8, 1, 2)
    answered(7, 1, 3)
    assert copied(6) == [3]  # as frequent as 2, and later
    for other in ((1,), (1, 2), (1, 4, 1, 4)):
        answered(8, *other)
        assert copied(6) == [3]
    left_open = begun(6)
    answered(8, 1, 2, 1, 2)
    assert copied(6) == [2]
    del left_open  # what it had learned is the next text's to use
    assert copied(6) == [2]


def test_a_corpus_is_copied_from(checkpoints: Path, tmp_path: Path) -> None:
    plain = load(checkpoints, "llama", "suffix").generate("w5 w9", max_new_tokens=20)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.txt").write_text(f"w5 w9 {plain.text}")
    copied = load(checkpoints, "llama", "suffix", corpus=str(tmp_path)).generate(
        "w5 w9", max_new_tokens=20
    )
    assert copied.token_ids == plain.token_ids
    assert copied.trace.target_calls < plain.trace.target_calls
    file = tmp_path / "inner" / "one.txt"
    assert corpus_files(str(tmp_path)) == corpus_files(str(file)) == [file]


def test_an_automaton_serves_the_next_text_unless_a_change_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    idle: list[SuffixAutomaton] = []
    for step in ("_state", "_forget"):  # of an appended token, and of one that is taken back
        automaton = SuffixAutomaton()
        automaton.extend([5, 9, 5])
        give_back(idle, automaton)
        assert idle.pop() is automaton
        automaton.cut(1)
        give_back(idle, automaton)
        assert idle.pop() is automaton
        monkeypatch.setattr(SuffixAutomaton, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            automaton.cut(0) if step == "_forget" else automaton.extend([7])
        monkeypatch.undo()
        give_back(idle, automaton)
        assert idle == []
