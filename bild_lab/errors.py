"""The one exception that means "the input was wrong", shown to the user as a single message."""

import difflib
import math
from collections.abc import Iterable


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
    key: str, value: object, least: int, most: int | None = None, remedy: str = ""
) -> None:
    """Raise UserError unless the value is an integer of at least `least`, and at most `most` where
    that is given.

    remedy: what to do instead, for the end of the message.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < least
        or (most is not None and value > most)
    ):
        bound = "" if most is None else f" and <= {most}"
        raise UserError(
            f"{key} must be a whole number >= {least}{bound}, got"
            f" {value!r}{remedy and f'; {remedy}'}"
        )


def require_number(
    key: str, value: object, least: float, most: float, above: bool = False, remedy: str = ""
) -> None:
    """Raise UserError unless the value is a number from `least` to `most`; above: `least` itself is
    not allowed.

    remedy: what a value does, for the end of the message.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or (above and value == least):
        bounds = f"{'(' if above else '['}{least:g}, {most:g}]"
        raise UserError(f"{key} must lie in {bounds}, got {value!r}{remedy and f'; {remedy}'}")


def require_finite(
    key: str, value: object, least: float = -math.inf, above: bool = False, remedy: str = ""
) -> None:
    """Raise UserError unless the value is a finite number of at least `least`; above:

    `least` itself is not allowed.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < least or (above and value == least):
        bound = "" if least == -math.inf else f" {'>' if above else '>='} {least:g}"
        raise UserError(
            f"{key} must be a finite number{bound}, got {value!r}{remedy and f'; {remedy}'}"
        )


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """`did you mean bild?`, of the known word that is most similar, in whatever case; empty if none
    is similar.
    """
    words = {str(one).lower(): str(one) for one in known}
    near = difflib.get_close_matches(str(word).lower(), words, n=1, cutoff=0.5)
    return f"did you mean {words[near[0]]}?" if near else ""


def suggestion(word: object, known: Iterable[object]) -> str:
    """The same for the end of a message: `; did you mean bild?`."""
    meant = did_you_mean(word, known)
    return meant and f"; {meant}"


def require_choice(key: str, value: object, known: Iterable[object]) -> None:
    """Raise UserError unless the value is one of those known; None among them is the word null."""
    if value not in (known := list(known)):
        words = ["null" if one is None else str(one) for one in known]
        raise UserError(
            f"{key} must be one of {', '.join(words)}, got {value!r}{suggestion(value, words)}"
        )


def require_unicode(what: str, *texts: str) -> None:
    """Raise UserError for a text that no file can hold:

    JSON may name one half of a character (a lone surrogate).
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
