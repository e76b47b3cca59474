"""Load a data set: a hub id, a local folder in hub layout, or one file."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets

from fcsd.base.errors import UserError, one_line
from fcsd.base.memory import check_shared_memory
from fcsd.data.columns import column_meanings
from fcsd.data.config import SourceConfig, TextConfig
from fcsd.data.local import (
    FILE_FORMATS,
    check_data,
    fresh_cache,
    is_path,
    making_of,
    scratch,
)
from fcsd.data.values import (
    Change,
    changed,
    decoding,
    null_removal,
    read_as_text,
)


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


def open_source(source: Any) -> Opened:
    """Open `source`, and identify its columns by its first example. Raises as
    `load_source`.
    """
    if isinstance(source, GivenSource):
        return Opened(
            source, source.examples, isinstance(source.examples, datasets.Dataset)
        )
    return _open_at(check_place(source), source)


def _open_at(path: Path, source: SourceConfig) -> Opened:
    check_shared_memory()
    try:
        with fresh_cache(path):
            opened = _open(path, source)
            first = _first_example(opened.examples, source)
            columns = column_meanings(source.path, list(first), source.columns)
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
    if broken := broken_line(path):
        return UserError(f"{name}{broken}")
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
    except RecursionError as error:
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
