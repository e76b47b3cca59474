"""The two processes of a job: the program, which runs generated code and answers calls,
and the examiner, which runs the tests and replies. Loaded by `server.py`, after the
codec; standard library only.
"""

import builtins
import json
import os
import sys
import time
import types
from typing import Any

codec: Any = sys.modules.get(
    "fcsd_sandbox_codec"
)  # as the server has loaded it: `-I` takes this folder off the path

JOBS, REPLIES = 0, 1
# Python's own, for programs; a recursion that is too deep elsewhere is too deep here
RECURSION_LIMIT = 1000


def program(requests: int, answers: int) -> None:
    """Run the generated code, then answer the examiner's calls until it closes the
    pipe.
    """
    values = codec.Codec()
    sys.setrecursionlimit(RECURSION_LIMIT)
    module = types.ModuleType("program")
    sys.modules["program"] = module  # dataclasses and typing look for it
    namespace = module.__dict__

    def answer(work: Any) -> None:
        try:
            codec.write_frame(answers, {"value": values.encode(work())})
        except BaseException as error:
            codec.write_frame(
                answers, {"error": type(error).__name__, "text": _text(error)}
            )

    def run_code() -> list[str]:
        exec(compile(request["code"], "<program>", "exec"), namespace)
        return [
            n
            for n, v in namespace.items()
            if isinstance(n, str) and callable(v) and not n.startswith("__")
        ]

    def call() -> Any:
        function = namespace[request["call"]]
        arguments = [values.decode(value) for value in request["arguments"]]
        return function(
            *arguments, **{k: values.decode(v) for k, v in request["named"].items()}
        )

    try:
        while True:
            request = codec.read_frame(requests)
            answer(run_code if "code" in request else call)
    except (EOFError, OSError):
        pass


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:
        return ""


class Died(BaseException):
    """The program ended without an answer."""


class Link:
    """The examiner's side of the pipes to the program."""

    def __init__(self, requests: int, answers: int):
        self.requests, self.answers = requests, answers
        self.values = codec.Codec()

    def ask(self, request: dict[str, Any]) -> Any:
        """Send one request and return its answer; an exception of the program is raised
        here, as the builtin of its name.
        """
        try:
            codec.write_frame(self.requests, request)
            reply = codec.read_frame(self.answers)
        except (EOFError, OSError):
            raise Died from None
        if isinstance(reply, dict) and "value" in reply:
            return self.values.decode(reply["value"])
        name, text = str(reply["error"]), str(reply["text"])
        kind = getattr(builtins, name, None)
        # The end of an iteration would end a loop of the test before it has compared
        # everything.
        special = (UnicodeError, ExceptionGroup, StopIteration, StopAsyncIteration)
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(
            kind, special
        ):
            kind, text = RuntimeError, f"{name}: {text}"
        error = kind(text)
        error.fcsd_from_program = name  # type: ignore[attr-defined]
        raise error

    def function(self, name: str) -> Any:
        """Return a function that is called in the program's process."""

        def call(*arguments: Any, **named: Any) -> Any:
            return self.ask({
                "call": name,
                "arguments": [self.values.encode(value) for value in arguments],
                "named": {key: self.values.encode(value) for key, value in named.items()},
            })  # fmt: skip

        call.__name__ = name
        return call


def examine(job: dict[str, Any], link: Link) -> tuple[str, str]:
    """Run the tests against the program: (outcome, message)."""
    try:
        names = link.ask({"code": job["code"]})
        # The tests see the program's functions only through the link, never its
        # objects.
        namespace: dict[str, Any] = {"__name__": "tests"}
        # A program that defines its own `zip` or `set` must not change the tests.
        allowed = job["names"]
        namespace.update({
            name: link.function(name)
            for name in names
            if isinstance(name, str)
            and not name.startswith("__")
            and (name in allowed if allowed is not None else not hasattr(builtins, name))
        })  # fmt: skip
        for test in job["tests"]:
            exec(compile(test, "<tests>", "exec"), namespace)
        return "passed", ""
    except Died:
        raise
    except MemoryError:
        return "memory", "MemoryError"
    except BaseException as error:
        origin = getattr(error, "fcsd_from_program", None)
        wrong = isinstance(error, AssertionError) and origin is None
        return (
            "wrong" if wrong else "error",
            f"{origin or type(error).__name__}: {_text(error)}",
        )


def examiner(link: Link, number: int, length: int, done: int) -> None:
    """Read the job, examine, reply; bytes on `done`: j read the job, then r replied or
    d the program died.
    """
    # a program may raise its own, and answer with nested values
    sys.setrecursionlimit(4 * RECURSION_LIMIT)
    start = time.monotonic()
    try:
        body = codec.read_exactly(JOBS, length)
        os.write(done, b"j")
        start = time.monotonic()
        outcome, message = examine(json.loads(body), link)
    except Died:
        os.write(done, b"d")
        return
    except MemoryError:
        outcome, message = "memory", "the tests ran out of memory"
    reply = {
        "job": number,
        "outcome": outcome,
        "seconds": time.monotonic() - start,
        "message": message[:300],
    }
    codec.write_frame(REPLIES, reply)  # below PIPE_BUF, so whole or not at all
    os.write(done, b"r")
