"""Load a data set: a hub id, a local folder in hub layout, or one file; its examples have
the values that were written, although they pass through Arrow.

In Arrow a column has one type, so each mapping gets the keys of all others, with null.
JSON as `datasets` (5.2) reads it has these nulls, too, and other numbers: 0.6 becomes
0.6000000000000001. Files of JSON and lists therefore pass through Arrow as JSON text.
From other data, the nulls that Arrow may have added are removed: those of a key that
has a value in another mapping. A key that is null everywhere is null in the data.

Not covered: a null that was written beside values of the same key, in data that are
stored in Arrow's types; JSON text keeps it.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pyarrow as pa
from datasets.builder import Key
from datasets.utils.file_utils import xopen

from fcsd.base.artifact import without_none
from fcsd.base.errors import UserError, one_line
from fcsd.base.files import check_fetched
from fcsd.base.memory import check_shared_memory
from fcsd.data.columns import PATH_AND_COLUMNS, column_meanings
from fcsd.data.config import SourceConfig, TextConfig
from fcsd.data.local import (
    FILE_FORMATS,
    check_data,
    data_files,
    fresh_cache,
    is_path,
    making_of,
    scratch,
)

Change = Callable[[str, Any], Any]
"""Returns a value as it was written, from the name of its column and the stored value."""


@dataclass(frozen=True)
class GivenSource:
    """Examples that a caller has loaded, with the keys of a `SourceConfig`. path: their
    name in errors.
    """

    path: str
    columns: dict[Any, str]
    examples: datasets.Dataset | datasets.IterableDataset
    name: ClassVar[None] = None
    split: ClassVar[None] = None
    weight: ClassVar[float] = 1.0
    max_examples: ClassVar[None] = None


Source = SourceConfig | GivenSource

# In names of splits that cannot be read file by file: train[:90%], train+test
_PART_OF_SPLIT = r"[\[+]"

WHOLE_BYTES = 4 << 30

_JSONL = "a .jsonl file has one JSON object per line"

# Endings of files that are not supported -> how to convert them into one that is.
_CONVERTED = (
    "datasets.load_dataset({!r}, data_files=PATH, split='train').to_json('rows.jsonl')"
    " writes one"
)

_OTHER_FORMATS = {
    ".csv": _CONVERTED.format("csv"),
    ".tsv": _CONVERTED.format("csv").replace("=PATH", "=PATH, sep='\\t'"),
    ".txt": _CONVERTED.format("text"),
    ".arrow": _CONVERTED.format("arrow"),
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), "unpack it first"),
}


def columns_of(source: Source) -> Mapping[Any, str]:
    """Return the columns of an opened source: meaning -> name."""
    assert source.columns is not None
    return source.columns


def _unsupported(path: Path) -> str:
    """Return why fcsd does not read a file."""
    problem = "fcsd does not read files of this kind"
    if not path.exists():
        problem = f"no such file, and {problem}"
    # Known but unsupported formats get advice on how to convert them.
    hint = _OTHER_FORMATS.get(path.suffix, _JSONL)
    return (
        f"{problem}; {', '.join(FILE_FORMATS)} files and folders in hub layout are"
        f" allowed; {hint}"
    )


def check_place(source: TextConfig) -> Path:
    """Refuse, before anything is read, a missing file or folder, an unsupported kind of
    file, and a split that a file does not have. Return the path of the data.
    """
    path, name = check_data(source.path), f"data set {source.path}"
    # A path with the ending of a data file is a file, even if it does not exist.
    is_file = not path.is_dir() and path.suffix in FILE_FORMATS
    if is_file and not path.is_file():
        raise UserError(f"{name}: no such file{making_of(source.path)}")
    if is_file and not source.split.startswith("train"):
        raise UserError(
            f"{name}: no split {source.split!r}; a file has the split 'train' only"
        )
    if not path.is_dir() and not is_file:
        if path.exists() or path.suffix in _OTHER_FORMATS:
            raise UserError(f"{name}: {_unsupported(path)}")
        if is_path(source.path):
            raise UserError(
                f"{name}: no such folder, and not the name of a data set on the Hub"
            )
    return path


def check_source(source: TextConfig) -> None:
    """Refuse, before a model is loaded, local data that cannot be read, are empty, or
    lack a column; one row is read.
    """
    path = check_place(source)
    if path.exists():
        split = re.split(_PART_OF_SPLIT, source.split)[0]
        keys = source.model_dump(include={*SourceConfig.model_fields})
        _open_at(path, SourceConfig(**keys | {"split": split}))


def load_source(source: Source) -> datasets.Dataset | datasets.IterableDataset:
    """Load the examples of `source` as they are, at most `max_examples` of them.

    Raises: UserError for a missing path, configuration, split or column, and if there
    are no examples.
    """
    opened = open_source(source)
    limit = opened.settings.max_examples
    return opened.examples if limit is None else opened.examples.take(limit)


@dataclass(frozen=True)
class Opened:
    """A source whose columns have been identified, with all its examples.

    stored: the examples before `change`, which those who read many make in parallel.
    files: names of the files of the examples, one for each shard; empty if unknown.
    whole: all of it is tokenized, however few tokens a training needs, because it is
    small or on this machine already, or `max_examples` limits it.
    """

    settings: Source
    stored: Any
    whole: bool
    files: tuple[str, ...] = ()
    change: Change | None = None

    @property
    def examples(self) -> Any:
        return changed(self.stored, self.change)

    @property
    def num_files(self) -> int:
        return len(self.files) or 1


def open_source(source: Any, form: str = PATH_AND_COLUMNS) -> Opened:
    """Open `source`, and identify its columns by its first example. form: as
    `column_meanings`. Raises as `load_source`.
    """
    if isinstance(source, GivenSource):
        return Opened(
            source, source.examples, isinstance(source.examples, datasets.Dataset)
        )
    return _open_at(check_place(source), source, form)


def _open_at(path: Path, source: SourceConfig, form: str = PATH_AND_COLUMNS) -> Opened:
    check_shared_memory()
    try:
        with fresh_cache(path):
            opened = _open(path, source)
            first = _first_example(opened.examples, source)
            columns = column_meanings(source.path, list(first), source.columns, form)
    except StopIteration:  # `datasets` 5.2 looks for the first line of an empty file
        raise _empty_error(source) from None
    except (
        ValueError, RecursionError, OSError, datasets.exceptions.DatasetsError,
    ) as error:  # fmt: skip
        raise _loading_error(path, source, error) from error
    return dataclasses.replace(
        opened, settings=source.model_copy(update={"columns": columns})
    )


def _loading_error(path: Path, source: SourceConfig, error: Exception) -> UserError:
    # `datasets` wraps the errors of its readers, which are more specific.
    cause = None
    if isinstance(error, datasets.exceptions.DatasetGenerationError):
        cause = error.__cause__
    reason = one_line(cause or error)
    if "BatchSize must be greater than 0" in reason:  # a parquet file (`datasets` 5.2)
        return _empty_error(source)
    name = f"data set {source.path}"
    if isinstance(error, ConnectionError | datasets.exceptions.DatasetNotFoundError):
        return UserError(
            f"{name}: no such file or folder, and the Hub did not give a data set of"
            f" this name: {reason}"
        )
    for file in data_files(path):
        check_fetched(file)
        if broken := broken_line(file):
            return UserError(f"data set {file}{broken}")
    advice = "; correct the file, or fetch it again" if path.is_file() else ""
    return UserError(f"{name}: {reason.rstrip('.')}{advice}")


def broken_line(path: Path) -> str:
    """Say in which line a JSON file is broken, which the error of `datasets` does not;
    "" for other files and other faults.
    """
    if path.suffix not in (".json", ".jsonl") or not path.is_file():
        return ""
    number, blank = 0, 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if number == 1 and text.lstrip().startswith("["):  # a list of objects
                    json.loads(text + file.read().decode())
                    return ""
                if not text.strip():
                    blank = blank or number
                elif not isinstance(json.loads(text), dict):
                    return f", line {number}: not a JSON object; {_JSONL}"
    except json.JSONDecodeError as error:
        if number == 1 and error.lineno > 1:
            number = error.lineno
        return f", line {number}: not valid JSON ({error.msg}); {_JSONL}"
    except UnicodeDecodeError as error:
        return f", line {number}: not UTF-8 ({error.reason}); {_JSONL}, in UTF-8"
    except (RecursionError, ValueError) as error:  # too deep, a number too long
        return f", line {number}: not valid JSON ({one_line(error)}); {_JSONL}"
    # `datasets` reads past blank lines only where all columns are text.
    return f", line {blank}: is blank; remove it; {_JSONL}" if blank else ""


def _open(path: Path, source: SourceConfig) -> Opened:
    """Open a source file by file; a part of a split, or a data set of the Hub that is
    small or downloaded already, as a whole.
    """
    options: dict[str, Any] = {"path": source.path, "revision": source.revision}
    if path.suffix in FILE_FORMATS and not path.is_dir():
        options = {
            "path": FILE_FORMATS[path.suffix],
            "data_files": {"train": str(path)},
        }
    else:
        if path.is_dir():
            options = {"path": str(path)}
        options["name"] = source.name
    builder = datasets.load_dataset_builder(**options)
    # A part such as train[:90%] is defined by rows, so files cannot be read one by one.
    is_part = re.search(_PART_OF_SPLIT, source.split) is not None
    as_whole = is_part or (
        not path.exists()
        and (Path(builder.cache_dir).is_dir() or _is_small(builder, source))
    )
    is_json = builder.info.builder_name == "json" and builder.config.field is None
    if is_json:
        # Not from the usual cache, which has the values as `datasets` reads them.
        if as_whole and not path.exists():
            builder = datasets.load_dataset_builder(**options, cache_dir=str(scratch()))
        read_as_text(builder)
    examples: Any
    files: tuple[str, ...] = ()
    if as_whole:
        builder.download_and_prepare()
        examples = builder.as_dataset(split=source.split)
    else:
        # Otherwise the data are streamed, so that only what is needed is read.
        examples = builder.as_streaming_dataset(split=source.split)
        names = (builder.config.data_files or {}).get(source.split, [])
        files = tuple(map(str, names)) if len(names) == examples.num_shards else ()
    # Only local files have a known size; a stream from the Hub counts as large.
    sizes = None
    if path.exists():
        sizes = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    return Opened(
        source,
        examples,
        as_whole
        or source.max_examples is not None
        or (sizes is not None and sizes <= WHOLE_BYTES),
        files,
        decoding() if is_json else null_removal(examples),
    )


def _is_small(builder: Any, source: SourceConfig) -> bool:
    split = (builder.info.splits or {}).get(source.split)
    return split is not None and 0 < split.num_bytes <= WHOLE_BYTES


def _first_example(examples: Any, source: SourceConfig) -> dict[str, Any]:
    """Return the first example, with all columns. Only reading shows that a file is
    empty or cannot be read.
    """
    first: dict[str, Any] | None = next(iter(examples), None)
    if first is None:
        raise _empty_error(source)
    return first


def _empty_error(source: SourceConfig) -> UserError:
    return UserError(
        f"data set {source.path}, split {source.split!r}: is empty; give a file or a split with rows"
    )


_CHUNK_CHARACTERS = 10 << 20  # of a JSON file; the first ones name its columns

_SPACE = re.compile(r"\s*")


def null_removal(examples: Any) -> Change | None:
    """Return the change that removes the nulls which Arrow may have added to a data set
    or a stream; None: it has added none.
    """
    features = examples.features
    if features is None:
        # Without types, any null may be one of Arrow's, except in Python's own rows.
        return _without_nulls if _from_arrow(examples) else None
    if not any(map(_has_mapping_type, features.values())):
        return None
    return partial(_unpadded, features)


def decoding(columns: Collection[str] | None = None) -> Change:
    """Return the change to values from columns (None: all) of JSON text."""
    return partial(_decoded, columns)


def json_text(values: Sequence[Any]) -> list[str | None]:
    """Return values as JSON text, None as none; TypeError or ValueError if one cannot
    be.
    """
    return [None if value is None else json.dumps(value) for value in values]


def read_as_text(builder: Any) -> None:
    """Let a builder of `datasets` for JSON give each column as JSON text."""
    builder._generate_tables = partial(_tables, builder)


def has_mapping(value: Any) -> bool:
    """Tell whether a value is a mapping, or a list (of lists) whose first is one."""
    if isinstance(value, list | tuple):
        return has_mapping(next((item for item in value if item is not None), None))
    return isinstance(value, Mapping)


def changed(examples: Any, change: Change | None) -> Any:
    """Change the values of a data set or a stream when rows are read, so that they do
    not become Arrow again.
    """
    if change is None:
        return examples

    def changed_block(block: Mapping[str, list]) -> dict[str, list]:
        return {
            name: [change(name, value) for value in values]
            for name, values in block.items()
        }

    def changed_row(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: change(name, value) for name, value in row.items()}

    if isinstance(examples, datasets.Dataset):
        return examples.with_transform(changed_block)
    return examples.map(changed_row)


def _decoded(columns: Collection[str] | None, name: str, value: Any) -> Any:
    is_text = value is not None and (columns is None or name in columns)
    return json.loads(value) if is_text else value


def _without_nulls(_: str, value: Any) -> Any:
    return without_none(value)


def _from_arrow(stream: datasets.IterableDataset) -> bool:
    """Tell whether a stream without types may come from Arrow: it does not if its
    examples are made in Python.
    """
    source = stream._ex_iterable
    while hasattr(source, "ex_iterable"):
        source = source.ex_iterable
    return source.iter_arrow is not None or hasattr(source, "ex_iterables")


def _has_mapping_type(kind: Any) -> bool:
    if isinstance(kind, datasets.List | datasets.LargeList):
        return _has_mapping_type(kind.feature)
    return isinstance(kind, dict)


def _unpadded(kinds: Mapping[str, Any], name: str, value: Any) -> Any:
    """Return a value without nulls of keys that have a value in another mapping."""
    kind = kinds[name]
    if isinstance(value, dict) and isinstance(kind, dict):
        return {
            key: _unpadded(kind, key, item)
            for key, item in value.items()
            if item is not None or kind[key] == datasets.Value("null")
        }
    if isinstance(value, list) and isinstance(kind, datasets.List | datasets.LargeList):
        return [_unpadded({name: kind.feature}, name, item) for item in value]
    return value


def _tables(
    builder: Any, files_iterables: Sequence[Any], **_: Any
) -> Iterator[tuple[Key, pa.Table]]:
    """Yield the rows of files of JSON as tables of JSON text, for a builder of
    `datasets`.
    """
    for number, files in enumerate(files_iterables):
        chunks = (chunk for file in files for chunk in _chunks(file, builder.config))
        for index, rows in enumerate(chunks):
            yield Key(number, index), _table(rows, builder.info.features)


def _table(rows: list[dict[str, Any]], features: datasets.Features | None) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    if features is not None:
        if missing := [name for name in names if name not in features]:
            raise ValueError(
                f"the first examples have no {missing[0]!r}, later ones do; write it,"
                " or null, in the first, too"
            )
        names = dict.fromkeys(features)
    # A value of null is text, an absent one is none.
    columns = {
        name: [json.dumps(row[name]) if name in row else None for row in rows]
        for name in names
    }
    return pa.table(columns, pa.schema([(name, pa.string()) for name in names]))


def _chunks(file: str, config: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file, about `_CHUNK_CHARACTERS` of it at a time."""
    encoding = "utf-8-sig" if config.encoding == "utf-8" else config.encoding
    options = {"encoding": encoding, "errors": config.encoding_errors, "newline": "\n"}
    rows: list[dict[str, Any]] = []
    size = 0
    with xopen(file, "r", **options) as lines:
        for value, length in _values(lines):
            row = {"text": value} if isinstance(value, str) else value
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            rows.append(row)
            size += length
            if size >= _CHUNK_CHARACTERS:
                yield rows
                rows, size = [], 0
    if rows:
        yield rows


def _values(lines: Any) -> Iterator[tuple[Any, int]]:
    """Yield the values of a file, one on each line, with the length of the line; or
    those of a list, or of several lines each.
    """
    is_first, has_blank, is_text = True, False, True
    for line in lines:
        if not line.strip():
            has_blank = True
            continue
        try:
            value = json.loads(line)
        except ValueError:
            if not is_first:
                raise
            value = line
        if is_first and (value is line or isinstance(value, list)):
            yield from _of_many_lines(line + lines.read())
            return
        is_first = False
        is_text &= isinstance(value, dict) and all(
            isinstance(item, str) for item in value.values()
        )
        if has_blank and not is_text:
            raise ValueError("a blank line")
        yield value, len(line)


def _of_many_lines(text: str) -> Iterator[tuple[Any, int]]:
    """Yield the values of a list, or of objects that take several lines."""
    if text.lstrip().startswith("["):
        yield from ((value, 0) for value in json.loads(text))
        return
    position = 0
    while position < len(text):
        begin = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        value, end = json.JSONDecoder().raw_decode(text, begin)
        yield value, end - position
        position = _SPACE.match(text, end).end()  # type: ignore[union-attr]
