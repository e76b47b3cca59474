"""Kill a command at a place, not at a time: before and after each of its renames and
removals of files.

    moments = ...                                 # of a whole run, by `Places(folder, record=file)` in its process
    Places(folder, kill=moments[3]).watch()       # in the process of another run, which ends there with SIGKILL

A manifest is a rename, too: it is written under another name. A tree that is removed
has three moments: before it, when the first of its files is gone, and after it. Two
moments between which nothing in the folder has changed are one.
"""

import hashlib
import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RANDOM = re.compile(r"[0-9a-f]{8}-\d+-[0-9a-f]{8}")  # in the names of temporary files
# Times, and the hashes of files with times in them.
_TIMES = re.compile(
    rb'"(finished|seconds|[a-z_]*_s|date|sha256|[\w.-]+\.jsonl?)":'
    rb" [^,\n]*|\d{4}-\d\d-\d\dT[\d:.-]+"
)


class _Tree(threading.local):
    """The tree that this thread is removing."""

    name, num_removed = "", 0


class Places:
    """Watches the renames and removals below a folder, and beside it those of files
    whose names begin with the folder's name.

    kill: the moment, as a line of `record`, at which this process ends. record: a file
    that gets one line per moment.
    """

    def __init__(
        self, folder: Path, kill: str | None = None, record: Path | None = None
    ):
        self.folder, self.kill, self.record = folder, kill, record
        self._counts: Counter[str] = Counter()
        self._state = ""
        self._tree = _Tree()

    def watch(self) -> None:
        """Watch from now on, in this process."""
        for name in ("replace", "rename", "unlink", "remove", "rmdir"):
            self._wrap(os, name)
        self._wrap(shutil, "rmtree")

    def _wrap(self, module: Any, name: str) -> None:
        act: Callable[..., Any] = getattr(module, name)

        def watched(*paths: Any, **options: Any) -> Any:
            tree = self._tree
            if tree.name:
                act(*paths, **options)
                tree.num_removed += 1
                if tree.num_removed == 1:
                    self._pass(f"within {tree.name}")
                return None
            place = self._name(
                Path(paths[-1] if name in ("replace", "rename") else paths[0])
            )
            if place is None or options.get("dir_fd") is not None:
                return act(*paths, **options)
            verb = "rename to" if name in ("replace", "rename") else "removal of"
            self._pass(f"before {verb} {place}")
            if name == "rmtree":
                tree.name, tree.num_removed = f"{verb} {place}", 0
            try:
                result = act(*paths, **options)
            finally:
                tree.name = ""
            self._pass(f"after {verb} {place}")
            return result

        setattr(module, name, watched)

    def _name(self, path: Path) -> str | None:
        """Return a path as a moment names it; None for one that is not watched."""
        path = path.absolute()
        if path != self.folder and self.folder not in path.parents:
            return None
        return _RANDOM.sub("RANDOM", str(path.relative_to(self.folder)))

    def _pass(self, moment: str) -> None:
        self._counts[moment] += 1
        line = f"{moment}, {self._counts[moment]}"
        if line == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.record is not None and (state := state_of(self.folder)) != self._state:
            self._state = state
            with self.record.open("a") as file:
                file.write(f"{line}\n")


def state_of(folder: Path) -> str:
    """Hash the names and bytes of everything in a folder, except times and random
    names.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(
            _RANDOM.sub("RANDOM", str(path.relative_to(folder))).encode() + b"\0"
        )
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            digest.update(
                _TIMES.sub(b"", data)
                if path.suffix in (".json", ".jsonl", ".yaml")
                else data
            )
    return digest.hexdigest()
