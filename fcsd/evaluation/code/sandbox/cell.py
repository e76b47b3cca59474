"""The enclosure of one job after another. Loaded by `server.py`, after the layers;
standard library only.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from typing import Any

layers: Any = sys.modules.get("fcsd_sandbox_layers")  # as the server has loaded them


class Cell:
    """The enclosure of one job after another: a folder that is made for the job and
    removed with it, file rules, limits.

    The server keeps only the capability to mount folders; a job's processes keep none.
    """

    def __init__(
        self, config: dict[str, Any], namespaces: list[str], modules: str | None
    ):
        self.memory_bytes, self.disable = config["memory_bytes"], config["disable"]
        self._base = self.folder = config["folder"]
        self._mounts = (
            "user" in namespaces
            and "scratch" not in self.disable
            and layers.enter_mounts(self._base)
        )
        rules = None if "landlock" in self.disable else layers.FileRules(modules)
        self._rules = rules if rules and rules.abi else None
        self._ruleset: int | None = None
        self._count = 0
        try:
            self._events: int | None = os.open(
                "/proc/vmstat", os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError:
            self._events = None
        self._num_oom_kills, self._counted = self._oom_kills(), time.monotonic()
        if "pid" in namespaces:
            layers.limit_processes()
        # The kernel counts them by user and user namespace.
        self._num_threads = layers.MAX_THREADS + (
            0 if "user" in namespaces else layers.count_threads()
        )
        self._privileges = layers.forbid_privileges()
        layers.hold_capabilities(layers.CAP_SYS_ADMIN if self._mounts else 0)
        self.held: dict[str, bool] = {}  # layers that are active in a job's processes

    def report(self) -> dict[str, Any]:
        """Apply the layers to a process like a job's, and describe the active ones."""
        read, write = os.pipe()
        # Layers cannot be taken off again, so a child tries them on.
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, json.dumps(self.enter(60)).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            held = pipe.read()
        os.waitpid(pid, 0)
        if not held:
            raise OSError("a process could not be confined to the sandbox")
        self.held = json.loads(held)
        landlock = self._rules.abi if self._rules and self.held["landlock"] else 0
        scratch = "none" if landlock else "unlimited"
        if self._mounts:
            scratch = "tmpfs"
        return {
            "landlock_abi": landlock,
            "no_capabilities": self.held["capabilities"],
            "rlimits": self.held["rlimits"],
            "scratch": scratch,
            "writes_restricted": landlock > 0,
        }

    def prepare(self) -> None:
        """Make the folder of the next job, and the rules that open it; OSError where
        the machine cannot.
        """
        if self._mounts:
            layers.mount_scratch(self.folder)
        elif self._rules is None:
            # Nothing keeps programs from writing where they like. A new name each time:
            # one may resist its removal.
            self._count += 1
            self.folder = os.path.join(self._base, f"job{self._count}")
            os.mkdir(self.folder, 0o700)
        if self._rules is not None:
            self._ruleset = self._rules.ruleset(self.folder if self._mounts else None)
        os.environ.update(HOME=self.folder, TMPDIR=self.folder)
        if time.monotonic() > self._counted + 1:
            self._num_oom_kills, self._counted = self._oom_kills(), time.monotonic()

    def enter(self, cpu_s: int) -> dict[str, bool]:
        """Confine this process for good, as a process of a job; return which layers
        hold.
        """
        os.chdir(self.folder)
        rules = self._rules
        ruleset = self._ruleset
        limits = (self.memory_bytes, cpu_s, self._num_threads)
        return {
            "rlimits": "rlimits" not in self.disable
            and layers.limit_resources(*limits),
            "landlock": rules is not None
            and ruleset is not None
            and rules.restrict(ruleset),
            "capabilities": self._privileges and layers.hold_capabilities(0),
            "seccomp": "seccomp" not in self.disable
            and layers.forbid_system_calls(job=True),
        }

    def end(self) -> None:
        """Remove the folder of a job whose processes have ended, with all its files."""
        if self._ruleset is not None:
            os.close(self._ruleset)
            self._ruleset = None
        if self._mounts:
            layers.unmount_scratch(self.folder)
        elif self._rules is None:
            with contextlib.suppress(RecursionError):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _oom_kills(self) -> int | None:
        """Read how many processes the kernel has ended because the machine had no
        memory; None: it does not say.
        """
        if self._events is None:
            return None
        _, name, fields = os.pread(self._events, 1 << 16, 0).partition(b"\noom_kill ")
        return int(fields.split(None, 1)[0]) if name else None

    def out_of_memory(self) -> bool | None:
        """Tell whether the machine has run out of memory since the job began; None
        where that is not known.
        """
        num_oom_kills = self._oom_kills()
        if num_oom_kills is None or self._num_oom_kills is None:
            return None
        return num_oom_kills > self._num_oom_kills
