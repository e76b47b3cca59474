"""Errors that the command line shows to a user when a command fails."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

TOKEN = re.compile(
    r"\b(?:hf_|api_org_)[A-Za-z0-9]{30,}\b|\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_\w{36,}\b|\bAKIA[A-Z0-9]{16}\b"
)
"""Access tokens whose form no vocabulary contains by chance: of Hugging Face, GitHub
and Amazon.
"""

SCHEME = r"(?<![a-z\d])[a-z][a-z\d+.-]+:[/\\]+"
"""`https://`, also as a path writes it (`https:/`) or Windows (`https:\\\\`)."""
# A name alone, or name and password; a password may hold a slash, a port may not.
_NAME = r"(?:[^\s/\\'\"]|['\"](?=\w))*(?=@)|[^\s/\\'\"@:]*:(?!\d*(?:[/\\\s'\"]|$))[^\s'\"]*(?=@)"
_LOGIN = re.compile(rf"({SCHEME})(?:{_NAME})", re.IGNORECASE)
_ENCODED = re.compile(
    r"((?::|%3A)(?:%2F|%5C)+)(?:(?!%2F|%5C)[^\s/'\"])*(?=%40)", re.IGNORECASE
)
# Without a scheme: `//user:token@host`, `user:token@host/…`; a path may have `a:b@c`.
_BARE = r"(?<![\w.])(?!mailto:)[\w.+-]+:[^\s/\\'\"@]+(?=@(?:\[|localhost|[\w-]+[/:.]))"
_NO_SCHEME = re.compile(rf"(?<=//)[^\s/'\"]*(?=@)|{_BARE}")
_WORD_OF_NO_SCHEME = re.compile(rf"(?:(?:-*[\w.-]+=)?(?://)?){_BARE}")
_QUERY = re.compile(rf"({SCHEME}[^\s?#'\"]*[?#])[^\s'\")]*[^\s'\"),.:;]", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"([?&#][\w-]*(?:token|key|secret|signature|sig|password|passwd|pwd|credential|auth)=)"
    r"[^\s&'\"#…]+",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Hide what may be secret in a text: name and password of an address, everything
    after its `?` or `#`, and access tokens.
    """
    for pattern in (_QUERY, _SECRET_VALUE, _LOGIN, _ENCODED):
        text = pattern.sub(r"\1…", text)
    return TOKEN.sub("…", _NO_SCHEME.sub("…", text))


def holds_credentials(text: str) -> bool:
    """Tell whether a word that a user gave holds an access token, or an address with a
    name, a password or a token.
    """
    return _WORD_OF_NO_SCHEME.match(text) is not None or any(
        pattern.search(text) for pattern in (TOKEN, _LOGIN, _ENCODED, _SECRET_VALUE)
    )


def places_of_credentials(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each word in plain data that holds credentials."""
    if isinstance(value, str):
        # Prose, such as a system prompt, may show an example of an address.
        if not re.search(r"\s", value) and holds_credentials(value):
            yield ()
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(item, str | dict | list | tuple):
                yield from ((key, *inner) for inner in places_of_credentials(item))


CREDENTIALS = (
    "holds a name or password, an access token, or something after ? or #; leave it"
    " out, and give a key in the environment variable HF_TOKEN (of the Hub) or"
    " FCSD_SERVER_API_KEY (of a server)"
)
"""What is wrong with a value in which `holds_credentials` finds some."""


class UserError(Exception):
    """A mistake in the user's input: one message that says what is wrong, where, what
    is allowed and what to do next.

    The command line prints it as a single line and exits with status 2; everything else
    is a bug and keeps its traceback. An address in it is shown without its credentials.
    """

    def __init__(self, message: str = ""):
        super().__init__(without_credentials(message))


@contextlib.contextmanager
def errors_begin(where: str) -> Iterator[None]:
    """Begin the message of a UserError in this block with a text: a file, or a key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}{error}") from None


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
