"""Read and hash files: JSON, YAML, headers of safetensors, and files sealed with a hash
of their content; identify the files beside a checkpoint's weights.

Identity is everything that affects the outputs: the fields of the config that change a
number, the generation defaults and the files of tokenizer and processor; neither the
path nor the version of transformers that wrote the checkpoint.

Not covered: code that a checkpoint brings, unless the caller asks for it; writing
(`fcsd.base.writing`), weights (`fcsd.base.weights`).
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import functools
import hashlib
import json
import math
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from fcsd.base.errors import UserError, one_line
from fcsd.base.writing import write_json

if TYPE_CHECKING:
    import numpy as np


_FLOAT = "__float__"
# The hint on a damaged file that fcsd itself wrote.
_OURS = "remove the folder to run its stage again"


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
        check_fetched(path)
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


_LFS_POINTER = b"version https://git-lfs"


def check_fetched(path: Path) -> None:
    """Raise UserError where a file is only the pointer that a clone without Git LFS has
    in its place.
    """
    with contextlib.suppress(OSError, ValueError), path.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise UserError(
                f"{path}: is a pointer of Git LFS, not the file; run `git lfs install`"
                " and `git lfs pull` in the clone, or use `hf download`"
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


def implicit_values(*kinds: str) -> Any:
    """Return the rules by which a loader of PyYAML reads plain values of these kinds;
    all others are texts, as they are written.
    """
    rules: dict[str, list[Any]] = {}
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items():
        rules[first] = [pair for pair in pairs if pair[0].rpartition(":")[2] in kinds]
    return rules


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads plain values as YAML 1.2 does, and refuses a key given
    twice.

    PyYAML knows YAML 1.1, where `no` (Norwegian) and `on` are booleans, `2026-05-01` is
    a date, `0123` is octal, `1:30` is 90, and `2e-5` is a text. A boolean may still be
    written `yes` or `no`: pydantic reads these texts.
    """

    yaml_implicit_resolvers = implicit_values("float", "null", "merge", "value")

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        # An alias is a value of its own: `--set` of one key may not change another.
        self.constructed_objects.pop(node, None)
        return super().construct_object(node, deep)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float | str:
    text = str(loader.construct_scalar(node))
    number = float(text)
    return number if math.isfinite(number) else text


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool",
    re.compile(r"^(true|True|TRUE|false|False|FALSE)$"),
    list("tTfF"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:fcsd,2026:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
_Loader.add_constructor("tag:fcsd,2026:float", _float)


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    if len(node.value) <= _MOST_DIGITS:
        number = loader.construct_yaml_int(node)
    else:
        number = 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise yaml.constructor.ConstructorError(
            None, None, "an integer of more than 64 bits", node.start_mark
        )
    return int(number)


# Enough for 64 bits in any base, with underscores; longer texts are not converted.
_MOST_DIGITS = 100
_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: dict[Any, Any] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in keys:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is given twice", key_node.start_mark
            )
        keys[key] = None
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; a syntax error is a `UserError` that names `where` and the line.

    So is a document that is nested too deeply, or whose aliases (`*name`) expand to too
    many values, on which any later traversal would not end.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _expanded_size(node, {}, 0)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"{where}, line {mark.line + 1}" if mark else where
        raise UserError(
            f"{position}: not valid YAML:"
            f" {getattr(error, 'problem', None) or one_line(error)}"
        ) from None
    except RecursionError:
        raise UserError(f"{where}: not valid YAML: {_TOO_DEEP}") from None
    # A value that does not fit its tag: PyYAML's constructors raise errors of all
    # kinds.
    except Exception as error:
        raise UserError(
            f"{where}: not valid YAML: a value does not fit its tag ({one_line(error)})"
        ) from None


_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_REPEATED = 100_000
_TOO_DEEP = f"nested deeper than {DEEPEST} levels"


def _expanded_size(
    node: yaml.Node, sizes_by_id: dict[int, tuple[int, int] | None], depth: int
) -> tuple[int, int]:
    """Return the number of values and of levels that a node expands to, where an alias
    counts with all that it repeats.

    sizes_by_id: results of the nodes visited so far, by `id`; None for the ancestors of
    this node. depth: of the node.
    """

    def refuse(problem: str) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    # An alias is the very node that its anchor names, so a node may come up again.
    if id(node) in sizes_by_id:
        if (node_size := sizes_by_id[id(node)]) is None:
            refuse("an alias holds itself")
    else:
        sizes_by_id[id(node)] = None
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        elif isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
            refuse(f"{node.value!r} holds an incomplete character")
        sizes = [_expanded_size(child, sizes_by_id, depth + 1) for child in children]
        node_size = (
            1 + sum(size for size, _ in sizes),
            1 + max((levels for _, levels in sizes), default=0),
        )
        sizes_by_id[id(node)] = node_size
    if depth + node_size[1] > DEEPEST:
        refuse(_TOO_DEEP)
    # Checked at every node, so that nested aliases are refused before they multiply
    # further.
    if node_size[0] > len(sizes_by_id) + _MOST_REPEATED:
        refuse(f"aliases stand for more than {_MOST_REPEATED} values")
    return node_size


def read_yaml(path: Path) -> Any:
    """Parse the YAML file at `path`."""
    return parse_yaml(read_text(path, "a YAML file"), str(path))
