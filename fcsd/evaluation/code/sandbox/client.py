"""The caller's side of one sandbox server: its process, the pipes to it, one job at a
time.

Standard library only, in this folder, except for fcsd's errors;
`fcsd.evaluation.code.scorer` has a pool of these.
"""

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fcsd.base.errors import ScorerError
from fcsd.base.writing import scratch_folder

_SERVER = Path(__file__).parent / "server.py"
# the server ends a job at _WAIT times its limit
_START_S, _GRACE_S, _WAIT = 60.0, 30.0, 3.0


class SandboxServer:
    """One sandbox server process and the pipes to it; one job at a time."""

    def __init__(self, memory_bytes: int, disable: Sequence[str]):
        self.memory_bytes, self.disable = memory_bytes, list(disable)
        self._number = 0
        try:
            self._spawn()
        except OSError as error:
            raise ScorerError(
                f"cannot start a sandbox server: {error}; the programs were not graded;"
                f" make sure that {tempfile.gettempdir()} has free space and that"
                " memory and processes suffice, then call again"
            ) from error

    def _spawn(self) -> None:
        self.broken = True  # not started, ended, or no longer answering
        self._layers: dict[str, Any] | None = None
        numpy = importlib.util.find_spec("numpy")
        with contextlib.ExitStack() as opened:
            self.folder = str(opened.enter_context(scratch_folder("fcsd-sandbox")))
            self._log = opened.enter_context(tempfile.TemporaryFile())
            config = {
                "folder": self.folder,
                "memory_bytes": self.memory_bytes,
                "disable": self.disable,
                "numpy": (
                    str(Path(numpy.origin).parents[1])
                    if numpy and numpy.origin
                    else None
                ),
            }
            # Nothing of this process reaches the server: no environment, no
            # descriptors, another working directory.
            one_thread = {
                f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")
            }
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_SERVER), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **one_thread},
                cwd=self.folder,
                bufsize=0,
            )
            self._opened = opened.pop_all()
        self.broken = False

    def ready(self) -> dict[str, Any]:
        """Read the layers of a started server."""
        if self._layers is None:
            self._layers = self._read(time.monotonic() + _START_S)["layers"]
        return self._layers

    def run(
        self,
        code: str,
        tests: Sequence[str],
        limit_s: float,
        names: Sequence[str] | None,
    ) -> dict[str, Any]:
        """Run one job and return the server's reply. names: as `Problem.names`."""
        self.ready()
        self._number += 1
        body = json.dumps({"code": code, "tests": list(tests), "names": names}).encode()
        message = memoryview(
            f"{self._number:016x}{len(body):016x}{round(limit_s * 1000):016x}".encode()
            + body
        )
        deadline = time.monotonic() + _WAIT * limit_s + _GRACE_S
        assert self._process.stdin is not None
        try:
            while message:
                message = message[self._process.stdin.write(message) or 0 :]
        except OSError:
            raise self._failure("accepts no more programs") from None
        outcome: dict[str, Any] | None = None
        while True:
            reply = self._read(deadline)
            if reply.get("job") != self._number:
                raise self._failure("answers for another program")
            if "clean" in reply:
                if outcome is None:
                    raise self._failure("gave no outcome")
                return outcome
            if reply.get("outcome") == "failure":
                self.broken = True
                return reply
            # The examiner may have replied in the moment in which the server gave it
            # up: the first counts.
            outcome = outcome or reply

    def _read(self, deadline: float) -> dict[str, Any]:
        size = int(self._read_exactly(16, deadline), 16)
        try:
            reply = json.loads(self._read_exactly(size, deadline))
        except ValueError:
            raise self._failure("wrote something that is not a reply") from None
        return dict(reply)

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd, parts = self._process.stdout.fileno(), b""
        while len(parts) < size:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([fd], [], [], remaining_s)[0]:
                raise self._failure("does not answer")
            part = os.read(fd, size - len(parts))
            if not part:
                raise self._failure("has ended")
            parts += part
        return parts

    def _failure(self, problem: str) -> ScorerError:
        """Build the error that says how the server ended; it is not used again."""
        self.broken = True
        status: Any = "running"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(2.0)
        self._log.seek(0)
        log = self._log.read().decode(errors="replace").strip().splitlines()
        return ScorerError(
            f"the sandbox server {problem} (exit status"
            f" {status}){': ' + log[-1] if log else ''}; the scorer failed and did not"
            " grade the programs; call again to restart it"
        )

    def stop(self) -> None:
        """End the server and all that runs in it, and remove its folder."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.terminate()  # the supervisor kills its server and cleans up
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._opened.close()
