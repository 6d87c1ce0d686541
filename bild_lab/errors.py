"""The one exception that means "the input was wrong", shown to the user as a single message."""


class UserError(ValueError):
    """Something the user gave cannot be used.

    The message says what was wanted, what came, and what to do. Entrypoints print it alone,
    without a traceback, and exit with code 2.
    """
