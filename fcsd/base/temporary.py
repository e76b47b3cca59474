"""Temporary folders and files with an owner: what a killed process leaves behind, the
next process removes.

The name has the host and a random part, so that no two jobs ever share one. A lock on
it says whether its owner lives: the system gives it back when the process ends, however
it does.

Not covered: what was left on another host, or on a file system that knows no locks
(some network ones): it stays.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Make a temporary folder on the disk of `path`; it, or a file in it, can be
    renamed to `path`.

    What was not renamed is removed at the end.
    """
    with _owned(path.parent, f".{path.name}", 0o777) as made:
        yield made


@contextlib.contextmanager
def file_beside(path: Path) -> Iterator[Path]:
    """Make an empty temporary file on the disk of `path`, to be renamed to `path`; then
    there is nothing to remove.
    """
    with _owned(path.parent, f".{path.name}", 0o666, is_file=True) as made:
        yield made


@contextlib.contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """Make a folder in the system's temporary directory that nobody else can read; it
    is removed at the end.

    name: begins with `fcsd-`, by which `sweep_scratch` finds the folders of killed
    processes.
    """
    with _owned(Path(tempfile.gettempdir()), name, 0o700) as made:
        yield made


def sweep_scratch() -> None:
    """Remove the scratch folders whose owners were killed."""
    sweep(Path(tempfile.gettempdir()), "fcsd-")


@contextlib.contextmanager
def _owned(
    folder: Path, name: str, mode: int, *, is_file: bool = False
) -> Iterator[Path]:
    sweep(folder, f"{name}.")
    owner, descriptor = os.getpid(), None
    while descriptor is None:
        made = folder / f"{name}.{_host()}-{owner}-{secrets.token_hex(4)}.tmp"
        made.touch(mode, exist_ok=False) if is_file else made.mkdir(mode)
        descriptor = _locked(made)
    _LOCKS.add(descriptor)
    try:
        yield made
    finally:
        if os.getpid() == owner:  # a fork that ends here leaves it to its parent
            _LOCKS.discard(descriptor)
            os.close(descriptor)
            _remove(made)


def _remove(made: Path) -> None:
    if made.is_dir():
        shutil.rmtree(made, ignore_errors=True)
    else:
        made.unlink(missing_ok=True)


_LOCKS: set[int] = set()  # descriptors that hold this process's locks


def _leave_locks() -> None:
    while _LOCKS:
        os.close(_LOCKS.pop())


# A worker that outlives its killed parent must not keep the lock.
os.register_at_fork(after_in_child=_leave_locks)


def _locked(made: Path) -> int | None:
    """Lock what has just been made; None where another process has taken it for a dead
    one's before that.
    """
    try:
        descriptor = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = not made.exists()
    except BlockingIOError:
        taken = True
    except OSError:  # no locks here, so that nobody sweeps either
        taken = False
    if not taken:
        return descriptor
    os.close(descriptor)
    return None


def sweep(folder: Path, start: str) -> None:
    """Remove files and folders of ended processes of this host from `folder`, if their
    names begin with `start`.
    """
    owned = re.compile(
        rf"{re.escape(start)}(.*\.)?{_host()}-\d+-[0-9a-f]{{8}}\.(tmp|old)"
    )
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if owned.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_if_dead(folder / name)


def _remove_if_dead(path: Path) -> None:
    descriptor = os.open(
        path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    finally:
        os.close(descriptor)


def replace_folder(source: Path, destination: Path) -> None:
    """Rename `source` to `destination`, moving an existing `destination` out of the way first."""
    old = _retired(destination)
    os.replace(source, destination)
    shutil.rmtree(old, ignore_errors=True)


def discard_folder(folder: Path) -> None:
    """Remove a folder, which loses its name first: a process that is killed here leaves
    it whole, or not at all.

    What killed processes left of it goes, too.
    """
    shutil.rmtree(_retired(folder), ignore_errors=True)
    sweep(folder.parent, f".{folder.name}.")


def _retired(folder: Path) -> Path:
    """Give a folder, if it is there, a name by which `sweep` finds it, and return that."""
    old = folder.with_name(
        f".{folder.name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.old"
    )
    if folder.exists():
        os.replace(folder, old)
    return old


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"
