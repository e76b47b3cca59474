"""The checkpoints of a run: which there are, whether each is whole, and from which one to continue.

A checkpoint is written beside and renamed, so that a process that is killed leaves none that is half-written. What is
left is the machine that goes down, or a disk that loses something: files are on the disk before the rename, their sizes
are noted with them (`files.json`), and compared before a run continues from them.

Not covered: a file whose bytes changed and whose size did not.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from fcsd.errors import UserError
from fcsd.files import read_json, write_json

GUARD_FILE = "safety.json"  # the guard's state, in each checkpoint
STOPPER_FILE = "early_stopping.json"  # in each checkpoint of a run with early stopping
_FILES = "files.json"
_REWIND = "rewind.json"  # beside the checkpoints: to which one a run went back, and the guard's state then


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints below `folder`, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint was written behind."""
    return int(checkpoint.name.split("-")[1])


def note_files(checkpoint: Path) -> None:
    """Bring the files of a checkpoint to the disk and note their sizes, before it is renamed."""
    sizes = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[str(path.relative_to(checkpoint))] = path.stat().st_size
    write_json(checkpoint / _FILES, sizes)


def damage(checkpoint: Path) -> str | None:
    """Tell what is wrong with a checkpoint: `optimizer.pt has 100 of 2048 bytes`; None when nothing is."""
    try:
        sizes = read_json(checkpoint / _FILES)
    except UserError:
        return f"{_FILES} is missing or damaged"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    return None


def newest_usable(folder: Path) -> Path | None:
    """Return the checkpoint to continue from; None when there is none. One process calls this.

    A damaged one is set aside as `damaged-checkpoint-N`, and the one before it taken. One from behind the checkpoint to
    which a rewind went back is removed: the rewind was cut off before it had done so.

    Raises:
        UserError: there are checkpoints, and all are damaged.
    """
    _finish_rewind(folder)
    found = checkpoints(folder)
    damaged: list[tuple[Path, str]] = []
    while found:
        what = damage(found[-1])
        if what is None:
            for path, reason in damaged:
                print(f"{path}: is damaged ({reason}); continuing from {found[-1]}", file=sys.stderr)
                os.replace(path, path.with_name(f"damaged-{path.name}"))
            return found[-1]
        damaged.append((found.pop(), what))
    if damaged:
        path, reason = damaged[0]
        raise UserError(
            f"{path}: is damaged ({reason}), and there is no other checkpoint that is whole; remove {folder} to begin"
            " again"
        )
    return None


def note_rewind(checkpoint: Path, guard: dict[str, Any]) -> None:
    """Note to which checkpoint a run goes back and with which state of its guard; a run that is killed continues so."""
    write_json(checkpoint.parent / _REWIND, {"checkpoint": checkpoint.name, "guard": guard})
    _finish_rewind(checkpoint.parent)


def guard_state(checkpoint: Path) -> dict[str, Any]:
    """Return the guard's state with which a run continues from a checkpoint, which may have been rewound to."""
    rewind = _rewind(checkpoint.parent)
    if rewind is not None and rewind["checkpoint"] == checkpoint.name:
        state: dict[str, Any] = rewind["guard"]
        return state
    return read_json(checkpoint / GUARD_FILE)


def _rewind(folder: Path) -> dict[str, Any] | None:
    return read_json(folder / _REWIND) if (folder / _REWIND).is_file() else None


def _finish_rewind(folder: Path) -> None:
    rewind = _rewind(folder)
    if rewind is None:
        return
    step = int(rewind["checkpoint"].split("-")[1])
    for path in checkpoints(folder):
        later = step_of(path) > step and damage(path) is None
        if later and read_json(path / GUARD_FILE)["rewinds"] < rewind["guard"]["rewinds"]:
            remove(path)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; one that is cut off while it is removed is no checkpoint any more."""
    gone = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(checkpoint, gone)
    shutil.rmtree(gone)
