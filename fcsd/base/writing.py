"""Write files and folders so that nothing half-written stays under a final name, and
refuse paths where nothing can be written before the work begins.

A temporary file or folder has an owner: those of a killed process are removed by the
next one. Its name contains the host and a random part, so that no two jobs ever share
one. A lock on the folder or file shows whether its owner is alive: the system releases
it when the process ends, even if it is killed.

Not covered: files left by another host, or on a file system without locks (some
network ones); they stay.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fcsd.base.errors import SCHEME, UserError


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


# Files that no user put into a folder: those of macOS, Windows, desktops and network
# disks, and the temporary files of a killed process.
_NOISE = re.compile(
    r"\.DS_Store|\._.*|\.localized|\.Spotlight-V100|\.Trashes|\.fseventsd|\.TemporaryItems|\.AppleDouble|\.apdisk"
    r"|Thumbs\.db|ehthumbs\.db|desktop\.ini|\$RECYCLE\.BIN|System Volume Information"
    r"|lost\+found|\.nfs[0-9a-f]+|\.fuse_hidden[0-9a-f]+|\.snapshots?|\.Trash-\d+|\.directory|@eaDir"
    r"|\..+\.(tmp|old)",
    re.IGNORECASE,
)
_CANNOT_WRITE = {
    errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG,
    errno.EISDIR,
}  # fmt: skip
# safetensors and torch.save report a failed write in words only.
_CANNOT_WRITE_WORDS = ("I/O error", "PytorchStreamWriter", "inline_container")


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, then rename it: readers see either the old
    file or the complete new one.
    """
    write_text(
        path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    )


def write_text(path: Path, text: str) -> None:
    """Write text under a temporary name, then rename it."""
    with writing(path), file_beside(path) as temporary:
        # A path that is not UTF-8 has lone surrogates; backslashreplace writes them as
        # `\\udc80`, which is also their escape in JSON.
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
        os.replace(temporary, path)


def is_noise(name: str) -> bool:
    """Tell whether no user put the file of this name there: a system's file, or a
    temporary file of a killed process.
    """
    return _NOISE.fullmatch(name) is not None


def is_empty(folder: Path) -> bool:
    """Tell whether a folder holds nothing, or nothing but noise (`is_noise`)."""
    return all(is_noise(path.name) for path in folder.iterdir())


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its folders, without noise (`is_noise`)."""
    for directory, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_noise(name)]
        paths = (Path(directory, name) for name in names if not is_noise(name))
        yield from (path for path in paths if path.is_file())


def is_address(text: str) -> bool:
    """Tell whether a text begins like an address, also as a path writes it:
    `s3://bucket`, `https:/host`.
    """
    return re.match(SCHEME, text, re.IGNORECASE) is not None


def _bytes_of_names(path: Path) -> list[bytes] | None:
    """Return the names in a path; None where one holds an incomplete character."""
    try:
        return [os.fsencode(part) for part in path.parts]
    except UnicodeEncodeError:
        return None


def _too_long(path: Path) -> tuple[str, int, int] | None:
    """Return the beginning of a name that is too long, its bytes and their limit."""
    *folders, last = _bytes_of_names(path) or [b""]
    # Results are written under a longer temporary name, so the last name must be
    # shorter.
    limits = [(name, _LONGEST_NAME) for name in folders]
    for name, limit in [*limits, (last, _LONGEST_NAME - _TEMPORARY_PART)]:
        if len(name) > limit:
            return f"{os.fsdecode(name[:30])}…", len(name), limit
    return None


def check_path(path: Path) -> None:
    """Refuse an impossible path of a result before the work that produces it.

    Raises:
        UserError: it is an address; a name in it is too long (the last one must leave
            room for a temporary name), or holds a NUL or an incomplete character.
    """
    if is_address(str(path)):
        raise UserError(f"{path}: is an address; give a path of this machine")
    if _bytes_of_names(path) is None:
        raise UserError(
            f"{str(path)!r}: holds an incomplete character; choose another name"
        )
    if "\0" in str(path):
        raise UserError(f"{str(path)!r}: holds a NUL character; choose another name")
    if (too_long := _too_long(path)) is not None:
        raise UserError(
            "the name {} has {} bytes, but at most {} are possible; choose a shorter"
            " one".format(*too_long)
        )


_LONGEST_NAME = 255  # bytes, of a Linux file system
# Bytes that a temporary name and suffixes such as `.partial` add to a name.
_TEMPORARY_PART = 55


def inside(folder: Path, name: str) -> Path:
    """Return the path of a name below a folder; raises UserError where the name is
    invalid or leads out of the folder.
    """
    path = folder / name
    check_path(path)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"{name!r}: leads out of the folder {folder}; name a file in it"
        )
    return path


def check_file_place(path: Path, read: Callable[[Path], Any]) -> None:
    """Refuse a path at which no result file can be written, before the work that
    produces it.

    read: a reader of the file's format, which refuses any other: fcsd never replaces a
    file that it did not write.

    Raises:
        UserError: the path is a folder or another kind of file; its parent does not
            exist or may not be written.
    """
    check_path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name the file to write")
    if not folder.is_dir():
        raise UserError(
            f"{path}: is in a folder that does not exist; name the file to write"
        )
    if reason := _why_not_writable(folder):
        raise UserError(
            f"{path}: its folder is not writable ({reason}); name another place"
        )
    if path.exists():
        try:
            # Only a file of the same kind may be replaced.
            read(path)
        except UserError:
            raise UserError(
                f"{path}: exists and is another kind of file; name another file, or"
                " remove it"
            ) from None


def check_folder_place(folder: Path, mark: str | None = None, kind: str = "") -> None:
    """Refuse a path at which no result folder can be made, before the work that
    produces it.

    mark: a file that every such folder of fcsd contains; a folder that holds something
    else but not this file is a stranger's, and is refused. None: the caller has checked
    the folder. kind: what such a folder is called in errors.

    Raises:
        UserError: the path or one above it is a file; a folder above may not be
            written; the folder is a stranger's.
    """
    check_path(folder)
    _check_place(folder, mark, kind)


def _check_place(folder: Path, mark: str | None, kind: str) -> None:
    """Refuse what `check_folder_place` refuses of a possible path."""
    # The folder itself or its nearest existing ancestor; lexists also finds a broken
    # link.
    above = next(
        part for part in (folder, *folder.absolute().parents) if os.path.lexists(part)
    )
    if mark is not None and _is_foreign(folder, mark):
        raise UserError(f"{folder}: exists and holds no {kind}; choose another folder")
    if not above.is_dir():
        raise UserError(
            f"{folder}: cannot be created, because {above} is not a folder; choose"
            " another output folder"
        )
    if above != folder and (reason := _why_not_writable(above)):
        raise UserError(
            f"{folder}: cannot be created, because {above} is not writable ({reason});"
            " choose another output folder"
        )


def _is_foreign(folder: Path, mark: str) -> bool:
    """Tell whether a folder holds something, but not the file of this name."""
    if not folder.is_dir():
        return folder.is_file()
    return not is_empty(folder) and not (folder / mark).exists()


def _why_not_writable(folder: Path) -> str:
    """Return why nothing can be made in a folder; "" where it can.

    It makes a temporary folder: permission bits do not tell of quotas or read-only
    mounts.
    """
    try:
        with beside(folder / "fcsd"):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; raises UserError as `check_folder_place` does,
    and for a full disk.
    """
    check_folder_place(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def check_is_new(path: Path) -> None:
    """Raise UserError where a path is that of anything but an empty folder."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(
            f"{path}: exists and is not a folder; choose another destination"
        )
    if path.is_dir() and not is_empty(path):
        raise UserError(
            f"{path}: exists and is not empty; choose another destination or remove it"
            " first"
        )


@contextlib.contextmanager
def new_folder(
    path: Path, mark: str | None = None, kind: str = "", *, replaces: bool = True
) -> Iterator[Path]:
    """Make a temporary sibling of `path` to write into; it becomes `path` when the
    block ends without an error, else it is removed.

    An existing `path` is replaced only at the end; if it is a link, the folder that it
    points to is replaced. mark, kind: as for `check_folder_place`. replaces: False
    refuses an existing `path` unless it is an empty folder, even one that another
    process makes in the meantime.

    Raises:
        UserError: the path has no name, the disk is full, or `check_folder_place`
            refuses the path.
    """
    check_path(path)
    if not path.name:  # '', '.' or '/'
        raise UserError(f"{str(path)!r}: is not the name of a new folder; choose one")
    # Renaming onto a link would replace the link, not the folder that it points to.
    if replaces and path.is_symlink():
        path = path.resolve()
    with writing(path):
        if not replaces:
            check_is_new(path)
        _check_place(path, mark, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as temporary:
            yield temporary
            if replaces:
                replace_folder(temporary, path)
            else:
                _take_place(temporary, path)


def _take_place(temporary: Path, path: Path) -> None:
    """Rename a folder to a name that is free, or that of an empty folder; the system
    does so in one step, and fails where another process was faster.
    """
    try:
        if path.is_dir() and is_empty(path):
            # rename replaces a folder only if it is truly empty.
            for noise in path.iterdir():
                noise.unlink() if not noise.is_dir() else shutil.rmtree(noise)
        os.rename(temporary, path)
    except OSError as error:
        # These three mean that something is at the path by now; any other error is a
        # real one.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise UserError(
            f"{path}: another process has created it in the meantime; choose another"
            " destination"
        ) from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the libraries' errors about a file that cannot be written (full disk, no
    permission) into a UserError of one line.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, OSError):
            expected = error.errno in _CANNOT_WRITE
        else:
            # safetensors and torch.save give no errno, only words.
            expected = any(words in str(error) for words in _CANNOT_WRITE_WORDS)
        if not expected:
            raise
        if isinstance(error, IsADirectoryError):
            raise UserError(
                f"{path}: is a folder, where fcsd writes a file; remove it, and run the"
                " command again"
            ) from error
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"{path}: could not be written ({reason}); fcsd removed the incomplete"
            " file: free some space and run the command again"
        ) from error


# Folders that this process works in -> the descriptor that holds the lock.
_HELD: dict[Path, int] = {}


def hold_folder(folder: Path) -> None:
    """Keep other processes out of `folder` until this one ends or calls
    `release_folder`.

    The lock is on the folder itself, so no lock file remains; the system releases it
    when the process ends, even if it is killed. File systems without locks (some
    network ones) give no protection.

    Raises:
        UserError: another process holds the folder.
    """
    folder = folder.resolve()
    if folder in _HELD:
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"{folder}: another process is using this folder; wait for it, end it, or"
            " choose another folder"
        ) from None
    except OSError:
        # a file system without locks
        os.close(descriptor)
        return
    _HELD[folder] = descriptor


def release_folder(folder: Path) -> None:
    """Release a folder that `hold_folder` holds; do nothing for any other."""
    if (descriptor := _HELD.pop(folder.resolve(), None)) is not None:
        os.close(descriptor)


def release_folders() -> None:
    """Release all folders that this process holds, at the end of its command."""
    for folder in list(_HELD):
        release_folder(folder)


# A worker that outlives its killed parent must not keep the lock.
os.register_at_fork(after_in_child=release_folders)
