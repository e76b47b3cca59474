"""Temporary folders and files with an owner: those of a killed process are removed by
the next one.

A name contains the host and a random part, so that no two jobs ever share one. A lock
on the folder or file shows whether its owner is alive: the system releases it when the
process ends, even if it is killed.

Not covered: files left by another host, or on a file system without locks (some
network ones); they stay.
"""

import contextlib
import errno
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
    """Make a temporary folder on the disk of `path`, so that it, or a file in it, can
    be renamed to `path`.

    Files that were not renamed are removed at the end.
    """
    with _owned(path.parent, f".{path.name}", 0o777) as temporary:
        yield temporary


@contextlib.contextmanager
def file_beside(path: Path) -> Iterator[Path]:
    """Make an empty temporary file on the disk of `path`, to be renamed to `path`;
    otherwise it is removed at the end.
    """
    with _owned(path.parent, f".{path.name}", 0o666, is_file=True) as temporary:
        yield temporary


@contextlib.contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """Make a folder in the system's temporary directory that nobody else can read; it
    is removed at the end.

    name: must begin with `fcsd-`, by which `sweep_scratch` finds the folders of killed
    processes.
    """
    with _owned(Path(tempfile.gettempdir()), name, 0o700) as temporary:
        yield temporary


def sweep_scratch() -> None:
    """Remove the scratch folders whose owners were killed."""
    sweep(Path(tempfile.gettempdir()), "fcsd-")


@contextlib.contextmanager
def _owned(
    folder: Path, name: str, mode: int, *, is_file: bool = False
) -> Iterator[Path]:
    sweep(folder, f"{name}.")
    owner, descriptor = os.getpid(), None
    # Between making it and locking it, another process may sweep it: then try another
    # name.
    while descriptor is None:
        temporary = folder / f"{name}.{_host()}-{owner}-{secrets.token_hex(4)}.tmp"
        temporary.touch(mode, exist_ok=False) if is_file else temporary.mkdir(mode)
        descriptor = _locked(temporary)
    _LOCKS.add(descriptor)
    try:
        yield temporary
    finally:
        # A forked child that leaves this block must not remove its parent's folder.
        if os.getpid() == owner:
            _LOCKS.discard(descriptor)
            os.close(descriptor)
            _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_LOCKS: set[int] = set()  # descriptors that hold this process's locks


def _leave_locks() -> None:
    while _LOCKS:
        os.close(_LOCKS.pop())


# A worker that outlives its killed parent must not keep the lock.
os.register_at_fork(after_in_child=_leave_locks)


def _locked(path: Path) -> int | None:
    """Lock a folder or file that has just been made; None where another process has
    swept it as a dead one's in between.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The sweeper may have removed it between our open and our lock.
        is_swept = not path.exists()
    except BlockingIOError:
        is_swept = True
    except OSError:  # a file system without locks, where nobody can sweep either
        is_swept = False
    if not is_swept:
        return descriptor
    os.close(descriptor)
    return None


def sweep(folder: Path, start: str) -> None:
    """Remove from `folder` the files and folders of ended processes of this host whose
    names begin with `start`.
    """
    # Only names with this host's hash: a lock of another host may be invisible here.
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
        # A living owner holds the lock: flock raises, and the path stays.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    finally:
        os.close(descriptor)


def replace_folder(source: Path, destination: Path) -> None:
    """Rename `source` to `destination`, moving an existing `destination` out of the way
    first; it is removed once the new name is on the disk.
    """
    old = _retired(destination)
    os.replace(source, destination)
    flush(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file to the disk, or the names in a folder, so that they are there after
    the machine has gone down.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot flush a folder.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Flush a folder, and all files and folders in it."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            flush(path)


def discard_folder(folder: Path) -> None:
    """Remove a folder, renaming it first: a process that is killed meanwhile leaves it
    complete or gone under its name, never half removed.

    Its remains from killed processes are also removed.
    """
    shutil.rmtree(_retired(folder), ignore_errors=True)
    sweep(folder.parent, f".{folder.name}.")


def _retired(folder: Path) -> Path:
    """Rename a folder, if it exists, to a name that `sweep` finds, and return that
    path.
    """
    old = folder.with_name(
        f".{folder.name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.old"
    )
    if folder.exists():
        os.replace(folder, old)
    return old


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"
