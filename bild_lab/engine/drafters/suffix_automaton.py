"""A suffix automaton of a growing and shrinking sequence of tokens (Blumer et al., 1985)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ROOT = 0  # the state of the empty sequence
NOWHERE = -1


@dataclass(frozen=True)
class _Step:
    """What appending a token changed, so that it can be taken back.

    before: the state of the whole sequence until then. split: the state that was split in two, or NOWHERE. moved:
    the states whose transition went to the new half. latest: of each state that ends here, where it had ended before.
    """

    token: int
    before: int
    split: int
    moved: tuple[int, ...]
    latest: tuple[int, ...]


class SuffixAutomaton:
    """All that occurs in a sequence: each state stands for the substrings that end at the same places.

    Appending a token, and taking it back, takes a few steps for each of the sequence's suffixes that occurred before
    with other tokens in front.
    follow: [state], the next state by token. links: [state], the state of its longest suffix that ends at more places.
    lengths: [state], of its longest substring. counts: [state], how often it occurs. latest: [state], where it ended
    last, as a number of tokens from the sequence's start. whole: the state of the whole sequence.
    """

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.counts, self.latest = [NOWHERE], [0], [0], [0]
        self.whole = ROOT
        self._steps: list[_Step] = []
        self._boundaries = 0

    def __len__(self) -> int:
        return len(self._steps)

    def copied(self) -> SuffixAutomaton:
        """One of its own, for a text beside this one."""
        other = SuffixAutomaton()
        other.follow = [dict(each) for each in self.follow]
        other.links, other.lengths, other.counts = self.links[:], self.lengths[:], self.counts[:]
        other.latest, other.whole = self.latest[:], self.whole
        other._steps, other._boundaries = self._steps[:], self._boundaries
        return other

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def end_text(self) -> None:
        """Put a boundary behind the sequence: a token below 0 that occurs once, so that nothing is matched across."""
        self._boundaries += 1
        self._append(-self._boundaries)

    def cut(self, length: int) -> None:
        """Take back every token from this place on."""
        while len(self._steps) > length:
            self._take_back()

    def _append(self, token: int) -> None:
        follow, links, lengths = self.follow, self.links, self.lengths
        before, split, moved = self.whole, NOWHERE, []
        new = self.whole = self._state({}, lengths[before] + 1, ROOT)
        state = before
        while state != NOWHERE and token not in follow[state]:
            follow[state][token] = new
            state = links[state]
        if state != NOWHERE:
            links[new] = found = follow[state][token]
            if lengths[found] != lengths[state] + 1:  # only its shorter substrings end here too
                split = found
                links[new] = half = self._state(dict(follow[split]), lengths[state] + 1, links[split])
                self.counts[half], self.latest[half] = self.counts[split], self.latest[split]
                links[split] = half
                while state != NOWHERE and follow[state].get(token) == split:
                    follow[state][token] = half
                    moved.append(state)
                    state = links[state]
        latest = []
        state = new
        while state != ROOT:
            latest.append(self.latest[state])
            self.latest[state] = len(self._steps) + 1
            self.counts[state] += 1
            state = links[state]
        self._steps.append(_Step(token, before, split, tuple(moved), tuple(latest)))

    def _take_back(self) -> None:
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
        state = step.before
        while state != NOWHERE and self.follow[state].get(step.token) == new:
            del self.follow[state][step.token]
            state = self.links[state]
        self._forget()
        self.whole = step.before
        self._boundaries -= step.token < 0

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
        for each in (self.follow, self.links, self.lengths, self.counts, self.latest):
            each.pop()
