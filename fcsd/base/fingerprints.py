"""Identify a checkpoint by everything that affects its outputs, and seal JSON files
with a hash of their content.

The identity of a checkpoint is its weights, the fields of its config that change a
number, its generation defaults and the files of its tokenizer and processor. It
includes neither the path nor the version of transformers that wrote the checkpoint.

Not covered: code that a checkpoint brings, unless the caller asks for it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import UserError
from fcsd.base.files import (
    encoded_floats,
    file_fingerprint,
    file_state,
    parse_json,
    read_json,
    write_json,
)

if TYPE_CHECKING:
    import numpy as np

TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "tekken.json",
    "*.model", "*.tiktoken", "chat_template*", "additional_chat_templates/*", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""Patterns of the files that a tokenizer or processor is read from."""

NOT_COMPUTED = frozenset({
    "_name_or_path", "_commit_hash", "_from_model_config", "_attn_implementation_autoset", "architectures", "auto_map",
    "transformers_version", "use_cache", "output_hidden_states", "output_attentions", "return_dict", "id2label",
    "label2id", "chunk_size_feed_forward", "problem_type", "tokenizer_class",
})  # fmt: skip
"""Fields of a config that change no number."""
_NOT_ENCODED = {
    "name_or_path",
    "transformers_version",
    "tokenizer_file",
    "special_tokens_map_file",
}
_SEAL = "sha256"
_BY_FIELDS = ("config.json", "generation_config.json")


def checkpoint_files(folder: Path, *, code: bool = False) -> dict[str, Any]:
    """Return the identity of the files beside a checkpoint's weights, by file name.

    `config.json` and `generation_config.json` are represented by their fields, so that
    a difference can be named; every other file by its hash. code: include the Python
    files, too.
    """
    files = [folder / name for name in _BY_FIELDS if (folder / name).is_file()]
    files += _files_of_tokenizer(folder)
    files += sorted(folder.glob("*.py")) if code else []
    return _identities(folder, files)


def tokenizer_files(folder: Path) -> dict[str, str]:
    """Return the hashes of the files that a tokenizer or processor is read from, by
    their names.
    """
    return _identities(folder, _files_of_tokenizer(folder))


def _files_of_tokenizer(folder: Path) -> list[Path]:
    # A set, because a file may match several patterns.
    return sorted(
        {
            file
            for pattern in TOKENIZER_FILES
            for file in folder.glob(pattern)
            if file.is_file()
        }
    )


def _identities(folder: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Return the identity of each file, by its name in the folder; each is read once in
    a process unless it changes.
    """
    states = [(file, file_state(file)) for file in files]
    return {
        str(file.relative_to(folder)): copy.deepcopy(_identity(file, state))
        for file, state in states
    }


@functools.cache
def _identity(file: Path, state: tuple[int, ...]) -> Any:
    return _fields(file) if file.name in _BY_FIELDS else _encoding_fingerprint(file)


def _fields(file: Path) -> Any:
    try:
        # Infinite numbers are brought to one spelling.
        return _computed_fields(encoded_floats(parse_json(file.read_bytes())))
    except ValueError:  # not JSON: loading the model gives the error
        return file_fingerprint(file)


def _computed_fields(value: Any) -> Any:
    """Return only the fields of a config that change a number, at every depth; dtypes
    are brought to one spelling.
    """
    if isinstance(value, list):
        return [_computed_fields(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {
        key: _computed_fields(item)
        for key, item in value.items()
        if key not in NOT_COMPUTED
    }
    dtype = fields.pop("torch_dtype", None)  # as transformers 4 wrote it
    # Where a config has both, the newer key holds.
    dtype = fields.pop("dtype", None) or dtype
    if dtype is None:
        return fields
    return fields | {"dtype": str(dtype).removeprefix("torch.")}


def _encoding_fingerprint(file: Path) -> str:
    """Hash a file of a tokenizer; tokenizer_config.json without the settings that only
    record where it came from.
    """
    if file.name != "tokenizer_config.json":
        return file_fingerprint(file)
    try:
        settings = parse_json(file.read_bytes())
    except ValueError:
        return file_fingerprint(file)
    if isinstance(settings, dict):
        settings = {
            key: value for key, value in settings.items() if key not in _NOT_ENCODED
        }
    return content_fingerprint(settings)


def content_fingerprint(value: Any) -> str:
    """Hash a JSON value independently of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sealed(value: dict[str, Any], owner: Any = None) -> dict[str, Any]:
    """Return a JSON object with an added hash of its content, which `check_seal`
    checks.

    owner: what the object belongs to, JSON-able and not part of the object; another
    owner's object does not pass the check.
    """
    return {_SEAL: _seal(value, owner), **value}


def _seal(value: dict[str, Any], owner: Any) -> str:
    return content_fingerprint(value if owner is None else [owner, value])


def write_sealed(path: Path, value: dict[str, Any], owner: Any = None) -> None:
    """Write a JSON object with its seal (`sealed`)."""
    write_json(path, sealed(value, owner))


def read_sealed(path: Path, hint: str, owner: Any = None) -> dict[str, Any]:
    """Read an object that `write_sealed` wrote, without its hash. hint: what to do
    where the file is damaged. owner: as of `sealed`.

    Raises:
        UserError: as `read_json`; the content has no hash, or does not match it.
    """
    value = read_json(path, hint, keys=())
    if _SEAL not in value:
        raise UserError(f"{path}: lacks the hash that fcsd writes into it; {hint}")
    check_seal(path, value, hint, owner)
    return {key: item for key, item in value.items() if key != _SEAL}


def read_editable(path: Path, writer: str, keys: Collection[str]) -> dict[str, Any]:
    """Read an object that `write_sealed` wrote for users to read and edit, without its
    hash. One without a hash was written or edited by a user, and passes.

    writer: the command that writes such files, for errors. keys: as of `read_json`.

    Raises:
        UserError: as `read_json`; the content does not match the hash.
    """
    value: dict[str, Any] = read_json(path, f"`{writer}` writes one", keys)
    hint = f"`{writer}` writes it again; if you edited it, remove its line {_SEAL}"
    check_seal(path, value, hint)
    return {key: item for key, item in value.items() if key != _SEAL}


def arrays_fingerprint(
    arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]
) -> str:
    """Hash named arrays, and a JSON record that belongs to them."""
    digest = hashlib.sha256(json.dumps(record).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def check_seal(path: Path, value: Any, hint: str, owner: Any = None) -> None:
    """Raise UserError where an object read from `path` has a hash that its content does
    not match. Objects without a hash pass. owner: as of `sealed`.
    """
    if not isinstance(value, dict) or not isinstance(value.get(_SEAL), str):
        return
    content = {key: item for key, item in value.items() if key != _SEAL}
    if _seal(content, owner) != value[_SEAL]:
        raise UserError(
            f"{path}: is damaged: its content differs from what was written; {hint}"
        )
