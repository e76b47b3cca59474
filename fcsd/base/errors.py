"""Errors that the command line shows to a user when a command fails."""

import re
from typing import Any

# The login of a URL (`//user:token@host`), and of an address without a scheme
# (`user:token@host`).
_LOGIN = re.compile(
    r"(?<=//)[^\s/'\"]*(?=@)|(?<![\w/.])[\w.+-]+:[^\s/'\"@]+(?=@[\w\[])"
)
_QUERY = re.compile(r"(?<=://)([^\s?#'\"]*[?#])[^\s'\")]*[^\s'\"),.:;]")


def without_credentials(text: str) -> str:
    """Hide the parts of addresses in a text that may be secret: name and password, and
    everything after `?` or `#`.
    """
    return _QUERY.sub(r"\1…", _LOGIN.sub("…", text))


class UserError(Exception):
    """A mistake in the user's input: one message that says what is wrong, where, what
    is allowed and what to do next.

    The command line prints it as a single line and exits with status 2; everything else
    is a bug and keeps its traceback. An address in it is shown without its credentials.
    """

    def __init__(self, message: str = ""):
        super().__init__(without_credentials(message))


class Interrupted(Exception):
    """A run that a signal ended and that shut down in good order.

    The command line prints it as a single line and exits with status 128 plus the
    signal's number.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.status = 128 + signal_number


class ScorerError(RuntimeError):
    """The scorer of code tasks, or its data, is broken, so there is no score.

    The command line prints it as a single line and exits with status 1.
    """


def one_line(error: BaseException) -> str:
    """Return the text of a library's error as one line of at most 500 characters, or
    the name of its class where it has no text.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:499]}…"


def kind_of(value: Any) -> str:
    """Describe a value of the wrong kind for a message: "a tuple", "an int", "None",
    "the class TrainerCallback".
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    # Acronyms are spelt out when read aloud, which decides the article: an SFTConfig,
    # but a Path.
    letters = "AEFHILMNORSX" if name[:2].isupper() else "AEIOaeio"
    return f"{'an' if name[0] in letters else 'a'} {name}"


def check_kind(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Raise UserError unless an argument is of one of these kinds.

    expected: the accepted kinds in words, with their article.
    """
    if not isinstance(value, kinds):
        raise UserError(f"{name}: {kind_of(value)}; {expected} is needed")


_NO_MEMORY = (
    "out of memory|can't allocate memory|cannot allocate memory|not enough"
    " memory|bad_alloc"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on a device or on the host.

    torch raises no common class for this, so the message is also searched.
    """
    if isinstance(error, RuntimeError | OSError):
        return re.search(_NO_MEMORY, str(error), re.IGNORECASE) is not None
    return isinstance(error, MemoryError)
