"""Finished tasks of an evaluation, kept by what they were measured on: an evaluation that was cut off goes on with the
next task, and the same weights are never asked the same questions twice.

The key of a task is a hash over the weights, the configuration and tokenizer, the suite's row, the bytes of the data,
the limit and the versions; a path or a name never enters it.

Not covered: finishing a task that was cut off in the middle.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fcsd.config.suite import TaskConfig
from fcsd.errors import UserError
from fcsd.files import file_sha256, write_text, writing

SCHEMA_VERSION = 3
# The files of transformers and its tokenizers; others (README, logs, a stage's manifest) change no answer.
_CONFIGURATION = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.model", "*.tiktoken",
    "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.*",
    "additional_chat_templates/*", "*.py",
)  # fmt: skip


def configuration_fingerprint(folder: Path) -> str:
    """SHA-256 over the files beside the weights that change what a model answers."""
    files = {file for pattern in _CONFIGURATION for file in folder.glob(pattern) if file.is_file()}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file_sha256(file).encode())
    return digest.hexdigest()


class TaskStore:
    """A folder with one file a finished task.

    Args:
        folder: created when the first task is put there.
        identity: name -> fingerprint of everything that all tasks depend on (weights, connectivity, versions, limit).
        data: task -> fingerprint of its data.

    Raises:
        UserError: `folder` is a file; later, when a task cannot be written there.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], data: Mapping[str, str]):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is a file; finished tasks need a folder")
        self.folder, self.identity, self.data = folder, dict(identity), dict(data)

    def _key(self, row: TaskConfig) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            **self.identity,
            # Whether a task counts in the mean, and what its data set is called, changes no answer.
            "row": row.model_dump(mode="json", exclude={"headline", "dataset", "revision"}),
            "data": self.data[row.task],
        }

    def _path(self, row: TaskConfig) -> Path:
        text = json.dumps(self._key(row), sort_keys=True)
        return self.folder / f"{row.task}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def get(self, row: TaskConfig) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        """Return (samples, facts) of a finished task; None when it is not there or damaged."""
        try:
            found = json.loads(self._path(row).read_text(encoding="utf-8"))
            content = {name: found[name] for name in ("key", "facts", "samples")}
            if found["sha256"] == _sha256(content) and found["key"] == json.loads(json.dumps(self._key(row))):
                return list(found["samples"]), dict(found["facts"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def put(self, row: TaskConfig, samples: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
        """Keep a finished task; the file appears whole or not at all.

        facts: what a result says of the task beside its samples.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        content = {"key": self._key(row), "facts": facts, "samples": samples}
        content = {"sha256": _sha256(content), **content}
        write_text(self._path(row), json.dumps(content, allow_nan=False) + "\n")


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
