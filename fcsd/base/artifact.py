"""A stage's output folder: its origin, whether it is finished, and files that are never
half-written.

A stage reads folders and leaves one. `stage.json` is written when the stage starts
(settings and inputs), `manifest.json` when it has finished (the same, plus versions,
results and the hashes of what it left). A finished stage is not run again; one whose
settings or inputs have changed is refused with the difference shown.

A killed process leaves no half-written record. A machine that goes down may, because
records are not flushed to the disk: the manifest's seal and the hashes in it show the
damage, and the error says how to run the stage again. A training, which would be
expensive to run again, flushes its folder before it removes its checkpoints
(`fcsd.training.run.remove_checkpoints`).

Not covered: the work of the stages (`fcsd.pipeline.run`).
"""

import contextlib
import importlib.metadata
import itertools
import json
import platform
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fcsd.base.errors import UserError
from fcsd.base.files import (
    check_seal,
    checkpoint_files,
    content_fingerprint,
    file_fingerprint,
    read_json,
    read_sealed,
    sealed,
)
from fcsd.base.strict import Rule, refuse
from fcsd.base.weights import weights_fingerprint
from fcsd.base.writing import check_folder_place, files_below, is_empty, write_json

SCHEMA_VERSION = 8
# Former versions. 1: early stopping's task was written flat into its section; 2:
# min_lr_rate was a key of train; 3: streaming was a key of a source; 4: only the
# weights of a checkpoint were recorded; 5: train had keys of another optimiser and of
# learning rates by layer; 6: decontaminate had test sets besides a suite, and the data
# of a pre-training held-out text; 7: objective had clip, l2_points and
# router_kl_coefficient, and held-out text a weight.

ADAPTER = "adapter"
"""The folder of LoRA adapters, in that of a training."""
LEFT = "files.json"
"""In a publication: the fingerprints of its files, as in the manifest of a stage."""
_SHOWN = 8  # differences in an error
_RECORDS = ("manifest.json", "stage.json")
_RESULTS = (".json", ".jsonl", ".safetensors")
_AGAIN = "remove the folder to run its stage again"
_PACKAGES = (
    "fcsd", "torch", "transformers", "accelerate", "datasets", "lm-eval", "tokenizers", "safetensors",
)  # fmt: skip
# The ends of differences that do not count: folders of a former fcsd may have the keys.
_SAY_NOTHING = (
    ".streaming: false -> null",
    '.l2_points: "blocks" -> null',
    "heldout.weight: 1.0 -> null",
)
# A hash that fcsd makes; a commit of the Hub has 40 digits, and tells something.
_HASH = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Stage:
    """One stage of a run.

    settings: the part of the recipe that the result depends on. inputs: name ->
    fingerprint of each input (weights, data), or the values themselves (fields of a
    config). may_change: dotted keys of the settings that are recorded but not compared.
    """

    folder: Path
    name: str
    settings: dict[str, Any]
    inputs: dict[str, Any]
    may_change: tuple[str, ...] = ()

    def state(self) -> Literal["absent", "unfinished", "finished"]:
        """Tell whether this stage has been started or finished.

        A stage that was started but has left nothing yet, because its settings were
        refused, counts as absent and may start with other settings.

        Raises:
            UserError: the folder holds the same stage with other settings or inputs, or
                something else altogether; a finished stage lacks outputs that its
                manifest names.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(
                f"{self.folder}: is a file; stage '{self.name}' needs a separate folder"
            )
        check_folder_place(self.folder)
        if all(path == self.folder / "stage.json" for path in files_below(self.folder)):
            return "absent"
        # The manifest comes first: a finished stage has both files.
        for file in _RECORDS:
            path = self.folder / file
            if path.is_file():
                record = _read_record(path)
                self.refuse_difference(record)
                self._refuse_lost(record.get("outputs") or {})
                return "finished" if file == "manifest.json" else "unfinished"
        if self.folder.is_dir() and not is_empty(self.folder):
            raise UserError(
                f"{self.folder}: is not empty and was not made by stage '{self.name}';"
                " choose another output folder or remove it"
            )
        return "absent"

    def start(self) -> None:
        """Create the folder and record the stage's settings and inputs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "stage.json", self._record())

    def finish(
        self, results: dict[str, Any], outputs: dict[str, Any] | None = None
    ) -> None:
        """Write the manifest, which marks the stage as finished.

        results: small facts that later stages and the report read. outputs: name ->
        fingerprint of each output; the result files in the folder are added.
        """
        places = (self.folder.iterdir(), (self.folder / ADAPTER).glob("*"))
        files = [
            file
            for file in itertools.chain(*places)
            if file.suffix in _RESULTS and file.is_file()
        ]
        # Hashes of the results, by which `check_outputs` notices later changes.
        left = {
            str(file.relative_to(self.folder)): file_fingerprint(file)
            for file in sorted(files)
            if file.name not in _RECORDS
        }
        record = {
            **self._record(),
            "results": results,
            "outputs": {**(outputs or {}), **left},
            "versions": versions(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self.folder / "manifest.json", sealed(record))

    def _record(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "stage": self.name,
            "settings": self.settings,
            "inputs": self.inputs,
        }

    @property
    def identity(self) -> str:
        """A hash of what the result depends on: the owner of sealed files that only this
        stage continues from.
        """
        # Absent keys count as null, as in `differences`: a later fcsd may have more.
        record: dict[str, Any] = without_none(json.loads(json.dumps(self._record())))
        del record["schema_version"]
        for dotted in self.may_change:
            *sections, key = dotted.split(".")
            section = record["settings"]
            for name in sections:
                section = section.get(name) or {}
            section.pop(key, None)
        return content_fingerprint(record)

    def _refuse_lost(self, outputs: dict[str, str]) -> None:
        # Readers of all other files compare them, or make them again.
        for name in outputs:
            if name.split("/")[0] == "model" and not (self.folder / name).exists():
                raise UserError(
                    f"{self.folder / name}: no such file, though manifest.json names"
                    f" it; restore it, or remove {self.folder} to run stage"
                    f" '{self.name}' again"
                )

    def refuse_difference(self, record: dict[str, Any]) -> None:
        """Raise UserError unless a record (`stage.json` or `manifest.json`) is of this
        very stage, with the same settings and inputs.
        """
        if record.get("stage") != self.name:
            raise UserError(
                f"{self.folder}: holds stage '{record.get('stage')}', not"
                f" '{self.name}'; choose another output folder"
            )
        # The record went through JSON, which turns tuples into lists and integer keys
        # into text; that must not count as a change.
        refuse(*self._rules(record, json.loads(json.dumps(self._record()))))

    def _rules(self, record: dict[str, Any], expected: dict[str, Any]) -> list[Rule]:
        """Return what a record may not be, where `expected` is this stage's."""
        version = record.get("schema_version")
        is_former = version != SCHEMA_VERSION
        former = (
            f"was made by another fcsd (schema_version {version}, this one writes"
            f" {SCHEMA_VERSION})"
        )
        recorded, current = record["inputs"], expected["inputs"]
        # A former fcsd recorded fewer inputs: compare those that both have, and refuse
        # the others as unknown only where nothing has changed for certain.
        unknown = [name for name in current if name not in recorded]
        if is_former:
            current = {name: current[name] for name in recorded if name in current}
        settings = changed_settings(
            record["settings"], expected["settings"], self.may_change
        )
        changes = [*settings, *differences(recorded, current)]
        rules: list[Rule] = [
            (
                settings and is_former,
                f"{former} with other settings, or with these written differently"
                f" ({_listed(settings, 3)}); choose another output folder, remove this"
                " folder to run the stage again, or continue with the fcsd that made it",
            ),
            (
                changes,
                f"was made with other settings ({_listed(changes, _SHOWN)}); choose"
                " another output folder, or remove this folder to run the stage again",
            ),
            (
                unknown and is_former,
                f"{former}, which did not record {', '.join(unknown[:3])}, so fcsd cannot"
                " tell whether they have changed; remove this folder to run the stage"
                " again, or choose another output folder",
            ),
        ]
        return [(fact, f"{self.folder}: {message}") for fact, message in rules]


def changed_settings(old: Any, new: Any, may_change: Collection[str] = ()) -> list[str]:
    """List the settings that have changed though they may not, as `differences`."""
    return [
        change
        for change in differences(old, new)
        if change.split(":")[0] not in may_change and not change.endswith(_SAY_NOTHING)
    ]


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """List the dotted keys that differ between two values, as `train.learning_rate:
    2e-05 -> 4e-05`, or `original: other content` for two hashes. Absent keys count as
    null.
    """
    # Lists of records (sources, tasks) are compared item by item, so that the message
    # names the one key that differs and not two long lists.
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        items = [*old, *new]
        if items and all(isinstance(item, dict) for item in items):
            old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        changes = []
        for key in sorted(set(old) | set(new)):
            dotted = f"{prefix}.{key}" if prefix else str(key)
            changes += differences(old.get(key), new.get(key), dotted)
        return changes
    if old == new:
        return []
    if all(isinstance(value, str) and _HASH.fullmatch(value) for value in (old, new)):
        return [f"{prefix}: other content"]
    return [f"{prefix}: {_short(old)} -> {_short(new)}"]


def without_none(value: Any) -> Any:
    """Remove the keys whose value is None, at every depth."""
    if isinstance(value, Mapping):
        return {
            key: without_none(item) for key, item in value.items() if item is not None
        }
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _listed(changes: Sequence[str], most: int) -> str:
    more = f"; and {len(changes) - most} more" if len(changes) > most else ""
    return f"{'; '.join(changes[:most])}{more}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the finished stage in a folder; {} where none has
    finished.
    """
    path = folder / "manifest.json"
    return _read_record(path) if path.is_file() else {}


def _read_record(path: Path) -> dict[str, Any]:
    record = dict(read_json(path, _AGAIN, keys=()))
    check_seal(path, record, _AGAIN)
    return record


def check_outputs(folder: Path, *names: str) -> None:
    """Compare the outputs of a finished stage with the fingerprints in its manifest.

    names: the files to compare; none: all of them, and the model.

    Raises:
        UserError: a file is missing, or has changed since the stage wrote it.
    """
    recorded = read_manifest(folder).get("outputs")
    if not recorded:
        return
    expected = {name: recorded[name] for name in names or recorded if name in recorded}
    if changes := _changed_outputs(folder, expected, folder / "model"):
        raise UserError(
            f"{folder}: differs from what the stage wrote ({'; '.join(changes[:3])}):"
            " the folder was damaged or changed; restore it, or remove the folder to"
            " run the stage again (put a checkpoint of your own into another folder)"
        )


def check_checkpoint(folder: Path) -> None:
    """Compare a checkpoint with the record that its stage, the command that wrote it, or
    its publication has of its weights and files. A file without a recorded hash passes.

    Raises:
        UserError: as `check_outputs`.
    """
    if folder.name == "model":
        check_outputs(folder.parent)
    _check_publication(folder)
    path = folder / "manifest.json"
    if not path.is_file():
        return
    # Checkpoints from elsewhere may have a file of this name.
    hint = f"write the checkpoint again, or remove {path} if the change is yours"
    record = read_json(path, hint)
    if not isinstance(record, dict) or "stage" not in record:
        return
    check_seal(path, record, hint)
    if changes := changed_files(folder, record.get("outputs", {})):
        raise UserError(
            f"{folder}: is not what `fcsd {record['stage']}` wrote"
            f" ({'; '.join(changes[:3])}): damaged or changed since; {hint}"
        )


def _check_publication(folder: Path) -> None:
    path = folder / LEFT
    hint = (
        f"`fcsd run` makes this folder again; or remove {path} if the change is yours"
    )
    record = read_json(path, hint) if path.is_file() else None
    # Checkpoints from elsewhere may have a file of this name.
    if not isinstance(record, dict) or "sha256" not in record:
        return
    # Of a folder of the Hub, report and figures are not fetched.
    outputs = {
        name: fingerprint
        for name, fingerprint in read_sealed(path, hint).items()
        if name.split("/")[0] == "model" or (folder / name).exists()
    }
    if changes := changed_files(folder, outputs):
        raise UserError(
            f"{folder}: is not what {path} describes ({'; '.join(changes[:3])}): damaged"
            f" or changed since; {hint}"
        )


def changed_files(folder: Path, outputs: Mapping[str, Any]) -> list[str]:
    """List the files of a checkpoint that differ from their fingerprints in a record of
    it, as `differences`.
    """
    return _changed_outputs(folder, outputs, folder)


def _changed_outputs(
    folder: Path, expected: Mapping[str, Any], model_folder: Path
) -> list[str]:
    """List the outputs that differ from their fingerprints, as `differences`."""
    model = {
        name: fingerprint
        for name, fingerprint in expected.items()
        if name.split("/")[0] == "model"
    }
    current = {
        name: file_fingerprint(folder / name)
        for name in expected.keys() - model
        if (folder / name).is_file()
    }
    # Weights are hashed by all their files together, so the model is compared as one.
    if model:
        if not model_folder.is_dir():
            raise UserError(
                f"{model_folder}: no such folder, although the stage wrote it; remove"
                f" {folder} to run the stage again"
            )
        # The weights may be large: they are read only where they are compared.
        current |= model_outputs(model_folder, None if "model" in model else "")
    recorded: dict[str, Any] = json.loads(json.dumps(expected))
    for name, record in recorded.items():
        # Changed fields say more than the hash; a former fcsd noted no hash.
        fields = without_hash(current.get(name))
        if isinstance(record, dict) and (
            "sha256" not in record or fields != without_hash(record)
        ):
            recorded[name], current[name] = without_hash(record), fields
    return differences(recorded, {name: current.get(name) for name in recorded})


def model_outputs(folder: Path, weights: str | None = None) -> dict[str, Any]:
    """Return the fingerprints of a checkpoint that is the output `model` of a stage: of
    its weights and of the files beside them.

    weights: the fingerprint of the weights, where the caller has it or needs none.
    """
    files = {}
    for file, fingerprint in checkpoint_files(folder, code=True).items():
        # The fields name a difference; the hash also knows of those without effect.
        if isinstance(fingerprint, dict):
            fingerprint = fingerprint | {"sha256": file_fingerprint(folder / file)}
        files[f"model/{file}"] = fingerprint
    if weights is None:
        weights = weights_fingerprint(folder)
    return {"model": weights, **files}


def without_hash(fingerprint: Any) -> Any:
    """Return the fields of a config in `model_outputs` without the hash of its file."""
    if not isinstance(fingerprint, dict):
        return fingerprint
    return {key: value for key, value in fingerprint.items() if key != "sha256"}


def command_record(command: str, **facts: Any) -> dict[str, Any]:
    """Return the manifest of a checkpoint that a command writes without the folder of a
    stage around it.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "stage": command,
        **facts,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Collect the versions of the packages that a result depends on."""
    by_package = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_package[package] = importlib.metadata.version(package)
    return by_package
