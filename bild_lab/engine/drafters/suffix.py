"""Drafts what followed the longest suffix of the text wherever it occurred before (SuffixDecoding, SAM decoding)."""

from __future__ import annotations

from pathlib import Path

from bild_lab.engine.draft import Draft, Verdict, empty_draft
from bild_lab.engine.drafters.memory import Memory
from bild_lab.engine.drafters.suffix_automaton import ROOT, SuffixAutomaton
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel, Scores, Session, on_device
from bild_lab.errors import UserError, require_flag, require_whole
from bild_lab.files import FilePath


class SuffixDrafter(Drafter):
    """Proposes what followed the longest suffix of the text that occurred before.

    A suffix automaton holds what may be copied: the corpus, earlier answers, the encoder's input, and the text so far
    (Hu et al., 2024, SAM decoding; Oliaro et al., 2024, SuffixDecoding). The draft follows the most frequent next
    token, of equally frequent ones the latest. It has up to `factor` tokens for each token of the match
    (SuffixDecoding §4.2, α), and ends before a token if the product of the frequencies so far would fall below
    `least` (its estimated chance, there D(N)). Where a match ends with the text, a shorter one goes on.

    window: the most tokens drafted. corpus: a folder, or a file, of UTF-8 text, each file one text; None: none.
    keep: also copy from the answers to earlier texts. A prompt that comes again finds what it found the first time,
    so repeated timings do the same work.
    """

    drafts_trees = False

    def __init__(
        self,
        target: LoadedModel,
        window: int,
        factor: float,
        least: float,
        corpus: FilePath | None = None,
        keep: bool = False,
    ) -> None:
        require_whole("the draft window", window, 1)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise UserError(f"factor must be a number > 0, got {factor!r}; 1 drafts as many tokens as were matched")
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0.0 <= least <= 1.0:
            raise UserError(f"least is a chance and must lie in [0, 1], got {least!r}; 0 follows any match")
        require_flag("keep", keep)
        self._target, self._device = target, target.device
        self._nothing = empty_draft(target.device)
        self._window, self._factor, self._least, self._keep = window, factor, least, keep
        self._files = corpus_files(corpus)
        self._automaton: SuffixAutomaton | None = None
        self._answers = Memory()
        self._known: list[int] = []  # how long the automaton is behind the corpus, and behind each earlier answer

    def prepare(self, request: Request) -> None:
        """Read the corpus, and take in the answers to the texts before this one."""
        if self._automaton is None:
            self._automaton = SuffixAutomaton()
            tokenizer = self._target.checkpoint.tokenizer if self._files else None
            for file in self._files:
                self._automaton.extend(
                    tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
                )
                self._automaton.end_text()
            self._known.append(len(self._automaton))
        if self._keep:
            before = self._answers.before(request.source)
            del self._known[len(before) + 1 :]
            self._automaton.cut(self._known[-1])
            for answer in before[len(self._known) - 1 :]:
                self._automaton.extend(answer)
                self._automaton.end_text()
                self._known.append(len(self._automaton))

    def start(self, request: Request, target: Session) -> None:
        if self._automaton is None:
            self.prepare(request)
        self._request, self._limits = request, request.limits
        automaton, source = self._automaton, request.source
        self._first_time = self._keep and source not in self._answers
        automaton.cut(self._known[-1])
        if source.encoder_ids is not None:
            automaton.extend(source.encoder_ids[0].tolist())
            automaton.end_text()
        self._offset = len(automaton)  # where the tokens begin
        automaton.extend(source.prompt)

    def propose(self, tokens: list[int]) -> Draft:
        automaton = self._automaton
        automaton.cut(self._offset + len(tokens) - 1)  # the last token may replace a rejected one
        automaton.extend(tokens[len(automaton) - self._offset :])
        self._tokens = tokens
        drafted = self._followed(min(self._window, self._limits.room(tokens)))
        return Draft(on_device(drafted, self._device)) if drafted else self._nothing

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Remember the answer so far, if answers are kept."""
        if self._first_time:
            accepted = [draft.token_list[node] for node in verdict.path]
            text = self._limits.append(self._tokens, [*accepted, verdict.next_token])
            self._answers.put(self._request.source, text[self._limits.prompt_length :])

    def observe_other(self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self._tokens = tokens
        self.observe(draft, scores, verdict)

    def forget(self, length: int) -> None:
        self._automaton.cut(self._offset + length)

    def _followed(self, room: int) -> list[int]:
        """The likeliest way on from the longest match, up to an end token."""
        automaton, drafted, chance = self._automaton, [], 1.0
        state = automaton.links[automaton.whole]  # the text's longest suffix that occurs elsewhere too
        most = min(room, int(self._factor * automaton.lengths[state])) if state > ROOT else 0
        while len(drafted) < most:
            ways = {token: way for token, way in automaton.follow[state].items() if token >= 0}
            if not ways:
                state = automaton.links[state]
                if state <= ROOT:
                    break
                continue
            token = max(ways, key=lambda token: (automaton.counts[ways[token]], automaton.latest[ways[token]]))
            chance *= automaton.counts[ways[token]] / sum(automaton.counts[way] for way in ways.values())
            if chance < self._least:
                break
            drafted.append(token)
            if token in self._limits.end_tokens:
                break
            state = ways[token]
        return drafted


def corpus_files(corpus: str | None) -> list[Path]:
    """The files of a corpus, in order. Raises UserError for a path without any."""
    if corpus is None:
        return []
    named = Path(corpus).expanduser() if isinstance(corpus, str) else None
    files = [] if named is None else [named] if named.is_file() else sorted(named.rglob("*"))
    files = [file for file in files if file.is_file()]
    if not files:
        raise UserError(
            f"corpus must be a folder with text files, or a text file, got {corpus!r}; null copies from none"
        )
    for file in files:
        try:
            file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {file} of the corpus as UTF-8 text: {error}") from error
    return files
