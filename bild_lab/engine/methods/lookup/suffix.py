"""Drafts what followed the longest suffix of the text wherever it occurred before (SuffixDecoding,
SAM decoding).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from pathlib import Path

from bild_lab.engine.draft import Draft, Verdict, common_prefix, empty_draft
from bild_lab.engine.methods.lookup.suffix_automaton import EMPTY, SuffixAutomaton
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
        # the answer to each source, in the order in which the sources first came
        self._answers: dict[Hashable, list[int]] = {}
        # automata of texts that have ended, for the next texts
        self._idle: list[SuffixAutomaton] = []

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
        earlier_answer = self._answers.get(key, [])
        if answer[: len(earlier_answer)] == earlier_answer:
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
        if state <= EMPTY:
            return drafted
        max_tokens = int(min(room, self._factor * automaton.lengths[state]))
        while len(drafted) < max_tokens:
            followers = automaton.followers(state)
            if not followers:  # the match ends with the text
                state = automaton.links[state]
                if state <= EMPTY:
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
