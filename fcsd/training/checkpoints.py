"""The checkpoints of a run: list them, check that they are intact, and choose the one
to continue from.

    state-*.safetensors, optimizer.json   weights and optimiser (`fcsd.parallel.state`)
    scheduler.pt                          the schedule (`fcsd.training.checkpoint_writer`)
    rng_state.pth, or rng_state_R.pth     random generators, of each rank R (transformers)
    trainer_state.json                    steps, log, callbacks (`fcsd.training.resumable`)
    record.json                           settings and data (`fcsd.training.record`)
    safety.json                           the guard (`fcsd.training.safety`)
    balance.json                          the routers' biases, if the run balances loads
    early_stopping.json                   scores and best step, with early stopping
    files.json                            size and SHA-256 of each file above

A checkpoint is written under a temporary name and renamed, so that a killed process
leaves none that is half-written. A machine may still go down, or a disk lose or change
data. Therefore the files and their names are flushed to the disk before the rename, and
the new name after it; sizes and SHA-256 are recorded with the files (`files.json`), and
compared before a run continues. Every rank hashes the files that it has written, and
checks a share of them.

A kill may leave `checkpoint-being-written`, the one that was being written, and
`.checkpoint-N.old`, old ones that were being removed: the next `CheckpointWriter.write`
removes them. `newest_usable` sets a damaged one aside as `damaged-checkpoint-N`.

That record is sealed, and `owner` is what the checkpoint belongs to (as of
`fcsd.base.files.sealed`): for a recipe the identity of its stage, which continues
from no other checkpoint. None: a script's, whose settings and data are compared instead
(`fcsd.training.record`).
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import file_sha256, read_json, read_sealed, write_sealed
from fcsd.base.writing import flush, replace_folder
from fcsd.parallel.launch import ALONE, Ranks

GUARD_FILE = "safety.json"  # the guard's state, in each checkpoint
# the routers' biases, in each checkpoint of a run that balances loads
BALANCE_FILE = "balance.json"
STOPPER_FILE = "early_stopping.json"  # in each checkpoint of a run with early stopping
PARTIAL = "checkpoint-being-written"  # the folder of the one that is
_FILES = "files.json"


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints below `folder`, oldest first."""
    folders = [
        path
        for path in folder.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", path.name)
    ]
    return sorted(filter(Path.is_dir, folders), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def note_files(
    checkpoint: Path,
    ranks: Ranks,
    known_facts: Mapping[str, dict[str, Any]] | None = None,
    owner: Any = None,
) -> None:
    """Flush the files of a checkpoint to the disk and record their sizes and hashes,
    before it is renamed (`replace_folder`, which flushes the new name).

    known_facts: those of flushed files, recorded while writing. All ranks call this,
    when all files are written.
    """
    names = ranks.from_first(
        lambda: sorted(
            str(path.relative_to(checkpoint))
            for path in checkpoint.rglob("*")
            if path.is_file() and path.name != _FILES
        )
    )
    # The other files, of the Trainer and of the first rank, are dealt out to all ranks.
    facts = dict(known_facts or {})
    unknown = [name for name in names if name not in facts]
    ranks = replace(ranks, lockstep=False)  # no rank is in a pass
    for shares in ranks.share(
        lambda: {name: _facts(checkpoint / name) for name in ranks.deal(unknown)}
    ):
        facts |= shares
    if ranks.first:
        write_sealed(checkpoint / _FILES, {name: facts[name] for name in names}, owner)
        flush(checkpoint / _FILES)
        # Last the folders, which hold the names of the files.
        for path in (*checkpoint.rglob("*"), checkpoint):
            if path.is_dir():
                flush(path)


def _facts(path: Path) -> dict[str, Any]:
    """Flush a file to the disk and return its size and hash."""
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def damage(checkpoint: Path, ranks: Ranks = ALONE, owner: Any = None) -> str | None:
    """Describe the damage of a checkpoint, the same on all ranks: `scheduler.pt has 100
    of 2048 bytes`; None: it is intact.
    """
    ranks = replace(ranks, lockstep=False)  # no rank is in a pass
    reasons = ranks.share(lambda: _damage(checkpoint, ranks, owner))
    return next(filter(None, reasons), None)


def _damage(checkpoint: Path, ranks: Ranks, owner: Any) -> str | None:
    try:
        file_facts = _noted(checkpoint, owner)
    except UserError as error:
        return str(error)
    reasons = (
        _file_damage(checkpoint, name, *file_facts[name])
        for name in ranks.deal(sorted(file_facts))
    )
    return next(filter(None, reasons), None)


def _noted(checkpoint: Path, owner: Any) -> dict[str, tuple[int, str]]:
    """Return the recorded size and hash of each file of a checkpoint; UserError where
    the record is damaged, or has another owner.
    """
    try:
        record = read_sealed(checkpoint / _FILES, "", owner)
        return {
            name: (facts["bytes"], facts["sha256"]) for name, facts in record.items()
        }
    except (UserError, KeyError, TypeError, AttributeError):
        foreign = ", or of another training" if owner is not None else ""
        raise UserError(f"{_FILES} is missing or damaged{foreign}") from None


def _file_damage(
    checkpoint: Path, name: str, num_bytes: int, sha256: str
) -> str | None:
    path = checkpoint / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != num_bytes:
        return f"{name} has {path.stat().st_size} of {num_bytes} bytes"
    if file_sha256(path) != sha256:
        return f"{name} differs from what was written"
    return None


def best_step_of(checkpoint: Path, owner: Any) -> int | None:
    """Return the step whose weights a checkpoint names as the best; None where it names
    none.

    Raises:
        UserError: its record of them is damaged.
    """
    facts = _noted(checkpoint, owner).get(STOPPER_FILE)
    if facts is None:
        return None
    if (reason := _file_damage(checkpoint, STOPPER_FILE, *facts)) is not None:
        raise UserError(reason)
    step: int | None = read_json(checkpoint / STOPPER_FILE)["best_step"]
    return step


def set_aside(folder: Path) -> None:
    """Rename a damaged folder to `damaged-NAME`, so that no run continues from it; a
    folder of that name is replaced.
    """
    replace_folder(folder, folder.with_name(f"damaged-{folder.name}"))


def newest_usable(folder: Path, ranks: Ranks = ALONE, owner: Any = None) -> Path | None:
    """Return the checkpoint to continue from; None when there is none. All ranks call
    this.

    Damaged ones after it are set aside as `damaged-checkpoint-N`, and the first rank
    reports each; UserError where all are damaged.
    """
    # They are only set aside when an intact one is found: otherwise the error names
    # the newest where it is.
    damaged: list[tuple[Path, str]] = []
    for checkpoint in reversed(ranks.from_first(lambda: checkpoints(folder))):
        reason = damage(checkpoint, ranks, owner)
        if reason is None:
            for path, cause in damaged if ranks.first else []:
                print(
                    f"{path}: is damaged ({cause}); continuing from {checkpoint}",
                    file=sys.stderr,
                )
                set_aside(path)
            return checkpoint
        damaged.append((checkpoint, reason))
    if damaged:
        newest, reason = damaged[0]
        raise UserError(
            f"{newest}: is damaged ({reason}), and all other checkpoints are damaged,"
            f" too; remove {folder} to start again"
        )
    return None


def chosen_checkpoint(
    folder: Path, choice: str | bool | None, ranks: Ranks
) -> Path | None:
    """Return the checkpoint that the user wants to continue from; True: the newest one
    in `folder` that is intact.
    """
    if choice is None or choice is False:
        return None
    if choice is True:
        newest = newest_usable(folder, ranks)
        if newest is None:
            raise UserError(
                f"{folder}: no checkpoint to continue from; leave"
                " resume_from_checkpoint out to start from the beginning"
            )
        return newest
    checkpoint = Path(str(choice))
    if (reason := damage(checkpoint, ranks)) is not None:
        raise UserError(f"{checkpoint}: cannot be resumed ({reason})")
    return checkpoint


def retire(checkpoint: Path) -> Path:
    """Rename a checkpoint so that no run takes it for one; return the folder to remove."""
    retired = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(retired, ignore_errors=True)
    os.replace(checkpoint, retired)
    return retired
