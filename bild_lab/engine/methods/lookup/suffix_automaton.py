"""A suffix automaton: all that occurs in a sequence of tokens, which grows and shrinks at its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EMPTY = 0  # the state of the empty sequence
NOWHERE = -1  # what the state of the empty sequence links to


@dataclass(frozen=True)
class _Step:
    """What appending a token changed, so that it can be taken back.

    previous_whole: the state of the whole sequence until then.
    split: the state that was split in two, or NOWHERE.
    moved: the states whose transition went to the new half.
    latest: of each state that ends here, where it had ended before.
    """

    token: int
    previous_whole: int
    split: int
    moved: tuple[int, ...]
    latest: tuple[int, ...]


class SuffixAutomaton:
    """All that occurs in a sequence: each state is of the substrings that end at the same places.

    Appending a token, and taking it back, takes a few steps for each of the sequence's suffixes
    that occurred before with other tokens in front.

    follow: [state], the next state by token.
    links: [state], the state of its longest suffix that ends at more places.
    lengths: [state], of its longest substring.
    counts: [state], how often it occurs.
    latest: [state], where it ended last, as a number of tokens from the sequence's start.
    whole: the state of the whole sequence.
    texts: those that were learned.
    is_changing: a token is being appended or taken back.
    """

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.counts, self.latest = [NOWHERE], [0], [0], [0]
        self.whole = EMPTY
        self.texts: list[list[int]] = []
        self.is_changing = False
        self._steps: list[_Step] = []
        self._boundaries = 0

    def __len__(self) -> int:
        return len(self._steps)

    def learn(self, tokens: list[int]) -> None:
        """Append a whole text."""
        self.extend(tokens)
        self.end_text()
        self.texts.append(tokens)

    def unlearn(self, texts: int) -> None:
        """Take back all that came after the first so many texts."""
        del self.texts[texts:]
        self.cut(sum(len(text) + 1 for text in self.texts))  # each with its boundary

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def end_text(self) -> None:
        """Put a boundary after the sequence: a token below 0 that occurs once, so that nothing is
        matched across.
        """
        self._boundaries += 1
        self._append(-self._boundaries)

    def followers(self, state: int) -> dict[int, int]:
        """The state after each token that followed, without boundaries."""
        return {token: follower for token, follower in self.follow[state].items() if token >= 0}

    def cut(self, length: int) -> None:
        """Take back every token from this place on."""
        while len(self._steps) > length:
            self._take_back()

    def _append(self, token: int) -> None:
        self.is_changing = True
        follow, links, lengths = self.follow, self.links, self.lengths
        previous_whole = self.whole
        new = self.whole = self._state({}, lengths[previous_whole] + 1, EMPTY)
        # 1. the suffixes that this token has never followed before
        state = previous_whole
        while state != NOWHERE and token not in follow[state]:
            follow[state][token] = new
            state = links[state]
        # 2. the longest suffix of the whole that occurred before
        split = NOWHERE
        moved: list[int] = []
        if state != NOWHERE:
            next_state = follow[state][token]
            if lengths[next_state] != lengths[state] + 1:
                # only its shorter substrings end here too
                split = next_state
                moved = self._split(split, state, token)
                next_state = links[split]
            links[new] = next_state
        # 3. every suffix ends here once more
        latest = []
        state = new
        while state != EMPTY:
            latest.append(self.latest[state])
            self.latest[state] = len(self._steps) + 1
            self.counts[state] += 1
            state = links[state]
        self._steps.append(_Step(token, previous_whole, split, tuple(moved), tuple(latest)))
        self.is_changing = False

    def _split(self, split: int, state: int, token: int) -> list[int]:
        """Move the shorter substrings of a state to a new one, to which the longer ones then link.

        split: the state.
        state: that of the sequence's longest suffix which this token has followed before. What is
            at most one token longer moves.

        Returns the states from which the token now leads to the new one.
        """
        half = self._state(dict(self.follow[split]), self.lengths[state] + 1, self.links[split])
        self.counts[half] = self.counts[split]
        self.latest[half] = self.latest[split]
        self.links[split] = half
        moved = []
        while state != NOWHERE and self.follow[state].get(token) == split:
            self.follow[state][token] = half
            moved.append(state)
            state = self.links[state]
        return moved

    def _take_back(self) -> None:
        self.is_changing = True
        step, new, state = self._steps.pop(), self.whole, self.whole
        for latest in step.latest:
            self.latest[state] = latest
            self.counts[state] -= 1
            state = self.links[state]
        if step.split != NOWHERE:
            for above in step.moved:
                self.follow[above][step.token] = step.split
            self.links[step.split] = self.links[self.links[new]]
            self._forget()
        state = step.previous_whole
        while state != NOWHERE and self.follow[state].get(step.token) == new:
            del self.follow[state][step.token]
            state = self.links[state]
        self._forget()
        self.whole = step.previous_whole
        self._boundaries -= step.token < 0
        self.is_changing = False

    def _state(self, follow: dict[int, int], length: int, link: int) -> int:
        """A new state; returns its number."""
        self.follow.append(follow)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(0)
        self.latest.append(0)
        return len(self.follow) - 1

    def _forget(self) -> None:
        """Drop the newest state."""
        for states in (self.follow, self.links, self.lengths, self.counts, self.latest):
            states.pop()
