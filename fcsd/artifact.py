"""A stage's output folder: what it was made from, whether it is finished, and files that are never half-written.

A stage goes folder to folder. `stage.json` is written when the stage starts (settings and inputs), `manifest.json`
when it has finished (the same, plus versions, results and the hashes of what it left). A finished stage is not run
again; one whose settings or inputs have changed is refused with the difference shown.

Not covered: what the stages do; that is `fcsd.stages`.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from fcsd.errors import UserError

SCHEMA_VERSION = 1
_CANNOT_WRITE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_PACKAGES = (
    "fcsd",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "lm-eval",
    "tokenizers",
    "safetensors",
)


@dataclass(frozen=True)
class Stage:
    """One stage of a run.

    settings: the part of the recipe that the result depends on.
    inputs: name -> fingerprint of what the stage reads (weights, data).
    """

    folder: Path
    name: str
    settings: dict[str, Any]
    inputs: dict[str, str]

    def state(self) -> Literal["absent", "unfinished", "finished"]:
        """Where this stage stands.

        Raises:
            UserError: the folder holds the same stage with other settings or inputs, or something else altogether. A
                stage that was begun and has left nothing yet (its settings were refused) may be begun with others.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder}: is a file; stage '{self.name}' needs a folder of its own")
        if not any(path.is_file() and path.name != "stage.json" for path in self.folder.rglob("*")):
            return "absent"
        for file in ("manifest.json", "stage.json"):
            path = self.folder / file
            if path.is_file():
                self._refuse_difference(read_json(path))
                return "finished" if file == "manifest.json" else "unfinished"
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(
                f"{self.folder}: is not empty and was not made by stage '{self.name}';"
                " choose another output_dir or remove it"
            )
        return "absent"

    def start(self) -> None:
        """Create the folder and note what the stage is made from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "stage.json", self._record())

    def finish(self, results: dict[str, Any], outputs: dict[str, str] | None = None) -> None:
        """Write the manifest; from now on the stage is finished.

        results: small facts that later stages and the report read; outputs: name -> fingerprint of what was left.
        """
        record = {
            **self._record(),
            "results": results,
            "outputs": outputs or {},
            "versions": versions(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self.folder / "manifest.json", record)

    def manifest(self) -> dict[str, Any]:
        """The manifest of a finished stage."""
        return read_json(self.folder / "manifest.json")

    def _record(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "stage": self.name,
            "settings": self.settings,
            "inputs": self.inputs,
        }

    def _refuse_difference(self, found: dict[str, Any]) -> None:
        if found.get("stage") != self.name:
            raise UserError(
                f"{self.folder}: holds stage '{found.get('stage')}', not '{self.name}'; choose another output_dir"
            )
        # What JSON does to tuples and integer keys must not count as a change.
        mine = json.loads(json.dumps(self._record()))
        changes = differences(found["settings"], mine["settings"]) + differences(
            found["inputs"], mine["inputs"]
        )
        if changes:
            raise UserError(
                f"{self.folder}: was made with other settings ({'; '.join(changes)});"
                " choose another output_dir, or remove this folder to run the stage again"
            )


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted keys that differ between two plain values: `train.learning_rate: 2e-05 -> 4e-05`."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(set(old) | set(new)):
            dotted = f"{prefix}.{key}" if prefix else str(key)
            found += differences(old.get(key), new.get(key), dotted)
        return found
    return [] if old == new else [f"{prefix}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def versions() -> dict[str, str]:
    """Versions of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def read_json(path: Path) -> Any:
    """Parse a JSON file that fcsd wrote; a damaged one is a `UserError`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not valid JSON ({error}); remove the folder to run its stage again"
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, then rename: the file is either the old one or the whole new one."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text under a temporary name, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` to write into; it becomes `path` when the block ends well, and is removed when not.

    An existing `path` is replaced only at the end.

    Raises:
        UserError: the disk is full, or the place may not be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            for stale in path.parent.glob(f".{path.name}.*.tmp"):  # of a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            replace_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the libraries raise when a file cannot be written (full disk, no permission) into one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        raise disk_error(path, error) from error
    except SafetensorError as error:  # safetensors reports a failed write in words only
        if "I/O error" not in str(error):
            raise
        raise disk_error(path, error) from error
    except RuntimeError as error:  # so does torch.save
        if "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        raise disk_error(path, error) from error


def replace_folder(source: Path, destination: Path) -> None:
    """Rename `source` to `destination`, moving an existing `destination` out of the way first."""
    old = destination.with_name(f".{destination.name}.{os.getpid()}.old")
    if destination.exists():
        os.replace(destination, old)
    os.replace(source, destination)
    shutil.rmtree(old, ignore_errors=True)


def disk_error(path: Path, error: BaseException) -> UserError:
    """One line for a write that failed (full disk, no permission): what, where, and that nothing was left behind."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return UserError(
        f"{path}: could not be written ({reason}); nothing was left under this name, free some space and run again"
    )


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 over names and bytes of the safetensors files of a checkpoint folder: the identity of its weights.

    A file is read once a process, unless its size, time or inode has changed: every stage asks for the original's.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: holds no .safetensors file")
    for file in files:
        status = file.stat()
        known = _sha256_of_state(file.resolve(), status.st_size, status.st_mtime_ns, status.st_ino)
        digest.update(file.name.encode() + b"\0" + known.encode())
    return digest.hexdigest()


@functools.lru_cache(4096)
def _sha256_of_state(file: Path, *state: int) -> str:
    return file_sha256(file)


def file_sha256(path: Path) -> str:
    """SHA-256 of one file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
