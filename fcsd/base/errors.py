"""Errors that a user is meant to see when a command does not end well."""

import re
from typing import Any

_LOGIN = re.compile(
    r"(?<=//)[^\s/'\"]*(?=@)|(?<![\w/.])[\w.+-]+:[^\s/'\"@]+(?=@[\w\[])"
)
_QUERY = re.compile(r"(?<=://)([^\s?#'\"]*[?#])[^\s'\")]+")


def without_credentials(text: str) -> str:
    """Hide in the addresses of a text what may be a secret: name and password, what
    follows `?` or `#`.
    """
    return _QUERY.sub(r"\1…", _LOGIN.sub("…", text))


class UserError(Exception):
    """A mistake in what the user gave: one message that says what, where, what is
    allowed and what to do next.

    The command line prints it as a single line and exits with status 2; everything else
    is a bug and keeps its traceback. An address in it is shown without its credentials.
    """

    def __init__(self, message: str = ""):
        super().__init__(without_credentials(message))


class Interrupted(Exception):
    """A run that was asked to end by a signal, and did so in good order.

    The command line prints it as a single line and exits with status 128 plus the
    signal's number.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.status = 128 + signal_number


class ScorerError(RuntimeError):
    """The scorer of code tasks, or its data, is broken: nothing is known about the
    score.

    The command line prints it as a single line and exits with status 1.
    """


def one_line(error: BaseException) -> str:
    """Return a library's error as one line of a message, its first 500 characters; its
    kind where it has no text.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:499]}…"


def kind_of(value: Any) -> str:
    """Say what a value is that should be something else: "a tuple", "an int", "None",
    "the class TrainerCallback".
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    # an SFTConfig, a Path
    letters = "AEFHILMNORSX" if name[:2].isupper() else "AEIOaeio"
    return f"{'an' if name[0] in letters else 'a'} {name}"


def check_kind(name: str, value: Any, kinds: Any, needed: str) -> None:
    """Raise UserError where an argument is none of these kinds; needed: what it is
    instead, with its article.
    """
    if not isinstance(value, kinds):
        raise UserError(f"{name}: {kind_of(value)}; {needed} is needed")


_NO_MEMORY = (
    "out of memory|can't allocate memory|cannot allocate memory|not enough"
    " memory|bad_alloc"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory, of a device or of the host, was too small: torch says so in
    several ways.
    """
    if isinstance(error, RuntimeError | OSError):
        return re.search(_NO_MEMORY, str(error), re.IGNORECASE) is not None
    return isinstance(error, MemoryError)
