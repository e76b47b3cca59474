"""Start and end a server, and measure it once. Every program runs below `guard.py`."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.writing import scratch_folder
from fcsd_bench import guard
from fcsd_bench.engines import Program
from fcsd_bench.settings import Shape

START_S = 3600.0
"""Seconds that a server may take to start: it may load several hundred GB of weights
from a network disk.
"""
NAME = "fcsd-bench"
"""The model name of every server, so that all get the same requests."""
FIGURES = (
    "completed",
    "failed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(
        f"{kind}_{of}_ms"
        for of in ("ttft", "tpot", "itl")
        for kind in ("mean", "median", "std", "p99")
    ),
)
"""The figures taken from the JSON of the engine's benchmark, with vLLM's names."""


class NotServed(Exception):
    """A server did not start, or failed; `reason` comes from the engine, `tail` has the
    last lines of its log.
    """

    def __init__(self, reason: str, tail: str):
        super().__init__(reason)
        self.reason, self.tail = reason, tail


class Server(NamedTuple):
    """A server that answers."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float


@contextlib.contextmanager
def running_server(
    program: Program,
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    signs: Sequence[str] = (),
    other_nodes: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Server]:
    """Start a server and wait until it answers; leaving the block ends all its
    processes.

    Args:
        words: the model and the flags.
        environment: variables added to this process's environment.
        log: file for its output; other machines' logs are in the same folder.
        signs: patterns of log lines that report that the engine continues without a
        requested feature. other_nodes: address of each further machine of the server ->
        its model and flags; these get no requests.

    Raises:
        NotServed: it ended before it answered, its log matched one of `signs`, or it
            did not answer within `START_S`.
    """
    port, begun = free_port(), time.monotonic()
    command = [
        program.path,
        "serve",
        *words,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with contextlib.ExitStack() as running:
        process = running.enter_context(
            _guarded([*command, "--served-model-name", NAME], environment, log)
        )
        parts = {log: process}
        for node, flags in (other_nodes or {}).items():
            node_log = log.with_suffix(f".{node}.log")
            parts[node_log] = running.enter_context(
                _guarded(
                    [program.path, "serve", *flags],
                    environment,
                    node_log,
                    (node, program.python),
                )
            )
        # Until it answers, look for a feature that vLLM dropped, and for a machine
        # whose process ended.
        while not _answers(port):
            texts = {
                file: file.read_text(encoding="utf-8", errors="replace")
                for file in parts
            }
            text = texts[log]
            sign_line = next(
                (line for line in text.splitlines() if _matches(line, signs)), None
            )
            if sign_line is not None:
                raise NotServed(_PREFIX.sub("", sign_line).strip(), tail_of(text))
            for file, part in parts.items():
                if part.poll() is not None:
                    raise NotServed(reason_of(texts[file]), tail_of(texts[file]))
            if (waited := time.monotonic() - begun) > START_S:
                raise NotServed(f"did not answer within {START_S:.0f} s", tail_of(text))
            # Short waits at first, so that small models on a CPU are not delayed.
            time.sleep(min(1.0, 0.1 + waited / 100))
        yield Server(port, process, log, time.monotonic() - begun)


def measure(
    program: Program,
    server: Server,
    tokenizer: str,
    shape: Shape,
    output_tokens: int,
    seed: int,
    *extra_flags: str,
) -> dict[str, Any]:
    """Return the figures of one run of the engine's benchmark: all requests at once,
    after an equal warm-up.

    Args:
        tokenizer: the model whose tokenizer makes the prompts.
        shape: prompts and their length.
        output_tokens: length of an answer.
        seed: of the prompts.
        extra_flags: flags without a value.

    Raises:
        NotServed: the server ended, or refused requests.
        UserError: the benchmark itself failed.
    """
    requests = shape.requests
    with scratch_folder("fcsd-bench") as folder:
        # Options that both engines' clients share; all else comes from `engine.client`.
        chosen = {
            "host": "127.0.0.1",
            "port": server.port,
            "model": tokenizer,
            "served-model-name": NAME,
            "num-prompts": requests,
            "max-concurrency": requests,
            "ready-check-timeout-sec": 0,
            "random-input-len": shape.prompt_tokens,
            "random-output-len": output_tokens,
            "seed": seed,
        }
        engine, result, log = program.engine, folder / "result.json", folder / "log"
        words = [
            *engine.client(program, requests, output_tokens, result),
            "--disable-tqdm",
            *extra_flags,
        ]
        words += [
            str(word) for name, value in chosen.items() for word in (f"--{name}", value)
        ]
        # A client would wait for a server that has ended, so both are watched.
        with _guarded(words, {}, log) as process:
            while process.poll() is None and server.process.poll() is None:
                time.sleep(0.05)
        text = server.log.read_text(encoding="utf-8", errors="replace")
        if server.process.poll() is not None:
            raise NotServed(
                f"ended during the measurement: {reason_of(text)}", tail_of(text)
            )
        # The client's own log, which is deleted with the folder.
        printed = log.read_text(encoding="utf-8", errors="replace")
        if process.returncode != 0 or not result.is_file():
            raise UserError(
                f"the benchmark of {engine.title} {program.version} failed:"
                f" {reason_of(printed)}; it printed last: {tail_of(printed)}"
            )
        figures = read_json(result)
    # Fewer requests are a lighter load.
    if figures.get("completed") != requests:
        reason = f"{figures.get('completed')} of {requests} requests were answered"
        raise NotServed(reason, tail_of(text))
    if empty := figures.get("ttfts", []).count(
        0
    ):  # SGLang's client takes the time of the first token that has text
        raise NotServed(
            f"{empty} of {requests} answers had no text, so the time to their first"
            " token is unknown",
            tail_of(text),
        )
    figures = {
        "failed": 0,
        **{vllm_name: figures.get(name) for vllm_name, name in engine.renamed.items()},
        **figures,
    }
    if missing := [name for name in FIGURES if figures.get(name) is None]:
        raise UserError(
            f"the benchmark of {engine.title} {program.version} did not report"
            f" {missing[0]}; use a verified version"
        )
    return {name: figures[name] for name in FIGURES}


@contextlib.contextmanager
def _guarded(
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    remote: tuple[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with its output in a file; end it when the block or this process
    ends.

    remote: address and Python of another machine, reachable by ssh without a password.
    """
    guarded = [sys.executable, "-S", guard.__file__, *words]
    if remote is not None:
        node, python = remote
        assignments = [f"{name}={value}" for name, value in environment.items()]
        source = Path(guard.__file__).read_text(encoding="utf-8")
        # The guard's source travels on the command line: fcsd need not be installed
        # there.
        remote_command = shlex.join(["env", *assignments, python, "-c", source, *words])
        guarded = ["ssh", "-T", "-o", "BatchMode=yes", node, remote_command]
    with log.open("wb") as file:
        process = subprocess.Popen(
            guarded,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C goes to this process, which then ends the program
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        # The guard ends the program when its standard input closes.
        process.stdin.close()
        process.wait(3 * guard.PATIENCE_S)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/health", timeout=5
        ) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# (EngineCore pid=7) ERROR 11-22 14:16:33 [core.py:871] ValueError: …, [2026-11-23
# 20:17:51 TP0] ValueError: …
_PREFIX = re.compile(
    r"^\s*(?:\[\d{4}-\d\d-\d\d [^\]]*\] )?"
    r"(?:\([\w ]*?(?: ?pid=\d+)?\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\]"
    r" )?)?"
)
_ERROR = re.compile(
    r"^(?:(?:vllm|vllm serve|sglang):"
    r" error|[\w.]*(?:Error|Exception|Refused|Interrupt)): \S"
)
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|See"
    r" (stack|root)"
)
_WRAPPED = re.compile(r"\d+ validation errors? for ")


def reason_of(text: str) -> str:
    """Return the error in a log that caused all others, or the last line if there is no
    error.
    """
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    for index, line in enumerate(lines):
        if _ERROR.match(line) and not _CONSEQUENCE.search(line):
            if _WRAPPED.search(line):  # pydantic gives the reason in the next line
                line = lines[index + 1] if index + 1 < len(lines) else line
            return re.sub(r" \[type=.*", "", line)[:500]
    return next((line[:500] for line in reversed(lines) if line), "it printed nothing")


def tail_of(text: str) -> str:
    """Return the last five lines of a log, joined."""
    lines = [
        _PREFIX.sub("", line).strip() for line in text.splitlines() if line.strip()
    ]
    return " / ".join(lines[-5:])[-1000:]


def _matches(line: str, signs: Sequence[str]) -> bool:
    return any(re.search(sign, line) for sign in signs)
