"""Read local data sets without stale caches: always the bytes that are on disk now.

`datasets` (5.2) names the cache of a local folder after the folder's last name and its
README, not after its content: for two folders called `tiny-code`, or one whose files
have changed, it returns the rows that were read first.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fcsd.base.errors import UserError
from fcsd.base.files import check_regular, file_fingerprint
from fcsd.base.writing import scratch_folder

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Ending of a data file -> its format in `datasets`."""


def is_path(name: str) -> bool:
    """Tell the path of a file or folder from the id of a data set on the Hub, as far as
    the name alone shows it.
    """
    path = Path(name)
    return (
        path.suffix in FILE_FORMATS
        or path.is_absolute()
        or name.startswith((".", "~"))
        or name.count("/") > 1
    )


def data_fingerprint(location: str, revision: str | None = None) -> str:
    """Identify the bytes of a data set: a hash for local files, id and revision for the
    Hub.

    For a folder, it covers all that `datasets` may read: every file that is not hidden,
    but of README.md only the settings above the text.
    """
    path = check_data(location)
    if path.is_file():
        return file_fingerprint(path)
    if path.is_dir():
        digest = hashlib.sha256()
        # Sorted, because the order of a directory differs between file systems.
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path)
            hidden = any(
                part.startswith(".") or part == "__pycache__" for part in name.parts
            )
            if file.is_file() and not hidden:
                if file.name == "README.md":
                    fingerprint = _settings_fingerprint(file)
                else:
                    fingerprint = file_fingerprint(file)
                digest.update(
                    # The name belongs to the hash: it may decide the split of a file.
                    str(name).encode("utf-8", "surrogateescape")
                    + b"\0"
                    + fingerprint.encode()
                )
        return digest.hexdigest()
    return f"{location}@{revision or 'main'}"


def data_files(place: Path) -> list[Path]:
    """Return the files that `datasets` would read below a folder, sorted; of a file,
    itself.
    """
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    return [file for file in files if FILE_FORMATS.keys() & {*file.suffixes}]


def check_data(location: str) -> Path:
    """Refuse an empty name, which would be the current folder, and special files, as
    data or in a folder of data: reading them might wait forever or never end. Return
    the path of the data.
    """
    if not location.strip():
        raise UserError(
            f"data set {location!r}: is not a path; name a file, a folder, or a data"
            " set on the Hub"
        )
    path = Path(os.path.expanduser(location))
    for file in (path, *(path.rglob("*") if path.is_dir() else ())):
        check_regular(file, "remove it, or name other data")
    return path


def _settings_fingerprint(readme: Path) -> str:
    """Hash the settings between the --- lines of a README.md, which map files to
    configurations and splits.
    """
    head, *text = readme.read_bytes().split(b"\n---", 1)
    return hashlib.sha256(head if text and head.startswith(b"---") else b"").hexdigest()


@contextlib.contextmanager
def fresh_cache(location: str | Path) -> Iterator[None]:
    """Let `datasets` read a local `location` into a new cache in the block; for a hub
    id nothing changes.

    The cache is removed only when the process ends, because rows are memory-mapped and
    `map` writes beside them.
    """
    if not Path(location).exists():
        yield
        return
    import datasets

    earlier_cache = datasets.config.HF_DATASETS_CACHE
    # `datasets` reads this setting whenever it opens a data set.
    datasets.config.HF_DATASETS_CACHE = scratch()
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = earlier_cache


def scratch() -> Path:
    """Make a folder that is removed when the process ends."""
    return Path(tempfile.mkdtemp(dir=_folder()))


@functools.cache
def _folder() -> Path:
    # One parent folder for all caches of the process, so one removal suffices.
    until_the_end = contextlib.ExitStack()
    atexit.register(until_the_end.close)
    return until_the_end.enter_context(scratch_folder("fcsd-data"))


def making_of(*locations: str | None) -> str:
    """Return a hint at the command that makes the data of recipes/tiny, if the first of
    `locations` is one of them; "" for other data.

    locations: the path or the id of a data set, and folders that may hold it.
    """
    folders = [
        part[0]
        for location in locations
        if (part := re.match(r".*?tiny-data(?=/|$)", location or ""))
    ]
    # A data set of another name may be looked for in that folder, too; the command does
    # not make it.
    data_set = locations[0] or ""
    if not (data_set.startswith("fcsd/tiny-") or "tiny-data" in Path(data_set).parts):
        return ""
    return f"; `fcsd tiny-data {folders[0] if folders else 'OUT'}` makes it"
