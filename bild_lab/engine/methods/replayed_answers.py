"""Texts that any engine wrote, replayed from a file: one answer to each prompt, as text or token
ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bild_lab.engine.decode import TokenLoop
from bild_lab.engine.models.checkpoint.chat import CompleteText
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint, Prompt
from bild_lab.engine.request import Request, Source
from bild_lab.engine.sampling import Sampling, most_likely, precise
from bild_lab.engine.session import LAST_LOGITS, DraftShape, LoadedModel
from bild_lab.engine.stop import UNFINISHED, before_stop
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError, require_unicode
from bild_lab.files import FilePath

LINES = "each line must be a JSON object with prompt and answer, each text or a list of token ids"
KEYS = ("prompt", "answer")
SHOWN = 60  # characters of a prompt in a message
CHARACTER_BYTES = 4  # the most that UTF-8 takes for a character


@dataclass(frozen=True)
class ReplayedAnswer:
    """A line of the file, from 1: what was asked and answered, each as text or as token ids."""

    line: int
    prompt: Prompt
    answer: str | list[int]


class Answers(TokenLoop):
    """Replays the answers of a file with a JSON object a line: {"prompt": "Ein Hund.", "answer":
    [71, 1782, 1]}.

    An answer belongs to the request whose prompt has the same token ids. It is cut like every text,
    by the request's limits; one that is shorter than the limit has ended, so it gets an end token
    if it has none: the target's own, if the target ends there. Raises UserError for a file that
    cannot be read, and where two lines answer one prompt differently.
    """

    draft_shape = DraftShape.ROWS
    greedy_only = True  # each text is judged by the target's most likely tokens

    def __init__(self, target: LoadedModel, file: FilePath | None = None) -> None:
        if not isinstance(file, str):
            raise UserError(
                f"policy answers replays a file of answers, got {file!r}; set"
                " policy.file=FILE.jsonl"
            )
        self.target, self._file = target, Path(file).expanduser()
        self._answers = read_answers(self._file)

    def lossless(self, sampling: Sampling) -> bool:
        """Nobody knows how the texts were decoded."""
        return False

    def require_answer(self, request: Request) -> None:
        self._answer(request)

    def rounds(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        """As `written_answer` yields them."""
        return written_answer(self.target, request, self._answer(request).answer)

    @cached_property
    def _by_prompt(self) -> Mapping[tuple[int, ...], ReplayedAnswer]:
        """The answers by the token ids of their prompts."""
        answers: dict[tuple[int, ...], ReplayedAnswer] = {}
        for answer in self._answers:
            try:
                keys = self._prompt_keys(answer.prompt)
                require_tokens(self.target.checkpoint, answer)
            except UserError as error:
                raise UserError(f"{self._file}, line {answer.line}: {error}") from error
            for key in keys:
                earlier = answers.setdefault(key, answer)
                if earlier.answer != answer.answer:
                    raise UserError(
                        f"{self._file}: lines {earlier.line} and {answer.line} answer the same"
                        " prompt differently; a prompt has one answer, so remove one of them"
                    )
        return answers

    def _prompt_keys(self, prompt: str | Sequence[int]) -> set[tuple[int, ...]]:
        """The token ids that a prompt may have: text may hold all of its special tokens, as that of
        a model's own chat template does, or lack those that the tokenizer adds.
        """
        checkpoint = self.target.checkpoint
        keys = {prompt_ids(checkpoint.source(prompt))}
        if isinstance(prompt, str) and prompt:
            keys.add(prompt_ids(checkpoint.source(CompleteText(prompt))))
        return keys

    def _answer(self, request: Request) -> ReplayedAnswer:
        """Raises UserError for a prompt without an answer."""
        key = prompt_ids(request.source)
        if (answer := self._by_prompt.get(key)) is None:
            text = self.target.checkpoint.tokenizer.decode(list(key), skip_special_tokens=True)
            shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
            raise UserError(
                f"{self._file} has no answer to the prompt {shown!r} ({len(key)} tokens); add one,"
                " by the prompt's text or its token ids, with templates and special tokens as the"
                " target reads them"
            )
        return answer


def prompt_ids(source: Source) -> tuple[int, ...]:
    """The token ids of a prompt: of an encoder–decoder those that its encoder reads."""
    decoder_ids, encoded = source.key
    return encoded or decoder_ids


def require_tokens(checkpoint: Checkpoint, answer: ReplayedAnswer) -> None:
    """Raise UserError for an answer with token ids that the target does not have, or with text that
    is no Unicode.
    """
    if isinstance(answer.answer, str):
        require_unicode("an answer", answer.answer)
    elif max(answer.answer, default=0) >= checkpoint.rows:
        raise UserError(
            f"tokens must be from 0 to {checkpoint.rows - 1}, got {max(answer.answer)}; is"
            " pair.target the model that answered?"
        )


def read_answers(file: Path) -> list[ReplayedAnswer]:
    """The answers of a file with a JSON object a line.

    Raises UserError, with the line, for anything else.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}; {LINES}") from error
    answers = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number}: {LINES}, got no JSON: {error}") from error
        if not isinstance(content, Mapping) or not all(
            _is_text_or_ids(content.get(key)) for key in KEYS
        ):
            raise UserError(f"{file}, line {number}: {LINES}, got {line[:SHOWN]}")
        answers.append(ReplayedAnswer(number, content["prompt"], content["answer"]))
    if not answers:
        raise UserError(f"{file} holds no answers; {LINES}")
    return answers


def _is_text_or_ids(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def written_answer(
    target: LoadedModel, request: Request, answer: str | Sequence[int], cut: bool | None = None
) -> Iterator[list[int]]:
    """Yields the tokens of an answer, text or token ids, cut by the request's limits.

    Of a text they come one by one, as the target's own token decides how it is written. An answer
    that is shorter than the limit has ended, so it gets an end token if it has none: the target's
    own, if the target ends there. cut: whether the length limit cut the answer; None: nobody knows,
    so it may have cut one that ends as near to it as the bytes of a character.
    """
    limits = request.limits
    tokens = list(request.source.prompt)
    if not isinstance(answer, str):
        tokens = limits.append(tokens, answer)
        if limits.reached(tokens):
            yield tokens[limits.prompt_length :]
            return
    stop_strings = () if limits.stop is None else limits.stop.strings
    wording = Wording(target.checkpoint, answer, stop_strings)
    session = target.start(request.source, limits.max_new_tokens)
    tokens = list(request.source.prompt)
    while not limits.reached(tokens):
        logits = session.extend([tokens[-1]], LAST_LOGITS).logits
        target_token = int(most_likely(precise(logits))[0])
        may_be_cut = limits.room(tokens) < CHARACTER_BYTES if cut is None else cut
        token = wording.next(tokens[limits.prompt_length :], target_token, may_be_cut)
        if token is None:
            return
        tokens = limits.append(tokens, [token])
        yield [token]


class Wording:
    """The tokens of an answer, one after another, given those so far and the target's own next one.

    Token ids are taken as they are. A text may be written by several sequences of tokens: it is
    written by the target's own tokens as long as they write it, else by those of the tokenizer.
    White space at its ends, special tokens and stop strings do not count, as many engines leave
    them out, nor do bytes of an unfinished character where the length limit cut the answer. What the
    tokenizer writes begins with the answer's own white space.
    """

    def __init__(
        self, checkpoint: Checkpoint, answer: str | Sequence[int], stop: Sequence[str]
    ) -> None:
        self._checkpoint, self._stop = checkpoint, stop
        self._special = frozenset(checkpoint.tokenizer.all_special_ids)
        self._text: str | None = None
        self._unfinished = False  # whether the answer ends with a part of a character
        self._tokens, self._prefixes = answer, []
        if isinstance(answer, str):
            text = before_stop(answer, stop).rstrip()
            self._unfinished = text.endswith(UNFINISHED)
            text = text.rstrip(UNFINISHED).rstrip()
            self._text = text.lstrip()
            self._tokens = self._encoded(text)
            self._prefixes = [
                self._written(self._tokens[:length]) for length in range(len(self._tokens))
            ]

    def next(
        self, tokens: Sequence[int], target_token: int, may_be_cut: bool = False
    ) -> int | None:
        """The token after these: an end token where the answer has ended, None if the target has
        none.

        tokens: the tokens so far.
        target_token: the target's own next token.
        may_be_cut: whether the length limit may have cut the answer here.
        """
        ends = self._checkpoint.end_tokens
        if (
            self._text is not None
            and target_token not in ends
            and self._continues_the_answer(tokens, target_token, may_be_cut)
        ):
            return target_token
        token = self._next_as_tokenized(tokens)
        if token is not None:
            return token
        return target_token if target_token in ends else min(ends, default=None)

    def _continues_the_answer(
        self, tokens: Sequence[int], target_token: int, may_be_cut: bool
    ) -> bool:
        """Whether the target's own token writes more of the answer, or nothing that counts."""
        longer_tokens = [*tokens, target_token]
        written, longer = self._written(tokens), self._written(longer_tokens)
        continuation = self._checkpoint.continuation(longer_tokens)
        # 1. the whole answer is written: only a stop string may follow, or bytes that were cut
        if written.rstrip() == self._text:
            begins_character = continuation.endswith(UNFINISHED)
            if begins_character and not (may_be_cut or self._unfinished):
                return False
            further = longer.removeprefix(self._text).lstrip()
            return not further or any(stop.lstrip().startswith(further) for stop in self._stop)
        # 2. special tokens anywhere, and white space before the answer, do not count
        if target_token in self._special:
            return True
        if not written and continuation.isspace():
            return True
        # 3. the token writes more of the answer
        writes_on = self._text.startswith(longer) or longer.rstrip() == self._text
        return longer != written and writes_on

    def _next_as_tokenized(self, tokens: Sequence[int]) -> int | None:
        """The answer's next token as given, or as the tokenizer writes the rest of a text; None if
        there is no more.
        """
        length = len(tokens)
        written = "" if self._text is None else self._written(tokens)
        if self._text is not None and written.rstrip() == self._text:
            return None
        if list(tokens) == self._tokens[:length]:
            return self._tokens[length] if length < len(self._tokens) else None
        if self._text is None or not self._text.startswith(written):
            return None
        if written in self._prefixes:
            remaining = self._tokens[self._prefixes.index(written) :]
        else:
            remaining = self._checkpoint.tokenizer.encode(
                self._text.removeprefix(written), add_special_tokens=False
            )
        return remaining[self._count_begun(tokens, written, remaining)]

    def _count_begun(self, tokens: Sequence[int], written: str, remaining: Sequence[int]) -> int:
        """How many of the first remaining tokens are already the last of these, and have written
        nothing yet: white space before the answer, or the first bytes of a character.
        """
        start = len(tokens)
        while start > 0 and self._written(tokens[: start - 1]) == written:
            start -= 1
        silent = list(tokens[start:])
        longest = min(len(silent), len(remaining) - 1)
        return next(
            count
            for count in range(longest, -1, -1)
            if silent[len(silent) - count :] == list(remaining[:count])
        )

    def _encoded(self, text: str) -> list[int]:
        """The tokenizer's tokens of a text with the white space that it begins with, which some
        tokenizers add themselves; of engines that leave it out, those of the text without it.
        """
        encode = partial(self._checkpoint.tokenizer.encode, add_special_tokens=False)
        tokens = encode(text)
        return tokens if self._checkpoint.continuation(tokens) == text else encode(text.lstrip())

    def _written(self, tokens: Sequence[int]) -> str:
        """What these tokens write before a stop string, without a character of which bytes are
        missing.
        """
        text = self._checkpoint.continuation(tokens)
        return before_stop(text, self._stop).lstrip().rstrip(UNFINISHED)
