"""Drafts what followed the longest suffix of the text wherever it occurred before (SuffixDecoding,
SAM decoding).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bild_lab.engine.draft import Draft, Verdict, common_prefix, empty_draft
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel, Scores, Session, on_device
from bild_lab.errors import (
    UserError,
    require_finite,
    require_flag,
    require_number,
    require_whole,
)
from bild_lab.files import FilePath


class SuffixDrafter(Drafter):
    """Proposes what followed the longest suffix of the text that occurred before.

    A suffix automaton holds what may be copied: the corpus, earlier answers, the encoder's input,
    and the text so far (Hu et al., 2024, SAM decoding; Oliaro et al., 2024, SuffixDecoding). The
    draft follows the most frequent next token, of equally frequent ones the latest. It has up to
    `factor` tokens for each token of the match (SuffixDecoding §4.2, α), and ends before a token if
    the product of the frequencies so far would fall below `min_prob` (its estimated chance, there
    D(N)). Where a match ends with the text, a shorter one goes on.

    window: the most tokens drafted.
    corpus: a folder, or a file, of UTF-8 text, each file one text; None: none.
    keep: also copy from the answers to earlier texts, to each prompt the first one, and how it goes
        on if that is found later. A prompt that comes again finds what it found the first time, so
        repeated timings do the same work.
    """

    drafts_trees = False

    def __init__(
        self,
        target: LoadedModel,
        window: int,
        factor: float,
        min_prob: float,
        corpus: FilePath | None = None,
        keep: bool = False,
    ) -> None:
        require_whole("the draft window", window, 1)
        require_finite(
            "factor", factor, 0, above=True, remedy="1 drafts as many tokens as were matched"
        )
        require_number("min_prob", min_prob, 0, 1, remedy="0 follows any match")
        require_flag("keep", keep)
        self.learns_from_texts = keep
        self._target, self._device = target, target.device
        self._nothing = empty_draft(target.device)
        self._window, self._factor, self._min_prob = window, factor, min_prob
        self._files = corpus_files(corpus)
        # by source, in the order in which these first came
        self._answers: dict[Hashable, list[int]] = {}
        self._idle: list[SuffixAutomaton] = []  # those of texts that have ended, for the next texts

    def prepare(self, request: Request) -> None:
        """Read the corpus, and take in the answers to the texts before this one."""
        self._idle.append(self._known_before(request))

    def begin(self, request: Request, target: Session) -> None:
        self._request, self._limits = request, request.limits
        automaton, source = self._known_before(request), request.source
        self._automaton = automaton
        weakref.finalize(self, give_back, self._idle, automaton).atexit = False
        if source.copyable:
            automaton.extend(source.copyable)
            automaton.end_text()
        self._offset = len(automaton)  # where the tokens begin
        automaton.extend(source.prompt)

    def _known_before(self, request: Request) -> SuffixAutomaton:
        """An automaton that no text uses, with the corpus and, if they are kept, the answers before
        this text.
        """
        try:
            automaton = self._idle.pop()  # in one step: another thread may take the last
        except IndexError:
            automaton = SuffixAutomaton()
            for file in self._files:
                checkpoint = self._target.checkpoint
                tokens = checkpoint.tokenizer(
                    file.read_text(encoding="utf-8"), add_special_tokens=False
                )["input_ids"]
                checkpoint.require_row(max(tokens, default=0), f"the tokens of {file}")
                automaton.learn(tokens)
        key, earlier_answers = request.source.key, list(self._answers.values())
        if key in self._answers:
            earlier_answers = earlier_answers[: list(self._answers).index(key)]
        # an answer may have gone on since it was learned
        known = common_prefix(automaton.texts[len(self._files) :], earlier_answers)
        automaton.unlearn(len(self._files) + known)
        for answer in earlier_answers[known:]:
            automaton.learn(answer)
        return automaton

    def forget(self) -> None:
        self._answers.clear()

    def propose(self, tokens: list[int]) -> Draft:
        automaton = self._automaton
        automaton.cut(self._offset + len(tokens) - 1)  # the last token may replace a rejected one
        automaton.extend(tokens[len(automaton) - self._offset :])
        self._tokens = tokens
        drafted = self._followed(min(self._window, self._limits.room(tokens)))
        return Draft(on_device(drafted, self._device)) if drafted else self._nothing

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Remember the answer so far, if answers are kept and it begins as the one before."""
        if not self.learns_from_texts:
            return
        text = self._limits.append(self._tokens, verdict.tokens(draft))
        answer, key = text[self._limits.prompt_length :], self._request.source.key
        kept = self._answers.get(key, [])
        if answer[: len(kept)] == kept:
            self._answers[key] = answer

    def observe_other(
        self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict
    ) -> None:
        self._tokens = tokens
        self.observe(draft, scores, verdict)

    def rollback(self, length: int) -> None:
        self._automaton.cut(self._offset + length)

    def _followed(self, room: int) -> list[int]:
        """The most likely way on from the longest match, up to an end token."""
        automaton = self._automaton
        drafted: list[int] = []
        chance = 1.0
        # the text's longest suffix that occurs elsewhere too
        state = automaton.links[automaton.whole]
        if state <= ROOT:
            return drafted
        max_tokens = int(min(room, self._factor * automaton.lengths[state]))
        while len(drafted) < max_tokens:
            followers = automaton.followers(state)
            if not followers:  # the match ends with the text
                state = automaton.links[state]
                if state <= ROOT:
                    break
                continue
            token, state, frequency = most_frequent(automaton, followers)
            chance *= frequency
            if chance < self._min_prob:
                break
            drafted.append(token)
            if token in self._limits.end_tokens:
                break
        return drafted


def give_back(idle: list[SuffixAutomaton], automaton: SuffixAutomaton) -> None:
    """Keep the automaton of a text that has ended for the next ones, unless an interrupt left it half
    changed.
    """
    if not automaton.is_changing:
        idle.append(automaton)


def most_frequent(
    automaton: SuffixAutomaton, followers: Mapping[int, int]
) -> tuple[int, int, float]:
    """The follower that occurs most often, of equally frequent ones the latest: its token, its
    state, and its share of all occurrences.
    """
    token = max(
        followers,
        key=lambda token: (
            automaton.counts[followers[token]],
            automaton.latest[followers[token]],
        ),
    )
    state = followers[token]
    total = sum(automaton.counts[follower] for follower in followers.values())
    return token, state, automaton.counts[state] / total


def corpus_files(corpus: str | None) -> list[Path]:
    """The files of a corpus, in order. Raises UserError for a path without any."""
    if corpus is None:
        return []
    files: list[Path] = []
    if isinstance(corpus, str):
        path = Path(corpus).expanduser()
        files = [path] if path.is_file() else sorted(path.rglob("*"))
    files = [file for file in files if file.is_file()]
    if not files:
        raise UserError(
            f"corpus must be a folder with text files, or a text file, got {corpus!r}; null takes"
            " none"
        )
    for file in files:
        try:
            file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {file} of the corpus as UTF-8 text: {error}") from error
    return files


ROOT = 0  # the state of the empty sequence
NOWHERE = -1


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
        self.whole = ROOT
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
        split = NOWHERE
        moved: list[int] = []
        new = self.whole = self._state({}, lengths[previous_whole] + 1, ROOT)
        state = previous_whole
        while state != NOWHERE and token not in follow[state]:
            follow[state][token] = new
            state = links[state]
        if state != NOWHERE:
            next_state = follow[state][token]
            links[new] = next_state
            if (
                lengths[next_state] != lengths[state] + 1
            ):  # only its shorter substrings end here too
                split = next_state
                half = self._state(dict(follow[split]), lengths[state] + 1, links[split])
                self.counts[half] = self.counts[split]
                self.latest[half] = self.latest[split]
                links[new] = links[split] = half
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
        self._steps.append(_Step(token, previous_whole, split, tuple(moved), tuple(latest)))
        self.is_changing = False

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
