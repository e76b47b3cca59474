"""Keep the finished tasks of an evaluation: an interrupted evaluation continues with
the next task, and the same weights never get the same questions twice.

The key of a task is a hash over the weights, the configuration and tokenizer, the
suite's row, the bytes of the data, the limit and the versions; a path or a name never
enters it. A server's answers are kept one by one (`Journal`).
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import checkpoint_files, content_fingerprint, parse_json, read_text
from fcsd.base.writing import write_text, writing
from fcsd.evaluation.config import TaskConfig

SCHEMA_VERSION = 5


def configuration_fingerprint(folder: Path) -> str:
    """Compute the SHA-256 of the files beside the weights that change a model's
    answers.
    """
    return content_fingerprint(checkpoint_files(folder, code=True))


class TaskStore:
    """A folder with one file per finished task, created with the first;
    UserError where it is a file.

    identity: name -> fingerprint of everything that all tasks depend on (weights,
    connectivity, versions, limit). data: task -> fingerprint of its data.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], data: Mapping[str, str]
    ):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is a file; finished tasks need a folder")
        self.folder, self.identity, self.data = folder, dict(identity), dict(data)

    def _key(self, row: TaskConfig) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            **self.identity,
            # Whether a task counts in the mean, what random answers get, and its data
            # set's name change no answer.
            "row": row.model_dump(
                mode="json", exclude={"headline", "floor", "dataset", "revision"}
            ),
            "data": self.data[row.task],
        }

    def _path(self, row: TaskConfig) -> Path:
        text = json.dumps(self._key(row), sort_keys=True)
        return (
            self.folder
            / f"{row.task}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
        )

    def get(
        self, row: TaskConfig
    ) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        """Return (samples, facts) of a finished task; None when it is not there, or
        damaged, which a line says.
        """
        path = self._path(row)
        if path.exists() and not path.is_file():
            read_text(path, "the file of a finished task", "remove it")
        try:
            record = parse_json(path.read_bytes())
            content = {name: record[name] for name in ("key", "facts", "samples")}
            # The key in the file has been through JSON, which turns tuples into lists.
            if record["sha256"] == content_fingerprint(content) and record[
                "key"
            ] == json.loads(json.dumps(self._key(row))):
                return list(record["samples"]), dict(record["facts"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if path.exists():
            print(
                f"evaluate: {path}: is damaged; fcsd evaluates {row.task} again",
                file=sys.stderr,
            )
        return None

    def put(
        self,
        row: TaskConfig,
        samples: Sequence[Mapping[str, Any]],
        facts: Mapping[str, Any],
    ) -> None:
        """Keep a finished task; the file appears whole or not at all.

        facts: a result's facts about the task, beside its samples.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        content = {"key": self._key(row), "facts": facts, "samples": samples}
        content = {"sha256": content_fingerprint(content), **content}
        write_text(self._path(row), json.dumps(content, allow_nan=False) + "\n")
        # The journal of single answers, which the samples hold now.
        self._path(row).with_suffix(".jsonl").unlink(missing_ok=True)

    def journal(self, row: TaskConfig) -> "Journal":
        """Return the answers of a task that is not finished; `put` removes them."""
        return Journal(self._path(row).with_suffix(".jsonl"))


class Journal:
    """Answers by question, each written on arrival; if a line is cut off or damaged,
    the question is repeated.

    path: None keeps them for this process only.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self._known: dict[str, Any] = {}
        lines: list[bytes] = []
        if path is not None and path.is_file():
            lines = path.read_bytes().splitlines()
        for line in lines:
            try:
                key, answer, checksum = parse_json(line)
            except (ValueError, TypeError):
                continue
            if checksum == self._checksum(key, answer):
                self._known[key] = answer

    def __len__(self) -> int:
        return len(self._known)

    def _checksum(self, key: str, answer: Any) -> str:
        # The name of the file identifies what has answered: a model, and its settings.
        name = "" if self.path is None else self.path.name
        return content_fingerprint([name, key, answer])

    def get(self, question: Any) -> Any:
        """Return the answer to a question, which is JSON-able; None when there is none."""
        return self._known.get(content_fingerprint(question))

    def put(self, question: Any, answer: Any) -> None:
        """Keep an answer, which is JSON-able and not None."""
        key = content_fingerprint(question)
        self._known[key] = answer
        if self.path is not None:
            with writing(self.path.parent):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # A line begins with a break: the one before may have been cut off. One
                # write, as others may append.
                descriptor = os.open(
                    self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
                )
                try:
                    record = [key, answer, self._checksum(key, answer)]
                    os.write(
                        descriptor,
                        f"\n{json.dumps(record, allow_nan=False)}\n".encode(),
                    )
                finally:
                    os.close(descriptor)
