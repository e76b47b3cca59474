"""Run a contest's program in the sandbox as a judge does, once for each test.

`fcsd.evaluation.code.contest` sends this file's text into the process of the generated
code, with `fcsd_source`, the text of the program, behind it; it is imported nowhere.
Standard library only.

Not covered: programs in several files, and those that end themselves by `os._exit`.
"""

import atexit
import contextlib
import gc
import json
import os
import sys
import threading
import types

fcsd_source = ""  # replaced
# What LiveCodeBench imports for every program, in its order, since models leave it out.
_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
_MOST = 16 << 20  # bytes that a program may print


def _start():  # type: ignore[no-untyped-def]
    """Run the program's text as the main module, after LiveCodeBench's imports and with
    its depth of recursion.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    header = [f"from {name} import *" for name in _MODULES] + [
        f"import {', '.join(_MODULES)}"
    ]
    exec("\n".join(header), module.__dict__)
    sys.setrecursionlimit(50000)
    exec(compile(fcsd_source, "<program>", "exec"), module.__dict__)
    return module


def fcsd_call(name, text):  # type: ignore[no-untyped-def]
    """Call the solution's method (or function) with the arguments that `text` has as
    JSON, one a line.
    """
    module = _start()
    owner = module.Solution() if hasattr(module, "Solution") else module
    return getattr(owner, name)(*map(json.loads, text.split("\n")))


def fcsd_run(text):  # type: ignore[no-untyped-def]
    """Run the program with `text` on standard input; what it printed. Real descriptors,
    because programs read `open(0)` and `os.read(0, …)`."""
    (source, feed), (drain, sink) = os.pipe(), os.pipe()
    # behind the output, since a duplicate of the descriptor may outlive the program
    end = os.urandom(16)
    printed = bytearray()

    def write():  # type: ignore[no-untyped-def]
        with contextlib.suppress(OSError), open(feed, "wb") as pipe:
            pipe.write(text.encode())

    def read():  # type: ignore[no-untyped-def]
        while not printed.endswith(end) and len(printed) <= _MOST:
            printed.extend(os.read(drain, 1 << 16))
        os.close(drain)  # who prints more is told so by a broken pipe

    threads = [threading.Thread(target=work, daemon=True) for work in (write, read)]
    for thread in threads:
        thread.start()
    os.dup2(source, 0)
    os.dup2(sink, 1)
    os.close(source)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout)
    atexit._clear()
    try:
        with contextlib.suppress(SystemExit):
            _start()
        for thread in threading.enumerate():
            if (
                thread not in threads
                and thread is not threading.current_thread()
                and not thread.daemon
            ):
                thread.join()
        atexit._run_exitfuncs()
        sys.modules.pop(
            "__main__", None
        )  # files that it left open are written out, as at the end of a process
        gc.collect()
        for stream in {sys.stdout, sys.__stdout__}:
            stream.flush()
        with contextlib.suppress(OSError):
            os.write(sink, end)
        threads[1].join()
    except OSError:
        if len(printed) <= _MOST:
            raise
    if not printed.endswith(end):
        raise OSError(f"printed more than {_MOST >> 20} MiB")
    return printed[: -len(end)].decode("utf-8", "replace")
