"""The one exception that means "the input was wrong", shown to the user as a single message, and
warnings that are shown once.
"""

import difflib
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterable
from functools import lru_cache

MOST_OF_MESSAGE = 300  # characters of a message of code that is not ours


class UserError(ValueError):
    """Something the user gave cannot be used.

    The message says what was wanted, what came, and what to do. Entrypoints print it alone,
    without a traceback, and exit with code 2.
    """


def require_flag(key: str, value: object) -> None:
    """Raise UserError unless the value is true or false; YAML's yes and off are words here."""
    if not isinstance(value, bool):
        raise UserError(f"{key} must be true or false, got {value!r}")


def require_whole(
    key: str, value: object, minimum: int, maximum: int | None = None, remedy: str = ""
) -> None:
    """Raise UserError unless the value is an integer from `minimum` on, up to `maximum` where that
    is given, else up to the largest that counts anything, sys.maxsize.

    remedy: what to do instead, for the end of the message.
    """
    if isinstance(value, int) and value > sys.maxsize and maximum is None:
        maximum = sys.maxsize
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < minimum
        or (maximum is not None and value > maximum)
    ):
        bound = "" if maximum is None else f" and <= {maximum}"
        raise UserError(
            f"{key} must be a whole number >= {minimum}{bound}, got"
            f" {value!r}{remedy and f'; {remedy}'}"
        )


def require_number(
    key: str, value: object, minimum: float, maximum: float, above: bool = False, remedy: str = ""
) -> None:
    """Raise UserError unless the value is a number from `minimum` to `maximum`.

    above: the value must be greater than `minimum`. remedy: what a value does, for the end of the
    message.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum or (above and value == minimum):
        bounds = f"{'(' if above else '['}{minimum:g}, {maximum:g}]"
        raise UserError(f"{key} must lie in {bounds}, got {value!r}{remedy and f'; {remedy}'}")


def require_finite(
    key: str, value: object, minimum: float = -math.inf, above: bool = False, remedy: str = ""
) -> None:
    """Raise UserError unless the value is a finite number of at least `minimum`.

    above: the value must be greater than `minimum`. remedy: what to do instead, for the end of the
    message.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < minimum or (above and value == minimum):
        bound = "" if minimum == -math.inf else f" {'>' if above else '>='} {minimum:g}"
        raise UserError(
            f"{key} must be a finite number{bound}, got {value!r}{remedy and f'; {remedy}'}"
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type where there is none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """The error's message on one line."""
    return " ".join(str(error).split())


def cause_in_words(error: BaseException) -> str:
    """An error of code that is not ours: its type, and the beginning of its message on one line."""
    return f"{type(error).__name__}: {one_line(error)[:MOST_OF_MESSAGE]}"


def raised_at(error: BaseException) -> str:
    """Where an error left code that is neither Python's own nor an installed package: the file's
    name, the line, the function.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [
        (frame, line)
        for frame, line in frames
        if frame.f_globals.get("__name__", "").partition(".")[0] not in sys.stdlib_module_names
        and f"{os.sep}site-packages{os.sep}" not in frame.f_code.co_filename
    ]
    frame, line = (own or frames)[-1]
    return f"{os.path.basename(frame.f_code.co_filename)}, line {line}, in {frame.f_code.co_name}"


def did_you_mean(word: object, choices: Iterable[object]) -> str:
    """`did you mean bild?` names the most similar choice, in whatever case; empty if none is
    similar.
    """
    words = {str(known_word).lower(): str(known_word) for known_word in choices}
    near = difflib.get_close_matches(str(word).lower(), words, n=1, cutoff=0.5)
    return f"did you mean {words[near[0]]}?" if near else ""


def suggestion(word: object, choices: Iterable[object]) -> str:
    """The words of `did_you_mean` for the end of a message: `; did you mean bild?`."""
    meant = did_you_mean(word, choices)
    return meant and f"; {meant}"


def require_choice(key: str, value: object, choices: Iterable[object]) -> None:
    """Raise UserError unless the value is one of those known; None among them is the word null."""
    if value not in (choices := list(choices)):
        words = ["null" if choice is None else str(choice) for choice in choices]
        raise UserError(
            f"{key} must be one of {', '.join(words)}, got {value!r}{suggestion(value, words)}"
        )


def require_unicode(what: str, *texts: str) -> None:
    """Raise UserError for a text that no file can hold: JSON may name one half of a character (a
    lone surrogate).
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise UserError(
                f"{what} must be Unicode text, got {half} alone at character {error.start}, one"
                " half of a character; correct or remove it"
            ) from error


def require_model_path(key: str, value: object) -> None:
    """Raise UserError unless the value may name a checkpoint."""
    if not isinstance(value, str) or not value:
        raise UserError(
            f"{key} must be a folder or a hub id, got {'null' if value is None else repr(value)}"
        )


@lru_cache
def warn_once(text: str) -> None:
    """Log this warning, if it was not yet."""
    logging.getLogger(__name__).warning(text)
