"""Load a data set: a hub id, a local folder in hub layout, or one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets

from fcsd.config.data import SourceConfig
from fcsd.data.local import fresh_cache
from fcsd.errors import UserError, one_line


@dataclass(frozen=True)
class GivenSource:
    """Examples that a caller holds, with the keys of a `SourceConfig`. path: what errors call them."""

    path: str
    columns: dict[str, str]
    examples: datasets.Dataset | datasets.IterableDataset
    name: ClassVar[None] = None
    split: ClassVar[None] = None
    weight: ClassVar[float] = 1.0
    max_examples: ClassVar[None] = None


Source = SourceConfig | GivenSource

_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def check_place(source: SourceConfig) -> None:
    """Refuse, before anything is read, a file or folder that is not there, and a split that a file does not have."""
    path = Path(source.path).expanduser()
    if path.is_dir():
        return
    if path.suffix in _FILE_FORMATS:
        if not path.is_file():
            raise UserError(f"data set {source.path}: no such file")
        if not source.split.startswith("train"):
            raise UserError(
                f"data set {source.path}: no split {source.split!r}; a file has the split 'train' only"
            )
    elif path.is_absolute() or source.path.startswith((".", "~")) or source.path.count("/") > 1:
        raise UserError(f"data set {source.path}: no such folder, and not the name of a data set on the Hub")


def load_source(source: Source) -> datasets.Dataset | datasets.IterableDataset:
    """Load the examples of `source`, untouched but for `max_examples`.

    Raises: UserError for a path, configuration or split that is not there, a missing column, no examples.
    """
    examples: datasets.Dataset | datasets.IterableDataset = limited(source, open_source(source))
    return examples


def limited(source: Source, examples: Any) -> Any:
    """Take the first `max_examples`."""
    return examples if source.max_examples is None else examples.take(source.max_examples)


def open_source(source: Source) -> datasets.Dataset | datasets.IterableDataset:
    """Load all examples of `source`; else as `load_source`."""
    if isinstance(source, GivenSource):
        return source.examples
    path = Path(source.path).expanduser()
    check_place(source)
    options: dict[str, Any] = {"split": source.split, "streaming": source.streaming}
    if path.suffix in _FILE_FORMATS and not path.is_dir():
        arguments = (_FILE_FORMATS[path.suffix],)
        options["data_files"] = {"train": str(path)}
    else:
        local = path.is_dir()
        arguments = (str(path) if local else source.path,)
        options |= {"name": source.name, "revision": None if local else source.revision}
    try:
        with fresh_cache(path):
            dataset = datasets.load_dataset(*arguments, **options)
        columns = dataset.column_names
        if columns is None or source.streaming:  # a stream fails, or turns out to be empty, when it is read
            first = next(iter(dataset), None)
            columns = None if first is None else list(first)
    except StopIteration:  # `datasets` 5.2 looks for the first line of an empty file
        columns = None
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # Where `datasets` wraps an error of its reader, that one says more.
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        raise UserError(f"data set {source.path}: {one_line(cause or error)}") from error
    if columns is None or (not source.streaming and len(dataset) == 0):
        raise UserError(f"data set {source.path}, split {source.split!r}: it is empty")
    missing = [column for column in source.columns.values() if column not in columns]
    if missing:
        raise UserError(
            f"data set {source.path}: no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, columns))}; name the right ones under `columns`"
        )
    return dataset


def shard_file(examples: datasets.IterableDataset, shard: int) -> str | None:
    """Return the name of a file of a stream; None where it is not known."""
    arguments = getattr(getattr(examples, "_ex_iterable", None), "kwargs", {})
    for name in ("original_files", "files", "base_files"):
        files = arguments.get(name)
        if isinstance(files, list) and len(files) == examples.num_shards:
            return str(files[shard])
    return None
