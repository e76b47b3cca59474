"""Read, write and hash files, so that nothing half-written stays under a final name,
and find the data that ships with fcsd.
"""

import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fcsd.base.errors import SCHEME, Rule, UserError, one_line, refuse
from fcsd.base.temporary import beside, file_beside, replace_folder

_FLOAT = "__float__"
# The hint on a damaged file that fcsd itself wrote.
_OURS = "remove the folder to run its stage again"
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


def read_text(path: Path, expected: str = "a text file", hint: str = "") -> str:
    """Read a text file.

    expected: the kind of file that the caller needs, with its article, for errors.
    hint: for errors, what to do if the file is missing.

    Raises:
        UserError: there is no such file, it cannot be read, or holds no text.
    """
    advice = hint and f"; {hint}"
    try:
        check_regular(path, hint)
        # Windows editors begin a file with a byte order mark, which is no text.
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{advice}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, {expected} is needed{advice}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file{advice}") from None
    except UnicodeEncodeError:
        raise UserError(f"{path!r}: no file can have this name{advice}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path, hint: str = "") -> None:
    """Refuse a path whose reading would block or never end, before it is opened.
    Folders and missing paths pass.

    Raises:
        UserError: the path is a pipe, a socket or a device, or a link to one.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):  # opening the file gives the better error
        return
    if kind is not None:
        raise UserError(
            f"{path}: is {kind}, a regular file is needed{hint and f'; {hint}'}"
        )


def check_is_file(path: Path) -> None:
    """Raise UserError where a path is not that of a regular file."""
    check_regular(path)
    if not path.is_file():
        problem = "is a folder, a file is needed" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {problem}")


def read_json(
    path: Path, hint: str = _OURS, keys: Collection[str] | None = None
) -> Any:
    """Parse a JSON file.

    hint: what to do where the file is damaged or holds something else. keys: the file
    must hold an object with at least one of these keys; empty: any object; None: any
    value.

    Raises:
        UserError: as `read_text`; the file holds no JSON, or something else.
    """
    try:
        value = parse_json(
            read_text(path, "a JSON file", "" if hint == _OURS else hint)
        )
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({one_line(error)}); {hint}") from None
    is_object = isinstance(value, dict)
    # Refuse another tool's file now: a missing key would fail later without its name.
    if keys and not (is_object and any(key in value for key in keys)):
        raise UserError(
            f"{path}: holds something else (no {' or '.join(keys)}); {hint}"
        )
    if keys is not None and not is_object:
        raise UserError(
            f"{path}: a JSON object is needed, got {type(value).__name__}; {hint}"
        )
    return value


def encoded_floats(value: Any) -> Any:
    """Return a value of a config in which numbers that JSON does not have are spelled
    as transformers spells them: `{"__float__": "Infinity"}`.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: json.dumps(value)}
    if isinstance(value, list):
        return [encoded_floats(item) for item in value]
    if isinstance(value, dict):
        return {key: encoded_floats(item) for key, item in value.items()}
    return value


def decoded_floats(value: Any) -> Any:
    """Return a value of a config with the numbers that `encoded_floats` spells."""
    if isinstance(value, list):
        return [decoded_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    return {key: decoded_floats(item) for key, item in value.items()}


def read_unmarked_json(path: Path, hint: str) -> dict[str, Any]:
    """Parse a JSON object that transformers reads, too: it refuses a byte order mark.

    Raises:
        UserError: as `read_json`; the file begins with a byte order mark.
    """
    value: dict[str, Any] = read_json(path, hint, keys=())
    with path.open("rb") as stream:
        if stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            raise UserError(
                f"{path}: begins with a byte order mark, with which transformers does"
                " not read it; save it as UTF-8 without one"
            )
    return value


def read_checkpoint_json(file: Path) -> dict[str, Any]:
    """Return a JSON object from a file of a checkpoint; infinite numbers are spelled as
    in `encoded_floats`, so that the object can be written as JSON.
    """
    hint = "make sure that this folder is a complete Hugging Face checkpoint, and fetch the file again"
    encoded: dict[str, Any] = encoded_floats(read_unmarked_json(file, hint))
    if nan_key := _not_a_number(encoded):
        raise UserError(f"{file}: {nan_key} is NaN, a number is needed; {hint}")
    return encoded


def _not_a_number(value: Any, key_path: str = "") -> str | None:
    """Return the dotted key of the first NaN; infinite numbers are in published
    configs, and mean something.
    """
    if value == _NAN:
        return key_path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    nan_keys = (
        _not_a_number(inner, f"{key_path}.{key}" if key_path else str(key))
        for key, inner in items
    )
    return next(filter(None, nan_keys), None)


_NAN = encoded_floats(math.nan)


DEEPEST = 100
"""Levels to which data in JSON or YAML may be nested: any later traversal of them ends.
"""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError, also for data that are nested deeper than
    `DEEPEST` levels.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return value
    raise ValueError(f"nested deeper than {DEEPEST} levels")


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


def home(path: str | Path) -> Path:
    """Return a path with `~` and `~user` replaced by the home folder; an unknown user's
    stays as it is, where `Path.expanduser` would raise.
    """
    return Path(os.path.expanduser(path))


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
# Bytes that `fcsd.base.temporary` and suffixes such as `.partial` add to a name.
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


_FILES: tuple[Rule, ...] = (
    (lambda path, _: path.is_dir(), "{0}: is a folder; name the file to write"),
    (
        lambda _, parent: not parent.is_dir(),
        "{0}: is in a folder that does not exist; name the file to write",
    ),
    (
        lambda _, parent: _why_not_writable(parent),
        lambda path, parent: (
            f"{path}: its folder is not writable ({_why_not_writable(parent)}); name"
            " another place"
        ),
    ),
)
"""Of the path of a new file, and its folder."""


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
    refuse(*_FILES, of=(path, path.absolute().parent))
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
        if not replaces and (
            path.is_symlink() or (path.exists() and not path.is_dir())
        ):
            raise UserError(
                f"{path}: exists and is not a folder; choose another destination"
            )
        if not replaces and path.is_dir() and not is_empty(path):
            raise UserError(
                f"{path}: exists and is not empty; choose another destination or remove"
                " it first"
            )
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


def safetensors_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the tensors in the header of a safetensors file, and the offset of their
    data.
    """
    header, begin = _whole_header(file)
    # Free text of whoever wrote the file, and no tensor.
    header.pop("__metadata__", None)
    return header, begin


def safetensors_metadata(file: Path) -> Any:
    """Return the free text in the header of a safetensors file."""
    return _whole_header(file)[0].get("__metadata__")


def _whole_header(file: Path) -> tuple[dict[str, Any], int]:
    check_regular(file)
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = parse_json(stream.read(size))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, 8 + size


_KNOWN_FILES: dict[tuple[int, ...], str] = {}  # state of a file -> its SHA-256


def file_fingerprint(path: Path) -> str:
    """Hash one file with SHA-256, once in a process unless its size, time or inode
    changes. Hard links count as one file.
    """
    state = file_state(path)
    if state not in _KNOWN_FILES:
        _KNOWN_FILES[state] = file_sha256(path)
    return _KNOWN_FILES[state]


def file_state(path: Path) -> tuple[int, ...]:
    """Return a key that changes whenever a file is written: its device, inode, size and
    time.
    """
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def safetensors_head(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the beginning of a safetensors file: the length of its header, and the
    header in JSON, padded so that the data begin at a multiple of 8 bytes.

    tensors: (name, dtype, shape, number of bytes) in the order of the data.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        begin, end = end, end + num_bytes
        header[name] = {
            "dtype": dtype,
            "shape": [*shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_sha256(path: Path) -> str:
    """Hash one file with SHA-256; raises UserError as `check_regular`."""
    check_regular(path)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_PACKAGE = Path(__file__).resolve().parents[1]


def data_dir(name: str) -> Path:
    """Find the shipped folder `name` (eval, recipes, configs), inside an installed
    wheel or beside the package in a checkout.
    """
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
